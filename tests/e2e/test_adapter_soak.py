"""Many requests with more adapters than a real server has room for; many are given up after some tokens.

`--soak-requests 10000` makes it last for minutes. Clients give up by a stop, or by closing an HTTP
connection. Each keeps one gRPC stream, because tritonserver 2.51 crashes when hundreds of streams come and go
(docs/tensors.md).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from inflight.server.launch import TritonServer, serve
from inflight_client import Client
from tests.commands import group_members

from .clients import Stream, infer, wait_until
from .lora_folders import as_tensors, greedy, make_adapter

PROMPT = [10, 11, 12, 13, 14]
NUM_TOKENS, TOO_MANY = 20, 900
"""Output lengths of requests that are answered, and of those that are given up long before the end."""
RANK, BYTES = 16, 16 * (512 + 256) * 4 * 7 * 4
"""The rank of each adapter, and the most bytes of host memory that it takes."""
ON_HOST, SLOTS = 5, 4
NAMES, IDS = [f"name{number}" for number in range(6)], list(range(100, 106))
NUM_CLIENTS = 6
MIB = 1 << 20


@dataclass(frozen=True)
class Known:
    """Adapters and their expected tokens.

    Attributes:
        tokens: PEFT's tokens, by name and by id; "" without an adapter.
        sent: Tensors that clients send with an id that the server does not know.
    """

    tokens: dict[str | int, list[int]]
    sent: dict[str | int, dict[str, Any]]


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora_dir")


@pytest.fixture(scope="module")
def known(lora_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Known:
    elsewhere = tmp_path_factory.mktemp("sent")
    folders = {name: lora_dir / name for name in NAMES} | {task: elsewhere / str(task) for task in IDS}
    tokens: dict[str | int, list[int]] = {"": greedy(PROMPT, NUM_TOKENS)}
    sent: dict[str | int, dict[str, Any]] = {}
    for seed, (adapter, folder) in enumerate(folders.items()):
        make_adapter(folder, seed, RANK)
        tokens[adapter] = greedy(PROMPT, NUM_TOKENS, folder)
        if adapter in IDS:
            sent[adapter] = dict(zip(("lora_weights", "lora_config"), as_tensors(folder), strict=True))
    assert len(set(map(tuple, tokens.values()))) == len(tokens), "each adapter says something of its own"
    return Known(tokens, sent)


@pytest.fixture(scope="module")
def server(elsewhere: Path, lora_dir: Path) -> Iterator[TritonServer]:
    settings = {
        "max_tokens_in_paged_kv_cache": "4096",
        "max_batch_size": str(SLOTS),
        "lora_weights_data_type": "TYPE_FP32",
        "lora_dir": str(lora_dir),
        "lora_cache_max_adapter_size": str(RANK),
        "lora_cache_optimal_adapter_size": str(RANK),
        "lora_cache_host_memory_bytes": str(ON_HOST * BYTES),
        "enable_adapter_commands": "true",
        "enable_state_requests": "true",
    }
    # Freed memory is returned to the system at once, so that growing memory means memory in use.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_ARENA_MAX", "1")
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
        with serve(dtype="float32", settings=settings) as up:
            yield up


@dataclass
class Soak:
    """Clients that send one request after another while adapters are loaded and unloaded.

    Attributes:
        wrong: Unexpected responses and errors.
        ended: Counts of endings of requests, of attempts without room, and of loads and unloads.
    """

    server: TritonServer
    known: Known
    wrong: list[object] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, count: int, seed: int) -> None:
        self._left = count
        self._is_over.clear()
        clients = [threading.Thread(target=self._ask_on, args=(seed + n,)) for n in range(NUM_CLIENTS)]
        people = threading.Thread(target=self._meddle, args=(seed,))
        for thread in (*clients, people):
            thread.start()
        for thread in clients:
            thread.join()
        self._is_over.set()
        people.join()

    def _count(self, what: str) -> None:
        with self._lock:
            self.ended[what] += 1

    def _ask_on(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            with Stream(self.server.grpc) as stream:
                for number in itertools.takewhile(lambda _: self._take(), itertools.count()):
                    self._ask(stream, chance, f"{seed}-{number}")
        except Exception as error:  # the test's thread reports it
            self.wrong.append(error)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0 and not self.wrong

    def _ask(self, stream: Stream, chance: random.Random, request_id: str) -> None:
        """Send one request; repeat it while the server has no room for its adapter."""
        adapter = chance.choice([*self.known.tokens])
        ending = chance.choice(["whole", "whole", "stopped", "closed"])
        after = chance.randint(1, NUM_TOKENS // 2)
        tensors: dict[str, Any] = (
            {"lora_task_id" if adapter in IDS else "lora_name": adapter} if adapter else {}
        )
        while True:
            tokens, error, reason = self._try(stream, request_id, ending, after, tensors)
            if "not found in cache" in error and adapter in IDS:
                tensors |= self.known.sent[adapter]  # too large for JSON
                ending = "stopped" if ending == "closed" else ending
                self._count("sent")
            elif "PEFT Cache is full" in error:
                self._count("full")
                self._is_over.wait(0.01)
            else:
                break
        expected = self.known.tokens[adapter]
        is_right = tokens == expected if ending == "whole" else tokens[:NUM_TOKENS] == expected[: len(tokens)]
        if ending == "stopped" and reason == "LENGTH" and len(tokens) == TOO_MANY:
            ending = "whole"  # the client was too slow to give up
        elif error or not is_right or (ending == "stopped" and reason != "CANCELLED"):
            self.wrong.append((adapter, ending, reason, error, tokens, expected))
        self._count(ending)

    def _try(
        self, stream: Stream, request_id: str, ending: str, after: int, tensors: dict
    ) -> tuple[list[int], str, str]:
        """Send a request; return its tokens, its error and its ending. Give it up once it has some tokens, if
        `ending` says so."""
        if ending == "closed":
            return self._try_by_http(after, tensors)
        stream.send(
            "tensorrt_llm", request_id, input_ids=PROMPT, end_id=-1, streaming=True,
            request_output_len=NUM_TOKENS if ending == "whole" else TOO_MANY, **tensors,
        )  # fmt: skip
        tokens, reason, num_finals, is_stopped = [], "", 0, False
        while num_finals < 1 + is_stopped:  # a stop request has a response of its own
            _, answer = stream.receive()
            if answer.error is not None:
                return [], str(answer.error), ""
            tokens += answer.ids
            reason = answer.finish_reason if "finish_reason" in answer.outputs else reason
            num_finals += answer.final
            if ending == "stopped" and len(tokens) >= after and not (is_stopped or num_finals):
                is_stopped = True
                stream.send("tensorrt_llm", request_id, stop=True)
        return tokens, "", reason

    def _try_by_http(self, after: int, tensors: dict) -> tuple[list[int], str, str]:
        """Send a request over HTTP like `_try`, and give it up by closing the connection."""
        body = {
            "input_ids": PROMPT,
            "request_output_len": TOO_MANY,
            "end_id": -1,
            "streaming": True,
            **tensors,
        }
        tokens: list[int] = []
        with contextlib.closing(events(self.server.http, body)) as answers:
            for event in answers:
                if "error" in event:
                    return [], event["error"], ""
                tokens += np.ravel(event["output_ids"]).tolist()  # a single token is a number
                if len(tokens) >= after:
                    break
        return tokens, "", ""

    def _meddle(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._is_over.wait(0.02):
            command: dict[str, Any] = {"command": chance.choice(["load", "unload"])}
            adapter = chance.choice(NAMES if command["command"] == "load" else [*NAMES, *IDS])
            command["task_id" if adapter in IDS else "name"] = adapter
            try:
                infer(self.server.http, lora_command=json.dumps(command))
                self._count(command["command"])
            except InferenceServerException as error:
                if not any(each in str(error) for each in ("is not loaded", "PEFT Cache is full")):
                    self.wrong.append(error)


def events(url: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Yield the events of generate_stream until the caller closes the generator."""
    request = urllib.request.Request(
        f"http://{url}/v2/models/tensorrt_llm/generate_stream", json.dumps(body).encode()
    )
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        for line in answer:
            if event := line.removeprefix(b"data:").strip():
                yield json.loads(event)


