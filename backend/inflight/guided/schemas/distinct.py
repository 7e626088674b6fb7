"""Enforce uniqueItems, which a grammar cannot express, by checking a text while it is generated.

`Places` finds the places of a document where `uniqueItems` is true. An `ItemWatch` reads one text byte by
byte, stores the items of such arrays, and returns the bytes that would complete an equal item, which are
then banned. If alternatives disagree about uniqueItems, items must differ: this excludes some valid texts,
but allows no invalid ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, cast

from inflight.guided.schemas.documents import Document, Node, keywords_of
from inflight.guided.schemas.overlap import distinct_key
from inflight.json_values import is_object

_SPACE, _ENDS = b" \t\r\n", b",]} \t\r\n"
_QUOTE, _BACKSLASH = b'"\\'
_CLOSED = (b'"', b"]", b"}")
"""The bytes that end a string, an array or an object, so that no further byte can extend the value."""


class Places:
    """The Places of a document, which are computed on demand. Used by one thread at a time."""

    def __init__(self, text: str) -> None:
        self._document = Document(json.loads(text))
        self._known: dict[frozenset[tuple[str, str]], Place] = {}
        self.root = self.place([self._document.root])

    def place(self, nodes: Iterable[Node]) -> Place:
        """Return the Place of a value for which these schemas hold, and all that they include (allOf, $ref, …)."""
        found: dict[tuple[str, str], Node] = {}
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if not is_object(node.value) or node.place in found:
                continue
            found[node.place] = node
            waiting += self._parts_in_place(node, keywords_of(node))
        key = frozenset(found)
        if key not in self._known:
            self._known[key] = Place(self, [(node, keywords_of(node)) for node in found.values()])
        return self._known[key]

    def _parts_in_place(self, node: Node, words: Mapping[str, Any]) -> list[Node]:
        parts = [
            node.inside(each, keyword, index)
            for keyword in ("allOf", "anyOf", "oneOf")
            for index, each in enumerate(cast(list[Any], words.get(keyword, [])))
        ]
        parts += [
            node.inside(words[keyword], keyword) for keyword in ("if", "then", "else") if keyword in words
        ]
        dependent = cast(dict[str, Any], words.get("dependentSchemas", {}))
        parts += [node.inside(each, "dependentSchemas", name) for name, each in dependent.items()]
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in words:
                parts.append(self._document.target(node, keyword, words[keyword]))
        return parts


class Place:
    """The place of a value in a document: the schemas that may apply to it, and the places inside it."""

    def __init__(self, places: Places, schemas: list[tuple[Node, dict[str, Any]]]) -> None:
        self._places = places
        self._schemas = schemas
        # None: the place of all properties that no schema names.
        self._properties: dict[str | None, Place] = {}
        self.is_distinct = any(words.get("uniqueItems") is True for _, words in schemas)

    @cached_property
    def item(self) -> Place:
        """Return the place of an array's items, at any index."""
        nodes: list[Node] = []
        for node, words in self._schemas:
            nodes += [
                node.inside(words[keyword], keyword)
                for keyword in ("items", "unevaluatedItems", "contains")
                if keyword in words
            ]
            first = cast(list[Any], words.get("prefixItems", []))
            nodes += [node.inside(each, "prefixItems", index) for index, each in enumerate(first)]
        return self._places.place(nodes)

    def property(self, name: str) -> Place:
        """Return the place of an object's property."""
        is_named = any(name in words.get("properties", {}) for _, words in self._schemas)
        key = name if is_named else None
        if key not in self._properties:
            nodes: list[Node] = []
            for node, words in self._schemas:
                named = cast(dict[str, Any], words.get("properties", {}))
                if name in named:
                    nodes.append(node.inside(named[name], "properties", name))
                    continue
                by_pattern = cast(dict[str, Any], words.get("patternProperties", {}))
                nodes += [node.inside(each, "patternProperties", form) for form, each in by_pattern.items()]
                nodes += [
                    node.inside(words[keyword], keyword)
                    for keyword in ("additionalProperties", "unevaluatedProperties")
                    if keyword in words
                ]
            self._properties[key] = self._places.place(nodes)
        return self._properties[key]


class _Open(NamedTuple):
    """An array or object that has begun but not ended.

    Attributes:
        around: The enclosing array or object.
        place: The Place of this array or object in the schema.
        is_array: Whether it is an array.
        begin: Byte offset of the item being read.
        key: The property being read; None: a property's name comes next.
        items: For an array with unique items, the spellings of its complete items, by a key that is the same
            for equal values; otherwise None. All states of a text share this mapping, so it may have items
            that were undone.
        num_items: How many of the first `items` belong to this state.
    """

    around: _Open | None
    place: Place
    is_array: bool
    begin: int = 0
    key: str | None = None
    items: dict[str, bytes] | None = None
    num_items: int = 0

    @property
    def inside(self) -> Place:
        """Return the Place of the value that the text continues with."""
        return self.place.item if self.is_array else self.place.property(self.key or "")

    def known(self) -> dict[str, bytes]:
        """Return the complete items, after removing items that were undone."""
        items = {} if self.items is None else self.items
        while len(items) > self.num_items:
            items.popitem()
        return items


