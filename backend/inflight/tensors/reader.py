"""Read a request's input tensors by the names in the table of inputs.

Checks shapes and data types, resolves aliases, splits a batch into rows, and refuses tensors that are
declared but not implemented. Errors name the tensor. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inflight.errors import InvalidArgument, Name, RequestError, Unsupported
from inflight.tensors.spec import Neutral, NeutralRule, TensorSpec, TensorTable, Vocabulary

_Read = TypeVar("_Read")

NUMPY_TYPES: dict[str, type[np.generic]] = {
    "BF16": np.uint16,  # the bits of each number
    "BOOL": np.bool_,
    "BYTES": np.object_,
    "FP16": np.float16,
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
}
_DTYPES = {name: np.dtype(numpy_type) for name, numpy_type in NUMPY_TYPES.items()}


@dataclass(frozen=True, slots=True)
class _Sent:
    """One tensor that the client sent, with the name that the client used."""

    wire_name: str
    array: NDArray[Any]


class TensorReader:
    """The inputs of one request, or of one row of its batch.

    Methods take the main names of the table; errors use the client's name. An empty tensor counts as absent.
    Scalars may have any shape with one element. Arrays may begin with a batch dimension of 1 or lack it.

    Args:
        arrays: By the names that the client sent; strings are object arrays of bytes.
        table: The table of the inputs.
        vocabulary: The vocabulary of the client's names.
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], table: TensorTable, vocabulary: Vocabulary
    ) -> None:
        self._table = table
        self._vocabulary = vocabulary
        self._sent: dict[str, list[_Sent]] = {}
        self._unknown: list[str] = []
        for wire_name, array in arrays.items():
            # Triton refuses tensors that config.pbtxt does not declare; another config.pbtxt may declare more.
            if (spec := table.sent_as(wire_name, vocabulary)) is None:
                self._unknown.append(wire_name)
            else:
                self._sent.setdefault(spec.name, []).append(_Sent(wire_name, array))

    def rows(self) -> list[TensorReader]:
        """Return a reader for each prompt of the batch: row i of every tensor.

        Raises InvalidArgument if tensors differ in their numbers of rows; Triton refuses most of these
        requests.
        """
        sizes = {
            sent.wire_name: _num_rows(sent.array, self._table[name])
            for name, found in self._sent.items()
            for sent in found
            if sent.array.size
        }
        most = max(sizes.values(), default=1)
        for wire_name, size in sizes.items():
            if size != most:
                larger = next(name for name in sizes if sizes[name] == most)
                raise InvalidArgument(
                    Name(wire_name),
                    f" has {size} rows and ",
                    Name(larger),
                    f" has {most}: a batch has one row for each prompt",
                )
        return [self] if most == 1 else [self._with(partial(_row, index)) for index in range(most)]

    def _with(self, change: Callable[[NDArray[Any], TensorSpec], NDArray[Any]]) -> TensorReader:
        """Return a reader of the same tensors with changed arrays."""
        reader = TensorReader({}, self._table, self._vocabulary)
        reader._unknown = self._unknown
        reader._sent = {
            name: [_Sent(sent.wire_name, change(sent.array, self._table[name])) for sent in found]
            for name, found in self._sent.items()
        }
        return reader

    def shown_name(self, name: str) -> str:
        """Return the name that the client used for the tensor `name`.

        A name that is not in the table is unchanged.
        """
        return self.client_names()(name)

    def client_names(self) -> Callable[[str], str]:
        """Return `shown_name` as a function that does not hold this reader's arrays."""
        sent = {name: found[0].wire_name for name, found in self._sent.items()}
        return partial(_shown_name, self._table, self._vocabulary, sent)

    @property
    def has_text_vocabulary(self) -> bool:
        """Whether the client uses the tensor names of `ensemble`."""
        return self._vocabulary is Vocabulary.TEXT

    def integer(self, name: str) -> int | None:
        """Return a scalar INT32 or UINT64; a BOOL is returned as 1 or 0. None if absent."""
        value = self._scalar(name)
        if value is not None and value.dtype == np.bool_:
            return int(_is_true(value))
        return None if value is None else int(value.item())

    def real(self, name: str) -> float | None:
        """Return a scalar FP32, which may be NaN or infinite; None if absent."""
        value = self._scalar(name)
        return None if value is None else float(value.item())

    def value(self, name: str) -> int | float | tuple[int, ...] | tuple[float, ...] | None:
        """Return a scalar as a number, or a one-dimensional array as a tuple of numbers; None if absent."""
        spec = self._table[name]
        if not spec.scalar:
            array = self.array(name)
            return None if array is None else tuple(array.tolist())
        return self.real(name) if spec.dtype == "FP32" else self.integer(name)

    def boolean(self, name: str) -> bool | None:
        """Return a scalar BOOL; None if absent.

        Every byte except 0 is true, because load generators send random bytes.
        """
        value = self._scalar(name)
        return None if value is None else _is_true(value)

    def text(self, name: str) -> str | None:
        """Return a scalar BYTES as UTF-8; None if absent."""
        value = self._scalar(name)
        return None if value is None else decode_utf8(value.item(), self.shown_name(name))

    def texts(self, name: str) -> list[str]:
        """Return the elements of a BYTES array as UTF-8, in order; empty if absent."""
        array = self.array(name)
        return [] if array is None else [decode_utf8(raw, self.shown_name(name)) for raw in array.tolist()]

    def text_sizes(self, name: str) -> list[int]:
        """Return the size in bytes of each element of a BYTES tensor.

        Returns an empty list if the tensor is absent or not BYTES.
        """
        return [
            len(raw)
            for sent in self._sent.get(name, ())
            if sent.array.dtype == np.object_
            for raw in sent.array.ravel().tolist()
        ]

    def detached(self) -> TensorReader:
        """Return a reader with copies of the arrays, for use after Triton has freed the request's tensors."""
        return self._with(lambda array, _: array.copy())

    def array(self, name: str) -> NDArray[Any] | None:
        """Return an array without the batch dimension; None if absent or empty."""
        found = self._find(self._table[name])
        return None if found is None else _without_batch(found, self._table[name])

    def integers(self, name: str) -> list[int] | None:
        """Return the numbers of a one-dimensional array; None if absent or empty."""
        array = self.array(name)
        return None if array is None else array.tolist()

    def refuse_unbuilt(self) -> None:
        """Raise Unsupported if there is an unknown tensor, or a tensor that enables an unimplemented feature."""
        if self._unknown:
            raise Unsupported(
                Name(self._unknown[0]),
                " is declared in config.pbtxt, but this model does not know it: leave it out",
            )
        for name in self._sent:
            spec = self._table[name]
            if spec.neutral is None:
                continue
            found = self._find(spec)
            if found is not None and not self._asks_for_nothing(found.array, spec.neutral):
                because = f", because {spec.reason}" if spec.reason else ""
                raise Unsupported(
                    Name(found.wire_name),
                    f" is not available in this version{because}: got {_shown(found.array)}, "
                    f"expected it {spec.asks_for_nothing}",
                )

    def _asks_for_nothing(self, array: NDArray[Any], neutral: Neutral) -> bool:
        if neutral.rule is NeutralRule.PAD_ID:
            return array.size == 1 and array.item() == self.integer("pad_id")
        return is_neutral(array, neutral)

    def _scalar(self, name: str) -> NDArray[Any] | None:
        found = self._find(self._table[name])
        if found is None:
            return None
        if found.array.size > 1:
            raise _batch_refused(found)
        return found.array.reshape(1)

    def _find(self, spec: TensorSpec) -> _Sent | None:
        """Return the tensor that was sent under any name of this table row; None if absent or empty.

        Raises InvalidArgument for a wrong data type, or if two names were sent with different values.
        """
        found = [sent for sent in self._sent.get(spec.name, ()) if sent.array.size]
        for sent in found:
            dtypes = (spec.dtype, *spec.other_dtypes)
            if sent.array.dtype not in [_DTYPES[dtype] for dtype in dtypes]:
                raise InvalidArgument(
                    Name(sent.wire_name), f" must be {' or '.join(dtypes)}, got {sent.array.dtype}"
                )
        for other in found[1:]:
            if not np.array_equal(other.array.ravel(), found[0].array.ravel()):
                raise InvalidArgument(
                    Name(found[0].wire_name),
                    f" is {_shown(found[0].array)} but ",
                    Name(other.wire_name),
                    f" is {_shown(other.array)}: they are two names of one tensor, send one of them",
                )
        return found[0] if found else None


