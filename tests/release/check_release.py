"""An engine in this process releases all its resources at the end, idle or with requests in flight.

It is made by the composition root, with the fake engine and with the demo model. The fake engine can hang.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight import build as factory
from inflight.build import RunningEngine, build_engine
from inflight.config import Parameters
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.endpoint import local
from inflight.endpoint.client import SocketEngineClient
from inflight.load_model import LoadModel, load_model
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_server import load_fake
from tests.commands import eventually
from tests.endpoint.factories import Inbox
from tests.triton.factories import make_parameters

VERSION_DIR = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
# Two requests of 400 tokens fill the KV cache.
COMMON = {"max_tokens_in_paged_kv_cache": "1024", "max_beam_width": "2", "watchdog_timeout_ms": "60000"}
ENGINES = {
    "fake": {"gpt_model_path": "vocab=1000,step_us=0", "max_sequence_length": "2048"},
    "demo": {"dtype": "float32", "engine_threads": "1"},
}
LOADS: dict[str, LoadModel] = {"fake": load_fake, "demo": load_model}
LIVES = {"fake": 10, "demo": 6}
# Four loads of the demo model have 50 MB of weights.
MEMORY_KIB = {"fake": 4 << 10, "demo": 32 << 10}


@pytest.fixture
def path() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="engine-")  # pytest's own folders can be too deep for a socket
    yield str(Path(folder, "engine.sock"))
    shutil.rmtree(folder)


def parameters_of(kind: str) -> Parameters:
    return make_parameters(**COMMON, **ENGINES[kind])


def make_request(length: int, streaming: bool = True, **sampling: int) -> Request:
    return Request(0, PROMPT, length, streaming, sampling=SamplingConfig(**sampling))


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_kib() -> int:
    """Return resident memory without the C library's free memory, which depends on earlier tests."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def parts_of(engine: RunningEngine) -> list[weakref.ref]:
    manager = engine._manager
    scheduler, device = manager._scheduler, manager._engine
    parts = [manager, scheduler, scheduler.kv_cache, device, engine.client]
    runner = getattr(device, "runner", None)
    parts += [value for name in ("cache", "decoder") if (value := getattr(runner, name, None)) is not None]
    return [weakref.ref(part) for part in parts if not isinstance(part, list)]


def num_held_blocks(engine: RunningEngine) -> int:
    return engine._manager._scheduler.kv_cache.pool.num_held


def build(kind: str, path: str) -> RunningEngine:
    return build_engine(parameters_of(kind), str(VERSION_DIR), path, load=LOADS[kind])


def live(kind: str, path: str) -> tuple[list[int], list[weakref.ref]]:
    """Run an engine from the first request to its end; return greedy tokens, and objects to be freed."""
    engine = build(kind, path)
    front_end = SocketEngineClient(path)
    clients = [engine.client, front_end]
    inboxes = [Inbox() for _ in range(8)]
    for number, inbox in enumerate(inboxes):
        sampling = {"beam_width": 2} if number % 4 == 3 else {"num_return_sequences": 1 + number % 2}
        clients[number % 2].submit(make_request(8, streaming=number % 3 == 0, **sampling), inbox)
    errors = [inbox.final().error for inbox in inboxes]
    assert errors == [None] * 8
    assert num_held_blocks(engine) == 0
    parts = parts_of(engine)
    assert engine.close() is True
    assert engine.close() is True
    front_end.close()
    assert not os.path.exists(path)
    return inboxes[0].tokens, parts


@pytest.mark.parametrize("kind", ENGINES)
def test_one_engine_after_another_leaves_no_threads_files_or_memory(path, kind):
    threads_before = threads()
    tokens, first_parts = live(kind, path)
    gc.collect()
    assert [part() for part in first_parts if part() is not None] == []
    for number in range(1, LIVES[kind]):
        again, parts = live(kind, path)
        assert again == tokens
        gc.collect()
        assert [part() for part in parts if part() is not None] == []
        assert threads() <= threads_before
        if number == 1:  # the first runs include the first use of libraries
            files, native_threads, memory = num_files(), num_native_threads(), resident_kib()
    assert num_files() == files
    # A thread that Python has joined may take a moment more to disappear.
    assert eventually(lambda: num_native_threads() <= native_threads)
    assert resident_kib() < memory + MEMORY_KIB[kind]


