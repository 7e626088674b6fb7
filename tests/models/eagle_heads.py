"""Folders of EAGLE-3 heads as SpecForge publishes them, and what the heads guess, computed anew in float64.

transformers has no EAGLE-3 head. The formulas here follow SpecForge's `llama3_eagle.py` and share nothing with the
engine: the hidden states come from transformers' model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.models.zoo import ZooModel

HEADS, KV_HEADS, HEAD_DIM, INNER, THETA = 4, 2, 12, 40, 1000.0
AFTER = (0, 1, 2)
"""Numbers of the model's layers after which the head reads hidden states."""


@dataclass(frozen=True)
class EagleHeadFolder:
    """A head's folder, its config.json and its tensors."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: ZooModel

    @torch.inference_mode()
    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that the head guesses after `tokens`."""
        weights = {
            name: tensor.double() for name, tensor in self.tensors.items() if tensor.is_floating_point()
        }
        model = _double(self.target)
        found = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        after = self.config.get("eagle_aux_hidden_state_layer_ids", AFTER)
        read = torch.cat([found[number][0, :-1] for number in after], dim=-1)
        hidden = read @ weights["fc.weight"].T
        table = weights.get("embed_tokens.weight")
        table = model.get_input_embeddings().weight if table is None else table
        known, guessed = list(tokens[1:]), list[int]()
        for _ in range(count):
            output = self._layer(weights, table[torch.tensor(known)], hidden)
            logits = self._norm(output[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
            index = int(logits.argmax())
            offsets = self.tensors.get("d2t")
            guessed.append(index if offsets is None else index + int(offsets[index]))
            hidden = torch.cat([hidden, output[-1:]])
            known.append(guessed[-1])
        return guessed

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _layer(self, weights: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor) -> Tensor:
        of_layer = {
            name.removeprefix("midlayer."): tensor
            for name, tensor in weights.items()
            if name.startswith("midlayer.")
        }
        read = torch.cat(
            [
                self._norm(embedded, of_layer["input_layernorm.weight"]),
                self._norm(hidden, of_layer["hidden_norm.weight"]),
            ],
            dim=-1,
        )

        def project(name: str, heads: int) -> Tensor:
            bias = of_layer.get(f"self_attn.{name}.bias")
            return F.linear(read, of_layer[f"self_attn.{name}.weight"], bias).unflatten(1, (heads, -1))

        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        positions = torch.arange(len(read), dtype=torch.float64)
        queries = self._rotate(project("q_proj", heads), positions)
        keys = self._rotate(project("k_proj", kv_heads), positions).repeat_interleave(heads // kv_heads, 1)
        values = project("v_proj", kv_heads).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
        scores += torch.full(scores.shape[1:], -torch.inf, dtype=scores.dtype).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        x = hidden + F.linear(
            mixed, of_layer["self_attn.o_proj.weight"], of_layer.get("self_attn.o_proj.bias")
        )
        normed = self._norm(x, of_layer["post_attention_layernorm.weight"])
        gate, up = normed @ of_layer["mlp.gate_proj.weight"].T, normed @ of_layer["mlp.up_proj.weight"].T
        return x + (F.silu(gate) * up) @ of_layer["mlp.down_proj.weight"].T

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half, dtype=x.dtype) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _double(target: ZooModel) -> Any:
    if "eagle" not in target.found:
        target.found["eagle"] = copy.deepcopy(target.oracle).double()
    return target.found["eagle"]


def _config(target: ZooModel, **changes: Any) -> dict[str, Any]:
    sizes = target.oracle.config.get_text_config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.vocab_size // 3,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(AFTER),
        **changes,
    }


def write_head(
    folder: Path, target: ZooModel, config: dict[str, Any], tensors: dict[str, Tensor]
) -> EagleHeadFolder:
    """Write config.json and model.safetensors; values of None in `config` are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return EagleHeadFolder(folder, config, tensors, target)


def make_random_head(
    folder: Path, target: ZooModel, has_embedding: bool = False, **changes: Any
) -> EagleHeadFolder:
    """Write a random head, which hardly ever guesses right."""
    config = _config(target, **changes)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    draft = config["draft_vocab_size"] or vocab
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    heads, size = config["num_attention_heads"], config["head_dim"]
    attention = {"q": heads * size, "k": config["num_key_value_heads"] * size}
    attention["v"] = attention["k"]
    tensors = {
        "fc.weight": draw(hidden, 3 * hidden),
        "norm.weight": 1 + draw(hidden),
        "lm_head.weight": draw(draft, hidden),
        **{f"midlayer.{name}.weight": 1 + draw(hidden) for name in _NORMS},
        **{
            f"midlayer.self_attn.{key}_proj.weight": draw(rows, 2 * hidden) for key, rows in attention.items()
        },
        "midlayer.self_attn.o_proj.weight": draw(hidden, attention["q"]),
        "midlayer.mlp.gate_proj.weight": draw(config["intermediate_size"], hidden),
        "midlayer.mlp.up_proj.weight": draw(config["intermediate_size"], hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, config["intermediate_size"]),
    }
    if config["attention_bias"]:
        rows = {**attention, "o": hidden}
        tensors |= {f"midlayer.self_attn.{key}_proj.bias": draw(count) for key, count in rows.items()}
    if draft < vocab:
        chosen = torch.randperm(vocab, generator=generator)[:draft].sort().values
        tensors |= _mapping(chosen, vocab)
    if has_embedding:
        tensors["embed_tokens.weight"] = draw(vocab, hidden)
    return write_head(folder, target, config, tensors)


_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def _mapping(chosen: Tensor, vocab: int) -> dict[str, Tensor]:
    is_known = torch.zeros(vocab, dtype=torch.bool)
    is_known[chosen] = True
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": is_known}


def weaken(target: ZooModel) -> None:
    """Make a model without end ids whose next token depends almost on the last one only, and save it again."""
    with torch.no_grad():
        for name, parameter in target.oracle.named_parameters():
            if ".layers." in name and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.mul_(0.002)
    target.oracle.save_pretrained(target.folder)


def make_right_head(folder: Path, target: ZooModel, part: float = 1.0) -> EagleHeadFolder:
    """Write a head that guesses right for a model after `weaken`: it continues the newest token only.

    Each position attends to itself: queries and keys are one constant vector, so that only the rotation matters.
    Values are embedding minus hidden state, which leaves the embedding in the residual stream.

    Args:
        folder: Folder of the head.
        target: The model.
        part: The part of the vocabulary, from its beginning, that the head can guess.
    """
    model = target.oracle
    embedding, hidden = model.get_input_embeddings().weight.detach(), model.config.hidden_size
    vocab, heads = len(embedding), 4
    count = int(part * vocab)
    config = _config(
        target,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        attention_bias=True,
        rms_norm_eps=1e-6,
        draft_vocab_size=count,
    )
    one, none = torch.eye(hidden), torch.zeros
    tensors = {
        "fc.weight": none(hidden, 3 * hidden),
        "norm.weight": model.model.norm.weight.detach().clone(),
        "lm_head.weight": model.lm_head.weight.detach()[:count].clone(),
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in _NORMS},
        **{f"midlayer.self_attn.{key}_proj.weight": none(hidden, 2 * hidden) for key in "qk"},
        **{f"midlayer.self_attn.{key}_proj.bias": torch.full((hidden,), 100.0) for key in "qk"},
        "midlayer.self_attn.v_proj.weight": torch.cat([one, -one], dim=1),
        "midlayer.self_attn.v_proj.bias": none(hidden),
        "midlayer.self_attn.o_proj.weight": one.clone(),
        "midlayer.self_attn.o_proj.bias": none(hidden),
        "midlayer.mlp.gate_proj.weight": none(INNER, hidden),
        "midlayer.mlp.up_proj.weight": none(INNER, hidden),
        "midlayer.mlp.down_proj.weight": none(hidden, INNER),
        **_mapping(torch.arange(count), vocab),
    }
    return write_head(folder, target, config, tensors)
