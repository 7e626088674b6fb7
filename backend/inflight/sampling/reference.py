"""A reference implementation of the pipeline: one row and one step at a time, in plain Python, without
optimization.

Tests compare the fast code with it, and it shows what the fast code computes. No torch, no numpy; some
milliseconds per token. The steps and their order are documented in `inflight.sampling.pipeline`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import NO_REPEAT_OFF, SamplingConfig
from inflight.sampling.rng import GOLDEN_GAMMA, Purpose

_MASK = 2**64 - 1
_LARGEST_LOGIT = 1e30
BANNED = -math.inf


def uniform(seed: int, sequence_index: int, position: int, purpose: Purpose) -> float:
    """Return the random number in [0, 1) for one decision."""
    state = _mix(seed)
    for value in (sequence_index, position, int(purpose)):
        state = _mix(state ^ value)
    return (state >> 11) / 2**53


def _mix(x: int) -> int:
    x = (x + GOLDEN_GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def process(logits: Sequence[float], request: Request, tokens: Sequence[int]) -> list[float]:
    """Return the logits of one row after the sampling controls.

    `tokens` are all tokens of the sequence before the token to be sampled; ids >= vocab_size, which stand for
    rows of a prompt table, are ignored.
    """
    sampling = request.sampling
    row = list(logits)
    if allowed := sampling.allowed_token_ids:
        row = [logit if token in allowed else BANNED for token, logit in enumerate(row)]
    if request.embedding_bias is not None:
        bias = memoryview(request.embedding_bias.data).cast("f")
        row = [_bounded(logit + added, _LARGEST_LOGIT) for logit, added in zip(row, bias, strict=True)]
    biases: dict[int, float] = {}
    for token, added in zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True):
        biases[token] = biases.get(token, 0.0) + added
    for token, added in biases.items():
        row[token] = _bounded(row[token] + added, _LARGEST_LOGIT)
    row = [logit / (sampling.temperature or 1.0) for logit in row]
    penalty, largest = sampling.repetition_penalty, _LARGEST_LOGIT / (sampling.temperature or 1.0)
    for token in {token for token in tokens if token < len(row)}:
        row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
        row[token] -= sampling.presence_penalty
        row[token] -= sampling.frequency_penalty * list(tokens).count(token)
        row[token] = _bounded(row[token], largest)
    for token in banned_tokens(request, list(tokens), len(row)):
        row[token] = BANNED
    return row


def _bounded(logit: float, largest: float) -> float:
    """Clamp a logit to at most `largest` in magnitude; -inf, a banned token's logit, stays -inf."""
    return max(-largest, min(logit, largest)) if logit > BANNED else BANNED


def banned_tokens(request: Request, tokens: list[int], vocab_size: int) -> set[int]:
    """Return the token ids that may not follow `tokens`."""
    banned: set[int] = set()
    if len(tokens) - request.prompt_length < request.sampling.min_length:
        banned |= set(request.end_ids)
    for word in request.bad_words:
        before = list(word[:-1])
        if len(before) <= len(tokens) and tokens[len(tokens) - len(before) :] == before:
            banned.add(word[-1])
    size = request.sampling.no_repeat_ngram_size
    if 0 < size < NO_REPEAT_OFF and size <= len(tokens):
        last = tokens[len(tokens) - size + 1 :]
        for start in range(len(tokens) - size + 1):
            ngram = tokens[start : start + size]
            if ngram[:-1] == last and max(ngram) < vocab_size:
                banned.add(ngram[-1])
    return banned


def top_p_now(sampling: SamplingConfig, generated: Sequence[int]) -> float:
    """Return top_p after its decay over the tokens generated so far."""
    top_p = sampling.top_p
    for token in generated:
        top_p = max(top_p * sampling.top_p_decay, sampling.top_p_min) if sampling.top_p_decay < 1 else top_p
        if token == sampling.top_p_reset_id:
            top_p = sampling.top_p
    return top_p


def filtered_probabilities(
    logits: Sequence[float], sampling: SamplingConfig, generated: Sequence[int] = ()
) -> dict[int, float]:
    """Return the token ids that can be chosen, with their probabilities, most likely first; may be empty.

    Args:
        logits: Processed logits, before the division by the temperature.
        sampling: The request's controls.
        generated: The tokens generated so far, over which top_p decays.
    """
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    highest = logits[ranked[0]]
    if highest == BANNED:
        return {}
    if sampling.greedy:
        return {ranked[0]: 1.0}
    if sampling.top_n_sigma > 0.0:
        spread = statistics.pstdev([logit for logit in logits if logit > BANNED])
        ranked = [token for token in ranked if logits[token] >= highest - sampling.top_n_sigma * spread]
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    weights = {token: math.exp(logits[token] - highest) for token in ranked}
    if sampling.top_p > 0.0:
        top_p = top_p_now(sampling, generated)
        if top_p < 1.0:
            weights = _smallest_set(weights, top_p)
    weights = {token: weight for token, weight in weights.items() if weight >= sampling.min_p}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items() if weight > 0.0}


def _smallest_set(weights: dict[int, float], top_p: float) -> dict[int, float]:
    """Return the first of `weights`, which are ordered most likely first, whose share of the total reaches
    `top_p`; at least one."""
    needed = top_p * sum(weights.values())
    nucleus: dict[int, float] = {}
    reached = 0.0
    for token, weight in weights.items():
        if nucleus and reached >= needed:
            break
        nucleus[token] = weight
        reached += weight
    return nucleus


