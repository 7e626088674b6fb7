"""Find stop strings in a text while it is generated, and hold back possible beginnings of stop strings.

`StopStrings` is immutable and may be used for any number of texts. Each text has its own `StopStringFinder`,
which is used by one thread at a time.

The stop strings form one Aho–Corasick automaton, so the cost per character depends neither on the length of
the text nor on the number of strings. The automaton's state is the longest suffix of the text that is the
beginning of a stop string, which is exactly the text to hold back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import copy

_HIDDEN = 0


class StopStrings:
    """The automaton of a set of stop strings. Empty strings are ignored.

    Attributes:
        strings: The stop strings, without repetitions, in the given order.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(string for string in strings if string))
        # For each state: the next states by character, the state of the longest proper suffix, the state's
        # length in characters, and the length of the longest stop string that ends in this state.
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._match = [0]
        for string in self.strings:
            self._insert(string)
        self._link()

    def __bool__(self) -> bool:
        return bool(self.strings)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character; 0 is the state of an empty text."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def depth(self, state: int) -> int:
        """Return the length of the longest end of the text that is the beginning of a stop string."""
        return self._depth[state]

    def match(self, state: int) -> int:
        """Return the length of the longest stop string at the end of the text; 0 if there is none."""
        return self._match[state]

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = self._depth[state]

    def _link(self) -> None:
        """Set each state's fallback, breadth first, because a fallback is closer to the root than its state."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, follower in self._next[state].items():
                fallback = self.step(self._fallback[state], character)
                self._fallback[follower] = fallback
                self._match[follower] = self._match[follower] or self._match[fallback]
                waiting.append(follower)


class StopStringFinder:
    """Finds the stop string that ends first in one text; if several end at the same place, the longest.

    A text may have hidden parts, such as special tokens. Stop strings are found both in the shown text alone
    and in the text with its hidden parts.

    Attributes:
        found: The stop string that has ended the text; "" if none has.
    """

    def __init__(self, stop_strings: StopStrings) -> None:
        self._strings = stop_strings
        self._shown_state = 0  # state over the shown characters
        self._full_state = 0  # state over all characters
        self._held = ""  # the latest characters
        self._marks = b""  # for each character of `_held`, whether it is shown
        self.found = ""

    def add(self, text: str, is_shown: bool = True, may_stop: bool = True) -> str:
        """Append to the text; return the part that can be shown now, up to a completed stop string.

        Args:
            text: The new text.
            is_shown: Whether the new text is shown to the reader.
            may_stop: Whether a stop string that the new text completes ends the text.
        """
        if self.stopped or not text:
            return ""
        strings, full, shown = self._strings, self._full_state, self._shown_state
        start = len(self._held)
        self._held += text
        self._marks += bytes([is_shown]) * len(text)
        for end, character in enumerate(text, start + 1):
            was_same = full == shown
            full = strings.step(full, character)
            if is_shown:
                shown = full if was_same else strings.step(shown, character)
            if may_stop and (strings.match(full) or (is_shown and strings.match(shown))):
                num_full, num_shown = strings.match(full), strings.match(shown) if is_shown else 0
                length = self._span(num_full, num_shown, end)
                held = self._held[:end] if num_full >= num_shown else self._shown(end)
                self.found = held[-max(num_full, num_shown) :]
                return self._release(end - length)
        self._full_state, self._shown_state = full, shown
        end = start + len(text)
        return self._release(end - self._span(strings.depth(full), strings.depth(shown), end))

    @property
    def stopped(self) -> bool:
        """Return whether a stop string is complete, which ends the text."""
        return bool(self.found)

    def flush(self) -> str:
        """End the text without a stop string; return the text that was held back. Must be the last call."""
        return "" if self.stopped else self._release(len(self._held))

    def copy(self) -> StopStringFinder:
        """Return an independent finder in the same state."""
        return copy(self)

    def _span(self, num_full: int, num_shown: int, end: int) -> int:
        """Return the smallest n such that the n characters before `end` contain both spans.

        The spans are the last `num_full` characters, and the last `num_shown` shown characters.
        """
        if _HIDDEN not in self._marks:
            return max(num_full, num_shown)
        start = end
        while num_shown:
            start -= 1
            num_shown -= self._marks[start]
        return max(num_full, end - start)

    def _release(self, end: int) -> str:
        """Release the held characters before `end`; return those that are shown."""
        text = self._shown(end)
        self._held, self._marks = self._held[end:], self._marks[end:]
        return text

    def _shown(self, end: int) -> str:
        """Return the held characters before `end` that are shown."""
        text, marks = self._held[:end], self._marks[:end]
        if _HIDDEN not in marks:
            return text
        return "".join([character for character, is_shown in zip(text, marks) if is_shown])
