"""Arrays whose items all differ: what a grammar cannot say, and is therefore watched while the text comes.

A `Places` says at which places of a document `uniqueItems` is true; an `ItemWatch` reads one text, byte by byte,
knows the items that such arrays have so far, and says what would complete an equal one. Where alternatives
disagree, the items differ: some valid texts do not come, and no invalid one does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, cast

from inflight.guided.schemas.documents import Document, Node, keywords_of
from inflight.guided.schemas.overlap import distinct_key

_SPACE, _ENDS = b" \t\r\n", b",]} \t\r\n"
_QUOTE, _BACKSLASH = b'"\\'


class Places:
    """The places of a document, found as they are asked for. One thread at a time."""

    def __init__(self, text: str) -> None:
        self._document = Document(json.loads(text))
        self._known: dict[frozenset[tuple[str, str]], Place] = {}
        self.root = self.place([self._document.root])

    def place(self, nodes: Iterable[Node]) -> Place:
        """The place where all of these hold, or some of them, with the parts that hold in place."""
        found: dict[tuple[str, str], Node] = {}
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if not isinstance(node.value, dict) or node.place in found:
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
    """The place of a value in a document: the schemas that may apply to it, and the places inside."""

    def __init__(self, places: Places, schemas: list[tuple[Node, dict[str, Any]]]) -> None:
        self._places = places
        self._schemas = schemas
        self._properties: dict[str, Place] = {}
        self.is_distinct = any(words.get("uniqueItems") is True for _, words in schemas)

    @cached_property
    def item(self) -> Place:
        """The place of an array's items, wherever they stand in it."""
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
        """The place of an object's property."""
        if name not in self._properties:
            nodes: list[Node] = []
            for node, words in self._schemas:
                named = cast(dict[str, Any], words.get("properties", {}))
                if name in named:
                    nodes.append(node.inside(named[name], "properties", name))
                    continue
                by_pattern = cast(dict[str, Any], words.get("patternProperties", {}))
                nodes += [node.inside(each, "patternProperties", key) for key, each in by_pattern.items()]
                nodes += [
                    node.inside(words[keyword], keyword)
                    for keyword in ("additionalProperties", "unevaluatedProperties")
                    if keyword in words
                ]
            self._properties[name] = self._places.place(nodes)
        return self._properties[name]


class _Open(NamedTuple):
    """An array or object that has begun and not ended.

    Attributes:
        around: The one that it is in.
        place: Where it stands.
        is_array: Whether it is an array.
        begin: Where the item that is being read begins, in bytes.
        key: The property that is being read; None: its name is next.
        items: Of an array whose items differ, those that are whole, as what equal values have alike.
        texts: And their spellings.
    """

    around: _Open | None
    place: Place
    is_array: bool
    begin: int = 0
    key: str | None = None
    items: frozenset[str] = frozenset()
    texts: tuple[bytes, ...] = ()

    @property
    def is_distinct(self) -> bool:
        return self.is_array and self.place.is_distinct

    @property
    def inside(self) -> Place:
        """The place of the value that is read next."""
        return self.place.item if self.is_array else self.place.property(self.key or "")


class _State(NamedTuple):
    """How far a text was read: its innermost array or object, and what byte may mean what.

    Attributes:
        size: Bytes that were read.
        open: The innermost array or object; None outside of all.
        begin: Where the string or scalar that is being read begins.
        is_string: Whether a string is being read.
        is_escaped: Whether the byte before was a backslash that begins an escape.
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
        """Whether a string that begins here is the name of a property."""
        return self.open is not None and not self.open.is_array and self.open.key is None


class EqualItems(Exception):
    """An item of an array whose items differ is equal to one before it."""


class ItemWatch:
    """Reads one text, token by token."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._text = bytearray()
        self._states = [_State()]  # behind each token

    def read(self, token: bytes) -> None:
        """Read a token. Raises EqualItems."""
        self._text += token
        state = self._states[-1]
        for byte in token:
            state = self._step(state, byte)._replace(size=state.size + 1)
        self._states.append(state)

    def take_back(self, num_tokens: int) -> None:
        """Forget the latest tokens."""
        if num_tokens:
            del self._states[-num_tokens:]
            del self._text[self._states[-1].size :]

    def copy(self) -> ItemWatch:
        """A watch of its own that has read as much."""
        other = ItemWatch(self._places)
        other._text, other._states = bytearray(self._text), list(self._states)
        return other

    def banned(self) -> list[bytes]:
        """The bytes that no token may begin with, because they would complete an item equal to an earlier
        one.
        """
        state = self._states[-1]
        open_ = state.open
        if open_ is None:
            return []
        if open_.is_distinct and open_.texts:
            if state.is_scalar:
                read = bytes(self._text[state.begin :])
                return [bytes([each]) for each in _ENDS] if self._is_known(open_, read) else []
            read = bytes(self._text[state.begin :]) if state.is_string else b""
            closed = (text for text in open_.texts if text[-1:] in (b'"', b"]", b"}"))
            return [text[len(read) :] for text in closed if text.startswith(read)]
        around = open_.around
        if around is not None and around.is_distinct and around.texts and not state.is_string:
            end = b"]" if open_.is_array else b"}"
            return [end] if self._is_known(around, bytes(self._text[around.begin :]) + end) else []
        return []

    def _is_known(self, array: _Open, text: bytes) -> bool:
        """Whether an item is whole, and equal to one before it."""
        try:
            return distinct_key(json.loads(text)) in array.items
        except ValueError:
            return False

    def _step(self, state: _State, byte: int) -> _State:
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
            return state._replace(open=_Open(state.open, place, byte == b"["[0]))
        if byte in b"]}" and state.open is not None:
            return self._end_value(state._replace(open=state.open.around), state.size + 1)
        if byte == b","[0] and state.open is not None:
            return state._replace(open=state.open._replace(key=None))
        return (
            state if byte == b":"[0] else self._begin_value(state)._replace(is_scalar=True, begin=state.size)
        )

    def _begin_value(self, state: _State) -> _State:
        if state.open is None or not state.open.is_distinct:
            return state
        return state._replace(open=state.open._replace(begin=state.size))

    def _end_string(self, state: _State) -> _State:
        ended = state._replace(is_string=False)
        if state.open is not None and state.is_key:
            name = str(json.loads(self._text[state.begin : state.size + 1]))
            return ended._replace(open=state.open._replace(key=name))
        return self._end_value(ended, state.size + 1)

    def _end_value(self, state: _State, end: int) -> _State:
        array = state.open
        if array is None or not array.is_distinct:
            return state
        text = bytes(self._text[array.begin : end])
        key = distinct_key(json.loads(text))
        if key in array.items:
            raise EqualItems
        return state._replace(open=array._replace(items=array.items | {key}, texts=(*array.texts, text)))
