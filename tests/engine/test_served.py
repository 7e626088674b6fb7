"""The whole batcher over a real model: every policy, with and without chunks and reuse, against transformers."""

from __future__ import annotations

import itertools
import random

import pytest

from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from tests.engine.serving import WAYS, config_of, load, serve
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import examples, with_all

NUM_REQUESTS = 10
SAMPLED = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, random_seed=3)


def make_requests(model: ZooModel, sampling: SamplingConfig) -> list[Request]:
    """Return prompts of which half share a prefix."""
    rng = random.Random(1)
    shared = list(model.prompt(30))
    requests = []
    for number in range(NUM_REQUESTS):
        tail = [rng.randrange(3, 200) for _ in range(rng.randint(1, 30))]
        prompt = shared + tail if number % 2 else tail
        requests.append(Request(number, tuple(prompt), rng.randint(4, 40), sampling=sampling))
    return requests


@pytest.mark.parametrize("case", with_all(["llama-gqa", "mistral-window", "gpt2"], ["mistral-window"]))
@pytest.mark.parametrize("policy", CapacityPolicy)
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_greedy_tokens_are_those_of_transformers(zoo: Zoo, case: str, policy, chunked: bool) -> None:
    model = zoo[case]
    requests = make_requests(model, SamplingConfig())
    config = SchedulingConfig(policy, max_num_tokens=24 if chunked else 512, enable_chunked_context=chunked)
    served = serve(load(model.folder, num_blocks=20), config, requests)
    if policy is CapacityPolicy.MAX_UTILIZATION:
        assert served.num_pauses > 0
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, request.max_new_tokens)


def test_sampled_tokens_do_not_depend_on_policy_chunking_reuse_or_other_requests(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    requests = make_requests(model, SAMPLED)
    answers = []  # by default every third combination, with both values of each setting
    combinations = itertools.product(CapacityPolicy, (False, True), (False, True))
    for policy, chunked, reuse in itertools.islice(combinations, None, None, examples(3, all=1)):
        config = SchedulingConfig(
            policy,
            enable_chunked_context=chunked,
            max_num_tokens=24 if chunked else 512,
            enable_kv_cache_reuse=reuse,
        )
        served = serve(load(model.folder, num_blocks=20), config, requests)
        answers.append([served.tokens(request) for request in requests])
    engine = load(model.folder, num_blocks=200)
    alone = [serve(engine, config_of("no-evict"), [request]).tokens(request) for request in requests]
    assert all(answer == alone for answer in answers)


@pytest.mark.parametrize("way", with_all(WAYS, ["no-evict", "utilization-chunked-no-reuse"]))
def test_sequences_of_one_request_are_generated_independently(zoo: Zoo, way: str) -> None:
    """Each sequence gets the tokens of its own random numbers, whatever blocks it shares."""
    model = zoo["llama-gqa"]
    sampling = SamplingConfig(temperature=1.3, top_p=0.9, num_return_sequences=3, random_seed=5)
    requests = [
        Request(number, model.prompt(length, length), 20, streaming=number == 1, sampling=sampling)
        for number, length in enumerate((30, 13, 8))
    ]
    engine = load(model.folder, num_blocks=200)
    alone = [serve(engine, config_of("no-evict"), [request]) for request in requests]
    served = serve(load(model.folder, num_blocks=26), config_of(way), requests)
    for request, expected in zip(requests, alone, strict=True):
        sequences = [served.tokens(request, index) for index in range(3)]
        assert sequences == [expected.tokens(request, index) for index in range(3)]
        assert len(set(map(tuple, sequences))) == 3
