"""Batches that sample on the device, and batches that are scheduled before the previous batch's tokens arrive."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config import CapacityPolicy
from inflight.core.request.request import ExternalDraft, OutputOptions
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_limits, make_request, make_scheduler

NEEDING_HOST: dict[str, dict[str, Any]] = {
    "beams": {"sampling": SamplingConfig(beam_width=2)},
    "draft": {"draft": ExternalDraft((7,))},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "post-processor": {"logits_post_processor_name": "upper"},
    "penalty": {"sampling": SamplingConfig(presence_penalty=0.5)},
    "ngrams": {"sampling": SamplingConfig(no_repeat_ngram_size=3)},
    "bad words": {"bad_words": ((5, 6),)},
    "decaying top_p": {"sampling": SamplingConfig(top_k=4, top_p=0.9, top_p_decay=0.5)},
    "top_p alone": {"sampling": SamplingConfig(top_p=0.9)},
    "log probs": {"output": OutputOptions(return_log_probs=True)},
    "logits": {"output": OutputOptions(return_generation_logits=True)},
}
NOT_NEEDING_HOST: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"sampling": SamplingConfig(temperature=0.5, top_p=1.0)},
    "top_k": {"sampling": SamplingConfig(top_k=4, top_p=0.9, min_p=0.1)},
    "cold top_p": {"sampling": SamplingConfig(temperature=0.0, top_p=0.9)},
    "bad tokens": {"bad_words": ((5,), (6,))},
    "min_length": {"sampling": SamplingConfig(min_length=3), "end_ids": (1,)},
    "prompt log probs": {"output": OutputOptions(return_prompt_log_probs=True)},
}


@pytest.mark.parametrize("name", NEEDING_HOST)
def test_a_batch_of_requests_that_need_the_host_does_not_sample_on_the_device(name):
    scheduler = make_scheduler(
        max_num_sequences=8, overlaps_iterations=True, logits_post_processors=("upper",)
    )
    Driver(scheduler).accept(make_request(1, **NEEDING_HOST[name]), make_request(2, **NEEDING_HOST[name]))
    batch = scheduler.schedule()
    assert not batch.samples_on_device
    assert make_limits(overlaps_iterations=True).num_due(2, batch) == 2


@pytest.mark.parametrize("name", NEEDING_HOST)
def test_only_the_request_that_needs_the_host_waits(name):
    scheduler = make_scheduler(
        max_num_sequences=8, overlaps_iterations=True, logits_post_processors=("upper",)
    )
    Driver(scheduler).accept(make_request(1), make_request(2, **NEEDING_HOST[name]))
    first = scheduler.schedule()
    assert first.samples_on_device and len(first.sampled_slots()) == 2
    second = scheduler.schedule()
    assert second.samples_on_device
    assert (second.generation_slots, second.context) == ((0,), ())
    assert make_limits(overlaps_iterations=True).num_due(2, second) == 1


def test_requests_that_need_the_host_are_in_every_second_batch():
    scheduler = make_scheduler(overlaps_iterations=True)
    Driver(scheduler).accept(make_request(1, new=6), make_request(2, new=3, **NEEDING_HOST["penalty"]))
    ran = overlap_iterations(scheduler, [1, 2, 3, 4, 5, 6])
    assert [len(batch.sampled_slots()) for batch, _ in ran] == [2, 1, 2, 1, 2, 1]
    finals = {each.request_id: each.result for _, responses in ran for each in responses}
    assert finals[1].output_token_ids[0][4:] == (1, 2, 3, 4, 5, 6)
    assert finals[2].output_token_ids[0][4:] == (1, 3, 5)


@pytest.mark.parametrize("name", NOT_NEEDING_HOST)
def test_a_batch_of_other_requests_samples_on_the_device(name):
    scheduler = make_scheduler(overlaps_iterations=True)
    Driver(scheduler).accept(make_request(1), make_request(2, **NOT_NEEDING_HOST[name]))
    batch = scheduler.schedule()
    assert batch.samples_on_device
    limits = make_limits(overlaps_iterations=True)
    assert [limits.num_due(count, batch) for count in (1, 2)] == [0, 1]
    assert [limits.num_due(count, None) for count in (0, 1)] == [0, 1]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_without_overlap_no_batch_samples_on_the_device(num_micro_batches):
    scheduler = make_scheduler(num_micro_batches=num_micro_batches)
    Driver(scheduler).accept(make_request(1))
    batch = scheduler.schedule()
    assert not batch.samples_on_device
    limits = make_limits(num_micro_batches=num_micro_batches)
    assert [limits.num_due(num_micro_batches - more, batch) for more in (1, 0)] == [0, 1]


def test_a_chunk_before_the_contexts_end_never_needs_the_host():
    scheduler = make_scheduler(max_num_tokens=7, chunked=True, overlaps_iterations=True)
    Driver(scheduler).accept(make_request(1, prompt=14, **NEEDING_HOST["penalty"]))
    assert [scheduler.schedule().samples_on_device for _ in range(3)] == [True, True, False]


def answer(batch: ScheduledBatch, token: int = 7) -> ModelOutput:
    return ModelOutput(batch.iteration, [(token,) for _ in batch.sampled_slots()])


def overlap_iterations(
    scheduler: Scheduler, tokens: list[int]
) -> list[tuple[ScheduledBatch, list[Response]]]:
    """Run until idle; each batch's tokens arrive after the next batch is scheduled."""
    ran = []
    ahead = scheduler.schedule()
    while ahead is not None:
        batch, ahead = ahead, scheduler.schedule()
        ran.append((batch, scheduler.update(batch, answer(batch, tokens.pop(0)))))
        check_integrity(scheduler)
        ahead = ahead or scheduler.schedule()
    return ran


