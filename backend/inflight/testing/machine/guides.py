"""Guides for the simulated server: a small grammar library that can be slow, fail and crash, and a device that
follows guides.

A guide's text is `LETTERS COUNT KIND`: the text has COUNT of these letters; KIND tells how compiling it goes.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import GUIDE_END, Guide, GuideKind
from inflight.core.schedule.batch import EngineLimits, SlotStart
from inflight.errors import InvalidArgument
from inflight.guided.backend import MaskJob, Matcher, refusal
from inflight.guided.budget import BudgetedMatcher
from inflight.guided.grammars import Grammars, MaskRows
from inflight.guided.vocabulary import GuideVocabulary
from inflight.testing.fake_model import logits_after

from .closed_engine import FailingDevice
from .scheduler import Machine

FAST, SLOW, INVALID, CRASHING, BROKEN = "fast", "slow", "invalid", "crashing", "broken"
_KINDS = (FAST, FAST, FAST, SLOW, INVALID, CRASHING, BROKEN)
_SLOWEST_S = 20.0
_OUT_OF_MEMORY = 137  # exit status


def draw_guide(rng: random.Random, vocab_size: int) -> Guide:
    """Draw a guide. The same few are drawn often, so that requests wait for one guide together."""
    letters = "".join(sorted(rng.sample(string.ascii_lowercase[: min(vocab_size, 4)], 2)))
    return Guide(GuideKind.REGEX, f"{letters} {rng.randint(1, 3)} {rng.choice(_KINDS)}")


def kind_of(guide: Guide) -> str:
    """Return how compiling a guide goes."""
    return guide.text.split()[2]


def allows(guide: Guide, tokens: Sequence[int], is_whole: bool) -> bool:
    """Return whether a guide allows these tokens, as a beginning or as the whole text."""
    letters, count, _ = guide.text.split()
    ids = [string.ascii_lowercase.index(letter) for letter in letters]
    has_length = len(tokens) == int(count) if is_whole else len(tokens) <= int(count)
    return has_length and all(token in ids for token in tokens)


@dataclass
class _TextSoFar:
    """A text's state in its guide: the number of its tokens."""

    guide: Guide
    tokens: tuple[int, ...] = ()

    def consume(self, token_ids: Sequence[int]) -> None:
        if not allows(self.guide, (*self.tokens, *token_ids), is_whole=False):
            raise InvalidArgument(
                f"the guide {self.guide.text} does not allow {token_ids} after {self.tokens}"
            )
        self.tokens += tuple(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - num_tokens]

    def fork(self) -> _TextSoFar:
        return _TextSoFar(self.guide, self.tokens)


class SmallLibrary:
    """A grammar library (`inflight.guided.backend.GuideBackend`) on the machine.

    Args:
        machine: The machine.
        vocabulary: The vocabulary.
        may_compile: Whether this process may compile guides: only the one that can be killed.
    """

    def __init__(self, machine: Machine, vocabulary: GuideVocabulary, may_compile: bool) -> None:
        self._machine = machine
        self._vocabulary = vocabulary
        self._may_compile = may_compile

    def compile(self, guide: Guide) -> bytes:
        assert self._may_compile, "a guide is compiled in the engine's process"
        machine, kind = self._machine, kind_of(guide)
        machine.sleep(machine.rng.random() * (_SLOWEST_S if kind == SLOW else 0.02))
        if kind == INVALID:
            raise refusal("it is one of the invalid ones")
        if kind == CRASHING or machine.refuses_memory():
            raise SystemExit(_OUT_OF_MEMORY)
        return guide.text.encode() + bytes(machine.rng.choice([0, 1000]))

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        assert compiled.startswith(guide.text.encode()), "another guide's compiled form"
        if kind_of(guide) == BROKEN and not self._may_compile:
            raise RuntimeError("the library failed")
        return _TextSoFar(guide)

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        for job in jobs:
            assert isinstance(job.matcher, _TextSoFar)
            guide, before = job.matcher.guide, job.matcher.tokens
            ids = [
                token
                for token in range(len(self._vocabulary.tokens))
                if allows(guide, (*before, token), False)
            ]
            ids += [self._vocabulary.end_id] * allows(guide, before, True)
            masks[job.row] = _mask(ids, self._vocabulary.num_words)
        return {}


class LibraryOfRank(SmallLibrary):
    """The library of a rank beside rank 0, which compiles what the process of rank 0 has compiled before it."""

    def __init__(self, machine: Machine, vocabulary: GuideVocabulary) -> None:
        super().__init__(machine, vocabulary, True)

    def compile(self, guide: Guide) -> bytes:
        assert kind_of(guide) in (FAST, SLOW), "a guide that cannot be compiled reaches a rank"
        self._machine.sleep(self._machine.rng.random() * (0.5 if kind_of(guide) == SLOW else 0.02))
        return guide.text.encode()


def _mask(ids: Sequence[int], num_words: int) -> NDArray[np.int32]:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class GuidedDevice(FailingDevice):
    """A fake engine that takes the most likely token that a request's guide allows.

    Args:
        limits, seconds_per_step, failure: As for FailingDevice.
        grammars: The guides.
    """

    def __init__(
        self,
        limits: EngineLimits,
        seconds_per_step: float,
        failure: Callable[[int], Exception | None],
        grammars: Grammars,
    ) -> None:
        super().__init__(limits, seconds_per_step, failure)
        self._grammars = grammars
        self._matchers: dict[int, tuple[SlotStart, BudgetedMatcher]] = {}

    def _choose(self, row: Any, digests: Sequence[int], drafts: tuple[int, ...]) -> tuple[int, ...]:
        start: SlotStart = row.start
        if start.request.guide is None:
            return super()._choose(row, digests, drafts)
        row.num_tokens -= len(drafts)  # none of which is accepted
        known, matcher = self._matchers.get(id(start), (None, None))
        if matcher is None or known is not start:
            matcher = self._grammars.matcher(start.request.guide)
            matcher.consume(start.token_ids[start.request.prompt_length :])
            self._matchers[id(start)] = start, matcher
        masks = np.zeros((1, self._grammars.library().vocabulary.num_words), np.int32)
        for error in self._grammars.fill([MaskRows(matcher, 0)], masks).values():
            raise error
        bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")
        logits = logits_after(digests[0], self.limits.vocab_size)
        allowed: list[int] = np.flatnonzero(bits[: len(logits)]).tolist()
        token = max(allowed, key=logits.__getitem__) if allowed else GUIDE_END
        if allowed:
            matcher.consume((token,))
        row.go_on_with(token)
        row.state = digests[0]
        return (token,)
