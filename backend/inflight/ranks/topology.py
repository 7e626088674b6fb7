"""The topology of ranks: each one's part of the model, its machine, and its share of that machine.

`Mapping` is TensorRT-LLM's of tensor and pipeline parallelism; `Host` is where a rank runs; `Placement` divides a
machine's cores, memory and GPUs among its ranks. Keeps nothing; any thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mapping:
    """One rank of a world. Ranks of a pipeline stage are neighbours, so that a stage may have a node to itself.

    Attributes:
        tp_size: Ranks that share every layer.
        pp_size: Pipeline stages, each with some of the layers.
        rank: 0 .. world_size - 1.
        moe_ep_size: Groups of the `tp_size` ranks, each of which has some of a layer's experts; the ranks of a
            group have slices of these.
    """

    tp_size: int = 1
    pp_size: int = 1
    rank: int = 0
    moe_ep_size: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError unless such a rank exists."""
        for name, size in (("tensor_parallel_size", self.tp_size), ("pipeline_parallel_size", self.pp_size)):
            if size < 1:
                raise ConfigError(f"{name} is {size}, expected at least 1")
        if self.moe_ep_size < 1 or self.tp_size % self.moe_ep_size:
            raise ConfigError(
                f"moe_expert_parallel_size is {self.moe_ep_size}, expected a divisor of tensor_parallel_size, "
                f"{self.tp_size}"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank is {self.rank}, expected 0 to {self.world_size - 1}: tensor_parallel_size {self.tp_size} "
                f"times pipeline_parallel_size {self.pp_size} makes {self.world_size} ranks"
            )

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank: which part of its layers this rank has."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The pipeline stage that this rank is in."""
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank's stage embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank's stage computes the logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def sampler(self) -> int:
        """The rank that chooses tokens, for all: the last stage's first."""
        return self.world_size - self.tp_size

    @property
    def is_sampler(self) -> bool:
        """Whether the rank chooses the tokens."""
        return self.rank == self.sampler

    def layers(self, num_layers: int) -> tuple[int, int]:
        """This stage's first layer and the one behind its last; the first stages have one more where they do not
        divide.

        Raises ConfigError if a stage would have none.
        """
        if num_layers < self.pp_size:
            raise ConfigError(
                f"pipeline_parallel_size is {self.pp_size}, but the model has {num_layers} layers only"
            )
        each, more = divmod(num_layers, self.pp_size)
        begin = self.pp_rank * each + min(self.pp_rank, more)
        return begin, begin + each + (self.pp_rank < more)


def tensor_parallel_sizes(num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[int]:
    """Numbers of ranks that can share every layer: each has whole heads, and an equal slice of the MLP.

    Where there are fewer key heads than ranks, several ranks hold the same one.
    """
    return [
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == 0
        and intermediate_size % size == 0
        and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]


@dataclass(frozen=True, slots=True)
class Host:
    """The machine and process of one rank.

    Attributes:
        name: The machine's host name.
        boot_id: The running kernel's, which no two machines share.
        network: The inode of its network namespace; processes with the same one share all interfaces.
        pid: The rank's process.
        cores: The cores that it may run on.
    """

    name: str
    boot_id: str
    network: int
    pid: int
    cores: tuple[int, ...]

    def shares_machine_with(self, other: Host) -> bool:
        """Whether both have the same cores, memory and GPUs. Containers with host names of their own do not."""
        return (self.name, self.boot_id) == (other.name, other.boot_id)

    def shares_network_with(self, other: Host) -> bool:
        """Whether one reaches the other at 127.0.0.1."""
        return (self.boot_id, self.network) == (other.boot_id, other.network)


def this_host() -> Host:
    """The host of this process."""
    return Host(
        socket.gethostname(),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.stat("/proc/self/ns/net").st_ino,
        os.getpid(),
        tuple(sorted(os.sched_getaffinity(0))),
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """The share of its machine that one rank may use.

    Attributes:
        local_rank: Its number among the ranks of its machine, from 0, in the order of the ranks.
        ranks_on_host: How many ranks its machine has. They share the free memory on the CPU equally.
        num_threads: Threads for the forward pass on the CPU.
    """

    local_rank: int
    ranks_on_host: int
    num_threads: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[Host], engine_threads: int | None = None) -> Placement:
        """The place of `rank`.

        Args:
            rank: 0 .. len(hosts) - 1.
            hosts: By rank.
            engine_threads: Threads for each rank; None: this rank's share of the cores that it may run on. A core
                that several ranks may run on is divided among them; launchers differ in whether they bind ranks
                to cores of their own.
        """
        mine = hosts[rank]
        near = [other for other, host in enumerate(hosts) if host.shares_machine_with(mine)]
        if engine_threads is None:
            users = [sum(core in hosts[other].cores for other in near) for core in mine.cores]
            # The sum of thirds has to reach one.
            engine_threads = max(1, int(sum(1 / count for count in users) + 1e-6))
        return cls(near.index(rank), len(near), engine_threads)

    def device(self, num_gpus: int, gpu_device_ids: Sequence[int] = ()) -> str:
        """This rank's torch device: its own entry of `gpu_device_ids`, without them the GPU of its local rank.

        Args:
            num_gpus: What `torch.cuda.device_count` says here; 0: "cpu".
            gpu_device_ids: One for each rank of the machine, the same on all machines.

        Raises:
            ConfigError: Not every rank gets a GPU of its own.
        """
        if not num_gpus and not gpu_device_ids:
            return "cpu"
        chosen = list(gpu_device_ids) or list(range(num_gpus))
        if len(chosen) < self.ranks_on_host:
            where = "gpu_device_ids" if gpu_device_ids else "the machine"
            raise ConfigError(
                f"{where} has {len(chosen)} GPUs for {self.ranks_on_host} ranks: every rank needs one of its own"
            )
        if len(set(chosen)) < len(chosen):
            raise ConfigError(f"gpu_device_ids is {chosen}: every rank needs a GPU of its own")
        wrong = [index for index in chosen if not 0 <= index < num_gpus]
        if wrong:
            there = f"machine's GPUs are 0 to {num_gpus - 1}" if num_gpus else "machine has no GPU"
            raise ConfigError(f"gpu_device_ids has {wrong[0]}, but the {there}")
        return f"cuda:{chosen[self.local_rank]}"
