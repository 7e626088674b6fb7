"""Latent attention's cache, and routers of DeepSeek's models, compared with transformers'.

Tokens and logits of these families are compared in test_families.py and test_every_family.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from inflight.core.request.request import OutputOptions, Request
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.engine.layers.experts import route
from inflight.models import read_model_description
from inflight.models.decoder_config import ExpertsConfig
from inflight.models.decoder_weights import ExpertWeights, Linear
from inflight.models.sharding import Part
from inflight.ranks.topology import Mapping
from tests.engine.driver import load_engine
from tests.engine.serving import config_of, load, serve
from tests.models.zoo import Zoo

CASES = ("deepseek-v2", "deepseek-v3")
RANK, SHARED_KEY = 24, 8
"""kv_lora_rank and qk_rope_head_dim of these models."""


@pytest.mark.parametrize("case", CASES)
def test_a_block_has_one_latent_and_one_key_of_a_token_whatever_the_number_of_heads(
    zoo: Zoo, case: str
) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    expected = decoder.num_layers * 16 * (RANK + SHARED_KEY) * 2
    assert block_bytes(decoder, 16, torch.bfloat16) == expected
    held = Part.from_mapping(Mapping(2, 1, 1), decoder).held_config(decoder)
    assert held.num_heads == decoder.num_heads // 2
    assert block_bytes(held, 16, torch.bfloat16) == expected, "every rank has all of it"


def test_keys_are_stored_once_and_are_the_values(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["deepseek-v3"].folder).decoder
    cache = KvCache(decoder, 4, 2, torch.float32, torch.device("cpu"))
    keys = torch.randn(3, 1, RANK + SHARED_KEY)
    cache.write(1, torch.tensor([6, 7, 0]), keys, keys)
    cache.copy(torch.tensor([3]), torch.tensor([1]))
    found, values = cache.gather(1, torch.tensor([1, 0]))
    assert torch.equal(found[:3], keys) and torch.equal(values, found)
    key_pages, value_pages = cache.pages(1)
    assert torch.equal(key_pages[1], keys[:2]) and torch.equal(value_pages, key_pages)
    assert value_pages.untyped_storage().data_ptr() == key_pages.untyped_storage().data_ptr()


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_reused_by_prompts_that_are_computed_in_chunks(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    prompt, other = model.prompt(90), model.prompt(50, seed=1)
    options = OutputOptions(return_perf_metrics=True)
    requests = [
        Request(0, prompt, 16, output=options),
        Request(1, (*prompt[:60], *other), 16, output=options),
        Request(2, prompt, 16, output=options),
    ]
    served = serve(load(model.folder, num_blocks=64), config_of("chunked"), requests, per_iteration=1)
    reused = [served.result(request).perf_metrics.num_reused_blocks for request in requests]
    assert reused == [0, 60 // 8 + 1, 89 // 8], (
        "the second has a copy of a block that only begins as its own does"
    )
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 16)


V2 = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3 = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
NORMALIZED = {"is_normalized": True}


@pytest.mark.parametrize(
    ("version", "changes", "ours"),
    [
        (2, {**V2, "topk_method": "greedy"}, {"num_groups_per_token": 4}),
        (2, V2, {}),
        (3, V3, NORMALIZED),
        (3, {**V3, "norm_topk_prob": False}, {}),
        (
            3,
            {**V3, "n_group": 1, "topk_group": 1},
            {**NORMALIZED, "num_groups": 1, "num_groups_per_token": 1},
        ),
        (
            3,
            {**V3, "n_group": 8, "topk_group": 3},
            {**NORMALIZED, "num_groups": 8, "num_groups_per_token": 3},
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_go_to_the_experts_that_transformers_chooses(
    version: int, changes: dict[str, Any], ours: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
    }
    config = DeepseekV2Config(**sizes, **changes) if version == 2 else DeepseekV3Config(**sizes, **changes)
    router = DeepseekV2TopkRouter(config) if version == 2 else DeepseekV3TopkRouter(config)
    router.weight.copy_(torch.randn_like(router.weight).to(dtype))
    bias = None
    if version == 3:
        bias = router.e_score_correction_bias.copy_(torch.randn(16) * 0.3)
    x = torch.randn(200, 32).to(dtype)
    experts = ExpertsConfig(
        count=16,
        num_per_token=3,
        intermediate_size=8,
        layers=(True,),
        scoring="softmax" if version == 2 else "sigmoid",
        has_choice_bias=version == 3,
        scores_per_group=version - 1,
        result_scale=2.5,
        has_float32_router=True,
        **{"is_normalized": False, "num_groups": 4, "num_groups_per_token": 2, **ours},
    )
    nothing = Linear(torch.empty(0))
    weights = ExpertWeights(Linear(router.weight.to(dtype)), nothing, nothing, None, bias)

    chances, chosen = route(x, weights, experts)

    _, expected, indices = router(x)
    dense, expected_dense = torch.zeros(200, 16), torch.zeros(200, 16)
    torch.testing.assert_close(
        dense.scatter(1, chosen, chances), expected_dense.scatter(1, indices, expected)
    )
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 20


def test_a_cache_in_8_bits_is_computed_by_torchs_operators_and_the_log_says_so(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_engine(zoo["deepseek-v3"].folder, kv_cache_dtype="int8").kernels == "torch"
    assert "compiled layers do not round the cache of latent attention" in caplog.text
