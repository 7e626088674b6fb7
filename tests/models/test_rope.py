"""Frequencies and their factor, compared with the formulas in transformers' own rope utilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.models.rope import read_rope
from inflight.models.rope_tables import inverse_frequencies, rope_tables

HEAD_DIM = 64
MAX_POSITIONS = 8192

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "high_freq_factor": 2.0},
    {**LLAMA3, "high_freq_factor": 1.0},
    {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 2.0},
    YARN,
    {**YARN, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "beta_fast": 1, "beta_slow": 1},
    {**YARN, "beta_fast": 2, "beta_slow": 16},
    {**YARN, "beta_fast": 0, "beta_slow": 0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    {**YARN, "mscale_all_dim": 0.9},
    {**YARN, "truncate": False},
    {**YARN, "truncate": None},
    {**YARN, "factor": None},
    {"rope_type": "yarn", "factor": 2.0},
]


def _read(tmp_path: Path, **values: Any) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"max_position_embeddings": MAX_POSITIONS, **values}))
    return read_rope(ConfigFile.load(path), MAX_POSITIONS)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_scaled_frequencies_equal_transformers(tmp_path: Path, scaling: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)

    rope = _read(tmp_path, rope_parameters={"rope_theta": theta, **scaling})
    frequencies, factor = inverse_frequencies(rope, HEAD_DIM, MAX_POSITIONS)

    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_old_and_new_keys_of_rope_scaling_mean_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    new = _read(tmp_path, rope_parameters={"rope_theta": 5e5, **scaling})
    old = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    assert _read(tmp_path, rope_theta=5e5, rope_scaling=old) == new


def test_frequencies_without_scaling_equal_transformers(tmp_path: Path) -> None:
    plain = _read(tmp_path, rope_theta=1e6, rope_scaling=None)
    assert plain == _read(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert _read(tmp_path).theta == 10000.0
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters={"rope_theta": 1e6})
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    torch.testing.assert_close(
        inverse_frequencies(plain, HEAD_DIM, MAX_POSITIONS)[0], expected, rtol=1e-6, atol=0
    )


def test_tables_hold_every_position(tmp_path: Path) -> None:
    cos, sin = rope_tables(_read(tmp_path), HEAD_DIM, 33)
    assert cos.shape == sin.shape == (33, HEAD_DIM // 2)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "ntk"}},
            "'rope_parameters.rope_type' is 'ntk', expected one of default, linear, dynamic, llama3, yarn, long",
        ),
        (
            {"rope_scaling": {"type": "su"}},
            "'rope_scaling.short_factor' is missing, expected a list",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'rope_scaling.factor' is missing, expected a number > 0"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 0}},
            "'rope_scaling.high_freq_factor' is 0, expected a",
        ),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, expected 1.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "a set for each layer type"),
        ({"rope_theta": -1}, "'rope_theta' is -1, expected a number > 0"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1e16] * 4, "long_factor": [1.0] * 4}},
            f"expected at most {10**15}",
        ),
    ],
)
def test_unsupported_rope_settings_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _read(tmp_path, **values)
    assert message in str(error.value)
    assert "config.json" in str(error.value)
