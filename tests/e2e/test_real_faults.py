"""Faults of the machine under load, on a real server: clients that retry get the answers that they got before.

With the option `-s` of pytest, each test prints the longest time from a request's first attempt to its answer.
Tests that need rights, for a file system or a control group of their own, are skipped without them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest

import inflight
from inflight.server import runtime_directory
from inflight.testing.fake_server import make_fake_repository
from tests.commands import Command, command

from .clients import wait_until
from .conftest import DEMO_MODEL, REPOSITORY
from .retrying_clients import PATIENCE_S, PROMPT, RetryingClients, ask_triton, post, print_longest

pytestmark = pytest.mark.exhaustive

SETTINGS = {
    "fake_engine": "vocab=3072,step_us=2000",
    "max_sequence_length": "4096",
    "tokenizer_dir": str(DEMO_MODEL),
    "enable_state_requests": "true",
}
FRONT_ENDS = ("preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls", "tensorrt_llm_infer")
PROCESSES = (
    "tritonserver",
    "inflight.openai",
    "tensorrt_llm",
    *FRONT_ENDS,
    "inflight.server.guard",
    "inflight.server.keeper",
)
"""A process of each kind; a model's process has the model's name."""


@pytest.fixture
def serving(elsewhere: Path, tmp_path: Path) -> Iterator[Command]:
    """A running `scripts/serve` with /v1 and the repository's models on a fake engine."""
    with started(tmp_path) as running:
        yield running


@contextlib.contextmanager
def started(tmp_path: Path, *flags: str) -> Iterator[Command]:
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    models = make_fake_repository(tmp_path / "models")
    with command(models, *settings, "--openai-port", "0", "--served-model-name", "code", *flags) as running:
        yield running


def clients_of(ready: dict[str, str], more: dict[str, Callable[[], object]] | None = None) -> RetryingClients:
    """Return a client of /v1, one of Triton, and one for each function of `more`."""
    v1, triton = ready["openai"], ready["http"]
    return RetryingClients({"v1": lambda: ask_v1(v1), "triton": lambda: ask_triton(triton), **(more or {})})


@contextlib.contextmanager
def under_load(serving: Command) -> Iterator[tuple[dict[str, str], RetryingClients]]:
    """Yield what a server's READY line says, and clients that have had answers already."""
    ready = serving.ready_line()
    log = watch_log(serving)
    with clients_of(ready) as clients:
        try:
            clients.wait_answered()
            yield ready, clients
        except AssertionError:  # for pytest's report
            print(clients.num_answers, clients.last_error)
            print("".join(line for line in log if " access] " not in line))
            raise


def ask_v1(base: str, **body: Any) -> str:
    with post(
        f"{base}/v1/completions", model="code", prompt=PROMPT, max_tokens=20, temperature=0, **body
    ) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def process_of(serving: Command, kind: str) -> psutil.Process:
    """Return the server's process of a kind."""
    of_server = [psutil.Process(each.pid) for each in runtime_directory.find_processes(serving.folder())]
    for process in (*of_server, *psutil.Process(serving.process.pid).children()):
        words = process.cmdline()
        if kind == process.name() or any(
            word == kind or word.endswith(f"/{kind}/1/model.py") for word in words
        ):
            return process
    raise AssertionError(f"there is no process {kind}")


def watch_log(serving: Command) -> list[str]:
    """Read the command's log from now on, so that it never waits for a reader; return its lines."""
    lines: list[str] = []
    assert serving.process.stderr is not None
    stream = serving.process.stderr
    threading.Thread(target=lambda: lines.extend(stream), daemon=True).start()
    return lines


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_clients_that_retry_are_answered_whichever_process_is_lost(
    serving: Command, kind: str, is_killed: bool
) -> None:
    with under_load(serving) as (_, clients):
        lost = process_of(serving, kind)
        lost.send_signal(signal.SIGKILL if is_killed else signal.SIGSTOP)
        clients.wait_answered()
        if not is_killed and kind in ("tritonserver", "tensorrt_llm", "inflight.openai"):
            assert not lost.is_running()
    assert not clients.wrong
    clients.report(kind)
    serving.process.terminate()  # a killed one would leave its server behind if the keeper was lost
    assert serving.process.wait(PATIENCE_S) == 0


def test_a_stopped_tritonserver_is_started_again_without_a_request(serving: Command) -> None:
    ready = serving.ready_line()
    watch_log(serving)
    clients = clients_of(ready)  # has had answers, and sends nothing yet
    lost = process_of(serving, "tritonserver")
    lost.send_signal(signal.SIGSTOP)
    wait_until(lambda: not lost.is_running(), PATIENCE_S)
    with clients:
        clients.wait_answered()
    assert not clients.wrong


def test_clients_are_answered_when_the_supervisor_is_stopped_and_lost_processes_when_it_goes_on(
    serving: Command,
) -> None:
    with under_load(serving) as (_, clients):
        serving.process.send_signal(signal.SIGSTOP)
        clients.wait_answered()
        assert not clients.num_repeated
        process_of(serving, "inflight.openai").kill()
        wait_until(lambda: clients.num_repeated > 3, PATIENCE_S)
        before = clients.num_answers["triton"]
        wait_until(lambda: clients.num_answers["triton"] > before + 1, PATIENCE_S)
        serving.process.send_signal(signal.SIGCONT)
        clients.wait_answered()
    assert not clients.wrong
    clients.report("supervisor stopped")


