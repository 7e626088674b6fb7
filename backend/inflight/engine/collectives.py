"""Communication of the forward pass between ranks: collectives of a stage, and links between stages.

CPU tensors go over MPI, GPU tensors over torch.distributed: NCCL, and gloo in tests. `TorchCollectives` owns
torch's process groups. To make the groups, rank 0 creates a TCPStore and broadcasts its port over MPI, and each
other rank connects to the store at the address of rank 0 that its heartbeat uses. Loop thread.

The tests run the same calls over gloo, on CPUs. They check sums, gathered results, senders and receivers, and
failed batches. Only machines with several GPUs can show that NCCL's communicators connect over the network,
that collectives and sends of different communicators may overlap on one GPU, that calls are queued without
waiting for the device, and how fast they are.
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

from inflight.sampling.transfer import as_array

if TYPE_CHECKING:
    from inflight.ranks.mpi import MpiStage, MpiStageLink, MpiWorld
    from inflight.ranks.rank_engine import StageLink
    from inflight.ranks.topology import Mapping

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
_Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed's own


class Collectives(Protocol):
    """Collectives over the ranks of a stage; every rank's loop thread makes the same calls in the same order, with
    tensors of the same shapes and dtypes."""

    @property
    def size(self) -> int:
        """Number of ranks that take part, this one included."""
        ...

    @property
    def communicator(self) -> Any:
        """The communicator for libraries other than torch: on a GPU, a capsule with NCCL's ncclComm_t; on a CPU,
        `self`."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, bitwise equal on each; `tensor` may be overwritten."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, by rank, concatenated along the last dimension."""
        ...


class Alone:
    """The collectives of a stage with one rank."""

    size = 1
    communicator = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, which is the sum over a single rank."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, as there are no other ranks' tensors."""
        return tensor


ALONE = Alone()


class MpiCollectives:
    """`Collectives` for tensors on the CPU.

    MPI has no bfloat16 and float16; tensors of these dtypes are added up in float32.
    """

    def __init__(self, stage: MpiStage) -> None:
        self.size = stage.size
        self.communicator = self
        self._stage = stage

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks that share this stage's layers."""
        total = tensor.float().contiguous()
        self._stage.all_reduce(as_array(total))
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, by rank, concatenated along the last dimension."""
        own_tensor = tensor.contiguous()
        all_ranks = torch.empty((self.size, *own_tensor.shape), dtype=own_tensor.dtype)
        self._stage.all_gather(_bytes_of(own_tensor), _bytes_of(all_ranks))
        return torch.cat(all_ranks.unbind(0), dim=-1)


class TorchCollectives:
    """`Collectives` over torch.distributed, whose process groups it owns. Created on every rank at the same time.

    Args:
        world: The world of all ranks.
        mapping: This rank's position.
        leader_addresses: Addresses of rank 0; `Peer.leader_address` of this rank's peers.
        device: This rank's device: NCCL connects GPUs, gloo CPUs.
    """

    def __init__(
        self, world: MpiWorld, mapping: Mapping, leader_addresses: Sequence[str], device: torch.device
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL uses the current device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_meet_at_store(world, leader_addresses),
            rank=world.rank,
            world_size=world.size,
        )
        self.size = size = mapping.tp_size
        ranks = [range(size * stage, size * (stage + 1)) for stage in range(mapping.pp_size)]
        groups = [dist.new_group(of_stage) for of_stage in ranks]  # pyright: ignore[reportUnknownMemberType]  torch lacks types
        group = groups[mapping.pp_rank]
        assert isinstance(group, dist.ProcessGroup), "this rank belongs to the group"
        self._group = group
        self._device = device

    @property
    def communicator(self) -> Any:
        """See `Collectives.communicator`; called on every rank at the same time."""
        if self._device.type != "cuda":
            return self
        self.all_reduce(torch.zeros(1, device=self._device))  # NCCL is initialized at the first call
        return _capsule(self._group._get_backend(self._device)._comm_ptr())  # pyright: ignore

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks that share this stage's layers, in the tensor's dtype."""
        total = tensor.contiguous()
        dist.all_reduce(total, group=self._group)  # pyright: ignore[reportUnknownMemberType]  torch lacks types
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, by rank, concatenated along the last dimension."""
        own_tensor = tensor.contiguous()
        all_ranks = [torch.empty_like(own_tensor) for _ in range(self.size)]
        dist.all_gather(all_ranks, own_tensor, group=self._group)  # pyright: ignore[reportUnknownMemberType]  torch lacks types
        return torch.cat(all_ranks, dim=-1)

    def leave(self) -> None:
        """Leave the process groups, on every rank at the same time. Not to be called after a rank is lost, as
        it may wait for that rank."""
        dist.destroy_process_group()


def _meet_at_store(world: MpiWorld, leader_addresses: Sequence[str]) -> _Store:
    if world.rank > 0:
        return _store(leader_addresses[0], int(world.broadcast()), None)
    is_local = set(leader_addresses) <= {_LOOPBACK}  # a store does not authenticate its clients
    with socket.create_server((_LOOPBACK if is_local else "", 0), backlog=world.size) as listening:
        port = listening.getsockname()[1]
        store = _store(_LOOPBACK, port, listening.detach())
    world.broadcast(str(port).encode())
    return store


def _store(address: str, port: int, listening: int | None) -> _Store:
    """Connect to rank 0's TCPStore; on rank 0, which passes the descriptor of a `listening` socket, create it."""
    return _Store(
        address,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listening,
    )


