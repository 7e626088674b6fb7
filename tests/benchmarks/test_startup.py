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

_COMPILED = """\
I1128 14:11:51.103558 1 host.py:178] "compiling the decoder's layers (bfloat16), once on this machine"
I1128 14:11:56.459845 1 host.py:178] "Loading 1b: 2.47 GB in 2.2 s"
I1128 14:11:56.464759 1 host.py:178] "KV cache: 9780 blocks of 32 tokens, 9780 MiB; kv_cache decides"
"""
_MAPPED = """\
I1128 13:57:30.446473 1 engine] 2.47 GB of packed weights are mapped from /cache/1b.weights
I1128 13:57:30.454398 1 engine] KV cache: 10269 blocks of 32 tokens, 10269 MiB; kv_cache decides
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("lines", "events"),
    [
        (_COMPILED, ["compiler has begun", "weights are there", "KV cache is there"]),
        (_MAPPED, ["weights are there", "KV cache is there"]),
    ],
)
def test_log_lines_become_events_in_order(lines: str, events: list[str]) -> None:
    log = startup._Log(time.monotonic())
    log.copy(io.StringIO(lines))
    assert list(log.events_s) == events
    assert not log.ready.is_set()
    log.copy(io.StringIO("READY http=127.0.0.1:1 grpc=127.0.0.1:2 metrics=127.0.0.1:3 model=m\n"))
    assert log.ready.is_set() and log.ready_s is not None


@pytest.mark.parametrize("triton", [True, False])
def test_the_server_takes_free_ports_and_the_given_settings(triton: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
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
