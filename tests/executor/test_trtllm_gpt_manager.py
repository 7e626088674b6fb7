"""GptManager with its documented signature: a test for each promise of The Batch Manager."""

from __future__ import annotations

import gc
import json
import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.config import Parameters
from inflight.core.schedule.batch import EngineLimits
from inflight.errors import ConfigError
from inflight.executor import KvCacheConfig, NotSupported
from inflight.executor.trtllm_gpt_manager import (
    GptManager,
    InferenceRequest,
    NamedTensor,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from inflight.load_model import LoadedModel
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_tokens
from inflight_client import load_lora
from tests.adapters.factories import make_peft_model, save_adapter
from tests.models.zoo import ZooModel, make_model

VOCABULARY = 50
MODEL = "checkpoint"
PROMPT = [3, 1, 4, 1, 5]
TIMEOUT_S = 30
PARAMS = TrtGptModelOptionalParams(max_num_sequences=4)


def load_fake(parameters: Parameters, version_dir: str, rank_context: object) -> LoadedModel:
    """Return a fake engine with the room given in the parameters."""
    config = parameters.engine
    assert config.gpt_model_path == MODEL
    num_tokens = config.max_tokens_in_paged_kv_cache or config.max_num_sequences * 4096
    limits = EngineLimits(
        VOCABULARY,
        4096,
        config.max_num_sequences,
        num_tokens // config.tokens_per_block,
        config.tokens_per_block,
    )
    return LoadedModel(FakeEngine(limits), MODEL, "none", ())


def make_request(request_id: int, new: int = 6, **tensors: Any) -> InferenceRequest:
    mandatory = {
        "input_ids": torch.tensor([PROMPT], dtype=torch.int32),
        "request_output_len": torch.tensor([[new]], dtype=torch.int32),
    }
    return InferenceRequest(request_id, mandatory | tensors)


@dataclass(frozen=True)
class Answer:
    """One call of SendResponse."""

    request_id: int
    tensors: dict[str, torch.Tensor]
    is_final: bool
    error: str

    @property
    def ids(self) -> list[int]:
        return self.tensors["output_ids"][0].tolist()


@dataclass
class Client:
    """The callbacks, with the values that they return and received."""

    pending: queue.Queue[InferenceRequest] = field(default_factory=queue.Queue)
    answers: queue.Queue[Answer] = field(default_factory=queue.Queue)
    stops: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    asked_for: list[int] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)
    stats: list[str] = field(default_factory=list)
    polled: threading.Event = field(default_factory=threading.Event)

    def get(self, max_num: int) -> list[InferenceRequest]:
        self.threads.add(threading.current_thread())
        self.asked_for.append(max_num)
        found: list[InferenceRequest] = []
        while not self.pending.empty() and max_num != len(found):
            found.append(self.pending.get())
        if found:
            self.calls.append("get")
        return found

    def send(self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        self.threads.add(threading.current_thread())
        self.calls.append("send")
        self.answers.put(Answer(request_id, {one.name: one.tensor for one in tensors}, is_final, error))

    def poll(self) -> set[int]:
        self.threads.add(threading.current_thread())
        self.calls.append("poll")
        self.polled.set()
        return self.stops

    def report(self, text: str) -> None:
        self.threads.add(threading.current_thread())
        self.calls.append("stats")
        self.stats.append(text)

    def callbacks(self) -> tuple[Any, ...]:
        return self.get, self.send, self.poll, self.report

    def all_of(self, request_id: int) -> list[Answer]:
        """Return all responses to one request of a client with no other in flight."""
        answers = [self.answers.get(timeout=TIMEOUT_S)]
        while not answers[-1].is_final:
            answers.append(self.answers.get(timeout=TIMEOUT_S))
        assert {answer.request_id for answer in answers} == {request_id}
        return answers

    def ask(self, request: InferenceRequest) -> list[Answer]:
        self.pending.put(request)
        return self.all_of(request.request_id)


def make_manager(client: Client, model: str = MODEL, **options: Any) -> GptManager:
    model_type = options.pop("model_type", TrtGptModelType.InflightFusedBatching)
    policy = options.pop("policy", SchedulerPolicy.GUARANTEED_NO_EVICT)
    width = options.pop("max_beam_width", 2)
    return GptManager(
        model,
        model_type,
        width,
        policy,
        *client.callbacks(),
        load=load_fake,
        **{"optional_params": PARAMS} | options,
    )


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def manager(client: Client) -> Iterator[GptManager]:
    with make_manager(client) as manager:
        yield manager


def test_a_gpt_manager_is_constructed_as_documented(client: Client) -> None:
    """The arguments are path, type, beam width, policy, max_num_requests, Get and Send, in this order."""
    manager = GptManager(
        Path(MODEL),
        TrtGptModelType.InflightBatching,
        1,
        SchedulerPolicy.MAX_UTILIZATION,
        3,
        client.get,
        client.send,
        optional_params=PARAMS,
        load=load_fake,
    )
    (answer,) = client.ask(make_request(1))
    manager.shutdown()
    assert answer.ids == PROMPT + expected_tokens(PROMPT, 6, VOCABULARY)
    assert set(client.asked_for) <= {3, 2}


def test_max_num_requests_may_be_left_out(client: Client, manager: GptManager) -> None:
    client.ask(make_request(1))
    assert set(client.asked_for) == {-1}, "a negative value indicates that any number can be accepted"


def test_the_get_callback_is_called_with_the_room_for_requests(client: Client) -> None:
    for request_id in range(6):
        client.pending.put(make_request(request_id))
    with make_manager(client, max_num_requests=2):
        answers = [client.answers.get(timeout=TIMEOUT_S) for _ in range(6)]
    assert {answer.request_id for answer in answers} == set(range(6))
    assert max(client.asked_for) == 2 and min(client.asked_for) >= 0


@pytest.mark.parametrize("request_id", [0, 2**64 - 1])
def test_an_id_is_a_64_bit_unsigned_number(client: Client, manager: GptManager, request_id: int) -> None:
    (answer,) = client.ask(make_request(request_id))
    assert answer.request_id == request_id and answer.error == ""


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_input_tensors_are_given_by_name_in_a_map(client: Client, manager: GptManager, make: Any) -> None:
    int32 = torch.int32 if make is torch.tensor else np.int32
    request = InferenceRequest(
        1, {"input_ids": make([PROMPT], dtype=int32), "request_output_len": make([[2]], dtype=int32)}
    )
    (answer,) = client.ask(request)
    assert answer.ids == PROMPT + expected_tokens(PROMPT, 2, VOCABULARY)


def test_the_send_callback_gets_id_tensors_final_flag_and_an_empty_error(
    client: Client, manager: GptManager
) -> None:
    (answer,) = client.ask(make_request(7))
    assert (answer.request_id, answer.is_final, answer.error) == (7, True, "")
    assert set(answer.tensors) == {"output_ids", "sequence_length"}


def test_outputs_have_the_specifications_shapes(client: Client, manager: GptManager) -> None:
    flags = {
        name: torch.tensor([True])
        for name in ("return_log_probs", "return_context_logits", "return_generation_logits")
    }
    (answer,) = client.ask(make_request(1, **flags))
    num_ids = len(PROMPT) + 6
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in answer.tensors.items()}
    assert shapes == {
        "output_ids": ((1, num_ids), torch.int32),
        "sequence_length": ((1,), torch.int32),
        "output_log_probs": ((1, 1, 6), torch.float32),
        "cum_log_probs": ((1, 1), torch.float32),
        "context_logits": ((1, len(PROMPT), VOCABULARY), torch.float32),
        "generation_logits": ((1, 1, 6, VOCABULARY), torch.float32),
    }
    (beams,) = client.ask(make_request(2, beam_width=torch.tensor([2], dtype=torch.int32)))
    assert beams.tensors["output_ids"].shape == (2, num_ids)
    assert beams.tensors["sequence_length"].tolist() == [num_ids, num_ids]


