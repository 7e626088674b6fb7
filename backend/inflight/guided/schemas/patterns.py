"""Translate regular expressions of JSON schemas to Rust's syntax, which llguidance uses.

A schema's `pattern` has the syntax of ECMA 262, but validators in Python interpret it in Python's syntax. If
the interpretations differ, the translation matches only texts that both match. Any thread.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

from inflight.guided.schemas.formats import FORMATS

_QUANTIFIER = re.compile(r"\{\d+(,\d*)?\}")
_WORD = "0-9A-Za-z_"
_CLASSES = {
    "d": "0-9",
    "D": r"\x00-/:-\x7f",
    "w": _WORD,
    "W": r"\x00-/:-@\[-\^`\{-\x7f",  # ASCII only, because Python and ECMA 262 disagree whether é is a letter
    "s": r"\t-\r ",
    "S": r"!-~\u{a1}-\u{167f}\u{2070}-\u{2fff}\u{3001}-\u{fefe}\u{ff00}-\u{10ffff}",
}
"""The contents of the Rust character class that equals an escape, by escape."""
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\f", "v": r"\v", "0": r"\x00"}


class UnreadablePattern(ValueError):
    """An expression is not supported. The message continues a sentence that begins with the expression."""


_ZOD_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
_KNOWN = {_ZOD_DURATION: FORMATS["duration"]}
"""Replacements of unsupported expressions that libraries generate, by expression."""


def is_replaced(pattern: str) -> bool:
    """Whether `rust_patterns` replaces a known expression by one that matches fewer texts."""
    return pattern in _KNOWN


def rust_patterns(pattern: str) -> list[str]:
    """Translate an expression of ECMA 262 to Rust expressions that must all match. Raises UnreadablePattern.

    If the expression begins with look-aheads, each look-ahead gives an expression of its own, for the whole
    text.
    """
    if pattern in _KNOWN:
        return [_KNOWN[pattern]]
    found: list[str] = []
    rest = pattern
    while ahead := re.match(r"\^\(\?([=!])", rest):
        end = _end_of_group(rest, 1)
        inner = rest[ahead.end() : end]
        if ahead[1] == "=":
            found.append(rust_pattern(f"^(?:{inner})"))
        else:
            found.append(_not_ahead(inner))
        rest = "^" + rest[end + 1 :]
        if re.match(r"\^[*+?{|]", rest) or _has_alternatives(rest):
            raise UnreadablePattern("has a look-ahead, (?…), in one of several alternatives")
    return [rust_pattern(rest), *found]


def _end_of_group(pattern: str, begin: int) -> int:
    """Return the index of the bracket that closes the group that begins at `begin`."""
    depth, place, in_class = 0, begin, False
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if not depth:
                return place
        place += 1
    raise UnreadablePattern("is not a regular expression: a bracket is not closed")


def _has_alternatives(pattern: str) -> bool:
    """Return whether there is a | outside of groups, so that a look-ahead applies to one alternative only."""
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "(":
            place = _end_of_group(pattern, place)
        elif char == "[":
            place = _class(pattern, place + 1)[1] - 1
        elif char == "\\":
            place += 1
        elif char == "|":
            return True
        place += 1
    return False


def _not_ahead(inner: str) -> str:
    """Return an expression for texts that pass a negative look-ahead with the content `inner`, in simple cases."""
    if inner == "$":
        return "^(?s:.+)$"
    far = re.fullmatch(r"(?:\.|\[\\s\\S\])\*(.+)", inner)
    texts = _plain_texts(far[1] if far else inner)
    if far and texts and len(texts) == 1 and 1 <= len(texts[0]) <= 2:
        first, last = _literal(texts[0][0]), _literal(texts[0][-1])
        if len(texts[0]) == 1:
            return f"^[^{first}]*$"
        if first == last:
            return f"^(?:{first}?[^{first}])*{first}?$"
        return f"^(?:[^{first}]|{first}+[^{first}{last}])*{first}*$"
    if not far and texts:
        return f"^(?:{_avoiding(set(texts), as_beginnings=True)})$"
    if not far and (found := re.fullmatch(r"\[(?!\^)[^\]]+\]", inner)):
        written = _class(found[0], 1)[0]
        return f"^(?:[^{written[1:-1]}](?s:.*))?$"
    raise UnreadablePattern(f"has a negative look-ahead, (?!{inner}), which cannot be followed")


def _plain_texts(expression: str) -> list[str] | None:
    """Return the alternatives of an expression if all are literal texts, else None."""
    if not re.fullmatch(r"(?:[\w \-@#%&=:;,<>~`'\"!/]|\\[^\w]|\|)+", expression):
        return None
    texts = [re.sub(r"\\(.)", r"\1", each) for each in re.findall(r"(?:\\.|[^|\\])+", expression)]
    return texts if len(texts) == len(re.findall(r"(?<!\\)\|", expression)) + 1 else None


def rust_pattern(pattern: str) -> str:
    """Translate one expression of ECMA 262 to Rust. Raises UnreadablePattern."""
    _check_syntax(pattern)
    out: list[str] = []
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            written, place = _escape(pattern, place + 1, in_class=False)
            out.append(written)
        elif char == "[":
            written, place = _class(pattern, place + 1)
            out.append(written)
        elif char == "(":
            written, place = _group(pattern, place)
            out.append(written)
        elif char == "{" and not _QUANTIFIER.match(pattern, place):
            if re.match(r"\{,\d+\}", pattern[place:]):
                raise UnreadablePattern("has {,n}, which some engines read literally: write {0,n}")
            out.append(r"\{")
            place += 1
        elif char in "}]" and not _closes(pattern, place):
            out.append("\\" + char)
            place += 1
        elif char == ".":
            out.append(r"[^\n\r\u{2028}\u{2029}]")
            place += 1
        else:
            out.append(char)
            place += 1
    return "".join(out)


def _check_syntax(pattern: str) -> None:
    """Raise UnreadablePattern for an invalid expression.

    Python's parser checks it, except syntax of ECMA 262 alone.
    """
    named = re.sub(r"\(\?<(?=[^=!])", "(?P<", pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of nested sets
            re.compile(named)
    except OverflowError as error:
        raise UnreadablePattern(f"is not a regular expression: {error}") from None
    except re.error as error:
        if not re.search(r"\\[pPcuA-Z]|\[\^?\]|-\\?[\w.]|\\[dws]-", pattern):
            raise UnreadablePattern(f"is not a regular expression: {error}") from None


def _closes(pattern: str, place: int) -> bool:
    """Return whether the brace at `place` ends a quantifier."""
    begin = pattern.rfind("{", 0, place)
    found = _QUANTIFIER.match(pattern, begin) if begin >= 0 else None
    return pattern[place] == "}" and found is not None and found.end() == place + 1


def _group(pattern: str, place: int) -> tuple[str, int]:
    if not pattern.startswith("(?", place):
        return "(", place + 1
    for begin, name in (
        ("(?=", "a look-ahead"),
        ("(?!", "a negative look-ahead"),
        ("(?<=", "a look-behind"),
        ("(?<!", "a negative look-behind"),
    ):
        if pattern.startswith(begin, place):
            raise UnreadablePattern(f"has {name}, {begin}…), which cannot be followed")
    if found := re.compile(r"\(\?P?<\w+>").match(pattern, place):
        return "(", found.end()
    if found := re.compile(r"\(\?[ims]*:|\(\?[ims]+\)").match(pattern, place):
        if "m" in found[0]:
            raise UnreadablePattern("has the flag m, which cannot be followed")
        return found[0], found.end()
    raise UnreadablePattern(f"has {pattern[place : place + 4]}, which cannot be followed")


def _escape(pattern: str, place: int, in_class: bool) -> tuple[str, int]:
    """Return the translation of an escape, and the index after it. `place` is the index after the backslash."""
    char = pattern[place : place + 1]
    if char in _CLASSES and char:
        return _CLASSES[char] if in_class else f"[{_CLASSES[char]}]", place + 1
    if char in _CONTROLS and char:
        return _CONTROLS[char], place + 1
    if char == "b" and in_class:
        return r"\x08", place + 1
    if char in "bB" and char:
        raise UnreadablePattern(f"has a word boundary, \\{char}, which cannot be followed")
    if char == "A" and not in_class:
        return "^", place + 1
    if char in "zZ" and char and not in_class:
        return "$", place + 1
    if char.isdigit() or char == "k":
        raise UnreadablePattern(f"has a back reference, \\{char}, which cannot be followed")
    if found := re.compile(r"c([A-Za-z])").match(pattern, place):
        return f"\\x{ord(found[1]) % 32:02x}", found.end()
    if found := re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}").match(
        pattern, place
    ):
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise UnreadablePattern(f"has \\{found[0]}, which is half a character")
        return f"\\u{{{code:x}}}", found.end()
    if found := re.compile(r"[pP]\{[\w=]+\}").match(pattern, place):
        return "\\" + found[0], found.end()
    if not char or char.isalnum():
        raise UnreadablePattern(f"has \\{char}, which is not an escape that JSON Schema knows")
    return _literal(char), place + 1


def _class(pattern: str, place: int) -> tuple[str, int]:
    """Return the translation of a character class, and the index after it.

    `place` is the index after its opening bracket.
    """
    out = ["["]
    if pattern[place : place + 1] == "^":
        out.append("^")
        place += 1
    if pattern[place : place + 1] == "]":
        raise UnreadablePattern("has an empty class, [] or [^], which engines read differently")
    while place < len(pattern) and pattern[place] != "]":
        char = pattern[place]
        if char == "\\":
            written, after = _escape(pattern, place + 1, in_class=True)
            if pattern[after : after + 1] == "-" and pattern[place + 1] in _CLASSES:
                written, after = written + r"\-", after + 1
            out.append(written)
            place = after
        elif char == "-":
            is_range = len(out) > (2 if out[1:2] == ["^"] else 1) and pattern[place + 1 : place + 2] != "]"
            if is_range and re.compile(r"-\\[dDwWsS]").match(pattern, place):
                is_range = False
            if is_range and out[-1] in (r"\-", "-"):
                is_range = False
            out.append("-" if is_range else r"\-")
            place += 1
        else:
            out.append(_literal(char))
            place += 1
    if place >= len(pattern):
        raise UnreadablePattern("has a class without an end")
    return "".join(out) + "]", place + 1


def _literal(char: str) -> str:
    """Return a literal character, escaped for use both in a class and outside."""
    if char.isalnum() or char == "_" or ord(char) > 127 or char == " ":
        return char
    return f"\\u{{{ord(char):x}}}"


def literal_pattern(text: str) -> str:
    """Return a Rust expression that matches exactly one text."""
    return "".join(map(_literal, text))


def other_than(texts: Iterable[str]) -> str:
    """Return a Rust expression that matches every whole text except these."""
    return f"^(?:{_avoiding(set(texts))})$"


def _avoiding(texts: set[str], as_beginnings: bool = False) -> str:
    """Return an expression for all texts except `texts`, or for all texts that begin with none of `texts`."""
    if beginning := _common_beginning(texts):
        rest = {text.removeprefix(beginning) for text in texts}
        options = [_parting(beginning)]
        if not (as_beginnings and "" in rest):
            options.append(f"{literal_pattern(beginning)}(?:{_avoiding(rest, as_beginnings)})")
        return "|".join(options)
    branches: dict[str, set[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], set()).add(text[1:])
    first = "".join(map(_literal, sorted(branches)))
    options = [f"[^{first}](?s:.*)" if first else "(?s:.+)"]
    for char, rest in sorted(branches.items()):
        if not (as_beginnings and "" in rest):
            options.append(f"{_literal(char)}(?:{_avoiding(rest, as_beginnings)})")
    if "" not in texts:
        options.append("")
    return "|".join(options)


def _common_beginning(texts: set[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    size = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:size]


def _parting(beginning: str) -> str:
    """Return an expression for all texts that do not begin with `beginning`.

    The expression is built recursively by halves, because Rust allows at most 250 nested groups.
    """
    parts = [f"(?:[^{_literal(char)}](?s:.*))?" for char in beginning]
    texts = [_literal(char) for char in beginning]
    while len(parts) > 1:
        pairs = range(0, len(parts) - 1, 2)
        odd = len(parts) % 2
        parts = [f"(?:{parts[i]}|{texts[i]}{parts[i + 1]})" for i in pairs] + parts[len(parts) - odd :]
        texts = [texts[i] + texts[i + 1] for i in pairs] + texts[len(texts) - odd :]
    return parts[0]
