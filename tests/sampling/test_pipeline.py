"""The fast pipeline compared with the slow reference: random requests together, over several iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.core.request.request import OutputOptions, Request
from inflight.core.schedule.batch import ContextChunk, ModelOutput, ScheduledBatch, SlotStart
from inflight.sampling import Sampler, reference
from tests.sampling.factories import Row, choose_tokens, make_request, make_sampler, start_batch
from tests.sampling.margins import is_decided
from tests.sampling.strategies import logits_rows, requests
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("row_kernels")

many_examples = settings(
    max_examples=examples(fast=20, all=250),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@dataclass
class Sequence:
    """The reference's record of a sequence, and its input of this iteration."""

    request: Request
    slot: int
    sequence_index: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)


@given(st.data())
@many_examples
def test_results_are_those_of_the_reference(data: st.DataObject) -> None:
    """Slots are taken, advanced with and without drafts, and taken again by other requests."""
    vocab_size, num_slots = data.draw(st.sampled_from([3, 5, 8, 40])), 5
    sampler = make_sampler(num_slots, vocab_size, normalize_log_probs=True)
    running: dict[int, Sequence] = {}
    for _ in range(data.draw(st.integers(2, 4))):
        released = data.draw(st.sets(st.sampled_from(sorted(running)))) if running else set()
        for slot in released:
            del running[slot]
        free = sorted(set(range(num_slots)) - set(running))
        taken = (
            data.draw(st.lists(st.sampled_from(free), unique=True, min_size=len(free) - 1)) if free else []
        )
        started = [_start(data, slot, vocab_size) for slot in taken]
        running.update({sequence.slot: sequence for sequence in started})
        rows = data.draw(st.permutations(sorted(running)))
        drafted = [running[slot] for slot in rows if _guess(data, running[slot], vocab_size)]
        plain = [running[slot] for slot in rows if not running[slot].drafts]
        _iterate(sampler, vocab_size, released, started, drafted, plain)


def _start(data: st.DataObject, slot: int, vocab_size: int) -> Sequence:
    """Start a new sequence, or one that resumes with generated tokens."""
    request = data.draw(requests(vocab_size))
    generated = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=4))
    index = data.draw(st.integers(0, 3))
    return Sequence(request, slot, index, [*request.input_token_ids, *generated])


def _guess(data: st.DataObject, sequence: Sequence, vocab_size: int) -> bool:
    """Give a sequence logits and maybe drafts, the first of them right."""
    num_drafts = data.draw(st.sampled_from([0, 0, 1, 3]))
    sequence.logits = data.draw(logits_rows(num_drafts + 1, vocab_size))
    sequence.drafts = []
    for row in sequence.logits[:num_drafts]:
        right = reference.next_token(
            row, sequence.request, [*sequence.tokens, *sequence.drafts], sequence.sequence_index
        )
        any_token = st.integers(0, vocab_size - 1)
        sequence.drafts.append(data.draw(any_token if right is None else st.just(right) | any_token))
    return num_drafts > 0


def _iterate(
    sampler: Sampler,
    vocab_size: int,
    released: set[int],
    started: list[Sequence],
    drafted: list[Sequence],
    plain: list[Sequence],
) -> None:
    batch = ScheduledBatch(
        iteration=3,
        released_slots=tuple(released),
        starts=tuple(
            SlotStart(s.slot, s.request, s.sequence_index, tuple(s.tokens) if s.request.looks_back else ())
            for s in started
        ),
        context=tuple(
            ContextChunk(s.slot, len(s.tokens) - 1, (s.tokens[-1], *s.drafts), True, len(s.drafts), True)
            for s in drafted
        ),
        generation_slots=tuple(s.slot for s in plain),
    )
    rows = [*drafted, *plain]
    positions = [len(s.tokens) + index for s in rows for index in range(len(s.drafts) + 1)]
    logits = torch.tensor([row for s in rows for row in s.logits]).reshape(len(positions), vocab_size)
    sampler.apply(batch)
    sampler.apply_drafts(batch)
    output = sampler.decode(batch, logits, np.array(positions, dtype=np.int64))
    assert output.iteration == 3 and len(output.token_ids) == len(rows) and not output.beams
    answered = {s.slot for s, tokens in zip(rows, output.token_ids, strict=True) if tokens}
    assert set(output.details) == {s.slot for s in rows if s.request.output.wants_details} & answered
    for sequence, tokens in zip(rows, output.token_ids, strict=True):
        _check_tokens(sequence, tokens)
        if sequence.slot in output.details:
            _check_details(sequence, tokens, output)
        sequence.tokens += tokens


