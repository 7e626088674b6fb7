"""Read one prompt's tables: embeddings of ids beyond the vocabulary (prompt tuning), and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from inflight.arrays import to_prompt_table, to_rotary_table
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.errors import InvalidArgument, Name
from inflight.tensors.reader import TensorReader

_ID_BYTES = 8


def read_prompt_table(reader: TensorReader) -> PromptTable | None:
    """Return the prompt's embedding table, [rows, hidden_size]; None if none was sent.

    Raises InvalidArgument if prompt_vocab_size is not the number of rows, or a value is not finite.
    """
    array, num_rows = reader.array("prompt_embedding_table"), reader.integer("prompt_vocab_size")
    found = 0 if array is None else len(array)
    if num_rows is not None and num_rows != found:
        came = "is missing" if array is None else f"has {found} rows"
        raise InvalidArgument(
            Name("prompt_vocab_size"), f" is {num_rows}, but ", Name("prompt_embedding_table"), f" {came}"
        )
    return None if array is None else to_prompt_table(array, reader.shown_name("prompt_embedding_table"))


def read_rotary_table(reader: TensorReader, num_tokens: int, rotary_dim: int) -> RotaryTable | None:
    """Return the rotary positions of a prompt of `num_tokens` tokens; None if none were sent.

    TensorRT-LLM's clients send a row for every position that the model has; rows after the prompt are not used.

    Raises InvalidArgument if only one of the two tensors came, or a value is not finite.
    """
    array, delta = reader.array("mrope_rotary_cos_sin"), reader.integer("mrope_position_deltas")
    table, offset = Name("mrope_rotary_cos_sin"), Name("mrope_position_deltas")
    if array is None:
        if delta:
            raise InvalidArgument(offset, f" is {delta}, but ", table, " is missing")
        return None
    if delta is None:
        raise InvalidArgument(offset, " is missing: send it with ", table)
    return to_rotary_table(array, delta, num_tokens, rotary_dim, reader.shown_name("mrope_rotary_cos_sin"))


def read_extra_ids(reader: TensorReader, num_rows: int, length: int) -> tuple[int, ...]:
    """Return one extra id for each of the `length` prompt ids of a text request.

    The first `num_rows` ids stand for rows of the prompt table and have the extra ids that the client sent;
    the following ids are text and have extra id 0.
    """
    if not reader.has_text_vocabulary:
        return tuple(reader.integers("prompt_table_extra_ids") or ())
    of_rows = reader.integer("prompt_table_extra_id") or 0
    return (of_rows,) * num_rows + (0,) * (length - num_rows) if of_rows and num_rows else ()


def read_picture_ids(reader: TensorReader, extra_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the extra ids of a text request with pictures, one for each prompt id, 0 for text.

    Prompts whose clients sent different ids for all rows (`prompt_table_extra_id`) then share no rows' KV blocks.

    Args:
        reader: The request's tensors.
        extra_ids: Ids that identify the pictures' content, 0 for text.
    """
    of_rows = reader.integer("prompt_table_extra_id") or 0
    if not of_rows:
        return tuple(extra_ids)
    return tuple(each and _id_of_both(each, of_rows) for each in extra_ids)


def _id_of_both(one: int, other: int) -> int:
    both = one.to_bytes(_ID_BYTES, "little") + other.to_bytes(_ID_BYTES, "little")
    return int.from_bytes(blake2b(both, digest_size=_ID_BYTES).digest(), "little") or 1
