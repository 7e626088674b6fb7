"""The keywords of `generate` and `stream`: their tensors, and the outputs that they request.

Owns the names: the server's text models and id models have different names for the same things, and a text model
lacks some. Knows nothing of connections. Plain functions; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight_client.controls import ALIASES, CONTROLS, ENDING_CONTROLS
from inflight_client.guide import Guide

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Option:
    """A keyword and its tensor.

    Attributes:
        text_name: The tensor's name in a text model; "" if it has none.
        ids_name: Its name in an id model.
        dtype: Its type; object for text.
        ndim: Number of dimensions of its value; 0 for a number.
        outputs: The outputs that it requests, if it is set and not 0 or False.
        help: Its description on the command line; "" if it is not an option there, or has another name.
    """

    text_name: str
    ids_name: str
    dtype: type[np.generic]
    ndim: int = 0
    outputs: tuple[str, ...] = ()
    help: str = ""


def _number(name: str, dtype: type[np.generic], ids_name: str = "", help: str = "") -> Option:
    return Option(name, ids_name or name, dtype, help=help)


def _wanted(name: str, *outputs: str, dtype: type[np.generic] = np.bool_) -> Option:
    return Option(name, name, dtype, outputs=outputs)


PERF_OUTPUTS = (
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_missed_blocks",
    "kv_cache_alloc_total_blocks",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "acceptance_rate",
)

_INT, _FLOAT = np.int32, np.float32
_CONTROLS = {
    name: Option(text_name, ids_name, np.dtype(dtype).type, ndim, help=help)
    for name, (text_name, ids_name, dtype, ndim, help) in CONTROLS.items()
}
"""The server's sampling controls."""
CHOOSING = {
    **{name: option for name, option in _CONTROLS.items() if name not in ENDING_CONTROLS},
    "prompt_lookup_num_tokens": _number("prompt_lookup_num_tokens", _INT),
    "draft_input_ids": Option("", "draft_input_ids", _INT, ndim=1),
    "draft_logits": Option("", "draft_logits", _FLOAT, ndim=2),
    "draft_acceptance_threshold": Option("", "draft_acceptance_threshold", _FLOAT),
    "embedding_bias": Option("", "embedding_bias", _FLOAT, ndim=1),
    "logits_post_processor_name": _number(
        "logits_post_processor_name",
        np.object_,
        help="logits post-processor, a function of the server's operator",
    ),
}
"""Options of sampling."""
ENDING = {
    "end_id": _number("end_id", _INT, help="token id that ends the answer; -1 for none"),
    "pad_id": _number("pad_id", _INT),
    **{name: _CONTROLS[name] for name in ENDING_CONTROLS},
}
"""Options that end the answer."""
QUEUEING = {
    "priority": _number("priority", _FLOAT, help="0 to 1, 0.5 by default; higher ones start first"),
    "client_id": _number("client_id", np.uint64, help="clients of one priority take turns"),
    "allotted_time_ms": _number("allotted_time_ms", _INT, help="end with TIMED_OUT after this time"),
    "cache_salt_id": _number("cache_salt_id", np.uint64, help="share cached prompts under this number only"),
    "retention_decode_priority": _number("retention_decode_priority", _INT),
    "retention_decode_duration_ms": _number("retention_decode_duration_ms", _INT),
}
"""Options of scheduling."""
_PROMPT = {"prompt_table_extra_ids": Option("", "prompt_table_extra_ids", np.uint64, ndim=1)}
_WANTED = {
    "return_log_probs": _wanted("return_log_probs", "output_log_probs", "cum_log_probs"),
    "num_top_log_probs": _wanted("num_top_log_probs", "top_log_prob_ids", "top_log_probs", dtype=_INT),
    "return_prompt_log_probs": _wanted("return_prompt_log_probs", "prompt_log_probs"),
    "return_context_logits": _wanted("return_context_logits", "context_logits"),
    "return_generation_logits": _wanted("return_generation_logits", "generation_logits"),
    "return_perf_metrics": _wanted("return_perf_metrics", *PERF_OUTPUTS),
    "return_receipt": _wanted("return_receipt", "receipt"),
}
_OPTIONS = {
    "max_tokens": _number("max_tokens", _INT, "request_output_len"),
    **CHOOSING,
    **ENDING,
    **QUEUEING,
    **_PROMPT,
    **_WANTED,
}
_WORDS = ("stop_words", "bad_words")
_ADDITIONAL = "additional_outputs"
CONTEXT_OUTPUT, GENERATION_OUTPUT = "context_", "generation_"
"""The prefixes of the names of additional outputs."""
_RETENTION = "retention_token_ranges"
_GUIDE = "guide"
_GUIDED = "guided_decoding_guide"
_LOGIT_BIAS = "logit_bias"
_LORA, _LORA_WEIGHTS = "lora", "lora_weights"
_TABLE, _TABLE_TENSOR = "prompt_table", "prompt_embedding_table"
NAMES = (*_OPTIONS, *_WORDS, _RETENTION, _LOGIT_BIAS, _ADDITIONAL, _GUIDE, _LORA, _LORA_WEIGHTS, _TABLE)

