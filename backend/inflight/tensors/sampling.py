"""Read one prompt's tensors for sampling: sampling controls, logit bias, draft tokens and guide.

Each sampling control declares its tensor (`core/request/sampling_config.py`). `Request.validate` checks
ranges. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.arrays import check_bias
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, FloatTensor
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.tensors.reader import TensorReader
from inflight.text.text_encoder import TextEncoder

_GUIDE_TYPES = f"one of {', '.join(each.value for each in GuideKind)}"
_WORD_BIAS = ("embedding_bias_words", "embedding_bias_weights")


def read_sampling_config(reader: TensorReader) -> SamplingConfig:
    """Return the sampling config. Controls that were not sent, or were sent disabled, have neutral values."""
    values: dict[str, Any] = {}
    for name, control in CONTROLS.items():
        value = reader.value(control.tensor)
        if value is not None and not control.is_off(value):
            values[name] = value
    return SamplingConfig(**values)


def read_guide(reader: TensorReader) -> Guide | None:
    """Return the guide (guided decoding) that the generated text must follow; None if none was sent."""
    name, text = reader.text("guided_decoding_guide_type"), reader.text("guided_decoding_guide")
    if not name:
        if text:
            raise InvalidArgument(
                Name("guided_decoding_guide"),
                " came without ",
                Name("guided_decoding_guide_type"),
                f", expected {_GUIDE_TYPES}",
            )
        return None
    try:
        return Guide(GuideKind(name), text or "")
    except ValueError:
        raise InvalidArgument(
            Name("guided_decoding_guide_type"), f" is {name!r}, expected {_GUIDE_TYPES}"
        ) from None


def read_draft(reader: TensorReader) -> ExternalDraft | None:
    """Return the draft tokens that the client sent; None if there are none."""
    ids, logits = reader.array("draft_input_ids"), reader.array("draft_logits")
    if ids is None:
        if logits is not None:
            raise InvalidArgument(
                Name("draft_logits"), " came without ", Name("draft_input_ids"), ", whose logits they are"
            )
        return None
    # A row that contains NaN has the maximum NaN.
    if logits is not None and not np.isfinite(logits.max(axis=-1)).all():
        raise InvalidArgument(
            Name("draft_logits"),
            " must hold finite numbers in every row; -inf for tokens that are never drafted",
        )
    threshold = reader.real("draft_acceptance_threshold")
    return ExternalDraft(tuple(ids.tolist()), None if logits is None else as_float_tensor(logits), threshold)


def read_drafting(reader: TensorReader, has_draft_model: bool) -> dict[str, Any]:
    """Return the arguments that a `DraftedRequest` has beyond a `Request`.

    Returns an empty dictionary if the request uses no draft model.

    Raises Unsupported if there is no draft model, InvalidArgument for use_draft_logits without a number of drafts.
    """
    count, with_logits = reader.integer("num_draft_tokens") or 0, bool(reader.boolean("use_draft_logits"))
    if not count:
        if with_logits:
            raise InvalidArgument(
                Name("use_draft_logits"), " is true, but ", Name("num_draft_tokens"), " is missing or 0"
            )
        return {}
    if not has_draft_model:
        raise Unsupported(
            Name("num_draft_tokens"),
            f" is {count}, but no draft model is set for this model: only tensorrt_llm_bls can have one, "
            "by its parameter tensorrt_llm_draft_model_name",
        )
    return {"num_draft_tokens": count, "use_draft_logits": with_logits}


def read_bias(reader: TensorReader, vocab_size: int, encoder: TextEncoder) -> FloatTensor | None:
    """Return the sum of embedding_bias and embedding_bias_words, [vocab_size]; None if neither has an effect."""
    bias = reader.array("embedding_bias")
    if bias is None and not has_word_bias(reader, *_WORD_BIAS):  # nearly every request
        return None
    if bias is not None and bias.shape != (vocab_size,):
        raise InvalidArgument(
            Name("embedding_bias"), f" must have shape [1, {vocab_size}], got {[1, *bias.shape]}"
        )
    total = np.zeros(vocab_size, np.float32) if bias is None else bias.copy()
    check_bias(total, "embedding_bias")
    add_word_bias(total, reader, *_WORD_BIAS, encoder.tokens)
    return as_float_tensor(total) if total.any() else None


def has_word_bias(reader: TensorReader, words: str, weights: str) -> bool:
    """Return whether `add_word_bias` with these arguments would change the bias or raise an error."""
    return any(reader.texts(words)) or reader.array(weights) is not None


def add_word_bias(
    bias: NDArray[np.float32],
    reader: TensorReader,
    words: str,
    weights: str,
    ids_of: Callable[[str], Sequence[int]],
) -> None:
    """Add the weights of a request's biased words to `bias` in place, as tensorrtllm_backend does.

    A word's weight is added for each token of the word, several times if the token occurs several times.

    Args:
        bias: [vocab_size] float32. Tokens of the tokenizer beyond vocab_size have no logit and are ignored.
        reader: The request's tensors.
        words: Main name of the tensor of words; empty words have no effect.
        weights: Main name of the tensor with one weight per word.
        ids_of: Function that encodes a word as token ids.

    Raises:
        InvalidArgument: The numbers of words and weights differ, or a sum is NaN or +inf (-inf bans a token).
    """
    texts, array = reader.texts(words), reader.array(weights)
    values: list[float] = [] if array is None else array.tolist()
    if len(texts) != len(values) and (any(texts) or any(values)):
        raise InvalidArgument(
            Name(reader.shown_name(words)),
            f" has {len(texts)} texts and ",
            Name(reader.shown_name(weights)),
            f" {len(values)} weights: send one weight for each text",
        )
    for text, weight in zip(texts, values):
        if text and weight:
            ids = np.array(ids_of(text), dtype=np.int64)
            with np.errstate(over="ignore", invalid="ignore"):  # check_bias refuses such results
                np.add.at(bias, ids[ids < len(bias)], np.float32(weight))
    check_bias(bias, reader.shown_name(weights))


def as_float_tensor(array: NDArray[Any]) -> FloatTensor:
    """Convert an array to the float32 tensor that the core passes on."""
    return FloatTensor(array.shape, np.ascontiguousarray(array, np.float32).tobytes())
