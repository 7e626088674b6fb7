"""Collectives and stage links over torch.distributed: NCCL between GPUs, gloo in tests.

Owns torch's default process group. MPI starts it: rank 0 keeps a TCPStore, whose port a world's broadcast tells,
and everybody reaches it where the heartbeat has found rank 0. Loop thread.

The tests run the same calls over gloo, on CPUs: which ranks add up and gather what, who sends to whom, and how a
failure crosses. Only several GPUs can show that NCCL's communicators come up over the machines' network, that
collectives and sends of different communicators overlap on one GPU without harm, that nothing waits for the device
where it should only be queued, and how fast that is.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.ranks.mapping import Mapping
from inflight.ranks.world import World

_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)


class _Word(Protocol):
    """A `StageLink` of CPU tensors: it says ahead of each hidden state whether there is one."""

    def send(self, hidden: Tensor | None) -> None: ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None: ...


class TorchRanks:
    """The process groups of all ranks. Every rank makes one at the same time.

    Args:
        world: All ranks.
        mapping: This rank's place in the model.
        leader_addresses: Where rank 0 is reached; `Peer.leader_address` of this rank's peers.
        device: This rank's.
        backend: nccl or gloo; None: what suits the device.
    """

    def __init__(
        self,
        world: World,
        mapping: Mapping,
        leader_addresses: Sequence[str],
        device: torch.device,
        backend: str | None = None,
    ) -> None:
        self._mapping = mapping
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL takes the current one
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            store=_meet_at_store(world, leader_addresses),
            rank=world.rank,
            world_size=world.size,
        )

    def collectives(self) -> TorchCollectives:
        """Among the ranks that share this stage's layers. Every rank of the world has to make one."""
        tp_size, pp_size = self._mapping.tp_size, self._mapping.pp_size
        groups = [dist.new_group(range(tp_size * stage, tp_size * (stage + 1))) for stage in range(pp_size)]
        return TorchCollectives(groups[self._mapping.pp_rank], tp_size)

    def stage_link(self, word: _Word) -> TorchStageLink:
        """To the stages beside. `word`: such a link between CPUs, which carries nothing else."""
        return TorchStageLink(self._mapping, self._device, word)

    def leave(self) -> None:
        """The orderly end, on every rank at the same time. Not after a loss: it may wait for the lost one."""
        dist.destroy_process_group()


def _meet_at_store(world: World, leader_addresses: Sequence[str]) -> dist.TCPStore:
    if world.rank > 0:
        return _store(leader_addresses[0], int(world.broadcast()), is_master=False)
    is_local = set(leader_addresses) <= {_LOOPBACK}  # a store asks nobody who they are
    with socket.create_server((_LOOPBACK if is_local else "", 0), backlog=world.size) as listening:
        port = listening.getsockname()[1]
        store = _store(_LOOPBACK, port, is_master=True, master_listen_fd=listening.detach())
    world.broadcast(str(port).encode())
    return store


def _store(address: str, port: int, **more: bool | int) -> dist.TCPStore:
    return dist.TCPStore(address, port, wait_for_workers=False, timeout=_STORE_TIMEOUT, **more)


class TorchCollectives:
    """Implements `inflight.engine.torch.collectives.Collectives`."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.size = size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that share this stage's layers, in the tensor's dtype."""
        total = tensor.contiguous()
        dist.all_reduce(total, group=self._group)
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        """By rank, along the last dimension."""
        mine = tensor.contiguous()
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybody, mine, group=self._group)
        return torch.cat(everybody, dim=-1)


class TorchStageLink:
    """Implements `inflight.engine.rank_engine.StageLink`: the same tensor-parallel rank of the stages beside.

    Whether there is a hidden state at all crosses between the CPUs, so that nobody has to wait for the device to
    know it.
    """

    def __init__(self, mapping: Mapping, device: torch.device, word: _Word) -> None:
        self._previous = mapping.rank - mapping.tp_size
        self._next = mapping.rank + mapping.tp_size
        self._device = device
        self._word = word
        self._coming = torch.ones(1, dtype=torch.uint8)
        self._most = mapping.pp_size
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, hidden: Tensor | None) -> None:
        """To the next stage; None: there is none to be had. Waits for none but the send pp_size before it."""
        if hidden is None:
            self._word.send(None)
            return
        while len(self._sending) >= self._most:
            self._sending.popleft()[0].wait()
        self._word.send(self._coming)
        kept = hidden.contiguous()
        self._sending.append((dist.isend(kept, self._next), kept))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """From the stage before; None if that has none. On a GPU it may still be on its way."""
        if self._word.receive((1,), torch.uint8) is None:
            return None
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(hidden, self._previous)
        return hidden
