"""The model that the fake engine simulates, and the expected tokens of a sequence that runs alone.

A position's **digest** stands for its keys and values: it depends on every token up to this position. The
logits after a position are pseudo-random numbers seeded by the digest, so that all data of a token (log
probs, top tokens, ranks of beams) are consistent. The `expected_*` functions return the results of a
sequence or beam search that runs alone. All results are deterministic and equal in every process.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.beam_search import BeamCandidates, BeamSearch, Hypothesis
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import TopLogProbs
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import BeamGroup, TokenDetails

_GREEDY_LOGIT = 8.5
_LOGIT_STEPS, _LOGIT_SCALE = (1 << 20) - 1, 1 / (1 << 17)  # logits of other tokens: 0 .. 8, exact in float32
_NO_HISTORY = 0


@dataclass(frozen=True, slots=True)
class Conditions:
    """All that a sequence's keys and values depend on, apart from its tokens.

    Attributes:
        identity: The request's identity.
        adapter: Digest of the adapter's content; empty without an adapter.
        prompt_table: Digest of the prompt table's content; empty without a table.
        later: For each position of the prompt, the later tokens that it attends to: those of its picture span.
            Empty: no position attends to later tokens.
    """

    identity: PrefixIdentity = field(default_factory=PrefixIdentity)
    adapter: bytes = b""
    prompt_table: bytes = b""
    later: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, request: Request, adapter: bytes = b"", first_virtual_id: int | None = None) -> Conditions:
        """Return the conditions of a request.

        Args:
            request: The request.
            adapter: Digest of its adapter's content.
            first_virtual_id: The first id of virtual tokens, for a model in which consecutive virtual tokens
                attend to each other in both directions; None: all attention is causal.
        """
        table = request.prompt_table
        later: tuple[tuple[int, ...], ...] = ()
        if first_virtual_id is not None:
            later = later_virtual(request.input_token_ids, first_virtual_id)
        return cls(request.identity, adapter, table.digest if table else b"", later)

    def seen_as(self, token_id: int, position: int, later: Sequence[int] = ()) -> int:
        """Return the number that represents a token in digests. If the conditions equal `PLAIN`, it is the id.

        An extra id changes the number of one token; every other condition changes the numbers of all tokens.
        `later`: the tokens after it that it attends to.
        """
        seen = self._seen_alone(token_id, position)
        if not later:
            return seen
        return hash((seen, *(self._seen_alone(each, at) for at, each in enumerate(later, position + 1))))

    def _seen_alone(self, token_id: int, position: int) -> int:
        identity = self.identity
        extra = identity.extra_ids[position] if position < len(identity.extra_ids) else 0
        if not (extra or identity.cache_salt_id or self.adapter or self.prompt_table):
            return token_id
        # hash() of bytes differs between processes; hash() of numbers does not.
        adapter, table = int.from_bytes(self.adapter, "big"), int.from_bytes(self.prompt_table, "big")
        return hash((token_id, extra, identity.cache_salt_id, adapter, table))


PLAIN = Conditions()
"""The conditions of a sequence whose keys and values depend on its tokens alone."""


def later_virtual(token_ids: Sequence[int], first_virtual_id: int) -> tuple[tuple[int, ...], ...]:
    """Return for each token the ids of the virtual tokens that follow it without a gap; () for text."""
    found: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for token_id in reversed(token_ids):
        is_virtual = token_id >= first_virtual_id
        found.append(following if is_virtual else ())
        following = (token_id, *following) if is_virtual else ()
    return tuple(reversed(found))


def digest_after(prefix: Sequence[int], token_id: int) -> int:
    """Return the digest of a token after positions with these digests; never 0."""
    # hash() of a tuple of ints is the same in every process; a broken digest only weakens the fake.
    return hash((*prefix, token_id)) or 1


def looks_back(sampling: SamplingConfig) -> bool:
    """Return whether the fake model's choice depends on earlier tokens that a slot remembers."""
    return sampling.looks_back


def remember(history: int, token_ids: Iterable[int]) -> int:
    """Return the history of a slot after further tokens. The history before the first token is 0."""
    for token_id in token_ids:
        history = hash((history, token_id)) or 1
    return history


