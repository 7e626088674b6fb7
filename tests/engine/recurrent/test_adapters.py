"""LoRA adapters of models with recurrent layers, as PEFT saves them, give PEFT's tokens and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.adapters.lora_modules import Module
from inflight.adapters.lora_rows import check_adapter
from inflight.adapters.peft_folder import read_peft_folder
from inflight.core.request.adapter import LoraRequest, LoraWeights
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument
from inflight.models import read_model_description
from tests.adapters.factories import make_peft_model, make_weights, save_adapter
from tests.engine.driver import Driver, load_engine
from tests.engine.lora import stored
from tests.engine.ranks import ranks
from tests.engine.serving import config_of
from tests.engine.test_families import DELTA_TOLERANCE
from tests.engine.test_served_adapters import serve_with
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

ATTENTION = ["q_proj", "k_proj", "v_proj"]
TARGETS = {
    "qwen3.5": [*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3.5-moe": [*ATTENTION, "o_proj"],
    "qwen3-next": [*ATTENTION, "o_proj"],
    "granite-hybrid": [*ATTENTION, "o_proj", "input_linear", "output_linear"],
    "granite-hybrid-moe": [*ATTENTION, "o_proj"],
    "nemotron-h-dense": [*ATTENTION, "o_proj", "up_proj", "down_proj"],
    "falcon-h1": [*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj"],
    "lfm2": [*ATTENTION, "self_attn.out_proj", "w1", "w2", "w3"],
    "lfm2-moe": [*ATTENTION, "self_attn.out_proj"],
    "lfm3": [*ATTENTION, "o_proj", "w1", "w2", "w3"],
}
"""By case, the projections of attention, and of the MLP in models without experts."""
OPTIONS = {
    "plain": {"r": 8, "lora_alpha": 6},
    "dora": {"r": 11, "lora_alpha": 5, "use_dora": True},
}
NUM_TOKENS = 12


def read_adapter(model: ZooModel, folder: Path, **options: Any) -> tuple[LoraWeights, ZooModel]:
    """Return an adapter as the server reads it from PEFT's folder, and PEFT's model as its oracle."""
    adapted = make_peft_model(model, **options)
    weights = read_peft_folder(save_adapter(adapted, folder), read_model_description(model.folder))
    checked = check_adapter(weights, read_model_description(model.folder).decoder, 64)
    return checked.weights, ZooModel(model.folder, adapted)


@pytest.mark.parametrize("options", with_all(list(OPTIONS), ["dora"]))
@pytest.mark.parametrize("case", with_all(list(TARGETS), ["qwen3.5", "granite-hybrid"]))
def test_an_adapter_of_attention_and_mlp_gives_pefts_tokens_and_logits(
    zoo: Zoo, tmp_path: Path, case: str, options: str
) -> None:
    """A sequence with the adapter, and one without it in the same batch."""
    model = zoo[case]
    weights, oracle = read_adapter(model, tmp_path, target_modules=TARGETS[case], **OPTIONS[options])
    driver = Driver(load_engine(model.folder))
    prompt = model.prompt(21)
    row = driver.start(prompt, adapter=driver.put(stored(weights, 1)))
    base = driver.start(prompt)
    driver.step({row: 21, base: 21})
    for _ in range(NUM_TOKENS - 1):
        driver.step(generation=[row, base])
    assert row.generated == oracle.greedy(prompt, NUM_TOKENS)
    assert base.generated == model.greedy(prompt, NUM_TOKENS)
    assert row.generated != base.generated, "the adapter makes a difference"
    expected = oracle.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=1e-4, atol=DELTA_TOLERANCE)


@pytest.mark.parametrize(
    "topology", with_all([pytest.param((2, 1), id="tp2"), pytest.param((1, 4), id="pp4")], [(2, 1)])
)
@pytest.mark.parametrize("case", with_all(["qwen3.5", "qwen3-next", "granite-hybrid", "lfm2"], ["qwen3.5"]))
def test_ranks_divide_an_adapter(zoo: Zoo, tmp_path: Path, case: str, topology: tuple[int, int]) -> None:
    """With four stages some have no layer that the adapter changes, or no attention."""
    model = zoo[case]
    weights, oracle = read_adapter(model, tmp_path, target_modules=TARGETS[case], **OPTIONS["dora"])
    requests = [
        Request(number, model.prompt(21 + number), NUM_TOKENS, lora=LoraRequest(7) if number else None)
        for number in range(2)
    ]
    with ranks(model.folder, topology) as engine:
        served = serve_with(engine, config_of("no-evict"), requests, {7: weights})
    for request in requests:
        expected = oracle if request.lora else model
        assert served.tokens(request) == expected.greedy(request.input_token_ids, NUM_TOKENS)


@pytest.mark.parametrize(
    ("case", "target", "module"),
    [
        ("qwen3.5", ["q_proj", "in_proj_qkv"], r"linear_attn\.in_proj_qkv"),
        ("granite-hybrid", ["in_proj"], r"mamba\.in_proj"),
        ("lfm2", ["out_proj"], r"conv\.out_proj"),
    ],
)
def test_an_adapter_of_a_recurrent_projection_is_refused(
    zoo: Zoo, tmp_path: Path, case: str, target: list[str], module: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"the adapter has a tensor '\S*{module}\S*', and"):
        read_adapter(zoo[case], tmp_path, target_modules=target)


@pytest.mark.parametrize(
    ("case", "enabled"), [("qwen3.5", r"mlp_h_to_4h \(5\)"), ("qwen3.5-moe", "those of other layers")]
)
def test_an_adapter_of_attention_in_a_recurrent_layer_is_refused(zoo: Zoo, case: str, enabled: str) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    weights = make_weights(decoder, [(Module.ATTN_Q, 1, 4), (Module.ATTN_K, 0, 4)])
    message = rf"attn_k not enabled for layer 0, which is recurrent: row 1 .* expected one of {enabled}"
    with pytest.raises(InvalidArgument, match=message):
        check_adapter(weights, decoder, 64)
