"""`preprocessing`: text to token ids, for clients that call the steps of tensorrtllm_backend themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from inflight.errors import InvalidArgument
from inflight.triton.models.text_model import TextModel
from inflight.triton.parameters import Role
from inflight.triton.requests import NO_ID
from inflight.triton.tensor_reader import TensorReader, decode_utf8
from inflight.triton.text_tensors import PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS


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
        outputs = {
            "INPUT_ID": np.array(ids),
            "REQUEST_INPUT_LEN": np.array([len(ids)]),
            "OUT_END_ID": np.array([_first(reader.integer("END_ID"), tokenizer.eos_token_id)]),
            "OUT_PAD_ID": np.array(
                [_first(reader.integer("PAD_ID"), tokenizer.pad_token_id, tokenizer.eos_token_id)]
            ),
        }
        if (length := reader.integer("REQUEST_OUTPUT_LEN")) is not None:
            outputs["REQUEST_OUTPUT_LEN"] = np.array([length])
        for source, target in (("BAD_WORDS_DICT", "BAD_WORDS_IDS"), ("STOP_WORDS_DICT", "STOP_WORDS_IDS")):
            outputs[target] = _word_list(
                reader, source, lambda word: tokenizer.encode(word, add_special_tokens=False)
            )
        return outputs


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
