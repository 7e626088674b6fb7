"""The Linux control groups of this process, of version 1 and 2. Imports only the standard library. Any thread."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A Linux control group (cgroup), which may limit the processor time and memory of its processes.

    Attributes:
        version: 1 or 2; the versions have different file names.
        folder: The group's folder below /sys/fs/cgroup, which may not exist.
    """

    version: int
    folder: Path


def control_groups(controller: str, root: Path = Path("/")) -> list[ControlGroup]:
    """Return the groups of this process that may limit a resource. A group precedes its parents.

    Args:
        controller: Name of the resource's controller, such as cpu or memory.
        root: Folder that contains proc and sys.
    """
    try:
        entries = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    found: list[ControlGroup] = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        group = Path(path.lstrip("/"))
        # In a container the path may be the host's, while the container's group is mounted at the top.
        folders = dict.fromkeys((group, *group.parents))
        if not controllers:
            found += [ControlGroup(2, mount / folder) for folder in folders]
        elif controller in controllers.split(","):
            found += [ControlGroup(1, mount / controller / folder) for folder in folders]
    return found
