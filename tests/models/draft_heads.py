"""Checkpoints with draft heads, and what their heads guess by transformers' own layers.

transformers does not read draft heads. So a model with one more layer is drawn, and its last layer becomes the
head's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.zoo import ZooModel, make_config, make_model

QWEN_NAMES = {
    "layer": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "final_norm": "mtp.norm.weight",
}
DEEPSEEK_NAMES = {
    "layer": "model.layers.{}.",
    "embedding_norm": "model.layers.{}.enorm.weight",
    "hidden_norm": "model.layers.{}.hnorm.weight",
    "projection": "model.layers.{}.eh_proj.weight",
    "final_norm": "model.layers.{}.shared_head.norm.weight",
}
_LAYER_KINDS = ("layer_types", "mlp_layer_types")


@dataclass(frozen=True)
class DraftingModel(ZooModel):
    """A checkpoint with a draft head.

    Attributes:
        layer: The head's layer, as transformers' module.
        others: The head's other weights, by the keys of QWEN_NAMES.
    """

    layer: Any = None
    others: Any = None

    @torch.inference_mode()
    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that the head guesses after `tokens`, computed in float64.

        The head's first input has the second token, and the hidden state of the first one.
        """
        model = copy.deepcopy(self.oracle.model).double()
        layer = copy.deepcopy(self.layer).double()
        norms = {
            name: _norm_like(model.norm, weight) for name, weight in self.others.items() if "norm" in name
        }
        hidden = model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        embedded = model.embed_tokens(torch.tensor(tokens[1:]))
        found: list[int] = []
        for _ in range(count):
            pairs = torch.cat([norms["embedding_norm"](embedded), norms["hidden_norm"](hidden)], dim=-1)
            x = pairs @ self.others["projection"].double().T
            positions = torch.arange(len(x))[None]
            output = layer(
                x[None],
                position_embeddings=model.rotary_emb(x, positions),
                position_ids=positions,
                attention_mask=torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)[None, None],
            )
            output = norms["final_norm"](output[0] if output.ndim == 3 else output)
            found.append(int((output[-1] @ self.oracle.lm_head.weight.double().T).argmax()))
            hidden = torch.cat([hidden, output[-1:]])
            embedded = torch.cat([embedded, model.embed_tokens(torch.tensor(found[-1:]))])
        return found


def make_drafting_model(
    folder: Path, case: str, agrees: bool = False, changes: Mapping[str, Any] | None = None
) -> DraftingModel:
    """Write a checkpoint of `case` with a draft head.

    With `agrees`, model and head mostly continue a token with the token whose embedding is nearest, so that many
    guesses are right. `changes`: further keys of its configuration.
    """
    changes = changes or {}
    config = make_config(case, changes)
    names = QWEN_NAMES if config.model_type.startswith("qwen") else DEEPSEEK_NAMES
    count = config.num_hidden_layers
    kinds = {
        key: [*getattr(config, key), _last_kind(key)] for key in _LAYER_KINDS if getattr(config, key, None)
    }
    drawn = make_model(folder, case, changes={**changes, "num_hidden_layers": count + 1, **kinds})
    names = {key: name.format(count) for key, name in names.items()}
    larger = drawn.oracle
    if agrees:
        _weaken(larger)
    torch.manual_seed(1)
    width = config.hidden_size
    offset = 0.0 if names["layer"] != "mtp.layers.0." else -1.0
    others = {key: 1 + offset + 0.2 * torch.randn(width) for key in names if "norm" in key}
    others["projection"] = 0.2 * torch.randn(width, 2 * width)
    if agrees:
        others["projection"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
        others["embedding_norm"] = torch.full((width,), 1 + offset)
        others["final_norm"] = larger.model.norm.weight.detach().clone()
    larger.save_pretrained(folder)
    path, stored = folder / "model.safetensors", f"model.layers.{count}."
    tensors = {name.replace(stored, names["layer"]): tensor for name, tensor in load_file(path).items()}
    tensors |= {names[key]: tensor for key, tensor in others.items()}
    save_file(tensors, path, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["num_hidden_layers"] = count
    values |= {key: values[key][:-1] for key in kinds}
    (folder / "config.json").write_text(json.dumps(values))
    oracle = copy.deepcopy(larger)
    oracle.model.layers = oracle.model.layers[:count]
    oracle.config.num_hidden_layers = count
    return DraftingModel(folder, oracle, layer=larger.model.layers[count], others=others)


def _last_kind(key: str) -> str:
    return "full_attention" if key == "layer_types" else "sparse"


def _weaken(model: Any) -> None:
    """Make the results of a model's layers small in comparison to embeddings."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
            ):
                parameter.mul_(0.002)


def _norm_like(norm: Any, weight: torch.Tensor) -> Any:
    """Return transformers' norm with another weight, in float64."""
    other = copy.deepcopy(norm).double()
    other.weight.data = weight.double()
    return other