def distribution(logits: Sequence[float], request: Request, tokens: Sequence[int]) -> dict[int, float]:
    """Return the distribution from which the token after `tokens` is sampled, given the model's logits."""
    generated = tokens[request.prompt_length :]
    return filtered_probabilities(process(logits, request, tokens), request.sampling, generated)


def draw(probabilities: dict[int, float], number: float) -> int:
    """Sample a token by inverse CDF, in ascending order of id."""
    cumulative = 0.0
    for token in sorted(probabilities):
        cumulative += probabilities[token]
        if cumulative > number:
            return token
    return max(probabilities)  # the probabilities add up to slightly less than 1, because of rounding


def next_token(
    logits: Sequence[float], request: Request, tokens: Sequence[int], sequence_index: int = 0
) -> int | None:
    """Return the token after `tokens`, given the model's logits at the last of them; None if all tokens are
    banned."""
    seed = request.sampling.random_seed
    number = uniform(seed, sequence_index, len(tokens), Purpose.SAMPLE)
    probabilities = distribution(logits, request, tokens)
    return draw(probabilities, number) if probabilities else None


def drawn_log_prob(logits: Sequence[float], request: Request, tokens: Sequence[int], token: int) -> float:
    """Return the log probability of `token` in the distribution from which it was sampled; 0 if greedy."""
    return math.log(distribution(logits, request, tokens)[token])


def log_probs(logits: Sequence[float]) -> list[float]:
    """Return log_softmax of the logits; -inf for all tokens if every token is banned."""
    highest = max(logits)
    if highest == BANNED:
        return list(logits)
    total = math.log(sum(math.exp(logit - highest) for logit in logits))
    return [logit - highest - total for logit in logits]


def top_log_probs(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens with their log probabilities, from the model's logits."""
    values = log_probs(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    return [(token, values[token]) for token in ranked[:count]]


def beam_candidates(
    rows: Sequence[Sequence[float]],
    request: Request,
    tokens: Sequence[Sequence[int]],
    scores: Sequence[float],
    num_candidates: int,
) -> list[tuple[int, int, float]]:
    """Return the best (row, token id, score) of all continuations of a beam search, best first.

    Args:
        rows: The model's logits, one row for each beam.
        request: The search's request.
        tokens: Each beam's tokens.
        scores: Each beam's score so far.
        num_candidates: Number of continuations to return.
    """
    ranked: list[tuple[float, int, int, float]] = []
    for index, logits in enumerate(rows):
        for token, log_prob in enumerate(log_probs(process(logits, request, tokens[index]))):
            score = scores[index] + log_prob
            rank = score + request.sampling.beam_search_diversity_rate * index
            ranked.append((-rank, index, token, score))
    return [(index, token, score) for _, index, token, score in sorted(ranked)[:num_candidates]]


def verify_drafts(
    rows: Sequence[Sequence[float]],
    request: Request,
    tokens: Sequence[int],
    drafts: Sequence[int],
    sequence_index: int = 0,
    draft_logits: Sequence[Sequence[float]] | None = None,
) -> list[int]:
    """Return the new tokens after `tokens`: accepted drafts and one more, unless every token is banned there.

    Args:
        rows: The model's logits at the last of `tokens` and at each draft, drafts + 1 rows.
        request: The sequence's request, which may have an acceptance threshold.
        tokens: All tokens of the sequence before the drafts.
        drafts: The draft tokens.
        sequence_index: Part of the key of the random numbers.
        draft_logits: For each draft, the logits from which it was sampled; drafts are then accepted by rejection
            sampling. None: by equality.
    """
    new: list[int] = []
    for index, draft in enumerate(drafts):
        known = [*tokens, *new]
        if draft_logits is None:
            token = next_token(rows[index], request, known, sequence_index)
            accepted = token == draft
        elif not distribution(rows[index], request, known):
            token, accepted = None, False
        else:
            target, proposed = distribution(rows[index], request, known), softmax(draft_logits[index])
            accepted = _is_accepted(target, proposed, draft, request, sequence_index, len(known))
            token = draft if accepted else _resample(target, proposed, request, sequence_index, len(known))
        if token is None:
            return new
        new.append(token)
        if not accepted:
            return new
    last = next_token(rows[-1], request, [*tokens, *new], sequence_index)
    return new if last is None else [*new, last]


def _is_accepted(
    target: dict[int, float],
    proposed: list[float],
    draft: int,
    request: Request,
    sequence_index: int,
    position: int,
) -> bool:
    of_target = target.get(draft, 0.0)
    threshold = request.draft.acceptance_threshold if request.draft else None
    if threshold is not None:
        return of_target >= threshold * proposed[draft] and of_target > 0.0
    number = uniform(request.sampling.random_seed, sequence_index, position, Purpose.ACCEPT)
    return of_target > number * proposed[draft]


def _resample(
    target: dict[int, float], proposed: list[float], request: Request, sequence_index: int, position: int
) -> int:
    rest = {token: max(0.0, share - proposed[token]) for token, share in target.items()}
    if sum(rest.values()) == 0.0:
        rest = target
    total = sum(rest.values())
    number = uniform(request.sampling.random_seed, sequence_index, position, Purpose.RESAMPLE)
    return draw({token: share / total for token, share in rest.items() if share > 0.0}, number)


def softmax(logits: Sequence[float]) -> list[float]:
    """Return softmax of the logits."""
    return [math.exp(log_prob) for log_prob in log_probs(logits)]
