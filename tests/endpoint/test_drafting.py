"""The client over a draft model and its target: the target's tokens, and one final response per request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from inflight.batch_manager import GptManager
from inflight.config import SchedulingConfig
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.request import FloatTensor, OutputOptions, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.endpoint.drafting import DraftingClient
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import InvalidArgument, Unavailable
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_log_probs, expected_tokens
from tests.endpoint.factories import Batcher, Inbox, delta

FEW = 5  # a vocabulary so small that drafts of another model are sometimes right
LIMITS = EngineLimits(
    vocab_size=FEW, max_sequence_length=200, max_num_sequences=8, num_blocks=100, tokens_per_block=4
)
PROMPT = (1, 2, 3, 4, 0, 1)
METRICS = OutputOptions(return_perf_metrics=True)


class Submitted:
    """Client that records the requests it submits."""

    def __init__(self, client: LocalEngineClient) -> None:
        self._client, self.requests = client, []

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def submit(self, request: Request, on_response) -> RequestHandle:
        self.requests.append(request)
        return self._client.submit(request, on_response)


@dataclass
class Pair:
    """Two engines and the client over both."""

    target: Submitted
    draft: Submitted
    client: DraftingClient

    def ask(self, **fields) -> Inbox:
        inbox = Inbox()
        self.client.submit(drafted(**fields), inbox)
        inbox.final()
        return inbox


def drafted(new: int = 20, drafts: int = 4, **fields) -> DraftedRequest:
    fields = {"input_token_ids": PROMPT, "max_new_tokens": new, "num_draft_tokens": drafts} | fields
    return DraftedRequest(0, **fields, streaming=True)


def start(limits: EngineLimits, attend_to_all: bool) -> tuple[Submitted, GptManager]:
    scheduler = Scheduler(SchedulingConfig(), limits)
    client = LocalEngineClient(EngineDescription(scheduler.limits), lambda: manager.notify())
    manager = GptManager(
        FakeEngine(limits, attend_to_all=attend_to_all),
        scheduler,
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        on_death=client.fail_all,
    )
    return Submitted(client), manager


@pytest.fixture(params=["itself", "another", "a smaller vocabulary", "a larger vocabulary", "a short one"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Make a pair whose draft model is the target itself, or a model that is sometimes right."""
    draft_limits = {
        "a smaller vocabulary": replace(LIMITS, vocab_size=FEW - 1),
        "a larger vocabulary": replace(LIMITS, vocab_size=FEW + 1),
        "a short one": replace(LIMITS, max_sequence_length=16),
    }.get(request.param, LIMITS)
    target, target_manager = start(LIMITS, attend_to_all=True)
    draft, draft_manager = start(draft_limits, attend_to_all=request.param in ("itself", "a short one"))
    client = DraftingClient(target, draft)
    yield Pair(target, draft, client)
    target_manager.shutdown()
    draft_manager.shutdown()
    client.close()


with_itself_as_draft_model = pytest.mark.parametrize("pair", ["itself"], indirect=True)
with_another_draft_model = pytest.mark.parametrize("pair", ["another"], indirect=True)


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_the_tokens_are_those_of_the_target_alone(pair: Pair, drafts: int, weighs: bool) -> None:
    for sampling in (
        SamplingConfig(),
        SamplingConfig(top_k=3, random_seed=7),
        SamplingConfig(repetition_penalty=2.0),
    ):
        inbox = pair.ask(drafts=drafts, use_draft_logits=weighs, sampling=sampling, output=METRICS)
        assert inbox.tokens == expected_tokens(PROMPT, 20, FEW, sampling)
        result = inbox.final().result
        assert result.finish_reasons == (FinishReason.LENGTH,) and result.is_sequence_final
        assert all(not r.result.is_sequence_final for r in inbox.responses[:-1])
        assert {r.result.num_input_tokens for r in inbox.responses} == {len(PROMPT)}
        verified = sum(r.draft_length for r in pair.target.requests)
        assert result.perf_metrics.num_draft_tokens == verified
        pair.target.requests.clear()


@with_itself_as_draft_model
def test_an_accepted_draft_costs_the_target_one_pass(pair: Pair) -> None:
    inbox = pair.ask(new=20, drafts=4, output=METRICS)
    assert [len(r.result.output_token_ids[0]) for r in inbox.responses] == [5, 5, 5, 5]
    assert [r.draft_length for r in pair.target.requests] == [4, 4, 4, 4]
    metrics = inbox.final().result.perf_metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (16, 16)
    first, last = inbox.responses[0].result.perf_metrics, metrics
    assert first.last_token_time_ns == 0 < first.arrival_time_ns == last.arrival_time_ns
    assert last.arrival_time_ns < last.first_token_time_ns < last.last_token_time_ns