_OPTION_OF_TENSOR = {
    **{name: option for option, of in _OPTIONS.items() for name in (of.ids_name, of.text_name)},
    **{f"{word}_list": word for word in _WORDS},
    **{
        f"retention_token_range_{part}": _RETENTION
        for part in ("starts", "ends", "priorities", "durations_ms")
    },
    **{f"{_LOGIT_BIAS}_{part}": _LOGIT_BIAS for part in ("ids", "values")},
    **{f"embedding_bias_{part}": "embedding_bias" for part in ("words", "weights")},
    **dict.fromkeys((_GUIDED, f"{_GUIDED}_type"), _GUIDE),
    **dict.fromkeys(("lora_name", "lora_task_id"), _LORA),
    "lora_config": _LORA_WEIGHTS,
    **dict.fromkeys((_TABLE_TENSOR, "prompt_vocab_size"), _TABLE),
}

BFLOAT16 = np.dtype(np.uint16)
"""The type of arrays that hold bfloat16, which numpy lacks: the upper half of the bits of a float32."""


@dataclass(frozen=True)
class Options:
    """The checked keywords of one call.

    Attributes:
        text: Tensors by their names in a text model.
        ids: The same tensors by their names in an id model.
        outputs: The requested outputs.
        only_ids: Keywords for which a text model has no tensor.
        has_beams: Whether it is a beam search.
        additional_outputs: The requested outputs from the server's parameter additional_model_outputs.
    """

    text: Tensors
    ids: Tensors
    outputs: tuple[str, ...]
    only_ids: tuple[str, ...]
    has_beams: bool
    additional_outputs: tuple[str, ...] = ()


def shown_name(tensor: str) -> str:
    """Return the option that sets a tensor; the tensor's own name if there is none, such as the prompt's."""
    return _OPTION_OF_TENSOR.get(tensor, tensor)


def read_options(given: Mapping[str, Any]) -> Options:
    """Convert the keywords of a call; those that are None are left to the server.

    Raises:
        TypeError: A keyword is unknown.
        ValueError: A value does not fit its tensor.
    """
    text: Tensors = {}
    ids: Tensors = {}
    outputs: list[str] = []
    additional: tuple[str, ...] = ()
    only_ids: list[str] = []
    for keyword, value in given.items():
        name = ALIASES.get(keyword, keyword)
        if name not in NAMES:
            raise TypeError(f"unknown option {keyword!r}; there are {', '.join(NAMES)}")
        if value is None:
            continue
        if name == _ADDITIONAL:
            additional = _additional_names(value)
            continue
        for text_name, ids_name, array in _tensors_of(name, value):
            ids[ids_name] = array
            if text_name:
                text[text_name] = array
            else:
                only_ids.append(name)
        if name in _OPTIONS and _OPTIONS[name].outputs and value:
            outputs += _OPTIONS[name].outputs
    if _LORA_WEIGHTS in ids and "lora_task_id" not in ids:
        raise ValueError(
            f"{_LORA_WEIGHTS} are stored under a task id: {_LORA} must be one, got {given.get(_LORA)!r}"
        )
    beam_width = _first(ids, "beam_width", 1)
    if beam_width <= 1 and _first(ids, "num_return_sequences", 1) > 1:
        outputs.append("sequence_index")
    outputs += additional
    return Options(text, ids, tuple(outputs), tuple(only_ids), beam_width > 1, additional)


def _additional_names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.startswith((CONTEXT_OUTPUT, GENERATION_OUTPUT)):
            raise ValueError(
                f"{_ADDITIONAL} must be names of outputs, context_<name> or generation_<name>, got {name!r}"
            )
    return names


