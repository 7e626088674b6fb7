"""Guided decoding with xgrammar, which uses pushdown automata.

It precomputes most masks, so compilation is slow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xgrammar
from numpy.typing import NDArray

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided.backend import MaskJob, Matcher, refusal
from inflight.guided.schemas.documents import refused
from inflight.guided.schemas.formats import FORMATS
from inflight.guided.schemas.overlap import is_same
from inflight.guided.schemas.spaces import KEYWORD, MAX_SPACES, Spaces, read_spaces
from inflight.guided.structural_tags import (
    SPACE_BEHIND,
    Field,
    Structure,
    TagSequence,
    first_fields,
    read_tags,
)
from inflight.guided.vocabulary import GuideVocabulary
from inflight.json_values import is_list, is_object
from inflight.processors import Processors

_ANY_JSON = '{"type": ["object", "array"]}'


class XGrammarMatcher:
    """Follows one text with xgrammar's compiled grammar; a `Matcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self.matcher = matcher

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self.matcher.accept_token(token_id):
                raise refusal(f"it does not allow token {token_id}")

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.matcher.fork())


class XGrammarBackend:
    """Compiles guides to matchers with xgrammar; a `GuideBackend`."""

    def __init__(self, vocabulary: GuideVocabulary) -> None:
        # xgrammar never allows an empty token, so special tokens, which have no text, are passed as empty.
        hidden = set(vocabulary.without_text())
        tokens = [b"" if index in hidden else token for index, token in enumerate(vocabulary.spelled())]
        self._info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[vocabulary.end_id]
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(Processors.here().num_threads)

    def compile(self, guide: Guide) -> bytes:
        """Compile the guide, and check it by computing its first mask."""
        try:
            compiled = self._compile(guide)
            matcher = xgrammar.GrammarMatcher(compiled)
            matcher.fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, self._info.vocab_size))
        except (RuntimeError, ValueError, TypeError) as error:
            raise refusal(f"xgrammar reports: {error}") from None
        return compiled.serialize_json().encode()

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        grammar = xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._info)
        return XGrammarMatcher(xgrammar.GrammarMatcher(grammar))

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        matchers = [job.matcher for job in jobs]
        own = [each.matcher for each in matchers if isinstance(each, XGrammarMatcher)]
        assert len(own) == len(jobs), "matchers of another backend"
        target = torch.from_numpy(masks)  # pyright: ignore[reportUnknownMemberType]  torch declares no array types
        if len(own) == 1:
            own[0].fill_next_token_bitmask(target, jobs[0].row)
        else:
            self._batch.batch_fill_next_token_bitmask(own, target, [job.row for job in jobs])
        return {}

    def _compile(self, guide: Guide) -> xgrammar.CompiledGrammar:
        if guide.type is GuideKind.JSON:
            return self._compiler.compile_json_schema(
                _ANY_JSON, strict_mode=False, max_whitespace_cnt=MAX_SPACES
            )
        if guide.type is GuideKind.JSON_SCHEMA:
            schema = json.loads(guide.text)
            _refuse_ignored(schema)
            spaces = read_spaces(schema, "#")
            if spaces.pattern:
                raise refusal("xgrammar takes no whitespace_pattern; the library llguidance does")
            return self._compiler.compile_json_schema(
                guide.text,
                strict_mode=False,
                any_whitespace=spaces.is_flexible,
                separators=None if spaces.is_flexible else (",", ":"),
                max_whitespace_cnt=MAX_SPACES if spaces.is_flexible else None,
            )
        if guide.type is GuideKind.REGEX:
            _refuse_ignored_in_regex(guide.text)
            return self._compiler.compile_regex(guide.text)
        if guide.type is GuideKind.EBNF_GRAMMAR:
            return self._compiler.compile_grammar(guide.text)
        return self._compiler.compile_structural_tag(_structural_tag(guide.text))


def _refuse_ignored(schema: Any) -> None:
    """Raise InvalidArgument for parts of a JSON schema that xgrammar accepts but does not enforce."""
    if is_list(schema):
        for each in schema:
            _refuse_ignored(each)
        return
    if not is_object(schema):
        return
    keywords = schema
    if ignored := _ignored(keywords):
        raise refusal(f"xgrammar does not enforce the keyword {ignored} of JSON schemas here")
    for keyword, value in keywords.items():
        if keyword == "pattern":
            _refuse_ignored_in_regex(str(value))
        if keyword in _NAMED:
            _refuse_ignored(list(value.values()) if is_object(value) else value)
        elif keyword not in _VALUES:
            _refuse_ignored(value)


