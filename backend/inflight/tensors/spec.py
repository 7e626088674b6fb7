"""The specification of a tensor: names, data type, shape, and neutral values, which have no effect.

A TensorSpec is one row of the tables of tensors. This module imports neither numpy nor Triton, so that
config.pbtxt can be generated anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Vocabulary(Enum):
    """The two sets of tensor names: the names of `tensorrt_llm`, and the names of `ensemble`."""

    TOKENS = "tokens"
    TEXT = "text"


class NeutralRule(Enum):
    """How to recognize a neutral tensor, which has no effect. An empty tensor is always neutral."""

    EMPTY = "it has no elements"
    VALUES = "every element is one of `values`"
    NO_TEXT = "every string is empty"
    PAD_ID = "it is the request's pad_id alone"


@dataclass(frozen=True, slots=True)
class Neutral:
    """The values of an unimplemented feature's tensor that are accepted, because they do not enable the feature.

    Attributes:
        rule: How to recognize these values.
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


NO_ENCODER = "no model here has an encoder"
NO_VIDEO = "videos are not encoded"
"""Reasons why tensors of other models are refused."""

EMPTY = Neutral(NeutralRule.EMPTY)
NO_TEXT = Neutral(NeutralRule.NO_TEXT)


class InStream(Enum):
    """Content of an output in each response of a stream.

    A stream of a beam search always has everything so far.
    """

    NEW = "the new tokens only"
    SO_FAR = "everything so far"
    SAME = "the same in each"
    FIRST = "only in the first response of each sequence"
    LAST = "only in the last response of the prompt"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One row of a table of tensors.

    Attributes:
        name: Main name, as in TensorRT-LLM's specification.
        dtype: Triton's data type, as in config.pbtxt: BF16, BOOL, BYTES, FP16, FP32, INT32, INT64, UINT8 or
            UINT64.
        dims: Shape of one request's tensor without the batch dimension, -1 for any length. () is a scalar: [1, 1]
            on the wire, [1] in the model.
        meaning: One line of explanation for readers of config.pbtxt.
        aliases: Other names of the same tensor.
        text_names: Names in the text vocabulary, the main one first; empty if the tensor is not in it.
        neutral: None for a tensor that is implemented. Otherwise only these values are accepted.
        reason: For such a tensor: why other values are refused, for messages.
        asked_by: For an output: the input that requests it; "" if it is always returned.
        other_dtypes: For an input: other data types that a config.pbtxt may declare instead of `dtype`.
        text_only: Whether only the text vocabulary has the tensor; then `text_names` includes `name`.
        in_stream: For an output: its content in each response of a stream; None if streams do not have it.
        is_batched: Whether the tensor has a batch dimension on the wire; otherwise it is flat.
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
    reason: str = ""

    @property
    def built(self) -> bool:
        """Whether this version implements the tensor."""
        return self.neutral is None

    @property
    def asks_for_nothing(self) -> str:
        """How to send a tensor of an unimplemented feature, for messages: "left out", "left out or 0"."""
        # Triton cannot send an empty tensor with a fixed shape.
        is_left_out = self.neutral is None or (self.neutral.rule is NeutralRule.EMPTY and -1 not in self.dims)
        return "left out" if is_left_out else f"left out or {self.neutral}"

    @property
    def scalar(self) -> bool:
        """Whether the tensor is a scalar: one value per prompt."""
        return self.dims == ()

    @property
    def wire_shape(self) -> str:
        """The shape on the wire, for messages: [1, 1], [1, n], [1, 2, n]."""
        lengths = ["n" if length == -1 else str(length) for length in self.dims or (1,)]
        return f"[{', '.join(['1', *lengths] if self.is_batched else lengths)}]"

    def names(self, vocabulary: Vocabulary) -> tuple[str, ...]:
        """Return all names of the tensor in this vocabulary, the main name first; empty if it has none."""
        if vocabulary is Vocabulary.TEXT:
            return self.text_names
        return () if self.text_only else (self.name, *self.aliases)


def of_other_models(
    name: str, dtype: str, dims: tuple[int, ...], meaning: str, reason: str = ""
) -> TensorSpec:
    """Return a tensor of models that are not supported here, such as image models.

    Clients may only leave it out.
    """
    neutral = NO_TEXT if dtype == "BYTES" else EMPTY
    return TensorSpec(name, dtype, dims, meaning, neutral=neutral, reason=reason)


class TensorTable:
    """An immutable table of TensorSpecs with distinct names, which are found by name."""

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.specs = specs
        self._by_name = {spec.name: spec for spec in specs}
        self._by_wire_name = {vocabulary: dict(self.declared(vocabulary)) for vocabulary in Vocabulary}

    def __getitem__(self, name: str) -> TensorSpec:
        """Return the row with this main name; raise KeyError if there is none."""
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        """Return whether there is a row with this main name."""
        return name in self._by_name

    def sent_as(self, wire_name: str, vocabulary: Vocabulary) -> TensorSpec | None:
        """Return the row with this name or alias in this vocabulary; None if there is none."""
        return self._by_wire_name[vocabulary].get(wire_name)

    def declared(self, vocabulary: Vocabulary) -> list[tuple[str, TensorSpec]]:
        """Return (name, row) for each name and alias that a model with this vocabulary declares."""
        return [(name, spec) for spec in self.specs for name in spec.names(vocabulary)]
