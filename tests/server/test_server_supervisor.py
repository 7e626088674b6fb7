"""The command restarts a lost server. A real tritonserver with a trivial model."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from inflight.server.errors import ServeError
from inflight.server.launch import ServerOptions
from inflight.server.supervisor import Signals, Supervisor
from tests.commands import command, eventually, group_members, shared_memory_of

from .test_server_launch import ask

pytestmark = pytest.mark.e2e


def test_a_lost_server_is_restarted_on_the_same_ports(counting_repository: Path) -> None:
    numbers: Queue[int | Exception] = Queue()
    with command(counting_repository) as serving:
        ready, server, folder = serving.ready_line(), serving.server(), serving.folder()
        client = ask(ready["grpc"], 1000, 20, numbers)
        assert numbers.get(timeout=60) == 0
        os.kill(server, signal.SIGKILL)
        assert serving.ready_line() == ready
        while isinstance(number := numbers.get(timeout=60), int):
            pass
        assert isinstance(number, InferenceServerException)
        client.close()
        assert serving.server() != server and group_members(server) == []
        assert not folder.exists() and not shared_memory_of(folder.name)
        again: Queue[int | Exception] = Queue()
        client = ask(ready["grpc"], 3, 0, again)
        assert [again.get(timeout=60) for _ in range(3)] == [0, 1, 2]
        client.close()
        serving.process.terminate()
        _, errors = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 0
    said = [line for line in errors.splitlines() if line.startswith("serve: ")]
    last = [line for line in said if "one of the last requests before the end" in line]
    assert len(last) == 1 and last[0].endswith(" tensorrt_llm COUNT[1] GAP_MS[1]")
    assert [line for line in said if line not in last] == [
        "serve: tritonserver ended (exit status -9); what was in flight is lost, "
        "and the server is started again now"
    ]


def _fail_from_now(repository: Path) -> None:
    """Let the model of the next servers fail to load."""
    config = repository / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text()
    config.write_text(re.sub(r'("fail_with" value \{ string_value: )""', r'\1"no more"', text))


def test_a_server_that_cannot_be_restarted_is_given_up(counting_repository: Path) -> None:
    with command(counting_repository, "--restarts", "2") as serving:
        serving.ready_line()
        folder = serving.folder()
        _fail_from_now(counting_repository)
        os.kill(serving.server(), signal.SIGKILL)
        output, errors = serving.process.communicate(timeout=60)
    assert serving.process.returncode == 1 and output == ""
    said = [line for line in errors.splitlines() if line.startswith("serve: ")]
    assert len(said) == 3 and "before it was ready" in said[1] and "started again in 0.5 s" in said[1]
    assert "ValueError: no more" in errors.rpartition("serve: ")[2]
    assert not folder.exists() and not shared_memory_of(folder.name)


def test_no_other_program_is_given_the_ports_between_two_servers(counting_repository: Path) -> None:
    with command(counting_repository, "--restarts", "100") as serving:
        ready = serving.ready_line()
        _fail_from_now(counting_repository)
        os.kill(serving.server(), signal.SIGKILL)
        assert serving.process.stderr is not None
        assert any("started again in 0.5 s" in line for line in serving.process.stderr)
        for service in ("http", "grpc", "metrics"):
            address, port = ready[service].rsplit(":", 1)
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, int(port)))


def test_a_tritonserver_ended_by_a_signal_is_not_restarted(counting_repository: Path) -> None:
    with command(counting_repository) as serving:
        serving.ready_line()
        os.kill(serving.server(), signal.SIGTERM)
        _, errors = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 1
    assert "tritonserver ended (exit status 0)" in errors and "started again" not in errors


def test_a_signal_ends_the_command_during_a_restart(counting_repository: Path) -> None:
    with command(counting_repository) as serving:
        serving.ready_line()
        server = serving.server()
        os.kill(server, signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(server))  # the command has noticed
        serving.process.terminate()
        assert serving.process.wait(120) == 0


class UnorderlyServer:
    """A stand-in for a server whose requests in flight were not all answered at its end."""

    def __init__(self, was_ended_by_guard: bool) -> None:
        self.was_ended_by_guard = was_ended_by_guard

    def shut_down(self, hurry: Callable[[], bool]) -> bool:
        return False


@pytest.mark.parametrize("was_lost", [True, False])
def test_a_server_that_was_lost_before_its_end_is_not_reported_as_slow(was_lost: bool) -> None:
    log = io.StringIO()
    supervisor = Supervisor(ServerOptions(exit_timeout_s=7), Signals(), log, lambda server: None)
    server: Any = UnorderlyServer(was_lost)
    expected = (
        contextlib.nullcontext()
        if was_lost
        else pytest.raises(ServeError, match="had not finished after 7 s")
    )
    with expected:
        supervisor._shut_down(server)
    assert ("the process of a model was lost before the end" in log.getvalue()) is was_lost


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_before_the_server_is_ready_ends_the_command(
    counting_repository: Path, number: signal.Signals, status: int
) -> None:
    model = counting_repository / "tensorrt_llm" / "1" / "model.py"
    model.write_text(model.read_text().replace("reason = ", "time.sleep(600); reason = "))
    with command(counting_repository) as serving:
        assert serving.process.stderr is not None
        assert serving.process.stderr.readline()  # tritonserver is starting
        serving.process.send_signal(number)
        output, errors = serving.process.communicate(timeout=120)
    assert (serving.process.returncode, output) == (status, ""), errors


def test_a_server_that_never_becomes_ready_is_given_up_with_the_reason(
    counting_repository: Path, tmp_path: Path
) -> None:
    model = counting_repository / "tensorrt_llm" / "1" / "model.py"
    model.write_text(model.read_text().replace("reason = ", "time.sleep(600); reason = "))
    with command(counting_repository, "--ready-timeout", "3") as serving:
        output, errors = serving.process.communicate(timeout=60)
    assert serving.process.returncode == 1 and output == ""
    line = next(line for line in errors.splitlines() if line.startswith("serve: "))
    assert re.fullmatch(
        r"serve: not ready, and no progress in 3 s \(--ready-timeout\): waiting for tensorrt_llm to be "
        r"loaded, for \d+ s; the last progress was \d+ s ago; its log is above",
        line,
    )


STARVED_ONCE = """
import os, pathlib, signal, subprocess
mark = pathlib.Path(MARK)
if not mark.exists():
    mark.touch()
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    from inflight.server.runtime_directory import note_initialized
    note_initialized("tensorrt_llm")
