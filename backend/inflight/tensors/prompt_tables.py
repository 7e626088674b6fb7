"""The tensors of one prompt that say which embeddings stand for ids beyond the vocabulary."""

from __future__ import annotations

from inflight.arrays import to_prompt_table
from inflight.core.request.adapter import PromptTable
from inflight.errors import InvalidArgument, Name
from inflight.tensors.reader import TensorReader


def read_prompt_table(reader: TensorReader) -> PromptTable | None:
    """Return the rows that ids beyond the vocabulary stand for; None without any.

    Raises InvalidArgument if prompt_vocab_size is not their number, or not all numbers are finite.
    """
    array, num_rows = reader.array("prompt_embedding_table"), reader.integer("prompt_vocab_size")
    found = 0 if array is None else len(array)
    if num_rows is not None and num_rows != found:
        came = "is missing" if array is None else f"has {found} rows"
        raise InvalidArgument(
            Name("prompt_vocab_size"), f" is {num_rows}, but ", Name("prompt_embedding_table"), f" {came}"
        )
    return None if array is None else to_prompt_table(array, reader.shown_name("prompt_embedding_table"))


def read_extra_ids(reader: TensorReader, num_rows: int, length: int) -> tuple[int, ...]:
    """The extra ids of a text of `length` ids that begins with so many rows: the rows have one, the text has 0.

    A model of the other names takes one for each id.
    """
    if not reader.has_text_vocabulary:
        return tuple(reader.integers("prompt_table_extra_ids") or ())
    of_rows = reader.integer("prompt_table_extra_id") or 0
    return (of_rows,) * num_rows + (0,) * (length - num_rows) if of_rows and num_rows else ()
