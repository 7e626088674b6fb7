"""The OpenAI endpoint's process without a tritonserver; the test plays the engine at the other end."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from inflight.core.request.request import Request
from inflight.endpoint.server import EndpointServer
from inflight.openai.options import API_KEYS_VARIABLE, OpenAiOptions
from inflight.server import kept_process
from inflight.server.errors import OptionError
from inflight.server.openai_process import OpenAiProcess
from inflight.server.ports import Ports, resolve_host, resolve_ports
from inflight.server.repository import default_repository
from tests.commands import children_running, eventually, is_alive
from tests.endpoint.factories import DESCRIPTION, Batcher, delta
from tests.openai_endpoint.serving import make_certificate

LOCALHOST = "127.0.0.1"
DEMO_MODEL = default_repository() / "tensorrt_llm" / "1" / "demo_model"
BODY = {"model": "demo_model", "prompt": [1, 2, 3], "max_tokens": 3, "stream": True}


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="openai-"))  # pytest's own folders can be too deep for a socket
    yield made
    shutil.rmtree(made)


@contextmanager
def engine_at(path: Path) -> Iterator[Batcher]:
    """An engine with the demo model's tokenizer, whose responses the test sends."""
    limits = replace(DESCRIPTION.limits, vocab_size=3072)
    batcher = Batcher(
        replace(DESCRIPTION, limits=limits, model_path=str(DEMO_MODEL), tokenizer_dir=str(DEMO_MODEL))
    )
    server = EndpointServer(batcher.client, str(path))
    try:
        yield batcher
    finally:
        server.close()


class Running:
    """A started endpoint and its output."""

    def __init__(self, folder: Path, **options: object) -> None:
        port = options.pop("port", None) or resolve_ports(LOCALHOST, Ports(openai=0)).openai
        self.said = io.StringIO()
        self.options = OpenAiOptions(host=LOCALHOST, port=int(str(port)), **options)  # pyright: ignore
        self.endpoint = OpenAiProcess(self.options, lambda: (folder / "engine.sock",), folder, 20, self.said)
        self.endpoint.start()

    @property
    def url(self) -> str:
        return self.endpoint.url

    def status(self, path: str = "/v1/models") -> int:
        return httpx.get(self.url + path).status_code

    def pid(self) -> int:
        """Return the id of the process that listens now."""
        return next((child.pid for child in children_running(str(self.options.port))), 0)


@contextmanager
def running(folder: Path, **options: object) -> Iterator[Running]:
    started = Running(folder, **options)
    try:
        assert eventually(lambda: started.endpoint.is_up() or bool(started.endpoint.failure), 60)
        yield started
    finally:
        started.endpoint.kill()


def test_the_endpoint_listens_before_the_engine_exists_and_survives_it(folder: Path) -> None:
    with running(folder) as started:
        assert started.status() == 503
        for _ in range(2):  # like a model that is loaded, unloaded and loaded again
            with engine_at(folder / "engine.sock"):
                answer = httpx.get(f"{started.url}/v1/models").json()
                assert [model["id"] for model in answer["data"]] == ["demo_model"]
            assert eventually(lambda: started.status() == 503)


def test_a_killed_endpoint_is_started_again(folder: Path) -> None:
    with engine_at(folder / "engine.sock"), running(folder) as started:
        first = started.pid()
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: started.pid() not in (0, first), 60)
        assert eventually(lambda: is_listening(started.options.port), 60)
        assert started.status() == 200
        (line,) = started.said.getvalue().splitlines()
        assert line == "serve: the OpenAI endpoint ended (exit status -9) and is started again now"


def test_a_stopped_endpoint_is_killed_and_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_process, "LOOK_S", 0.1)
    with running(folder) as started:
        first = started.pid()
        os.kill(first, signal.SIGSTOP)
        assert eventually(lambda: started.pid() not in (0, first), 60)
        assert eventually(lambda: is_listening(started.options.port), 60)
        assert not is_alive(first)
        lines = started.said.getvalue().splitlines()
        assert [line for line in lines if line.startswith("serve: ")] == [
            "serve: the OpenAI endpoint was stopped by a signal for 0.1 s, and is killed",
            "serve: the OpenAI endpoint ended (exit status -9) and is started again now",
        ]


def test_an_endpoint_that_cannot_be_started_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [True, True]

    def refuse_two(*arguments: Any, **options: Any) -> Any:
        if refusals:
            refusals.pop()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return subprocess.Popen(*arguments, **options)

    with running(folder) as started:
        first = started.pid()
        stand_in = SimpleNamespace(Popen=refuse_two, PIPE=subprocess.PIPE)
        monkeypatch.setattr(kept_process, "subprocess", stand_in)
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: started.pid() not in (0, first), 60)
        assert eventually(lambda: is_listening(started.options.port), 60)
        told = (
            "the OpenAI endpoint cannot be started (Resource temporarily unavailable) and is started again in"
        )
        lines = [line for line in started.said.getvalue().splitlines() if told in line]
        assert [line.rpartition(" in ")[2] for line in lines] == ["0.5 s", "1 s"]