def as_tensor(name: str, values: Any, dtype: type[np.generic] | np.dtype[Any], ndim: int) -> np.ndarray:
    """Return an array with `ndim` dimensions and a leading 1, which may be there already.

    Raises ValueError if `values` do not fit.
    """
    if not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be a list of numbers, got {values!r}")
    if isinstance(dtype, type) and issubclass(dtype, np.integer):
        _check_integers(name, values, dtype)
    try:
        array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be made of numbers, in rows of one length, got {values!r}") from None
    if array.ndim == ndim:
        array = array[np.newaxis]
    if array.ndim != ndim + 1 or len(array) != 1:
        shape = ["number", "1-dimensional array", "2-dimensional array"][ndim]
        raise ValueError(f"{name} must be a {shape}, got the shape {list(np.shape(values))}")
    return array


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (name in a text model, name in an id model, tensor) for each tensor of a keyword."""
    if name in _WORDS:
        yield from _word_tensors(name, value)
    elif name == _GUIDE:
        yield from _guide_tensors(value)
    elif name == _RETENTION:
        yield from _retention_tensors(value)
    elif name in (_LORA, _LORA_WEIGHTS):
        yield from (_lora_tensors if name == _LORA else _lora_weight_tensors)(value)
    elif name == _TABLE:
        array = _table_array(value)
        yield _TABLE_TENSOR, _TABLE_TENSOR, array
        yield "prompt_vocab_size", "prompt_vocab_size", np.array([[array.shape[1]]], np.int32)
    elif name == _LOGIT_BIAS:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be token ids with what is added to their logits, got {value!r}")
        ids, values = f"{name}_ids", f"{name}_values"
        yield ids, ids, as_tensor(ids, list(value), np.int32, 1)
        yield values, values, as_tensor(values, list(value.values()), np.float32, 1)
    elif name == "embedding_bias" and isinstance(value, Mapping):
        words, weights = list(value), list(value.values())
        if not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"{name} must be texts with their weights, or an array [vocab_size], got {value!r}"
            )
        names = ("embedding_bias_words", "embedding_bias_weights")
        yield names[0], names[0], _text_array(words)
        yield names[1], names[1], as_tensor(names[1], weights, np.float32, 1)
    elif _OPTIONS[name].dtype is np.object_:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, got {value!r}")
        option = _OPTIONS[name]
        yield option.text_name, option.ids_name, _text_array([value])
    else:
        option = _OPTIONS[name]
        if option.ndim == 0:
            _check_scalar(name, value, option.dtype)
        given = value if option.ndim else [value]
        array = as_tensor(name, given, option.dtype, max(option.ndim, 1))
        yield option.text_name, option.ids_name, array


def _guide_tensors(guide: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of a Guide."""
    if not isinstance(guide, Guide):
        raise ValueError(f"{_GUIDE} must be a Guide such as Guide('regex', '[0-9]+'), got {guide!r}")
    yield f"{_GUIDED}_type", f"{_GUIDED}_type", _text_array([guide.type])
    if guide.text:
        yield _GUIDED, _GUIDED, _text_array([guide.text])


