"""A real tokenizer that is small enough to read: one token per letter."""

from __future__ import annotations

import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from inflight.text.tokenizer import Tokenizer


def letter_backend() -> tokenizers.Tokenizer:
    vocabulary = {letter: index for index, letter in enumerate(string.ascii_lowercase)} | {"?": 26}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def letter_tokenizer() -> Tokenizer:
    return Tokenizer(letter_backend())


def save_letter_tokenizer(folder: Path) -> str:
    letter_backend().save(str(folder / "tokenizer.json"))
    return str(folder)
