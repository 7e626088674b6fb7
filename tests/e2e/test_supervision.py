"""`scripts/serve` after a defect of tritonserver's or the loss of a model's process: who notices, how long.

Requests in flight end with an error, and within ten seconds everybody is served again, under the same addresses.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from inflight.server import runtime_directory
from inflight.server.guard import SILENCE_S
from inflight.testing.fake_server import make_fake_repository
from tests.commands import Command, command

from .clients import Stream, ask, infer, unary, wait_until
from .conftest import DEMO_MODEL, REPOSITORY

OUTAGE_S = 10.0
"""Or twice what the first start took: a machine that is busy takes longer for the second one too."""
PROMPT = [3, 1, 4, 1, 5]
LONG = 8000
"""Tokens of the requests in flight, which take 40 s at least."""
SETTINGS = {
    "fake_engine": "vocab=3072,step_us=5000",
    "max_sequence_length": "8192",
    "enable_state_requests": "true",
}


@pytest.fixture
def serving(elsewhere: Path, tmp_path: Path) -> Iterator[Command]:
    """The repository's models over a fake engine."""
    settings = [
        f"--set={key}={value}" for key, value in (SETTINGS | {"tokenizer_dir": str(DEMO_MODEL)}).items()
    ]
    with command(make_fake_repository(tmp_path / "models"), *settings) as running:
        yield running


def wait_ready(serving: Command) -> tuple[dict[str, str], float]:
    """The first READY line, and how long an outage may be."""
    ready = serving.ready_line()
    return ready, max(OUTAGE_S, 2 * (time.monotonic() - serving.begun_s))


def folder_of(serving: Command) -> Path:
    return Path(os.readlink(f"/proc/{serving.server()}/cwd"))


def stubs(serving: Command) -> dict[str, int]:
    """Process ids of the models' processes, by model."""
    found = {}
    for process in runtime_directory.find_processes(folder_of(serving)):
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        if arguments[0].endswith("triton_python_backend_stub"):
            found[Path(arguments[1]).parents[1].name] = process.pid
    return found


class Bystander:
    """A client that asks again and again; knows how long it was not answered."""

    def __init__(self, url: str) -> None:
        self.longest_s = 0.0
        self._url = url
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Bystander:
        self._answered_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._thread.join()

    def wait_answered(self) -> None:
        """Until it has been answered once more."""
        before = self._answered_at
        wait_until(lambda: self._answered_at != before, timeout=60.0)

    def _ask(self) -> None:
        while not self._closing.wait(0.05):
            try:
                result = unary(self._url, input_ids=PROMPT, request_output_len=2)
            except InferenceServerException:
                continue
            assert result.as_numpy("output_ids").size == len(PROMPT) + 2
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self._answered_at)
            self._answered_at = now


class InFlight:
    """A request of each kind, long enough to be there when something happens."""

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
        """Until the engine generates for all of them."""
        wait_until(lambda: self._num_running() == len(self._threads), timeout=60.0)

    def _num_running(self) -> int:
        result = unary(self._grpc, state=True)
        running = json.loads(result.as_numpy("state").item())["batcher"]["state"]["running"]
        return sum(each["max_new_tokens"] == LONG and each["generated_tokens"] > 0 for each in running)

    def wait(self) -> dict[str, str]:
        """How each ended, in time."""
        for thread in self._threads:
            thread.join(OUTAGE_S)
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
    """What tritonserver 2.51 does not survive for long: until it has ended."""
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


def test_a_stream_that_mixes_models_ends_nobodys_service_for_long(serving):
    ready, outage_s = wait_ready(serving)
    with Bystander(ready["grpc"]) as bystander:
        bystander.wait_answered()
        for _ in range(3):
            mix_models_on_one_stream(ready["grpc"])
            assert serving.ready_line() == ready
        bystander.wait_answered()
    assert 0.2 < bystander.longest_s < outage_s


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_infer", "tensorrt_llm", "preprocessing"])
def test_a_model_whose_process_is_killed_comes_back(serving, model):
    ready, outage_s = wait_ready(serving)
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
    assert bystander.longest_s < outage_s
    assert not folder.exists() and not runtime_directory.find_processes(folder)
    assert not runtime_directory.shared_memory_files(folder)
    serving.process.terminate()
    assert f"the process of the model {model} has ended" in serving.process.communicate(timeout=30)[1]


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_a_model_whose_process_is_stopped_comes_back(serving, model):
    """Within the silence that its guard allows and an outage."""
    ready, _ = wait_ready(serving)
    os.kill(stubs(serving)[model], signal.SIGSTOP)
    assert serving.ready_line() == ready
    (after,) = ask(ready["grpc"], "ensemble", text_input="def f", max_tokens=5)
    assert after.error is None
    serving.process.terminate()
    said = serving.process.communicate(timeout=30)[1]
    assert f"the process of the model {model} has been silent for {SILENCE_S:g} s" in said


@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
def test_a_server_with_ranks_comes_back_with_others(elsewhere, mode):
    arguments = ["--tp", "2", "--mode", mode, "--dtype", "float32", "--set=max_tokens_in_paged_kv_cache=8192"]
    with command(REPOSITORY, *arguments) as serving:
        ready, folder = serving.ready_line(), serving.folder()
        before = unary(ready["grpc"], input_ids=PROMPT, request_output_len=8).as_numpy("output_ids").tolist()
        tritonserver = int((folder / "tritonserver.pid").read_text())
        old = runtime_directory.find_processes(folder)
        os.kill(tritonserver, signal.SIGKILL)
        assert serving.ready_line() == ready
        assert not any(process in runtime_directory.find_processes(folder) for process in old)
        assert not folder.exists() and not runtime_directory.shared_memory_files(folder)
        after = unary(ready["grpc"], input_ids=PROMPT, request_output_len=8).as_numpy("output_ids").tolist()
        assert after == before
        serving.process.terminate()
        assert serving.process.wait(60) == 0