def choose(
    digest: int, history: int, sampling: SamplingConfig, sequence_index: int, position: int, vocab_size: int
) -> int:
    """Return the token at `position`: the most likely token, or one drawn with seed, sequence index and position.

    It depends on the digest and the history. The code is written out for speed, because it runs for every
    row.
    """
    state = hash((digest, history)) if history else digest
    if sampling.greedy:
        return hash((state, 0, 0)) % vocab_size
    return hash((state, sampling.random_seed + 1, sequence_index, position)) % vocab_size


def logits_after(state: int, vocab_size: int) -> array[float]:
    """Return the logits after a position whose digest is `state`, float32 [vocab_size].

    The token that `choose` returns without sampling has the largest logit.
    """
    values = array("f", [(hash((state, token)) & _LOGIT_STEPS) * _LOGIT_SCALE for token in range(vocab_size)])
    values[hash((state, 0, 0)) % vocab_size] = _GREEDY_LOGIT
    return values


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Return the log prob of every token."""
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def top_log_probs(log_probs: Sequence[float], count: int) -> TopLogProbs:
    """Return the `count` most likely tokens. Among equally likely tokens, the lower id comes first."""
    tokens = heapq.nsmallest(count, range(len(log_probs)), key=lambda token: (-log_probs[token], token))
    return TopLogProbs(tuple(tokens), tuple(log_probs[token] for token in tokens))


def rank_candidates(
    group: BeamGroup, rows: Sequence[tuple[int, int]], request: Request, vocab_size: int
) -> BeamCandidates:
    """Return the best continuations of a beam group. `rows` has (digest, history) of each beam."""
    output, rate = request.output, request.sampling.beam_search_diversity_rate
    logits = [logits_after(digest, vocab_size) for digest, _ in rows]
    log_probs = [log_softmax(values) for values in logits]
    ranked_by = [
        log_softmax(logits_after(hash((digest, history)), vocab_size)) if history else plain
        for (digest, history), plain in zip(rows, log_probs)
    ]
    every = [
        (-(score + log_prob + rate * row), row, token, score + log_prob)
        for row, score in enumerate(group.scores)
        for token, log_prob in enumerate(ranked_by[row])
    ]
    best = heapq.nsmallest(group.num_candidates, every)
    return BeamCandidates(
        rows=tuple(row for _, row, _, _ in best),
        token_ids=tuple(token for _, _, token, _ in best),
        scores=tuple(score for _, _, _, score in best),
        log_probs=tuple(log_probs[row][token] for _, row, token, _ in best)
        if output.return_log_probs
        else (),
        top_log_probs=tuple(top_log_probs(each, output.num_top_log_probs) for each in log_probs)
        if output.num_top_log_probs
        else (),
        logits=tuple(values.tobytes() for values in logits) if output.return_generation_logits else (),
    )


def describe_tokens(
    logits: Sequence[Sequence[float]], token_ids: Sequence[int], output: OutputOptions
) -> TokenDetails:
    """Return the requested details of tokens.

    Each token was chosen from the row of `logits` with the same index.
    """
    log_probs = [log_softmax(values) for values in logits]
    count = output.num_top_log_probs
    return TokenDetails(
        log_probs=tuple(each[token] for each, token in zip(log_probs, token_ids))
        if output.return_log_probs
        else (),
        top_log_probs=tuple(top_log_probs(each, count) for each in log_probs) if count else (),
        logits=tuple(array("f", values).tobytes() for values in logits)
        if output.return_generation_logits
        else (),
    )


class LoneSequence:
    """A sequence that runs alone.

    Args:
        token_ids: The first tokens.
        vocab_size: Number of token ids.
        attend_to_all: Whether a digest depends on all earlier digests, or only on the previous one.
        conditions: All that the digests depend on, apart from the tokens.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        vocab_size: int,
        attend_to_all: bool = True,
        conditions: Conditions = PLAIN,
    ) -> None:
        self.tokens: list[int] = []
        self._vocab_size = vocab_size
        self._attend_to_all = attend_to_all
        self._conditions = conditions
        self._is_plain = conditions == PLAIN
        self._digests: list[int] = []
        for token_id in token_ids:
            self.append(token_id)

    @property
    def digest(self) -> int:
        """Digest of the last token."""
        return self._digests[-1]

    def append(self, token_id: int) -> None:
        """Add a token to the end of the sequence and compute its digest."""
        prefix = self._digests if self._attend_to_all else self._digests[-1:]
        seen, position = token_id, len(self.tokens)
        if not self._is_plain:
            later = self._conditions.later[position : position + 1]
            seen = self._conditions.seen_as(token_id, position, *later)
        self._digests.append(digest_after(prefix, seen))
        self.tokens.append(token_id)

    def continued(self, token_id: int) -> LoneSequence:
        """Return a copy with one more token."""
        copy = LoneSequence((), self._vocab_size, self._attend_to_all, self._conditions)
        copy.tokens, copy._digests = self.tokens.copy(), self._digests.copy()
        copy.append(token_id)
        return copy

    def history(self, sampling: SamplingConfig) -> int:
        """Return the value of a slot's `history` after the tokens so far."""
        return remember(_NO_HISTORY, self.tokens) if looks_back(sampling) else _NO_HISTORY

    def logits(self) -> array[float]:
        """Return the logits after the last token."""
        return logits_after(self.digest, self._vocab_size)


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    sampling: SamplingConfig | None = None,
    attend_to_all: bool = True,
    sequence_index: int = 0,
    conditions: Conditions = PLAIN,
) -> list[int]:
    """Return the first `num_tokens` tokens of a sequence that runs alone."""
    sampling = sampling or SamplingConfig()
    sequence = LoneSequence(prompt, vocab_size, attend_to_all, conditions)
    while len(sequence.tokens) < len(prompt) + num_tokens:
        history, position = sequence.history(sampling), len(sequence.tokens)
        sequence.append(choose(sequence.digest, history, sampling, sequence_index, position, vocab_size))
    return sequence.tokens[len(prompt) :]


