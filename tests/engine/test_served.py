"""The whole batcher over a real model: every policy, chunked or not, reuse or not, against transformers alone."""

from __future__ import annotations

import itertools
import random

import pytest

from inflight.core.config import CapacitySchedulerPolicy, SchedulerConfig
from inflight.core.request import IterationInput, Request
from inflight.core.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.engine.torch import TorchEngine, TorchEngineConfig
from tests.models.zoo import Zoo

NUM_REQUESTS = 10
SAMPLED = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, random_seed=3)


def load(folder, num_blocks: int) -> TorchEngine:
    """An engine whose KV cache is too small for all requests at once."""
    config = TorchEngineConfig(
        str(folder),
        dtype="float32",
        device="cpu",
        max_num_sequences=4,
        max_num_tokens=512,
        tokens_per_block=8,
        max_tokens_in_paged_kv_cache=8 * num_blocks,
    )
    return TorchEngine.load(config)


def make_requests(model, sampling: SamplingConfig) -> list[Request]:
    """Prompts of which half share their beginning."""
    rng = random.Random(1)
    shared = list(model.prompt(30))
    requests = []
    for number in range(NUM_REQUESTS):
        tail = [rng.randrange(3, 200) for _ in range(rng.randint(1, 30))]
        prompt = shared + tail if number % 2 else tail
        requests.append(Request(number, tuple(prompt), rng.randint(4, 40), sampling=sampling))
    return requests


def serve(
    engine: TorchEngine, config: SchedulerConfig, requests: list[Request]
) -> tuple[dict[int, list[int]], int]:
    """Tokens by request, requests arriving two an iteration; and how often one was paused."""
    scheduler = Scheduler(config, engine.limits)
    tokens: dict[int, list[int]] = {}
    pauses = 0
    for iteration in itertools.count():
        arriving = tuple(requests[2 * iteration : 2 * iteration + 2])
        responses = scheduler.accept(IterationInput(iteration, 0, arriving))
        if (batch := scheduler.schedule()) is None:
            break
        pauses += scheduler.stats(batch).num_paused_requests
        responses += scheduler.update(batch, engine.decode(batch, engine.forward(batch)))
        scheduler.check_integrity()
        for response in responses:
            assert response.error is None
            prompt_length = response.result.num_input_tokens
            tokens[response.request_id] = list(response.result.output_token_ids[prompt_length:])
    return tokens, pauses


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "gpt2"])
@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_greedy_tokens_are_those_of_transformers(zoo: Zoo, case: str, policy, chunked: bool) -> None:
    model = zoo[case]
    requests = make_requests(model, SamplingConfig())
    config = SchedulerConfig(policy, max_num_tokens=24 if chunked else 512, enable_chunked_context=chunked)
    tokens, pauses = serve(load(model.folder, num_blocks=20), config, requests)
    if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        assert pauses > 0
    for request in requests:
        assert tokens[request.request_id] == model.greedy(
            list(request.input_token_ids), request.max_new_tokens
        )


def test_sampled_tokens_do_not_depend_on_policy_chunking_reuse_or_company(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    requests = make_requests(model, SAMPLED)
    answers = []
    for policy, chunked, reuse in itertools.product(CapacitySchedulerPolicy, (False, True), (False, True)):
        config = SchedulerConfig(policy, 24 if chunked else 512, chunked, reuse)
        answers.append(serve(load(model.folder, num_blocks=20), config, requests)[0])
    alone = {}
    for request in requests:
        alone |= serve(load(model.folder, num_blocks=200), SchedulerConfig(max_num_tokens=512), [request])[0]
    assert all(answer == alone for answer in answers)
