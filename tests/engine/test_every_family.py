"""Every family in every way of serving, compared with transformers, and the table of docs/models.md.

Ways of serving are tested in detail elsewhere, on a few families; these tests are about the families.
`UPDATE_TABLES=1` rewrites the table.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.cpu import library
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.quantize import quantize_int8
from inflight.engine.tensorrt.network import lacking
from inflight.errors import ConfigError
from inflight.models import FAMILIES, read_model_description
from inflight.models.families import Family
from tests.engine.driver import alone, load_engine
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.kernels import by_default_and, needs_native
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, load, serve
from tests.models.published_names import PUBLISHED_NAMES
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo, ZooModel, make_model
from tests.models.zoo_multimodal import MULTIMODAL
from tests.tiers import examples, with_all

CASE_OF = {
    "llama": "llama-gqa",
    "mistral": "mistral-window",
    "ministral": "mistral-layer-types",
    "ministral3": "ministral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3-partial-window",
    "olmo2": "olmo2",
    "granite": "granite",
    "granite_swa": "granite-swa",
    "granitemoe_swa": "granite-moe-swa",
    "smollm3": "smollm3",
    "llama4_text": "llama4",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2-moe",
    "qwen3_moe": "qwen3-moe",
    "olmoe": "olmoe",
    "mistral4": "mistral4",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "arcee": "arcee",
    "apertus": "apertus",
    "seed_oss": "seed-oss",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "glm4_moe": "glm4-moe",
    "glm4_moe_lite": "glm4-moe-lite",
    "ernie4_5": "ernie4.5",
    "ernie4_5_moe": "ernie4.5-moe",
    "hunyuan_v1_dense": "hunyuan",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4-unified-text",
    "gpt2": "gpt2",
    "gpt_neox": "neox",
    "opt": "opt",
    "falcon": "falcon",
    "bloom": "bloom",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5-moe",
    "qwen3_next": "qwen3-next",
    "olmo_hybrid": "olmo-hybrid",
    "granitemoehybrid": "granite-hybrid-moe",
    "nemotron_h": "nemotron-h",
    "falcon_h1": "falcon-h1",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2-moe",
    "lfm3": "lfm3",
}
"""A model of the zoo for each family."""
MODELS = [
    *CASE_OF.values(),
    "granite-hybrid",  # several groups of heads
    "nemotron-h-dense",  # one group of heads, biases
    "gemma3n-widths",
    "gemma4-moe",
    "gemma4-shared",
    "falcon-alibi",
]
"""Also those with other components of a family."""
BOUND = {"bfloat16": 0.08, "int8": 0.15}
"""As in test_precision.py: root mean square error of the logits over their standard deviation."""
FAST = [
    *(
        (case, None)
        for case in (
            "mixtral",
            "deepseek-v3",
            "gemma3",
            "gemma3n",
            "gemma4-moe",
            "gemma4-shared",
            "gpt-oss",
            "llama4",
            "ministral3",
            "qwen3.5",
            "granite-hybrid-moe",
            "nemotron-h",
        )
    ),
    ("mixtral", "torch"),
]
"""Experts, latent attention, windows in some layers, experts beside MLPs, keys as values, shared keys and values,
per-layer embeddings, several residual streams, learned sinks, chunks, queries scaled by position, two kinds of
recurrent layers, layers of one part."""
OF_KNOWN_COMPONENTS = [
    "gemma4-unified-text",
    "arcee",
    "seed-oss",
    "olmo3",
    "exaone4",
    "glm4-moe",
    "glm4-moe-lite",
    "falcon",
    "ernie4.5",
    "ernie4.5-moe",
    "granite-swa",
    "granite-moe-swa",
    "hunyuan-moe",
    "minimax-m2",
    "cohere2",
    "stablelm",
    "starcoder2",
]
"""Families whose components others have too, which only the exhaustive tier runs."""
WRITTEN = [*MODELS, *MULTIMODAL]
"""Checkpoints whose tensors are tested with the names that transformers writes."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(("case", "kernels"), with_all(by_default_and(MODELS, MODELS), FAST))
@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"])
)
def test_packed_chunked_reused_and_paused_requests_give_transformers_tokens(
    zoo: Zoo, case: str, kernels: str | None, way: str
) -> None:
    """Packed, chunked, with reused blocks, and paused."""
    model = zoo[case]
    requests = some_of_everything(model, longest=examples(18, all=30))
    engine = load(model.folder, num_blocks=26, max_num_sequences=8, kernels=kernels)
    served = serve(engine, config_of(way), requests)
    assert (served.num_pauses > 0) == ("utilization" in way)
    num_prompt_tokens = sum(len(request.input_token_ids) for request in requests)
    assert (served.num_context_tokens < num_prompt_tokens) == (way == "no-evict"), "reused blocks"
    assert_as_transformers(model, served, requests)


