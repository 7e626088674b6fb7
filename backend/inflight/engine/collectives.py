"""Communication of the forward pass between ranks: collectives of a stage, and links between stages.

On CPUs they go over MPI, between GPUs over torch.distributed: NCCL, and gloo in tests. MPI starts torch's process
group, which `TorchCollectives` owns: rank 0 keeps a TCPStore, whose port a broadcast tells, and everybody
reaches it where the heartbeat has found rank 0. Loop thread.

The tests run the same calls over gloo, on CPUs: which ranks add up and gather what, who sends to whom, and how a
failure crosses. Only several GPUs can show that NCCL's communicators come up over the machines' network, that
collectives and sends of different communicators overlap on one GPU without harm, that nothing waits for the device
where it should only be queued, and how fast that is.
"""

from __future__ import annotations

import ctypes
import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from inflight.ranks.mpi import MpiStage, MpiStageLink, MpiWorld
    from inflight.ranks.rank_engine import StageLink
    from inflight.ranks.topology import Mapping

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
_Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed's own


class Collectives(Protocol):
    """Called by every rank's loop thread, in the same order with tensors of the same shapes and dtypes."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def communicator(self) -> Any:
        """The communicator for users other than torch: between GPUs a capsule with NCCL's ncclComm_t, on a
        CPU `self`.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; `tensor` may be written over."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, by rank, one after another along the last dimension."""
        ...


class Alone:
    """The collectives of a stage with one rank."""

    size = 1
    communicator = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`tensor`: there is nothing to add."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """`tensor`: there is nothing to put beside it."""
        return tensor


ALONE = Alone()


class MpiCollectives:
    """`Collectives` for tensors on the CPU.

    MPI knows no bfloat16 and no float16: those are added up in float32.
    """

    def __init__(self, stage: MpiStage) -> None:
        self.size = stage.size
        self.communicator = self
        self._stage = stage

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share this stage's layers."""
        total = tensor.float().contiguous()
        self._stage.all_reduce(total.numpy())
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, by rank, along the last dimension."""
        mine = tensor.contiguous()
        all_ranks = torch.empty((self.size, *mine.shape), dtype=mine.dtype)
        self._stage.all_gather(_bytes_of(mine), _bytes_of(all_ranks))
        return torch.cat(all_ranks.unbind(0), dim=-1)


class TorchCollectives:
    """`Collectives` over torch.distributed, whose process groups it owns. Every rank makes one at the same time.

    Args:
        world: All ranks.
        mapping: This rank's place in the model.
        leader_addresses: Where rank 0 is reached; `Peer.leader_address` of this rank's peers.
        device: This rank's: NCCL connects GPUs, gloo CPUs.
    """

    def __init__(
        self, world: MpiWorld, mapping: Mapping, leader_addresses: Sequence[str], device: torch.device
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL takes the current one
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_meet_at_store(world, leader_addresses),
            rank=world.rank,
            world_size=world.size,
        )
        self.size = size = mapping.tp_size
        groups = [dist.new_group(range(size * stage, size * (stage + 1))) for stage in range(mapping.pp_size)]
        group = groups[mapping.pp_rank]
        assert isinstance(group, dist.ProcessGroup), "only ranks outside of a group get something else"
        self._group = group
        self._device = device

    @property
    def communicator(self) -> Any:
        """As `Collectives.communicator`; every rank asks at the same time."""
        if self._device.type != "cuda":
            return self
        dist.all_reduce(
            torch.zeros(1, device=self._device), group=self._group
        )  # NCCL begins with the first call
        return _capsule(self._group._get_backend(self._device)._comm_ptr())  # pyright: ignore

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share this stage's layers, in the tensor's dtype."""
        total = tensor.contiguous()
        dist.all_reduce(total, group=self._group)
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, by rank, along the last dimension."""
        mine = tensor.contiguous()
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_ranks, mine, group=self._group)
        return torch.cat(all_ranks, dim=-1)

    def leave(self) -> None:
        """The orderly end, on every rank at the same time. Not after a loss: it may wait for the lost one."""
        dist.destroy_process_group()


def _meet_at_store(world: MpiWorld, leader_addresses: Sequence[str]) -> _Store:
    if world.rank > 0:
        return _store(leader_addresses[0], int(world.broadcast()), None)
    is_local = set(leader_addresses) <= {_LOOPBACK}  # a store asks nobody who they are
    with socket.create_server((_LOOPBACK if is_local else "", 0), backlog=world.size) as listening:
        port = listening.getsockname()[1]
        store = _store(_LOOPBACK, port, listening.detach())
    world.broadcast(str(port).encode())
    return store


def _store(address: str, port: int, listening: int | None) -> _Store:
    """A connection to the store, or with a listening socket's descriptor the store itself."""
    return _Store(
        address,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listening,
    )