@with_another_draft_model
def test_a_pass_gives_the_accepted_tokens_and_one_more(pair: Pair) -> None:
    inbox = pair.ask(new=30, drafts=4, output=METRICS)
    lengths = [len(r.result.output_token_ids[0]) for r in inbox.responses]
    assert sum(lengths) == 30 and len(set(lengths)) > 1
    metrics = inbox.final().result.perf_metrics
    # Every pass has one token more than it accepts.
    assert metrics.num_accepted_draft_tokens == 30 - len(pair.target.requests)
    later = pair.target.requests[1:]
    assert all(request.priority > 0.5 for request in later)


@with_itself_as_draft_model
def test_the_last_token_needs_no_draft(pair: Pair) -> None:
    inbox = pair.ask(new=6, drafts=4)
    assert inbox.tokens == expected_tokens(PROMPT, 6, FEW)
    assert [r.draft_length for r in pair.target.requests] == [4, 0] and len(pair.draft.requests) == 1


@with_another_draft_model
def test_an_end_id_ends_the_request_as_without_drafts(pair: Pair) -> None:
    alone = expected_tokens(PROMPT, 40, FEW)
    for end_id in range(FEW):
        inbox = pair.ask(new=40, end_ids=(end_id,))
        until = alone.index(end_id) if end_id in alone else 40
        assert inbox.tokens == alone[:until]
        reason = FinishReason.END_ID if until < 40 else FinishReason.LENGTH
        assert inbox.final().result.finish_reasons == (reason,)


@with_another_draft_model
def test_min_length_bans_end_ids_as_without_drafts(pair: Pair) -> None:
    inbox = pair.ask(new=8, sampling=SamplingConfig(min_length=5))
    inbox.final()
    minima = [request.sampling.min_length for request in pair.target.requests]
    known = [len(request.input_token_ids) - len(PROMPT) for request in pair.target.requests]
    assert minima == [max(0, 5 - count) for count in known] and len(minima) > 2


@with_another_draft_model
def test_log_probs_cover_the_whole_sequence(pair: Pair) -> None:
    inbox = pair.ask(output=OutputOptions(return_log_probs=True))
    expected = expected_log_probs(PROMPT, inbox.tokens, FEW)
    found = [value for r in inbox.responses for value in r.result.log_probs[0]]
    assert found == pytest.approx(expected)
    assert inbox.final().result.cum_log_probs == (pytest.approx(sum(expected)),)
    sums = [r.result.cum_log_probs[0] for r in inbox.responses]
    assert sums == sorted(sums, reverse=True)


