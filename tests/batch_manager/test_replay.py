"""Replays make the same decisions as the recorded run, wherever its trace ends."""

from __future__ import annotations

import queue
import random
import re
from dataclasses import replace

import pytest

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.recording import Begin, End, JsonRecorder
from inflight.batch_manager.replay import (
    IDENTICAL,
    Replay,
    describe_batch,
)
from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ContextChunk, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import StepFailed
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.simulation.scenario import Scenario, draw, draw_with_longest_prefix_first
from tests.batch_manager.recorded import (
    ERRORS,
    GAP,
    LIMITS,
    ROUNDS,
    outcome,
    raw_records,
    read,
    record_run,
    simple_trace,
    write,
)
from tests.tiers import examples, with_all

SEEDS = range(examples(fast=15, all=60))


def replay_all(path) -> tuple[Replay, list[Response]]:
    """Replay a trace, assert that there is no difference, and return every response."""
    header, records = read(path)
    replay = Replay(header)
    responses = []
    for record in records:
        assert replay.advance(record) == []
        responses += replay.responses
    return replay, responses


# ---------------------------------------------------------------------- identical replays


def in_turn(scenario: Scenario) -> Scenario:
    return scenario.in_turn()


def ahead(scenario: Scenario) -> Scenario:
    return scenario.ahead().without_host_waits() if scenario.seed % 3 else scenario.ahead()


def pipelined(scenario: Scenario) -> Scenario:
    return scenario.pipelined(3)


@pytest.fixture(scope="module", params=[in_turn, ahead, pipelined], ids=lambda kind: kind.__name__)
def runs(request, tmp_path_factory):
    """Scenarios with some batches in flight: each with its trace, and the responses when it was recorded."""
    folder = tmp_path_factory.mktemp("traces")
    recorded = []
    for seed in SEEDS:
        scenario, path = request.param(draw(seed)), folder / str(seed)
        recorded.append((scenario, path, record_run(scenario, path, keep_logits=seed % 2 == 0)))
    return recorded


def test_the_replay_of_every_seed_is_identical(runs):
    for scenario, path, recorded in runs:
        replay, responses = replay_all(path)
        assert replay.num_answered == ROUNDS * len(scenario.requests) and not replay.running
        # Errors are different objects, and omitted logits are zeros.
        assert list(map(essence, responses)) == list(map(essence, recorded))
        if scenario.seed % 2 == 0:
            assert [r.result for r in responses] == [r.result for r in recorded]
        assert outcome(path) == (IDENTICAL, summary(replay))


def test_a_replay_starts_the_same_requests_before_others(tmp_path):
    """With the policy LPM; `replay_all` compares every batch."""
    for seed in SEEDS:
        scenario, path = draw_with_longest_prefix_first(seed), tmp_path / str(seed)
        record_run(scenario, path)
        replay, _ = replay_all(path)
        assert replay.num_answered == ROUNDS * len(scenario.requests)


def essence(response: Response) -> tuple:
    result = response.result
    if result is not None:
        result = replace(result, context_logits=None, generation_logits=None)
    return response.request_id, response.is_final, result, str(response.error)


def summary(replay: Replay) -> str:
    return (
        f"{replay.num_iterations} iterations replayed, identical\n"
        f"{replay.num_requests} requests, {replay.num_answered} answered to the end\n"
    )


def test_the_runs_cover_every_situation(runs):
    """Deadlines, failures, beams, drafts and pauses must occur in the replayed runs."""
    records = [record for _, path, _ in runs for record in read(path)[1]]
    assert sum(bool(record.loads) for record in records if isinstance(record, Begin)) > 0.8 * len(SEEDS)
    begins = [record for record in records if isinstance(record, Begin)]
    batches = [begin.batch for begin in begins if begin.batch is not None]
    ends = [record for record in records if isinstance(record, End)]
    responses = [response for *_, recorded in runs for response in recorded]
    reasons = {reason for r in responses if r.result for reason in r.result.finish_reasons}
    assert reasons == set(FinishReason)
    assert {(error.kind, error.marked) for error in ERRORS} <= {(end.error_kind, end.error) for end in ends}
    assert any(begin.inputs.stops for begin in begins)
    assert any(batch.moves and batch.block_copies and batch.replaced_blocks for batch in batches)
    assert any(chunk.num_draft_tokens for batch in batches for chunk in batch.context)
    assert any(not chunk.is_last for batch in batches for chunk in batch.context)
    outputs = [end.output for end in ends if end.output is not None]
    assert any(output.beams for output in outputs) and any(output.context for output in outputs)
    assert any(details.logits for output in outputs for details in output.details.values())


def test_idle_iterations_are_not_recorded(runs):
    for _, path, _ in runs:
        _, records = read(path)
        iterations = [record.inputs.iteration for record in records if isinstance(record, Begin)]
        assert len(iterations) <= iterations[-1] and iterations[-1] >= GAP * (ROUNDS - 1)


class BurningEngine(FakeEngine):
    """An engine that sometimes raises for a batch with a certain slot."""

    def forward(self, batch: ScheduledBatch):
        logits = super().forward(batch)
        if batch.iteration % 7 == 3 and 2 in batch.generation_slots:
            raise RuntimeError("slot 2 is on fire")
        return logits


