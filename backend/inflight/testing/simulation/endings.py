"""Check that each request ended once, for a valid reason, and with the tokens that it gets when it runs
alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inflight.core.request.request import Request
from inflight.core.request.response import Response, SequenceResult, merge_responses
from inflight.core.request.stop import FINISH_REASON_OF_STOP, FinishReason
from inflight.errors import InvalidArgument, Unavailable
from inflight.testing.fake_model import Conditions

from .alone import Expected, compare_context, compare_outputs, search_alone, sequence_alone
from .outcome import RunOutcome
from .scenario import Scenario, time_of

_MS = 1_000_000
ENDED_FROM_OUTSIDE = frozenset(FINISH_REASON_OF_STOP.values())


def check_endings(scenario: Scenario, outcome: RunOutcome) -> None:
    """Check every request's responses and their times."""
    requests = scenario.requests
    assert outcome.responses.keys() == requests.keys()
    for request_id, request in requests.items():
        responses = outcome.responses[request_id]
        assert [r.is_final for r in responses] == [False] * (len(responses) - 1) + [True]
        assert all(response.error is None for response in responses[:-1])
        _check_error(scenario, outcome, responses[-1])
        for index in range(request.sampling.num_sequences):
            mine = [r for r in responses if r.result and r.sequence_index == index]
            _check_results(scenario, outcome, request, index, mine)
    _check_stops(scenario, outcome)
    _check_deadlines(scenario, outcome)


def _check_error(scenario: Scenario, outcome: RunOutcome, last: Response) -> None:
    """Check that a request got an error only if it was invalid, refused, without its adapter, or convicted."""
    if last.request_id in scenario.invalid:
        assert isinstance(last.error, InvalidArgument)
    elif last.request_id in outcome.refused:
        assert isinstance(last.error, Unavailable)
    elif last.request_id in outcome.without_adapter:
        failed_at, code = outcome.without_adapter[last.request_id]
        if last.error is None:  # its stop or deadline waited its turn while the adapter failed
            assert _told_to_end(scenario, scenario.requests[last.request_id]) < failed_at, "expected an error"
        else:
            assert last.error.code == code
    else:
        assert (last.error is not None) == (last.request_id in outcome.convicted), last.error
        assert not isinstance(last.error, InvalidArgument)


def _check_results(
    scenario: Scenario, outcome: RunOutcome, request: Request, index: int, responses: list[Response]
) -> None:
    results = [response.result for response in responses if response.result]
    has_failed = outcome.responses[request.request_id][-1].error is not None
    ends = [result.is_sequence_final for result in results]
    assert ends == [False] * (len(ends) - 1) + [True] or (has_failed and not any(ends))
    assert request.streaming or len(results) <= 1
    assert all(
        set(r.finish_reasons) == {FinishReason.NOT_FINISHED} for r in results if not r.is_sequence_final
    )
    if not results:
        return
    _check_metrics(outcome, request, results[-1])
    limits, adapter = scenario.limits, outcome.adapters.get(request.request_id, b"")
    conditions = Conditions.of(request, adapter, limits.vocab_size if limits.has_spans else None)
    if request.sampling.uses_beams:
        _check_search(scenario, request, results, conditions)
    else:
        _check_sequence(scenario, request, index, results, merge_responses(responses).result, conditions)


def _check_sequence(
    scenario: Scenario,
    request: Request,
    index: int,
    results: list[SequenceResult],
    whole: SequenceResult | None,
    conditions: Conditions,
) -> None:
    vocab_size = scenario.limits.vocab_size
    alone = sequence_alone(request, index, vocab_size, conditions)
    final = results[-1]
    reason = final.finish_reasons[0]
    if not final.is_sequence_final:
        received = [token for result in results for token in result.output_token_ids[0]]
        assert tuple(received) == alone.tokens[: len(received)]
        return
    assert whole is not None
    num_tokens = whole.num_output_tokens[0]
    if reason is not alone.reason or num_tokens < len(alone.tokens):
        assert reason in ENDED_FROM_OUTSIDE and _has_reason(scenario, request, index, reason)
        alone = alone.stopped_after(num_tokens, reason)
    compare_outputs(request, whole, [alone], vocab_size)
    assert whole.finish_reasons == (alone.reason,)
    is_whole = bool(num_tokens) or reason not in ENDED_FROM_OUTSIDE
    compare_context(request, whole, vocab_size, conditions, is_whole)


def _check_search(
    scenario: Scenario, request: Request, results: list[SequenceResult], conditions: Conditions
) -> None:
    """Check the results of a beam search.

    A streamed search has a response for every step, with the beams that it would return if it ended there. A
    search that is cut short returns the beams of its last step.
    """
    vocab_size = scenario.limits.vocab_size
    steps = search_alone(request, vocab_size, conditions)
    final = results[-1]
    whole = [result for result in results if not result.was_cut_short]
    if final.was_cut_short:
        assert _has_reason(scenario, request, 0, final.finish_reasons[0])
        _check_search_cut_short(request, final, steps, vocab_size)
    elif final.is_sequence_final:
        assert final.finish_reasons == tuple(beam.reason for beam in steps[-1])
        assert len(whole) == (len(steps) if request.streaming else 1)
    for result, beams in zip(whole, steps if request.streaming else steps[-1:]):
        compare_outputs(request, result, beams, vocab_size)
    is_whole = bool(whole) or any(final.num_output_tokens)
    compare_context(request, results[0], vocab_size, conditions, is_whole)


