"""Folders of Gemma 4's draft heads as transformers saves them, and what its generation guesses by them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tests.models.zoo import ZooModel, _as_float64, make_model

VOCAB_SIZE = 220
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 20, "centroid_intermediate_top_k": 3}
SMALL = (
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "post_per_layer_input_norm.weight",
)


@dataclass(frozen=True)
class Gemma4HeadFolder:
    """A head's folder, the head as transformers' module, and its model."""

    folder: Path
    head: Any
    target: ZooModel

    @torch.inference_mode()
    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that transformers guesses after `tokens`, computed in float64.

        The model has computed all tokens but the last, as after a prompt.
        """
        with _as_float64():
            model, head = (_double(each, self.target) for each in (self.target.oracle, self.head))
            head.generation_config.num_assistant_tokens = count
            known = torch.tensor([tokens])
            outputs = model(known[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
            generator = SinglePositionMultiTokenCandidateGenerator(
                head, model.get_input_embeddings(), GenerationConfig(max_length=10_000)
            )
            found, _ = generator.get_candidates(
                known, {"attention_mask": torch.ones_like(known)}, outputs, False, n_last_matches=0
            )
        return found[0, len(tokens) :].tolist()

    def first_draft(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the first draft of transformers' `generate` with the head, of `count` tokens.

        Later drafts are worse in transformers: there the head also sees keys of rejected tokens.
        """
        drafts = list[list[int]]()
        get_candidates = SinglePositionMultiTokenCandidateGenerator.get_candidates

        def listen(generator: Any, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            found, logits = get_candidates(generator, input_ids, *arguments, **options)
            known = input_ids.shape[1]
            if found.shape[1] > known:
                drafts.append(found[0, known:].tolist())
            return found, logits

        self.head.generation_config.num_assistant_tokens = count
        with patch.object(SinglePositionMultiTokenCandidateGenerator, "get_candidates", listen):
            self.target.oracle.generate(
                torch.tensor([prompt]),
                assistant_model=self.head,
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count + 3,
                do_sample=False,
                eos_token_id=None,
            )
        return drafts[0]


def _double(module: Any, target: ZooModel) -> Any:
    """Return a copy of a module in float64, which is made once for a model."""
    key = "in float64", id(module)
    if key not in target.found:
        target.found[key] = copy.deepcopy(module).double()
    return target.found[key]


def make_target(folder: Path, case: str, is_simple: bool = False, **changes: Any) -> ZooModel:
    """Write a Gemma 4; with `is_simple`, its next token depends almost on the last one only."""
    more = {"vocab_size_per_layer_input": VOCAB_SIZE} if case in ("gemma4-shared", "gemma4-vision") else {}
    model = make_model(folder, case, changes={"vocab_size": VOCAB_SIZE, **more, **changes})
    if is_simple:
        _shrink_layers(model.oracle)
        model.oracle.save_pretrained(folder)
    return model


def make_head(folder: Path, target: ZooModel, is_right: bool = False, **changes: Any) -> Gemma4HeadFolder:
    """Write a random head for a model.

    Args:
        folder: Folder of the head.
        target: The model.
        is_right: Whether the head guesses right for a model that was made `is_simple`.
        changes: Keys of the head's config.json; those of `text_config` are in "text".
    """
    of_model = target.oracle.config.get_text_config()
    text = copy.deepcopy(of_model).to_dict() | {
        "hidden_size": of_model.hidden_size if is_right else 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "num_attention_heads": 4,
        "intermediate_size": 56,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
        "per_layer_config": _sizes_of_full_layers(of_model),
        **changes.pop("text", {}),
    }
    text.pop("architectures", None)
    is_unified = "unified" in of_model.model_type
    config_class = Gemma4UnifiedAssistantConfig if is_unified else Gemma4AssistantConfig
    config = config_class(
        text_config=type(of_model)(**text), **{"backbone_hidden_size": of_model.hidden_size, **changes}
    )
    torch.manual_seed(3)
    head = (Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM)(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + ("norm" in name))
        for name, buffer in head.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
        if head.masked_embedding is not None:
            head.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
        if is_right:
            _make_right(head, target.oracle)
    head.eval().save_pretrained(folder)
    return Gemma4HeadFolder(folder, head, target)


def _sizes_of_full_layers(of_model: Any) -> dict[str, dict[str, int]]:
    """Return the heads of layers with full attention, which are the head's layers 2 and 3."""
    full = of_model.layer_types.index("full_attention")
    sizes = of_model.per_layer_config[full]
    found = {"head_dim": sizes.head_dim, "num_key_value_heads": sizes.num_key_value_heads}
    return {"2": found, "3": found}


def _make_right(head: Any, model: Any) -> None:
    width = model.config.get_text_config().hidden_size
    _shrink_layers(head)
    head.pre_projection.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1))
    head.model.norm.weight.copy_(model.model.norm.weight)
    head.model.embed_tokens.weight.copy_(model.lm_head.weight)


def _shrink_layers(model: Any) -> None:
    """Make the results of a model's layers small in comparison to embeddings."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(SMALL):
                parameter.mul_(0.002)
