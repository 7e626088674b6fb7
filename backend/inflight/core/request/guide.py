"""A guide: the format that a request demands of the generated text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from inflight.errors import InvalidArgument, Name, Unsupported

GUIDE_END = -2
"""The token sampled for a row whose guide allows nothing but the end, if its request has no end id; it ends the
sequence."""

_MAX_ALTERNATIVES = 1000
"""Largest number of alternatives in one rule of a grammar. llguidance accepts at most 2000."""

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

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Guide:
        """Return a grammar that matches exactly these texts; none of them may be empty."""
        rules: list[str] = []
        alternatives = [_quoted(choice) for choice in choices]
        while len(alternatives) > _MAX_ALTERNATIVES:
            parts = [
                alternatives[start : start + _MAX_ALTERNATIVES]
                for start in range(0, len(alternatives), _MAX_ALTERNATIVES)
            ]
            alternatives = [f"part{len(rules) + number}" for number in range(len(parts))]
            rules += [f"{part} ::= {' | '.join(texts)}" for part, texts in zip(alternatives, parts)]
        return cls(GuideKind.EBNF_GRAMMAR, "\n".join([f"root ::= {' | '.join(alternatives)}", *rules]))

    @classmethod
    def behind_reasoning(cls, begin: str, end: str, max_tokens: int, answer: Guide | None) -> Guide:
        """Return a guide that bounds a model's reasoning (`guided/reasoning_budget.py`).

        Args:
            begin: The text that opens reasoning; "": the text begins with reasoning.
            end: The text that ends it.
            max_tokens: Largest number of tokens of the reasoning.
            answer: The guide of the text after the reasoning, which then needs `begin` to be "".
        """
        asked = {"reasoning": {"begin": begin, "end": end, "max_tokens": max_tokens}}
        more = {} if answer is None else {"guide": {"type": answer.type.value, "guide": answer.text}}
        return cls(GuideKind.STRUCTURAL_TAG, json.dumps({**asked, **more}))

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


def _quoted(text: str) -> str:
    r"""Quote a text for a grammar, with control characters as \xNN, which both xgrammar and llguidance
    accept.

    xgrammar reads further hexadecimal digits after \xNN as part of the number, so a new literal begins after
    \xNN.
    """
    escaped = re.sub(r"[\x00-\x1f\x7f\"\\]", lambda found: f"\\x{ord(found[0]):02x}", text)
    escaped = re.sub(r"(\\x[0-9a-f]{2})(?=[0-9a-fA-F])", r'\1" "', escaped)
    return f'"{escaped}"'


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