def join_logits(logits: Tensor, vocab_size: int, collectives: Collectives) -> Tensor:
    """Return logits [rows, vocab_size], given each rank's [rows, part of the vocabulary]; the parts of the last
    ranks may be smaller, or empty."""
    if collectives.size == 1:
        return logits
    widest = -(-vocab_size // collectives.size)
    padded = F.pad(logits, (0, widest - logits.shape[-1]))
    return collectives.all_gather(padded)[..., :vocab_size].contiguous()


def make_stage_link(mapping: Mapping, link: MpiStageLink, example: Tensor) -> StageLink:
    """Return the link that passes hidden states, [rows, `DecoderConfig.stage_width`], to the next stage.

    Args:
        mapping: This rank's position.
        link: A link over MPI, with which nothing else sends hidden states.
        example: A tensor with the width, dtype and device of the hidden states.
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
        """Send hidden states [rows, width] to the next stage; None: the batch has failed."""
        self._link.send(None if hidden is None else _bytes_of(hidden.contiguous()))

    def receive(self, num_rows: int) -> Tensor | None:
        """Receive [num_rows, width] from the previous stage; None if the batch has failed there."""
        hidden = self._example.new_empty(num_rows, self._example.shape[-1])
        return hidden if self._link.receive(_bytes_of(hidden)) else None


class TorchStageLink:
    """A `StageLink` for hidden states on a GPU, over torch.distributed.

    A message between the CPUs contains whether hidden states follow, so that the receiver need not wait for the
    device to find out.
    """

    def __init__(self, mapping: Mapping, link: MpiStageLink, example: Tensor) -> None:
        self._previous = mapping.rank - mapping.tp_size
        self._next = mapping.rank + mapping.tp_size
        self._most_sends = mapping.pp_size
        self._link = link
        self._example = example
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, hidden: Tensor | None) -> None:
        """Send hidden states [rows, width] to the next stage; None: the batch has failed.
        Waits until the message sent pp_size calls ago has left, and for nothing else.
        """
        if hidden is None:
            self._link.send(None)
            return
        while len(self._sending) >= self._most_sends:
            self._sending.popleft()[0].wait()
        self._link.send(np.ones(1, np.uint8))
        message = hidden.contiguous()
        work = dist.isend(message, self._next)
        assert work is not None, "this rank belongs to the group"
        self._sending.append((work, message))

    def receive(self, num_rows: int) -> Tensor | None:
        """Receive [num_rows, width] from the previous stage; None if the batch has failed there.

        On a GPU the data may still be in transit.
        """
        if not self._link.receive(np.empty(1, np.uint8)):
            return None
        hidden = self._example.new_empty(num_rows, self._example.shape[-1])
        dist.recv(hidden, self._previous)
        return hidden


def _capsule(address: int) -> Any:
    """Return a Python capsule that contains `address`."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a view of a contiguous CPU tensor's memory as bytes."""
    return as_array(tensor.reshape(-1).view(torch.uint8))
