"""MPI: the world of ranks that `mpirun` or `srun` started, and their messages.

The only module that imports mpi4py. Messages are numpy arrays; an engine copies or wraps tensors of devices. MPI's
blocking calls spin, so they are not used to wait for work: a rank calls them when the others are in the same
iteration. Used by one thread at a time: the thread that loads the model, then the loop thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import mpi4py
import numpy as np
from numpy.typing import NDArray

from inflight.errors import ConfigError
from inflight.ranks.launch import SHARED_MEMORY
from inflight.ranks.topology import Mapping

mpi4py.rc.initialize = False  # `MpiWorld` initializes MPI when needed
mpi4py.rc.finalize = False  # finalizing may hang once a rank is lost

from mpi4py import MPI  # noqa: E402 - after the settings that it reads when it is imported

# Size of a broadcast's first part, which is enough for most iterations; longer messages take a second broadcast.
_FIRST_PART_BYTES = 1024
_LENGTH_BYTES = 8
_HIDDEN, _OUTCOME, _GUESSES = 1, 2, 3  # tags
_PART_BYTES = 1 << 30  # MPI counts bytes in 32 bits; a full message is followed by another


class MpiWorld:
    """All ranks that were started together. Every rank makes the same calls in the same order.

    Attributes:
        rank: This rank, 0 .. size - 1.
        size: Number of ranks.
    """

    @staticmethod
    def check_not_left() -> None:
        """Raise ConfigError if this process has left the world before, as MPI can be joined only once."""
        if MPI.Is_finalized():
            raise ConfigError("this process has left MPI, which cannot be entered again: restart the ranks")

    def __init__(self) -> None:
        """Join the world; returns when every rank has joined."""
        if not MPI.Is_initialized():
            _forget_a_folder_of_another_host()
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def mapping(self, tp_size: int, pp_size: int, moe_ep_size: int = 1) -> Mapping:
        """Return this rank's position; raises ConfigError if the number of ranks does not match the sizes."""
        if self.size != tp_size * pp_size:
            needed = tp_size * pp_size
            raise ConfigError(
                f"tensor_parallel_size {tp_size} times pipeline_parallel_size {pp_size} needs {needed} ranks, but "
                f"{self.size} were started together"
            )
        return Mapping(tp_size, pp_size, self.rank, moe_ep_size)

    def broadcast(self, message: bytes = b"") -> bytes:
        """Return rank 0's `message` on every rank."""
        first = bytearray(_FIRST_PART_BYTES)
        room = _FIRST_PART_BYTES - _LENGTH_BYTES
        if self.rank == 0:
            first[:_LENGTH_BYTES] = len(message).to_bytes(_LENGTH_BYTES, "big")
            first[_LENGTH_BYTES : _LENGTH_BYTES + len(message)] = message[:room]
        self._comm.Bcast([first, MPI.BYTE])
        length = int.from_bytes(first[:_LENGTH_BYTES], "big")
        if length <= room:
            return bytes(first[_LENGTH_BYTES : _LENGTH_BYTES + length])
        rest = bytearray(message[room:]) if self.rank == 0 else bytearray(length - room)
        self._comm.Bcast([rest, MPI.BYTE])
        return bytes(first[_LENGTH_BYTES:]) + bytes(rest)

    def broadcast_buffer(self, buffer: memoryview) -> None:
        """Copy the content of rank 0's buffer to every rank's buffer, all of the same length."""
        for begin in range(0, len(buffer), _PART_BYTES):
            self._comm.Bcast(_buffer(buffer[begin : begin + _PART_BYTES]))

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message, by rank. Slower than `broadcast`; used at the start."""
        return self._comm.allgather(message)

    def leave(self) -> None:
        """Leave the world: every rank calls it, and none returns before all have called it."""
        MPI.Finalize()


class MpiStage:
    """The ranks of this rank's pipeline stage, which share all of its layers.

    Attributes:
        size: Number of ranks.
    """

    def __init__(self, mapping: Mapping) -> None:
        """Must be called by every rank of the world at the same time."""
        self._comm = MPI.COMM_WORLD.Split(color=mapping.pp_rank, key=mapping.tp_rank)
        self._barrier_comm = self._comm.Dup()
        self.size = self._comm.Get_size()

    def all_reduce(self, values: NDArray[np.float32]) -> None:
        """Replace every rank's `values`, a contiguous array, by their sum over the stage's ranks."""
        self._comm.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM)

    def all_gather(self, mine: NDArray[np.uint8], all_ranks: NDArray[np.uint8]) -> None:
        """Write every rank's bytes into `all_ranks`, [size, len(mine)], by rank."""
        self._comm.Allgather(mine, all_ranks)

    def barrier(self) -> None:
        """Wait, spinning, until every rank of the stage has made this call; independent of the other
        collectives."""
        self._barrier_comm.Barrier()


