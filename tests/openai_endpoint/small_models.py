"""Small random checkpoints for embeddings, classes and scores, in the forms in which such models are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors

from inflight.testing.synthetic_tokenizer import END_ID, make_tokenizer, write_tokenizer

_VOCABULARY, POSITIONS, HIDDEN = 512, 512, 64
_TYPE = "sentence_transformers.models"


def make_qwen3(folder: Path, tied: bool = True, bare: bool = False, **tokenizer: bool) -> Path:
    """Write a Qwen3 with random weights; return its folder.

    Args:
        folder: Made by this function.
        tied: Whether the embedding is also the output projection.
        bare: Whether only the decoder is stored, without the output projection and the prefix of its names.
        tokenizer: Arguments of `write_text_files`.
    """
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=_VOCABULARY + 2,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        eos_token_id=END_ID,
    )
    model = transformers.Qwen3ForCausalLM(config)
    (model.model if bare else model).save_pretrained(folder)
    write_text_files(folder, **tokenizer)
    return folder


LABELS = ("bad", "fair", "good")


def make_classifier(
    folder: Path,
    config: type[transformers.PretrainedConfig] = transformers.Qwen3Config,
    labels: Sequence[str] = LABELS,
    problem_type: str | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **tokenizer: bool,
) -> Path:
    """Write a decoder for sequence classification with random weights; return its folder.

    Args:
        folder: Made by this function.
        config: The family.
        labels: The classes.
        problem_type: The key of config.json; None: none.
        dtype: Type of the weights.
        max_shard_size: Size of the largest file.
        tokenizer: Arguments of `write_text_files`.
    """
    torch.manual_seed(0)
    sizes = {
        "vocab_size": _VOCABULARY + 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
        "eos_token_id": END_ID,
    }
    known = {*config().to_dict(), *config.attribute_map}
    of_family = {name: size for name, size in sizes.items() if name in known}
    made = config(**of_family, id2label=dict(enumerate(labels)), problem_type=problem_type)
    model = transformers.AutoModelForSequenceClassification.from_config(made, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_text_files(folder, **tokenizer)
    return folder


def write_text_files(folder: Path, appends_end: bool = False) -> None:
    """Write a tokenizer with the tokens "yes" and "no", which appends the end id to texts if `appends_end`."""
    write_tokenizer(folder, _VOCABULARY, POSITIONS)
    made = make_tokenizer(_VOCABULARY)
    made.add_tokens(["yes", "no"])
    if appends_end:
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", END_ID)]
        )
    made.save(str(folder / "tokenizer.json"))


def write_pooling(folder: Path, mode: str = "lasttoken", others: Mapping[str, bool] | None = None) -> Path:
    """Write sentence-transformers' files: a pooling of this mode, and the `others` in the same file."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{_TYPE}.{kind}"}
            for index, (kind, path) in enumerate(modules)
        ],
    )
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling").mkdir()
    _write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, **modes, **(others or {}), "include_prompt": True},
    )
    return folder


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
