"""Random seeds through the simulated server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from inflight.config import CapacityPolicy
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.response import SequenceResult, merge_responses
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.testing.simulation.outcome import RunOutcome
from inflight.testing.simulation.scenario import (
    Breakdowns,
    Scenario,
    draw,
    draw_with_a_bad_device,
    draw_with_everybody_leaving,
    draw_with_failing_rows,
    draw_with_longest_prefix_first,
    one_in_flight,
    three_stages,
    two_in_flight,
    two_stages,
)
from inflight.testing.simulation.simulated_server import run
from tests.tiers import examples, with_all

SEEDS = with_all([range(150), range(150, 1000)], [range(150)])
PIPELINED_SEEDS = with_all([range(75), range(75, 500)], [range(75)])
NUM_OF_A_KIND = examples(fast=50, all=100)
"""Number of seeds of a test."""
Outcomes = list[tuple[CapacityPolicy, RunOutcome]]


@pytest.fixture(scope="module", params=SEEDS, ids=str)
def seeds(request: pytest.FixtureRequest) -> range:
    return request.param


@pytest.fixture(scope="module")
def outcomes(seeds: range) -> Outcomes:
    """Run every scenario with one and with two batches in flight; responses are checked and dropped."""
    return [_outcome(one_in_flight(draw(seed))) for seed in seeds] + [
        _outcome(two_in_flight(draw(seed))) for seed in seeds
    ]


@pytest.fixture(scope="module", params=PIPELINED_SEEDS, ids=str)
def pipelined_outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Run half of the scenarios on two or three pipeline stages."""
    return [_outcome(draw(seed).pipelined(2 + seed % 2)) for seed in request.param]


def _outcome(scenario: Scenario) -> tuple[CapacityPolicy, RunOutcome]:
    outcome = run(scenario)
    outcome.responses.clear()
    return scenario.config.policy, outcome


def test_every_seed_gives_each_request_its_result_alone(outcomes, seeds):
    assert len(outcomes) == 2 * len(seeds)
    ahead = [outcome for _, outcome in outcomes[len(seeds) :]]
    assert sum(outcome.num_ahead > 3 for outcome in ahead) > len(seeds) // 3
    assert sum(outcome.num_ahead > 0 and outcome.num_pauses > 0 for outcome in ahead) > len(seeds) // 40
    assert (
        sum(outcome.num_ahead > 0 and outcome.num_failed_iterations > 0 for outcome in ahead)
        > len(seeds) // 8
    )


def test_every_seed_gives_the_same_on_a_pipeline_and_keeps_its_stages_busy(pipelined_outcomes):
    found = [outcome for _, outcome in pipelined_outcomes]
    assert sum(outcome.num_full_pipelines > 3 for outcome in found) > len(found) // 3
    assert sum(outcome.num_shared_generations > 0 for outcome in found) > len(found) // 4
    assert sum(outcome.num_pauses > 0 for outcome in found) > len(found) // 20
    assert sum(outcome.num_failed_iterations > 0 for outcome in found) > len(found) // 8


@pytest.mark.parametrize(
    "draw_scenario", [draw, draw_with_a_bad_device, draw_with_failing_rows], ids=lambda each: each.__name__
)
@pytest.mark.parametrize(
    "kind", with_all([one_in_flight, two_in_flight, two_stages, three_stages], [two_in_flight, three_stages])
)
def test_recurrent_states_change_no_tokens(kind, draw_scenario):
    """With no, few and many snapshots. The oracle also checks which snapshot each sequence starts from."""
    outcomes = [run(kind(draw_scenario(seed).with_state())) for seed in range(100)]
    assert sum(outcome.num_from_snapshots for outcome in outcomes) > 50
    assert sum(outcome.num_exact_reuses for outcome in outcomes) > 50
    if draw_scenario is draw:
        assert sum(outcome.num_accepted for outcome in outcomes) > 10 or kind is two_in_flight


@pytest.mark.parametrize(
    "draw_scenario", [draw, draw_with_a_bad_device, draw_with_failing_rows], ids=lambda each: each.__name__
)
@pytest.mark.parametrize(
    "kind", with_all([one_in_flight, two_in_flight, two_stages, three_stages], [two_in_flight, three_stages])
)
def test_pictures_whose_tokens_attend_to_each_other_change_no_tokens(kind, draw_scenario):
    """No picture is divided among chunks, and no block of it is shared with a picture that goes on otherwise."""
    outcomes = [run(kind(draw_scenario(seed).with_spans())) for seed in range(2 * NUM_OF_A_KIND)]
    assert sum(outcome.num_chunks for outcome in outcomes) > 50
    assert sum(outcome.reused.total() for outcome in outcomes) > 500
    assert sum(outcome.copied.total() for outcome in outcomes) > 30