def test_nothing_is_left_of_a_busy_server_whose_supervisor_is_killed(serving: Command) -> None:
    with under_load(serving) as (_, clients):
        folder = serving.folder()
        begun_s = time.monotonic()
        serving.process.kill()
        wait_until(lambda: not folder.exists(), PATIENCE_S)
        print(f"supervisor killed: nothing left after {time.monotonic() - begun_s:.1f} s")
        assert not runtime_directory.find_processes(folder)
        assert not runtime_directory.shared_memory_files(folder)
    assert not clients.wrong


def test_a_server_ends_in_order_although_its_keeper_is_stopped(serving: Command) -> None:
    with under_load(serving) as (_, clients):
        folder = serving.folder()
        keeper = process_of(serving, "inflight.server.keeper")
        keeper.send_signal(signal.SIGSTOP)
        serving.process.terminate()
        assert serving.process.wait(PATIENCE_S) == 0
        assert not keeper.is_running() and not folder.exists()
    assert not clients.wrong


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_clients_with_guides_are_answered_when_the_process_that_compiles_them_is_lost(
    elsewhere: Path, is_killed: bool
) -> None:
    numbers = itertools.count()

    def ask_guided(base: str) -> str:
        # Each request needs a guide that is not known yet.
        schema = {"enum": ["yes"], "description": str(next(numbers))}
        return ask_v1(
            base, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        )

    with command(REPOSITORY, "--openai-port", "0", "--served-model-name", "code") as serving:
        ready = serving.ready_line()
        watch_log(serving)
        with clients_of(ready, {"guided": lambda: ask_guided(ready["openai"])}) as clients:
            clients.wait_answered()
            lost = process_of(serving, "inflight.guided.child")
            lost.send_signal(signal.SIGKILL if is_killed else signal.SIGSTOP)
            clients.wait_answered()
            assert not lost.is_running()
    assert not clients.wrong
    clients.report("guides")


# ---------------------------------------------------------------- connections and descriptors


def test_two_thousand_connections_are_served_and_two_thousand_idle_ones_disturb_nobody(
    serving: Command,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5000:
        pytest.skip(f"at most {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 5000), hard))
    ready = serving.ready_line()
    watch_log(serving)
    expected = ask_v1(ready["openai"])
    body = json.dumps({"model": "code", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
    )
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(ready["openai"])) for _ in range(2000)]
        assert ask_v1(ready["openai"]) == expected and ask_triton(ready["http"])
        begun_s = time.monotonic()
        for each in connections:
            each.sendall(head.encode() + body)
        answers = [read_all(each) for each in connections]
        print_longest(
            "2,000 connections, from the first request to the last answer", time.monotonic() - begun_s
        )
    statuses = {answer.split(b"\r\n")[0] for answer in answers}
    assert statuses == {b"HTTP/1.1 200 OK"}, statuses
    texts = {json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for answer in answers}
    assert texts == {expected}
    with contextlib.ExitStack() as stack:
        for address in (f"http://{ready['http']}", f"http://{ready['grpc']}"):
            for _ in range(1000):
                stack.enter_context(connect(address))
        assert ask_v1(ready["openai"]) == expected and ask_triton(ready["http"])


def test_clients_that_do_not_read_delay_nobody_and_lose_nothing(serving: Command) -> None:
    ready = serving.ready_line()
    watch_log(serving)
    body = {
        "model": "code",
        "prompt": PROMPT,
        "max_tokens": 3000,
        "temperature": 0,
        "stream": True,
        "logprobs": 5,
    }
    with post(f"{ready['openai']}/v1/completions", **body) as answer:
        expected = texts_of(answer.read())
    with contextlib.ExitStack() as stack:
        answers = [stack.enter_context(post(f"{ready['openai']}/v1/completions", **body)) for _ in range(5)]
        with clients_of(ready) as clients:
            time.sleep(10)  # all answers are complete, or wait for their readers
            clients.wait_answered()
        assert not clients.wrong and not clients.num_repeated
        clients.report("clients that do not read")
        assert all(texts_of(answer.read()) == expected for answer in answers)


def texts_of(stream: bytes) -> str:
    """Return the text of a stream that came to its end."""
    *events, end = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert end == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def connect(url: str) -> socket.socket:
    host, _, port = url.partition("://")[2].partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def read_all(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("kind", ["inflight.openai", "tensorrt_llm"])
def test_a_process_whose_descriptors_are_used_up_serves_again_afterwards(serving: Command, kind: str) -> None:
    with under_load(serving) as (ready, clients):
        process = process_of(serving, kind)
        limits = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 2, limits[1]))
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(connect(ready["openai"]))
            time.sleep(3)
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
        clients.wait_answered()
        assert process.is_running()
    assert not clients.wrong
    clients.report(kind)