def _check_tokens(sequence: Sequence, tokens: tuple[int, ...]) -> None:
    expected = reference.verify_drafts(
        sequence.logits, sequence.request, sequence.tokens, sequence.drafts, sequence.sequence_index
    )
    known = list(sequence.tokens)
    for row, token in zip(sequence.logits, [*expected, None], strict=False):
        if not is_decided(row, sequence.request, known, sequence.sequence_index):
            return  # from here on either may be correct
        if token is not None:
            known.append(token)
    assert list(tokens) == expected


def _check_details(sequence: Sequence, tokens: tuple[int, ...], output: ModelOutput) -> None:
    details, wanted = output.details[sequence.slot], sequence.request.output
    rows = sequence.logits[: len(tokens)]
    if wanted.return_log_probs:
        expected = [reference.log_probs(row)[token] for row, token in zip(rows, tokens, strict=True)]
        assert details.log_probs == pytest.approx(expected, abs=1e-5)
        _check_drawn(sequence, tokens, details.drawn_log_probs)
    else:
        assert details.log_probs == details.drawn_log_probs == ()
    if wanted.num_top_log_probs:
        for top, row in zip(details.top_log_probs, rows, strict=True):
            found = reference.top_log_probs(row, min(wanted.num_top_log_probs, len(row)))
            assert top.token_ids == tuple(token for token, _ in found)
            assert top.log_probs == pytest.approx([log_prob for _, log_prob in found], abs=1e-5)
    else:
        assert details.top_log_probs == ()
    logits = [np.frombuffer(data, dtype=np.float32).tolist() for data in details.logits]
    assert logits == (rows if wanted.return_generation_logits else [])


def _check_drawn(sequence: Sequence, tokens: tuple[int, ...], got: tuple[float, ...]) -> None:
    """Compare the distributions that tokens were drawn from, unless rounding decides which tokens are kept."""
    known = list(sequence.tokens)
    assert len(got) == len(tokens)
    for row, token, log_prob in zip(sequence.logits, tokens, got, strict=False):
        if not is_decided(row, sequence.request, known, sequence.sequence_index):
            return
        expected = reference.drawn_log_prob(row, sequence.request, known, token)
        assert log_prob == pytest.approx(expected, abs=1e-4)
        known.append(token)


def test_normalized_log_probs_are_of_the_kept_tokens() -> None:
    """With probabilities 4/8, 2/8 and 1/8, top_k 2 leaves 2/3 and 1/3; a greedy token has probability 1."""
    wanted = OutputOptions(return_log_probs=True)
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0]]).log().repeat(2, 1)
    rows = [
        Row(make_request(top_k=2, random_seed=1, output=wanted)),
        Row(make_request(output=wanted)),
    ]
    batch, positions = start_batch(rows)
    sampler = make_sampler(2, 4, normalize_log_probs=True)
    sampler.apply(batch)
    output = sampler.decode(batch, logits, positions)
    (sampled,) = output.token_ids[0]
    assert output.details[0].drawn_log_probs == pytest.approx([math.log([2 / 3, 1 / 3][sampled])])
    assert output.details[0].log_probs == pytest.approx([math.log([4 / 8, 2 / 8][sampled])])
    assert output.details[1].drawn_log_probs == pytest.approx([0.0])
    assert output.details[1].log_probs == pytest.approx([math.log(4 / 8)])


