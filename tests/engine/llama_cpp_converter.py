"""Converts checkpoint folders to GGUF files by llama.cpp's own converter, without a tokenizer.

Arguments: the folder of llama.cpp's sources, and pairs of a checkpoint folder and a file to write. See
test_gguf_architectures.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

source, *arguments = sys.argv[1:]
sys.path[:0] = [f"{source}/gguf-py", source]

import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # noqa: E402
from conversion.llama import LlamaModel  # noqa: E402


def _set_vocab(self: Any) -> None:
    self.gguf_writer.add_tokenizer_model("no_vocab")


def _add_again(self: Any, key: str, *values: Any, **options: Any) -> None:
    """Add a key and value to a file; the last value counts."""
    self.kv_data[0].pop(key, None)
    _add_once(self, key, *values, **options)


_add_once = gguf.GGUFWriter.add_key_value
gguf.GGUFWriter.add_key_value = _add_again
for folder, path in zip(arguments[::2], arguments[1::2]):
    hparams = ModelBase.load_hparams(Path(folder), False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    for each in (*kind.__mro__, LlamaModel):
        if "set_vocab" in vars(each):
            each.set_vocab = _set_vocab
    kind.set_vocab, kind.no_mtp = _set_vocab, True
    with torch.inference_mode():
        kind(Path(folder), gguf.LlamaFileType.ALL_F32, Path(path), eager=True).write()
