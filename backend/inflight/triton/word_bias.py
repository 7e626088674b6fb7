"""Texts and weights to a bias of the logits, for the serving models and `preprocessing`.

Owns the rule, which is tensorrtllm_backend's: a word's weight is added to each of its tokens, as often as the
token is there. Does not know how a word becomes tokens. Runs on the thread that calls execute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from inflight.errors import InvalidArgument
from inflight.triton.tensor_reader import TensorReader


def add_word_bias(
    bias: np.ndarray, reader: TensorReader, words: str, weights: str, ids_of: Callable[[str], Sequence[int]]
) -> None:
    """Add what a request's words ask for, in place.

    Args:
        bias: [vocab_size] float32. A tokenizer may know tokens beyond it, which have no logit; they are left out.
        reader: The request's tensors.
        words: Main name of the tensor of texts; empty ones ask for nothing.
        weights: Main name of the tensor of one weight per text.
        ids_of: From a text to its ids.

    Raises:
        InvalidArgument: The numbers of texts and weights differ; or a sum is NaN or +inf (-inf bans a token).
    """
    texts, array = reader.texts(words), reader.array(weights)
    values = [] if array is None else array.tolist()
    if len(texts) != len(values) and (any(texts) or any(values)):
        raise InvalidArgument(
            f"{reader.shown_name(words)} has {len(texts)} texts and {reader.shown_name(weights)} {len(values)} "
            "weights: send one weight for each text"
        )
    for text, weight in zip(texts, values):
        if text and weight:
            ids = np.array(ids_of(text), dtype=np.int64)
            with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is refused
                np.add.at(bias, ids[ids < len(bias)], np.float32(weight))
    check_bias(bias, reader.shown_name(weights))


def check_bias(bias: np.ndarray, name: str) -> None:
    """Raise InvalidArgument about the tensor `name` for NaN and +inf."""
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise InvalidArgument(f"{name} must hold finite numbers, or -inf to ban a token")
