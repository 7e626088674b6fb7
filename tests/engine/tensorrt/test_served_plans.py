"""The whole batcher over plans that a stand-in for TensorRT runs: the tokens of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.tensorrt.sidecar import Sidecar
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.serving import WAYS, config_of, serve
from tests.engine.tensorrt.conftest import Plans
from tests.engine.tensorrt.engines import build, load
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo
from tests.tiers import examples, with_all

NUM_TOKENS = examples(12, all=30)
FAMILIES = ["llama-gqa", "qwen3", "gpt2", "mistral-window", "gemma3", "mixtral"]


@pytest.mark.parametrize("way", with_all(WAYS, ["utilization-chunked-no-reuse"]))
def test_mixed_requests_give_transformers_tokens_in_every_way_of_serving(
    zoo: Zoo, plans: Plans, way: str
) -> None:
    model = zoo["llama-gqa"]
    requests = some_of_everything(model, examples(18, all=30))
    served = serve(load(plans(model), num_blocks=18), config_of(way, max_beam_width=3), requests, 4)
    assert_as_transformers(model, served, requests)
    if way.startswith("utilization"):
        assert served.num_pauses > 0


@pytest.mark.parametrize("case", with_all(FAMILIES[1:], ["mistral-window"]))
def test_every_family_gives_transformers_tokens(zoo: Zoo, plans: Plans, case: str) -> None:
    model = zoo[case]
    requests = [
        request for request in some_of_everything(model, NUM_TOKENS) if not request.sampling.uses_beams
    ]
    served = serve(load(plans(model), num_blocks=26), config_of("utilization-chunked-no-reuse"), requests)
    assert_as_transformers(model, served, requests)


@pytest.mark.parametrize("name", with_all(["awq", "gptq-act-order"], ["gptq-act-order"]))
def test_plans_in_4_bits_give_the_tokens_of_dequantized_weights(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """Served in float32, the tokens are those of transformers with the dequantized weights."""
    model = write(zoo["llama-gqa"], tmp_path / "checkpoint", FORMATS[name])
    folder = build(model.folder, tmp_path / "plans", dtype=None)
    assert Sidecar.read(folder / "rank0.json").settings.weight_dtype == "int4"
    requests = some_of_everything(model, NUM_TOKENS)
    served = serve(load(folder, num_blocks=18), config_of("utilization", max_beam_width=3), requests, 4)
    assert_as_transformers(model, served, requests)


def test_a_batch_larger_than_a_plan_takes_is_computed_in_parts(zoo: Zoo, plans: Plans) -> None:
    """The batch is computed in parts, one after the other."""
    model = zoo["llama-gqa"]
    engine = load(plans(model, max_context_chunks=1, max_num_tokens=7), num_blocks=60)
    requests = some_of_everything(model, NUM_TOKENS)
    served = serve(engine, config_of("no-evict", max_beam_width=3), requests, per_iteration=4)
    assert_as_transformers(model, served, requests)


def test_without_reuse_and_beams_requests_are_served_without_blocks(zoo: Zoo, plans: Plans) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model), None, shares_blocks=False)
    assert engine.limits.num_blocks == 4 * 16, "as many as the slots' sequences can have"
    assert engine.runner.cache._blocks is None
    requests = [
        request for request in some_of_everything(model, NUM_TOKENS) if not request.sampling.uses_beams
    ]
    requests.append(Request(99, model.prompt(21, 9), 12, sampling=SamplingConfig(num_return_sequences=3)))
    served = serve(engine, config_of("no-reuse", max_beam_width=1), requests)
    assert_as_transformers(model, served, requests)
    assert [served.tokens(99, index) for index in range(3)] == [model.greedy(model.prompt(21, 9), 12)] * 3


def test_without_blocks_a_given_number_of_blocks_still_limits_tokens(zoo: Zoo, plans: Plans) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model), 18, shares_blocks=False)
    assert engine.limits.num_blocks == 18
    assert engine.runner.cache._blocks is None
    requests = [
        request
        for request in some_of_everything(model, examples(18, all=30))
        if not request.sampling.uses_beams
    ]
    served = serve(engine, config_of("utilization-chunked-no-reuse", max_beam_width=1), requests)
    assert_as_transformers(model, served, requests)
    assert served.num_pauses > 0


def test_a_conversation_continued_in_its_slot_loads_no_blocks(zoo: Zoo, plans: Plans) -> None:
    """Only tokens missing from a slot's row are read from blocks; a slot that continues its own conversation
    reads none."""
    model = zoo["llama-gqa"]
    engine = load(plans(model), num_blocks=60, max_num_sequences=1)
    cache, loads = engine.runner.cache, []
    original = cache._load
    cache._load = lambda changes: loads.append(changes) or original(changes)
    prompt = model.prompt(37)
    tokens = model.greedy(prompt, 20)
    longer = (*prompt, *tokens, *model.prompt(5, 1))
    other = model.prompt(24, 2)
    requests = [Request(0, prompt, 20), Request(1, longer, 8), Request(2, other, 4), Request(3, longer, 9)]
    served = serve(engine, config_of("no-evict"), requests)
    for request in requests:
        expected = model.greedy(request.input_token_ids, request.max_new_tokens)
        assert served.tokens(request) == expected
    (changes,) = loads
    columns = [load.column for change in changes for load in change.loads]
    assert columns == list(range(-(-len(longer) // 8))), "only the last one began in a row of somebody else"


def test_sampled_tokens_are_those_of_torch(zoo: Zoo, plans: Plans) -> None:
    from tests.engine.serving import load as load_torch

    model = zoo["qwen2"]
    sampling = SamplingConfig(temperature=1.1, top_p=0.9, num_return_sequences=2, random_seed=7)
    requests = [
        Request(number, model.prompt(9 + 7 * number, number), 14, sampling=sampling) for number in range(4)
    ]
    requests.append(replace(requests[0], request_id=9, sampling=SamplingConfig(repetition_penalty=1.4)))
    config = config_of("chunked")
    mine = serve(load(plans(model), num_blocks=26), config, requests)
    theirs = serve(load_torch(model.folder, 26, kernels="torch"), config, requests)
    for key, responses in theirs.responses.items():
        assert mine.tokens(*key) == theirs.tokens(*key), responses[0].request_id


FORMS = [{"attention": "packed"}, {"weights": "inputs"}, {"weights": "inputs", "attention": "packed"}]


@pytest.mark.parametrize("options", with_all(FORMS, FORMS[2:]), ids=str)
def test_packed_attention_and_weights_as_inputs_give_transformers_tokens(
    zoo: Zoo, plans: Plans, options: dict[str, str]
) -> None:
    """Weights bound to inputs; attention that TensorRT for RTX cannot build."""
    model = zoo["qwen3"]
    requests = some_of_everything(model, NUM_TOKENS)[:5]
    engine = load(plans(model, **options), num_blocks=40)
    assert_as_transformers(model, serve(engine, config_of("chunked", max_beam_width=3), requests), requests)