class MpiStageLink:
    """Connects ranks of the same tensor-parallel index: neighboring pipeline stages, and the last stage with all
    others.

    Messages arrive in order.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._comm = MPI.COMM_WORLD
        self._previous = mapping.rank - mapping.tp_size
        self._next = mapping.rank + mapping.tp_size
        *self._earlier, self._last = range(mapping.tp_rank, mapping.world_size, mapping.tp_size)
        self._sending: list[tuple[MPI.Request, NDArray[np.uint8]]] = []

    def send(self, message: NDArray[np.uint8] | None) -> None:
        """Send bytes to the next stage, or None if the batch failed. Does not wait until they are received.

        `message` must not change afterwards.
        """
        self._send(np.empty(0, np.uint8) if message is None else message, self._next, _HIDDEN)

    def receive(self, message: NDArray[np.uint8]) -> bool:
        """Fill `message` with the bytes sent by the previous stage; return False if it has sent None."""
        status = MPI.Status()
        self._comm.Recv([message, MPI.BYTE], source=self._previous, tag=_HIDDEN, status=status)
        return status.Get_count(MPI.BYTE) > 0

    def send_guesses(self, token_ids: Sequence[int]) -> None:
        """Send a batch's draft tokens from the last stage to the earlier ones; none: the batch has failed.

        Does not wait until they are received.
        """
        message = np.array(token_ids, np.int64).view(np.uint8)
        for rank in self._earlier:
            self._send(message, rank, _GUESSES)

    def receive_guesses(self, count: int) -> list[int]:
        """Receive `count` draft tokens in an earlier stage; none if the batch has failed in the last one."""
        message, status = np.empty(count, np.int64), MPI.Status()
        self._comm.Recv([message.view(np.uint8), MPI.BYTE], source=self._last, tag=_GUESSES, status=status)
        return message.tolist() if status.Get_count(MPI.BYTE) else []

    def _send(self, message: NDArray[np.uint8], rank: int, tag: int) -> None:
        self._sending = [(request, buffer) for request, buffer in self._sending if not request.Test()]
        self._sending.append((self._comm.Isend([message, MPI.BYTE], dest=rank, tag=tag), message))


class MpiOutcomes:
    """Messages from one rank, the sender, to all others, in order."""

    def __init__(self, sender: int) -> None:
        self._comm = MPI.COMM_WORLD
        self._sender = sender
        self._receivers = [rank for rank in range(self._comm.Get_size()) if rank != sender]
        self._sending: deque[list[MPI.Request]] = deque()

    def send_outcome(self, outcome: bytes) -> None:
        """Send a message to all other ranks, without waiting until it is received. Called by the sender only."""
        whole = memoryview(outcome)
        parts = [whole[begin : begin + _PART_BYTES] for begin in range(0, len(outcome) + 1, _PART_BYTES)]
        self._sending.append(  # a request keeps its buffer alive
            [
                self._comm.Isend(_buffer(part), dest=rank, tag=_OUTCOME)
                for rank in self._receivers
                for part in parts
            ]
        )

    def wait_sent(self) -> None:
        """Wait until the oldest message for which this was not called yet is sent to all ranks.

        The sender calls it once for each sent message, because MPI may send the rest of a message only while this
        process is in a call of MPI.
        """
        MPI.Request.Waitall(self._sending.popleft())

    def receive_outcome(self) -> bytes:
        """Receive the sender's next message. Called by all other ranks, once for each message."""
        outcome = bytearray()
        while True:
            status = MPI.Status()
            message = self._comm.Mprobe(source=self._sender, tag=_OUTCOME, status=status)
            part = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([part, MPI.BYTE])
            outcome += part
            if len(part) < _PART_BYTES:
                return bytes(outcome)


def _buffer(part: memoryview) -> Any:
    return [part, MPI.BYTE]  # mpi4py's types do not include memoryview


def _forget_a_folder_of_another_host() -> None:
    """Unset the variable of the shared-memory folder if mpirun has copied it from another host, where the
    folder is; otherwise ranks would fall back to TCP."""
    if not os.path.isdir(os.environ.get(SHARED_MEMORY, "/")):
        del os.environ[SHARED_MEMORY]
