"""Adapters of the demo model as PEFT saves them, as tensors, and PEFT's tokens with them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file

from .conftest import DEMO_MODEL

MODULES = {"q_proj": 1, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
"""Module ids of the layers that these adapters change."""


@functools.cache
def _loaded() -> transformers.PreTrainedModel:
    torch.set_num_threads(1)  # the server computes too
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


def demo_model() -> transformers.PreTrainedModel:
    """Return a new copy in float32, because PEFT changes it."""
    return copy.deepcopy(_loaded())


def make_adapter(folder: Path, seed: int, rank: int = 4) -> None:
    """Write a PEFT folder whose adapter changes the demo model's output."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(MODULES), init_lora_weights=False
    )
    peft.get_peft_model(demo_model(), config).save_pretrained(folder)


def as_tensors(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return lora_weights and lora_config of a PEFT folder, converted here and not by the tested code."""
    config = peft.LoraConfig.from_pretrained(folder)
    stored = load_file(folder / "adapter_model.safetensors")
    rows, config_rows = [], []
    for name in sorted(each for each in stored if each.endswith("lora_A.weight")):
        a, b = stored[name], stored[name.replace("lora_A", "lora_B")] * config.lora_alpha / config.r
        layer, module = int(name.split(".layers.")[1].split(".")[0]), name.split(".")[-3]
        rows.append(torch.cat([a.flatten(), b.flatten()]))
        config_rows.append([MODULES[module], layer, config.r])
    weights = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return weights[None].numpy(), np.array([config_rows], np.int32)


def greedy(prompt: list[int], num_tokens: int, folder: Path | None = None) -> list[int]:
    """Return the demo model's greedy tokens, with the adapter of a PEFT folder or without one."""
    model = demo_model() if folder is None else peft.PeftModel.from_pretrained(demo_model(), folder).eval()
    model.generation_config.eos_token_id = None
    ids = model.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist()