def test_no_row_is_computed_beyond_the_length_limit():
    scheduler = make_scheduler(overlaps_iterations=True)
    Driver(scheduler).accept(make_request(1, new=4))
    ran = overlap_iterations(scheduler, [1, 2, 3, 4])
    assert len(ran) == 4 and scheduler.num_active == 0
    ((final,),) = [responses for _, responses in ran if responses]
    assert final.result.output_token_ids[0][4:] == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("how", "kept", "reason"),
    [
        ({"end_ids": (3,)}, (1, 2), FinishReason.END_ID),
        ({"stop_words": ((2, 3),)}, (1, 2, 3), FinishReason.STOP_WORDS),
    ],
)
def test_an_unforeseen_end_costs_a_row_whose_token_is_dropped(how, kept, reason):
    """The sequence's blocks are held until the extra row is computed; then the final response is sent."""
    scheduler = make_scheduler(overlaps_iterations=True)
    Driver(scheduler).accept(make_request(1, new=9, **how))
    ran = overlap_iterations(scheduler, [1, 2, 3, 4])
    assert [len(responses) for _, responses in ran] == [0, 0, 0, 1]
    (final,) = ran[-1][1]
    assert final.result.output_token_ids[0][4:] == kept and final.result.finish_reasons == (reason,)
    assert scheduler.num_active == scheduler.kv_cache.pool.num_held == 0


def test_without_free_blocks_the_next_batch_waits_and_the_last_started_is_paused():
    """Both sequences need a third block, and the next tokens of both are in flight."""
    scheduler = make_scheduler(CapacityPolicy.MAX_UTILIZATION, num_blocks=5, overlaps_iterations=True)
    Driver(scheduler).accept(make_request(1, prompt=7, new=9), make_request(2, prompt=7, new=9))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first.samples_on_device and len(second.generation_slots) == 2
    scheduler.update(first, answer(first))
    assert scheduler.schedule() is None, "who is to be paused has a token in flight"
    scheduler.update(second, answer(second))
    third = scheduler.schedule()
    assert third.generation_slots == (0,)
    assert [one.request_id for one in scheduler.state().waiting] == [2]
    assert scheduler.stats(third).num_paused_requests == 1
    check_integrity(scheduler)
