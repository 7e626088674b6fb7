"""Guard of a model whose process is killed or stopped. Server, stubs and ranks are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.processes import ProcessId, this_parent
from inflight.server import guard
from inflight.server.log import find_cause

# A server that starts a stub with a guard for one model, and a stub for another model, and then waits.
SERVER = """
import subprocess, sys
stubs = [
    subprocess.Popen([sys.argv[1], sys.argv[2], name, ranks], executable=sys.executable, stdin=0, stdout=1)
    for name, ranks in ((sys.argv[3], sys.argv[5]), (sys.argv[4], ""))
]
{reaction}
for stub in stubs:
    stub.wait()
import time
time.sleep(600)
"""
STUB = """
import os, sys, time
if sys.argv[2]:
    from inflight.processes import ProcessId
    from inflight.server.guard import Guard
    guard = Guard(os.environ["PYTHON"], "some_model")
    pid, folder = sys.argv[2].split(" ")
    guard.watch(ProcessId.of(int(pid)), folder)
    print(guard._process.pid, flush=True)
    word = sys.stdin.readline().strip()
    if word:
        guard.beat(1.0) if word == "beat" else getattr(guard, word)()
        print(word, flush=True)
time.sleep(600)
"""
PATIENCE_S = 60.0
PATIENT = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Stage:
    """All processes of a test."""

    def __init__(self, folder: Path, reaction: str) -> None:
        self.ranks = subprocess.Popen(["sleep", "600"])
        self.ranks_folder = folder / "ranks"
        self.ranks_folder.mkdir()
        names = [f"inflight-test-{uuid.uuid4()}" for _ in range(2)]
        self.regions = [Path("/dev/shm", name) for name in names]
        for region in self.regions:
            region.touch()
        program = folder / "triton_python_backend_stub"
        program.write_text(STUB)
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(reaction=reaction), str(program), str(program), *names]
            + [f"{self.ranks.pid} {self.ranks_folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The file has another name than Python, which therefore would not find its environment by itself.
            env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.server.stdout is not None
        self.guard = self._identity(int(self.server.stdout.readline()))
        children = self._identity(self.server.pid).children()
        self.model, self.other = sorted(children, key=lambda child: child.pid)

    @staticmethod
    def _identity(pid: int) -> ProcessId:
        found = ProcessId.of(pid)
        assert found is not None
        return found

    def tell(self, word: str) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(word + "\n")
        self.server.stdin.flush()

    def have_told(self, word: str) -> None:
        self.tell(word)
        assert self.server.stdout is not None and self.server.stdout.readline() == f"{word}\n"

    def is_gone(self) -> bool:
        assert self.guard.wait(PATIENCE_S)
        self.ranks.poll()
        processes = [self.model.wait(0), self.other.wait(0), self.server.poll() is not None]
        return all(processes) and self.ranks.returncode is not None

    def cause(self) -> str:
        """Return the cause of the end, found like the process that started the server finds it."""
        assert self.server.stderr is not None
        return find_cause(self.server.stderr.read())

    def close(self) -> None:
        for process in (self.server, self.ranks):
            process.kill()
            process.wait()
        for process in (self.model, self.other, self.guard):
            process.signal(signal.SIGKILL)
        for region in self.regions:
            region.unlink(missing_ok=True)


@pytest.fixture(params=["", PATIENT], ids=["ends at SIGTERM", "ignores SIGTERM"])
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(tmp_path, request.param)
    yield made
    made.close()


def test_a_killed_models_process_ends_the_server_and_its_ranks(stage: Stage):
    stage.model.signal(signal.SIGKILL)
    assert stage.is_gone()
    assert stage.cause().endswith("guard.py] the process of the model some_model has ended: the server ends")
    assert not stage.ranks_folder.exists()
    assert not any(region.exists() for region in stage.regions)


def test_a_models_process_can_end_the_server(stage: Stage):
    stage.tell("end_server")
    assert stage.is_gone()


def test_a_stopped_models_process_counts_as_lost(stage: Stage):
    stage.have_told("beat")
    assert not stage.guard.wait(2.5)
    stage.model.signal(signal.SIGSTOP)
    assert stage.is_gone()
    assert "guard.py] the process of the model some_model has been silent for 1 s" in stage.cause()


def test_a_guard_stopped_together_with_the_model_does_not_end_the_server(stage: Stage):
    stage.have_told("beat")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in (stage.model, stage.guard):
            process.signal(number)
        assert not stage.guard.wait(2.5)


def test_a_killed_server_ends_the_ranks(stage: Stage):
    stage.server.kill()
    assert stage.guard.wait(PATIENCE_S)
    stage.ranks.wait(PATIENCE_S)
    stage.model.signal(signal.SIGKILL)
    stage.other.signal(signal.SIGKILL)
    assert stage.cause() == ""
    assert not stage.ranks_folder.exists()


def test_a_models_process_may_end_after_dismissing_its_guard(stage: Stage):
    stage.have_told("dismiss")
    assert stage.guard.wait(PATIENCE_S)
    assert stage.server.poll() is None and stage.ranks.poll() is None
    assert not stage.other.wait(0)


def test_a_stopped_guard_does_not_keep_its_model_from_ending(stage: Stage):
    stage.guard.signal(signal.SIGSTOP)
    stage.have_told("dismiss")
    assert stage.guard.wait(PATIENCE_S)
    assert stage.server.poll() is None and not stage.model.wait(0)


def test_a_guard_does_not_end_the_process_that_adopted_a_model(monkeypatch: pytest.MonkeyPatch):
    """tritonserver may have ended before its models start their guards."""
    parent = this_parent()

    def arguments(server: int) -> list[bytes]:
        return [
            b"triton_python_backend_stub",
            b"model.py",
            b"region",
            b"1",
            b"1",
            str(server).encode(),
            b"",
            b"",
        ]

    monkeypatch.setattr(guard, "words_of", lambda pid, file: arguments(parent.pid))
    assert guard._server() == parent
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(guard, "words_of", lambda pid, file: arguments(ended.pid))
    assert guard._server().wait(0)


def test_a_resting_guard_ignores_the_end_of_its_model_and_lives_until_the_server_ends(stage: Stage):
    stage.have_told("rest")
    os.kill(stage.model.pid, signal.SIGKILL)
    assert not stage.guard.wait(1)
    assert stage.server.poll() is None and stage.ranks.poll() is None
    stage.server.kill()
    assert stage.guard.wait(PATIENCE_S)
    assert stage.ranks.poll() is None
