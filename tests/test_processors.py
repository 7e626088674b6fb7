"""The processors that a process may use, from fake /proc and /sys, and its control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from inflight.control_groups import control_groups
from inflight.processors import Processors


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture(autouse=True)
def affinity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(getattr(request, "param", range(8))))


def siblings(*of_cpus: str) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text
        for cpu, text in enumerate(of_cpus)
    }


NEXT_TO_EACH_OTHER = siblings("0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7")
FAR_FROM_EACH_OTHER = siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
TWO_KINDS = siblings("0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7")  # two fast cores, four slow ones


@pytest.mark.parametrize(
    ("affinity", "files", "cores"),
    [
        (range(8), {}, tuple(range(8))),
        (range(8), NEXT_TO_EACH_OTHER, (0, 2, 4, 6)),
        (range(8), FAR_FROM_EACH_OTHER, (0, 1, 2, 3)),
        (range(8), TWO_KINDS, (0, 2, 4, 5, 6, 7)),
        ((1, 2, 3), NEXT_TO_EACH_OTHER, (0, 2)),
        ((4, 5), FAR_FROM_EACH_OTHER, (0, 1)),
        ((6,), siblings(*[""] * 8), (6,)),
    ],
    indirect=["affinity"],
    ids=["unknown", "adjacent", "far apart", "two kinds", "mask", "mask of second threads", "empty file"],
)
def test_hyperthreads_of_a_core_count_once(
    tmp_path: Path, files: dict[str, str], cores: tuple[int, ...]
) -> None:
    found = Processors.here(write(tmp_path, files))
    assert (found.cores, found.num_threads, found.quota) == (cores, len(cores), None)


V2 = {"proc/self/cgroup": "0::/pod/box"}
V1 = {"proc/self/cgroup": "5:memory:/pod/box\n4:cpu,cpuacct:/pod/box\n0::/system"}


@pytest.mark.parametrize(
    ("files", "quota", "num_threads"),
    [
        ({}, None, 8),
        (V2, None, 8),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "max 100000"}, None, 8),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "400000 100000"}, 4.0, 4),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "175000 50000"}, 3.5, 3),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "20000 100000"}, 0.2, 1),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "6400000 100000"}, 64.0, 8),
        (
            {
                **V2,
                "sys/fs/cgroup/pod/box/cpu.max": "700000 100000",
                "sys/fs/cgroup/pod/cpu.max": "250000 100000",
                "sys/fs/cgroup/cpu.max": "max 100000",
            },
            2.5,
            2,
        ),
        ({**V2, "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0, 3),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/pod/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/pod/box/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "600000",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000",
            },
            6.0,
            6,
        ),
        ({**V2, "sys/fs/cgroup/pod/box/cpu.max": "a lot"}, None, 8),
    ],
    ids=[
        "no groups",
        "no files",
        "v2 no limit",
        "v2",
        "v2 a fraction",
        "v2 less than one",
        "v2 more than there are",
        "v2 parent",
        "v2 in a container",
        "v1 parent",
        "not a number",
    ],
)
def test_the_smallest_quota_of_the_control_groups_limits_threads(
    tmp_path: Path, files: dict[str, str], quota: float | None, num_threads: int
) -> None:
    found = Processors.here(write(tmp_path, files))
    assert (found.quota, found.num_threads) == (quota, num_threads)


@pytest.mark.parametrize(
    ("quota", "capacity", "text"),
    [
        (None, 8, "8 processors on 4 cores"),
        (16, 8, "8 processors on 4 cores"),
        (2.5, 2.5, "8 processors on 4 cores, of which control groups grant 2.5"),
    ],
)
def test_the_description_has_processors_cores_and_quota(
    tmp_path: Path, quota: float | None, capacity: float, text: str
) -> None:
    cpus = tuple(range(8))
    found = Processors(cpus, cpus[::2], quota)
    assert (found.capacity, str(found)) == (capacity, text)


def test_control_groups_are_listed_from_the_innermost_to_the_root(tmp_path: Path) -> None:
    mount = tmp_path / "sys/fs/cgroup"
    write(tmp_path, {"proc/self/cgroup": "7:cpu,cpuacct:/a:b/c\n6:cpuset:/d\n0::/e"})
    found = [
        (group.version, str(group.folder.relative_to(mount))) for group in control_groups("cpu", tmp_path)
    ]
    assert found == [(1, "cpu/a:b/c"), (1, "cpu/a:b"), (1, "cpu"), (2, "e"), (2, ".")]
    assert control_groups("cpu", tmp_path / "no such folder") == []
