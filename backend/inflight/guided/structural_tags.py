"""Structural tags: guides for free text in which certain beginnings must be followed by a value of a schema.

    {"structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}], "triggers": ["<function="]}

This is TensorRT-LLM's guide of type structural_tag. After a trigger is generated, the text must continue as
one of the structures whose begin starts with the trigger. Instead of triggers, this server also accepts

    "sequence": {"after": "</think>", "begin": "[", "separator": ", ", "end": "]", "only_one": false}

Then the text consists of a begin, one or more structures with a separator between them, and an end. With
`after`, all of this follows the first occurrence of the text `after`. All keys are optional: texts are empty
by default, and any number of structures is allowed. Any thread.
"""

from __future__ import annotations

import json
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
class Structure:
    """A structure that may follow a trigger.

    Attributes:
        begin: The text at the beginning, which begins with a trigger.
        schema: The JSON schema of the value that follows, as text.
        end: The text after the value.
        name: The structure's name in errors: the optional key `name`.
    """

    begin: str
    schema: str
    end: str
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
    """Read a guide.

    Raises:
        InvalidArgument: The guide has another form, a structure has no trigger, or a trigger has no
            structure.
    """
    try:
        parsed: Any = json.loads(text)
        structures = tuple(
            Structure(
                _text(one["begin"]),
                json.dumps(_schema(one["schema"])),
                _text(one["end"]),
                _text(one.get("name", "")),
            )
            for one in parsed["structures"]
        )
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
    structures = tuple(replace(one, schema=followed_schema(one.schema, one.path)) for one in read.structures)
    triggers = read.triggers
    if read.sequence is not None:
        return _sequence_as_lark(structures, read.sequence)
    special = {vocabulary.tokens[index].decode(errors="replace") for index in vocabulary.special_ids}
    if any(trigger in special for trigger in triggers) and not all(
        trigger in special for trigger in triggers
    ):
        raise InvalidArgument(
            Name("guided_decoding_guide"), " must have triggers that are all special tokens, or none"
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
    more = "" if sequence.only_one else f"({_quoted(sequence.separator)} one)*"
    before = "before SPACE" if sequence.after else ""
    rules = [
        "%llguidance {}",
        f"start: {before} {_quoted(sequence.begin)} one {more} {_quoted(sequence.end)}",
        f"one: {' | '.join(f'one_{index}' for index in range(len(structures)))}",
    ]
    if sequence.after:
        rules += [
            f"before[lazy]: /(.|\\n)*/ {_quoted(sequence.after)}",
            f"SPACE: /{SPACE_BEHIND}/",
        ]
    for index, one in enumerate(structures):
        rules.append(f"one_{index}: {_quoted(one.begin)} %json {one.schema} {_quoted(one.end)}")
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    """Return a text as a lark literal; "" for an empty text."""
    return json.dumps(text) if text else ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _schema(value: Any) -> Any:
    if isinstance(value, bool) or is_object(value):
        return value
    raise TypeError(f"{value!r} is no JSON schema")
