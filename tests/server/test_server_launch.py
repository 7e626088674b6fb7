"""The real tritonserver with a trivial model becomes ready, ends in every way, and leaves nothing behind."""

import os
import signal
import socket
from pathlib import Path
from queue import Queue

import numpy
import pytest
import tritonclient.grpc as grpcclient

from benchmarks.measuring import perf_analyzer
from inflight.endpoint.path import listen
from inflight.server.errors import OptionError, ServeError
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports
from inflight.server.repository import Wanted
from inflight.server.runtime_directory import find_processes
from tests.commands import command, eventually, group_members, is_alive, shared_memory_of
from tests.tiers import with_all

pytestmark = pytest.mark.e2e


def ask(
    url: str, count: int, gap_ms: int, numbers: "Queue[int | Exception]"
) -> grpcclient.InferenceServerClient:
    """Start a stream of `count` numbers; return the client, which the caller has to close."""

    def receive(result: grpcclient.InferResult | None, error: Exception | None) -> None:
        numbers.put(error if result is None else int(result.as_numpy("NUMBER")[0]))

    client = grpcclient.InferenceServerClient(url)
    client.start_stream(receive)
    inputs = []
    for name, value in (("COUNT", count), ("GAP_MS", gap_ms)):
        inputs.append(grpcclient.InferInput(name, [1], "INT32"))
        inputs[-1].set_data_from_numpy(numpy.array([value], numpy.int32))
    client.async_stream_infer("tensorrt_llm", inputs)
    return client


def test_a_ready_server_answers_and_leaves_nothing_behind(counting_repository: Path) -> None:
    numbers: Queue[int | Exception] = Queue()
    with serve(counting_repository, settings={"dtype": "float32"}) as server:
        folder, pid = server.repository.path.parent, server.pid
        assert shared_memory_of(folder.name)
        assert "serving" in server.log_text()
        client = ask(server.grpc, 3, 0, numbers)
        assert [numbers.get(timeout=60) for _ in range(3)] == [0, 1, 2]
        client.close()
    assert server.returncode == 0
    assert group_members(pid) == []
    assert shared_memory_of(folder.name) == []
    assert not folder.exists()


def test_the_reason_of_a_model_that_fails_to_load_is_reported(counting_repository: Path) -> None:
    with (
        pytest.raises(ServeError, match="the reason it gave"),
        serve(counting_repository, settings={"fail_with": "the reason it gave"}),
    ):
        pass


def test_a_server_that_dies_is_reported(counting_repository: Path) -> None:
    with command(counting_repository, "--restarts", "0") as serving:
        serving.ready_line()
        server = serving.server()
        os.kill(server, signal.SIGKILL)
        _, errors = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 1
    assert "tritonserver ended (exit status -9)" in errors
    assert group_members(server) == []


def test_a_server_stopped_before_it_is_ready_leaves_no_folder(counting_repository: Path) -> None:
    server = TritonServer(ServerOptions(model_repository=counting_repository))
    server.start()
    assert server.wait_ready(30, interrupted=lambda: True) is False
    server.close()
    assert not server.repository.path.exists()