@pytest.mark.parametrize(
    "kind", with_all([one_in_flight, two_in_flight, two_stages, three_stages], [two_in_flight, three_stages])
)
def test_a_device_that_fails_repeatedly_changes_no_tokens(kind):
    """Failures are so frequent that a request may be alone in a failing iteration, and then ends."""
    outcomes = [run(kind(draw_with_a_bad_device(seed))) for seed in range(NUM_OF_A_KIND)]
    assert sum(outcome.num_failed_iterations for outcome in outcomes) > 3 * NUM_OF_A_KIND
    assert sum(bool(outcome.convicted) for outcome in outcomes) > NUM_OF_A_KIND // 2


@pytest.mark.parametrize(
    "kind", with_all([one_in_flight, two_in_flight, two_stages, three_stages], [two_in_flight, three_stages])
)
def test_a_failed_row_ends_its_request_and_changes_no_other_tokens(kind):
    """Searches, drafts and siblings are covered, also beside failed iterations."""
    outcomes = [run(kind(draw_with_failing_rows(seed))) for seed in range(2 * NUM_OF_A_KIND)]
    assert sum(len(outcome.convicted) for outcome in outcomes) > len(outcomes)
    both = sum(bool(outcome.convicted) and outcome.num_failed_iterations > 0 for outcome in outcomes)
    assert both > len(outcomes) // 10


@pytest.mark.parametrize(
    "kind", with_all([one_in_flight, two_in_flight, two_stages, three_stages], [two_in_flight, three_stages])
)
def test_an_iteration_ends_a_bounded_number_when_all_requests_stop(kind):
    outcomes = [run(kind(draw_with_everybody_leaving(seed))) for seed in range(NUM_OF_A_KIND)]
    assert sum(outcome.num_divided_endings > 0 for outcome in outcomes) > 0.3 * NUM_OF_A_KIND


