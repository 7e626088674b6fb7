"""Leader mode without engines: tritonserver under mpirun starts and ends like one without mpirun."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import psutil
import pytest

from inflight.ranks.launch import find_mpirun
from inflight.server import ranks, runtime_directory
from inflight.server.errors import ServeError
from inflight.server.launch import ServerOptions, TritonServer, serve
from tests.commands import (
    children_running,
    end,
    eventually,
    folder_of,
    is_alive,
    read_line,
    read_ready_line,
    shared_memory_of,
)
from tests.server.test_server_launch import ask
from tests.tiers import with_all

pytestmark = pytest.mark.e2e

STAND_IN = Path(__file__).with_name("stand_in_worker.py")
OPTIONS = ServerOptions(tp=3, mode="leader")
# The same as `python -m inflight.server`, with another program for the workers.
COMMAND = f"""
import sys
from inflight.server import cli, ranks
ranks._WORKER = ({str(STAND_IN)!r},)
sys.exit(cli.main())
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_WORKER", (str(STAND_IN),))


def workers(server: TritonServer) -> dict[int, int]:
    """Return process ids by rank."""
    assert eventually(lambda: server.log_text().count("heard") == 2)
    found = re.findall(r"rank (\d) of 3 is process (\d+)", server.log_text())
    return {int(rank): int(pid) for rank, pid in found}


def serve_command(repository: Path) -> list[str]:
    ports = [word for service in ("http", "grpc", "metrics") for word in (f"--{service}-port", "0")]
    given = ["--model-repository", str(repository), "--tp", "3", "--mode", "leader", *ports, "--no-openai"]
    return [sys.executable, "-c", COMMAND, *given]


@contextlib.contextmanager
def running(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, **variables},
    )
    try:
        yield process
    finally:
        end(process)


@pytest.fixture
def mpirun_folder() -> Iterator[Path]:
    """Yield a folder for the files of a test's own mpirun.

    In /tmp they are named by its process id, and a later mpirun with the same id does not start beside the
    leftovers of a killed one. A path of pytest's would be too long for mpirun's sockets.
    """
    with tempfile.TemporaryDirectory(prefix="mpirun-") as folder:
        yield Path(folder)


def test_a_server_with_ranks_answers_and_leaves_nothing_behind(ranked_repository: Path) -> None:
    numbers: Queue[int | Exception] = Queue()
    with serve(ranked_repository, options=OPTIONS) as server:
        folder, ranks = server.repository.path.parent, workers(server)
        assert sorted(ranks) == [1, 2]
        assert "tritonserver" in os.readlink(f"/proc/{server.pid}/exe")
        assert all(is_alive(pid) for pid in ranks.values())
        client = ask(server.grpc, 3, 0, numbers)
        assert [numbers.get(timeout=60) for _ in range(3)] == [0, 1, 2]
        client.close()
        assert server.shut_down() is True
    assert server.returncode == 0
    assert server.log_text().count(" ends\n") == 2
    assert runtime_directory.find_processes(folder) == []
    assert shared_memory_of(folder.name) == []
    assert not folder.exists()


def test_the_ranks_use_the_servers_shared_memory_and_not_its_libraries(ranked_repository: Path) -> None:
    with serve(ranked_repository, options=OPTIONS) as server:
        workers(server)
        folder = server.repository.path.parent
        assert "pytriton" in Path(f"/proc/{server.pid}/environ").read_text()
        (libraries, *_) = re.findall(r"libraries (.*)", server.log_text())
        assert "pytriton" not in libraries
        assert str(folder) not in libraries
        assert eventually(lambda: "segments ['sm_segment" in server.log_text())


@pytest.mark.parametrize("number", with_all([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_requests_in_flight_finish_before_the_server_ends(
    ranked_repository: Path, number: signal.Signals
) -> None:
    numbers: Queue[int | Exception] = Queue()
    with running(serve_command(ranked_repository)) as process:
        ready, folder = read_ready_line(process), folder_of(process)
        client = ask(ready["grpc"], 10, 100, numbers)
        assert numbers.get(timeout=60) == 0
        process.send_signal(number)
        assert [numbers.get(timeout=60) for _ in range(9)] == list(range(1, 10))
        assert process.wait(120) == 0
        client.close()
        assert runtime_directory.find_processes(folder) == []
        assert shared_memory_of(folder.name) == []
        assert not folder.exists()


def test_server_and_ranks_end_with_a_killed_launcher(ranked_repository: Path) -> None:
    with running(serve_command(ranked_repository)) as process:
        read_ready_line(process)
        folder = folder_of(process)
        assert len(runtime_directory.find_processes(folder)) >= 5
        process.kill()
        assert eventually(lambda: not folder.exists())
        assert runtime_directory.find_processes(folder) == []
        assert shared_memory_of(folder.name) == []


def kill_tritonserver(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGKILL)


def kill_mpirun(server: TritonServer) -> None:
    """Kill the parent of tritonserver."""
    os.kill(psutil.Process(server.pid).ppid(), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_tritonserver, kill_mpirun])
def test_the_death_of_one_process_ends_all_others_of_the_server(
    ranked_repository: Path, kill: Callable[[TritonServer], None]
) -> None:
    with serve(ranked_repository, options=OPTIONS) as server:
        folder = server.repository.path.parent
        workers(server)
        kill(server)
        assert eventually(lambda: server.returncode is not None)
        assert server.returncode != 0
    assert runtime_directory.find_processes(folder) == []
    assert shared_memory_of(folder.name) == []
    assert not folder.exists()


def test_a_stopped_rank_does_not_delay_the_end_of_the_server(ranked_repository: Path) -> None:
    with serve(ranked_repository, options=OPTIONS) as server:
        folder, ranks = server.repository.path.parent, workers(server)
        os.kill(ranks[2], signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        assert eventually(lambda: server.returncode is not None)
        assert server.returncode != 0
    assert runtime_directory.find_processes(folder) == []


def test_a_server_stopped_before_it_is_ready_leaves_no_process(ranked_repository: Path) -> None:
    server = TritonServer(ServerOptions(ranked_repository, tp=3, mode="leader"))
    folder = server.repository.path.parent
    server.start()
    assert server.wait_ready(30, interrupted=lambda: True) is False, "and it does not raise, as after 30 s"
    server.close()
    assert runtime_directory.find_processes(folder) == []
    assert not folder.exists()


def test_the_reason_of_a_model_that_fails_to_load_is_reported(ranked_repository: Path) -> None:
    with (
        pytest.raises(ServeError, match="the reason it gave"),
        serve(ranked_repository, settings={"fail_with": "the reason it gave"}, options=OPTIONS),
    ):
        pass


def test_ranks_that_were_started_together_are_not_started_again(
    ranked_repository: Path, mpirun_folder: Path
) -> None:
    """Slurm starts rank 0 with this command, and the workers beside it."""
    together = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "1"]
    workers = [":", "-n", "2", sys.executable, str(STAND_IN)]
    numbers: Queue[int | Exception] = Queue()
    variables = ranks.session_variables(mpirun_folder, mpirun_folder)
    with running([*together, *serve_command(ranked_repository), *workers], **variables) as process:
        ready = next(line for line in iter(lambda: read_line(process), "") if line.startswith("READY"))
        client = ask(ready.split("grpc=")[1].split()[0], 3, 0, numbers)
        assert [numbers.get(timeout=60) for _ in range(3)] == [0, 1, 2]
        client.close()
        launcher = children_running("cli.main", process.pid)[0]
        launcher.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
