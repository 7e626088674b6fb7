"""Structural tags: free text in which certain beginnings have to be followed by a schema and an end.

    {"structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}], "triggers": ["<function="]}

This is TensorRT-LLM's guide of type structural_tag. Wherever a trigger is generated, one of the structures that
begin with it has to follow. In place of triggers, this server also takes

    "sequence": {"after": "</think>", "begin": "[", "separator": ", ", "end": "]", "only_one": false}

Then the text is nothing but structures, one or more with a separator between them, behind a begin and before an
end. With `after`, they come behind the first place where this text stands. All keys may be left out: then these
are empty, and there may be many structures. Plain functions; any thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, cast

import llguidance

from inflight.errors import InvalidArgument
from inflight.guided.schemas import followed_schema
from inflight.guided.vocabulary import GuideVocabulary
from inflight.json_values import is_object

_SHAPE = '{"structures": [{"begin": "…", "schema": {…}, "end": "…"}], "triggers": ["…"]}'

SPACE_BEHIND = "[ \\n]{0,2}"
"""The white space that may stand behind a sequence's `after`, as a regular expression."""


@dataclass(frozen=True, slots=True)
class Structure:
    """One of the things that may follow a trigger.

    Attributes:
        begin: Its first text, which begins with a trigger.
        schema: The JSON schema of what follows, as text.
        end: The text behind that.
        name: What errors call it: the key `name` of a structure, which may be left out.
    """

    begin: str
    schema: str
    end: str
    name: str = ""

    @property
    def path(self) -> str:
        """The name of the schema's root in errors."""
        return f"the tool {self.name}, #" if self.name else f"the structure {self.begin!r}, #"


@dataclass(frozen=True, slots=True)
class TagSequence:
    """How structures follow each other where there is nothing else.

    Attributes:
        after: The text that ends what may come before them; "" if nothing may.
        begin: Text in front of the first.
        separator: Text between two of them.
        end: Text behind the last.
        only_one: Whether there is just one.
    """

    after: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    only_one: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """A guide of this type: with triggers, or as a sequence."""

    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]
    sequence: TagSequence | None


def read_tags(text: str) -> Tags:
    """Read a guide.

    Raises:
        InvalidArgument: It is of another shape; or a structure begins with no trigger, or a trigger begins none.
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
            f"guided_decoding_guide of type structural_tag must be like {_SHAPE}, got {text[:80]!r} ({error!r})"
        ) from None
    if not structures or not all(triggers):
        raise InvalidArgument("guided_decoding_guide must have at least one structure, and no empty trigger")
    if sequence is None:
        _check_triggers(structures, triggers)
    elif "triggers" in parsed:
        raise InvalidArgument("guided_decoding_guide has both triggers and sequence, expected one of them")
    return Tags(structures, triggers, sequence)


def _sequence(given: Any) -> TagSequence:
    """A sequence as the guide has it. Raises TypeError for what is none, also for an unknown key."""
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
                f"guided_decoding_guide has a structure that begins with none of its triggers: {structure.begin!r}"
            )
    for trigger in triggers:
        if not any(structure.begin.startswith(trigger) for structure in structures):
            raise InvalidArgument(
                f"guided_decoding_guide has a trigger that begins no structure: {trigger!r}"
            )


def as_lark(text: str, vocabulary: GuideVocabulary) -> str:
    """The guide as llguidance's grammar. A trigger that is a special token of the model is that token."""
    read = read_tags(text)
    structures = tuple(replace(one, schema=followed_schema(one.schema, one.path)) for one in read.structures)
    triggers = read.triggers
    if read.sequence is not None:
        return _sequence_as_lark(structures, read.sequence)
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
    """A text as lark has it; nothing for an empty one."""
    return json.dumps(text) if text else ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _schema(value: Any) -> Any:
    if isinstance(value, bool) or is_object(value):
        return value
    raise TypeError(f"{value!r} is no JSON schema")
