"""/v1 beside Triton's endpoints: one server by `scripts/serve`, from READY to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from inflight.openai.options import API_KEYS_VARIABLE
from inflight.server.client_apis import CONTROL_KEY_HEADER, CONTROL_KEY_VARIABLE
from inflight.server.runtime_directory import find_processes
from inflight.testing.fake_server import make_fake_repository
from tests.commands import Command, children_running, command, eventually, is_alive, shared_memory_of

from .conftest import DEMO_MODEL

SETTINGS = {
    "fake_engine": "vocab=3072,step_us=5000",
    "max_sequence_length": "4096",
    "tokenizer_dir": str(DEMO_MODEL),
}
NUM_TOKENS = 300
KEY = "sk-of-the-environment"
CONTROL_KEY = "key-of-the-operator"


@pytest.fixture
def serving(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The repository's models on a fake engine that can be unloaded, and /v1 with a model name and a key."""
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    flags = ["--served-model-name", "code", "--model-control", "explicit"]
    monkeypatch.setenv(API_KEYS_VARIABLE, KEY)
    monkeypatch.setenv(CONTROL_KEY_VARIABLE, CONTROL_KEY)
    with command(make_fake_repository(tmp_path / "models"), *settings, "--openai-port", "0", *flags) as made:
        yield made


def endpoint_of(serving: Command) -> int:
    """Return the process id of the OpenAI endpoint; 0 if there is none."""
    return next((child.pid for child in children_running("inflight.openai", serving.process.pid)), 0)


def curl(*arguments: str) -> tuple[int, dict]:
    """Return the status and the JSON that curl gets."""
    command = ["curl", "-s", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {KEY}", *arguments]
    body, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition(
        "\n"
    )
    return int(status), json.loads(body)


def repository(http: str, what: str) -> None:
    url = f"http://{http}/v2/repository/models/tensorrt_llm/{what}"
    asked = urllib.request.Request(url, b"{}", {CONTROL_KEY_HEADER: CONTROL_KEY})
    urllib.request.urlopen(asked, timeout=60).read()


@pytest.mark.exhaustive
def test_v1_starts_restarts_and_ends_with_its_server(serving: Command) -> None:
    ready = serving.ready_line()
    base = f"{ready['openai']}/v1"
    assert httpx.get(f"{base}/models").status_code == 401
    status, models = curl(f"{base}/models")
    assert status == 200 and [model["id"] for model in models["data"]] == ["code"]
    client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0)
    answer = client.completions.create(model="code", prompt=[1, 2, 3], max_tokens=5)
    assert answer.usage is not None and answer.usage.completion_tokens == 5

    # The endpoint has the key, but no process's command line or environment shows it.
    processes = [psutil.Process(process.pid) for process in find_processes(serving.folder())]
    assert len(processes) > 2 and endpoint_of(serving) in {process.pid for process in processes}
    assert not any(KEY in f"{process.cmdline()} {process.environ()}" for process in processes)

    # The engine's model is unloaded and loaded again.
    repository(ready["http"], "unload")
    assert eventually(lambda: curl(f"{base}/models")[0] == 503)
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="code", prompt=[1, 2, 3], max_tokens=5)
    assert refused.value.status_code == 503
    repository(ready["http"], "load")
    assert client.completions.create(model="code", prompt=[1, 2, 3], max_tokens=5) is not None

    # The endpoint's process is killed.
    first = endpoint_of(serving)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: endpoint_of(serving) not in (0, first))
    assert eventually(lambda: is_answering(base), 60)

    # tritonserver is killed.
    os.kill(serving.server(), signal.SIGKILL)
    assert serving.ready_line() == ready and is_answering(base)

    # The server is told to end.
    stream = client.completions.create(model="code", prompt=[1, 2, 3], max_tokens=NUM_TOKENS, stream=True)
    chunks = [next(iter(stream))]
    all_of_it, folder = find_processes(serving.folder()), serving.folder()
    serving.process.terminate()
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert serving.process.wait(30) == 0
    assert not any(is_alive(process.pid) for process in all_of_it)
    assert not folder.exists() and not shared_memory_of(folder.name)


def is_answering(base: str) -> bool:
    try:
        return curl(f"{base}/models")[0] == 200
    except subprocess.CalledProcessError:
        return False