def _shown_name(table: TensorTable, vocabulary: Vocabulary, sent: Mapping[str, str], name: str) -> str:
    if name in sent or name not in table:
        return sent.get(name, name)
    return (*table[name].names(vocabulary), name)[0]


def each_row(readings: Sequence[Callable[[], _Read]]) -> list[_Read]:
    """Call each function, which reads one row of a batch. If there are several rows, an error names the row."""
    results: list[_Read] = []
    for index, read in enumerate(readings):
        try:
            results.append(read())
        except RequestError as error:
            if len(readings) == 1:
                raise
            raise type(error)(f"row {index} of the batch: ", *error.args) from None
    return results


def _is_true(array: NDArray[Any]) -> bool:
    """Return whether a BOOL array has a non-zero byte.

    Bytes other than 0 and 1 may occur, which numpy does not expect.
    """
    return bool(array.view(np.uint8).any())


def is_neutral(array: NDArray[Any], neutral: Neutral) -> bool:
    """Return whether a non-empty tensor is neutral, that is, has no effect."""
    if neutral.rule is NeutralRule.VALUES:
        raw = array.view(np.uint8) if array.dtype == np.bool_ else array
        return bool(np.isin(raw, np.asarray(neutral.values).astype(raw.dtype)).all())
    return neutral.rule is NeutralRule.NO_TEXT and not any(array.ravel())


