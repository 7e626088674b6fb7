"""KV cache events by ZeroMQ: vLLM's messages, replay, tiers, adapters and salts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import inflight.executor as trtllm
from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.kv_event_publisher import KvEventPublisher
from inflight.config import Parameters, SchedulingConfig
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.kv_events import KvEvent, KvEventLog, StoredBlock, block_hash
from inflight.core.request.request import Request
from inflight.core.scheduler import Scheduler
from inflight.errors import ConfigError
from inflight.parameter_spec import KvEventsConfig
from inflight.testing.fake_engine import FakeEngine
from tests.commands import free_port
from tests.core.factories import make_limits, make_request

WAIT_MS = 60_000
DEMO_MODEL = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/demo_model"
DYNAMO = "ai-dynamo-runtime==1.6.1"
"""NVIDIA Dynamo's indexer. It is not in constraints.txt, as it excludes our version of pydantic."""


@contextmanager
def publishing(
    folder: Path, size: int = 4, **values: Any
) -> Iterator[tuple[KvEventPublisher, zmq.Socket[bytes]]]:
    """Yield a publisher and a subscriber that is connected to it."""
    config = KvEventsConfig(endpoint=f"ipc://{folder}/events", topic="kv", **values)
    publisher, context = KvEventPublisher(config, size, "DISK"), zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    subscriber.subscribe("kv")
    subscriber.connect(config.endpoint)
    # Until the subscription arrives, batches are not sent: number 0 is sent again until it is received.
    while not subscriber.poll(10):
        publisher._pub.send_multipart((b"kv", b"hello", b""))
    try:
        yield publisher, subscriber
    finally:
        publisher.close()
        context.destroy(linger=0)


def received(subscriber: zmq.Socket[bytes]) -> tuple[int, list[Any]]:
    """Return the next batch: its number and its events, as any program reads them."""
    while True:
        topic, number, payload = subscriber.recv_multipart()
        if number != b"hello":
            break
    _, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, len(number), rank) == (b"kv", 8, 0)
    return int.from_bytes(number, "big"), events


def block(number: int, label: str = "", extra: tuple[int, ...] = (0, 0, 0, 0), *names: str) -> StoredBlock:
    tokens = tuple(range(4 * number, 4 * number + 4))
    return StoredBlock(number, tokens, extra, None, 35, label, names)