def test_an_error_is_the_last_response_and_affects_no_other_request(
    client: Client, manager: GptManager
) -> None:
    client.pending.put(make_request(1, beam_widht=torch.tensor([1])))
    client.pending.put(make_request(2))
    first, second = (client.answers.get(timeout=TIMEOUT_S) for _ in range(2))
    assert (first.request_id, first.is_final, first.tensors) == (1, True, {})
    assert "did you mean beam_width" in first.error
    assert (second.request_id, second.error) == (2, "")


def test_an_id_that_is_being_processed_is_rejected(client: Client) -> None:
    client.pending.put(make_request(5, 20))
    client.pending.put(make_request(5))
    with make_manager(client):
        rejected, served = (client.answers.get(timeout=TIMEOUT_S) for _ in range(2))
    assert rejected.error == "a request with id 5 is being processed" and rejected.is_final
    assert served.error == "" and served.ids == PROMPT + expected_tokens(PROMPT, 20, VOCABULARY)


def test_an_id_can_be_used_again_after_its_final_response(client: Client, manager: GptManager) -> None:
    for _ in range(3):
        (answer,) = client.ask(make_request(5))
        assert answer.error == ""


def test_the_poll_callback_ends_active_requests(client: Client, manager: GptManager) -> None:
    client.stops = {9, 1}
    (answer,) = client.ask(make_request(9, 4000))
    assert answer.is_final and answer.error == ""
    assert len(answer.ids) < len(PROMPT) + 4000
    assert answer.ids[: len(PROMPT)] == PROMPT