def decode_utf8(raw: bytes | str, name: str) -> str:
    """Return an element of a BYTES tensor as text.

    Raises InvalidArgument with the tensor's name and the first byte that is not UTF-8.
    """
    if isinstance(raw, str):
        return raw
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            Name(name),
            f" must be UTF-8 text; byte {raw[error.start]:#04x} at position {error.start} is not",
        ) from None


def _num_rows(array: NDArray[Any], spec: TensorSpec) -> int:
    """Return the number of rows of a batch; 1 without a batch dimension.

    Returns 1 for a wrong shape too: reading the tensor raises the error.
    """
    if spec.scalar:
        return array.size
    return array.shape[0] if array.ndim == len(spec.dims) + 1 else 1


def _row(index: int, array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    if not array.size:
        return array
    return array.reshape(-1)[index : index + 1] if spec.scalar else array[index : index + 1]


def _without_batch(sent: _Sent, spec: TensorSpec) -> NDArray[Any]:
    array, rank = sent.array, len(spec.dims)
    if array.ndim == rank + 1:
        if array.shape[0] != 1:
            raise _batch_refused(sent)
        array = array[0]
    if array.ndim != rank or any(want not in (-1, got) for want, got in zip(spec.dims, array.shape)):
        raise InvalidArgument(
            Name(sent.wire_name), f" must have shape {spec.wire_shape}, got {list(array.shape)}"
        )
    return array


def _batch_refused(sent: _Sent) -> Unsupported:
    return Unsupported(
        Name(sent.wire_name),
        f" has shape {list(sent.array.shape)}: this takes one at a time. "
        f"Send {sent.array.shape[0]} separate requests; they run in one batch all the same",
    )


def _shown(array: NDArray[Any]) -> str:
    """Format an array for a message: a single element, or data type, shape and the first few elements."""
    first = [_readable(value) for value in array.ravel()[:4].tolist()]
    if array.size == 1:
        return repr(first[0])
    more = ", …" if array.size > len(first) else ""
    return f"{array.dtype} {list(array.shape)} [{', '.join(map(str, first))}{more}]"


def _readable(value: object) -> object:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
