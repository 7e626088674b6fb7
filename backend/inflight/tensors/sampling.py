"""The tensors of one prompt that say how its tokens are chosen: sampling controls, bias, drafts and guide.

Each sampling control says itself which tensor it comes by (`core/request/sampling_config.py`). Does not check
ranges: Request.validate does. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, FloatTensor
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.tensors.reader import TensorReader
from inflight.text.text_encoder import TextEncoder

_GUIDE_TYPES = f"one of {', '.join(each.value for each in GuideKind)}"
_WORD_BIAS = ("embedding_bias_words", "embedding_bias_weights")


def read_sampling_config(reader: TensorReader) -> SamplingConfig:
    """The sampling controls that came, each by its tensor; the others, and those that are off, are neutral."""
    values: dict[str, Any] = {}
    for name, control in CONTROLS.items():
        value = reader.value(control.tensor)
        if value is not None and not control.is_off(value):
            values[name] = value
    return SamplingConfig(**values)


def read_guide(reader: TensorReader) -> Guide | None:
    """Return the guide that the text must follow; None if none is asked for."""
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
    """Return the draft from outside; None if there is none."""
    ids, logits = reader.array("draft_input_ids"), reader.array("draft_logits")
    if ids is None:
        if logits is not None:
            raise InvalidArgument(
                Name("draft_logits"), " came without ", Name("draft_input_ids"), ", whose logits they are"
            )
        return None
    # The largest of a row is NaN if one of them is.
    if logits is not None and not np.isfinite(logits.max(axis=-1)).all():
        raise InvalidArgument(
            Name("draft_logits"), " must hold finite numbers in every row; -inf for what is never drawn"
        )
    threshold = reader.real("draft_acceptance_threshold")
    return ExternalDraft(tuple(ids.tolist()), None if logits is None else as_float_tensor(logits), threshold)


def read_drafting(reader: TensorReader, has_draft_model: bool) -> dict[str, Any]:
    """Return the further arguments of a `DraftedRequest`; empty where no other model is to draft tokens.

    Raises Unsupported if there is no such model, InvalidArgument for what goes with no number of drafts.
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
            f" is {count}, but this model has no draft model: send it to tensorrt_llm_bls, served "
            "with the parameter tensorrt_llm_draft_model_name",
        )
    return {"num_draft_tokens": count, "use_draft_logits": with_logits}


def read_bias(reader: TensorReader, vocab_size: int, encoder: TextEncoder) -> FloatTensor | None:
    """embedding_bias and embedding_bias_words together; None if they ask for nothing."""
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
    """Return whether `add_word_bias` has something to add or to refuse; arguments as there."""
    return any(reader.texts(words)) or reader.array(weights) is not None


def add_word_bias(
    bias: np.ndarray, reader: TensorReader, words: str, weights: str, ids_of: Callable[[str], Sequence[int]]
) -> None:
    """Add what a request's words ask for, in place, by tensorrtllm_backend's rule.

    A word's weight is added to each of its tokens, as often as the token is there.

    Args:
        bias: [vocab_size] float32. A tokenizer may know tokens beyond it, which have no logit; they are left out.
        reader: The request's tensors.
        words: Main name of the tensor of texts; empty ones ask for nothing.
        weights: Main name of the tensor of one weight per text.
        ids_of: Turns a text into its ids.

    Raises:
        InvalidArgument: The numbers of texts and weights differ; or a sum is NaN or +inf (-inf bans a token).
    """
    texts, array = reader.texts(words), reader.array(weights)
    values = [] if array is None else array.tolist()
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
            with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is refused
                np.add.at(bias, ids[ids < len(bias)], np.float32(weight))
    check_bias(bias, reader.shown_name(weights))


def check_bias(bias: np.ndarray, name: str) -> None:
    """Raise InvalidArgument about the tensor `name` for NaN and +inf."""
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise InvalidArgument(Name(name), " must hold finite numbers, or -inf to ban a token")


def as_float_tensor(array: np.ndarray) -> FloatTensor:
    """Return the same values as the core hands them through."""
    return FloatTensor(array.shape, np.ascontiguousarray(array, np.float32).tobytes())
