"""Many requests for more adapters than fit, cancelled at random: tokens are right and no memory leaks."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from inflight.adapters.sources import AdapterFolders, AdapterLoader
from inflight.build import RunningEngine, start_engine
from inflight.config import EngineConfig, Parameters
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopReason
from inflight.models import read_model_description
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import examples, with_all

from .factories import LLAMA_LAYERS, make_peft_model, save_adapter

NUM_ADAPTERS, ROOM = examples(fast=10, all=20), examples(fast=4, all=8)
IN_FLIGHT, NUM_TOKENS = 12, 6
PROMPT = (5, 7, 11, 13, 17, 19, 23, 29, 31)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ZooModel:
    return Zoo(tmp_path_factory.mktemp("zoo"))["llama-gqa"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora_dir")


@pytest.fixture(scope="module")
def expected(model: ZooModel, folder: Path) -> dict[str, list[int]]:
    """Return PEFT's tokens for each adapter, which is saved under its name."""
    tokens = {"": model.greedy(PROMPT, NUM_TOKENS)}
    for number in range(NUM_ADAPTERS):
        adapted = make_peft_model(model, number, r=8, lora_alpha=8, target_modules=LLAMA_LAYERS)
        save_adapter(adapted, folder / f"a{number}")
        merged = ZooModel(folder, adapted.merge_and_unload())
        tokens[f"a{number}"] = merged.greedy(PROMPT, NUM_TOKENS)
    return tokens


@pytest.fixture(scope="module")
def engine(model: ZooModel, folder: Path, expected: dict[str, list[int]]) -> RunningEngine:
    load = AdapterLoader(read_model_description(model.folder), 8, AdapterFolders(lora_dir=folder))
    size = len(load(LoraRequest(name="a0")).weights.weights.buffer)
    config = EngineConfig(
        str(model.folder), max_num_sequences=8, tokens_per_block=4, lora_cache_max_adapter_size=8
    )
    parameters = Parameters(
        lora_dir=str(folder), lora_cache_host_memory_bytes=ROOM * size, enable_state_requests=True,
        engine=config,
    )  # fmt: skip
    running = start_engine(parameters, "")
    yield running
    running.close()


class Load:
    """Keeps some requests in flight until a number have ended; repeats those refused by a full cache."""

    def __init__(self, engine: RunningEngine, expected: dict[str, list[int]], seed: int) -> None:
        self.wrong: list[object] = []
        self.ended = Counter[str]()
        self._client, self._expected = engine.client, expected
        self._rng = random.Random(seed)
        self._room = threading.Semaphore(IN_FLIGHT)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._begin(self._rng.choice([*self._expected]))
        for _ in range(IN_FLIGHT):
            assert self._room.acquire(timeout=PATIENCE_S)
        self._room.release(IN_FLIGHT)

    def _begin(self, name: str) -> None:
        assert self._room.acquire(timeout=PATIENCE_S)
        tokens: list[int] = []
        patience = self._rng.choice([0, 1, 2, 3]) if self._rng.random() < 0.3 else None
        """Number of tokens after which the request is cancelled, 0 for at once; None: never."""

        def on_response(response: Response) -> None:
            if response.result is not None:
                tokens.extend(response.result.output_token_ids[0])
            if response.is_final:
                self._judge(name, tokens, response)
                self._room.release()
            elif patience and len(tokens) >= patience:
                self._client.stop(response.request_id, StopReason.CANCELLED)

        lora = LoraRequest(name=name) if name else None
        request = Request(0, PROMPT, NUM_TOKENS, streaming=True, lora=lora)
        handle = self._client.submit(request, on_response)
        if patience == 0:
            handle.stop()

    def _judge(self, name: str, tokens: list[int], response: Response) -> None:
        whole = self._expected[name]
        if response.error is not None:
            self.ended["full"] += 1
            if "PEFT Cache is full" not in str(response.error):
                self.wrong.append(response.error)
            return
        assert response.result is not None
        reason = response.result.finish_reasons[0]
        self.ended[reason.name] += 1
        self.ended["amid generation"] += reason is FinishReason.CANCELLED and len(tokens) > 0
        right = whole if reason is FinishReason.LENGTH else whole[: len(tokens)]
        if tokens != right:
            self.wrong.append((name, tokens, whole))


@pytest.mark.parametrize("num_requests", with_all([150, 300, 2000], [150]))
def test_no_wrong_token_and_no_leak(
    engine: RunningEngine, expected: dict[str, list[int]], num_requests: int
) -> None:
    load = Load(engine, expected, seed=0)
    load.run(num_requests)

    assert not load.wrong, load.wrong[:3]
    ended = load.ended
    assert ended["LENGTH"] + ended["CANCELLED"] + ended["full"] == num_requests
    assert ended["LENGTH"] > num_requests // 3, ended
    assert ended["CANCELLED"] > ended["amid generation"] > num_requests // 20, ended
    adapters = engine.client.adapters(AdapterCommand(AdapterAction.LIST), 1.0)
    assert sum(each.is_loaded for each in adapters) <= ROOM and len(adapters) == NUM_ADAPTERS
    end_s = time.monotonic() + PATIENCE_S
    while loaded := [each for each in adapters if each.num_bytes]:
        assert time.monotonic() < end_s, "an adapter is loaded again and again"
        for each in loaded:
            engine.client.adapters(AdapterCommand(AdapterAction.UNLOAD, each.name), 1.0)
        # An adapter of a cancelled request may have been loaded meanwhile.
        adapters = engine.client.adapters(AdapterCommand(AdapterAction.LIST), 1.0)
    while (state := json.loads(engine.client.state(1.0))["batcher"]["state"])["adapters"]["num_stored"]:
        assert time.monotonic() < end_s, "an idle loop hears of what is unloaded"
    assert state["blocks"]["held"] == state["adapters"]["num_resident"] == 0
