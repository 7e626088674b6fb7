"""MPI: the world of ranks that `mpirun` or `srun` started, and collectives over it. Nothing else imports mpi4py.

MPI's blocking calls spin, so nobody waits here for work to come: a rank calls when the others are on the same
iteration. Loop thread.
"""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from inflight.distributed.mapping import Mapping
from inflight.errors import ConfigError


def world_mapping(tp_size: int, pp_size: int) -> Mapping:
    """This process's place among the ranks that were started; ConfigError if there are not as many as needed."""
    found = MPI.COMM_WORLD.Get_size()
    if found != tp_size * pp_size:
        raise ConfigError(
            f"tp_size {tp_size} times pp_size {pp_size} needs {tp_size * pp_size} ranks, but MPI has {found}"
        )
    return Mapping(tp_size, pp_size, MPI.COMM_WORLD.Get_rank())


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


def _buffer(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory, as bytes where MPI has no such type."""
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint8).numpy()