def resident_bytes(server: TritonServer) -> int:
    """Return the resident bytes of all processes of a server."""
    return sum(psutil.Process(pid).memory_info().rss for pid in group_members(server.pid))


@pytest.mark.exhaustive
def test_a_soak_with_many_adapters_has_no_errors_and_leaves_nothing_behind(
    server: TritonServer, known: Known, request: pytest.FixtureRequest
) -> None:
    count, client = int(request.config.getoption("--soak-requests", 0)), Client(server.grpc)
    soak = Soak(server, known)

    def reported_state() -> dict[str, Any]:
        return client.state()["batcher"]["state"]

    def is_idle() -> bool:
        state = client.state()
        return not (state["unanswered_requests"] or state["batcher"]["state"]["running"])

    soak.run(count // 3, seed=0)
    assert server.returncode is None, server.log_text()[-4000:]
    wait_until(is_idle)
    before = resident_bytes(server)
    soak.run(count - count // 3, seed=1000)
    assert server.returncode is None, server.log_text()[-4000:]
    wait_until(is_idle)
    grown = resident_bytes(server) - before
    print(f"{dict(soak.ended)}, {before / MIB:.0f} MiB and {grown / MIB:.1f} more")

    assert not soak.wrong, soak.wrong[:3]
    ended = soak.ended
    assert ended["whole"] + ended["stopped"] + ended["closed"] == count
    assert min(ended[each] for each in ("whole", "stopped", "closed", "sent")) > count // 20, ended
    assert ended["load"] and ended["unload"], ended
    assert grown < 48 * MIB, f"{grown} bytes more"

    loaded = [each for each in client.adapters() if each.is_loaded]
    assert 0 < sum(each.num_bytes for each in loaded) <= ON_HOST * BYTES
    stored = reported_state()["adapters"]
    assert stored["num_evictions"] > 0 and stored["num_used_pages"] == 0, stored
    for each in loaded:
        client.unload_adapter(each.name or each.task_id)
    wait_until(lambda: reported_state()["adapters"]["num_stored"] == 0)
    state = reported_state()
    assert state["adapters"]["num_resident"] == state["adapters"]["num_used_pages"] == 0
    assert state["blocks"]["held"] == 0 and state["free_slots"] == state["slots"] == SLOTS
    assert not any(each.is_loaded or each.num_bytes for each in client.adapters())
