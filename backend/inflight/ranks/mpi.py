"""MPI: the world of ranks that `mpirun` or `srun` started, and what they send each other.

Nothing else imports mpi4py. Arrays are numpy's: what a device keeps elsewhere, its engine copies or wraps. MPI's
blocking calls spin, so nobody waits here for work to come: a rank calls when the others are on the same iteration.
One thread at a time: the one that loads the model, then the loop's.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import mpi4py
import numpy as np
from numpy.typing import NDArray

from inflight.errors import ConfigError
from inflight.ranks.launch import SHARED_MEMORY
from inflight.ranks.topology import Mapping

mpi4py.rc.initialize = False  # `MpiWorld` does, when its time has come
mpi4py.rc.finalize = False  # it may hang once a rank is lost

from mpi4py import MPI  # noqa: E402 - after what it reads when it is imported

# Of a broadcast; what most iterations have to say fits, and longer messages take a second one.
_FIRST_PART_BYTES = 1024
_LENGTH_BYTES = 8
_HIDDEN, _OUTCOME = 1, 2  # tags
_PART_BYTES = 1 << 30  # MPI counts bytes in 32 bits; a full message is followed by another


class MpiWorld:
    """All ranks that were started together. Every rank makes the same calls in the same order.

    Attributes:
        rank: This one, 0 .. size - 1.
        size: How many there are.
    """

    @staticmethod
    def check_not_left() -> None:
        """Raise ConfigError if this process was in the world before: MPI takes nobody twice."""
        if MPI.Is_finalized():
            raise ConfigError("this process has left MPI, which takes nobody twice: start the ranks again")

    def __init__(self) -> None:
        """Join: returns when every rank has."""
        if not MPI.Is_initialized():
            _forget_a_folder_of_another_host()
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def mapping(self, tp_size: int, pp_size: int, moe_ep_size: int = 1) -> Mapping:
        """This rank's place in the model; ConfigError if there are not as many ranks as needed."""
        if self.size != tp_size * pp_size:
            needed = tp_size * pp_size
            raise ConfigError(
                f"tensor_parallel_size {tp_size} times pipeline_parallel_size {pp_size} needs {needed} ranks, but "
                f"{self.size} were started together"
            )
        return Mapping(tp_size, pp_size, self.rank, moe_ep_size)

    def broadcast(self, message: bytes = b"") -> bytes:
        """Rank 0's `message`, on every rank."""
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
        """Give every rank's buffer, of the same length, what rank 0's holds."""
        for begin in range(0, len(buffer), _PART_BYTES):
            self._comm.Bcast(_buffer(buffer[begin : begin + _PART_BYTES]))

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank. Slower than `broadcast`: for the start."""
        return self._comm.allgather(message)

    def leave(self) -> None:
        """The orderly end: every rank calls it, and none returns before all have."""
        MPI.Finalize()


class MpiStage:
    """The ranks that share this rank's pipeline stage, and with it every one of its layers.

    Attributes:
        size: How many there are.
    """

    def __init__(self, mapping: Mapping) -> None:
        """Every rank of the world has to make one, at the same time."""
        self._comm = MPI.COMM_WORLD.Split(color=mapping.pp_rank, key=mapping.tp_rank)
        self._barrier_comm = self._comm.Dup()
        self.size = self._comm.Get_size()

    def all_reduce(self, values: NDArray[np.float32]) -> None:
        """Put the sum over the stage's ranks in the place of every rank's `values`, a contiguous array."""
        self._comm.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM)

    def all_gather(self, mine: NDArray[np.uint8], all_ranks: NDArray[np.uint8]) -> None:
        """Write every rank's bytes, [size, len(mine)], into `all_ranks`, by rank."""
        self._comm.Allgather(mine, all_ranks)

    def barrier(self) -> None:
        """Wait, spinning, until every rank of the stage has called this as often; other calls do not count."""
        self._barrier_comm.Barrier()


class MpiStageLink:
    """Connects the same tensor-parallel rank of neighbouring pipeline stages. What is sent arrives in order."""

    def __init__(self, mapping: Mapping) -> None:
        self._comm = MPI.COMM_WORLD
        self._previous = mapping.rank - mapping.tp_size
        self._next = mapping.rank + mapping.tp_size
        self._sending: list[tuple[MPI.Request, NDArray[np.uint8]]] = []

    def send(self, message: NDArray[np.uint8] | None) -> None:
        """Send bytes to the next stage, or that there are none. Does not wait until they are received.

        `message` must not change afterwards.
        """
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        kept = np.empty(0, np.uint8) if message is None else message
        self._sending.append((self._comm.Isend([kept, MPI.BYTE], dest=self._next, tag=_HIDDEN), kept))

    def receive(self, message: NDArray[np.uint8]) -> bool:
        """Fill `message` with what the stage before has sent; False if that had none."""
        status = MPI.Status()
        self._comm.Recv([message, MPI.BYTE], source=self._previous, tag=_HIDDEN, status=status)
        return status.Get_count(MPI.BYTE) > 0


class MpiOutcomes:
    """Messages from one rank, the teller, to all others, in order."""

    def __init__(self, teller: int) -> None:
        self._comm = MPI.COMM_WORLD
        self._teller = teller
        self._hearers = [rank for rank in range(self._comm.Get_size()) if rank != teller]
        self._sending: deque[list[MPI.Request]] = deque()

    def tell(self, outcome: bytes) -> None:
        """Send a message to all others. The teller alone calls it; does not wait for anybody to hear it."""
        whole = memoryview(outcome)
        parts = [whole[begin : begin + _PART_BYTES] for begin in range(0, len(outcome) + 1, _PART_BYTES)]
        self._sending.append(  # a request keeps its buffer alive
            [
                self._comm.Isend(_buffer(part), dest=rank, tag=_OUTCOME)
                for rank in self._hearers
                for part in parts
            ]
        )

    def settle(self) -> None:
        """Wait until all have the oldest message that is not settled; the teller calls it once for each `tell`.

        What is left unsent waits for this process to call MPI again.
        """
        MPI.Request.Waitall(self._sending.popleft())

    def hear(self) -> bytes:
        """Wait for the teller's next message. All others call it, once for each `tell`."""
        outcome = bytearray()
        while True:
            status = MPI.Status()
            message = self._comm.Mprobe(source=self._teller, tag=_OUTCOME, status=status)
            part = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([part, MPI.BYTE])
            outcome += part
            if len(part) < _PART_BYTES:
                return bytes(outcome)


def _buffer(part: memoryview) -> Any:
    return [part, MPI.BYTE]  # mpi4py's types know no memoryview


def _forget_a_folder_of_another_host() -> None:
    """mpirun hands its environment on to every host, and ranks that share no memory would use TCP."""
    if not os.path.isdir(os.environ.get(SHARED_MEMORY, "/")):
        del os.environ[SHARED_MEMORY]
