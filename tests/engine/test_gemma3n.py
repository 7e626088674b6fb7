"""Gemma 3n's own components: its keys and their defaults, and the gates of its MLPs.

tests/engine/test_every_family.py compares the family with transformers in every way of serving.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from inflight.engine.collectives import ALONE
from inflight.engine.layers.altup import drop_small_gates
from inflight.errors import ConfigError
from inflight.models import read_model_description
from tests.models.zoo import Zoo


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_num_inputs": 1}, "'altup_num_inputs' is 1, expected an integer >= 2"),
        ({"altup_active_idx": 3}, "'altup_active_idx' is 3, expected .* < altup_num_inputs, 3"),
        ({"activation_sparsity_pattern": [0.5]}, "'activation_sparsity_pattern' is .* num_hidden_layers, 5"),
        ({"activation_sparsity_pattern": [1.0] * 5}, "'activation_sparsity_pattern' is .* < 1 for each"),
        ({"intermediate_size": [96] * 4}, "'intermediate_size' is .* one for each of num_hidden_layers, 5"),
        ({"laurel_rank": 0}, "'laurel_rank' is 0, expected an integer >= 1"),
        ({"num_kv_shared_layers": 4}, "of type full_attention has its own keys and values"),
    ],
)
def test_unsupported_files_are_refused_by_the_key(
    zoo: Zoo, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = json.loads((zoo["gemma3n"].folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ConfigError, match=message):
        read_model_description(tmp_path)


def test_absent_keys_have_transformers_defaults(tmp_path: Path) -> None:
    text = {"model_type": "gemma3n_text"}
    values = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    (tmp_path / "config.json").write_text(json.dumps({**values, "text_config": text}))
    decoder = read_model_description(tmp_path).decoder
    assert decoder.altup is not None and decoder.layer_inputs is not None
    assert (decoder.num_layers, decoder.altup.num_streams, decoder.laurel_rank) == (35, 4, 64)
    assert decoder.gate_sparsity == (0.95,) * 10 + (0.0,) * 25
    assert decoder.kv_layers[20:25] == (18, 18, 18, 18, 19)
    assert decoder.layer_inputs.vocab_size == 262144 < decoder.vocab_size == 262400


def test_small_gates_are_dropped_as_in_transformers(zoo: Zoo) -> None:
    gates = 3 * torch.randn(7, 96) + torch.arange(7)[:, None]
    module = zoo["gemma3n"].oracle.model.layers[0].mlp
    expected = Gemma3nTextMLP._gaussian_topk(module, gates)
    drop_small_gates(gates, module.activation_sparsity, ALONE)
    torch.testing.assert_close(gates, expected)
    assert 0.5 < (gates == 0).float().mean() < 0.9
