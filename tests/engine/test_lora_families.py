"""LoRA adapters of every family, as PEFT saves them: on all linear layers that adapters may change here they give
PEFT's tokens and logits, and those of other layers are refused by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from inflight.adapters.lora_rows import check_adapter
from inflight.adapters.peft_folder import read_peft_folder
from inflight.core.request.adapter import LoraRequest, LoraWeights
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument
from inflight.models import read_model_description
from tests.adapters.factories import make_peft_model, save_adapter
from tests.engine.driver import Driver, load_engine
from tests.engine.kernels import by_default_and
from tests.engine.lora import stored
from tests.engine.ranks import ranks
from tests.engine.serving import config_of
from tests.engine.test_every_family import CASE_OF
from tests.engine.test_families import TOLERANCE
from tests.engine.test_served_adapters import serve_with
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CASES = [
    *CASE_OF.values(),
    "deepseek-v2-lite",
    "gemma3n-widths",
    "gemma4-moe",
    "gemma4-shared",
    "granite-hybrid",
    "nemotron-h-dense",
]
LATENT = ["self_attn.kv_b_proj"]
BY_HEAD = ["query_key_value"]
PER_LAYER = ["per_layer_input_gate", "per_layer_projection"]
STREAMS = ["correction_coefs", "prediction_coefs", "modality_router", "linear_left", "linear_right"]
REFUSED = {
    "llama4": ["feed_forward.router"],
    "qwen2-moe": ["mlp.shared_expert_gate"],
    "mistral4": LATENT,
    "deepseek-v2": LATENT,
    "deepseek-v2-lite": LATENT,
    "deepseek-v3": LATENT,
    "glm4-moe-lite": LATENT,
    "hunyuan-moe": ["mlp.gate.wg"],
    "gemma3n": [*PER_LAYER, *STREAMS],
    "gemma3n-widths": [*PER_LAYER, *STREAMS],
    "gemma4-moe": ["router.proj"],
    "gemma4-shared": PER_LAYER,
    "neox": BY_HEAD,
    "falcon": BY_HEAD,
    "bloom": BY_HEAD,
    "qwen3.5-moe": ["mlp.shared_expert_gate"],
    "qwen3-next": ["mlp.shared_expert_gate"],
    "nemotron-h": ["mixer.fc1_latent_proj", "mixer.fc2_latent_proj"],
    "kimi-linear": [
        *LATENT,
        *(f"forget_gate.{name}_proj" for name in ("f_a", "f_b")),
        "self_attn.g_b_proj",
        *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    ],
    "lfm3": ["self_attn.g_proj"],
}
"""By case, ends of names of linear layers that adapters may not change."""
OPTIONS = {"plain": {"r": 4, "lora_alpha": 3}, "dora": {"r": 5, "lora_alpha": 4, "use_dora": True}}
FAST = [
    *itertools.product(
        [
            *("phi3-partial-window", "glm4", "opt", "neox", "llama4", "qwen2-moe", "gemma3n", "gemma4-moe"),
            *("gemma4-shared", "deepseek-v3", "deepseek-v2-lite", "mistral4", "qwen3.5", "qwen3-next"),
            *("granite-hybrid-moe", "nemotron-h", "falcon-h1", "kimi-linear", "lfm3"),
        ],
        [None],
    ),
    *itertools.product(["deepseek-v3", "deepseek-v2-lite", "qwen2-moe", "lfm2"], ["torch"]),
]
NUM_TOKENS = 8
RANKED = [
    *("gemma3n", "gemma4-shared"),
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "qwen2-moe", "gemma4-moe", "qwen3.5", "qwen3-next"),
    *("olmo-hybrid", "granite-hybrid", "nemotron-h-dense", "falcon-h1", "kimi-linear", "lfm2"),
]


def linear_layers(model: ZooModel) -> list[str]:
    """Return the names of the linear layers of the decoder's layers."""
    return [
        name
        for name, module in model.oracle.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and re.search(r"\.(layers|h)\.\d+\.", name)
    ]


def refused_layers(case: str, model: ZooModel) -> dict[str, str]:
    """Return the name of one linear layer for each entry of `REFUSED`."""
    names = linear_layers(model)
    return {end: next(name for name in names if name.endswith(end)) for end in REFUSED[case]}


def is_refused(case: str, name: str) -> bool:
    return name.endswith(tuple(REFUSED.get(case, ["-"])))


@contextmanager
def as_named() -> Iterator[None]:
    """Let PEFT adapt the named modules, and no others.

    In some families it otherwise adapts experts for such names, and in some it refuses `out_proj`.
    """
    converting = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
    refusing = "peft.tuners.tuners_utils._check_lora_target_modules_mamba"
    with patch(converting, lambda *_, **__: None), patch(refusing, lambda *_, **__: None):
        yield


def read_adapter(model: ZooModel, folder: Path, **options: Any) -> tuple[LoraWeights, ZooModel]:
    """Return an adapter as the server reads it from PEFT's folder, and PEFT's model as its oracle."""
    transposed = model.oracle.config.model_type == "gpt2"
    with as_named():
        adapted = make_peft_model(model, fan_in_fan_out=transposed, **options)
    description = read_model_description(model.folder)
    weights = read_peft_folder(save_adapter(adapted, folder), description)
    checked = check_adapter(weights, description.decoder, 64)
    return checked.weights, ZooModel(model.folder, adapted)


