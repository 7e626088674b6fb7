"""Structural tags: free text in which certain beginnings have to be followed by a schema and an end.

    {"structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}], "triggers": ["<function="]}

This is TensorRT-LLM's guide of type structural_tag. Wherever a trigger is generated, one of the structures that
begin with it has to follow. Plain functions; any thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import llguidance

from inflight.errors import InvalidArgument
from inflight.guided.vocabulary import GuideVocabulary

_SHAPE = '{"structures": [{"begin": "…", "schema": {…}, "end": "…"}], "triggers": ["…"]}'


@dataclass(frozen=True, slots=True)
class Structure:
    """One of the things that may follow a trigger.

    Attributes:
        begin: Its first text, which begins with a trigger.
        schema: The JSON schema of what follows, as text.
        end: The text behind that.
    """

    begin: str
    schema: str
    end: str


def read_tags(text: str) -> tuple[tuple[Structure, ...], tuple[str, ...]]:
    """The structures of a guide, and its triggers.

    Raises:
        InvalidArgument: It is of another shape; or a structure begins with no trigger, or a trigger begins none.
    """
    try:
        parsed: Any = json.loads(text)
        structures = tuple(
            Structure(_text(one["begin"]), json.dumps(_schema(one["schema"])), _text(one["end"]))
            for one in parsed["structures"]
        )
        triggers = tuple(_text(one) for one in parsed["triggers"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidArgument(
            f"guided_decoding_guide of type structural_tag must be like {_SHAPE}, got {text[:80]!r} ({error!r})"
        ) from None
    if not structures or not all(triggers):
        raise InvalidArgument("guided_decoding_guide must have at least one structure, and no empty trigger")
    for structure in structures:
        if not structure.begin.startswith(triggers or ("\0",)):
            raise InvalidArgument(
                f"guided_decoding_guide has a structure that begins with none of its triggers: {structure.begin!r}"
            )
    for trigger in triggers:
        if not any(structure.begin.startswith(trigger) for structure in structures):
            raise InvalidArgument(
                f"guided_decoding_guide has a trigger that begins no structure: {trigger!r}"
            )
    return structures, triggers


def as_lark(text: str, vocabulary: GuideVocabulary) -> str:
    """The guide as llguidance's grammar. A trigger that is a special token of the model is that token."""
    structures, triggers = read_tags(text)
    for one in structures:
        refuse_misread(json.loads(one.schema))
    special = {vocabulary.tokens[index].decode(errors="replace") for index in vocabulary.special_ids}
    if any(trigger in special for trigger in triggers) and not all(
        trigger in special for trigger in triggers
    ):
        raise InvalidArgument("guided_decoding_guide must have triggers that are all special tokens, or none")
    tags = [
        llguidance.StructTag(
            trigger=next(trigger for trigger in triggers if one.begin.startswith(trigger)),
            begin=one.begin,
            grammar=one.schema,
            end=one.end,
        )
        for one in structures
    ]
    return llguidance.StructTag.to_grammar(tags, assume_special=triggers[0] in special)


def refuse_misread(schema: Any) -> None:
    """Raise InvalidArgument for what llguidance takes in a JSON schema and follows in a way of its own.

    It rounds integers as float64 does, and lets `x-guidance` ask for texts that are no JSON.
    """
    if isinstance(schema, int) and abs(schema) > _LARGEST:
        raise InvalidArgument(
            f"guided_decoding_guide has the number {schema}, expected at most {_LARGEST} in magnitude"
        )
    if isinstance(schema, list):
        for each in cast(list[Any], schema):
            refuse_misread(each)
    if not isinstance(schema, dict):
        return
    for keyword, value in cast(dict[str, Any], schema).items():
        if keyword == "x-guidance":
            raise InvalidArgument("guided_decoding_guide has the keyword x-guidance, which is not supported")
        is_named = keyword in _NAMED and isinstance(value, dict)
        refuse_misread(list(cast(dict[str, Any], value).values()) if is_named else value)


_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LARGEST = 2**53


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise TypeError(f"{value!r} is no JSON schema")
    return value
