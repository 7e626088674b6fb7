"""The tensors of one prompt that say how tokens are chosen, to a SamplingConfig, a bias and drafts.

Owns what each of them means and what upstream's clients send for "off". Does not check ranges: Request.validate
does. Runs on the thread that calls execute.
"""

from __future__ import annotations

import numpy as np

from inflight.core.request.request import ExternalDraft, FloatTensor
from inflight.core.request.sampling_config import NO_REPEAT_OFF, SamplingConfig
from inflight.errors import InvalidArgument
from inflight.serving.text_encoder import TextEncoder
from inflight.triton.tensor_reader import TensorReader
from inflight.triton.word_bias import add_word_bias, check_bias

_DEFAULT = SamplingConfig()


def read_sampling_config(reader: TensorReader) -> SamplingConfig:
    """Absent tensors have SamplingConfig's defaults."""
    top_p = _real(reader, "runtime_top_p", _DEFAULT.top_p)
    ngram_size = _integer(reader, "no_repeat_ngram_size", _DEFAULT.no_repeat_ngram_size)
    return SamplingConfig(
        beam_width=_integer(reader, "beam_width", _DEFAULT.beam_width),
        num_return_sequences=reader.integer("num_return_sequences"),
        temperature=_real(reader, "temperature", _DEFAULT.temperature),
        top_k=_integer(reader, "runtime_top_k", _DEFAULT.top_k),
        # Not max(): NaN has to get through to the check that refuses it.
        top_p=0.0 if top_p <= 0 else top_p,
        top_p_min=_real(reader, "runtime_top_p_min", _DEFAULT.top_p_min),
        top_p_decay=_real(reader, "runtime_top_p_decay", _DEFAULT.top_p_decay),
        top_p_reset_id=_integer(reader, "runtime_top_p_reset_ids", _DEFAULT.top_p_reset_id),
        min_p=_real(reader, "min_p", _DEFAULT.min_p),
        random_seed=_integer(reader, "random_seed", _DEFAULT.random_seed),
        repetition_penalty=_real(reader, "repetition_penalty", _DEFAULT.repetition_penalty),
        presence_penalty=_real(reader, "presence_penalty", _DEFAULT.presence_penalty),
        frequency_penalty=_real(reader, "frequency_penalty", _DEFAULT.frequency_penalty),
        min_length=_integer(reader, "min_length", _DEFAULT.min_length),
        no_repeat_ngram_size=0 if ngram_size >= NO_REPEAT_OFF else ngram_size,
        length_penalty=_real(reader, "len_penalty", _DEFAULT.length_penalty),
        early_stopping=_integer(reader, "early_stopping", _DEFAULT.early_stopping),
        beam_search_diversity_rate=_real(
            reader, "beam_search_diversity_rate", _DEFAULT.beam_search_diversity_rate
        ),
    )


def read_draft(reader: TensorReader) -> ExternalDraft | None:
    """The draft from outside; None if there is none."""
    ids, logits = reader.array("draft_input_ids"), reader.array("draft_logits")
    if ids is None:
        if logits is not None:
            raise InvalidArgument("draft_logits came without draft_input_ids, whose logits they are")
        return None
    # The largest of a row is NaN if one of them is.
    if logits is not None and not np.isfinite(logits.max(axis=-1)).all():
        raise InvalidArgument(
            "draft_logits must hold finite numbers in every row; -inf for what is never drawn"
        )
    threshold = reader.real("draft_acceptance_threshold")
    return ExternalDraft(tuple(ids.tolist()), None if logits is None else as_float_tensor(logits), threshold)


def read_bias(reader: TensorReader, vocab_size: int, encoder: TextEncoder) -> FloatTensor | None:
    """embedding_bias and embedding_bias_words together; None if they ask for nothing."""
    bias = reader.array("embedding_bias")
    if bias is not None and bias.shape != (vocab_size,):
        raise InvalidArgument(f"embedding_bias must have shape [1, {vocab_size}], got {[1, *bias.shape]}")
    total = np.zeros(vocab_size, np.float32) if bias is None else bias.copy()
    check_bias(total, "embedding_bias")
    add_word_bias(total, reader, "embedding_bias_words", "embedding_bias_weights", encoder.tokens)
    return as_float_tensor(total) if total.any() else None


def as_float_tensor(array: np.ndarray) -> FloatTensor:
    """The same values as the core hands them through."""
    return FloatTensor(array.shape, np.ascontiguousarray(array, np.float32).tobytes())


def _integer(reader: TensorReader, name: str, default: int) -> int:
    value = reader.integer(name)
    return default if value is None else value


def _real(reader: TensorReader, name: str, default: float) -> float:
    value = reader.real(name)
    return default if value is None else value