def _check_search_cut_short(
    request: Request, final: SequenceResult, steps: list[list[Expected]], vocab_size: int
) -> None:
    assert len(set(final.finish_reasons)) == 1, (
        "a stop or deadline must end all beams of a search for the same reason"
    )
    before = [Expected((), FinishReason.NOT_FINISHED)] * request.sampling.num_outputs
    said = [ids[len(ids) - n :] for ids, n in zip(final.output_token_ids, final.num_output_tokens)]
    same = [step for step in (before, *steps) if [beam.tokens for beam in step] == said]
    if final.cum_log_probs is not None:
        # A beam that ends with an end id keeps its tokens, and its sum includes the end id's log probability.
        same = [step for step in same if _have_sums(step, final.cum_log_probs)]
    assert same, "the search was cut short with beams that do not occur in any of its steps"
    compare_outputs(request, final, same[0], vocab_size)


def _have_sums(step: list[Expected], sums: Sequence[float]) -> bool:
    return all(abs(total - beam.cum_log_prob) < 1e-9 for total, beam in zip(sums, step, strict=True))


def _check_metrics(outcome: RunOutcome, request: Request, final: SequenceResult) -> None:
    metrics = final.perf_metrics
    assert (metrics is not None) == request.output.return_perf_metrics
    if metrics is None or not final.is_sequence_final:
        return
    name = request.request_id, final.sequence_index
    assert metrics.num_reused_blocks == outcome.reused[name] + outcome.copied[name]
    assert metrics.num_missed_blocks == outcome.missed[name]
    assert metrics.arrival_time_ns == request.arrival_time_ns
    assert 0 <= metrics.num_accepted_draft_tokens <= metrics.num_draft_tokens
    if any(final.num_output_tokens) and not final.was_cut_short:
        times = metrics.first_scheduled_time_ns, metrics.first_token_time_ns, metrics.last_token_time_ns
        assert 0 < times[0] < times[1] <= times[2]


# ---------------------------------------------------------------------- when, and why


def _deadline_of(scenario: Scenario, request: Request) -> int | None:
    """Return the first iteration that begins at or after the deadline; None without a deadline."""
    if not request.allotted_time_ms:
        return None
    arrival = next(i for i, each in scenario.arrivals.items() if request in each)
    deadline_ns = (request.arrival_time_ns or time_of(arrival)) + request.allotted_time_ms * _MS
    iteration = arrival
    while time_of(iteration) < deadline_ns:
        iteration += 1
    return iteration


def _told_to_end(scenario: Scenario, request: Request) -> float:
    """Return the iteration by which stops and a deadline have asked for the end of every sequence of a request."""
    deadline = _deadline_of(scenario, request)
    always = [math.inf] if deadline is None else [deadline]
    stops = [
        (iteration, stop.sequence_index)
        for iteration, signals in scenario.stops.items()
        for stop in signals
        if stop.request_id == request.request_id
    ]
    return max(
        min(always + [iteration for iteration, stopped in stops if stopped in (None, index)])
        for index in range(request.sampling.num_sequences)
    )


def _has_reason(scenario: Scenario, request: Request, index: int, reason: FinishReason) -> bool:
    """Whether a stop or a deadline can have ended a sequence for this reason."""
    signals = [signal for each in scenario.stops.values() for signal in each]
    if any(
        signal.request_id == request.request_id
        and signal.sequence_index in (None, index)
        and FINISH_REASON_OF_STOP[signal.reason] is reason
        for signal in signals
    ):
        return True
    return reason is FinishReason.TIMED_OUT and request.allotted_time_ms > 0


def _patience(scenario: Scenario) -> int:
    """Return how many iterations after a stop or a deadline a request may end.

    Batches in flight must come back first. If there is more to end than an iteration may end, a request may have
    to wait for all others.
    """
    requests = scenario.requests.values()
    num_sequences = sum(request.sampling.num_sequences for request in requests)
    # A stop, a deadline or a failed adapter of a request that has just ended takes a sequence's place.
    num_repeated = sum(map(len, scenario.stops.values())) + 2 * len(requests)
    num_endings = num_sequences + num_repeated
    is_divided = num_endings > scenario.config.sequences_per_iteration
    return 2 * max(0, scenario.depth - 2) + num_endings * is_divided


def _check_stops(scenario: Scenario, outcome: RunOutcome) -> None:
    """Check that every stop ended its request or sequence soon enough."""
    for iteration, signals in scenario.stops.items():
        for signal in signals:
            ended = outcome.final_iterations[signal.request_id]
            if signal.sequence_index is not None:
                # A sequence of a failed request has no final result of its own.
                key = signal.request_id, signal.sequence_index
                ended = outcome.sequence_ends.get(key, iteration)
            assert ended <= iteration + _patience(scenario), "a stop took effect too late"


def _check_deadlines(scenario: Scenario, outcome: RunOutcome) -> None:
    """Check that no request ran too long after its deadline or timed out before it."""
    for request in scenario.requests.values():
        latest = _deadline_of(scenario, request)
        if latest is None:
            continue
        ended_at = outcome.final_iterations[request.request_id]
        assert ended_at <= latest + _patience(scenario), "a deadline took effect too late"
        for index in range(request.sampling.num_sequences):
            ended = outcome.sequence_ends.get((request.request_id, index))
            signals = [s for each in scenario.stops.values() for s in each]
            if ended is None or ended >= latest or any(s.request_id == request.request_id for s in signals):
                continue
            reasons = [
                response.result.finish_reasons[0]
                for response in outcome.responses[request.request_id]
                if response.result and response.sequence_index == index
            ]
            assert reasons[-1] is not FinishReason.TIMED_OUT, "a request timed out before its time"
