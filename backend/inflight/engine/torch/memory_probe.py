"""How much more memory this process may use: the kernel's figure, and the container's limits.

Reads /proc and /sys/fs/cgroup. A container sees its host's /proc/meminfo, so its own limit has to be asked for.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_NO_LIMIT = 2**60  # version 1 writes a huge number where there is no limit


def free_memory(device: torch.device) -> int:
    """Bytes still free on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return available_cpu_memory()


def available_cpu_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory: what is available on the machine, or less if a control group of ours has less left."""
    return min([_machine(root), *_control_groups(root)])


def _machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _control_groups(root: Path) -> list[int]:
    """What is left in our memory control groups and the groups around them, of either version."""
    try:
        entries = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    left = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            left += _left(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left(mount / "memory", path, *names)
    return left


def _left(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    group = Path(path.lstrip("/"))
    # Inside a container the path may be the host's, while its own group is mounted at the top.
    folders = [mount / group, *(mount / parent for parent in group.parents)]
    found = []
    for folder in dict.fromkeys(folders):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            found.append(max(0, limit - usage + _reclaimable(folder / "memory.stat", cache_name)))
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # version 2 writes "max" where there is no limit


def _reclaimable(file: Path, name: str) -> int:
    """Usage counts cached files, such as the checkpoint just read, that the kernel drops when asked for memory."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