COMMON = [
    "Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count", "Max KV cache blocks",
    "Free KV cache blocks", "Used KV cache blocks", "Tokens per KV cache block", "Scheduled Requests",
    "Context Requests",
]  # fmt: skip


def test_statistics_of_in_flight_batching_have_the_documented_keys(
    client: Client, manager: GptManager
) -> None:
    client.ask(make_request(1))
    stats = [json.loads(text) for text in client.stats]
    assert list(stats[0]) == [*COMMON, "Generation Requests", "Total Context Tokens", "MicroBatch ID"]
    assert stats[0]["Total Context Tokens"] == len(PROMPT)
    assert re.fullmatch(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d", stats[0]["Timestamp"])
    counters = [one["Iteration Counter"] for one in stats]
    assert counters == sorted(set(counters)), "it increases monotonically"


def test_statistics_of_v1_batching_have_the_documented_keys(client: Client) -> None:
    with make_manager(client, model_type=TrtGptModelType.V1):
        client.ask(make_request(1))
    stats = json.loads(client.stats[0])
    assert set(stats) == {
        *COMMON,
        "Total Generation Tokens",
        "Total Context Tokens",
        "Empty Generation Slots",
    }


def test_the_callbacks_of_an_iteration_are_called_in_order(client: Client, manager: GptManager) -> None:
    """Get is called at the start; Send, then Poll and ReturnBatchManagerStats, at the end."""
    client.ask(make_request(1, 1))
    manager.shutdown()
    calls = client.calls[client.calls.index("get") :]
    assert calls[:4] == ["get", "send", "poll", "stats"]


def test_one_worker_thread_calls_all_callbacks(client: Client, manager: GptManager) -> None:
    client.ask(make_request(1))
    assert len(client.threads) == 1 and client.threads != {threading.current_thread()}


def test_streaming_responses_are_single_tokens_and_others_the_full_response(
    client: Client, manager: GptManager
) -> None:
    streamed = client.ask(make_request(1, streaming=torch.tensor([True])))
    (whole,) = client.ask(make_request(2))
    expected = expected_tokens(PROMPT, 6, VOCABULARY)
    assert [answer.ids for answer in streamed] == [[token] for token in expected]
    assert [answer.tensors["sequence_length"].tolist() for answer in streamed] == [[1]] * 6
    assert [answer.is_final for answer in streamed] == [False] * 5 + [True]
    assert whole.ids == PROMPT + expected


def test_there_are_no_statistics_without_active_requests(client: Client, manager: GptManager) -> None:
    client.ask(make_request(1))
    manager_calls = len(client.stats)
    client.polled.clear()
    assert client.polled.wait(TIMEOUT_S), "an idle manager polls on"
    client.polled.clear()
    assert client.polled.wait(TIMEOUT_S)
    assert len(client.stats) <= manager_calls + 1  # the last iteration may be reported after its response


@pytest.mark.parametrize("policy", list(SchedulerPolicy), ids=lambda policy: policy.name)
def test_a_paused_request_is_resumed_and_its_tokens_are_the_same(
    client: Client, policy: SchedulerPolicy
) -> None:
    """With room for two of three requests, one policy makes the third wait, the other pauses one."""
    small = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=4 * 32, enable_block_reuse=False), max_num_sequences=3
    )
    for request_id in range(3):
        client.pending.put(make_request(request_id, 50))
    with make_manager(client, policy=policy, optional_params=small):
        answers = [client.answers.get(timeout=TIMEOUT_S) for _ in range(3)]
    expected = PROMPT + expected_tokens(PROMPT, 50, VOCABULARY)
    assert all(answer.ids == expected and not answer.error for answer in answers)
    most_at_once = max(json.loads(text)["Scheduled Requests"] for text in client.stats)
    assert most_at_once == (3 if policy is SchedulerPolicy.MAX_UTILIZATION else 2)


def test_the_worker_ends_when_the_manager_is_unreferenced_and_idle(client: Client) -> None:
    manager = make_manager(client)
    client.pending.put(make_request(1, 100, streaming=torch.tensor([True])))
    first = client.answers.get(timeout=TIMEOUT_S)
    del manager
    gc.collect()
    assert not first.is_final
    assert client.all_of(1)[-1].is_final, "what is active is finished first"
    (worker,) = client.threads
    worker.join(TIMEOUT_S)
    assert not worker.is_alive()


