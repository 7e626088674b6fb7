"""The decisions of one beam search: which beams continue, which have finished, and when the search ends.

The device ranks continuations and the scheduler moves beams. In between, this module chooses among the candidates
and returns parents and tokens. It is independent of slots, blocks and iterations. Each token of a beam is
linked to the token before it, so that a step takes O(candidates), independent of the length. Pure. Used on the
loop thread.

Reference: transformers `GenerationMixin._beam_search`, which gives equal tokens and scores:

    candidates  the max(2, 1 + number of end ids) * K best continuations of the K beams
    finish      the first K candidates, if they reach an end id, a stop word or the length limit; later
                candidates that reach one are dropped
    continue    the first K candidates that reach none of these
    score       cumulative log probability / generated_length ** length_penalty, the end id counted
    end         K beams have finished and no running beam could be better (`early_stopping`), or none continues
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from inflight.core.request.guide import GUIDE_END
from inflight.core.request.request import Request
from inflight.core.request.response import TopLogProbs
from inflight.core.request.stop import FinishReason, StopWords

_NO_SCORE = -1.0e9
"""The score of a beam that only fills a row, as a search has a fixed number of rows."""
_POSSIBLE = -1.0e8
"""Beams with a lower score contain a banned token or only fill a row, and are never returned."""


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The best continuations of one BeamGroup, best first; of equal ones the lower row, then the lower token
    id, first.

    Attributes:
        rows: For each candidate, the index in the group of the row that it continues.
        token_ids: For each candidate, the new token; GUIDE_END for a beam whose guide allows nothing but the end.
        scores: For each candidate, the row's score plus the token's log probability after bias, temperature,
            penalties and bans. beam_search_diversity_rate changes the ranking only.
        log_probs: For each candidate, the model's own log probability of the token; empty if not wanted.
        top_log_probs: For each row of the group, the most likely next tokens; empty if not wanted.
        logits: For each row of the group, float32 [vocab_size] as bytes; empty if not wanted.
    """

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    logits: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a beam search.

    Attributes:
        token_ids: The generated tokens, without the end id.
        cum_log_prob: Sum of the tokens' log probabilities after penalties, bias and temperature, end id included.
        score: The score by which hypotheses are ranked: `cum_log_prob` / generated_length ** length_penalty.
        finish_reason: NOT_FINISHED while the beam runs.
        log_probs: The model's own log probability of each of `token_ids`; empty if the device gave none.
        top_log_probs: The most likely tokens at the position of each of `token_ids`; empty if not returned.
        logits: float32 [vocab_size] for each of `token_ids`; empty if the device gave none.
    """

    token_ids: tuple[int, ...]
    cum_log_prob: float
    score: float
    finish_reason: FinishReason
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    logits: tuple[bytes, ...] = ()


_NOTHING = Hypothesis((), _NO_SCORE, _NO_SCORE, FinishReason.LENGTH)
"""The hypothesis that is returned in place of a beam for which the bans left no token."""
_NOT_BEGUN = Hypothesis((), 0.0, 0.0, FinishReason.NOT_FINISHED)
"""The hypothesis of every beam before the first step."""


class _BeamToken:
    """A token of a beam, linked to the token before it."""

    __slots__ = ("log_prob", "logits", "parent", "token_id", "top_log_probs")

    def __init__(self, parent: _BeamToken | None, candidates: BeamCandidates, rank: int) -> None:
        row = candidates.rows[rank]
        self.parent = parent
        self.token_id = candidates.token_ids[rank]
        self.log_prob = candidates.log_probs[rank] if candidates.log_probs else None
        self.top_log_probs = candidates.top_log_probs[row] if candidates.top_log_probs else None
        self.logits = candidates.logits[row] if candidates.logits else None


def _path(node: _BeamToken | None, most: int = -1) -> list[_BeamToken]:
    """Return the nodes of a beam in order up to `node`: all nodes, or the last `most`."""
    nodes: list[_BeamToken] = []
    while node is not None and len(nodes) != most:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A beam with its score. `node` is its last token, which may be an end id."""

    cumulative: float
    score: float
    node: _BeamToken
    reason: FinishReason


