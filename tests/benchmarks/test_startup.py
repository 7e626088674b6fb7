"""Stages and processes read from a starting server's log."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import startup
from inflight.server import cli

LOG = """\
I1121 23:50:14.803680 1 pinned_memory_manager.cc:283] "Pinned memory pool disabled"
I1121 23:50:37.402368 1 model_lifecycle.cc:839] "successfully loaded 'ensemble'"
I1121 23:51:03.558974 1 log.py:24] "compiling the decoder's layers, once on this machine"
I1121 23:52:48.483168 1 log.py:24] "Loading m1b: 2.47 GB in 75.8 s"
I1121 23:52:48.707030 1 log.py:24] "KV cache: 10159 blocks of 32 tokens, 10159 MiB; kv_cache decides"
"""


@pytest.mark.smoke
def test_log_lines_become_events_in_order() -> None:
    log = startup._Log(time.monotonic())
    log.copy(io.StringIO(LOG))
    assert list(log.events_s) == [
        "tritonserver has begun",
        "ensemble is loaded",
        "compiler has begun",
        "weights are there",
        "KV cache is there",
    ]
    assert not log.ready.is_set()
    log.copy(io.StringIO("READY http=127.0.0.1:1 grpc=127.0.0.1:2 metrics=127.0.0.1:3 model=m\n"))
    assert log.ready.is_set() and log.ready_s is not None


@pytest.mark.parametrize("triton", [True, False])
def test_the_server_takes_free_ports_and_the_given_settings(triton: bool, tmp_path: Path) -> None:
    given = ["--model", str(tmp_path), "--set", "weights=mmap", *([] if triton else ["--no-triton"])]
    options = cli.parse(startup._command(startup._arguments(given))[3:])
    assert options.triton == triton
    assert options.wanted.settings == {"weights": "mmap"}
    assert set(options.ports.of_triton().values()) == ({0} if triton else {8000, 8001, 8002})
    assert options.ports.openai == 0


def test_descendants_of_a_process_are_found_with_their_memory() -> None:
    program = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = startup._processes(process.pid)
        process.communicate(b"\n")
    assert len(found) == 2
    assert all(0 < each.pss_bytes <= each.peak_rss_bytes for each in found)


def test_a_stub_has_its_models_name() -> None:
    assert (
        startup._name(["/x/triton_python_backend_stub", "/y/models/ensemble/1/model.py", "z"]) == "ensemble"
    )
    assert startup._name(["/usr/bin/python", "-I", "-m", "inflight.server.keeper", "/f"]) == (
        "inflight.server.keeper"
    )
    assert startup._name(["/opt/bin/tritonserver", "--x"]) == "tritonserver"


def test_ended_processes_are_left_out() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert startup._processes(process.pid) == ()
