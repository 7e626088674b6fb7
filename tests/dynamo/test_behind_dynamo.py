"""Dynamo's own frontend and KV-aware router before two workers, each with its server of the demo model.

The environment with Dynamo is made here: it is not in constraints.txt, as it excludes our version of pydantic.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

import inflight
from inflight.server.repository import default_repository
from tests.commands import end, eventually, free_port, read_ready_line

pytestmark = pytest.mark.exhaustive

DYNAMO = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
NEEDED = (
    "pydantic<=2.13.5", "uvloop", "msgspec", "pyzmq", "prometheus-client", "pyyaml", "packaging",
    "typing-extensions",
)  # fmt: skip
"""Packages that the frontend and the worker import; Dynamo's planner and other parts need more."""
DEMO_MODEL = default_repository() / "tensorrt_llm" / "1" / "demo_model"
PREFIXES = ("def alpha(self, name): return name\n" * 20, "class Beta(object): size = 4\n" * 20)
"""The beginnings of the prompts of two groups of conversations; each has some full KV blocks."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with Dynamo."""
    folder = tmp_path_factory.mktemp("dynamo")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", *DYNAMO], check=True)
    subprocess.run([*install, *NEEDED], check=True)
    return python


@pytest.fixture(scope="module")
def site(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="dynamo-") as folder:  # pytest's can be too deep for a socket
        site = Site(python, Path(folder), tmp_path_factory.mktemp("logs"))
        try:
            site.start()
            yield site
        finally:
            site.close()