class _ReaderState(NamedTuple):
    """The state after reading a part of a text: the innermost array or object, and the meaning of the next byte.

    Attributes:
        size: Number of bytes read.
        open: The innermost array or object; None at the top level.
        begin: Offset of the string or scalar being read.
        is_string: Whether a string is being read.
        is_escaped: Whether the previous byte was a backslash that begins an escape.
        is_scalar: Whether a number, a boolean or null is being read.
    """

    size: int = 0
    open: _Open | None = None
    begin: int = 0
    is_string: bool = False
    is_escaped: bool = False
    is_scalar: bool = False

    @property
    def is_key(self) -> bool:
        """Return whether a string that begins here is the name of a property."""
        return self.open is not None and not self.open.is_array and self.open.key is None


class EqualItems(Exception):
    """An item of an array with unique items is equal to an earlier one."""


class ItemWatch:
    """Reads one text, token by token, and finds equal items of an array that must have unique items."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._text = bytearray()
        self._states = [_ReaderState()]  # after each token

    def read(self, token: bytes) -> None:
        """Append a token's bytes to the text, and note the array items that they complete.

        If it completes an item equal to an earlier one, raises EqualItems and does not read it.
        """
        self._text += token
        state = self._states[-1]
        try:
            for byte in token:
                state = self._step(state, byte)._replace(size=state.size + 1)
        except EqualItems:
            del self._text[self._states[-1].size :]
            raise
        self._states.append(state)

    def take_back(self, num_tokens: int) -> None:
        """Return to the state before the latest `num_tokens` tokens."""
        if num_tokens:
            del self._states[-num_tokens:]
            del self._text[self._states[-1].size :]

    def copy(self) -> ItemWatch:
        """Return an independent watch in the same state. The copy cannot undo tokens that were read before."""
        other = ItemWatch(self._places)
        state = self._states[-1]
        other._text, other._states = bytearray(self._text), [state._replace(open=_copied(state.open))]
        return other

    def banned(self) -> list[bytes]:
        """Return bytes that no token may begin with, because they would complete an item equal to an earlier one.

        They are the rest of an item that is spelled like an earlier one, or the end of the open array or
        object.
        """
        state = self._states[-1]
        found: list[bytes] = []
        ends = b'"' if state.is_string else b""
        is_begun = state.is_string or state.is_scalar
        open_ = state.open
        while open_ is not None:
            if items := open_.known():
                read = bytes(self._text[open_.begin :]) if is_begun else b""
                found += _rests(items, read)
                if is_begun and _is_known(items, read + ends):
                    found += [ends] if ends else [bytes([each]) for each in _ENDS]
            ends += b"]" if open_.is_array else b"}"
            is_begun = True
            open_ = open_.around
        return found

    def _step(self, state: _ReaderState, byte: int) -> _ReaderState:
        if state.is_string:
            if state.is_escaped:
                return state._replace(is_escaped=False)
            if byte == _BACKSLASH:
                return state._replace(is_escaped=True)
            return self._end_string(state) if byte == _QUOTE else state
        if state.is_scalar and byte in _ENDS:
            state = self._end_value(state._replace(is_scalar=False), state.size)
        if byte in _SPACE or state.is_scalar:
            return state
        if byte == _QUOTE:
            state = state if state.is_key else self._begin_value(state)
            return state._replace(is_string=True, begin=state.size)
        if byte in b"[{":
            state = self._begin_value(state)
            place = state.open.inside if state.open is not None else self._places.root
            is_array = byte == b"["[0]
            items: dict[Any, Any] | None = {} if is_array and place.is_distinct else None
            return state._replace(open=_Open(state.open, place, is_array, items=items))
        if byte in b"]}" and state.open is not None:
            return self._end_value(state._replace(open=state.open.around), state.size + 1)
        if byte == b","[0] and state.open is not None:
            return state._replace(open=state.open._replace(key=None))
        return (
            state if byte == b":"[0] else self._begin_value(state)._replace(is_scalar=True, begin=state.size)
        )

    def _begin_value(self, state: _ReaderState) -> _ReaderState:
        if state.open is None or state.open.items is None:
            return state
        return state._replace(open=state.open._replace(begin=state.size))

    def _end_string(self, state: _ReaderState) -> _ReaderState:
        ended = state._replace(is_string=False)
        if state.open is not None and state.is_key:
            name = str(json.loads(self._text[state.begin : state.size + 1]))
            return ended._replace(open=state.open._replace(key=name))
        return self._end_value(ended, state.size + 1)

    def _end_value(self, state: _ReaderState, end: int) -> _ReaderState:
        array = state.open
        if array is None or array.items is None:
            return state
        text = bytes(self._text[array.begin : end])
        items, key = array.known(), distinct_key(json.loads(text))
        if key in items:
            raise EqualItems
        items[key] = text
        return state._replace(open=array._replace(num_items=len(items)))


def _copied(open_: _Open | None) -> _Open | None:
    """Return a copy of arrays and objects, with copies of their items too."""
    chain: list[_Open] = []
    while open_ is not None:
        chain.append(open_)
        open_ = open_.around
    copied = None
    for each in reversed(chain):
        copied = each._replace(around=copied, items=None if each.items is None else each.known().copy())
    return copied


def _rests(items: Mapping[str, bytes], read: bytes) -> list[bytes]:
    """Return the remainders of items that begin with `read`, except numbers and literals, which could continue."""
    return [text[len(read) :] for text in items.values() if text.endswith(_CLOSED) and text.startswith(read)]


def _is_known(items: Mapping[str, bytes], text: bytes) -> bool:
    """Return whether a text is a complete item that is equal to one of `items`."""
    try:
        return distinct_key(json.loads(text)) in items
    except (ValueError, RecursionError):
        return False
