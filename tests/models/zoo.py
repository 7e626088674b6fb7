"""Small random models of every family, made with transformers, which is the oracle for their results.

Weights have ten times the usual deviation of 0.02, with which a random model repeats one token forever.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.models.zoo_configs import CASES, COMMON, GPT2, VOCAB_SIZE, WITH_KERNELS, WITHOUT_MAP
from tests.models.zoo_multimodal import MULTIMODAL, OTHER_PARTS

transformers.utils.logging.disable_progress_bar()
# transformers 5.24: the whole Llama 4 reads this of its text part's output, which does not have it.
MoeCausalLMOutputWithPast.image_outputs = None

_DRAWN = ("bias", "scale", "layer_scalar", "alpha_p", "alpha_n")
"""Ends of names of further parameters that `_draw` changes."""

_DRAWN_PARTS = ("norm", "sinks", "ln_attn", "ln_mlp")
"""Parts of names of such parameters."""


@contextmanager
def _as_float64() -> Iterator[None]:
    """Make code of transformers that always computes in float32 compute in float64."""
    with (
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
    ):
        yield


@dataclass(frozen=True)
class ZooModel:
    """A checkpoint folder, and the transformers model that was saved in it.

    Results of `logits`, `generate` and `beams` are cached: many tests ask for the same ones.
    """

    folder: Path
    oracle: Any
    found: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Return random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())

    @torch.inference_mode()
    def logits(self, token_ids: tuple[int, ...] | list[int]) -> torch.Tensor:
        """Return the oracle's logits at every position, [positions, vocab_size], computed in float64.

        In float32 the oracle's own rounding errors would be as large as those of the tested engine.
        """
        if "in float64" not in self.found:
            self.found["in float64"] = copy.deepcopy(self.oracle).double()
        key = ("logits", tuple(token_ids))
        if key not in self.found:
            with _as_float64():
                logits = self.found["in float64"](torch.tensor([token_ids])).logits[0]
            self.found[key] = logits.float()
        return self.found[key].clone()

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """Return the tokens of the oracle's own `generate`, without end ids."""
        return self.generate(tuple(prompt), num_tokens, min_new_tokens=num_tokens)

    def generate(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of the oracle's greedy `generate`, with logits processors; includes the end id."""
        return list(self._ask(prompt, num_tokens, end_id, options)[0][0])

    def beams(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None = None, **options: Any
    ) -> list[tuple[list[int], float]]:
        """Return the oracle's own beam search: each sequence's new tokens and final score, best first."""
        found = self._ask(prompt, num_tokens, end_id, options | {"output_scores": True})
        return [(list(tokens), score) for tokens, score in zip(*found, strict=True)]

    def _ask(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None, options: dict[str, Any]
    ) -> tuple[list[list[int]], list[float]]:
        """Return the new tokens of every sequence, and the scores of a beam search."""
        key = (tuple(prompt), num_tokens, end_id, repr(sorted(options.items())))
        if key not in self.found:
            with torch.inference_mode():
                found = self.oracle.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=end_id,
                    return_dict_in_generate=True,
                    **options,
                )
            scores = found.get("sequences_scores")
            sequences = found.sequences[:, len(prompt) :].tolist()
            # Keeping the options keeps their objects alive: the cache's key has their addresses.
            self.found[key] = options, (sequences, [] if scores is None else scores.tolist())
        return self.found[key][1]


@dataclass
class Zoo:
    """Creates each model once."""

    root: Path
    _made: dict[str, ZooModel] = field(default_factory=dict)

    def __getitem__(self, case: str) -> ZooModel:
        if case not in self._made:
            self._made[case] = make_model(self.root / case, case)
        return self._made[case]


def make_model(
    folder: Path, case: str, seed: int = 0, changes: Mapping[str, Any] | None = None, **save_options: Any
) -> ZooModel:
    """Draw the weights of `case` and save the model in `folder`.

    `changes`: further keys of its configuration, or of its text part's.
    """
    if case in MULTIMODAL:
        return _make_multimodal(folder, case, seed, changes)
    config = make_config(case, changes)
    oracle = _draw(config.architectures[0], config, seed)
    oracle.save_pretrained(folder, **save_options)
    return ZooModel(folder, oracle)


def make_config(case: str, further: Mapping[str, Any] | None = None) -> Any:
    """Return transformers' configuration of a model of text, with `further` keys."""
    family, changes = (CASES | WITHOUT_MAP | WITH_KERNELS)[case]
    changes = {**changes, **(further or {})}
    values = GPT2 if family == "GPT2" else dict(COMMON)
    foreign = {
        "GPTNeoX": ("num_key_value_heads",),
        "OPT": ("num_key_value_heads", "intermediate_size"),
        "Falcon": ("num_key_value_heads", "intermediate_size"),
        "Bloom": (
            "num_key_value_heads",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ),
    }
    for name in foreign.get(family, ()):
        del values[name]
    has_text_config = family in (
        "Gemma3",
        "Gemma3n",
        "Gemma4",
        "Gemma4Unified",
        "Llama4",
        "Qwen3_5",
        "Qwen3_5Moe",
    )
    config_name = f"{family}TextConfig" if has_text_config else f"{family}Config"
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, config_name)(**{**values, **changes}, architectures=[class_name])


def _make_multimodal(
    folder: Path, case: str, seed: int, further: Mapping[str, Any] | None = None
) -> ZooModel:
    family, kind, changes = MULTIMODAL[case]
    text = {**COMMON, **changes, **(further or {}), "model_type": kind, "tie_word_embeddings": False}
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(text_config=text, tie_word_embeddings=False, **OTHER_PARTS[family])
    config.text_config._experts_implementation = "eager"
    with without_timm():
        oracle = _draw(f"{family}ForConditionalGeneration", config, seed)
    oracle.save_pretrained(folder)
    return ZooModel(folder, oracle)


@contextmanager
def without_timm() -> Iterator[None]:
    """Replace the vision tower of Gemma 3n, which needs the package timm, by a linear layer."""
    make = transformers.AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        if config.model_type == "gemma3n_vision":
            return torch.nn.Linear(config.hidden_size, config.hidden_size)
        return make(config, **options)

    with patch.object(transformers.AutoModel, "from_config", from_config):
        yield


def _draw(class_name: str, config: Any, seed: int) -> Any:
    """Return a model of this class with random weights."""
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # the only one that supports float64
    # Falcon's eager attention adds linear biases twice.
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    oracle = getattr(transformers, class_name)._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        biases = [
            pair
            for pair in oracle.named_buffers()
            if pair[0].endswith(("correction_bias", "expert_bias", "layer_scalar"))
        ]
        for name, parameter in (*oracle.named_parameters(), *biases):
            # initialized as 0 and 1, so that errors would not be noticed
            if name.endswith(_DRAWN) or any(part in name for part in _DRAWN_PARTS):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        slow_decays(oracle)
    return oracle


def slow_decays(oracle: Any) -> None:
    """Give the states of delta rules slower decays.

    As transformers draws them, a state loses nearly everything with each token. What is read from it is then often
    nearly 0, and the norm after it enlarges rounding errors; errors in older states are hardly noticed.
    """
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("linear_attn.A_log", "forget_gate.A_log")):
                parameter.sub_(4.0)