@pytest.mark.parametrize("vocab_size", [300, 5_000, 9_999])
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0], ids=["flat", "medium", "peaked"])
def test_long_rows_are_sampled_like_the_reference(vocab_size: int, scale: float) -> None:
    """Sums by block, float32 weights and digits of weights only matter with many tokens."""
    kinds = [
        {"top_k": 5},
        {"top_k": 400},
        {"top_k": vocab_size - 1, "min_p": 0.01},
        {"top_p": 0.2},
        {"top_p": 0.95, "temperature": 1.5},
        {"top_p": 0.9999},
        {"top_p": 0.99, "min_p": 0.05},
        {"top_p": 1.0},
        {"min_p": 0.2, "temperature": 0.8},
        {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "temperature": 2.0},
        {},
    ]
    _compare_long_rows(kinds, vocab_size, scale)


def _compare_long_rows(kinds: list[dict], vocab_size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(kinds), vocab_size, generator=generator) * scale
    logits = logits.bfloat16().float()  # so that there are ties
    prompt = logits[:, : 2 * 30 : 2].argsort()[0].tolist()
    rows = [Row(make_request(prompt, random_seed=seed, **kind)) for seed, kind in enumerate(kinds)]
    expected = [
        reference.next_token(values, row.request, row.tokens)
        for values, row in zip(logits.tolist(), rows, strict=True)
    ]
    assert choose_tokens(logits.clone(), rows) == expected


def test_requested_logits_are_not_changed() -> None:
    changing = {"repetition_penalty": 2.0, "bias": [1.0] * 50, "bad_words": [(3,)]}
    rows = [
        Row(make_request(top_k=3)),
        Row(make_request(**changing)),
        Row(make_request(**changing, output=OutputOptions(return_log_probs=True))),
        Row(make_request(**changing, output=OutputOptions(return_context_logits=True))),
        Row(make_request(top_p=0.5, temperature=0.1)),
        Row(make_request()),
    ]
    logits = torch.randn(6, 50)
    before = logits.clone()
    choose_tokens(logits, rows)
    changed = [row for row in range(6) if not torch.equal(logits[row], before[row])]
    assert changed == [1]


def test_an_infinite_bias_forces_or_bans_a_token() -> None:
    bias = [-math.inf] * 20
    bias[7] = math.inf
    kinds = [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_p": 1.0, "temperature": 0.1}, {"min_p": 0.1}]
    rows = [Row(make_request([7], bias=bias, repetition_penalty=1.5, **kind)) for kind in kinds]
    assert choose_tokens(torch.randn(5, 20), rows) == [7] * 5


@pytest.mark.parametrize("word", [(5, 7), (5, 5, 7), (5, 5, 5, 7), (4, 5, 7)])
@pytest.mark.parametrize("tokens", [(5,), (5, 5), (4, 5, 5)])
def test_a_bad_word_longer_than_the_sequence_bans_nothing(
    word: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 7] = 1.0
    row = Row(make_request(tokens, bad_words=[word]))
    is_banned = len(word) <= len(tokens) + 1 and word[:-1] == tokens[len(tokens) - len(word) + 1 :]
    assert choose_tokens(logits, [row]) == [0 if is_banned else 7]


@pytest.mark.parametrize("top_p_min", [0.0, 0.3, 0.95])
def test_top_p_decays_and_is_reset(top_p_min: float) -> None:
    """With equal logits the drawn ids are below top_p times the size of the vocabulary."""
    size, request = 1000, {"top_p": 0.9, "top_p_decay": 0.7, "top_p_min": top_p_min, "top_p_reset_id": 4}
    generated = [1, 2, 3, 4, 5, 4, 4, 6, 7, 8, 9, 10, 11, 12]
    rows = [
        Row(make_request([4, 0], random_seed=seed, **request), tuple(generated[:count]))
        for count in range(len(generated) + 1)
        for seed in range(100)
    ]
    drawn = choose_tokens(torch.zeros(len(rows), size), rows)
    for count in range(len(generated) + 1):
        top_p = reference.top_p_now(rows[0].request.sampling, generated[:count])
        highest = max(drawn[100 * count : 100 * count + 100])
        assert 0.88 * top_p * size < highest < top_p * size + 1
