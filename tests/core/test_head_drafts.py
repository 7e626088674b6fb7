"""Drafts that a draft head guesses on the device: when they end, and for which rows the head is needed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import takewhile

import pytest

from inflight.config import SchedulingConfig, Speculation
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import IterationInput, OutputOptions
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ModelOutput
from inflight.core.scheduler import Scheduler
from tests.core.factories import make_limits, make_request

COSTS = {"guess_cost": 0.1, "entry_cost": 0.04}


@dataclass
class Drafted:
    """The time and the calls of a draft head for a run of equal requests.

    Attributes:
        time: Time of the first sequence's tokens with drafts and the head; 1 is a row of a forward pass.
        num_tokens: Number of the first sequence's tokens after the first one.
        num_calls: Passes in which the head is needed for generated tokens.
        last_call: Number of generated tokens of the first sequence at the last of these passes.
        counts: Lengths of the first sequence's drafts.
    """

    time: float = 0.0
    num_tokens: int = 0
    num_calls: int = 0
    last_call: int = 0
    counts: list[int] = field(default_factory=list)


def run(count: int, share: float, new: int = 300, rows: int = 16, most: int = 3) -> Drafted:
    """Generate `count` requests at once, each draft token of which is accepted with probability `share`."""
    rng = random.Random(count)
    config = SchedulingConfig(
        max_num_tokens=512,
        enable_kv_cache_reuse=False,
        speculative_decoding_mode=Speculation(Speculation.MTP, most),
    )
    limits = make_limits(num_blocks=250 * count, max_num_sequences=count, max_sequence_length=1000)
    limits = replace(limits, break_even_rows=rows, **COSTS)
    scheduler, found = Scheduler(config, limits), Drafted()
    scheduler.accept(IterationInput(0, 0, tuple(make_request(each, (1, 2, 3), new) for each in range(count))))
    while (batch := scheduler.schedule()) is not None:
        drafts = {chunk.slot: chunk.num_draft_tokens for chunk in batch.context}
        tokens = []
        for slot in batch.sampled_slots():
            num_accepted = 0
            while num_accepted < drafts.get(slot, 0) and rng.random() < share:
                num_accepted += 1
            tokens.append((7,) * (num_accepted + 1))
        scheduler.update(batch, ModelOutput(batch.iteration, tokens))
        if not batch.generation_slots and not any(chunk.is_generation for chunk in batch.context):
            continue
        found.num_calls += bool(batch.head_slots)
        if 0 not in batch.sampled_slots():
            continue
        found.num_tokens += len(tokens[batch.sampled_slots().index(0)])
        found.time += 1 + drafts.get(0, 0) * (count / (count + rows) + COSTS["guess_cost"])
        if drafts.get(0):
            found.counts.append(drafts[0])
        if 0 in batch.head_slots:
            found.last_call = found.num_tokens
            found.time += (1 + drafts.get(0, 0)) * COSTS["entry_cost"]
        else:
            assert not drafts.get(0)
    return found


@pytest.mark.parametrize("rows", [16, 256])
@pytest.mark.parametrize("count", [1, 4, 16, 32])
@pytest.mark.parametrize("new", [150, 600])
def test_a_head_that_is_never_right_is_left_alone_after_few_tokens(count: int, rows: int, new: int) -> None:
    found = run(count, 0.0, new, rows)
    assert found.num_tokens == new - 1
    assert 0 < found.last_call < 100
    assert found.num_calls <= found.last_call
    assert found.time - found.num_tokens < 2.5 + 2 * (count / (count + rows) + 0.1) + 0.2


def test_a_head_that_is_often_right_goes_on() -> None:
    for count, rows in ((1, 16), (4, 16), (1, 256), (16, 256)):
        found = run(count, 0.8, 600, rows)
        assert found.last_call > 590
        assert found.time < 0.85 * found.num_tokens


def drafting_requests(scheduler: Scheduler, first: int, count: int, share: float) -> list[int]:
    """Generate requests one after the other, and return the numbers of those that had drafts."""
    rng, found = random.Random(first), []
    for number in range(first, first + count):
        scheduler.accept(IterationInput(0, 0, (make_request(number, (1, 2, 3), 100),)))
        num_drafts = 0
        while (batch := scheduler.schedule()) is not None:
            (drafts,) = [chunk.num_draft_tokens for chunk in batch.context] or [0]
            num_drafts += drafts
            num_accepted = sum(1 for _ in takewhile(lambda _: rng.random() < share, range(drafts)))
            scheduler.update(batch, ModelOutput(batch.iteration, [(7,) * (num_accepted + 1)]))
        if num_drafts:
            found.append(number)
    return found


def test_few_sequences_try_a_head_that_was_never_right_and_all_use_it_again_when_it_is() -> None:
    config = SchedulingConfig(
        max_num_tokens=512,
        speculative_decoding_mode=Speculation(Speculation.MTP, 3),
        enable_kv_cache_reuse=False,
    )
    limits = replace(make_limits(num_blocks=100, max_sequence_length=1000), break_even_rows=16, **COSTS)
    scheduler = Scheduler(config, limits)
    assert drafting_requests(scheduler, 0, 60, 0.0) == [0, 2, 5, 10, 19, 36, 53]
    assert drafting_requests(scheduler, 60, 20, 0.9) == list(range(70, 80))


def test_with_many_rows_even_a_good_head_is_left_alone() -> None:
    found = run(120, 0.9, 150)
    assert 120 / (120 + 16) + COSTS["guess_cost"] < 1
    assert found.last_call < 150
    found = run(160, 1.0, 200)
    assert 160 / (160 + 16) + COSTS["guess_cost"] > 1
    assert (found.counts, found.last_call) == ([], 63)


def test_beams_and_requests_with_logits_need_no_head_after_their_prompts() -> None:
    config = SchedulingConfig(max_num_tokens=64, speculative_decoding_mode=Speculation(Speculation.MTP, 2))
    scheduler = Scheduler(config, replace(make_limits(num_blocks=100), **COSTS))
    requests = (
        make_request(0, (1, 2, 3), 20),
        make_request(1, (1, 2, 3), 20, output=OutputOptions(return_generation_logits=True)),
        make_request(2, (4, 5), 20, sampling=SamplingConfig(beam_width=2)),
    )
    scheduler.accept(IterationInput(0, 0, requests))
    first = scheduler.schedule()
    assert first is not None and [chunk.slot for chunk in first.context] == [*first.head_slots] == [0, 1, 2]
    beams = [BeamCandidates((0,) * 4, (5, 6, 7, 8), (-1.0, -2.0, -3.0, -4.0))]
    scheduler.update(first, ModelOutput(first.iteration, [(7,), (7,), ()], beams))
    read = []
    for _ in range(6):
        batch = scheduler.schedule()
        assert batch is not None and batch.num_rows == 4
        read.append(set(batch.head_slots))
        tokens = [(7,) if slot < 2 else () for slot in batch.sampled_slots()]
        scheduler.update(batch, ModelOutput(batch.iteration, tokens, beams))
    assert read == [{0}] * 6
