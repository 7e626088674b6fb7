"""Small random models of every family, made with transformers, whose answers are the oracle.

Weights are drawn ten times wider than usual: with the usual 0.02 a random model repeats one token for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 211
MAX_POSITIONS = 256

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-gqa": ("Llama", {"num_key_value_heads": 2}),
    "llama-gqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-rope-llama3": ("Llama", _LLAMA3),
    "llama-rope-yarn": ("Llama", _YARN),
    "llama-rope-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-rope-dynamic": ("Llama", _rope("dynamic", factor=4.0)),
    "llama-attention-bias": ("Llama", {"attention_bias": True}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "hidden_act": "gelu"}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 19}),
    "mistral-no-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral-layer-types": (
        "Ministral",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 19,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 24}),
    "gpt2": ("GPT2", {}),
    "gpt2-inner": ("GPT2", {"n_inner": 80, "activation_function": "relu"}),
}


@dataclass(frozen=True)
class ZooModel:
    """A checkpoint folder and the transformers model that was saved in it.

    What `generate` and `beams` have found is kept: tests ask for the same in many ways of serving it.
    """

    folder: Path
    oracle: Any
    _found: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())

    @torch.inference_mode()
    def logits(self, token_ids: tuple[int, ...] | list[int]) -> torch.Tensor:
        """The oracle's logits at every position, [positions, vocab_size]."""
        return self.oracle(torch.tensor([token_ids])).logits[0].float()

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """The oracle's own `generate`, without its stopping."""
        return self.generate(tuple(prompt), num_tokens, min_new_tokens=num_tokens)

    def generate(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None = None, **options: Any
    ) -> list[int]:
        """The oracle's own greedy `generate` with some of its logits processors; the end id included."""
        return list(self._ask(prompt, num_tokens, end_id, options)[0][0])

    def beams(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None = None, **options: Any
    ) -> list[tuple[list[int], float]]:
        """The oracle's own beam search: each sequence's new tokens and final score, best first."""
        found = self._ask(prompt, num_tokens, end_id, options | {"output_scores": True})
        return [(list(tokens), score) for tokens, score in zip(*found, strict=True)]

    def _ask(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None, options: dict[str, Any]
    ) -> tuple[list[list[int]], list[float]]:
        """New tokens of every sequence, and the scores of a beam search's."""
        key = (tuple(prompt), num_tokens, end_id, repr(sorted(options.items())))
        if key not in self._found:
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
            # The options stay, so that no other object comes to be where one of theirs was, which its name tells.
            self._found[key] = options, (sequences, [] if scores is None else scores.tolist())
        return self._found[key][1]


@dataclass
class Zoo:
    """Makes each model once."""

    root: Path
    _made: dict[str, ZooModel] = field(default_factory=dict)

    def __getitem__(self, case: str) -> ZooModel:
        if case not in self._made:
            self._made[case] = make_model(self.root / case, case)
        return self._made[case]


def make_model(folder: Path, case: str, seed: int = 0, **save_options: Any) -> ZooModel:
    """Draw the weights of `case`, save them in `folder`."""
    family, changes = CASES[case]
    values = _GPT2 if family == "GPT2" else _COMMON
    config = getattr(transformers, f"{family}Config")(**{**values, **changes})
    torch.manual_seed(seed)
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    oracle = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("bias") or "norm" in name:  # drawn as 0 and 1: nobody would miss them
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    oracle.save_pretrained(folder, **save_options)
    return ZooModel(folder, oracle)
