"""GGUF files of every architecture in the layout of llama.cpp's converter: logits equal transformers'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file
from transformers import Llama4TextConfig

from inflight.core.request.request import Request
from inflight.errors import ConfigError
from inflight.gguf import folder as gguf_folder
from inflight.gguf.architectures import ARCHITECTURES
from inflight.hub import find_checkpoint
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder_config import AttentionTemperature
from inflight.models.fitting import fitted
from inflight.models.levels import MatrixKind
from inflight.models.loader import check_weights, quantized_kinds
from inflight.models.registry import read_model_description
from tests.engine.driver import alone, load_engine
from tests.engine.llama_cpp_tokens import llama_cpp_tokens, needs_llama_cpp
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve
from tests.models.gguf_converter import CONVERTED, as_published, convert
from tests.models.gguf_files import CASES
from tests.models.zoo import make_model
from tests.tiers import with_all

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OTHER_FAMILIES = (
    ("llama", "mixtral"),
    ("mistral3", "mistral"),
    ("olmo2", "olmo3"),
    ("deepseek2", "deepseek_v2"),
)
"""Architectures with the second family that they stand for."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folders of GGUF files in the test's own folder."""
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)


@pytest.mark.parametrize("case", with_all(list(CONVERTED), ["qwen3-moe", "qwen3.5", "gpt-oss", "gemma4-moe"]))
def test_logits_equal_those_of_the_converted_model(tmp_path: Path, case: str) -> None:
    model = convert(tmp_path / "m.gguf", case)
    row = alone(load_engine(find_checkpoint(str(model.folder)), dtype="float32"), model.prompt(30), 6)
    assert row.generated == model.greedy(model.prompt(30), 6)
    exact = model.logits(row.tokens)[29:-1]
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "topology"),
    [
        ("qwen3-moe", (2, 1)),
        ("qwen3.5-moe", (2, 1)),
        ("gpt-oss", (2, 1)),
        ("apertus", (2, 1)),
        ("falcon-h1", (2, 1)),
        ("llama4", (2, 1)),
        ("kimi-linear", (2, 1)),
        ("gemma3n", (1, 2)),
        ("gemma4-shared", (1, 2)),
        ("apertus", (1, 2)),
    ],
)
def test_ranks_split_experts_and_stages_per_layer_embeddings_of_a_gguf_file(
    tmp_path: Path, case: str, topology: tuple[int, int]
) -> None:
    model = convert(tmp_path / "m.gguf", case)
    requests = [Request(number, model.prompt(9 + number, number), 8) for number in range(3)]
    with ranks(find_checkpoint(str(model.folder)), topology) as engine:
        served = serve(engine, config_of("chunked"), requests)
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 8)


def test_the_page_names_every_architecture() -> None:
    """The families are those of the tested files. `UPDATE_TABLES=1` writes the table."""
    models: dict[str, list[str]] = {name: [each.model_type] for name, each in ARCHITECTURES.items()}
    for name, case in OTHER_FAMILIES:
        models[name].append(case)
    rows = [f"| `{name}` | {', '.join(f'`{each}`' for each in types)} |" for name, types in models.items()]
    table = "\n".join(("| `general.architecture` | model_type |", "|---|---|", *rows))
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split("<!-- gguf -->\n")
    found, after = rest.split("\n<!-- end of gguf -->")
    if os.environ.get("UPDATE_TABLES"):
        PAGE.write_text(f"{before}<!-- gguf -->\n{table}\n<!-- end of gguf -->{after}", encoding="utf-8")
        found = table
    assert found == table, "UPDATE_TABLES=1 scripts/test tests/engine/test_gguf_architectures.py"