def read_largest(case: str, model: ZooModel, folder: Path, options: str) -> tuple[LoraWeights, ZooModel]:
    """Return an adapter of all linear layers that adapters may change, and its oracle."""
    targets = [name for name in linear_layers(model) if not is_refused(case, name)]
    return read_adapter(model, folder, target_modules=targets, **OPTIONS[options])


@pytest.mark.parametrize("options", with_all(list(OPTIONS), ["plain"]))
@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(by_default_and(CASES, CASES), FAST),
)
def test_an_adapter_of_all_modules_gives_pefts_tokens_and_logits(
    zoo: Zoo, tmp_path: Path, case: str, kernels: str | None, options: str
) -> None:
    """A sequence with the adapter, and one without it in the same batch."""
    model = zoo[case]
    weights, oracle = read_largest(case, model, tmp_path, options)
    driver = Driver(load_engine(model.folder, kernels=kernels))
    prompt = model.prompt(21)
    row = driver.start(prompt, adapter=driver.put(stored(weights, 1)))
    base = driver.start(prompt)
    driver.step({row: 21, base: 21})
    for _ in range(NUM_TOKENS - 1):
        driver.step(generation=[row, base])
    assert base.generated == model.greedy(prompt, NUM_TOKENS)
    expected, without = (each.logits(row.tokens)[len(prompt) - 1 : -1] for each in (oracle, model))
    assert (expected - without).abs().max() > 0.1, "the adapter makes a difference"
    assert row.generated == expected.argmax(1).tolist()
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(by_default_and(RANKED, RANKED), [("deepseek-v3", None), ("granite-hybrid", None)]),
)
def test_two_adapters_and_none_in_one_batch_of_chunks_give_pefts_tokens(
    zoo: Zoo, tmp_path: Path, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    driver, rows = Driver(load_engine(model.folder, kernels=kernels)), dict[Any, ZooModel]()
    for number, options in enumerate([*OPTIONS, None]):
        oracle, first = model, -1
        if options is not None:
            weights, oracle = read_largest(case, model, tmp_path / options, options)
            first = driver.put(stored(weights, number))
        rows |= {driver.start(model.prompt(30, seed), adapter=first): oracle for seed in (number, number + 5)}
    for _ in range(3):
        driver.step(dict.fromkeys(rows, 10))
    for _ in range(NUM_TOKENS - 1):
        driver.step(generation=list(rows))
    for row, oracle in rows.items():
        assert row.generated == oracle.logits(row.tokens)[29:-1].argmax(1).tolist()


@pytest.mark.parametrize("case", with_all(REFUSED, ["deepseek-v2", "gemma3n", "nemotron-h", "kimi-linear"]))
def test_an_adapter_of_another_module_is_refused_by_its_name(zoo: Zoo, tmp_path: Path, case: str) -> None:
    model = zoo[case]
    for number, name in enumerate(refused_layers(case, model).values()):
        options = {"target_modules": [name], **OPTIONS["plain"]}
        with pytest.raises(InvalidArgument, match=re.escape(name)):
            read_adapter(model, tmp_path / str(number), **options)


@pytest.mark.parametrize(
    ("case", "target"),
    with_all(
        [("mixtral", "experts.down_proj"), ("gpt-oss", "experts.down_proj"), ("qwen3-moe", "gate.weight")],
        ["mixtral"],
    ),
)
def test_an_adapter_of_experts_or_a_router_is_refused_by_their_name(
    zoo: Zoo, tmp_path: Path, case: str, target: str
) -> None:
    options = {"target_modules": ["o_proj"], "target_parameters": [target], "r": 4}
    with pytest.raises(
        InvalidArgument, match=rf"target_parameters is \['{target}'\], expected nothing there"
    ):
        read_adapter(zoo[case], tmp_path, **options)


@pytest.mark.parametrize(
    ("case", "kernels", "topology"),
    with_all(
        [
            *itertools.product(RANKED, (None, "torch"), ((2, 1), (1, 2))),
            # some stages have no layer that the adapter changes, or no attention
            *((case, None, (1, 4)) for case in ("qwen3.5", "qwen3-next", "granite-hybrid", "lfm2")),
        ],
        [
            ("deepseek-v3", None, (2, 1)),
            ("deepseek-v2-lite", "torch", (2, 1)),
            ("qwen3.5", None, (2, 1)),
            ("gemma3n", None, (1, 2)),
        ],
    ),
)
def test_ranks_divide_an_adapter(
    zoo: Zoo, tmp_path: Path, case: str, kernels: str | None, topology: tuple[int, int]
) -> None:
    """Latent attention with one and with two projections of queries, shared MLPs, recurrent layers, and layers
    without keys of their own."""
    model = zoo[case]
    weights, oracle = read_largest(case, model, tmp_path, "dora")
    requests = [
        Request(number, model.prompt(21 + number), NUM_TOKENS, lora=LoraRequest(7) if number else None)
        for number in range(2)
    ]
    with ranks(model.folder, topology, kernels=kernels) as engine:
        served = serve_with(engine, config_of("no-evict"), requests, {7: weights})
    for request in requests:
        expected = oracle if request.lora else model
        assert served.tokens(request) == expected.greedy(request.input_token_ids, NUM_TOKENS)
