"""Converts the keywords of `generate` and `stream` to tensors, and finds the outputs that they request.

Knows nothing of connections. Plain functions; any thread.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight_client.controls import ALIASES
from inflight_client.guide import Guide
from inflight_client.keywords import (
    ADDITIONAL,
    CONTEXT_OUTPUT,
    GENERATION_OUTPUT,
    GUIDE,
    GUIDED,
    LOGIT_BIAS,
    LORA,
    LORA_WEIGHTS,
    NAMES,
    OPTIONS,
    RETENTION,
    TABLE,
    TABLE_TENSOR,
    WORDS,
)

Tensors = dict[str, np.ndarray]

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
            near = difflib.get_close_matches(keyword, [*NAMES, *ALIASES], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
            raise TypeError(f"unknown option {keyword!r}; {hint}")
        if value is None:
            continue
        if name == ADDITIONAL:
            additional = _additional_names(value)
            continue
        for text_name, ids_name, array in _tensors_of(name, value):
            ids[ids_name] = array
            if text_name:
                text[text_name] = array
            else:
                only_ids.append(name)
        if name in OPTIONS and OPTIONS[name].outputs and value:
            outputs += OPTIONS[name].outputs
    if LORA_WEIGHTS in ids and "lora_task_id" not in ids:
        raise ValueError(
            f"{LORA_WEIGHTS} are stored under a task id: {LORA} must be one, got {given.get(LORA)!r}"
        )
    beam_width = _first(ids, "beam_width", 1)
    if beam_width <= 1 and _first(ids, "num_return_sequences", 1) > 1:
        outputs.append("sequence_index")
    outputs += additional
    return Options(text, ids, tuple(outputs), tuple(only_ids), beam_width > 1, additional)


def _additional_names(value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for name in names:
        if not isinstance(name, str) or not name.startswith((CONTEXT_OUTPUT, GENERATION_OUTPUT)):
            raise ValueError(
                f"{ADDITIONAL} must be names of outputs, context_<name> or generation_<name>, got {name!r}"
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
        with np.errstate(over="raise"):
            array = np.asarray(values, dtype=dtype)
    except FloatingPointError:
        limit = np.finfo(np.dtype(dtype).name).max
        raise ValueError(f"{name} must be in [{-limit:.4g}, {limit:.4g}], got {values!r:.200}") from None
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
    if name in WORDS:
        yield from _word_tensors(name, value)
    elif name == GUIDE:
        yield from _guide_tensors(value)
    elif name == RETENTION:
        yield from _retention_tensors(value)
    elif name in (LORA, LORA_WEIGHTS):
        yield from (_lora_tensors if name == LORA else _lora_weight_tensors)(value)
    elif name == TABLE:
        array = _table_array(value)
        yield TABLE_TENSOR, TABLE_TENSOR, array
        yield "prompt_vocab_size", "prompt_vocab_size", np.array([[array.shape[1]]], np.int32)
    elif name == LOGIT_BIAS:
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{name} must be a dict by token id of what is added to the logits, got {value!r}"
            )
        ids, values = f"{name}_ids", f"{name}_values"
        yield ids, ids, as_tensor(ids, list(value), np.int32, 1)
        yield values, values, as_tensor(values, list(value.values()), np.float32, 1)
    elif name == "embedding_bias" and isinstance(value, Mapping):
        words, weights = list(value), list(value.values())
        if not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"{name} must be a dict of weights by text, or an array [vocab_size], got {value!r}"
            )
        names = ("embedding_bias_words", "embedding_bias_weights")
        yield names[0], names[0], _text_array(words)
        yield names[1], names[1], as_tensor(names[1], weights, np.float32, 1)
    elif OPTIONS[name].dtype == "object":
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, got {value!r}")
        option = OPTIONS[name]
        yield option.text_name, option.ids_name, _text_array([value])
    else:
        option = OPTIONS[name]
        dtype = np.dtype(option.dtype).type
        if option.ndim == 0:
            _check_scalar(name, value, dtype)
        given = value if option.ndim else [value]
        array = as_tensor(name, given, dtype, max(option.ndim, 1))
        yield option.text_name, option.ids_name, array


def _guide_tensors(guide: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of a Guide."""
    if not isinstance(guide, Guide):
        raise ValueError(f"{GUIDE} must be a Guide such as Guide('regex', '[0-9]+'), got {guide!r}")
    yield f"{GUIDED}_type", f"{GUIDED}_type", _text_array([guide.type])
    if guide.text:
        yield GUIDED, GUIDED, _text_array([guide.text])


def _lora_tensors(lora: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensor of an adapter's name or task id."""
    if isinstance(lora, str):
        yield "lora_name", "lora_name", _text_array([lora])
    elif isinstance(lora, (int, np.integer)) and not isinstance(lora, bool):
        yield "lora_task_id", "lora_task_id", as_tensor("lora_task_id", [lora], np.uint64, 1)
    else:
        raise ValueError(f"{LORA} must be an adapter's name or task id, got {lora!r}")


def _lora_weight_tensors(given: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of an adapter's weights; bfloat16 as uint16, the bits of each value."""
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"{LORA_WEIGHTS} must be two arrays, (weights, config), got {type(given).__name__}")
    weights, config = (np.asarray(each) for each in given)
    # numpy has no bfloat16: the ml_dtypes type of that name, and the type of a loaded .npy file, hold its bits.
    if weights.dtype.name == "bfloat16" or weights.dtype == np.dtype("V2"):
        weights = weights.view(np.uint16)
    if weights.dtype not in (np.float16, np.float32, np.uint16):
        raise ValueError(f"{LORA_WEIGHTS} must be float16, float32 or bfloat16, got {weights.dtype}")
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
        return as_tensor(TABLE, table, np.float16, 2)
    if table.dtype.name == "bfloat16":  # ml_dtypes'
        table = table.view(BFLOAT16)
    dtype = table.dtype if table.dtype in (BFLOAT16, np.float16, np.float32) else np.dtype(np.float16)
    return as_tensor(TABLE, table, dtype, 2)


def _retention_tensors(ranges: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the tensors of ranges (start, end, priority) or (start, end, priority, duration_ms).

    None means no end, or no time limit.
    """
    given = list(ranges) if isinstance(ranges, Iterable) else [ranges]
    rows = [list(one) if isinstance(one, Iterable) else [] for one in given]
    if not all(len(row) in (3, 4) for row in rows):
        raise ValueError(
            f"{RETENTION} must be ranges (start, end, priority) or (start, end, priority, duration_ms), "
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
    words = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
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
    is_text = isinstance(value, (str, bytes)) and issubclass(dtype, np.floating)
    if np.ndim(value) != 0 or is_text:
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