def test_every_architecture_has_a_tested_file() -> None:
    tested = {each[0] for each in (*CONVERTED.values(), *CASES.values())}
    assert tested == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("architecture", "model_type"), OTHER_FAMILIES, ids=[each for _, each in OTHER_FAMILIES]
)
def test_an_architecture_may_stand_for_several_families(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    case = {"deepseek_v2": "deepseek-v2", "mistral": "mistral-small"}.get(model_type, model_type)
    model = convert(tmp_path / "m.gguf", case)
    assert CONVERTED[case][0] == architecture
    config = json.loads((find_checkpoint(str(model.folder)) / "config.json").read_text())
    assert config["model_type"] == model_type


@pytest.mark.parametrize(("case", "num_experts"), [("llama4", 6), ("llama4-maverick", 128)])
def test_what_a_file_of_llama4_does_not_state_is_as_published(
    tmp_path: Path, case: str, num_experts: int
) -> None:
    """The defaults of transformers are the numbers of Scout. Maverick has 128 experts, and no norms."""
    model, published = convert(tmp_path / "m.gguf", case), Llama4TextConfig()
    decoder = read_model_description(find_checkpoint(str(model.folder))).decoder
    assert decoder.experts is not None and decoder.experts.count == num_experts
    assert decoder.qk_norm == (None if num_experts == 128 else "unweighted")
    rotates = published.no_rope_layers[: decoder.num_layers]
    chunk = published.attention_chunk_size
    assert [rope is not None for rope in decoder.ropes] == [bool(each) for each in rotates]
    assert decoder.attention_chunks == tuple(chunk if rotated else None for rotated in rotates)
    temperature = AttentionTemperature(published.attn_scale, published.floor_scale, 1, is_everywhere=False)
    assert decoder.attention_temperature == temperature


def test_a_file_of_llama4_without_chunks_or_experts_is_refused(tmp_path: Path) -> None:
    """llama.cpp's converter writes such files of MobileLLM, and llama.cpp does not load them."""
    for keys, said in (
        ({"attention.sliding_window": 0}, r"'llama4\.attention\.sliding_window' is 0, expected no such key"),
        ({"expert_count": 0}, r"'llama4\.expert_count' is 0, expected an integer >= 1"),
    ):
        model = convert(tmp_path / "m.gguf", "llama4", more_keys=keys)
        with pytest.raises(ConfigError, match=rf"m\.gguf: key {said}"):
            find_checkpoint(str(model.folder))


def test_experts_in_mxfp4_stay_in_4_bits(tmp_path: Path) -> None:
    """Logits after the first token are not compared: in bfloat16 this token may be another one."""
    model = convert(tmp_path / "m.gguf", "gpt-oss", "MXFP4")
    folder = find_checkpoint(str(model.folder))
    assert MatrixKind.FLOAT4 in quantized_kinds(read_model_description(folder))
    exact, given = (
        alone(load_engine(folder, **settings), model.prompt(20), 1).logits[0]
        for settings in ({"dtype": "float32", "kernels": "torch"}, {})
    )
    assert (given.float() - exact).std() / exact.std() < 0.15, "only activations and products are rounded"


@pytest.mark.parametrize(
    ("case", "keys", "unused"),
    [
        ("glm4-moe", {"block_count": 4, "nextn_predict_layers": 1}, "blk.3.nextn.eh_proj.weight"),
        ("gemma4-shared", {}, "blk.3.attn_k.weight"),
    ],
)
def test_tensors_of_draft_layers_and_unused_keys_are_left_out(
    tmp_path: Path, case: str, keys: dict[str, int], unused: str
) -> None:
    model = convert(
        tmp_path / "m.gguf", case, further={unused: np.zeros((8, 64), np.float32)}, more_keys=keys
    )
    check_weights(read_model_description(find_checkpoint(str(model.folder))))


def test_a_tensor_that_the_model_does_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    model = convert(
        tmp_path / "m.gguf", "olmo2", further={"blk.0.attn_sinks.weight": np.zeros(8, np.float32)}
    )
    with pytest.raises(ConfigError, match=r"missing none; unexpected blk\.0\.attn_sinks\.weight"):
        check_weights(read_model_description(find_checkpoint(str(model.folder))))


@pytest.mark.parametrize("kind", with_all(["Q4_0", "Q8_0", "Q5_0"], ["Q8_0"]))
@pytest.mark.parametrize(
    "case",
    with_all(["mixtral", "qwen3.5-moe", "qwen3-next", "gemma4-moe", "granite-hybrid-moe"], ["qwen3.5-moe"]),
)
def test_quantized_matrices_stay_as_they_are_after_changes_to_their_order(
    tmp_path: Path, case: str, kind: str
) -> None:
    wide = {"moe_intermediate_size": 64} if case in ("qwen3.5-moe", "qwen3-next", "gemma4-moe") else {}
    delta = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if case.startswith("qwen3") else {}
    model = convert(tmp_path / "m.gguf", case, kind, **wide, **delta)
    description = read_model_description(find_checkpoint(str(model.folder)))
    with Checkpoint(description.folder) as checkpoint:
        fitted(description, checkpoint)
        matrices = {name for name, info in checkpoint.tensors.items() if info.level_bytes is not None}
        assert matrices == set(checkpoint.levels) and len(matrices) > 20
        for name, levels in checkpoint.levels.items():
            assert torch.equal(levels.read().dequantized(), checkpoint.read(name)), name


LLAMA_CPP_SOURCE = os.environ.get("INFLIGHT_LLAMA_CPP_SOURCE")
"""The folder of llama.cpp's sources, which has its converter."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "granite-hybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "granite-hybrid-moe": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "cohere2": {"rotary_pct": 1.0},
    "glm4-moe-lite": {"first_k_dense_replace": 1, "scoring_func": "sigmoid"},
    "deepseek-v3": {"scoring_func": "sigmoid"},
    "minimax-m2": {"rotary_dim": 6, "scoring_func": "sigmoid"},
    "mistral-small": {"architectures": ["Mistral3ForConditionalGeneration"]},
    "hunyuan-moe": {"moe_intermediate_size": [96] * 3, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3},
    "falcon-h1": {"head_dim": 8},
    "falcon-h1-norm": {"head_dim": 8},
    "kimi-linear": {
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 12,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
        },
        "moe_router_activation_func": "sigmoid",
        "rope_theta": 10000.0,
    },
}
"""Keys that the config.json of published models has, and transformers does not write."""
COMPARED = [case for case in CONVERTED if case not in ("nemotron-h-dense", "qwen3-vl-moe")]
"""The converter takes any Nemotron-H for a mixture, because transformers' configuration has keys of experts. Of
Qwen3-VL it reads experts only as [experts, in, out], as published, and transformers writes [experts, out, in]."""
IGNORED = (".vocab_size", ".nextn_predict_layers")
"""Ends of keys that have no effect on a model of text."""


@pytest.mark.skipif(LLAMA_CPP_SOURCE is None, reason="INFLIGHT_LLAMA_CPP_SOURCE names no folder")
def test_the_files_are_those_of_llama_cpps_converter(tmp_path: Path) -> None:
    pairs: list[str] = []
    for case in COMPARED:
        _, base, changes = CONVERTED[case]
        model = convert(tmp_path / f"{case}.gguf", case)
        folder = tmp_path / case
        make_model(folder, base, changes=changes)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | PUBLISHED.get(case, {})))
        if case == "kimi-linear":
            _name_as_published(folder / "model.safetensors")
        vocabulary = {str(token): token for token in range(model.oracle.config.get_text_config().vocab_size)}
        tokenizer = {
            "model": {"vocab": vocabulary},
            "added_tokens": [],
        }  # Gemma's converter counts its tokens
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        pairs += [str(folder), str(tmp_path / f"{case}.theirs.gguf")]
    program = Path(__file__).with_name("llama_cpp_converter.py")
    command = [sys.executable, str(program), str(LLAMA_CPP_SOURCE), *pairs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for case in COMPARED:
        ours, theirs = (GGUFReader(tmp_path / f"{case}{end}") for end in (".gguf", ".theirs.gguf"))
        assert _keys_of(ours) == _keys_of(theirs), case
        found, expected = ({each.name: each.data for each in file.tensors} for file in (ours, theirs))
        assert set(found) == set(expected), case
        for name, numbers in expected.items():
            np.testing.assert_allclose(found[name], numbers, 1e-6, err_msg=f"{case} {name}")


OTHER_IN_LLAMA_CPP = {
    "gpt-oss": "bounds of YaRN are rounded",
    "exaone4": "windows are only in models of 64 layers",
    "deepseek-v2": "groups of experts are chosen as in DeepSeek V3",
    "gemma3n": "files load only if they have the published models' sizes",
}
"""Cases that llama.cpp does not compute as transformers does, with the difference."""


@needs_llama_cpp
def test_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    for case in CONVERTED:
        if case in OTHER_IN_LLAMA_CPP:
            continue
        model = convert(tmp_path / f"{case}.gguf", case)
        row = alone(load_engine(find_checkpoint(str(model.folder)), dtype="float32"), model.prompt(40), 6)
        assert llama_cpp_tokens(model.folder, [model.prompt(40)], 6)[str(model.folder)] == [row.generated], (
            case
        )


def _name_as_published(file: Path) -> None:
    """Give the MLP of layers without experts the name that published models of Kimi Linear have."""
    tensors = load_file(file)
    save_file({as_published(name): tensor for name, tensor in tensors.items()}, file)


def _keys_of(file: GGUFReader) -> dict[str, Any]:
    """Return the keys and values of the architecture and of xIELU, without those that have no effect."""
    architecture = file.fields["general.architecture"].contents()
    return {
        key: field.contents()
        for key, field in file.fields.items()
        if key.startswith((f"{architecture}.", "xielu.")) and not key.endswith(IGNORED)
    }
