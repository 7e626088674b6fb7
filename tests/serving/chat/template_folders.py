"""Checkpoint folders with a tiny tokenizer and chat templates, and their tokenizer in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.text.tiny_tokenizers import backend

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def source(name: str) -> str:
    """Return the template with that name."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def make_folder(folder: Path, *, settings: dict[str, Any] | None = None, **files: str) -> Path:
    """Write a folder: `settings` to tokenizer_config.json, and `files` by name, with __ for a slash."""
    folder.mkdir(parents=True, exist_ok=True)
    backend("byte_level").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **(settings or {})}))
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def reference(folder: Path) -> PreTrainedTokenizerBase:
    """Return the folder's tokenizer in transformers."""
    return AutoTokenizer.from_pretrained(str(folder))
