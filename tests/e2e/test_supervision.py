"""`scripts/serve` after a crash of tritonserver or the loss of a model's process.

Requests in flight end with an error, and clients are served again at the same addresses.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from inflight.processes import words_of
from inflight.server import runtime_directory
from inflight.server.guard import SILENCE_S
from inflight.testing.fake_server import make_fake_repository
from tests.commands import Command, command
from tests.tiers import examples, with_all

from .clients import Stream, ask, infer, unary, wait_until
from .conftest import DEMO_MODEL, REPOSITORY
from .retrying_clients import RetryingClients, ask_ranks

PATIENCE_S = 60.0
PROMPT = [3, 1, 4, 1, 5]
LONG = 8000
"""Tokens of the requests in flight, which take at least 40 s."""
SETTINGS = {
    "fake_engine": "vocab=3072,step_us=5000",
    "max_sequence_length": "8192",
    "enable_state_requests": "true",
}


@pytest.fixture
def serving(elsewhere: Path, tmp_path: Path) -> Iterator[Command]:
    """A running `scripts/serve` with the repository's models on a fake engine."""
    settings = [
        f"--set={key}={value}" for key, value in (SETTINGS | {"tokenizer_dir": str(DEMO_MODEL)}).items()
    ]
    with command(make_fake_repository(tmp_path / "models"), *settings) as running:
        yield running


def folder_of(serving: Command) -> Path:
    return Path(os.readlink(f"/proc/{serving.server()}/cwd"))


def stubs(serving: Command) -> dict[str, int]:
    """Return the process ids of the models' processes, by model."""
    found = {}
    for process in runtime_directory.find_processes(folder_of(serving)):
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        if arguments[0].endswith("triton_python_backend_stub"):
            found[Path(arguments[1]).parents[1].name] = process.pid
    return found


class Bystander:
    """A client that sends requests all the time, and counts its responses and its errors."""

    def __init__(self, url: str) -> None:
        self.num_answers = self.num_refusals = 0
        self._url = url
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._thread.join()

    def wait_answered(self) -> None:
        """Wait until the server has answered once more."""
        before = self.num_answers
        wait_until(lambda: self.num_answers > before, timeout=PATIENCE_S)

    def _ask(self) -> None:
        while not self._closing.wait(0.05):
            try:
                result = unary(self._url, input_ids=PROMPT, request_output_len=2)
            except InferenceServerException:
                self.num_refusals += 1
                continue
            assert result.as_numpy("output_ids").size == len(PROMPT) + 2
            self.num_answers += 1


