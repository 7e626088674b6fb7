"""Structural tags: guides for free text in which certain beginnings must be followed by a value of a schema.

    {"structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}], "triggers": ["<function="]}

This is TensorRT-LLM's guide of type structural_tag. After a trigger is generated, the text must continue as
one of the structures whose begin starts with the trigger. Instead of triggers, this server also accepts

    "sequence": {"after": "</think>", "begin": "[", "separator": ", ", "end": "]", "only_one": false}

Then the text consists of a begin, one or more structures with a separator between them, and an end. With
`after`, all of this follows the first occurrence of the text `after`. All keys are optional: texts are empty
by default, and any number of structures is allowed. In place of a schema, a structure may have fields, which
follow each other in their order, with the text `separator` between them:

    {"begin": "f(", "end": ")", "separator": ", ", "fields": [
      {"begin": "a=", "schema": {…}, "end": "", "is_required": true}]}

A field without a schema has any text up to its end. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import llguidance

from inflight.errors import InvalidArgument, Name
from inflight.guided.schemas import followed_schema
from inflight.guided.vocabulary import GuideVocabulary
from inflight.json_values import is_object

_SHAPE = '{"structures": [{"begin": "…", "schema": {…}, "end": "…"}], "triggers": ["…"]}'

SPACE_BEHIND = "[ \\n]{0,2}"
"""White space allowed after a sequence's `after`, as a regular expression."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a structure.

    Attributes:
        begin: The text before the value.
        schema: The JSON schema of the value, as text; "": any text that does not contain `end`.
        end: The text after the value.
        is_required: Whether it may not be left out.
    """

    begin: str
    schema: str
    end: str
    is_required: bool


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure that may follow a trigger.

    Attributes:
        begin: The text at the beginning, which begins with a trigger.
        schema: The JSON schema of the value that follows, as text; "": fields follow.
        end: The text after the value.
        fields: The fields, in their order.
        separator: The text between two fields.
        name: The structure's name in errors: the optional key `name`.
    """

    begin: str
    schema: str
    end: str
    fields: tuple[Field, ...] = ()
    separator: str = ""
    name: str = ""

    @property
    def path(self) -> str:
        """Return the name of the schema's root in errors."""
        return f"the tool {self.name}, #" if self.name else f"the structure {self.begin!r}, #"


@dataclass(frozen=True, slots=True)
class TagSequence:
    """The form of a text that consists of structures only.

    Attributes:
        after: The text that ends the free text before the structures; "" if there is no free text.
        begin: Text before the first structure.
        separator: Text between two structures.
        end: Text after the last structure.
        only_one: Whether there is exactly one structure.
    """

    after: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    only_one: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """A structural_tag guide: with triggers, or as a sequence."""

    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]
    sequence: TagSequence | None


def read_tags(text: str) -> Tags:
    """Return the structures of a structural_tag guide, given its JSON text.

    Raises:
        InvalidArgument: The guide has another form, a structure has no trigger, or a trigger has no
            structure.
    """
    try:
        parsed: Any = json.loads(text)
        structures = tuple(_structure(one) for one in parsed["structures"])
        sequence = _sequence(parsed["sequence"]) if "sequence" in parsed else None
        triggers = tuple(_text(one) for one in parsed["triggers"]) if sequence is None else ()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidArgument(
            Name("guided_decoding_guide"),
            f" of type structural_tag must be like {_SHAPE}, got {text[:80]!r} ({error!r})",
        ) from None
    if not structures or not all(triggers):
        raise InvalidArgument(
            Name("guided_decoding_guide"), " must have at least one structure, and no empty trigger"
        )
    if sequence is None:
        _check_triggers(structures, triggers)
    elif "triggers" in parsed:
        raise InvalidArgument(
            Name("guided_decoding_guide"), " has both triggers and sequence, expected one of them"
        )
    return Tags(structures, triggers, sequence)


def _structure(given: Any) -> Structure:
    """Read a structure. Raises TypeError or KeyError if it has another form."""
    fields = tuple(_field(one) for one in given.get("fields", ()))
    schema = "" if "fields" in given else json.dumps(_schema(given["schema"]))
    return Structure(
        _text(given["begin"]),
        schema,
        _text(given["end"]),
        fields,
        _text(given.get("separator", "")),
        _text(given.get("name", "")),
    )


def _field(given: Any) -> Field:
    """Read a field. Raises TypeError or KeyError if it has another form."""
    schema = json.dumps(_schema(given["schema"])) if "schema" in given else ""
    if not schema and not given["end"]:
        raise TypeError("a field without a schema has no end")
    return Field(_text(given["begin"]), schema, _text(given["end"]), given.get("is_required", True) is True)


def _sequence(given: Any) -> TagSequence:
    """Read a sequence. Raises TypeError if it has another form or an unknown key."""
    sequence = TagSequence(**given)
    for text in (sequence.after, sequence.begin, sequence.separator, sequence.end):
        _text(text)
    if not isinstance(cast(Any, sequence.only_one), bool):
        raise TypeError(f"only_one is {sequence.only_one!r}")
    return sequence