@pytest.mark.parametrize(("case", "kernels"), with_all(by_default_and(MODELS, MODELS), FAST[:-1]))
@pytest.mark.parametrize(
    "topology", with_all([pytest.param((2, 1), id="tp2"), pytest.param((1, 2), id="pp2")], [(2, 1)])
)
def test_several_ranks_give_transformers_tokens(
    zoo: Zoo, case: str, kernels: str | None, topology: tuple[int, int]
) -> None:
    model = zoo[case]
    requests = some_of_everything(model, longest=examples(18, all=30))[:6]
    with ranks(model.folder, topology, num_blocks=80, kernels=kernels) as engine:
        served = serve(engine, config_of("no-evict"), requests)
    assert_as_transformers(model, served, requests)


@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(by_default_and(["gemma2", "olmo2"], MODELS), [*FAST[:-1], ("gemma2", "torch")]),
)
@pytest.mark.parametrize("dtype", BOUND)
@torch.inference_mode()
def test_error_of_other_types_is_bounded(zoo: Zoo, case: str, dtype: str, kernels: str | None) -> None:
    model = zoo[case]
    prompt = model.prompt(32)
    row = alone(load_engine(model.folder, dtype=dtype, kernels=kernels), prompt, 24)
    wanted = slice(len(prompt) - 1, -1)
    exact = model.logits(row.tokens)[wanted]

    def errors_of(logits: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of each token, relative to the variance of all logits."""
        return (logits - exact).square().mean(1) / exact.var()

    def theirs() -> torch.Tensor:
        return errors_of(_in_type(model.oracle, dtype)(torch.tensor([row.tokens])).logits[0][wanted].float())

    ours = errors_of(torch.stack(row.logits))
    if hasattr(model.oracle.config, "num_experts_per_tok"):
        # A token near the border between two experts may go to the other one, in transformers' model as well, and
        # then has a large error. The median leaves such tokens out.
        assert ours.median().sqrt() < 2 * max(BOUND[dtype], theirs().median().sqrt().item())
    else:  # with int8, compiled layers round activations too
        assert ours.mean().sqrt() < BOUND[dtype] or ours.mean().sqrt() < 1.5 * theirs().mean().sqrt()


@pytest.mark.parametrize("case", with_all(WRITTEN, WRITTEN[::8]))
def test_a_checkpoint_as_save_pretrained_writes_it_gives_transformers_logits(
    tmp_path: Path, case: str
) -> None:
    _assert_logits_are_transformers(make_model(tmp_path / case, case))


@pytest.mark.parametrize("case", PUBLISHED_NAMES)
def test_names_of_published_checkpoints_give_transformers_logits(tmp_path: Path, case: str) -> None:
    model = make_model(tmp_path / case, case)
    path = model.folder / "model.safetensors"
    written = load_file(path)
    published = PUBLISHED_NAMES[case](model.oracle.config, dict(written))
    assert published.keys() != written.keys()
    save_file(published, path, {"format": "pt"})
    _assert_logits_are_transformers(model)


def _assert_logits_are_transformers(model: ZooModel) -> None:
    prompt = model.prompt(9)
    row = alone(load_engine(model.folder, dtype="float32"), prompt, 2)
    exact = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-3)


def _in_type(oracle: Any, dtype: str) -> Any:
    """Return transformers' model in bfloat16; for int8 with matrices rounded as ours, so not those of routers and
    convolutions."""
    copied = copy.deepcopy(oracle)
    kept = ("gate.weight", "router.layer.weight", "conv.weight", "conv1d.weight")
    for name, matrix in copied.model.layers.named_parameters() if dtype == "int8" else ():
        if matrix.dim() > 1 and not name.endswith(kept):
            levels, scales = quantize_int8(matrix.flatten(0, -2))
            matrix.copy_((levels * scales[:, None]).view_as(matrix))
    return copied.bfloat16()


def _of_four_bits(model: ZooModel, folder: Path) -> str:
    """Return whether a GPTQ checkpoint of the model is compiled, dequantized or refused."""
    try:
        write(model, folder, FORMATS["gptq-one-group"], dtype="bfloat16")
        decoder = load_engine(folder).runner.decoder
    except ConfigError:
        return "–"
    if not isinstance(decoder, NativeDecoder):
        return "dequantized"
    # An input projection of gated DeltaNet has parts that these formats leave in 16 bits.
    assert {layer.struct.output.kind for layer in decoder._packed} == {2}
    return "compiled"


def _of_ranks(folder: Path, topology: tuple[int, int]) -> str:
    """Return the engine that serves a model on several ranks; "" if they are refused."""
    try:
        with ranks(folder, topology) as engine:
            return next(stage for stage in engine.stages).kernels
    except ConfigError:
        return ""


def _table(zoo: Zoo, scratch: Path, families: Sequence[Family]) -> str:
    """Return the table of these families, with the engine that serves each of them in each setting."""
    lines = [
        "| model_type | architecture | float32 | bfloat16 | int8 | 4 bits | tp 2 | pp 2 | TensorRT |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family in families:
        folder = zoo[CASE_OF[family.model_type]].folder
        found = [load_engine(folder, dtype=dtype).kernels for dtype in ("float32", "bfloat16", "int8")]
        found += [_of_ranks(folder, topology) for topology in ((2, 1), (1, 2))]
        names = {"native": "compiled", "torch": "torch", "": "–"}
        cells = [names[each] for each in found]
        cells.insert(3, _of_four_bits(zoo[CASE_OF[family.model_type]], scratch / family.model_type))
        cells.append("no" if lacking(read_model_description(folder).decoder) else "plans")
        cells = " | ".join(cells)
        lines.append(f"| `{family.model_type}` | `{family.architecture}` | {cells} |")
    return "\n".join(lines)


def _targets() -> str:
    """Return the table of targets of all machines, with the code that computes each dtype."""
    lines = ["| target | float32 | bfloat16, int8, 4 bits | float16, fp8 | note |", "|---|---|---|---|---|"]
    targets = [*itertools.chain(*library._OF_MACHINES.values()), library._GENERIC]
    for target, slower in itertools.zip_longest(targets, targets[1:]):
        cells = [
            "torch"
            if dtype not in library._ELEMENTS
            else "compiled"
            if dtype in target.dtypes
            else f"compiled, with the code of `{slower.name}`"
            for dtype in ("float32", "bfloat16", "float16")
        ]
        lines.append(f"| `{target.name}` | {' | '.join(cells)} | {target.caveat} |")
    return "\n".join(lines)


def _check_page(name: str, found: str, step: int = 1) -> None:
    """Compare every `step`th row of a table of the page with the rows that were found, or replace it."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    page = PAGE.read_text()
    head, rest = page.split(begin)
    table, tail = rest.split(end)
    if os.environ.get("UPDATE_TABLES"):
        PAGE.write_text(head + begin + found + end + tail)
        table = found
    heading, rows = table.splitlines()[:2], table.splitlines()[2:]
    assert [*heading, *rows[::step]] == found.splitlines()


def test_the_documented_targets_are_current() -> None:
    _check_page("targets", _targets())


@needs_native
@pytest.mark.parametrize("target", with_all(["", "generic"], [""]))
def test_the_documented_table_is_current(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """On this machine's fastest target, and on the one that runs anywhere: the compiled families are the same.

    By default every eighth family is loaded.
    """
    if target:
        monkeypatch.setenv("INFLIGHT_CPU_TARGET", target)
    assert CASE_OF.keys() == {family.model_type for family in FAMILIES}
    step = 1 if os.environ.get("UPDATE_TABLES") else examples(fast=8, all=1)
    _check_page("table", _table(zoo, tmp_path, FAMILIES[::step]), step)


def test_components_that_compiled_layers_lack_are_logged(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    assert load_engine(zoo["gemma4-shared"].folder).kernels == "torch"
    (record,) = [each for each in caplog.records if "run on torch's operators" in each.getMessage()]
    for component in ("layers that read another layer's keys and values", "per-layer embeddings"):
        assert component in record.getMessage()