class BeamSearch:
    """The search of one request with `beam_width` beams, from its context's logits to its last hypothesis.

    Attributes:
        done: Whether the search has ended: then `hypotheses` is final and `advance` must not be called.
        scores: For each row, the cumulative log probability of its beam, for the next `BeamGroup`.
        parents: For each running beam, the index of the row that it continues since the last `advance`.
        token_ids: For each running beam, its new token since the last `advance`.
        num_candidates: Number of continuations from which `advance` chooses.
    """

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._request = request
        self._width = sampling.beam_width
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self._end_ids = frozenset(request.end_ids)
        self._stop_words = StopWords(request.stop_words, request.stop_words_after)
        self._num_generated = 0
        self._beams: list[_BeamToken | None] = [None]
        self._ended: list[_Ranked] = []  # the best finished beams so far, at most K, best first
        self.done = False
        self.scores: tuple[float, ...] = (0.0,)
        self.parents: tuple[int, ...] = ()
        self.token_ids: tuple[int, ...] = ()
        self.num_candidates = max(2, 1 + len(request.end_ids)) * self._width

    @property
    def num_rows(self) -> int:
        """Number of running beams: one until the first `advance`, then beam_width."""
        return len(self._beams)

    @property
    def has_found_nothing(self) -> bool:
        """Whether the search has ended without a hypothesis, because bans left no token for any beam."""
        return self.done and not self._ended

    def row_tokens(self, row: int) -> tuple[int, ...]:
        """Return the generated tokens of a running beam."""
        return tuple(node.token_id for node in _path(self._beams[row]))

    def advance(self, candidates: BeamCandidates) -> None:
        """Decide which of the best continuations become running beams and which have finished."""
        assert not self.done, "the search has ended"
        self._num_generated += 1
        running: list[tuple[int, _BeamToken]] = []  # rank and last token
        for rank, row in enumerate(candidates.rows):
            node = _BeamToken(self._beams[row], candidates, rank)
            reason = self._finish_reason(node)
            if reason is FinishReason.NOT_FINISHED:
                running.append((rank, node))
            elif rank < self._width and candidates.scores[rank] > _POSSIBLE:
                self._ended.append(self._ranked(candidates.scores[rank], node, reason))
            if len(running) == self._width:
                break
        self._ended = sorted(self._ended, key=lambda beam: -beam.score)[: self._width]
        self._continue_beams(running, candidates)
        self.done = self._has_ended()

    def _finish_reason(self, node: _BeamToken) -> FinishReason:
        if node.token_id in self._end_ids or node.token_id == GUIDE_END:
            return FinishReason.END_ID
        if self._stop_words.may_end_with(node.token_id, self._num_generated):
            newest = [each.token_id for each in _path(node, self._stop_words.longest)]
            if self._stop_words.matches(newest, self._num_generated):
                return FinishReason.STOP_WORDS
        if self._num_generated == self._request.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.NOT_FINISHED

    def _ranked(self, cumulative: float, node: _BeamToken, reason: FinishReason) -> _Ranked:
        return _Ranked(cumulative, cumulative / self._divisor(self._num_generated), node, reason)

    def _divisor(self, length: int) -> float:
        """Return the divisor of a score: `length ** length_penalty`, or the largest float if that overflows."""
        try:
            return float(length) ** self._length_penalty
        except OverflowError:
            return sys.float_info.max

    def _continue_beams(self, running: list[tuple[int, _BeamToken]], candidates: BeamCandidates) -> None:
        """Make the chosen candidates the running beams; if there are too few, repeat the last one."""
        missing = self._width - len(running) if running else 0
        self.scores = tuple(candidates.scores[rank] for rank, _ in running) + (_NO_SCORE,) * missing
        running = running + running[-1:] * missing
        self._beams = [node for _, node in running]
        self.parents = tuple(candidates.rows[rank] for rank, _ in running)
        self.token_ids = tuple(node.token_id for _, node in running)

    def _has_ended(self) -> bool:
        best = max(self.scores, default=_NO_SCORE)
        if best <= _POSSIBLE:
            return True
        if len(self._ended) < self._width:
            return False
        if self._early_stopping == 1:
            return True
        length = self._num_generated
        if self._early_stopping != 0 and self._length_penalty > 0.0:
            length = self._request.max_new_tokens
        return best / self._divisor(length) <= self._ended[-1].score

    def hypotheses(self) -> list[Hypothesis]:
        """Return the `num_outputs` best outputs, best first, as if the search ended now."""
        wanted = self._request.sampling.num_outputs
        if not self._num_generated:
            return [_NOT_BEGUN] * wanted
        ranked = list(self._ended)
        if not self.done:
            ranked += [
                self._ranked(score, node, FinishReason.NOT_FINISHED)
                for score, node in zip(self.scores, self._beams)
                if node is not None and score > _POSSIBLE
            ]
            ranked.sort(key=lambda beam: -beam.score)
        found = [self._hypothesis(beam) for beam in ranked[:wanted]]
        return found + [_NOTHING] * (wanted - len(found))

    def _hypothesis(self, beam: _Ranked) -> Hypothesis:
        nodes = _path(beam.node.parent if beam.reason is FinishReason.END_ID else beam.node)
        return Hypothesis(
            token_ids=tuple(node.token_id for node in nodes),
            cum_log_prob=beam.cumulative,
            score=beam.score,
            finish_reason=beam.reason,
            log_probs=tuple(node.log_prob for node in nodes if node.log_prob is not None),
            top_log_probs=tuple(node.top_log_probs for node in nodes if node.top_log_probs is not None),
            logits=tuple(node.logits for node in nodes if node.logits is not None),
        )