"""


@pytest.mark.exhaustive
def test_a_starved_first_start_is_repeated(counting_repository: Path) -> None:
    """tritonserver aborts, or waits forever, if a loading model shows no sign of life for a second."""
    model = counting_repository / "tensorrt_llm" / "1" / "model.py"
    starved_once = STARVED_ONCE.replace("MARK", repr(str(counting_repository.with_name("was starved"))))
    lines = [" " * 8 + line for line in starved_once.strip().splitlines()]
    begins = "    def initialize(self, args):\n"
    model.write_text(model.read_text().replace(begins, begins + "\n".join(lines) + "\n", 1))
    with command(counting_repository) as serving:
        serving.ready_line()
        serving.process.terminate()
        _, errors = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 0
    said = [
        line for line in errors.splitlines() if line.startswith("serve: ") and "got no processor time" in line
    ]
    assert said and all(line.endswith("the server is started again now") for line in said)


def test_a_servers_files_are_readable_only_by_its_user(counting_repository: Path) -> None:
    with command(counting_repository) as serving:
        serving.ready_line()
        assert not serving.folder().stat().st_mode & 0o077
        found = 0
        for process in psutil.Process(serving.process.pid).children(recursive=True):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                status = Path(f"/proc/{process.pid}/status").read_text()
                found += "Umask:\t0077\n" in status
                assert "Umask:" not in status or "Umask:\t0077\n" in status  # a zombie has no umask
        assert found
