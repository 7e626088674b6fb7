"""What one rank may take of the machine that it shares with others: cores, memory, a GPU. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.ranks.hosts import Host


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's place on its machine.

    Attributes:
        local_rank: Its number among the ranks of its machine, from 0, in the order of the ranks.
        ranks_on_host: How many those are. The free memory on the CPU is to be shared by as many.
        num_threads: Threads for the forward pass on the CPU.
    """

    local_rank: int
    ranks_on_host: int
    num_threads: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[Host], engine_threads: int | None = None) -> Placement:
        """Where `rank` is.

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
        self._check(chosen, num_gpus, "gpu_device_ids" if gpu_device_ids else "the machine")
        return f"cuda:{chosen[self.local_rank]}"

    def _check(self, chosen: list[int], num_gpus: int, where: str) -> None:
        if len(chosen) < self.ranks_on_host:
            raise ConfigError(
                f"{where} has {len(chosen)} GPUs for {self.ranks_on_host} ranks: every rank needs one of its own"
            )
        if len(set(chosen)) < len(chosen):
            raise ConfigError(f"gpu_device_ids is {chosen}: every rank needs a GPU of its own")
        wrong = [index for index in chosen if not 0 <= index < num_gpus]
        if wrong:
            there = f"machine's GPUs are 0 to {num_gpus - 1}" if num_gpus else "machine has no GPU"
            raise ConfigError(f"gpu_device_ids has {wrong[0]}, but the {there}")
