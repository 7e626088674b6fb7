"""Keeps ranks in lockstep: one broadcast per iteration contains its input; a wake-up precedes the first broadcast.

Implements `inflight.core.ports.Ranks` with a world's broadcast and the heartbeat. Owns the encoding of the shared
inputs; adapters and prompt tables follow the message as raw buffers. MPI's blocking calls spin, so an idle rank
waits at the heartbeat's socket instead, and enters the broadcast only when the others are about to. Loop thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inflight.core.request.request import IterationInput
from inflight.ranks.heartbeat import Heartbeat
from inflight.raw_buffers import BufferedDecoder, BufferedEncoder

if TYPE_CHECKING:
    from inflight.ranks.mpi import MpiWorld

_END = b""


class Lockstep:
    """One rank's implementation of `inflight.core.ports.Ranks`.

    Reports this rank's progress to the heartbeat.
    """

    def __init__(self, world: MpiWorld, heartbeat: Heartbeat) -> None:
        self._world = world
        self._heartbeat = heartbeat
        self._next_iteration = 0
        self._encoder = BufferedEncoder()
        self._decoder: BufferedDecoder[IterationInput] = BufferedDecoder(IterationInput)

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0."""
        return self._world.rank == 0

    def advance(self) -> None:
        """Record that all iterations before the one that the loop begins now, which may not be shared, have
        ended."""
        self._heartbeat.iteration = self._next_iteration

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """Wake the other ranks if necessary, and broadcast `inputs`."""
        self._begin(inputs.iteration)
        message, buffers = self._encoder.encode(inputs)
        self._broadcast(message, are_asleep)
        for buffer in buffers:
            self._world.broadcast_buffer(buffer)

    def end(self, are_asleep: bool) -> None:
        """Wake the other ranks if necessary, and broadcast that no inputs follow."""
        self._broadcast(_END, are_asleep)

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """Return rank 0's next input, or None at the end; if `is_asleep`, first wait until rank 0 wakes this
        rank."""
        self.advance()
        self._heartbeat.check()
        if is_asleep:
            self._heartbeat.wait()
        message = self._world.broadcast()
        if message == _END:
            return None
        inputs, buffers = self._decoder.decode(message)
        for buffer in buffers:
            self._world.broadcast_buffer(buffer)
        self._begin(inputs.iteration)
        return inputs

    def _begin(self, iteration: int) -> None:
        self._heartbeat.iteration = iteration
        self._next_iteration = iteration + 1

    def _broadcast(self, message: bytes, are_asleep: bool) -> None:
        self._heartbeat.check()
        if are_asleep:
            self._heartbeat.wake()
        self._world.broadcast(message)