class InFlight:
    """A request of each kind, long enough to be in flight during an event."""

    def __init__(self, ready: dict[str, str]) -> None:
        self.ends: dict[str, str] = {}
        self._grpc = ready["grpc"]
        targets = {
            "tensorrt_llm": lambda: self._stream(
                ready["grpc"], "tensorrt_llm", input_ids=PROMPT, request_output_len=LONG, streaming=True
            ),
            "ensemble": lambda: self._stream(
                ready["grpc"], "ensemble", text_input="def f", max_tokens=LONG, end_id=-1, stream=True
            ),
            "tensorrt_llm_infer": lambda: infer(ready["http"], input_ids=PROMPT, request_output_len=LONG),
        }
        self._threads = [
            threading.Thread(target=self._run, args=item, daemon=True) for item in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def wait_running(self) -> None:
        """Wait until the engine generates for all of them."""
        wait_until(lambda: self._num_running() == len(self._threads), timeout=PATIENCE_S)

    def _num_running(self) -> int:
        result = unary(self._grpc, state=True)
        running = json.loads(result.as_numpy("state").item())["batcher"]["state"]["running"]
        return sum(each["max_new_tokens"] == LONG and each["generated_tokens"] > 0 for each in running)

    def wait(self) -> dict[str, str]:
        """Wait for all streams and return how each ended."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.ends

    def _run(self, name: str, target) -> None:
        try:
            target()
            self.ends[name] = "answered"
        except (OSError, InferenceServerException) as error:
            self.ends[name] = f"error: {error}"

    @staticmethod
    def _stream(url: str, model: str, **tensors) -> None:
        with Stream(url) as stream:
            stream.send(model, **tensors)
            for answer in stream.until_final():
                if answer.error is not None:
                    raise answer.error


def mix_models_on_one_stream(url: str) -> None:
    """Send requests that end tritonserver 2.51 sooner or later, until it has ended."""
    with Stream(url) as stream:
        finals = ["long", *map(str, range(20))]
        while True:
            for name in finals:
                if name == "long":
                    stream.send(
                        "tensorrt_llm", name, input_ids=PROMPT, request_output_len=1500, streaming=True
                    )
                else:
                    stream.send("tensorrt_llm_infer", name, input_ids=PROMPT, request_output_len=3)
            name, answer = stream.receive()
            if answer.error is not None:
                return
            finals = [name] if answer.final else []


@pytest.mark.exhaustive
def test_the_server_is_restarted_after_a_stream_that_mixes_models(serving):
    ready = serving.ready_line()
    with Bystander(ready["grpc"]) as bystander:
        bystander.wait_answered()
        for _ in range(examples(fast=1, all=2)):
            mix_models_on_one_stream(ready["grpc"])
            assert serving.ready_line() == ready
        bystander.wait_answered()
    assert bystander.num_refusals > 0


@pytest.mark.parametrize(
    "model",
    with_all(["ensemble", "tensorrt_llm_infer", "tensorrt_llm", "preprocessing"], ["tensorrt_llm"]),
)
def test_the_server_is_restarted_after_a_models_process_is_killed(serving, model):
    ready = serving.ready_line()
    (before,) = ask(ready["grpc"], "ensemble", text_input="def f", max_tokens=5)
    with Bystander(ready["grpc"]) as bystander:
        in_flight, folder = InFlight(ready), folder_of(serving)
        in_flight.wait_running()
        os.kill(stubs(serving)[model], signal.SIGKILL)
        assert serving.ready_line() == ready
        ends = in_flight.wait()
        (after,) = ask(ready["grpc"], "ensemble", text_input="def f", max_tokens=5)
        bystander.wait_answered()
    assert set(ends) == {"tensorrt_llm", "ensemble", "tensorrt_llm_infer"}
    assert all(end.startswith("error") for end in ends.values()), ends
    assert after.error is None and after.text == before.text
    assert not folder.exists() and not runtime_directory.find_processes(folder)
    assert not runtime_directory.shared_memory_files(folder)
    serving.process.terminate()
    assert f"the process of the model {model} has ended" in serving.process.communicate(timeout=30)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_the_server_is_restarted_after_a_models_process_is_stopped(serving, model):
    """The guard waits for its silence timeout first; tests/server/test_guard.py tests guards alone."""
    ready = serving.ready_line()
    os.kill(stubs(serving)[model], signal.SIGSTOP)
    assert serving.ready_line() == ready
    (after,) = ask(ready["grpc"], "ensemble", text_input="def f", max_tokens=5)
    assert after.error is None
    serving.process.terminate()
    said = serving.process.communicate(timeout=30)[1]
    assert f"the process of the model {model} has been silent for {SILENCE_S:g} s" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "victim"),
    [("orchestrator", "tritonserver"), ("leader", "tritonserver"), ("leader", "mpirun")],
)
def test_a_server_with_ranks_is_restarted_with_new_ranks(elsewhere, mode, victim):
    arguments = ["--tp", "2", "--mode", mode, "--dtype", "float32", "--set=max_tokens_in_paged_kv_cache=8192"]
    with command(REPOSITORY, *arguments) as serving:
        ready, folder = serving.ready_line(), serving.folder()
        before = unary(ready["grpc"], input_ids=PROMPT, request_output_len=8).as_numpy("output_ids").tolist()
        tritonserver = int((folder / "tritonserver.pid").read_text())
        old = runtime_directory.find_processes(folder)
        stream = Stream(ready["grpc"])
        stream.send("tensorrt_llm", input_ids=PROMPT, request_output_len=4000, end_id=-1, streaming=True)
        stream.receive()
        (mpirun,) = (each.pid for each in old if words_of(each.pid, "cmdline")[0].endswith(b"/prterun"))
        with RetryingClients({"triton": lambda: ask_ranks(ready["http"])}) as retrying:
            retrying.wait_answered()
            os.kill(tritonserver if victim == "tritonserver" else mpirun, signal.SIGKILL)
            assert serving.ready_line() == ready
            retrying.wait_answered()
        assert not retrying.wrong
        retrying.report(f"{mode}: {victim} killed")
        stream.client.stop_stream()
        stream.client.close()
        assert not any(process in runtime_directory.find_processes(folder) for process in old)
        assert not folder.exists() and not runtime_directory.shared_memory_files(folder)
        after = unary(ready["grpc"], input_ids=PROMPT, request_output_len=8).as_numpy("output_ids").tolist()
        assert after == before
        serving.process.terminate()
        assert serving.process.wait(60) == 0


@pytest.mark.exhaustive
def test_a_stopped_mpirun_of_leader_mode_disturbs_no_request_and_no_end(elsewhere: Path) -> None:
    arguments = ["--tp", "2", "--mode", "leader", "--dtype", "float32"]
    with command(REPOSITORY, *arguments, "--set=max_tokens_in_paged_kv_cache=8192") as serving:
        ready, folder = serving.ready_line(), serving.folder()
        before = unary(ready["grpc"], input_ids=PROMPT, request_output_len=8).as_numpy("output_ids").tolist()
        old = runtime_directory.find_processes(folder)
        (mpirun,) = (each.pid for each in old if words_of(each.pid, "cmdline")[0].endswith(b"/prterun"))
        with RetryingClients({"triton": lambda: ask_ranks(ready["http"])}) as retrying:
            os.kill(mpirun, signal.SIGSTOP)
            for _ in range(3):
                answer = unary(ready["grpc"], input_ids=PROMPT, request_output_len=8)
                assert answer.as_numpy("output_ids").tolist() == before
            retrying.wait_answered()
        assert not retrying.wrong and not retrying.num_repeated
        retrying.report("leader: mpirun stopped")
        serving.process.terminate()
        assert serving.process.wait(60) == 0
        assert not any(process in runtime_directory.find_processes(folder) for process in old)
        assert not folder.exists() and not runtime_directory.shared_memory_files(folder)
