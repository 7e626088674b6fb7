"""The processors that this process may use, and the best number of threads for a computation on them.

The number is limited by the affinity mask (taskset, cpusets), the physical cores of the processors in the
mask, and the quota of the control groups (docker run --cpus, limits of Kubernetes). Imports only the
standard library. Any thread.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from inflight.control_groups import ControlGroup, control_groups


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that this process may use.

    Attributes:
        cpus: Numbers of the processors in the affinity mask, ascending.
        cores: The physical cores of these processors, ascending. A core's number is the lowest of its
            processors' numbers.
        quota: Seconds of processor time per second that the control groups grant; None: no limit.
    """

    cpus: tuple[int, ...]
    cores: tuple[int, ...]
    quota: float | None = None

    @classmethod
    def here(cls, root: Path = Path("/")) -> Processors:
        """Return the processors of this process. `root` is the folder that contains proc and sys."""
        cpus = sorted(os.sched_getaffinity(0))
        cores = sorted({_core(root, cpu) for cpu in cpus})
        quotas = [quota for group in control_groups("cpu", root) if (quota := _quota(group)) is not None]
        return cls(tuple(cpus), tuple(cores), min(quotas, default=None))

    @property
    def num_threads(self) -> int:
        """Number of threads for one computation: one for each core, but no more than the quota allows."""
        return max(1, int(min(len(self.cores), self.capacity)))

    @property
    def capacity(self) -> float:
        """Largest processor time that this process can use, in seconds per second."""
        return len(self.cpus) if self.quota is None else min(len(self.cpus), self.quota)

    def __str__(self) -> str:
        of_cores = f" on {len(self.cores)} cores" if len(self.cores) < len(self.cpus) else ""
        granted = (
            "" if self.capacity == len(self.cpus) else f", of which control groups grant {self.capacity:.1f}"
        )
        return f"{len(self.cpus)} processors{of_cores}{granted}"


def _core(root: Path, cpu: int) -> int:
    """Return the lowest number of the processors on a processor's core."""
    try:
        siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return cpu
    lowest = re.match(r"\d+", siblings)  # of "0,8" or "0-1"
    return cpu if lowest is None else int(lowest[0])


def _quota(group: ControlGroup) -> float | None:
    names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = " ".join((group.folder / name).read_text() for name in names).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such group, or "max"
        return None