def join_logits(logits: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """[rows, vocab_size] from every rank's [rows, its part]; the last ranks may have fewer ids, or none."""
    if collectives.size == 1:
        return logits
    widest = -(-vocab_size // collectives.size)
    padded = F.pad(logits, (0, widest - logits.shape[-1]))
    return collectives.all_gather(padded)[..., :vocab_size].contiguous()


def make_stage_link(mapping: Mapping, link: MpiStageLink, example: Tensor) -> StageLink:
    """The link that hands hidden states, [rows, hidden_size], to the next stage.

    Args:
        mapping: This rank's place in the model.
        link: Over MPI, for nothing else.
        example: A tensor with the hidden states' width, dtype and device.
    """
    if example.device.type == "cpu":
        return CpuStageLink(link, example)
    return TorchStageLink(mapping, link, example)


class CpuStageLink:
    """A `StageLink` for hidden states on the CPU."""

    def __init__(self, link: MpiStageLink, example: Tensor) -> None:
        self._link = link
        self._example = example

    def send(self, hidden: Tensor | None) -> None:
        """To the next stage; None: the batch has failed."""
        self._link.send(None if hidden is None else _bytes_of(hidden.contiguous()))

    def receive(self, num_rows: int) -> Tensor | None:
        """From the stage before, [num_rows, hidden_size]; None if the batch has failed there."""
        hidden = self._example.new_empty(num_rows, self._example.shape[-1])
        return hidden if self._link.receive(_bytes_of(hidden)) else None


class TorchStageLink:
    """A `StageLink` for hidden states on a GPU, over torch.distributed.

    Whether there is a hidden state at all crosses between the CPUs, so that nobody has to wait for the device to
    know it.
    """

    def __init__(self, mapping: Mapping, link: MpiStageLink, example: Tensor) -> None:
        self._previous = mapping.rank - mapping.tp_size
        self._next = mapping.rank + mapping.tp_size
        self._most_sends = mapping.pp_size
        self._link = link
        self._example = example
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, hidden: Tensor | None) -> None:
        """To the next stage; None: the batch has failed. Waits for none but the send pp_size before it."""
        if hidden is None:
            self._link.send(None)
            return
        while len(self._sending) >= self._most_sends:
            self._sending.popleft()[0].wait()
        self._link.send(np.ones(1, np.uint8))
        kept = hidden.contiguous()
        work = dist.isend(kept, self._next)
        assert work is not None, "only ranks outside of a group get none"
        self._sending.append((work, kept))

    def receive(self, num_rows: int) -> Tensor | None:
        """From the stage before, [num_rows, hidden_size]; None if the batch has failed there.

        On a GPU it may still be on its way.
        """
        if not self._link.receive(np.empty(1, np.uint8)):
            return None
        hidden = self._example.new_empty(num_rows, self._example.shape[-1])
        dist.recv(hidden, self._previous)
        return hidden


def _capsule(address: int) -> Any:
    """A Python capsule around an address."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
