"""The ranks in step: one broadcast an iteration says what enters it, and a wake byte goes ahead of the first.

Implements `inflight.core.ports.Ranks` over a world's broadcast and the heartbeat. Owns the encoding of what is
shared. MPI's blocking calls spin; therefore a rank with nothing to do waits at the heartbeat's socket instead, and
is in the broadcast only while the others are about to be. Loop thread.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from inflight.core.request.request import IterationInput
from inflight.ranks.world import World

_END = b""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(IterationInput)


class Waking(Protocol):
    """What this asks of a heartbeat; every method raises Unavailable once a rank is known to be lost."""

    def check(self) -> None:
        """Nothing else."""

    def wake(self) -> None:
        """Rank 0: let `wait` return once on every other rank."""

    def wait(self) -> None:
        """The others: until woken."""


class InStep:
    """One rank's part. Its methods follow `inflight.core.ports.Ranks`."""

    def __init__(self, world: World, heartbeat: Waking) -> None:
        self._world = world
        self._heartbeat = heartbeat

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self._world.rank == 0

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """Wake the others if need be, and tell them `inputs`."""
        self._tell(_ENCODER.encode(inputs), are_asleep)

    def end(self, are_asleep: bool) -> None:
        """Wake the others if need be, and tell them that nothing follows."""
        self._tell(_END, are_asleep)

    def _tell(self, message: bytes, are_asleep: bool) -> None:
        self._heartbeat.check()
        if are_asleep:
            self._heartbeat.wake()
        self._world.broadcast(message)

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """What rank 0 tells next, None at the end; with `is_asleep` only after it has woken this rank."""
        self._heartbeat.check()
        if is_asleep:
            self._heartbeat.wait()
        message = self._world.broadcast()
        return None if message == _END else _DECODER.decode(message)
