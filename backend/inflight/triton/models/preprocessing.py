"""`preprocessing`: text to token ids, for clients that call the steps of tensorrtllm_backend themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from inflight.errors import InvalidArgument
from inflight.text.words import biased_ids
from inflight.triton.models.text_model import TextModel
from inflight.triton.parameters import Role
from inflight.triton.requests import NO_ID
from inflight.triton.tensor_reader import TensorReader, decode_utf8
from inflight.triton.text_tensors import PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS
from inflight.triton.word_bias import add_word_bias


class TritonPythonModel(TextModel):
    """QUERY to INPUT_ID, word lists to ids; the rest is handed through."""

    role = Role.PREPROCESSING
    inputs = PREPROCESSING_INPUTS
    outputs = PREPROCESSING_OUTPUTS

    def convert(self, reader: TensorReader) -> Mapping[str, np.ndarray]:
        """See TextModel.convert."""
        query = reader.array("QUERY")
        if query is None:
            raise InvalidArgument("a value is required for QUERY: it is missing")
        tokenizer = self.tokenizers.require()
        ids = tokenizer.encode(
            decode_utf8(query[0], "QUERY"), add_special_tokens=self.parameters.add_special_tokens
        )
        pad_id = _first(reader.integer("PAD_ID"), tokenizer.pad_token_id, tokenizer.eos_token_id)
        outputs = {
            "INPUT_ID": np.array(ids),
            "REQUEST_INPUT_LEN": np.array([len(ids)]),
            # What tensorrtllm_backend's ensemble hands on for every prompt, with or without an encoder.
            "DECODER_INPUT_ID": np.array([pad_id]),
            "REQUEST_DECODER_INPUT_LEN": np.array([1]),
            "EMBEDDING_BIAS": self._bias(reader),
            "OUT_END_ID": np.array([_first(reader.integer("END_ID"), tokenizer.eos_token_id)]),
            "OUT_PAD_ID": np.array([pad_id]),
        }
        if reader.integer("PROMPT_TABLE_EXTRA_ID") is not None:
            # Ids beyond the vocabulary stand for rows of a table; a text has none.
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.zeros(len(ids))
        if (length := reader.integer("REQUEST_OUTPUT_LEN")) is not None:
            outputs["REQUEST_OUTPUT_LEN"] = np.array([length])
        for source, target in (("BAD_WORDS_DICT", "BAD_WORDS_IDS"), ("STOP_WORDS_DICT", "STOP_WORDS_IDS")):
            outputs[target] = _word_list(
                reader, source, lambda word: tokenizer.encode(word, add_special_tokens=False)
            )
        return outputs

    def _bias(self, reader: TensorReader) -> np.ndarray:
        """[vocab_size], or [0] without words."""
        if not any(reader.texts("EMBEDDING_BIAS_WORDS")) and reader.array("EMBEDDING_BIAS_WEIGHTS") is None:
            return np.zeros(0)
        tokenizer = self.tokenizers.require()
        folders = (self.parameters.gpt_model_path, self.parameters.tokenizer_dir)
        bias = np.zeros(_model_vocab_size(folders) or tokenizer.vocab_size, np.float32)
        names = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
        add_word_bias(bias, reader, *names, lambda word: biased_ids(tokenizer, word))
        return bias


def _model_vocab_size(folders: Sequence[str | None]) -> int | None:
    """`vocab_size` of the first config.json in these folders; a model may have more logits than tokens."""
    for folder in folders:
        path = Path(folder or "", "config.json")
        if folder and path.is_file():
            size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
            return size if isinstance(size, int) else None
    return None


def _first(*ids: int | None) -> int:
    return next((token_id for token_id in ids if token_id is not None), NO_ID)


def _word_list(reader: TensorReader, name: str, encode: Callable[[str], Sequence[int]]) -> np.ndarray:
    return pack_words([encode(word) for word in reader.texts(name) if word])


def pack_words(words: Sequence[Sequence[int]]) -> np.ndarray:
    """[2, n]: all ids, then the end offset of each word, filled up with -1. No words: [[0], [-1]]."""
    flat = [token_id for word in words for token_id in word]
    if not flat:
        return np.array([[0], [-1]])
    offsets = np.cumsum([len(word) for word in words if word])
    return np.array([flat, [*offsets, *[-1] * (len(flat) - len(offsets))]])
