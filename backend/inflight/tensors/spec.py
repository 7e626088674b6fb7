"""The specification of a tensor: its names, data type and shape, and the values that ask for nothing.

The tables of tensors are made of these. Knows neither numpy nor Triton's Python objects, so that config.pbtxt can
be written from the tables anywhere. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Vocabulary(Enum):
    """The two sets of names that tensors go by: `tensorrt_llm`'s and `ensemble`'s."""

    TOKENS = "tokens"
    TEXT = "text"


class NeutralRule(Enum):
    """How to recognize a tensor that asks for nothing; an empty tensor always does."""

    EMPTY = "it has no elements"
    VALUES = "every element is one of `values`"
    NO_TEXT = "every string is empty"
    PAD_ID = "it is the request's pad_id alone"


@dataclass(frozen=True, slots=True)
class Neutral:
    """The values with which a tensor that is not built yet may still be sent.

    Attributes:
        rule: How to recognize them.
        values: For NeutralRule.VALUES; compared in the tensor's own precision.
    """

    rule: NeutralRule
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.rule is NeutralRule.VALUES:
            return " or ".join("false" if value is False else f"{value:.10g}" for value in self.values)
        return {
            NeutralRule.EMPTY: "an empty tensor",
            NeutralRule.NO_TEXT: '""',
            NeutralRule.PAD_ID: "the pad_id alone",
        }[self.rule]


EMPTY = Neutral(NeutralRule.EMPTY)
NO_TEXT = Neutral(NeutralRule.NO_TEXT)


class InStream(Enum):
    """The content of an output in each response of a stream; with streamed beams, all so far in every output."""

    NEW = "the new tokens'"
    SO_FAR = "all so far"
    SAME = "the same in each"
    FIRST = "in the first of each sequence alone"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One row of a table of tensors.

    Attributes:
        name: The specification's name, letter for letter.
        dtype: Triton's data type, as in config.pbtxt: BF16, BOOL, BYTES, FP16, FP32, INT32, INT64, UINT8 or
            UINT64.
        dims: Shape of one request's tensor without the batch dimension, -1 for any length. () is a scalar: [1, 1]
            on the wire, [1] in the model.
        meaning: One line for the reader of config.pbtxt.
        aliases: Other names of the same tensor.
        text_names: Its names in the text vocabulary, the main one first; none if that has no such tensor.
        neutral: None for a tensor that is built. Otherwise any other value than these is refused.
        asked_by: Of an output: the input that asks for it; "" for one that always comes.
        other_dtypes: Of an input: more data types that it is read in, for a config.pbtxt that declares it so.
        text_only: Whether the text vocabulary alone has it; then `text_names` has `name`.
        in_stream: Of an output: what each response of a stream has in it; None for one that is in no stream.
        is_batched: Whether it has a batch dimension on the wire; one that has none is flat.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    meaning: str
    aliases: tuple[str, ...] = ()
    text_names: tuple[str, ...] = ()
    neutral: Neutral | None = None
    asked_by: str = ""
    other_dtypes: tuple[str, ...] = ()
    text_only: bool = False
    in_stream: InStream | None = None
    is_batched: bool = True

    @property
    def built(self) -> bool:
        """Whether this version acts on the tensor."""
        return self.neutral is None

    @property
    def asks_for_nothing(self) -> str:
        """How to send a tensor that is not built, as text for people: "left out", "left out or 0"."""
        # Triton carries no empty tensor of a fixed shape.
        is_left_out = self.neutral is None or (self.neutral.rule is NeutralRule.EMPTY and -1 not in self.dims)
        return "left out" if is_left_out else f"left out or {self.neutral}"

    @property
    def scalar(self) -> bool:
        """Whether one request carries one value of it."""
        return self.dims == ()

    @property
    def wire_shape(self) -> str:
        """The shape on the wire, as text for messages: [1, 1], [1, n], [1, 2, n]."""
        lengths = ["n" if length == -1 else str(length) for length in self.dims or (1,)]
        return f"[{', '.join(['1', *lengths] if self.is_batched else lengths)}]"

    def names(self, vocabulary: Vocabulary) -> tuple[str, ...]:
        """Every name a client may use, the main one first; empty if the vocabulary has no such tensor."""
        if vocabulary is Vocabulary.TEXT:
            return self.text_names
        return () if self.text_only else (self.name, *self.aliases)


def of_other_models(name: str, dtype: str, dims: tuple[int, ...], meaning: str) -> TensorSpec:
    """Return a tensor that only models of other kinds have, for images for instance."""
    return TensorSpec(name, dtype, dims, meaning, neutral=NO_TEXT if dtype == "BYTES" else EMPTY)


class TensorTable:
    """Rows with distinct names, found by name. Immutable."""

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.specs = specs
        self._by_name = {spec.name: spec for spec in specs}
        self._by_wire_name = {vocabulary: dict(self.declared(vocabulary)) for vocabulary in Vocabulary}

    def __getitem__(self, name: str) -> TensorSpec:
        """Return the row of that (main) name; KeyError if there is none."""
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        """Return whether there is a row of that (main) name."""
        return name in self._by_name

    def sent_as(self, wire_name: str, vocabulary: Vocabulary) -> TensorSpec | None:
        """Return the row that a client of this vocabulary means, aliases included; None if there is none."""
        return self._by_wire_name[vocabulary].get(wire_name)

    def declared(self, vocabulary: Vocabulary) -> list[tuple[str, TensorSpec]]:
        """(name on the wire, row) of everything a model with this vocabulary declares, aliases included."""
        return [(name, spec) for spec in self.specs for name in spec.names(vocabulary)]