def _check_triggers(structures: tuple[Structure, ...], triggers: tuple[str, ...]) -> None:
    for structure in structures:
        if not structure.begin.startswith(triggers or ("\0",)):
            raise InvalidArgument(
                Name("guided_decoding_guide"),
                f" has a structure that begins with none of its triggers: {structure.begin!r}",
            )
    for trigger in triggers:
        if not any(structure.begin.startswith(trigger) for structure in structures):
            raise InvalidArgument(
                Name("guided_decoding_guide"), f" has a trigger that begins no structure: {trigger!r}"
            )


def as_lark(text: str, vocabulary: GuideVocabulary) -> str:
    """Return the guide as llguidance's grammar.

    If a trigger is the spelling of a special token, it means this token.
    """
    read = read_tags(text)
    structures = tuple(_followed(one) for one in read.structures)
    triggers = read.triggers
    if read.sequence is not None:
        return _sequence_as_lark(structures, read.sequence)
    if any(not one.schema for one in structures):
        raise InvalidArgument(
            Name("guided_decoding_guide"), " has fields in a structure, which need a sequence, not triggers"
        )
    special = {vocabulary.tokens[index].decode(errors="replace") for index in vocabulary.special_ids}
    if any(trigger in special for trigger in triggers) and not all(
        trigger in special for trigger in triggers
    ):
        raise InvalidArgument(
            Name("guided_decoding_guide"), " must have either only special tokens as triggers, or none"
        )
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


def _sequence_as_lark(structures: tuple[Structure, ...], sequence: TagSequence) -> str:
    indexes = range(len(structures))
    # A separator and the beginning after it are one literal: the lexer could take it alone for that of `end`.
    next_ones = " | ".join(
        f"{_quoted(sequence.separator + structures[index].begin)} rest_{index}" for index in indexes
    )
    more = "" if sequence.only_one else f"({next_ones})*"
    before = "before SPACE" if sequence.after else ""
    ones = " | ".join(f"{_quoted(structures[index].begin)} rest_{index}" for index in indexes)
    rules = [
        "%llguidance {}",
        f"start: {before} {_quoted(sequence.begin)} ({ones}) {more} {_quoted(sequence.end)}",
    ]
    if sequence.after:
        rules += [
            f"before[lazy]: /(.|\\n)*/ {_quoted(sequence.after)}",
            f"SPACE: /{SPACE_BEHIND}/",
        ]
    for index, one in enumerate(structures):
        rules += _rest_as_lark(index, one)
    return "\n".join(rules) + "\n"


def _followed(one: Structure) -> Structure:
    """Return the structure with schemas that llguidance follows."""
    if one.schema:
        return replace(one, schema=followed_schema(one.schema, one.path))
    fields = tuple(
        replace(each, schema=followed_schema(each.schema, f"{one.path}, {each.begin.strip()}"))
        if each.schema
        else each
        for each in one.fields
    )
    return replace(one, fields=fields)


def _rest_as_lark(index: int, one: Structure) -> list[str]:
    """Return the rules of a structure after its beginning."""
    if one.schema:
        return [f"rest_{index}: %json {one.schema} {_quoted(one.end)}"]
    rules: list[str] = []
    for number, field in enumerate(one.fields):
        name = f"field_{index}_{number}"
        if field.schema:
            rules.append(f"{name}: {_quoted(field.begin)} %json {field.schema} {_quoted(field.end)}")
        else:
            rules.append(f"{name}: {_quoted(field.begin)} text_{index}_{number}")
            rules.append(f"text_{index}_{number}[lazy]: /(.|\\n)*/ {_quoted(field.end)}")
    choices = [
        " ".join(
            f"field_{index}_{first}" if number == first else _separated(one, index, number)
            for number in range(first, len(one.fields))
        )
        for first in first_fields(one.fields)
    ]
    may_be_empty = not any(field.is_required for field in one.fields)
    body = f"({' | '.join(choices)}){'?' if may_be_empty else ''}" if choices else ""
    return [f"rest_{index}: {body} {_quoted(one.end)}", *rules]


def _separated(one: Structure, index: int, number: int) -> str:
    """Return a field that follows another one, with the separator before it."""
    text = f"{_quoted(one.separator)} field_{index}_{number}"
    return text if one.fields[number].is_required else f"({text})?"


def first_fields(fields: Sequence[Field]) -> list[int]:
    """Return the indexes of the fields that may come first: those up to the first that is required."""
    required = next((index for index, each in enumerate(fields) if each.is_required), len(fields) - 1)
    return list(range(required + 1))


def _quoted(text: str) -> str:
    """Return a text as a lark literal; "" for an empty text."""
    return json.dumps(text) if text else ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _schema(value: Any) -> Any:
    if isinstance(value, bool) or is_object(value):
        return value
    raise TypeError(f"{value!r} is not a JSON schema")