def test_events_of_an_iteration_are_one_message_of_vllms_format(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, subscriber):
        publisher.add([KvEvent(0, num_blocks=9)])
        stored = KvEvent(1, stored=(block(1), block(2)), parent_hash=7)
        publisher.add([stored, KvEvent(2, updated=1, priorities=(35, 80)), KvEvent(3, removed=(1, 2))])
        publisher.add([KvEvent(4, updated=1, priorities=(80, 35))])
        publisher.add([KvEvent(5, removed=(3,))])
        assert received(subscriber) == (0, [{"type": "AllBlocksCleared"}])
        first = {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": 7,
            "token_ids": [4, 5, 6, 7, 8, 9, 10, 11],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        assert received(subscriber) == (
            1,
            [first, {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"}],
        )
        assert received(subscriber) == (2, [{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}])


def test_saved_blocks_change_their_medium(tmp_path: Path) -> None:
    """A block stays saved when it is loaded, until its file is removed: first while the block is out of the cache,
    then while it is in the cache."""
    digests = [bytes([number]) * 16 for number in (1, 2)]
    saved = {digests[0]}
    log = KvEventLog(100, saved)
    kept, lost = (StoredBlock(block_hash(each), (1, 2, 3, 4), (0,) * 4, None, 35) for each in digests)
    log.stored(None, kept)
    log.stored(digests[0], lost)
    log.removed(digests[0])
    log.removed(digests[1])
    log.stored(None, kept)
    log.removed(digests[0])
    log.dropped(digests[0])
    log.stored(None, kept)
    log.removed(digests[0])
    log.stored(None, kept)
    saved.clear()
    log.dropped(digests[0])
    log.removed(digests[0])
    with publishing(tmp_path) as (publisher, subscriber):
        publisher.add(log.take())
        _, events = received(subscriber)
    found = [(each["type"], each["block_hashes"], each["medium"], each.get("token_ids")) for each in events]
    first, second = kept.block_hash, lost.block_hash
    evicted = ("BlockRemoved", [first], "GPU", None)
    to_disk, off_disk = ("BlockStored", [first], "DISK", []), ("BlockRemoved", [first], "DISK", None)
    back = ("BlockStored", [first], "GPU", [1, 2, 3, 4])
    assert found == [
        ("BlockStored", [first, second], "GPU", [1, 2, 3, 4, 1, 2, 3, 4]),
        *(evicted, to_disk),
        ("BlockRemoved", [second], "GPU", None),
        *(back, evicted, off_disk),
        *(back, evicted, to_disk),
        *(back, evicted, off_disk),
    ]


def test_extra_keys_tell_equal_tokens_apart(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, subscriber):
        blocks = block(1, "sql", (0, 7, 7, 8), "salt"), block(2, "sql", (0,) * 4, "salt")
        publisher.add([KvEvent(0, stored=blocks)])
        publisher.add([KvEvent(1, stored=blocks[:1], parent_hash=5)])
        ((_, (first,)), (_, (later,))) = received(subscriber), received(subscriber)
    assert first["lora_name"] == "sql" and first["parent_block_hash"] is None
    assert first["extra_keys"] == [[f"{7:016x}", f"{8:016x}", "sql", "salt"], ["sql"]]
    assert later["extra_keys"] == [[f"{7:016x}", f"{8:016x}", "sql"]], (
        "a salt is in a prompt's first block only"
    )


def test_the_loop_publishes_with_salts(tmp_path: Path) -> None:
    engine = FakeEngine(make_limits())
    size = engine.limits.tokens_per_block
    scheduler = Scheduler(SchedulingConfig(kv_event_buffer_size=100), engine.limits)
    prompt = tuple(range(2 * size))
    requests = [
        make_request(prompt=prompt),
        Request(2, prompt, 1, identity=PrefixIdentity(cache_salt_id=0xABC)),
    ]

    def get(room: int) -> list[Request]:
        found, requests[:] = requests[:1], requests[1:]
        return found

    with publishing(tmp_path, size) as (publisher, subscriber):
        instruments = Instruments(kv_publisher=publisher)
        manager = GptManager(
            engine, scheduler, get, lambda response: None, instruments=instruments, start=False
        )
        while manager.step():
            pass
        events = []
        while len(events) < 3:
            events += received(subscriber)[1]
        manager.shutdown()
    cleared, plain, salted = events
    assert cleared["type"] == "AllBlocksCleared"
    assert plain["token_ids"] == salted["token_ids"] == list(prompt)
    assert plain["block_hashes"] != salted["block_hashes"]
    assert "extra_keys" not in plain and salted["extra_keys"] == [[f"{0xABC:016x}"], None]


def test_past_batches_are_replayed_from_a_number_on(tmp_path: Path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    with publishing(tmp_path, replay_endpoint=replay, buffer_steps=3) as (publisher, _):
        for number in range(5):
            publisher.add([KvEvent(number, removed=(number,))])
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            asking.connect(replay)
            for wanted, expected in ((0, [2, 3, 4]), (4, [4]), (5, [])):
                asking.send_multipart((b"", b"nonsense, not a number"))  # is ignored
                asking.send_multipart((b"", wanted.to_bytes(8, "big")))
                found = []
                while (frames := asking.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
                    _, number, payload = frames
                    found.append(int.from_bytes(number, "big"))
                    assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == found[-1:]
                assert found == expected


def test_addresses_that_cannot_be_used_and_a_cache_without_reuse_are_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name in ("endpoint", "replay_endpoint"):
            values = {"endpoint": f"ipc://{tmp_path}/events", name: f"tcp://*:{port}"}
            expected = rf"kv_events_config: {name} 'tcp://\*:{port}' cannot be used: Address already in use"
            with pytest.raises(ConfigError, match=expected):
                KvEventPublisher(KvEventsConfig(**values), 4, "DISK")
    config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(enable_block_reuse=False))
    with pytest.raises(
        trtllm.ExecutorError, match="kv_events_config is given, but enable_kv_cache_reuse is false"
    ):
        executor_of(config, KvEventsConfig(endpoint=f"ipc://{tmp_path}/events"))


def executor_of(config: trtllm.ExecutorConfig, events: KvEventsConfig) -> trtllm.Executor:
    parameters = Parameters(kv_events_config=events)
    return trtllm.Executor(str(DEMO_MODEL), trtllm.ModelType.DECODER_ONLY, config, parameters=parameters)


@pytest.mark.exhaustive
def test_dynamos_indexer_reads_the_events(tmp_path: Path) -> None:
    """NVIDIA Dynamo's own reader finds prompts by their tokens, and asks for the batch that it missed."""
    venv.create(tmp_path / "dynamo", with_pip=True)
    python = tmp_path / "dynamo/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", DYNAMO], check=True)
    events, replay, port = (free_port() for _ in range(3))
    program = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"
    indexer = subprocess.Popen([python, "-c", program, "--port", str(port)], stdout=sys.stderr)

    def ask(path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            json.dumps(body | {"model_name": "demo"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    config = KvEventsConfig(endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}")
    prompt = [5 + 7 * number % 300 for number in range(100)]
    try:
        with executor_of(trtllm.ExecutorConfig(), config) as executor:
            size = 32  # tokens_per_block by default
            addresses = {
                "endpoint": f"tcp://127.0.0.1:{events}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            }
            while True:
                try:
                    ask("/register", instance_id=1, block_size=size, **addresses)
                    break
                except urllib.error.URLError:
                    assert indexer.poll() is None
                    time.sleep(0.05)
            found: dict[str, Any] = {}
            number = 0
            while not found:  # the indexer hears of a batch when its subscription has arrived
                number += 1
                executor.await_responses(executor.enqueue_request(trtllm.Request([number, *prompt], 1)))
                found = ask("/query", token_ids=[number, *prompt])["instances"]
            assert found["1"]["longest_matched"] == 96
            assert ask("/query", token_ids=[1, *prompt[:70]])["instances"]["1"]["longest_matched"] == 64
            assert ask("/query", token_ids=[*prompt])["instances"] == {}
    finally:
        indexer.kill()
        indexer.wait()
