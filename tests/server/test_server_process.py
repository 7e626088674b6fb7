"""Processes of a server are found and ended, whichever process started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.processes import ProcessId
from inflight.server import process, runtime_directory
from inflight.server.keeper import Keeper
from inflight.server.process import ServerProcess
from inflight.server.runtime_directory import PID_FILE

# Starts a process in a session of its own, which starts another one and ends.
FAMILY = "setsid sh -c 'sleep 1000 & echo started' & exec sleep 1000"


def start(folder: Path, script: str, is_mpirun: bool = False) -> ServerProcess:
    return ServerProcess(["sh", "-c", script], os.environ, folder, is_mpirun)


def test_all_processes_that_a_server_started_are_ended(tmp_path: Path) -> None:
    server = start(tmp_path, FAMILY)
    assert server.output.readline() == b"started\n"
    assert len(runtime_directory.find_processes(tmp_path)) >= 2
    server.kill()
    assert server.returncode == -9
    assert runtime_directory.find_processes(tmp_path) == []


def test_killing_a_server_leaves_other_servers_running(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    mine, other = start(tmp_path / "a", "exec sleep 1000"), start(tmp_path / "ab", "exec sleep 1000")
    mine.kill()
    assert other.returncode is None
    assert [process.pid for process in runtime_directory.find_processes(tmp_path / "ab")] == [other.pid]
    other.kill()


def test_a_stopped_process_is_ended(tmp_path: Path) -> None:
    server = start(tmp_path, "kill -STOP $$")
    server.kill()
    assert server.returncode == -9


def test_tritonserver_is_not_told_to_end_before_mpirun_has_started_it(tmp_path: Path) -> None:
    server = start(tmp_path, "exec sleep 1000", is_mpirun=True)
    assert server.pid is None
    assert server.ask_to_end() is False
    server.kill()


def test_mpirun_is_ended_when_a_rank_outlives_tritonserver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_RANKS_END_S", 0.1)
    server = start(tmp_path, f"sleep 1000 & echo $! >{PID_FILE}; echo; exec sleep 1000", is_mpirun=True)
    server.output.readline()
    assert server.pid is not None
    assert server.ask_to_end() is True
    server.wait(60)
    assert server.returncode == -9


KILLED_LAUNCHER = """
import os, sys
from pathlib import Path
from inflight.server.keeper import Keeper
from inflight.server.process import ServerProcess
folder = Path(sys.argv[1])
keeper = Keeper(folder)
server = ServerProcess(["sleep", "1000"], os.environ, folder, False)
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_keeper_ends_the_server_of_a_killed_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    launcher = subprocess.run(
        [sys.executable, "-c", KILLED_LAUNCHER, str(folder)], capture_output=True, text=True, check=False
    )
    server = ProcessId.of(int(launcher.stdout))
    assert server is None or server.wait(60)


def test_a_stopped_keeper_is_dismissed(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    keeper._process.send_signal(signal.SIGSTOP)
    keeper.dismiss()
    assert keeper._process.returncode == -signal.SIGKILL
    assert tmp_path.exists()