@pytest.mark.parametrize(
    "kind", with_all([one_in_flight, two_in_flight, two_stages, three_stages], [two_in_flight, three_stages])
)
def test_longest_prefixes_that_start_first_change_no_tokens(kind, monkeypatch):
    """The oracle checks that no request is overtaken too often."""
    overtake, overtaken = WaitingQueue.overtake, list[int]()

    def count(queue: WaitingQueue, llm_request: LlmRequest) -> None:
        overtaken.append(llm_request.request_id)
        overtake(queue, llm_request)

    monkeypatch.setattr(WaitingQueue, "overtake", count)
    for seed in range(NUM_OF_A_KIND // 2):
        run(kind(draw_with_longest_prefix_first(seed)))
    assert len(overtaken) > NUM_OF_A_KIND // 4


@pytest.mark.parametrize("kind", [one_in_flight, two_in_flight, two_stages, three_stages])
@pytest.mark.parametrize("seed", [735063837, 1342643578, 1342643638, 474258831, 1569892186])
def test_a_stop_may_wait_behind_endings_of_ended_requests_and_before_a_failed_adapter(seed, kind):
    """The last seed has a stopped request whose adapter has no room: it keeps no pages from others."""
    run(kind(draw_with_everybody_leaving(seed)))


def test_a_chunk_inside_a_picture_ends_where_others_end():
    run(two_in_flight(draw_with_longest_prefix_first(4162625443)).with_spans())


@pytest.mark.parametrize(("seed", "kind"), [(1569892154, three_stages), (1569893545, one_in_flight)])
def test_a_bad_device_neither_loses_restarted_rows_nor_opens_a_static_batch(seed, kind):
    run(kind(draw_with_a_bad_device(seed)))


@pytest.mark.parametrize("kind", [one_in_flight, two_in_flight])
def test_a_transient_failure_ends_no_request_that_was_in_a_larger_batch(kind):
    num_spared = 0
    for seed in range(NUM_OF_A_KIND):
        once = Breakdowns(transient=frozenset({4 + seed % 12}))
        outcome = run(kind(dataclasses.replace(undisturbed(seed), breakdowns=once)))
        num_spared += outcome.num_failed_iterations > 0 and not outcome.convicted
    assert num_spared > 0.15 * NUM_OF_A_KIND


def test_the_seeds_cover_every_situation(outcomes, seeds):
    """Pauses, chunks, copies and rejected drafts must occur in the runs."""
    often, seldom = len(seeds) // 8, len(seeds) // 12

    def count(reached: Callable[[RunOutcome], object]) -> int:
        return sum(bool(reached(outcome)) for _, outcome in outcomes)

    assert count(lambda outcome: outcome.num_pauses) > seldom
    assert count(lambda outcome: outcome.num_divided_contexts) > seldom
    assert count(lambda outcome: outcome.num_mixed_batches) > seldom
    assert count(lambda outcome: outcome.refused) > seldom
    assert count(lambda outcome: outcome.num_failed_iterations) > often
    assert count(lambda outcome: outcome.convicted) > often
    assert count(lambda outcome: outcome.num_chunks) > often
    assert count(lambda outcome: outcome.reused.total()) > often
    assert count(lambda outcome: outcome.num_exact_reuses) > often
    assert count(lambda outcome: outcome.max_rows > 3) > often
    assert count(lambda outcome: outcome.num_copies) > often
    assert count(lambda outcome: outcome.copied.total()) > often
    assert count(lambda outcome: outcome.num_lookups) > often
    assert count(lambda outcome: outcome.num_accepted) > often
    assert count(lambda outcome: outcome.num_rejected) > often
    assert count(lambda outcome: outcome.num_adapter_loads > 1) > often
    assert count(lambda outcome: outcome.num_adapter_waits) > seldom
    assert count(lambda outcome: outcome.num_adapter_evictions) > len(seeds) // 20


def test_the_seeds_cover_every_ending(outcomes, seeds):
    for code in ("INTERNAL", "UNAVAILABLE", "INVALID_ARG"):
        assert sum(outcome.errors[code] for _, outcome in outcomes) > len(seeds) // 20
    for reason in set(FinishReason) - {FinishReason.NOT_FINISHED}:
        assert sum(outcome.reasons[reason] for _, outcome in outcomes) > len(seeds) // 2


@pytest.mark.parametrize("policy", [CapacityPolicy.GUARANTEED_NO_EVICT, CapacityPolicy.STATIC_BATCH])
def test_policies_that_reserve_blocks_for_max_new_tokens_never_pause(outcomes, seeds, policy):
    of_policy = [outcome for its_policy, outcome in outcomes if its_policy is policy]
    assert len(of_policy) > len(seeds) // 4 and not any(outcome.num_pauses for outcome in of_policy)


def test_a_run_is_a_function_of_its_seed():
    for seed in range(30):
        first, second = run(draw(seed)), run(draw(seed))
        assert repr(first.responses) == repr(second.responses)
        assert first.num_iterations == second.num_iterations
        assert first.started == second.started and first.reused == second.reused


def undisturbed(seed: int, **config) -> Scenario:
    """Return the scenario without stops, deadlines and failures."""
    scenario = draw(seed)
    arrivals = {
        iteration: tuple(dataclasses.replace(request, allotted_time_ms=0) for request in requests)
        for iteration, requests in scenario.arrivals.items()
    }
    return dataclasses.replace(
        scenario,
        arrivals=arrivals,
        stops={},
        breakdowns=Breakdowns(),
        config=dataclasses.replace(scenario.config, max_queue_size=0, **config),
    )


def whole_results(scenario: Scenario) -> dict[tuple[int, int], SequenceResult | None]:
    """Return each sequence's combined result by (request id, sequence index), without times and counts."""
    found = {}
    for request_id, responses in run(scenario).responses.items():
        for index in {r.sequence_index for r in responses}:
            whole = merge_responses([r for r in responses if r.sequence_index == index]).result
            found[request_id, index] = whole and dataclasses.replace(
                whole, perf_metrics=None, num_iterations=0
            )
    return found


def test_reuse_does_not_change_results():
    for seed in range(examples(fast=30, all=60)):
        on, off = (undisturbed(seed, enable_kv_cache_reuse=reuse) for reuse in (True, False))
        assert whole_results(on) == whole_results(off)


def test_the_policy_does_not_change_results():
    for seed in range(examples(fast=15, all=30)):
        found = [whole_results(undisturbed(seed, policy=policy)) for policy in CapacityPolicy]
        assert found[0] == found[1] == found[2]


def test_max_utilization_admits_no_later_than_guaranteed_no_evict():
    """With enough blocks both policies make the same batches, unless prompt lookup needs reserved blocks."""
    policies = CapacityPolicy.GUARANTEED_NO_EVICT, CapacityPolicy.MAX_UTILIZATION
    for seed in range(examples(fast=30, all=60)):
        numbers = []
        for policy in policies:
            scenario = undisturbed(seed, policy=policy)
            arrivals = {
                iteration: tuple(dataclasses.replace(r, prompt_lookup_num_tokens=0) for r in requests)
                for iteration, requests in scenario.arrivals.items()
            }
            roomy = dataclasses.replace(scenario.limits, num_blocks=3000)
            config = dataclasses.replace(scenario.config, speculative_decoding_mode=None)
            changed = dataclasses.replace(scenario, arrivals=arrivals, limits=roomy, config=config)
            numbers.append(run(changed).num_iterations)
        assert numbers[0] == numbers[1]
