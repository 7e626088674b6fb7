"""A guide: the format that a request demands of the generated text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.errors import InvalidArgument, Name, Unsupported

GUIDE_END = -2
"""The token sampled for a row whose guide allows nothing but the end, if its request has no end id; it ends the
sequence."""

NO_GUIDES = Unsupported(
    Name("guided_decoding_guide_type"),
    ": there is no tokenizer to follow guides with: the parameter tokenizer_dir names the folder of a "
    "tokenizer.json, which else is looked for beside the weights",
)
"""The error of requests with guides if the model has no tokenizer."""


class GuideKind(Enum):
    """TensorRT-LLM's `GuidedDecodingParams.GuideType`; the values are as in `guided_decoding_guide_type`."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on a request's text; TensorRT-LLM's `GuidedDecodingParams`.

    Attributes:
        type: The kind of guide. Tensor `guided_decoding_guide_type`.
        text: The schema, expression, grammar or tags; "" for the kind JSON. Tensor
            `guided_decoding_guide`.
    """

    type: GuideKind
    text: str = ""

    def validate(self) -> None:
        """Raise InvalidArgument if a JSON guide has a text or another guide has none."""
        if self.type is GuideKind.JSON and self.text:
            raise InvalidArgument(
                Name("guided_decoding_guide"),
                " must be left out where ",
                Name("guided_decoding_guide_type"),
                f" is json, got {len(self.text)} characters; a schema is of type json_schema",
            )
        if self.type is not GuideKind.JSON and not self.text:
            raise InvalidArgument(
                Name("guided_decoding_guide"),
                " is required where ",
                Name("guided_decoding_guide_type"),
                f" is {self.type.value}: it is missing or empty",
            )


@dataclass(frozen=True, slots=True)
class GuideEvent:
    """The event that a request's guide is ready or could not be compiled.

    Attributes:
        request_id: The request that waits for the guide.
        error_kind: The kind of error (`inflight.errors`) if compiling failed; "": the guide is ready.
        error: The error's message, in which names are marked.
    """

    request_id: int
    error_kind: str = ""
    error: str = ""