def _lora_tensors(lora: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensor of an adapter's name or task id."""
    if isinstance(lora, str):
        yield "lora_name", "lora_name", _text_array([lora])
    elif isinstance(lora, (int, np.integer)) and not isinstance(lora, bool):
        yield "lora_task_id", "lora_task_id", as_tensor("lora_task_id", [lora], np.uint64, 1)
    else:
        raise ValueError(f"{_LORA} must be an adapter's name or task id, got {lora!r}")


def _lora_weight_tensors(given: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of an adapter's weights; bfloat16 as uint16, the bits of each value."""
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"{_LORA_WEIGHTS} must be two arrays, (weights, config), got {type(given).__name__}")
    weights, config = (np.asarray(each) for each in given)
    # numpy has no bfloat16: the ml_dtypes type of that name, and the type of a loaded .npy file, hold its bits.
    if weights.dtype.name == "bfloat16" or weights.dtype == np.dtype("V2"):
        weights = weights.view(np.uint16)
    if weights.dtype not in (np.float16, np.float32, np.uint16):
        raise ValueError(f"{_LORA_WEIGHTS} must be float16, float32 or bfloat16, got {weights.dtype}")
    yield "lora_weights", "lora_weights", as_tensor("lora_weights", weights, weights.dtype.type, 2)
    yield "lora_config", "lora_config", as_tensor("lora_config", config, np.int32, 2)


def _table_array(table: Any) -> np.ndarray:
    """Return a table [1, rows, hidden_size] in its own type, if that has 16 or 32 bits; else as float16.

    Takes arrays of numpy and ml_dtypes, torch tensors on any device, and lists.
    """
    if hasattr(table, "detach"):
        table = table.detach().cpu()
        if str(table.dtype) == "torch.bfloat16":  # torch cannot convert it to an array
            import torch

            table = table.contiguous().view(torch.int16).numpy().view(BFLOAT16)
        else:
            table = table.numpy()
    if not isinstance(table, np.ndarray):
        return as_tensor(_TABLE, table, np.float16, 2)
    if table.dtype.name == "bfloat16":  # ml_dtypes'
        table = table.view(BFLOAT16)
    dtype = table.dtype if table.dtype in (BFLOAT16, np.float16, np.float32) else np.dtype(np.float16)
    return as_tensor(_TABLE, table, dtype, 2)


def _retention_tensors(ranges: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of ranges (start, end, priority) or (start, end, priority, duration_ms).

    None means no end, or no time limit.
    """
    given = list(ranges) if isinstance(ranges, Iterable) else [ranges]
    rows = [list(one) if isinstance(one, Iterable) else [] for one in given]
    if not all(len(row) in (3, 4) for row in rows):
        raise ValueError(
            f"{_RETENTION} must be ranges (start, end, priority) or (start, end, priority, duration_ms), "
            f"got {ranges!r}"
        )
    filled = [[-1 if value is None else value for value in (*row, None)[:4]] for row in rows]
    for part, values in zip(("starts", "ends", "priorities", "durations_ms"), zip(*filled, strict=True)):
        name = f"retention_token_range_{part}"
        yield name, name, as_tensor(name, list(values), np.int32, 1)


def _word_tensors(name: str, value: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of words. Texts and ids have different tensors, and may be mixed."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        array = as_tensor(name, value, np.int32, 2)
        if array.shape[1] != 2:
            raise ValueError(f"{name} must have two rows, shape [2, n] or [1, 2, n], got {list(value.shape)}")
        yield "", f"{name}_list", array
        return
    words = [value] if isinstance(value, str) else list(value)
    texts = [word for word in words if isinstance(word, str)]
    ids = [word for word in words if not isinstance(word, str)]
    if not all(isinstance(word, Iterable) and not isinstance(word, bytes) for word in ids):
        raise ValueError(
            f"{name} must be texts or lists of token ids, such as ['word', [5, 7]], got {value!r}"
        )
    if texts:
        yield name, name, _text_array(texts)
    if ids:
        yield "", f"{name}_list", pack_words(name, ids)


def pack_words(name: str, words: Sequence[Iterable[int]]) -> np.ndarray:
    """Pack words as [1, 2, n]: all ids, then the end of each word, padded with -1."""
    lists = [list(word) for word in words]
    flat = [token_id for word in lists for token_id in word]
    if not all(lists):
        raise ValueError(f"{name} has an empty word")
    for word in lists:
        if any(isinstance(token_id, Iterable) or token_id == -1 for token_id in word):
            raise ValueError(
                f"{name} has {word} for a word, but a word is a list of token ids such as [5, 7]; the server's "
                "layout, [2, n] or [1, 2, n], has to be a numpy array here"
            )
    ends = np.cumsum([len(word) for word in lists]).tolist()
    return as_tensor(name, [flat, [*ends, *[-1] * (len(flat) - len(ends))]], np.int32, 2)


def _text_array(texts: Sequence[str]) -> np.ndarray:
    return np.array([[text.encode() for text in texts]], dtype=np.object_)


def _check_scalar(name: str, value: Any, dtype: type[np.generic]) -> None:
    """Raise ValueError unless `value` is a number, or for a flag True, False, 1 or 0."""
    if np.ndim(value) != 0:
        raise ValueError(f"{name} must be a number, got {value!r}")
    if dtype is np.bool_ and (isinstance(value, str) or value not in (0, 1)):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _check_integers(name: str, values: Any, dtype: type[np.integer]) -> None:
    limits = np.iinfo(dtype)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        values = [values.min(), values.max()] if values.size else []
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    for value in flat:
        if not isinstance(value, (int, np.integer)):
            raise ValueError(f"{name} must be {'integers' if len(flat) > 1 else 'an integer'}, got {value!r}")
        if not limits.min <= value <= limits.max:
            raise ValueError(f"{name} must be in [{limits.min}, {limits.max}], got {value}")


def _first(tensors: Tensors, name: str, default: int) -> int:
    return int(tensors[name].flat[0]) if name in tensors else default