def is_listening(port: int) -> bool:
    try:
        socket.create_connection((LOCALHOST, port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def stream_in_flight(started: Running, batcher: Batcher) -> Iterator[tuple[httpx.Response, Request]]:
    """Yield a response that has begun, and its request, whose end is still to come."""
    taken: list[Request] = []

    def begin() -> None:  # the response's head is sent with its first token
        taken.append(request := batcher.take())
        batcher.client.send_response(delta(request.request_id, 691))

    beginning = threading.Thread(target=begin)
    beginning.start()
    with httpx.stream("POST", f"{started.url}/v1/completions", json=BODY, timeout=30) as answer:
        beginning.join()
        yield answer, taken[0]


def test_a_stream_in_flight_finishes_before_the_endpoint_ends(folder: Path) -> None:
    with engine_at(folder / "engine.sock") as batcher, running(folder) as started:
        pid, ended = started.pid(), []
        with stream_in_flight(started, batcher) as (answer, request):
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["finish_reason"] is None
            ending = threading.Thread(target=lambda: ended.append(started.endpoint.end(lambda: False, 30)))
            ending.start()
            assert eventually(lambda: not is_listening(started.options.port))
            assert is_alive(pid) and not ended
            batcher.client.send_response(delta(request.request_id, 10, 9, final=True))
            chunks = [line.removeprefix("data: ") for line in lines if line]
        assert chunks[-1] == "[DONE]"
        assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "length"
        ending.join()
        assert ended == [True] and not is_alive(pid)
    assert started.said.getvalue() == ""


def test_an_endpoint_that_does_not_drain_in_time_is_killed(folder: Path) -> None:
    with (
        engine_at(folder / "engine.sock") as batcher,
        running(folder) as started,
        stream_in_flight(started, batcher) as (_, request),
    ):
        assert started.endpoint.end(lambda: False, timeout_s=0.5) is False
        pid = started.pid()
        started.endpoint.kill()
        assert not is_alive(pid)
        batcher.client.send_response(delta(request.request_id, final=True))


def test_the_reason_why_the_endpoint_does_not_start_is_reported(folder: Path) -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        port = taken.getsockname()[1]
        started = Running(folder, port=port)
        assert eventually(lambda: started.endpoint.failure is not None, 60)
        started.endpoint.kill()
        assert f"port {port} on 127.0.0.1 cannot be used (Address already in use)" in str(
            started.endpoint.failure
        )
    broken = folder / "chain.pem"
    broken.write_text("no certificate")
    with running(folder, tls_certificate=broken) as started:
        assert f"--ssl-certfile {broken}: cannot be used for TLS" in str(started.endpoint.failure)


def test_api_keys_are_passed_by_a_pipe_only_and_a_certificate_enables_https(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(folder)
    monkeypatch.setenv(API_KEYS_VARIABLE, "sk-secret-of-the-environment")  # also in the options
    options = {"tls_certificate": certificate, "tls_key": key, "api_keys": ("sk-secret", "x" * 100_000)}
    with engine_at(folder / "engine.sock"), running(folder, **options) as started:
        assert started.url.startswith("https://")
        process = psutil.Process(started.pid())
        assert "sk-secret" not in f"{process.cmdline()} {process.environ()}"
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=started.url, verify=trusted) as client:
            assert client.get("/v1/models").status_code == 401
            known = {"Authorization": "Bearer sk-secret"}
            assert client.get("/v1/models", headers=known).status_code == 200


def test_the_endpoint_listens_on_ipv6(folder: Path) -> None:
    """The endpoint, started as on the command line, prints an IPv6 URL that works."""
    place = ["--engine-endpoint", str(folder / "engine.sock"), "--host", "::1", "--port", "0"]
    command = [sys.executable, "-m", "inflight.openai", *place]
    with engine_at(folder / "engine.sock"), subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            word, url = process.stdout.readline().decode().split()
            assert word == "LISTENING" and re.fullmatch(r"http://\[::1\]:\d+", url)
            statuses = [httpx.get(url + path).status_code for path in ("/health", "/", "/v1/models")]
            assert statuses == [200, 200, 200]
        finally:
            process.terminate()
    assert process.returncode == 0


def test_an_ipv6_host_is_refused_for_triton() -> None:
    with pytest.raises(OptionError, match=r"--host ::1: tritonserver listens on IPv4 alone"):
        resolve_host("::1")