@pytest.mark.parametrize("kind", ENGINES)
def test_close_answers_each_request_in_flight_once_and_frees_its_blocks(path, kind):
    """There are streams, a beam search and waiting requests, from this process and over the socket."""
    threads_before = threads()
    engine = build(kind, path)
    front_end = SocketEngineClient(path)
    inboxes = [Inbox() for _ in range(6)]
    for client, inbox in zip([engine.client, front_end] * 2, inboxes):
        client.submit(make_request(400), inbox)
    inboxes[0].next()
    engine.client.submit(make_request(400, beam_width=2), inboxes[4])
    front_end.submit(make_request(400, streaming=False), inboxes[5])
    scheduler = engine._manager._scheduler
    assert engine.close(timeout_s=0.0) is True
    finals = [inbox.final() for inbox in inboxes]
    assert {final.error.code for final in finals if final.error} <= {"UNAVAILABLE"}
    assert any(final.error for final in finals)
    assert scheduler.num_active == 0 and scheduler.kv_cache.pool.num_held == 0
    front_end.close()
    assert threads() <= threads_before


class Hanging:
    """A forward pass that hangs until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        forward = FakeEngine.forward

        def hang(engine: FakeEngine, batch):
            self.begun.set()
            self.let_go.wait()
            return forward(engine, batch)

        monkeypatch.setattr(FakeEngine, "forward", hang)
        monkeypatch.setattr(local, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(factory, "_LOOP_END_S", 0.0)


@pytest.fixture
def hanging(monkeypatch) -> Iterator[Hanging]:
    hanging = Hanging(monkeypatch)
    yield hanging
    hanging.let_go.set()


def test_a_hanging_loop_answers_all_requests(path, hanging, caplog):
    threads_before = threads()
    engine = build("fake", path)
    front_end = SocketEngineClient(path)
    inboxes = [Inbox() for _ in range(6)]
    engine.client.submit(make_request(50), inboxes[0])
    assert hanging.begun.wait(60)
    for client, inbox in zip([engine.client, front_end] * 2, inboxes[1:5]):
        client.submit(make_request(400), inbox)
    engine.client.submit(make_request(400, beam_width=2), inboxes[5])

    assert engine.close(timeout_s=0.0) is False
    assert [inbox.final().error.code for inbox in inboxes] == ["UNAVAILABLE"] * 6
    assert not os.path.exists(path)
    assert "the generation loop hangs" in caplog.text and "it waits for the device" in caplog.text

    hanging.let_go.set()
    engine._manager._thread.join(60)
    assert engine.close() is True
    for inbox in inboxes:
        inbox.final()  # no response may follow
    parts = parts_of(engine)
    front_end.close()
    del engine
    gc.collect()
    assert [part() for part in parts if part() is not None] == []
    assert threads() <= threads_before


def test_a_successor_ends_a_hanging_engine(path, hanging, monkeypatch):
    """A new process finds the last one's socket, also between two engines of one process."""
    from inflight.endpoint import client as endpoint_client

    monkeypatch.setattr(endpoint_client, "peer_has_this_parent", lambda connected: True)
    engine = build("fake", path)
    inbox, front_end_s = Inbox(), Inbox()
    front_end = SocketEngineClient(path)
    engine.client.submit(make_request(50), inbox)
    front_end.submit(make_request(50), front_end_s)
    assert hanging.begun.wait(60)

    assert endpoint_client.retire_predecessor(path, 0.0) is True
    assert [i.final().error.code for i in (inbox, front_end_s)] == ["UNAVAILABLE"] * 2
    hanging.let_go.set()
    monkeypatch.setattr(factory, "_LOOP_END_S", 10.0)
    successor = build("fake", path)
    again = Inbox()
    front_end.submit(make_request(50), again)  # the client finds the new engine by itself
    assert again.final().error is None
    front_end.close()
    assert engine.close() is True and successor.close() is True
