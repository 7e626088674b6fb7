"""Types of models that no code computes are refused by name, with the reason, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint_config import read_config_file
from inflight.doctor.family import refused_by_family
from inflight.errors import ConfigError
from inflight.models.registry import UnknownFamily
from inflight.models.unserved import UNSERVED
from tests.engine.driver import load_engine

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
"""The quantization of published files of DeepSeek-V3.2."""
SPARSE = {"deepseek_v32": "DeepseekV32ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM"}
MAMBA1 = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM", "jamba": "JambaForCausalLM"}


def folder_of(folder: Path, values: dict[str, Any]) -> Path:
    """Write a config.json without weights beside it, so that any attempt to read weights fails otherwise."""
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("implementation", [None, "torch", "transformers"])
@pytest.mark.parametrize("model_type", UNSERVED)
def test_a_type_that_no_code_computes_is_refused_by_name_before_a_start(
    tmp_path: Path, model_type: str, implementation: str | None
) -> None:
    config = read_config_file(folder_of(tmp_path, {"model_type": model_type}))
    said = str(refused_by_family(config, implementation))
    assert model_type in said and f"it needs {UNSERVED[model_type]}" in said


@pytest.mark.parametrize("implementation", [None, "torch", "transformers"])
@pytest.mark.parametrize("model_type", [*SPARSE, *MAMBA1])
def test_a_load_refuses_sparse_attention_and_mamba1_before_it_reads_weights(
    tmp_path: Path, model_type: str, implementation: str | None
) -> None:
    name = {**SPARSE, **MAMBA1}[model_type]
    values = {"architectures": [name], "model_type": model_type, "quantization_config": FP8}
    with pytest.raises(ConfigError) as raised:
        load_engine(folder_of(tmp_path, values), implementation=implementation)
    assert not isinstance(raised.value, UnknownFamily)
    what = "sparse attention by an indexer" if model_type in SPARSE else "Mamba-1 layers"
    assert name in str(raised.value) and f"it needs {what}" in str(raised.value)
