"""Log probabilities, logits and times beside the tokens: exact values for given outputs of the device."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import FunctionType, ModuleType

import pytest

from inflight.additional_outputs import OfferedOutput, WantedOutput
from inflight.config import CapacityPolicy, ChunkingPolicy
from inflight.core.request.request import ExternalDraft, OutputOptions
from inflight.core.request.response import Response, TopLogProbs, merge_responses
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ContextDetails, ModelOutput, ScheduledBatch, TokenDetails
from inflight.core.scheduler import Scheduler
from inflight.errors import StepFailed
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler


def update(scheduler: Scheduler, batch: ScheduledBatch, *tokens: tuple[int, ...], **output) -> list[Response]:
    responses = scheduler.update(batch, ModelOutput(batch.iteration, list(tokens), **output))
    check_integrity(scheduler)
    return responses


def num_bytes_held(root: object) -> int:
    """Count the bytes of all bytes objects reachable from `root`, except through functions and classes."""
    found, pending = dict[int, object](), [root]
    while pending:
        each = pending.pop()
        if id(each) not in found and not isinstance(each, (type, FunctionType, ModuleType)):
            found[id(each)] = each
            pending += gc.get_referents(each)
    return sum(len(each) for each in found.values() if isinstance(each, (bytes, bytearray)))


def test_streamed_log_probs_are_new_ones_and_their_sum_is_cumulative():
    scheduler = make_scheduler()
    output = OutputOptions(return_log_probs=True)
    Driver(scheduler).accept(make_request(new=3, streaming=True, output=output, end_ids=(4,)))
    sums, deltas = [], []
    for token, log_prob in ((5, -1.0), (6, -2.0), (4, -4.0)):
        details = {0: TokenDetails(log_probs=(log_prob,))}
        (response,) = update(scheduler, scheduler.schedule(), (token,), details=details)
        sums += response.result.cum_log_probs
        deltas += response.result.log_probs
    assert deltas == [(-1.0,), (-2.0,), ()]
    assert sums == [-1.0, -3.0, -3.0]


def test_context_outputs_computed_after_a_failure_are_dropped():
    policy = ChunkingPolicy.EQUAL_PROGRESS
    scheduler = make_scheduler(max_num_tokens=8, chunked=True, chunking_policy=policy, num_micro_batches=2)
    driver = Driver(scheduler)
    outputs = (OutputOptions(return_context_logits=True), OutputOptions())
    driver.accept(*(make_request(i, prompt=12, output=output) for i, output in enumerate(outputs, 1)))
    failed, behind = scheduler.schedule(), scheduler.schedule()
    chunk = behind.context[0]
    assert (chunk.start, len(chunk.token_ids)) == (4, 4)
    assert scheduler.fail(failed, StepFailed("boom")) == driver.accept(stop=(1,)) == []
    (final,) = update(scheduler, behind, context={chunk.slot: ContextDetails(logits=bytes(4 * 2 * 4))})
    assert final.request_id == 1 and final.error is None and not final.result.context_logits.data


def test_context_outputs_of_chunks_are_concatenated_without_reuse():
    scheduler = make_scheduler(max_num_tokens=8, chunked=True, reuse=True)
    driver = Driver(scheduler)
    driver.accept(make_request(1, prompt=10, new=1))
    driver.step()
    driver.step()
    output = OutputOptions(return_prompt_log_probs=True, return_context_logits=True)
    driver.accept(make_request(2, prompt=10, new=1, output=output))
    responses = []
    for log_probs in ([-1.0] * 8, [-2.0]):
        batch = scheduler.schedule()
        (chunk,) = batch.context
        rows = len(chunk.token_ids)
        assert chunk.wants_context
        details = ContextDetails(tuple(log_probs), bytes(4 * 2 * rows))
        tokens = [(5,)] if chunk.is_last else []
        responses += update(scheduler, batch, *tokens, context={chunk.slot: details})
    (final,) = responses
    assert final.result.prompt_log_probs == (0.0, *[-1.0] * 8, -2.0)
    assert final.result.context_logits.shape == (10, 2)


def test_perf_metrics_have_times_and_block_counts():
    scheduler = make_scheduler(reuse=True)
    driver = Driver(scheduler)
    driver.accept(make_request(1, prompt=10, new=1))
    driver.step()
    output = OutputOptions(return_perf_metrics=True)
    driver.accept(make_request(2, prompt=10, new=2, output=output, arrival_time_ns=3))
    scheduler.update(scheduler.schedule(), ModelOutput(0, [(5,)]), now_ns=100)
    (final,) = scheduler.update(scheduler.schedule(), ModelOutput(0, [(6,)]), now_ns=200)
    metrics = final.result.perf_metrics
    assert (metrics.arrival_time_ns, metrics.first_token_time_ns, metrics.last_token_time_ns) == (3, 100, 200)
    assert (metrics.num_new_blocks, metrics.num_reused_blocks) == (1, 2)


@pytest.mark.parametrize("ended_by", ["stop", "deadline"])
def test_details_end_with_the_tokens_of_a_stopped_sequence(ended_by):
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    output = OutputOptions(
        return_log_probs=True,
        num_top_log_probs=1,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        return_perf_metrics=True,
    )
    driver.accept(make_request(prompt=(7, 8), new=9, output=output, allotted_time_ms=1))
    for token, log_prob in ((5, -1.0), (6, -2.0)):
        details = TokenDetails((log_prob,), (TopLogProbs((token,), (log_prob,)),), (bytes([token] * 8),))
        context = {0: ContextDetails((-3.0,), bytes(16))} if token == 5 else {}
        assert not update(scheduler, scheduler.schedule(), (token,), details={0: details}, context=context)
    if ended_by == "stop":
        (final,) = driver.accept(stop=(1,))
    else:
        (final,) = driver.accept(now_ns=10_000_000)
    result = final.result
    reason = FinishReason.CANCELLED if ended_by == "stop" else FinishReason.TIMED_OUT
    assert (final.is_final, result.finish_reasons) == (True, (reason,))
    assert (result.output_token_ids, result.num_output_tokens) == (((7, 8, 5, 6),), (2,))
    assert (result.log_probs, result.cum_log_probs) == (((-1.0, -2.0),), (-3.0,))
    assert result.top_log_probs == ((TopLogProbs((5,), (-1.0,)), TopLogProbs((6,), (-2.0,))),)
    assert result.generation_logits[0].data == bytes([5] * 8 + [6] * 8)
    assert (result.prompt_log_probs, result.context_logits.shape) == ((0.0, -3.0), (2, 2))
    assert result.perf_metrics.num_new_blocks == 1


def test_context_outputs_of_a_request_stopped_in_its_context_have_the_computed_rows():
    scheduler = make_scheduler(max_num_tokens=8, chunked=True)
    driver = Driver(scheduler)
    output = OutputOptions(
        return_prompt_log_probs=True, return_context_logits=True, return_generation_logits=True
    )
    driver.accept(make_request(prompt=10, new=9, streaming=True, output=output))
    update(scheduler, scheduler.schedule(), context={0: ContextDetails((-1.0,) * 8, bytes(4 * 2 * 8))})
    (final,) = driver.accept(stop=(1,))
    assert final.result.output_token_ids == ((),)
    assert final.result.prompt_log_probs == (0.0, *[-1.0] * 8)
    assert final.result.context_logits.shape == (8, 2)
    assert final.result.generation_logits[0].shape == (0, 0)


def test_a_long_stream_does_not_keep_the_logits_it_has_sent():
    scheduler = make_scheduler()
    output = OutputOptions(return_context_logits=True, return_generation_logits=True)
    Driver(scheduler).accept(make_request(prompt=4, new=30, streaming=True, output=output))
    for iteration in range(25):
        details = {0: TokenDetails(logits=(bytes(1 << 20),))}
        context = {} if iteration else {0: ContextDetails(logits=bytes(8 << 20))}
        (response,) = update(scheduler, scheduler.schedule(), (5,), details=details, context=context)
        assert response.result.generation_logits[0].shape == (1, 1 << 18)
        assert (response.result.context_logits is not None) == (iteration == 0)
    assert num_bytes_held(response) >= 1 << 20 and num_bytes_held(scheduler) < 3 << 20


def test_sequences_carry_one_copy_of_the_context_logits():
    scheduler = make_scheduler(max_num_tokens=8, chunked=True)
    sampling = SamplingConfig(num_return_sequences=3)
    output = OutputOptions(return_context_logits=True)
    Driver(scheduler).accept(make_request(prompt=10, new=1, sampling=sampling, output=output))
    update(scheduler, scheduler.schedule(), context={0: ContextDetails(logits=bytes(range(64)))})
    responses = update(
        scheduler, scheduler.schedule(), (5,), context={0: ContextDetails(logits=bytes(range(64, 80)))}
    )
    while scheduler.num_active:
        batch = scheduler.schedule()
        responses += update(scheduler, batch, *[(5,)] * len(batch.sampled_slots()))
    first, *others = [response.result.context_logits for response in responses]
    assert (first.shape, first.data) == ((10, 2), bytes(range(80)))
    assert [other.data is first.data for other in others] == [True, True]


def test_a_pause_amid_the_context_repeats_no_context_outputs():
    policy = CapacityPolicy.MAX_UTILIZATION
    scheduler = make_scheduler(policy, max_num_tokens=8, chunked=True, num_blocks=5)
    driver = Driver(scheduler)
    driver.accept(make_request(1, prompt=4, new=13))
    for _ in range(4):
        driver.step()
    output = OutputOptions(return_prompt_log_probs=True, return_context_logits=True)
    driver.accept(make_request(2, prompt=12, new=1, output=output))
    starts, responses = [], []
    while scheduler.num_active:
        batch = scheduler.schedule()
        run = starts.count(0) + any(chunk.start == 0 for chunk in batch.context)
        context = {}
        for chunk in batch.context:
            starts.append(chunk.start)
            rows = len(chunk.token_ids)
            log_probs = (float(-run),) * min(rows, 11 - chunk.start)
            context[chunk.slot] = ContextDetails(log_probs, bytes([run] * 4 * rows))
        tokens = [(5,)] * len(batch.sampled_slots())
        responses += update(scheduler, batch, *tokens, context=context)
    assert starts == [0, 0, 8]
    result = responses[-1].result
    assert result.prompt_log_probs == (0.0, *[-1.0] * 4, *[-2.0] * 7)
    assert result.context_logits.data == bytes([1] * 16 + [2] * 32)


ADDITIONAL = OutputOptions(
    additional_outputs=(
        WantedOutput("last_hidden_state", True),
        WantedOutput("top_1_logits"),
    )
)


def scheduler_that_offers(*offered: OfferedOutput) -> Scheduler:
    scheduler = make_scheduler()
    scheduler.limits = replace(scheduler.limits, additional_outputs=offered, max_draft_length=8)
    return scheduler


@pytest.mark.parametrize("streaming", [True, False])
def test_additional_outputs_end_with_the_tokens_and_are_returned_once(streaming):
    """An end id and tokens after it have no rows; the prompt's rows are only in the first response."""
    scheduler = scheduler_that_offers(
        OfferedOutput("last_hidden_state", True, 2), OfferedOutput("top_1_logits", False, 1)
    )
    draft = ExternalDraft((5, 6, 7))
    request = make_request(prompt=2, new=9, streaming=streaming, output=ADDITIONAL, end_ids=(4,), draft=draft)
    Driver(scheduler).accept(request)
    rows = tuple((bytes([n] * 8), bytes([n] * 4)) for n in range(4))
    context = {0: ContextDetails(additional_outputs=(bytes(range(16)),))}
    details = {0: TokenDetails(additional_outputs=rows[:3])}
    responses = update(scheduler, scheduler.schedule(), (5, 6, 8), details=details, context=context)
    details = {0: TokenDetails(additional_outputs=rows[3:])}
    responses += update(scheduler, scheduler.schedule(), (4,), details=details)
    names = ["context_last_hidden_state", "generation_last_hidden_state", "generation_top_1_logits"]
    if streaming:
        first, last = (response.result.additional_outputs for response in responses)
        assert [each.name for each in first] == names and [each.name for each in last] == names[1:]
        assert [each.tensors[0].shape for each in last] == [(0, 0), (0, 0)]
    prompt, hidden, top = merge_responses(responses).result.additional_outputs
    assert (prompt.name, hidden.name, top.name) == tuple(names)
    assert (prompt.tensors[0].shape, prompt.tensors[0].data) == ((2, 2), bytes(range(16)))
    assert (hidden.tensors[0].shape, hidden.tensors[0].data) == ((3, 2), bytes([0] * 8 + [1] * 8 + [2] * 8))
    assert (top.tensors[0].shape, top.tensors[0].data) == ((3, 1), bytes([0] * 4 + [1] * 4 + [2] * 4))


