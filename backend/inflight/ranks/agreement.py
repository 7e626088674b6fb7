"""Loading together: either every rank has done a step, or every rank raises the same ConfigError.

A rank that fails on its own would leave the others waiting in MPI for ever. So each step ends in one exchange, in
which also a rank takes part whose step failed early. On the thread that loads the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from inflight.errors import ConfigError
from inflight.ranks.world import World


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank says: a number, or why it failed."""

    number: int = 0
    error: str = ""


class Agreement:
    """Every rank makes the same calls in the same order, as far as it gets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: ConfigError | None = None  # to every rank

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what may fail on some ranks: raises ConfigError on all of them then."""
        try:
            yield
        except Exception as error:
            if error is self._known:
                raise
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self._exchange(_Word(error=text))
        else:
            self._exchange(_Word())

    def least(self, number: int) -> int:
        """Inside of a step: the least of all ranks' numbers; raises ConfigError if a rank's step has failed."""
        return min(word.number for word in self._exchange(_Word(number)))

    def _exchange(self, word: _Word) -> list[_Word]:
        said = self._world.all_gather(msgspec.msgpack.encode(word))
        words = [msgspec.msgpack.decode(one, type=_Word) for one in said]
        if any(one.error for one in words):
            self._known = ConfigError(_summary([one.error for one in words]))
            raise self._known
        return words


def _summary(errors: Sequence[str]) -> str:
    """One text of all ranks' errors, "" standing for none: what many have in common is said once."""
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if len(failed) == len(errors) and len(set(errors)) == 1:
        return errors[0]
    return "; ".join(f"rank {rank} of {len(errors)}: {text}" for rank, text in failed.items())