# ---------------------------------------------------------------- full file systems


def mounted(target: Path, size: str) -> bool:
    """Mount a file system in memory, if this user may."""
    target.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)], capture_output=True
    )
    return made.returncode == 0


def test_a_full_dev_shm_fails_requests_only_while_it_is_full(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server's processes get a /dev/shm of their own: a name space of mounts.
    in_own_space = f'mount -t tmpfs -o size=96m tmpfs /dev/shm && exec {sys.executable} "$@"'
    launcher = tmp_path / "python"
    launcher.write_text(
        f"#!/bin/sh\nexec unshare -m --propagation private sh -c '{in_own_space}' sh \"$@\"\n"
    )
    launcher.chmod(0o755)
    if subprocess.run([launcher, "-c", "pass"], capture_output=True).returncode:
        pytest.skip("no right to a name space of mounts")
    monkeypatch.setattr("tests.commands.sys.executable", str(launcher))
    with started(tmp_path) as serving:
        with under_load(serving) as (ready, clients):
            own_shm = Path(f"/proc/{serving.server()}", "root", "dev", "shm")
            filler = own_shm / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", 0) as file:
                while True:
                    file.write(bytes(1 << 16))
            assert shutil.disk_usage(own_shm).free < 1 << 16
            with contextlib.suppress(urllib.error.HTTPError):
                post(
                    f"http://{ready['http']}/v2/models/tensorrt_llm/generate",
                    input_ids=PROMPT * 700,
                    request_output_len=5,
                    embedding_bias=[0.0] * 3072,
                ).close()
            time.sleep(3)
            filler.unlink()
            clients.wait_answered()
        assert not clients.wrong
        clients.report("/dev/shm")


def test_a_full_disk_of_saved_blocks_fails_no_request(elsewhere: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mounted(disk, "200k"):
        pytest.skip("no right to mount a file system")
    try:
        flags = [
            "--set",
            f"kv_cache_dir={disk / 'blocks'}",
            "--openai-port",
            "0",
            "--served-model-name",
            "code",
        ]
        with command(Path(inflight.__file__).parents[2] / "model_repository", *flags) as serving:
            ready = serving.ready_line()
            lines = watch_log(serving)
            url = f"{ready['openai']}/v1/completions"
            answers: list[str] = []
            longest_s = 0.0
            for _ in range(2):
                for number in range(30):
                    begun_s = time.monotonic()
                    with post(
                        url, model="code", prompt=[number + 1] * 200, max_tokens=4, temperature=0
                    ) as answer:
                        answers.append(json.loads(answer.read())["choices"][0]["text"])
                    longest_s = max(longest_s, time.monotonic() - begun_s)
            print_longest("disk of saved blocks full", longest_s)
            assert answers[:30] == answers[30:]
            wait_until(lambda: any("KV blocks are not saved any more" in line for line in lines), PATIENCE_S)
        assert shutil.disk_usage(disk).free < 100_000
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# ---------------------------------------------------------------- memory


def test_a_models_process_that_runs_out_of_memory_is_replaced(serving: Command) -> None:
    group = Path(f"/sys/fs/cgroup/memory/inflight-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no right to a control group of memory")
    try:
        with under_load(serving) as (ready, clients):
            victim = process_of(serving, "tensorrt_llm")
            (group / "memory.limit_in_bytes").write_text(str(1 << 20))
            (group / "cgroup.procs").write_text(str(victim.pid))
            prompt = list(range(2, 3000))  # needs memory, which the group does not have
            for _ in range(200):
                with contextlib.suppress(OSError, HTTPException):
                    post(
                        f"{ready['openai']}/v1/completions",
                        model="code",
                        prompt=prompt,
                        max_tokens=900,
                        logprobs=5,
                    ).close()
                if not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE:
                    break
            assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, "it was not ended"
            clients.wait_answered()
        assert not clients.wrong
        clients.report("memory")
    finally:
        with contextlib.suppress(OSError):
            wait_until(lambda: not (group / "cgroup.procs").read_text(), 10)
        with contextlib.suppress(OSError):
            group.rmdir()


# ---------------------------------------------------------------- an upgrade


def test_a_server_goes_on_while_its_package_is_replaced(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    shutil.copytree(Path(inflight.__file__).parent, installed / "inflight")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    with started(tmp_path) as serving:
        with under_load(serving) as (ready, clients):
            for kind in ("tensorrt_llm", "inflight.openai"):
                assert str(installed) in process_of(serving, kind).environ()["PYTHONPATH"]
            # As pip does: each file is removed and written.
            for path in (installed / "inflight").rglob("*.py"):
                path.unlink()
                path.write_text("raise RuntimeError('another version')\n")
            clients.wait_answered()
            with post(
                f"{ready['openai']}/v1/chat/completions",
                model="code",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=5,
                stream=True,
            ) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        assert not clients.wrong and not clients.num_repeated
        clients.report("package replaced")
        started_now = subprocess.run(
            [sys.executable, "-c", "import inflight.server.launch"], capture_output=True
        )
        assert b"another version" in started_now.stderr
