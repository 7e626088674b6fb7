"""LoRA adapters through GptManager, scheduler and engine: every request has the same result as alone."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import numpy as np
import pytest

from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.config import SchedulingConfig
from inflight.core.ports import Engine
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts
from inflight.core.request.adapter import (
    AdapterEvent,
    AdapterUpdate,
    LoraRequest,
    LoraWeights,
    RawBuffer,
    StoredAdapter,
)
from inflight.core.request.request import ExternalDraft, Origin, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import AdapterLoad
from inflight.core.scheduler import Scheduler
from inflight.engine import capacity
from inflight.testing.simulation.integrity import check_integrity
from tests.engine.kernels import DEFAULT, TORCH, by_default_and
from tests.engine.lora import Adapter, make_adapter, stored
from tests.engine.ranks import TOPOLOGIES, assert_same_result, ranks
from tests.engine.serving import WAYS, Served, config_of, load
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CONFIGS = [
    {"r": 8, "lora_alpha": 6},
    {"r": 20, "lora_alpha": 8},
    {"r": 1, "lora_alpha": 1},
    {"r": 16, "lora_alpha": 8, "use_dora": True},
    {"r": 11, "lora_alpha": 5},
]
"""By task id; they take 1, 3, 1, 2 and 2 pages."""
NUM_PAGES = 4
one_kernel = pytest.mark.parametrize("kernels", with_all([DEFAULT, TORCH], [None]))
"""By default this machine's: test_adapters.py tests the same with torch's operators, batch by batch."""


@cache
def adapters_of(model: ZooModel) -> list[Adapter]:
    return [make_adapter(model, task, **options) for task, options in enumerate(CONFIGS)]


class HostAdapters:
    """An AdapterCache that knows adapters by task id, and evicts all but two idle ones."""

    def __init__(self, known: Mapping[int, LoraWeights]) -> None:
        self._known = known
        self._stored: dict[int, StoredAdapter] = {}  # by task id
        self._users: dict[int, int] = {}  # task ids by request id
        self._events: list[AdapterEvent] = []
        self._new: list[StoredAdapter] = []
        self._next_handle = 1

    def submit(self, request_id: int, lora: LoraRequest, origin: Origin | None = None) -> None:
        task = lora.task_id
        assert task is not None
        if task not in self._stored:
            adapter = stored(self._known[task], self._next_handle)
            self._next_handle += 1
            digest = task.to_bytes(16, "big")
            self._stored[task] = StoredAdapter(adapter.handle, digest, task, adapter.rank, adapter.weights)
            self._new.append(self._stored[task])
        self._users[request_id] = task
        self._events.append(AdapterEvent(request_id, self._stored[task].handle))

    def update(self) -> AdapterUpdate:
        idle = [task for task in self._stored if task not in self._users.values()][2:]
        dropped = tuple(self._stored.pop(task).handle for task in idle)
        update = AdapterUpdate(tuple(self._new), tuple(self._events), dropped)
        self._new, self._events = [], []
        return update

    def forget(self, request_id: int) -> None:
        self._users.pop(request_id, None)


@dataclass
class ServedAll(Served):
    """All results of a run.

    Attributes:
        last: The statistics at the end.
    """

    last: IterationCounts | None = None


def serve(
    engine: Engine,
    config: SchedulingConfig,
    requests: Sequence[Request],
    model: ZooModel,
    per_step: int = 3,
    bad: Mapping[int, LoraWeights] | None = None,
) -> ServedAll:
    """Serve `requests_of` a model with its adapters; requests with `bad` adapters, by task id, fail."""
    bad = bad or {}
    fails = {each.request_id for each in requests if each.lora is not None and each.lora.task_id in bad}
    known = {task: adapter.weights for task, adapter in enumerate(adapters_of(model))}
    return serve_with(engine, config, requests, {**known, **bad}, per_step, fails)


def serve_with(
    engine: Engine,
    config: SchedulingConfig,
    requests: Sequence[Request],
    known: Mapping[int, LoraWeights],
    per_step: int = 3,
    fails: Container[int] = (),
) -> ServedAll:
    """Serve with a GptManager and `known` adapters, by task id.

    `per_step` requests arrive per iteration; those of the ids `fails` may end with an error.
    """
    scheduler, served, waiting = Scheduler(config, engine.limits), ServedAll(), list(requests)

    def get(room: int) -> list[Request]:
        arriving = waiting[:per_step]
        del waiting[:per_step]
        return arriving

    def send(response: Response) -> None:
        if response.request_id in fails and response.error is not None:
            served.errors[response.request_id] = response.error
            return
        assert response.error is None, response.error
        served.responses.setdefault((response.request_id, response.sequence_index), []).append(response)

    def report(stats: IterationCounts, metrics: MetricsSnapshot) -> None:
        served.last = stats
        served.num_pauses += stats.num_paused_requests

    instruments, adapters = Instruments(return_metrics=report), HostAdapters(known)
    manager = GptManager(
        engine, scheduler, get, send, instruments=instruments, adapters=adapters, start=False
    )
    while manager.step() or scheduler.num_active:
        check_integrity(scheduler)
    return served


@cache
def requests_of(model: ZooModel) -> tuple[Request, ...]:
    """Return requests with each adapter and with none: greedy and sampled ones, beam searches and drafts."""
    shared, requests = model.prompt(25), []
    for number in range(30):
        task = number % 6
        prompt = (
            (*shared, *model.prompt(number % 4, number)) if number % 2 else model.prompt(9 + number, number)
        )
        options: dict = {"lora": None if task == 5 else LoraRequest(task_id=task)}
        kind = (number // 3) % 5
        if kind == 1:
            options["sampling"] = SamplingConfig(beam_width=3, length_penalty=1.0)
        elif kind == 2:
            options |= {"prompt_lookup_num_tokens": 3}
            prompt = prompt[-12:] * 2
        elif kind == 3:
            options["sampling"] = SamplingConfig(
                temperature=0.9, top_k=9, random_seed=number, repetition_penalty=1.2, num_return_sequences=2
            )
        elif kind == 4 and number % 2:
            options["draft"] = ExternalDraft(tuple(adapters_of(model)[0].oracle.greedy(tuple(prompt), 4)))
        requests.append(Request(number, tuple(prompt), 10 + number % 7, **options))
    return tuple(requests)


def is_greedy(request: Request) -> bool:
    return request.sampling.num_sequences == 1 and not request.sampling.uses_beams


@cache
def alone(model: ZooModel, kernels: str | None, count: int | None = None) -> dict[int, ServedAll]:
    """Return the results of the first `count` requests on an engine that serves no other request meanwhile."""
    engine = load(model.folder, 200, 8, kernels=kernels)
    config = config_of("no-reuse")
    return {each.request_id: serve(engine, config, [each], model) for each in requests_of(model)[:count]}


@contextmanager
def few_pages(count: int = NUM_PAGES) -> Iterator[None]:
    """Limit the adapter pages of engines that are loaded meanwhile."""
    with mock.patch.object(capacity, "choose_num_adapter_pages", lambda *arguments: count):
        yield


def assert_as_alone(served: ServedAll, model: ZooModel, kernels: str | None) -> None:
    expected = alone(model, kernels)
    assert len({key[0] for key in served.responses}) == len(requests_of(model))
    for (request_id, index), _ in served.responses.items():
        assert_same_result(served.result(request_id, index), expected[request_id].result(request_id, index))


@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(by_default_and(["llama-gqa", "gpt2"], ["llama-gqa", "gpt2"]), ["llama-gqa"]),
)
def test_alone_a_request_has_the_tokens_of_peft(zoo: Zoo, case: str, kernels: str | None) -> None:
    """The tests below compare with these results."""
    model = zoo[case]
    for request in requests_of(model):
        oracle = adapters_of(model)[request.lora.task_id].oracle if request.lora else model
        served = alone(model, kernels)[request.request_id]
        if request.sampling.uses_beams:
            options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 1.0}
            beams = oracle.beams(request.input_token_ids, request.max_new_tokens, **options)
            assert served.beams(request) == [tokens for tokens, _ in beams]
        elif request.sampling.num_sequences == 1:
            assert served.tokens(request) == oracle.greedy(request.input_token_ids, request.max_new_tokens)


@pytest.mark.parametrize(
    ("way", "kernels"),
    with_all(
        by_default_and(WAYS, list(WAYS)), [("no-evict", "torch"), ("utilization-chunked-no-reuse", None)]
    ),
)
@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2"], ["llama-gqa"]))
def test_mixed_adapters_with_few_pages_and_blocks_get_the_results_of_each_alone(
    zoo: Zoo, case: str, way: str, kernels: str | None
) -> None:
    """Chunks, reuse, pauses; adapters are evicted from the device while their requests wait, and reloaded."""
    model = zoo[case]
    with few_pages():
        engine = load(model.folder, 24, 8, kernels=kernels, lora_cache_max_adapter_size=8 * NUM_PAGES)
    assert engine.limits.num_adapter_pages == NUM_PAGES
    served = serve(engine, config_of(way), requests_of(model), model)
    assert_as_alone(served, model, kernels)
    adapters = served.last.adapters
    assert adapters.num_loads > len(CONFIGS) and adapters.num_evictions > 0
    assert adapters.num_used_pages == 0
    if "utilization" in way:
        assert served.num_pauses > 0
    if "no-reuse" not in way:
        assert served.last.num_reused_blocks > 0


@one_kernel
def test_adapters_that_all_fit_are_loaded_once(zoo: Zoo, kernels: str | None) -> None:
    model = zoo["llama-gqa"]
    engine = load(model.folder, 200, 12, kernels=kernels)
    served = serve(engine, config_of("chunked"), requests_of(model), model, per_step=30)
    assert_as_alone(served, model, kernels)
    assert served.last.adapters.num_loads == len(CONFIGS)
    assert served.last.adapters.num_evictions == 0


@one_kernel
@pytest.mark.parametrize(
    "topology", with_all([pytest.param(sizes, id=name) for name, sizes in TOPOLOGIES.items()], [(2, 2)])
)
def test_mixed_adapters_on_several_ranks_get_the_results_of_each_alone(
    zoo: Zoo, topology: tuple[int, int], kernels: str | None
) -> None:
    model = zoo["llama-gqa"]
    with (
        few_pages(),
        ranks(
            model.folder, topology, 24, 8, kernels=kernels, lora_cache_max_adapter_size=8 * NUM_PAGES
        ) as engine,
    ):
        served = serve(engine, config_of("utilization-chunked-no-reuse"), requests_of(model), model)
    assert_as_alone(served, model, kernels)
    assert served.last.adapters.num_evictions > 0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("period", with_all([2, 3, 5], [2]))
def test_adapters_that_were_being_loaded_when_an_iteration_failed_are_loaded_again(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, period: int, after: bool
) -> None:
    """Every few loads the device raises, before or after it has filled the pages. No request is at fault: not
    every iteration fails.
    """
    model = zoo["llama-gqa"]
    with few_pages():
        engine = load(model.folder, 24, 8, lora_cache_max_adapter_size=8 * NUM_PAGES)
    decoder, calls, failed = engine.runner.decoder, itertools.count(1), set()
    right = decoder.load_adapter

    def load_adapter(load: AdapterLoad) -> None:
        is_due = load.adapter.handle not in failed and next(calls) % period == 0
        if after or not is_due:
            right(load)
        if is_due:
            failed.add(load.adapter.handle)
            raise RuntimeError("the device is out of order")

    monkeypatch.setattr(decoder, "load_adapter", load_adapter)
    served = serve(engine, config_of("chunked"), requests_of(model), model)
    assert failed
    assert_as_alone(served, model, None)


@one_kernel
def test_an_adapter_with_nan_fails_only_its_own_requests(zoo: Zoo, kernels: str | None) -> None:
    model = zoo["llama-gqa"]
    weights = adapters_of(model)[0].weights
    numbers = np.frombuffer(weights.weights.buffer.data, np.float32).copy()
    numbers[-300:-290] = np.nan  # in the last row
    matrix = replace(weights.weights, buffer=RawBuffer(numbers.tobytes()))
    bad = Request(100, model.prompt(9), 5, lora=LoraRequest(task_id=77))
    requests = [*requests_of(model)[:7], bad, *requests_of(model)[7:]]
    engine = load(model.folder, 60, 8, kernels=kernels)
    served = serve(engine, config_of("chunked"), requests, model, bad={77: replace(weights, weights=matrix)})
    assert "highest logit is nan" in str(served.errors[100])
    assert_as_alone(served, model, kernels)


OF_A_POOL = ["adapter of a row", "stale pages"]
"""Faults of the adapter pool, which torch's operators have."""


