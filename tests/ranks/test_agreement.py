"""Steps of a load that succeed on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inflight.errors import ConfigError
from inflight.ranks.rank_context import Agreement
from tests.ranks.thread_world import make_worlds, on_all

Step = Callable[[Agreement, int], object]


def outcomes(*steps: Step, size: int = 3) -> list[object]:
    """Return each rank's outcome of its steps: the last one's result, or the text of a ConfigError."""
    worlds = make_worlds(size)

    def load(rank: int) -> object:
        agreement, result = Agreement(worlds[rank]), None
        try:
            for step in steps:
                with agreement.step():
                    result = step(agreement, rank)
        except ConfigError as error:
            return str(error)
        return result

    return on_all(size, load)


def fails_on(*ranks: int, error: Exception | None = None) -> Step:
    def step(agreement: Agreement, rank: int) -> str:
        if rank in ranks:
            raise error or ConfigError("no room")
        return "done"

    return step


def test_steps_that_succeed_on_all_ranks_continue():
    assert outcomes(fails_on(), fails_on()) == ["done"] * 3


def test_a_rank_that_fails_stops_all_and_is_named():
    assert outcomes(fails_on(), fails_on(1), fails_on()) == ["rank 1 of 3: no room"] * 3


def test_an_error_that_all_ranks_raise_is_reported_once():
    assert outcomes(fails_on(0, 1, 2)) == ["no room"] * 3


def test_an_error_of_any_kind_is_reported():
    assert (
        outcomes(fails_on(2, error=MemoryError("all of it"))) == ["rank 2 of 3: MemoryError: all of it"] * 3
    )


def test_ranks_agree_on_the_minimum():
    assert outcomes(lambda agreement, rank: agreement.least(10 - rank)) == [8] * 3


def test_a_rank_that_fails_before_the_minimum_does_not_block_others():
    def step(agreement: Agreement, rank: int) -> int:
        if rank == 1:
            raise ConfigError("too little memory")
        return agreement.least(rank)

    assert outcomes(step, fails_on()) == ["rank 1 of 3: too little memory"] * 3


def test_a_rank_that_fails_after_the_minimum_does_not_block_others():
    def step(agreement: Agreement, rank: int) -> int:
        least = agreement.least(rank)
        if rank == 2:
            raise ConfigError("allocated in vain")
        return least

    assert outcomes(step) == ["rank 2 of 3: allocated in vain"] * 3


def test_the_error_of_the_first_failed_rank_is_the_cause():
    worlds = make_worlds(2)

    def load(rank: int) -> str:
        with pytest.raises(ConfigError) as raised, Agreement(worlds[rank]).step():
            fails_on(0, error=OSError("gone"))(None, rank)
        return type(raised.value.__context__).__name__

    assert on_all(2, load) == ["OSError", "NoneType"]