@with_another_draft_model
def test_concurrent_requests_get_their_own_tokens(pair: Pair) -> None:
    prompts = [(number % FEW, 1, 2, number % 3) for number in range(24)]
    inboxes = [Inbox() for _ in prompts]

    def submit(numbers: range) -> None:
        for number in numbers:
            request = drafted(new=12, input_token_ids=prompts[number])
            is_plain = number % 4 == 0
            pair.client.submit(request.plain() if is_plain else request, inboxes[number])

    threads = [threading.Thread(target=submit, args=(range(first, 24, 3),)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, inbox in zip(prompts, inboxes):
        inbox.final()
        assert inbox.tokens == expected_tokens(prompt, 12, FEW)


def test_options_that_draft_rounds_cannot_support_are_refused() -> None:
    limits = Scheduler(SchedulingConfig(), replace(LIMITS, hidden_size=1, rotary_dim=2)).limits
    table = PromptTable.of(Matrix((1, 1), "float32", RawBuffer(bytes(4))))
    rotary = RotaryTable.of(Matrix((len(PROMPT), 2), "float32", RawBuffer(bytes(8 * len(PROMPT)))), 0)
    drafted(stop_words=((3,),)).validate(limits)
    for fields, name in (
        ({"sampling": SamplingConfig(beam_width=2)}, "beam_width"),
        ({"sampling": SamplingConfig(top_k=3, num_return_sequences=2)}, "num_return_sequences"),
        ({"sampling": SamplingConfig(top_p=0.5, top_p_decay=0.5)}, "runtime_top_p_decay"),
        ({"output": OutputOptions(return_context_logits=True)}, "return_context_logits"),
        ({"output": OutputOptions(return_prompt_log_probs=True)}, "return_prompt_log_probs"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
        ({"prompt_table": table}, "prompt_embedding_table"),
        ({"rotary_table": rotary}, "mrope_rotary_cos_sin"),
        ({"stop_words": ((3,), (1, 2))}, "words of several tokens in stop_words_list"),
    ):
        with pytest.raises(InvalidArgument, match=f"num_draft_tokens is 4: leave {name} out"):
            drafted(**fields).validate(limits)
    with pytest.raises(InvalidArgument, match=r"num_draft_tokens must be in \[0, .*got 10000"):
        drafted(drafts=10_000).validate(limits)
    with pytest.raises(InvalidArgument, match=r"num_draft_tokens must be in \[0, .*got -1"):
        drafted(drafts=-1).validate(limits)


# ---------------------------------------------------------------- engines played by the test


class Played:
    """Two engines whose loops are played by the test."""

    def __init__(self) -> None:
        self.target, self.draft = Batcher(), Batcher()
        described = self.target.client.describe()
        limits = replace(described.limits, max_draft_length=8)
        for batcher in (self.target, self.draft):
            batcher.client._description = replace(described, limits=limits)
        self.client = DraftingClient(self.target.client, self.draft.client)

    def ask(self, **fields) -> tuple[RequestHandle, Inbox]:
        inbox = Inbox()
        return self.client.submit(drafted(**fields), inbox), inbox


@pytest.fixture
def played() -> Iterator[Played]:
    made = Played()
    yield made
    made.client.close()


def respond(batcher: Batcher, *tokens: int) -> Request:
    """Answer the engine's next request with its final response."""
    request = batcher.take()
    batcher.client.send_response(delta(request.request_id, *tokens, final=True))
    return request


def signals(batcher: Batcher) -> list[StopReason]:
    """Wait for a stop signal of an engine."""
    return [signal.reason for signal in batcher.stops(1)]


def test_each_round_sends_a_draft_request_and_a_verification(played: Played) -> None:
    _, inbox = played.ask(new=6, drafts=2, end_ids=(9,), client_id=3)
    asked = respond(played.draft, 7, 8)
    assert type(asked) is Request and not asked.streaming and asked.max_new_tokens == 2
    assert (asked.input_token_ids, asked.end_ids, asked.client_id) == (PROMPT, (9,), 3)
    verified = respond(played.target, 7, 5)
    assert type(verified) is Request and verified.max_new_tokens == 3
    assert verified.draft is not None and verified.draft.token_ids == (7, 8) and verified.draft.ends_sequence
    assert respond(played.draft, 1).input_token_ids == (*PROMPT, 7, 5)
    respond(played.target, 1, 2)
    # A draft model that would end here proposes nothing: the target decides.
    assert respond(played.draft).max_new_tokens == 1
    assert respond(played.target, 4).max_new_tokens == 1
    assert played.target.take().max_new_tokens == 1
    assert inbox.tokens == [7, 5, 1, 2, 4]


def test_drafts_with_logits_are_sampled_from_these_logits(played: Played) -> None:
    """The target's filters, penalties and end conditions are not applied to drafts."""
    sampling = SamplingConfig(top_k=3, temperature=0.5, repetition_penalty=2.0, min_length=3, random_seed=8)
    played.ask(drafts=2, use_draft_logits=True, sampling=sampling, end_ids=(9,), bad_words=((4,),))
    asked = played.draft.take()
    assert replace(asked.sampling, random_seed=0) == SamplingConfig(top_p=1.0, temperature=0.5)
    assert (asked.end_ids, asked.bad_words) == ((), ()) and asked.output.return_generation_logits
    result = delta(asked.request_id, 7, 8, final=True).result
    logits = np.arange(2000, dtype=np.float32).reshape(2, 1000)
    tensor = FloatTensor((2, 1000), logits.tobytes())
    played.draft.client.send_response(
        Response(asked.request_id, replace(result, generation_logits=(tensor,)), is_final=True)
    )
    verified = played.target.take()
    # With the same seed the target's draws would use the draft's random numbers.
    assert asked.sampling.random_seed != 8
    assert verified.sampling == sampling and verified.end_ids == (9,)
    assert verified.draft is not None and verified.draft.logits is not None
    sent = np.frombuffer(verified.draft.logits.data, np.float32).reshape(verified.draft.logits.shape)
    np.testing.assert_array_equal(sent, logits / 0.5)


@pytest.mark.parametrize("in_draft", [True, False])
@pytest.mark.parametrize("reason", list(StopReason))
def test_a_stop_ends_a_drafted_request_in_any_state(
    played: Played, in_draft: bool, reason: StopReason
) -> None:
    handle, inbox = played.ask()
    if in_draft:
        running = played.draft
    else:
        respond(played.draft, 7)
        running = played.target
    asked = running.take()
    handle.stop(reason)
    assert signals(running) == [reason]
    running.client.send_response(
        Response(
            asked.request_id,
            replace(delta(asked.request_id, final=True).result, finish_reasons=(FinishReason[reason.name],)),
            is_final=True,
        )
    )
    result = inbox.final().result
    assert result.finish_reasons == (FinishReason[reason.name],) and result.is_sequence_final
    assert inbox.tokens == []
    handle.stop(reason)  # a stop of an ended request: ignored


def test_a_stop_at_the_end_of_a_round_prevents_the_next(played: Played) -> None:
    handle, inbox = played.ask()
    respond(played.draft, 7)
    asked = played.target.take()
    handle.stop()
    assert signals(played.target) == [StopReason.CANCELLED]
    played.target.client.send_response(delta(asked.request_id, 7, 5, final=True))
    assert inbox.final().result.finish_reasons == (FinishReason.CANCELLED,)
    assert inbox.tokens == [7, 5]


def test_an_error_of_either_engine_ends_the_request(played: Played) -> None:
    for batcher, other in ((played.draft, None), (played.target, played.draft)):
        _, inbox = played.ask()
        if other is not None:
            respond(other, 7)
        request = batcher.take()
        error = InvalidArgument("every token banned")
        batcher.client.send_response(Response(request.request_id, error=error, is_final=True))
        assert inbox.final().error is error


def test_a_deadline_covers_all_rounds(played: Played) -> None:
    _, inbox = played.ask(allotted_time_ms=60_000)
    first = respond(played.draft, 7)
    respond(played.target, 7, 8)
    second = played.draft.take()
    assert 0 < second.allotted_time_ms <= first.allotted_time_ms <= 60_000
    ended = replace(delta(second.request_id, final=True).result, finish_reasons=(FinishReason.TIMED_OUT,))
    played.draft.client.send_response(Response(second.request_id, ended, is_final=True))
    assert inbox.final().result.finish_reasons == (FinishReason.TIMED_OUT,)
    assert inbox.tokens == [7, 8]


def test_without_a_draft_engine_drafted_requests_are_refused_and_others_served(played: Played) -> None:
    played.draft.client.fail_all(Unavailable("the engine is gone"))
    with pytest.raises(Unavailable, match="num_draft_tokens needs the draft model: "):
        played.ask()
    inbox = Inbox()
    played.client.submit(drafted().plain(), inbox)
    respond(played.target, 4, 5)
    assert inbox.final().request_id and inbox.tokens == [4, 5]


def drain(*batchers: Batcher, timeout_s: float = 30) -> list[threading.Thread]:
    threads = [threading.Thread(target=each.client.drain, args=(timeout_s,)) for each in batchers]
    for thread, batcher in zip(threads, batchers):
        thread.start()
        while batcher.client._refusal is None:
            time.sleep(0.001)
    return threads


def test_draining_engines_finish_a_drafted_request(played: Played) -> None:
    _, inbox = played.ask(new=6, drafts=2)
    respond(played.draft, 7, 8)
    asked = played.target.take()
    threads = drain(played.target, played.draft)
    with pytest.raises(Unavailable, match="the server is shutting down"):
        played.ask()
    played.target.answer(asked, 7, 5)
    for tokens in ((1, 2), (1, 3)):
        assert threads[0].is_alive()  # although the target has nothing to do
        later = respond(played.draft, 1, 2)
        assert later.is_continuation
        assert respond(played.target, *tokens).is_continuation
    assert inbox.final().error is None and inbox.tokens == [7, 5, 1, 2, 1, 3]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_drain_ends_a_drafted_request_at_its_timeout(played: Played) -> None:
    _, inbox = played.ask(new=200, drafts=2)
    respond(played.draft, 7, 8)
    respond(played.target, 7, 5)
    second = played.draft.take()
    (thread,) = drain(played.draft, timeout_s=0.1)
    assert signals(played.draft) == [StopReason.CANCELLED]
    ended = replace(delta(second.request_id, final=True).result, finish_reasons=(FinishReason.CANCELLED,))
    played.draft.client.send_response(Response(second.request_id, ended, is_final=True))
    assert inbox.final().error.code == "UNAVAILABLE" and inbox.tokens == [7, 5]
    thread.join(60)
    assert not thread.is_alive()


def test_closing_answers_the_remaining_requests(played: Played) -> None:
    inboxes = [played.ask()[1] for _ in range(3)]
    respond(played.draft, 7)
    played.client.close()
    for inbox in inboxes:
        assert inbox.final().error.code == "UNAVAILABLE"