@pytest.mark.parametrize("fault", [*OF_A_POOL, "adapter of a beam", "shared blocks"])
def test_a_planted_fault_is_detected(zoo: Zoo, fault: str) -> None:
    """Checks that the tests above can fail."""
    model, kernels = zoo["llama-gqa"], "torch" if fault in OF_A_POOL else None
    with few_pages():
        engine = load(model.folder, 24, 8, kernels=kernels, lora_cache_max_adapter_size=8 * NUM_PAGES)
    with _planted(fault, engine), pytest.raises(AssertionError):
        assert_as_alone(serve(engine, config_of("no-evict"), requests_of(model), model), model, kernels)


@contextmanager
def _planted(fault: str, engine: Engine) -> Iterator[None]:
    pool = getattr(engine.runner.decoder, "adapters", None)
    slots = engine.runner.slots
    if fault == "adapter of a row":
        right = pool.activate
        with mock.patch.object(pool, "activate", lambda adapters: right(adapters[::-1].copy())):
            yield
    elif fault == "adapter of a beam":
        move = slots._move

        def wrong(batch: object) -> None:
            before = slots.adapters.copy()
            move(batch)
            slots.adapters[:] = before

        with mock.patch.object(slots, "_move", wrong):
            yield
    elif fault == "shared blocks":
        scope = Scheduler._rules

        def without_adapter(self: Scheduler, request: Request, key: int, adapter: object) -> object:
            return scope(self, request, key, None)

        with mock.patch.object(Scheduler, "_rules", without_adapter):
            yield
    else:
        load_once, seen = pool.load, set()

        def load_first(load: object) -> None:
            if load.pages in seen:
                return
            seen.add(load.pages)
            load_once(load)

        with mock.patch.object(pool, "load", load_first):
            yield
