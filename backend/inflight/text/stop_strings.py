"""Finds strings that end a text while the text is being made.

Owns what of a growing text may be shown: nothing that may turn out to be the beginning of a stop string. Does not
know tokens. `StopStrings` is immutable and serves any number of texts; a `StopStringFinder` belongs to one text
and one thread at a time.

The strings are one automaton (Aho and Corasick's), so a character costs the same however long the text is and
however many strings there are. Its state is the longest end of the text that begins some stop string: exactly
what has to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The automaton of a set of strings; empty ones are left out.

    Attributes:
        strings: What is looked for, without repetitions, in the order given.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(string for string in strings if string))
        # Per state: the next by character, the state of the longest proper end, its length, and the length of
        # the longest stop string that ends here.
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
        """The state after one more character; 0 is that of an empty text."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def depth(self, state: int) -> int:
        """How many characters at the end of the text begin some stop string."""
        return self._depth[state]

    def match(self, state: int) -> int:
        """Length of the longest stop string at the end of the text; 0 if there is none."""
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
        """Breadth first: a state's fallback is nearer to the root than the state."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, follower in self._next[state].items():
                fallback = self.step(self._fallback[state], character)
                self._fallback[follower] = fallback
                self._match[follower] = self._match[follower] or self._match[fallback]
                waiting.append(follower)


class StopStringFinder:
    """One text. The stop string that ends first counts; of several that end together, the one that begins first.

    A text may have parts that its reader does not get to see, such as special tokens. A stop string is found where
    it stands in the text that is shown, and where it stands in the text together with its hidden parts.

    Attributes:
        stopped: Whether a stop string is complete. Nothing more comes then.
    """

    def __init__(self, stop_strings: StopStrings) -> None:
        self._strings = stop_strings
        self._shown_state = 0  # after the characters that are shown
        self._full_state = 0  # after all characters
        self._held: list[tuple[str, bool]] = []  # the latest characters, and whether each is shown
        self.stopped = False

    def add(self, text: str, is_shown: bool = True) -> str:
        """What is certain to be shown now that `text` has come; up to a stop string when one completes."""
        if self.stopped:
            return ""
        strings, held = self._strings, self._held
        for character in text:
            held.append((character, is_shown))
            self._full_state = strings.step(self._full_state, character)
            length = strings.match(self._full_state)
            if is_shown:
                self._shown_state = strings.step(self._shown_state, character)
                length = max(length, self._span(strings.match(self._shown_state)))
            if length:
                self.stopped = True
                shown = self._release(length)
                held.clear()
                return shown
        return self._release(
            max(strings.depth(self._full_state), self._span(strings.depth(self._shown_state)))
        )

    def flush(self) -> str:
        """What was held back: the text ends here, without a stop string. The last call."""
        return self._release(0)

    def copy(self) -> StopStringFinder:
        """A finder that goes on from here by itself."""
        other = StopStringFinder(self._strings)
        other._shown_state, other._full_state = self._shown_state, self._full_state
        other._held, other.stopped = self._held.copy(), self.stopped
        return other

    def _release(self, num_kept: int) -> str:
        """What is shown of the held characters, but for the last `num_kept`, which stay held."""
        end = len(self._held) - num_kept
        text = "".join([character for character, is_shown in self._held[:end] if is_shown])
        del self._held[:end]
        return text

    def _span(self, num_shown: int) -> int:
        """How many held characters the last `num_shown` that are shown take, with the hidden ones between them."""
        count = 0
        while num_shown:
            count += 1
            num_shown -= self._held[-count][1]
        return count