class Site:
    """A frontend, two servers and a worker for each of them."""

    def __init__(self, python: Path, folder: Path, logs: Path) -> None:
        self._python, self._folder, self._logs = python, folder, logs
        self._environment = {
            **os.environ,
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
        }
        self.url = f"http://127.0.0.1:{free_port()}"
        self._events = [free_port(), free_port()]
        self.urls = ["", ""]
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._num_prompts = 0

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        arguments = ["--http-host", "127.0.0.1", "--http-port", port, "--router-mode", "kv"]
        self._run("frontend", self._python, "-m", "dynamo.frontend", *arguments, "--migration-limit", "3")
        for number in (0, 1):
            self.start_server(number)
            self.start_worker(number)
        self.wait_for_workers()

    def start_server(self, number: int) -> None:
        events = json.dumps({"endpoint": f"tcp://*:{self._events[number]}"})
        options = ["--set", f"engine_endpoint={self._socket(number)}", "--kv-events-config", events]
        command = [sys.executable, "-m", "inflight", "serve", "--no-triton", "--openai-port", "0", *options]
        self._run(f"server{number}", *command)
        self.urls[number] = read_ready_line(self._processes[f"server{number}"])["openai"]

    def start_worker(self, number: int) -> None:
        address = f"tcp://127.0.0.1:{self._events[number]}"
        options = ["--engine-endpoint", self._socket(number), "--kv-events-endpoint", address]
        options += ["--model", DEMO_MODEL, "--served-model-name", "demo"]
        self._run(f"worker{number}", self._python, "-m", "inflight.dynamo", *options)

    def _socket(self, number: int) -> Path:
        return self._folder / f"engine{number}.sock"

    def _run(self, name: str, *command: str | Path) -> None:
        package = Path(inflight.__file__).parents[1]
        with (self._logs / name).open("a") as log:
            self._processes[name] = subprocess.Popen(
                [str(part) for part in command],
                stdout=subprocess.PIPE if name.startswith("server") else log,
                stderr=log,
                text=True,
                env={**self._environment, "PYTHONPATH": str(package)},
            )

    def wait_for_workers(self) -> None:
        """Wait until the frontend has both workers, and its router hears of what is cached at both servers."""
        assert eventually(lambda: self._num_workers() == 2), self._logs
        for number, url in enumerate(self.urls):
            known = self.num_stored()
            assert eventually(partial(self._is_heard, url, known)), (number, self._logs)

    def _is_heard(self, url: str, known: float) -> bool:
        # An event before the worker's subscription is lost, so every attempt stores another block.
        self._num_prompts += 1
        ask(url, "/v1/completions", prompt=[self._num_prompts, *range(10, 60)], max_tokens=1)
        return self.num_stored() > known

    def _num_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/health") as answer:
                instances = json.load(answer)["instances"]
        except urllib.error.URLError:
            return 0
        return [instance["endpoint"] for instance in instances].count("generate")

    def num_stored(self) -> float:
        """How many events with stored blocks the router has taken."""
        name = r'dynamo_component_kv_cache_events_applied\{.*event_type="stored",status="ok"'
        return metric(self.url, name)

    def complete(self, **body: Any) -> dict[str, Any]:
        return ask(self.url, "/v1/completions", model="demo", **body)

    def running(self) -> int:
        """Return the number of the server that has a running request."""
        found: list[int] = []

        def is_found() -> bool:
            found[:] = [n for n, url in enumerate(self.urls) if metric(url, "vllm:num_requests_running")]
            return bool(found)

        assert eventually(is_found)
        return found[0]

    def kill(self, name: str, number: signal.Signals) -> int:
        """Send a signal to a process, and return its status once it has ended."""
        self._processes[name].send_signal(number)
        return self._processes[name].wait(60)

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            end(process)


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def open_stream(site: Site, **body: Any) -> HTTPResponse:
    request = urllib.request.Request(
        f"{site.url}/v1/completions",
        json.dumps({"model": "demo", "stream": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request)


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's values; `name` is a regular expression."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(name, line))


def refusal(url: str, path: str, **body: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(url, path, **body)
    with refused.value as error:
        return error.code, json.load(error)["message"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
def test_completions_have_the_servers_tokens(site: Site, sampling: dict[str, Any]) -> None:
    body = {"prompt": "def f(", "max_tokens": 40, "logprobs": 3, **sampling}
    (expected,) = ask(site.urls[0], "/v1/completions", **body)["choices"]
    (found,) = site.complete(**body)["choices"]
    assert (found["text"], found["finish_reason"]) == (expected["text"], "length")
    given, wanted = found["logprobs"], expected["logprobs"]
    assert given["tokens"] == wanted["tokens"]
    assert given["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-5)
    # The texts of special tokens differ: the frontend leaves them empty.
    for tops, others in zip(given["top_logprobs"], wanted["top_logprobs"]):
        assert sorted(tops.values()) == pytest.approx(sorted(others.values()), abs=1e-5)


def test_chats_have_the_servers_tokens_and_follow_guides(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    guided = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": closed}},
        "max_tokens": 60,
    }
    for options in ({"max_tokens": 30}, guided):
        body = {"messages": [{"role": "user", "content": "def f("}], "temperature": 0, **options}
        (expected,) = ask(site.urls[1], "/v1/chat/completions", **body)["choices"]
        answer = ask(site.url, "/v1/chat/completions", model="demo", **body)
        (found,) = answer["choices"]
        assert found["message"]["content"] == expected["message"]["content"]
        assert found["finish_reason"] == expected["finish_reason"]
    assert set(json.loads(found["message"]["content"])) == {"a"}


def test_refused_requests_name_the_field(site: Site) -> None:
    for body, message in (
        ({"max_tokens": 5000}, "max_tokens is 5000"),
        ({"n": 2}, "n must be 1, got 2"),
        ({"echo": True}, "prompt_logprobs is not supported by this worker"),
        ({"guided_regex": "a("}, "guided_decoding cannot be used: it has an invalid regular expression"),
    ):
        status, told = refusal(site.url, "/v1/completions", model="demo", prompt="def f(", **body)
        assert status == 400 and told.startswith(message)


def test_conversations_land_at_the_server_that_has_their_beginning(site: Site) -> None:
    def is_above(known: float) -> bool:
        return site.num_stored() > known

    hits, misses = "inflight_kv_cache_hit_tokens_total", "inflight_kv_cache_missed_tokens_total"
    for url, prefix in zip(site.urls, PREFIXES):
        known = site.num_stored()
        ask(url, "/v1/completions", prompt=prefix, max_tokens=1)  # the router did not see this request
        assert eventually(partial(is_above, known))
    for turn in ("a", "b", "c"):
        for number, prefix in enumerate(PREFIXES):
            before = [metric(url, hits) for url in site.urls]
            away = metric(site.urls[1 - number], misses)
            answer = site.complete(prompt=prefix + turn, max_tokens=1)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= answer["usage"]["prompt_tokens"] // 32 * 32 - 32 > 0
            after = [metric(url, hits) for url in site.urls]
            assert after[number] - before[number] >= cached
            assert after[1 - number] == before[1 - number]
            assert metric(site.urls[1 - number], misses) == away


def test_a_client_that_leaves_stops_its_request(site: Site) -> None:
    name = r'inflight_finished_sequences_total\{.*finish_reason="CANCELLED"'

    def num_cancelled() -> float:
        return sum(metric(url, name) for url in site.urls)

    before = num_cancelled()
    with open_stream(site, prompt="class Left(object):\n    def", max_tokens=900, temperature=0) as stream:
        stream.readline()
    assert eventually(lambda: num_cancelled() == before + 1)


@pytest.mark.parametrize(
    ("victim", "number"),
    [("worker", signal.SIGKILL), ("server", signal.SIGKILL), ("worker", signal.SIGTERM)],
)
def test_a_stream_goes_on_elsewhere_without_losing_a_token(
    site: Site, victim: str, number: signal.Signals
) -> None:
    body = {"prompt": f"class {victim}{number}(object):\n    def", "max_tokens": 900, "temperature": 0}
    (expected,) = ask(site.urls[0], "/v1/completions", **body)["choices"]
    texts: list[str] = []
    place = -1
    with open_stream(site, **body) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            texts += [choice["text"] for choice in event["choices"]]
            if len(texts) == 5:
                place = site.running()
                status = site.kill(f"{victim}{place}", number)
                assert status == (0 if number is signal.SIGTERM else -number)
    assert "".join(texts) == expected["text"]
    assert place >= 0
    if victim == "server":
        site.start_server(place)  # its worker finds it again
    else:
        site.start_worker(place)
    site.wait_for_workers()
