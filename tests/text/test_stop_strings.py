"""The finder of stop strings compared with a search of the whole text after every character."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inflight.text.stop_strings import StopStringFinder, StopStrings

# Few letters, so that strings overlap and begin inside of each other.
TEXTS = st.text("ab🎉", max_size=40)
STRINGS = st.lists(st.text("ab🎉", max_size=5), max_size=5)


def cut_of(text: str, strings: list[str]) -> str | None:
    """The text before the stop string that ends first, the longest of those; None if there is none."""
    for end in range(1, len(text) + 1):
        lengths = [len(string) for string in strings if string and text[:end].endswith(string)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def num_held(text: str, strings: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    lengths = range(len(text), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in strings if s)), 0)


def pieces(text: str, sizes: list[int]) -> list[str]:
    """Cut `text` into pieces of these sizes, and the rest into characters."""
    parts, position = [], 0
    for size in [*sizes, *[1] * len(text)]:
        parts.append(text[position : position + size])
        position += size
    return parts


def whole(text: str, strings: list[str]) -> tuple[str, bool]:
    finder = StopStringFinder(StopStrings(strings))
    shown = finder.add(text)
    return shown + ("" if finder.stopped else finder.flush()), finder.stopped


@given(TEXTS, STRINGS, st.lists(st.integers(0, 6), max_size=10))
@example("aab", ["aab", "ab"], [])
@example("aab", ["b", "aab"], [2])
@example("abab🎉", ["ab🎉"], [])
def test_text_stops_where_the_first_string_is_complete(
    text: str, strings: list[str], sizes: list[int]
) -> None:
    finder = StopStringFinder(StopStrings(strings))
    wanted = cut_of(text, strings)
    shown = ""
    for part in pieces(text, sizes):
        shown += finder.add(part)
        # Returned text cannot be taken back, so a returned part of the stop string would fail here.
        assert (text if wanted is None else wanted).startswith(shown)
    assert finder.stopped == (wanted is not None)
    assert shown + finder.flush() == (text if wanted is None else wanted)


@given(TEXTS, STRINGS)
def test_no_more_text_is_held_back_than_necessary(text: str, strings: list[str]) -> None:
    finder = StopStringFinder(StopStrings(strings))
    shown = ""
    for end in range(1, len(text) + 1):
        shown += finder.add(text[end - 1])
        if finder.stopped:
            return
        assert len(shown) == end - num_held(text[:end], strings)


@pytest.mark.parametrize(
    ("text", "strings", "shown"),
    [
        ("xaab", ["aab", "ab"], "x"),  # end together: the longest
        ("xaab", ["ab", "aab", "b"], "x"),
        ("xabcd", ["abcd", "bc"], "xa"),  # ends first, although another began before
        ("one\n\ntwo", ["\n\n"], "one"),
        ("你好。吗", ["。"], "你好"),
        ("e\u0301x", ["\u0301"], "e"),  # compared by code points, not by appearance
        ("aaa", ["aaaa", "aa"], ""),
    ],
)
def test_the_text_ends_before_the_first_complete_stop_string(
    text: str, strings: list[str], shown: str
) -> None:
    assert whole(text, strings) == (shown, True)


def test_text_that_was_held_back_is_returned_at_the_end() -> None:
    finder = StopStringFinder(StopStrings(["</done>"]))
    assert [finder.add("ok <"), finder.add("/do"), finder.flush()] == ["ok ", "", "</do"]
    assert not finder.stopped


def test_no_text_is_returned_after_a_stop() -> None:
    finder = StopStringFinder(StopStrings(["."]))
    assert [finder.add("a.b"), finder.add("c"), finder.flush()] == ["a", "", ""]


@pytest.mark.parametrize("strings", [[], [""], ["", ""]])
def test_an_empty_list_of_stop_strings_never_stops(strings: list[str]) -> None:
    assert not StopStrings(strings)
    assert whole("any text", strings) == ("any text", False)


def test_repeated_and_empty_stop_strings_are_left_out() -> None:
    assert StopStrings(["b", "a", "", "b"]).strings == ("b", "a")


def test_the_text_held_back_does_not_grow_with_the_answer() -> None:
    finder = StopStringFinder(StopStrings(["ab" * 8 + "!"]))
    shown = sum(len(finder.add("ab")) for _ in range(10_000))
    assert shown >= 20_000 - 16


# -------------------------------------------------------------------- hidden text

PARTS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.booleans()), max_size=12)


def cut_of_parts(parts: list[tuple[str, bool]], strings: list[str]) -> tuple[str, bool]:
    """Return the shown text, and whether it was cut.

    Stop strings are searched in all text and in the shown text.
    """
    full = [(character, is_shown) for text, is_shown in parts for character in text]
    for end in range(1, len(full) + 1):
        starts = []
        for start in range(end):
            shown = "".join(character for character, is_shown in full[start:end] if is_shown)
            everything = "".join(character for character, _ in full[start:end])
            if everything in strings or (shown in strings and full[start][1] and full[end - 1][1]):
                starts.append(start)
        if starts:
            return "".join(character for character, is_shown in full[: min(starts)] if is_shown), True
    return "".join(character for character, is_shown in full if is_shown), False


@given(PARTS, STRINGS)
@example([("a", True), ("b", False)], ["ab"])
@example([("a", True), ("b", False), ("a", True)], ["aa"])
@example([("aa", True), ("b", False), ("b", True)], ["ab", "aab", "bb"])
def test_strings_are_found_with_and_without_hidden_text(
    parts: list[tuple[str, bool]], strings: list[str]
) -> None:
    wanted, is_cut = cut_of_parts(parts, strings)
    finder, shown = StopStringFinder(StopStrings(strings)), ""
    for text, is_shown in parts:
        shown += finder.add(text, is_shown)
        assert wanted.startswith(shown)
    assert (shown + finder.flush(), finder.stopped) == (wanted, is_cut)


def test_a_copy_of_a_finder_is_independent() -> None:
    finder = StopStringFinder(StopStrings(["abc"]))
    assert finder.add("xab") == "x"
    other = finder.copy()
    assert (other.add("c"), other.stopped) == ("", True)
    assert (finder.stopped, finder.flush()) == (False, "ab")
