"""`preprocessing`: text to token ids, for clients that call the steps of tensorrtllm_backend themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from inflight.config import Role
from inflight.errors import InvalidArgument
from inflight.text.words import biased_ids
from inflight.triton.models.text_models import TextModel
from inflight.triton.requests import NO_ID
from inflight.triton.sampling_tensors import add_word_bias
from inflight.triton.tensor_reader import TensorReader, decode_utf8, each_row
from inflight.triton.tensors import PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS

_BIAS_NAMES = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")


class TritonPythonModel(TextModel):
    """QUERY to INPUT_ID, word lists to ids; the rest is handed through. A batch has a row for each prompt."""

    role = Role.PREPROCESSING
    inputs = PREPROCESSING_INPUTS
    outputs = PREPROCESSING_OUTPUTS

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[np.ndarray]]:
        """See TextModel.convert."""
        queries = each_row([partial(_query, row) for row in rows])
        tokenizer = self.tokenizers.require()
        prompts = tokenizer.encode_batch(queries, add_special_tokens=self.parameters.add_special_tokens)
        ends = [_first(row.integer("END_ID"), tokenizer.eos_token_id) for row in rows]
        pads = [_first(row.integer("PAD_ID"), tokenizer.pad_token_id, tokenizer.eos_token_id) for row in rows]
        outputs = {
            "INPUT_ID": _filled_up(prompts, pads),
            "REQUEST_INPUT_LEN": [np.array([len(ids)]) for ids in prompts],
            # What tensorrtllm_backend's ensemble hands on for every prompt, with or without an encoder.
            "DECODER_INPUT_ID": [np.array([pad]) for pad in pads],
            "REQUEST_DECODER_INPUT_LEN": [np.array([1]) for _ in rows],
            "OUT_END_ID": [np.array([end]) for end in ends],
            "OUT_PAD_ID": [np.array([pad]) for pad in pads],
        }
        lengths = [row.integer("REQUEST_OUTPUT_LEN") for row in rows]
        if None not in lengths:
            outputs["REQUEST_OUTPUT_LEN"] = [np.array([length]) for length in lengths]
        if rows[0].integer("PROMPT_TABLE_EXTRA_ID") is not None:
            # Ids beyond the vocabulary stand for rows of a table; a text has none.
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = [np.zeros(len(ids)) for ids in outputs["INPUT_ID"]]
        outputs["EMBEDDING_BIAS"] = self._biases(rows)
        for source, target in (("BAD_WORDS_DICT", "BAD_WORDS_IDS"), ("STOP_WORDS_DICT", "STOP_WORDS_IDS")):
            outputs[target] = _word_lists(
                each_row([partial(row.texts, source) for row in rows]),
                lambda word: tokenizer.encode(word, add_special_tokens=False),
            )
        return outputs

    def _biases(self, rows: Sequence[TensorReader]) -> list[np.ndarray]:
        """[vocab_size] each, or [0] each if no prompt of the batch has words."""
        if not any(_has_bias(row) for row in rows):
            return [np.zeros(0) for _ in rows]
        tokenizer = self.tokenizers.require()
        folders = (self.parameters.engine.gpt_model_path, self.parameters.tokenizer_dir)
        size = _model_vocab_size(folders) or tokenizer.vocab_size

        def bias(row: TensorReader) -> np.ndarray:
            array = np.zeros(size, np.float32)
            add_word_bias(array, row, *_BIAS_NAMES, lambda word: biased_ids(tokenizer, word))
            return array

        return each_row([partial(bias, row) for row in rows])


def _model_vocab_size(folders: Sequence[str | None]) -> int | None:
    """`vocab_size` of the first config.json in these folders; a model may have more logits than tokens."""
    for folder in folders:
        path = Path(folder or "", "config.json")
        if folder and path.is_file():
            size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
            return size if isinstance(size, int) else None
    return None


def _has_bias(reader: TensorReader) -> bool:
    words, weights = _BIAS_NAMES
    return any(reader.texts(words)) or reader.array(weights) is not None


def _query(reader: TensorReader) -> str:
    query = reader.array("QUERY")
    if query is None:
        raise InvalidArgument("a value is required for QUERY: it is missing")
    return decode_utf8(query[0], "QUERY")


def _first(*ids: int | None) -> int:
    return next((token_id for token_id in ids if token_id is not None), NO_ID)


def _filled_up(rows: Sequence[Sequence[int]], fillers: Sequence[int]) -> list[np.ndarray]:
    """[n] each, with n the length of the longest."""
    length = max(map(len, rows))
    return [np.array([*row, *[filler] * (length - len(row))]) for row, filler in zip(rows, fillers)]


def _word_lists(rows: Sequence[Sequence[str]], encode: Callable[[str], Sequence[int]]) -> list[np.ndarray]:
    """[2, n] each, with n the length of the longest; ids behind the last end offset do not count."""
    packed = [pack_words([encode(word) for word in words if word]) for words in rows]
    ids = _filled_up([list(array[0]) for array in packed], [0] * len(packed))
    ends = _filled_up([list(array[1]) for array in packed], [-1] * len(packed))
    return [np.stack(pair) for pair in zip(ids, ends)]


def pack_words(words: Sequence[Sequence[int]]) -> np.ndarray:
    """[2, n]: all ids, then the end offset of each word, filled up with -1. No words: [[0], [-1]]."""
    flat = [token_id for word in words for token_id in word]
    if not flat:
        return np.array([[0], [-1]])
    offsets = np.cumsum([len(word) for word in words if word])
    return np.array([flat, [*offsets, *[-1] * (len(flat) - len(offsets))]])