@pytest.mark.parametrize("seed", with_all(range(5), range(2)))
def test_a_loop_recorded_with_all_its_threads_replays_identically(seed, tmp_path):
    """Arrivals, stops, deadlines, idle times and failures depend on the threads' timing."""
    path, rng = tmp_path / "trace", random.Random(seed)
    config = SchedulingConfig(CapacityPolicy.MAX_UTILIZATION, max_num_requests=9)
    limits = replace(LIMITS, num_blocks=30)
    scheduler = Scheduler(config, limits)
    client = LocalEngineClient(EngineDescription(scheduler.limits), lambda: manager.notify())
    manager = GptManager(
        BurningEngine(limits),
        scheduler,
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        on_death=client.fail_all,
        instruments=Instruments(recorder=JsonRecorder(str(path), config, limits)),
    )
    finals: queue.Queue[Response] = queue.Queue()

    def receive(response: Response) -> None:
        if response.is_final:
            finals.put(response)

    for _ in range(6):
        for _ in range(12):
            prompt = tuple(rng.randrange(50) for _ in range(rng.randint(1, 40)))
            hurried = rng.random() < 0.2
            handle = client.submit(
                Request(0, prompt, rng.randint(1, 60), streaming=True, allotted_time_ms=int(hurried)), receive
            )
            if rng.random() < 0.2:
                handle.stop()
        for _ in range(12):
            assert finals.get(timeout=60)
    manager.shutdown()
    client.close()
    replay, _ = replay_all(path)
    # Some are stopped before the loop has fetched them.
    assert 36 < replay.num_requests == replay.num_answered <= 72 and not replay.running
    assert any(isinstance(record, End) and record.error for record in read(path)[1])


# ---------------------------------------------------------------------- how traces end


def test_a_trace_of_a_hang_names_the_running_requests(tmp_path):
    simple_trace(tmp_path / "trace", unanswered=True)
    assert outcome(tmp_path / "trace") == (
        IDENTICAL,
        "4 iterations replayed, identical\n"
        "3 requests, 0 answered to the end\n"
        "iteration 3 was running: 3 rows (0 context chunks of 0 tokens, 3 in generation), requests 1, 2, 3\n",
    )


@pytest.mark.parametrize("seed", with_all(range(20), range(8)))
def test_a_trace_cut_anywhere_replays_identically(seed, tmp_path):
    rng, path = random.Random(seed), tmp_path / "trace"
    record_run(draw(seed), path)
    whole = path.read_bytes()
    for _ in range(20):
        length = rng.randint(whole.index(b"\n") + 1, len(whole))
        path.write_bytes(whole[:length])
        code, report = outcome(path)
        assert code == IDENTICAL
        begins, ends = whole[:length].count(b'"record":"begin"'), whole[:length].count(b'"record":"end"')
        is_cut = not whole[:length].endswith(b"\n")
        assert ("the last line is unfinished" in report) == is_cut
        assert is_cut or f"{begins} iterations replayed, identical\n" in report
        batches = whole[:length].count(b'"batch"')
        assert is_cut or (batches > ends) == ("was running: " in report)


def test_rows_of_beams_are_reported_with_their_requests_id(tmp_path):
    """The rows of a search that was running are all named by one id."""
    scenario = next(
        scenario
        for scenario in map(draw, range(1000))
        if len([r for r in scenario.requests.values() if r.sampling.beam_width > 2]) == 1
        and not (scenario.stops or scenario.invalid or scenario.breakdowns or scenario.config.max_queue_size)
    )
    path = tmp_path / "trace"
    record_run(scenario, path)
    (search,) = (r for r in scenario.requests.values() if r.sampling.beam_width > 2)
    records = raw_records(path)
    width = search.sampling.beam_width
    last = next(
        index
        for index, record in enumerate(records)
        if isinstance(record, Begin)
        and record.batch
        and any(len(group.slots) == width for group in record.batch.beam_groups)
    )
    write(path, records[: last + 1])
    named = re.search(r"was running: (\d+) rows .* requests ([\d, ]+)\n", outcome(path)[1])
    assert int(named[1]) >= width and str(search.request_id) in named[2].split(", ")
    assert len(set(named[2].split(", "))) == len(named[2].split(", "))


def test_a_batch_is_described_by_its_rows_and_requests():
    batch = ScheduledBatch(
        3,
        context=(ContextChunk(0, 0, (1, 2, 3), True), ContextChunk(4, 0, (1, 2), False)),
        generation_slots=(1, 2, 3),
    )
    owners = {0: 7, 1: 9, 2: 9, 3: 12}
    assert describe_batch(batch, owners.get) == (
        "5 rows (2 context chunks of 5 tokens, 3 in generation), requests 7, ?, 9, 12"
    )


def test_a_row_that_failed_alone_fails_in_the_replay(tmp_path):
    """The failed row's request ends in the same iteration with the same error; the other request runs as
    recorded."""
    config, path = SchedulingConfig(max_num_tokens=18), tmp_path / "trace"
    scheduler, engine = Scheduler(config, LIMITS), FakeEngine(LIMITS)
    recorder = JsonRecorder(str(path), config, LIMITS)
    recorded = []
    for iteration in range(5):
        requests = tuple(Request(number, (number,) * 6, 5) for number in (1, 2)) if iteration == 0 else ()
        recorded += scheduler.accept(IterationInput(iteration, iteration + 1, requests))
        batch = scheduler.schedule()
        recorder.begin(IterationInput(iteration, iteration + 1, requests), batch)
        output = engine.decode(batch, engine.forward(batch))
        if iteration == 2:
            output = replace(output, token_ids=[(), output.token_ids[1]], failures={0: StepFailed("the row")})
        recorder.end(output, iteration + 2)
        recorded += scheduler.update(batch, output, iteration + 2)
    recorder.close()
    _, replayed = replay_all(path)
    assert outcome(path)[0] == IDENTICAL
    for responses in (recorded, replayed):
        failed, final = responses
        assert (failed.request_id, type(failed.error), str(failed.error)) == (1, StepFailed, "the row")
        assert final.result.num_output_tokens == (5,)
    assert replayed[1] == recorded[1]