def expected_logits(
    prompt: Sequence[int],
    token_ids: Sequence[int],
    vocab_size: int,
    attend_to_all: bool = True,
    conditions: Conditions = PLAIN,
) -> list[array[float]]:
    """Return the logits from which each of `token_ids`, which follow `prompt`, is chosen."""
    sequence = LoneSequence(prompt, vocab_size, attend_to_all, conditions)
    logits: list[array[float]] = []
    for token_id in token_ids:
        logits.append(sequence.logits())
        sequence.append(token_id)
    return logits


def expected_log_probs(
    prompt: Sequence[int], token_ids: Sequence[int], vocab_size: int, attend_to_all: bool = True
) -> list[float]:
    """Return the model's log prob of each of `token_ids`, which follow `prompt`.

    For a prompt's own tokens, use `[0.0] + expected_log_probs(prompt[:1], prompt[1:], ...)`.
    """
    logits = expected_logits(prompt, token_ids, vocab_size, attend_to_all)
    return [log_softmax(values)[token_id] for values, token_id in zip(logits, token_ids)]


def expected_beams(
    request: Request, vocab_size: int, attend_to_all: bool = True, conditions: Conditions | None = None
) -> list[Hypothesis]:
    """Return the result of a beam search whose beams each run alone."""
    return expected_beam_steps(request, vocab_size, attend_to_all, conditions)[-1]


def expected_beam_steps(
    request: Request, vocab_size: int, attend_to_all: bool = True, conditions: Conditions | None = None
) -> list[list[Hypothesis]]:
    """Return the hypotheses of a beam search after each step. Those of the last step are its result.

    `conditions` are the request's; None: those of a request without an adapter.
    """
    conditions = conditions or Conditions.of(request)
    search = BeamSearch(request)
    beams = [LoneSequence(request.input_token_ids, vocab_size, attend_to_all, conditions)]
    steps: list[list[Hypothesis]] = []
    while not search.done:
        group = BeamGroup(tuple(range(len(beams))), search.scores, search.num_candidates)
        rows = [(beam.digest, beam.history(request.sampling)) for beam in beams]
        search.advance(rank_candidates(group, rows, request, vocab_size))
        beams = [beams[row].continued(token) for row, token in zip(search.parents, search.token_ids)]
        steps.append(search.hypotheses())
    return steps
