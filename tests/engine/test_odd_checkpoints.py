"""Checkpoints whose files contradict each other: the results equal those of transformers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from inflight.models import read_model_description
from tests.engine.driver import alone, load_engine
from tests.models.mxfp4 import pack
from tests.models.zoo import Zoo, make_model

TOLERANCE = 1e-4
PROMPT = tuple(range(3, 43))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def _edit_config(folder: Path, **values: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@torch.inference_mode()
def _assert_as_transformers(folder: Path, kernels: str | None = None) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    row = alone(load_engine(folder, kernels=kernels, dtype="float32"), PROMPT, 4)
    expected = oracle(torch.tensor([row.tokens])).logits[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


def _as_stored(tensors: Tensors) -> Tensors:
    return tensors


def _head_of_its_own(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].flip(0).contiguous()}


def _head_that_is_equal(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def _head_of_another_type(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].bfloat16()}


def _only_the_head(tensors: Tensors) -> Tensors:
    return {
        **{name: tensor for name, tensor in tensors.items() if name != EMBEDDING},
        HEAD: tensors[EMBEDDING],
    }


@pytest.mark.parametrize(
    ("change", "shares_memory"),
    [
        (_as_stored, True),
        (_head_that_is_equal, True),
        (_only_the_head, True),
        (_head_of_its_own, False),
        (_head_of_another_type, False),
    ],
)
def test_an_output_head_that_differs_from_tied_embeddings_is_used_and_logged(
    zoo: Zoo,
    tmp_path: Path,
    kernels: str | None,
    change: Callable[[Tensors], Tensors],
    shares_memory: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo["llama-gqa-tied"].folder, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    caplog.set_level(logging.WARNING, "inflight")

    _assert_as_transformers(folder, kernels)
    says = "tie_word_embeddings is true, but model.embed_tokens and lm_head differ"
    assert caplog.text.count(says) == (0 if shares_memory else 1)


@pytest.mark.parametrize("shards", ["there", "gone"])
def test_a_single_file_wins_over_an_index(tmp_path: Path, shards: str) -> None:
    folder = make_model(tmp_path / "model", "llama", seed=1, max_shard_size="60KB").folder
    single = make_model(tmp_path / "single", "llama", seed=2).folder
    if shards == "gone":
        for shard in folder.glob("*.safetensors"):
            shard.unlink()
    shutil.copy(single / "model.safetensors", folder)

    _assert_as_transformers(folder)


def test_a_tensor_in_two_shards_is_read_from_the_later_file(tmp_path: Path) -> None:
    """The index has no influence, neither its entries nor their order."""
    folder = make_model(tmp_path / "model", "llama", seed=1, max_shard_size="60KB").folder
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, last = min(weight_map.values()), max(weight_map.values())
    tensors = load_file(folder / last)
    tensors[EMBEDDING] = 3 * load_file(folder / weight_map[EMBEDDING])[EMBEDDING]
    save_file(tensors, folder / last, metadata={"format": "pt"})
    of_last_first = dict(sorted(weight_map.items(), key=lambda entry: entry[1], reverse=True))
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**of_last_first, EMBEDDING: first}}))

    _assert_as_transformers(folder)


@pytest.mark.parametrize(
    ("case", "key", "positions"),
    [
        ("llama", "max_position_embeddings", 2048),
        ("mistral-window", "max_position_embeddings", 131072),
        ("qwen2", "max_position_embeddings", 32768),
        ("qwen3", "max_position_embeddings", 32768),
    ],
)
def test_families_have_a_default_number_of_positions(
    zoo: Zoo, tmp_path: Path, case: str, key: str, positions: int
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo[case].folder, folder)
    _edit_config(folder, **{key: None})

    assert read_model_description(folder).decoder.max_positions == positions
    assert getattr(AutoModelForCausalLM.from_pretrained(folder).config, key) == positions


@pytest.mark.parametrize(("ids", "expected"), [(-1, ()), ([2, -1], (2,)), (5, (5,))])
def test_an_end_id_outside_the_vocabulary_has_no_effect(
    zoo: Zoo, tmp_path: Path, ids: Any, expected: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo["llama"].folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    _edit_config(folder, eos_token_id=2)
    assert load_engine(folder).eos_token_ids == expected

    (folder / "generation_config.json").unlink()
    _edit_config(folder, eos_token_id=ids)
    assert load_engine(folder).eos_token_ids == expected
    _assert_as_transformers(folder)


def _rope(kind: str, factor: float, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, **values}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (_rope("linear", 4.0), 256),
        (_rope("yarn", 4.0), 256),
        (_rope("yarn", 8.0, original_max_position_embeddings=32), 256),
        (_rope("yarn", 2.0, original_max_position_embeddings=16), 64),  # scaled already
    ],
    ids=str,
)
def test_scaled_positions_reach_beyond_max_position_embeddings(
    zoo: Zoo, tmp_path: Path, rope: dict[str, Any], longest: int, kernels: str | None
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo["llama-gqa"].folder, folder)
    _edit_config(folder, max_position_embeddings=64, rope_parameters=rope)
    engine = load_engine(folder, kernels=kernels)
    assert engine.limits.max_sequence_length == longest

    prompt = zoo["llama-gqa"].prompt(longest - 2)
    row = alone(engine, prompt, 2)
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        expected = oracle(torch.tensor([row.tokens])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_experts_packed_as_mxfp4_give_transformers_tokens(zoo: Zoo, tmp_path: Path) -> None:
    """Tokens equal those of transformers, which unpacks all experts."""
    folder = tmp_path / "packed"
    shutil.copytree(zoo["gpt-oss"].folder, folder)
    pack(folder)
    oracle = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="eager",
        experts_implementation="eager",  # others do not support float64
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    row = alone(load_engine(folder, dtype="float32"), PROMPT, 24)
    logits = oracle.double()(torch.tensor([row.tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    assert row.generated == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(row.logits), logits, rtol=0, atol=TOLERANCE)