def _ignored(schema: dict[str, Any]) -> str:
    """Return a keyword of this schema itself that xgrammar ignores; "" if there is none.

    Its parts are not checked.
    """
    found = [
        keyword
        for keyword, value in schema.items()
        if keyword in _IGNORED and not _asks_for_nothing(keyword, value)
    ]
    if "contains" in found and is_same(schema.get("minContains"), 0) and "maxContains" not in schema:
        found.remove("contains")
    if "format" in found and schema["format"] not in FORMATS:
        found.remove("format")
    asserted = {
        keyword for keyword in _TYPED & schema.keys() if not _asks_for_nothing(keyword, schema[keyword])
    }
    if "type" not in schema or {"$ref", "anyOf", "enum", "const"} & schema.keys():
        found += sorted(asserted)
    if "pattern" in schema:
        found += sorted(asserted & {"minLength", "maxLength"})
    if "properties" in schema:
        found += sorted(asserted & {"minProperties", "maxProperties"})
        required = schema.get("required", [])
        if not is_list(required) or set(map(str, required)) - set(schema["properties"]):
            found.append("required")
    reference = schema.get("$ref", "#")
    if reference != "#" and not str(reference).startswith("#/"):
        found.append("$ref")
    return found[0] if found else ""


def _asks_for_nothing(keyword: str, value: Any) -> bool:
    return any(is_same(value, each) for each in _NEUTRAL.get(keyword, ()))


def _refuse_ignored_in_regex(pattern: str) -> None:
    """Raise InvalidArgument for syntax that xgrammar interprets differently than Python and Rust."""
    if wrong := re.search(r"(?:^|[^\\])(?:\\\\)*(\\[A-Za-z])(?<![dDsSwWnrtfvxu])", pattern):
        raise refusal(f"xgrammar does not know {wrong[1]} in regular expressions")
    inner = pattern.removeprefix("^").removesuffix("$")
    inner = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", inner, flags=re.DOTALL)
    if "^" in inner or "$" in inner:
        raise refusal("xgrammar does not know ^ and $ within regular expressions, but around them only")


_IGNORED = frozenset(
    [
        *("not", "oneOf", "allOf", "if", "then", "else", "uniqueItems", "multipleOf", "format"),
        *("contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties", "dependencies", "$dynamicRef", "$recursiveRef"),
    ]
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Values without effect of each keyword."""
_TYPED = frozenset(
    [
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern"),
        *(
            "minItems",
            "maxItems",
            "items",
            "prefixItems",
            "additionalItems",
            "minProperties",
            "maxProperties",
        ),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
    ]
)
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const", "default", "examples", "title", "description", "required"))


def _structural_tag(text: str) -> xgrammar.StructuralTag:
    tags = read_tags(text)
    schemas = [(one, one.schema) for one in tags.structures]
    schemas += [(one, field.schema) for one in tags.structures for field in one.fields]
    for one, text in schemas:
        if not text:
            continue
        schema = json.loads(text)
        _refuse_ignored(schema)
        if read_spaces(schema, one.path) != Spaces():
            raise refused(
                f"{one.path}/{KEYWORD}",
                "xgrammar takes no white space setting in structural tags; the library llguidance does",
            )
    if tags.sequence is not None:
        return _sequence(tags.structures, tags.sequence)
    triggered = {
        "type": "triggered_tags",
        "triggers": list(tags.triggers),
        "tags": [_tag(one) for one in tags.structures],
    }
    return xgrammar.StructuralTag.model_validate({"type": "structural_tag", "format": triggered})


def _tag(one: Structure) -> dict[str, Any]:
    if one.schema:
        return {"type": "tag", "begin": one.begin, "content": _json(one.schema), "end": one.end}
    fields = [_field(each) for each in one.fields]
    choices: list[dict[str, Any]] = []
    for first in first_fields(one.fields):
        elements = [fields[first]]
        for field, each in zip(one.fields[first + 1 :], fields[first + 1 :]):
            following = [{"type": "const_string", "value": one.separator}, each] if one.separator else [each]
            if field.is_required:
                elements += following
            else:
                optional = {"type": "sequence", "elements": following}
                elements.append({"type": "optional", "content": optional})
        choices.append({"type": "sequence", "elements": elements})
    if not choices:
        end = {"type": "const_string", "value": one.end}
        return {"type": "tag", "begin": one.begin, "content": end, "end": ""}
    content: dict[str, Any] = {"type": "or", "elements": choices} if len(choices) > 1 else choices[0]
    if not any(field.is_required for field in one.fields):
        content = {"type": "optional", "content": content}
    return {"type": "tag", "begin": one.begin, "content": content, "end": one.end}


def _field(field: Field) -> dict[str, Any]:
    if not field.schema:
        return {"type": "tag", "begin": field.begin, "content": {"type": "any_text"}, "end": field.end}
    return {"type": "tag", "begin": field.begin, "content": _json(field.schema), "end": field.end}


def _json(schema: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json.loads(schema), "max_whitespace_cnt": MAX_SPACES}


def _sequence(structures: Iterable[Structure], sequence: TagSequence) -> xgrammar.StructuralTag:
    elements: list[dict[str, Any]] = []
    if sequence.after:
        before = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": sequence.after}
        elements += [before, {"type": "regex", "pattern": SPACE_BEHIND}]
    if sequence.begin:
        elements.append({"type": "const_string", "value": sequence.begin})
    elements.append(
        {
            "type": "tags_with_separator",
            "tags": [_tag(one) for one in structures],
            "separator": sequence.separator,
            "at_least_one": True,
            "stop_after_first": sequence.only_one,
        }
    )
    if sequence.end:
        elements.append({"type": "const_string", "value": sequence.end})
    return xgrammar.StructuralTag.model_validate(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    )