def test_a_request_with_the_terminating_id_ends_the_manager(client: Client) -> None:
    manager = make_manager(client, terminate_req_id=99)
    client.pending.put(make_request(1))
    client.pending.put(InferenceRequest(99))
    client.all_of(1)
    manager.shutdown()
    assert client.answers.empty()


def test_a_callback_may_shut_the_manager_down(client: Client) -> None:
    managers: list[GptManager] = []

    def send(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        client.send(request_id, tensors, is_final, error)
        managers[0].shutdown()

    managers.append(
        GptManager(
            MODEL, TrtGptModelType.InflightBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, client.get, send,
            optional_params=PARAMS, load=load_fake,
        )
    )  # fmt: skip
    answers = client.ask(make_request(1, streaming=torch.tensor([True])))
    assert len(answers) == 6, "what is active is finished"
    managers[0].shutdown()


def test_blocks_and_slots_of_a_request_are_free_before_its_final_response(client: Client) -> None:
    """The callback of the final response submits the next request, which needs its id, slot and KV blocks."""
    room_for_one = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=32, enable_block_reuse=False), max_num_sequences=1
    )
    left = [5, 5, 5]

    def send(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        client.send(request_id, tensors, is_final, error)
        if left:
            client.pending.put(make_request(left.pop(), 20))

    client.pending.put(make_request(5, 20))
    with GptManager(
        MODEL, TrtGptModelType.InflightBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, client.get, send,
        optional_params=room_for_one, load=load_fake,
    ):  # fmt: skip
        answers = [client.answers.get(timeout=TIMEOUT_S) for _ in range(4)]
    assert [(answer.request_id, answer.error) for answer in answers] == [(5, "")] * 4


def test_a_model_that_cannot_be_loaded_raises_the_reason(client: Client) -> None:
    with pytest.raises(ConfigError, match="Bla"):
        GptManager("Bla", TrtGptModelType.V1, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, client.get, client.send)


def test_host_memory_that_an_engine_cannot_use_is_refused(client: Client) -> None:
    params = TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(host_cache_size=1 << 20))
    with pytest.raises(
        ConfigError, match="kv_cache_host_memory_bytes is given, but this engine has no KV blocks"
    ):
        make_manager(client, optional_params=params)


def test_an_unsupported_optional_parameter_is_refused(client: Client) -> None:
    params = TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(use_uvm=True))
    with pytest.raises(NotSupported, match=r"KvCacheConfig\.use_uvm is not supported"):
        make_manager(client, optional_params=params)


def test_seeds_may_be_int64_tensors_of_torch(client: Client, manager: GptManager) -> None:
    (answer,) = client.ask(make_request(1, random_seed=torch.tensor([42])))
    assert answer.error == ""


def test_a_checkpoint_generates_transformers_tokens(client: Client, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a model this small is slower with more threads
    model = make_model(tmp_path, "llama-gqa")
    prompt = model.prompt(7)
    ids = torch.tensor([prompt], dtype=torch.int32)
    with GptManager(
        tmp_path, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT,
        *client.callbacks(), optional_params=PARAMS,
    ):  # fmt: skip
        (answer,) = client.ask(make_request(1, 12, input_ids=ids))
    assert answer.ids == [*prompt, *model.greedy(prompt, 12)]


def test_an_adapters_weights_are_needed_only_once(client: Client, tmp_path: Path) -> None:
    """Specification: lora_task_id, lora_weights and lora_config the first time, then only lora_task_id."""
    torch.set_num_threads(1)
    model = make_model(tmp_path / "model", "llama-gqa")
    adapted = make_peft_model(model, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    weights, config = load_lora(save_adapter(adapted, tmp_path / "adapter"), "float32")
    expected = ZooModel(tmp_path, adapted.merge_and_unload()).greedy(model.prompt(7), 12)
    ids = torch.tensor([model.prompt(7)], dtype=torch.int32)
    task = {"input_ids": ids, "lora_task_id": torch.tensor([[5]])}
    matrices = {"lora_weights": torch.tensor(weights), "lora_config": torch.tensor(config)}
    with GptManager(
        tmp_path / "model", TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT,
        *client.callbacks(), optional_params=PARAMS,
    ):  # fmt: skip
        (missing,) = client.ask(make_request(1, 12, **task))
        (first,) = client.ask(make_request(2, 12, **task, **matrices))
        (second,) = client.ask(make_request(3, 12, **task))
    assert missing.error.startswith("LoRA task 5 not found in cache. Please send LoRA weights with request")
    assert (first.error, second.error) == ("", "")
    assert first.ids == second.ids == [*model.prompt(7), *expected]