def test_the_socket_of_a_killed_engine_is_removed_but_not_that_of_another_server(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    options = ServerOptions(wanted=Wanted(settings={"engine_endpoint": str(path)}))
    with listen(str(path)):
        TritonServer(options).close()
        assert path.exists()
    TritonServer(options).close()
    assert not path.exists()


def test_a_failed_construction_leaves_no_folder(counting_repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = Ports(http=taken.getsockname()[1])
        with pytest.raises(OptionError, match="--http-port"):
            TritonServer(ServerOptions(model_repository=counting_repository, ports=ports))


@pytest.mark.parametrize("number", with_all([signal.SIGTERM, signal.SIGINT], [signal.SIGINT]))
def test_the_command_finishes_requests_in_flight_and_exits_with_0(
    counting_repository: Path, number: signal.Signals
) -> None:
    """The client keeps its stream open, for which this tritonserver alone would wait forever."""
    numbers: Queue[int | Exception] = Queue()
    with command(counting_repository) as serving:
        ready = serving.ready_line()
        assert ready["model"].endswith("demo_model")
        client = ask(ready["grpc"], 10, 100, numbers)
        assert numbers.get(timeout=60) == 0
        server = serving.server()
        serving.process.send_signal(number)
        assert [numbers.get(timeout=60) for _ in range(9)] == list(range(1, 10))
        assert serving.process.wait(120) == 0
        client.close()
        assert group_members(server) == []


def test_an_idle_stream_does_not_keep_the_server_running(counting_repository: Path) -> None:
    numbers: Queue[int | Exception] = Queue()
    with command(counting_repository) as serving:
        client = ask(serving.ready_line()["grpc"], 1, 0, numbers)
        assert numbers.get(timeout=60) == 0
        serving.process.terminate()
        assert serving.process.wait(120) == 0
        client.close()


def test_requests_in_flight_after_the_exit_timeout_end_with_an_error(counting_repository: Path) -> None:
    numbers: Queue[int | Exception] = Queue()
    with command(counting_repository, "--exit-timeout", "1") as serving:
        client = ask(serving.ready_line()["grpc"], 100_000, 1, numbers)
        assert numbers.get(timeout=60) == 0
        serving.process.terminate()
        _, errors = serving.process.communicate(timeout=120)
        client.close()
    assert serving.process.returncode == 1
    assert "not finished after 1 s" in errors


def test_a_second_signal_ends_the_server_at_once(counting_repository: Path) -> None:
    numbers: Queue[int | Exception] = Queue()
    with command(counting_repository) as serving:
        client = ask(serving.ready_line()["grpc"], 1000, 100, numbers)
        assert numbers.get(timeout=60) == 0
        serving.process.send_signal(signal.SIGTERM)
        assert numbers.get(timeout=60) == 1
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(120) == 128 + signal.SIGTERM
        client.close()


def test_the_server_ends_with_a_launcher_that_is_killed(counting_repository: Path) -> None:
    with command(counting_repository, "--openai-port", "0") as serving:
        assert serving.ready_line()["openai"].startswith("http://127.0.0.1:")
        server, all_of_it = serving.server(), find_processes(serving.folder())
        folder = Path(os.readlink(f"/proc/{server}/cwd"))
        serving.process.kill()
        serving.process.wait()
        assert eventually(lambda: not folder.exists())
        assert len(all_of_it) >= 3 and not any(is_alive(process.pid) for process in all_of_it)
        assert group_members(server) == []
        assert shared_memory_of(folder.name) == []


@pytest.mark.parametrize(("flag", "named"), [("--grpc-port", "--grpc-port"), ("--openai-port", "--port")])
def test_a_port_in_use_is_reported_before_anything_starts(
    counting_repository: Path, flag: str, named: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with command(counting_repository, flag, port) as serving:
            output, errors = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 2
    assert output == ""
    assert f"port {port}" in errors
    assert f"choose another with {named}, " in errors
    assert "tritonserver" not in errors


def test_a_setting_that_no_model_has_is_reported(counting_repository: Path) -> None:
    with command(counting_repository, "--set", "dtpe=float32") as serving:
        output, errors = serving.process.communicate(timeout=120)
    assert serving.process.returncode == 2
    assert output == ""
    assert "'dtpe'" in errors
    assert "did you mean dtype?" in errors


def test_perf_analyzer_runs_on_a_decoupled_model(counting_repository: Path, tmp_path: Path) -> None:
    data = tmp_path / "input.json"
    data.write_text('{"data": [{"COUNT": [3], "GAP_MS": [1]}]}')
    with serve(counting_repository) as server:
        arguments = f"-m tensorrt_llm -u {server.grpc} -i grpc --streaming --async --input-data {data}"
        measuring = "--measurement-mode count_windows --measurement-request-count 20 --max-trials 3 -s 999"
        finished = perf_analyzer.run([*arguments.split(), *measuring.split()], timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "Throughput:" in finished.stdout
