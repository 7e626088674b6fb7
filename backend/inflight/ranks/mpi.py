"""MPI: the world of ranks that `mpirun` or `srun` started, and what they say to each other.

Nothing else imports mpi4py. MPI's blocking calls spin, so nobody waits here for work to come: a rank calls when
the others are on the same iteration. One thread at a time: the one that loads the model, then the loop's.
"""

from __future__ import annotations

import os
from collections import deque

import mpi4py
import numpy as np
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.ranks.mapping import Mapping
from inflight.ranks.open_mpi import SHARED_MEMORY

mpi4py.rc.initialize = False  # `MpiWorld` does, when its time has come
mpi4py.rc.finalize = False  # it may hang once a rank is lost

from mpi4py import MPI  # noqa: E402 - after what it reads when it is imported

# Of a broadcast; what most iterations have to say fits, and longer messages take a second one.
_FIRST_PART_BYTES = 1024
_LENGTH_BYTES = 8
_HIDDEN, _OUTCOME = 1, 2  # tags
_PART_BYTES = 1 << 30  # MPI counts bytes in 32 bits; a full message is followed by another


class MpiWorld:
    """All ranks that were started together.

    Attributes:
        rank: This one.
        size: How many there are.
    """

    def __init__(self) -> None:
        """Join: returns when every rank has."""
        if not MPI.Is_initialized():
            _forget_a_folder_of_another_host()
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def mapping(self, tp_size: int, pp_size: int) -> Mapping:
        """This rank's place in the model; ConfigError if there are not as many ranks as needed."""
        if self.size != tp_size * pp_size:
            needed = tp_size * pp_size
            raise ConfigError(
                f"tensor_parallel_size {tp_size} times pipeline_parallel_size {pp_size} needs {needed} ranks, but "
                f"{self.size} were started together"
            )
        return Mapping(tp_size, pp_size, self.rank)

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

    def all_gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank. For the start: it takes its time."""
        return self._comm.allgather(message)

    def leave(self) -> None:
        """The orderly end: every rank calls it, and none returns before."""
        MPI.Finalize()


class MpiCollectives:
    """Implements `inflight.engine.torch.collectives.Collectives` for tensors on the CPU.

    MPI knows no bfloat16 and no float16: those are added up in float32.
    """

    def __init__(self, mapping: Mapping) -> None:
        """Every rank of the world has to make one, at the same time."""
        self._comm = MPI.COMM_WORLD.Split(color=mapping.pp_rank, key=mapping.tp_rank)
        self.size = self._comm.Get_size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share this stage's layers."""
        total = tensor.float().contiguous()
        self._comm.Allreduce(MPI.IN_PLACE, _buffer(total), op=MPI.SUM)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """By rank, along the last dimension."""
        mine = tensor.contiguous()
        everybody = torch.empty((self.size, *mine.shape), dtype=mine.dtype)
        self._comm.Allgather(_buffer(mine), _buffer(everybody))
        return torch.cat(everybody.unbind(0), dim=-1)


class MpiStageLink:
    """Implements `inflight.engine.rank_engine.StageLink` between the same tensor-parallel ranks of stages."""

    def __init__(self, mapping: Mapping) -> None:
        self._comm = MPI.COMM_WORLD
        self._previous = mapping.rank - mapping.tp_size
        self._next = mapping.rank + mapping.tp_size
        self._sending: list[tuple[MPI.Request, Tensor]] = []

    def send(self, hidden: Tensor | None) -> None:
        """To the next stage; None: there is none to be had. Does not wait for it to be taken."""
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        kept = torch.empty(0) if hidden is None else hidden.contiguous()
        self._sending.append((self._comm.Isend(_bytes_of(kept), dest=self._next, tag=_HIDDEN), kept))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """From the stage before; None if that has none."""
        hidden = torch.empty(shape, dtype=dtype)
        status = MPI.Status()
        self._comm.Recv(_bytes_of(hidden), source=self._previous, tag=_HIDDEN, status=status)
        return hidden if status.Get_count(MPI.BYTE) else None


class MpiStageMates:
    """Implements `inflight.engine.rank_engine.StageMates`, beside whatever else they say to each other."""

    def __init__(self, mapping: Mapping) -> None:
        """Every rank of the world has to make one, at the same time."""
        self._comm = MPI.COMM_WORLD.Split(color=mapping.pp_rank, key=mapping.tp_rank)

    def meet(self) -> None:
        """Spins until all are here."""
        self._comm.Barrier()


class MpiOutcomes:
    """Implements `inflight.engine.rank_engine.Outcomes`: one rank tells all others, in order."""

    def __init__(self, teller: int) -> None:
        self._comm = MPI.COMM_WORLD
        self._teller = teller
        self._hearers = [rank for rank in range(self._comm.Get_size()) if rank != teller]
        self._sending: deque[list[MPI.Request]] = deque()

    def tell(self, outcome: bytes) -> None:
        """Does not wait for anybody to hear it."""
        whole = memoryview(outcome)
        parts = [whole[begin : begin + _PART_BYTES] for begin in range(0, len(outcome) + 1, _PART_BYTES)]
        self._sending.append(  # a request keeps its buffer alive
            [
                self._comm.Isend([part, MPI.BYTE], dest=rank, tag=_OUTCOME)
                for rank in self._hearers
                for part in parts
            ]
        )

    def settle(self) -> None:
        """Wait until all have the oldest: what is left unsent waits for this process to call MPI again."""
        MPI.Request.Waitall(self._sending.popleft())

    def hear(self) -> bytes:
        """The next one."""
        outcome = bytearray()
        while True:
            status = MPI.Status()
            message = self._comm.Mprobe(source=self._teller, tag=_OUTCOME, status=status)
            part = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([part, MPI.BYTE])
            outcome += part
            if len(part) < _PART_BYTES:
                return bytes(outcome)


def _forget_a_folder_of_another_host() -> None:
    """mpirun hands its environment on to every host, and ranks that share no memory would use TCP."""
    if not os.path.isdir(os.environ.get(SHARED_MEMORY, "/")):
        del os.environ[SHARED_MEMORY]


def _buffer(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory, as bytes where MPI has no such type."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint8).numpy()


def _bytes_of(tensor: Tensor) -> list[object]:
    return [tensor.reshape(-1).view(torch.uint8).numpy(), MPI.BYTE]