def test_additional_outputs_after_an_end_id_in_a_draft_are_dropped():
    scheduler = scheduler_that_offers(
        OfferedOutput("last_hidden_state", True, 2), OfferedOutput("top_1_logits", False, 1)
    )
    draft = ExternalDraft((5, 4, 7))
    Driver(scheduler).accept(make_request(prompt=2, new=9, output=ADDITIONAL, end_ids=(4,), draft=draft))
    details = {0: TokenDetails(additional_outputs=tuple((bytes(8), bytes(4)) for _ in range(4)))}
    context = {0: ContextDetails(additional_outputs=(bytes(16),))}
    (final,) = update(scheduler, scheduler.schedule(), (5, 4, 7, 9), details=details, context=context)
    assert final.result.num_output_tokens == (1,)
    assert [each.tensors[0].shape[0] for each in final.result.additional_outputs] == [2, 1, 1]


def test_a_long_stream_does_not_keep_the_additional_outputs_it_has_sent():
    scheduler = scheduler_that_offers(OfferedOutput("last_hidden_state", False, 1 << 18))
    wanted = (WantedOutput("last_hidden_state"),)
    output = OutputOptions(additional_outputs=wanted)
    Driver(scheduler).accept(make_request(prompt=4, new=30, streaming=True, output=output))
    for _ in range(25):
        details = {0: TokenDetails(additional_outputs=((bytes(1 << 20),),))}
        (response,) = update(scheduler, scheduler.schedule(), (5,), details=details)
        assert response.result.additional_outputs[0].tensors[0].shape == (1, 1 << 18)
    assert num_bytes_held(response) >= 1 << 20 and num_bytes_held(scheduler) < 3 << 20
