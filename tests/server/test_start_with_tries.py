"""Failed starts are repeated, up to a number of attempts."""

from __future__ import annotations

import pytest

from inflight.server.errors import ServeError, Starved
from inflight.server.launch import start_with_tries


class Starts:
    """Starts that fail with these errors, one after another, and then succeed."""

    def __init__(self, *errors: ServeError) -> None:
        self._errors = list(errors)
        self.num_tries = 0
        self.seen: list[ServeError] = []

    def run(self, most_tries: int, after_any_failure: bool = False) -> str:
        return start_with_tries(self._start, most_tries, after_any_failure, self.seen.append)

    def _start(self) -> str:
        self.num_tries += 1
        if self._errors:
            raise self._errors.pop(0)
        return "ready"


def test_a_starved_start_is_repeated() -> None:
    errors = Starved("1"), Starved("2")
    starts = Starts(*errors)
    assert starts.run(3) == "ready"
    assert starts.seen == [*errors]


def test_the_last_failure_is_raised_after_the_last_attempt() -> None:
    starts = Starts(*(Starved(str(number)) for number in range(5)))
    with pytest.raises(Starved, match="2"):
        starts.run(3)
    assert starts.num_tries == 3 and len(starts.seen) == 2


@pytest.mark.parametrize("most_tries", [0, 1])
def test_without_repeats_the_first_failure_is_raised(most_tries: int) -> None:
    starts = Starts(Starved("no time"))
    with pytest.raises(Starved):
        starts.run(most_tries)
    assert starts.num_tries == 1 and not starts.seen


def test_other_failures_are_repeated_only_on_request() -> None:
    starts = Starts(ServeError("a wrong option"))
    with pytest.raises(ServeError, match="wrong option"):
        starts.run(3)
    assert Starts(ServeError("the port is taken")).run(3, after_any_failure=True) == "ready"
