"""The topology of ranks: each rank's part of the model, its machine, and its share of that machine.

`Mapping`, as in TensorRT-LLM, is a rank's position in tensor and pipeline parallelism; `Host` is a rank's
machine and process; `Placement` is its share of the machine's cores, memory and GPUs. Stateless; any thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigError
from inflight.processors import Processors


@dataclass(frozen=True, slots=True)
class Mapping:
    """One rank of a world. Ranks of a pipeline stage are consecutive, so that a stage may have a node to itself.

    Attributes:
        tp_size: Number of ranks that share every layer.
        pp_size: Number of pipeline stages, each with some of the layers.
        rank: 0 .. world_size - 1.
        moe_ep_size: Number of groups into which the `tp_size` ranks are divided. Each group has some of a layer's
            experts, and each rank of the group a slice of each of these experts.
    """

    tp_size: int = 1
    pp_size: int = 1
    rank: int = 0
    moe_ep_size: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError unless the sizes and the rank are valid."""
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
        """Number of ranks in total."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank: the index of this rank's slice of its layers."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The index of this rank's pipeline stage."""
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
        """The rank that samples for all: the first of the last stage."""
        return self.world_size - self.tp_size

    @property
    def is_sampler(self) -> bool:
        """Whether this rank samples the tokens."""
        return self.rank == self.sampler

    def layers(self, num_layers: int, first_undivided: int | None = None) -> tuple[int, int]:
        """Return this stage's layers as (first, end).

        Stages have equal numbers of layers; if `num_layers` is not divisible, the first stages have one more.
        Layers from `first_undivided` on, some of which read keys and values of others, are all in the last stage,
        which may thus have more layers than the others. With None any layers may be in different stages.

        Raises ConfigError if a stage would have no layer.
        """
        if num_layers < self.pp_size:
            raise ConfigError(
                f"pipeline_parallel_size is {self.pp_size}, but the model has {num_layers} layers only"
            )
        ends = _ends_of_parts(num_layers, self.pp_size)
        if first_undivided is not None and self.pp_size > 1 and ends[-2] > first_undivided:
            if first_undivided < self.pp_size - 1:
                raise ConfigError(
                    f"pipeline_parallel_size is {self.pp_size}, expected at most {first_undivided + 1}: layers "
                    f"{first_undivided} to {num_layers - 1} must be in one stage, because the last of them read "
                    "keys and values of the others (num_kv_shared_layers)"
                )
            ends = [*_ends_of_parts(first_undivided, self.pp_size - 1), num_layers]
        return ends[self.pp_rank - 1] if self.pp_rank else 0, ends[self.pp_rank]


def _ends_of_parts(count: int, num_parts: int) -> list[int]:
    """Return where each of `num_parts` consecutive parts of `count` items ends; the first parts may have one item
    more than the others."""
    each, more = divmod(count, num_parts)
    return [part * each + min(part, more) for part in range(1, num_parts + 1)]


def tensor_parallel_sizes(num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[int]:
    """Return the possible numbers of ranks that share every layer, each with whole heads and an equal slice of
    the MLP.

    If there are fewer key heads than ranks, several ranks have the same key head.
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
        boot_id: The id of the running kernel, unique to the machine.
        network: The inode of the process's network namespace; processes in one namespace share all interfaces.
        pid: The rank's process id.
        cores: The physical cores on which the process may run.
        quota: Processor time in seconds per second that the process's control groups grant; None: no limit.
    """

    name: str
    boot_id: str
    network: int
    pid: int
    cores: tuple[int, ...]
    quota: float | None = None

    def shares_machine_with(self, other: Host) -> bool:
        """Whether both processes share cores, memory and GPUs. False for containers with different host names."""
        return (self.name, self.boot_id) == (other.name, other.boot_id)

    def shares_network_with(self, other: Host) -> bool:
        """Whether the two processes reach each other at 127.0.0.1."""
        return (self.boot_id, self.network) == (other.boot_id, other.network)


def this_host() -> Host:
    """Return the host of this process."""
    processors = Processors.here()
    return Host(
        socket.gethostname(),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.stat("/proc/self/ns/net").st_ino,
        os.getpid(),
        processors.cores,
        processors.quota,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """The share of its machine that one rank may use.

    Attributes:
        local_rank: The rank's index among the ranks of its machine, from 0, in the order of the ranks.
        ranks_on_host: Number of ranks on the machine, which share its free memory equally.
        num_threads: Number of threads for the forward pass on the CPU.
    """

    local_rank: int
    ranks_on_host: int
    num_threads: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[Host], engine_threads: int | None = None) -> Placement:
        """Return the placement of `rank`.

        Args:
            rank: 0 .. len(hosts) - 1.
            hosts: The hosts, by rank.
            engine_threads: Number of threads per rank; None: this rank's share of the cores on which it may run,
                and of its control groups' quota. A core on which several ranks may run is divided among them, as
                some launchers bind ranks to cores and others do not.
        """
        mine = hosts[rank]
        near = [other for other, host in enumerate(hosts) if host.shares_machine_with(mine)]
        if engine_threads is None:
            users = [sum(core in hosts[other].cores for other in near) for core in mine.cores]
            share = sum(1 / count for count in users)
            if mine.quota is not None:
                share = min(share, mine.quota / len(near))
            engine_threads = max(1, int(share + 1e-6))  # three thirds of a core must count as one
        return cls(near.index(rank), len(near), engine_threads)

    def device(self, num_gpus: int, gpu_device_ids: Sequence[int] = ()) -> str:
        """Return this rank's torch device: its entry in `gpu_device_ids`, or without these the GPU of its local
        rank.

        Args:
            num_gpus: The value of `torch.cuda.device_count`; 0: "cpu".
            gpu_device_ids: The index of a GPU for each rank of a machine, equal on all machines.

        Raises:
            ConfigError: Some rank would get no GPU of its own.
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
