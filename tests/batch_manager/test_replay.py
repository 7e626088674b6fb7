"""Replays: a recorded run is the same again to the last decision, and what is not the same is named."""

from __future__ import annotations

import io
import json
import queue
import random
import re
from dataclasses import replace

import msgspec
import pytest

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.recording import Begin, End, Header, JsonRecorder, Trace, encode
from inflight.batch_manager.replay import (
    DIFFERENT,
    IDENTICAL,
    UNREADABLE,
    Options,
    Replay,
    describe_batch,
    differences,
    main,
    run,
)
from inflight.core.batch import BeamGroup, ContextChunk, EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.config import CapacitySchedulerPolicy, SchedulerConfig
from inflight.core.description import EngineDescription
from inflight.core.request import IterationInput, Request
from inflight.core.response import Response
from inflight.core.scheduler import Scheduler
from inflight.core.stop import FinishReason, StopReason
from inflight.endpoint.local import LocalEngineClient
from inflight.testing.fake_engine import FakeEngine, expected_tokens
from tests.batch_manager.recorded import (
    ERRORS,
    GAP,
    ROUNDS,
    raw_records,
    read,
    record_run,
    write,
)
from tests.simulation.scenario import Scenario, draw

SEEDS = range(60)
LIMITS = EngineLimits(
    vocab_size=50, max_sequence_length=100, max_num_sequences=4, num_blocks=64, tokens_per_block=4
)


def replay_all(path) -> tuple[Replay, list[Response]]:
    """Replay without a difference; every response."""
    header, records = read(path)
    replay = Replay.of(header)
    responses = []
    for record in records:
        assert replay.take(record) == []
        responses += replay.responses
    return replay, responses


def outcome(path, until: int | None = None, verbose: bool = False) -> tuple[int, str]:
    """Exit code and report of the program."""
    report = io.StringIO()
    with path.open("rb") as file:
        return run(Trace(file), Options(until, is_verbose=verbose), io.StringIO(), report), report.getvalue()


# ---------------------------------------------------------------------- the same again


def in_turn(scenario: Scenario) -> Scenario:
    return scenario.in_turn()


def ahead(scenario: Scenario) -> Scenario:
    return scenario.ahead().undemanding() if scenario.seed % 3 else scenario.ahead()


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


def test_every_seed_is_the_same_again(runs):
    for scenario, path, recorded in runs:
        replay, responses = replay_all(path)
        assert replay.num_answered == ROUNDS * len(scenario.requests) and not replay.running
        # An error is another object each time, and logits that were left out are zeros.
        assert list(map(essence, responses)) == list(map(essence, recorded))
        if scenario.seed % 2 == 0:
            assert [r.result for r in responses] == [r.result for r in recorded]
        assert outcome(path) == (IDENTICAL, summary(replay))


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


def test_the_runs_reach_what_they_are_meant_to_reach(runs):
    """Deadlines, failures, beams, drafts, pauses: a replay of nothing proves nothing."""
    records = [record for _, path, _ in runs for record in read(path)[1]]
    begins = [record for record in records if isinstance(record, Begin)]
    batches = [begin.batch for begin in begins if begin.batch is not None]
    ends = [record for record in records if isinstance(record, End)]
    responses = [response for *_, recorded in runs for response in recorded]
    reasons = {reason for r in responses if r.result for reason in r.result.finish_reasons}
    assert reasons == set(FinishReason)
    assert {(error.code, str(error)) for error in ERRORS} <= {(end.error_code, end.error) for end in ends}
    assert any(begin.inputs.stops for begin in begins)
    assert any(batch.moves and batch.block_copies and batch.replaced_blocks for batch in batches)
    assert any(chunk.num_draft_tokens for batch in batches for chunk in batch.context)
    assert any(not chunk.is_last for batch in batches for chunk in batch.context)
    outputs = [end.output for end in ends if end.output is not None]
    assert any(output.beams for output in outputs) and any(output.context for output in outputs)
    assert any(details.logits for output in outputs for details in output.details.values())


def test_idle_iterations_are_not_there(runs):
    for _, path, _ in runs:
        _, records = read(path)
        iterations = [record.inputs.iteration for record in records if isinstance(record, Begin)]
        assert len(iterations) < GAP * (ROUNDS - 1) <= iterations[-1]


class BurningEngine(FakeEngine):
    """Raises for a batch with a certain slot, now and then."""

    def forward(self, batch: ScheduledBatch):
        logits = super().forward(batch)
        if batch.iteration % 7 == 3 and 2 in batch.generation_slots:
            raise RuntimeError("slot 2 is on fire")
        return logits


@pytest.mark.parametrize("seed", range(5))
def test_what_the_loop_records_with_all_its_threads_is_the_same_again(seed, tmp_path):
    """Arrivals, stops, deadlines and idle times are the threads'; failures too."""
    path, rng = tmp_path / "trace", random.Random(seed)
    config = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION, max_num_requests=9)
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
            request_id = client.submit(
                Request(0, prompt, rng.randint(1, 60), streaming=True, allotted_time_ms=int(hurried)), receive
            )
            if rng.random() < 0.2:
                client.stop(request_id, StopReason.CANCELLED)
        for _ in range(12):
            assert finals.get(timeout=60)
    manager.shutdown()
    client.close()
    replay, _ = replay_all(path)
    # Some are stopped before the loop has heard of them.
    assert 36 < replay.num_requests == replay.num_answered <= 72 and not replay.running
    assert any(isinstance(record, End) and record.error for record in read(path)[1])


# ---------------------------------------------------------------------- what differs


@pytest.mark.parametrize("seed", SEEDS)
def test_any_changed_decision_is_named(seed, tmp_path):
    """One number somewhere in some batch: the path in the report is where it stands."""
    rng, path = random.Random(seed), tmp_path / "trace"
    record_run(draw(seed), path)
    lines = path.read_bytes().splitlines()
    numbers = [index for index, line in enumerate(lines) if b'"batch"' in line]
    for index in rng.sample(numbers, 5):
        record = json.loads(lines[index])
        places = [
            *integers("batch", record["batch"]),
            *integers("starts", record.get("starts", [])),
        ]
        where, holder, key = rng.choice(places)
        before, holder[key] = holder[key], holder[key] + 1
        changed = [*lines[:index], json.dumps(record).encode(), *lines[index + 1 :]]
        path.write_bytes(b"\n".join(changed) + b"\n")
        code, report = outcome(path)
        assert code == DIFFERENT
        iteration = record["inputs"]["iteration"]
        assert report.startswith(f"iteration {iteration} (line {index + 1}) differs, after ")
        assert f"  {where}: recorded {before + 1}, replayed {before}\n" in report


def integers(path: str, value) -> list[tuple[str, dict | list, object]]:
    """Every whole number in a JSON value: its path, and where to change it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in pairs:
        at = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        if type(inner) is int:
            found.append((at, value, key))
        elif isinstance(inner, dict | list):
            found += integers(at, inner)
    return found


END_ID = min(set(range(50)).difference(*(expected_tokens((number,) * 6, 5, 50) for number in (1, 2, 3))))


def simple_trace(path, unanswered: bool = False) -> None:
    """Three requests of 6 prompt and 5 new tokens, with an end id that never comes."""
    requests = tuple(Request(number, (number,) * 6, 5, end_ids=(END_ID,)) for number in (1, 2, 3))
    config = SchedulerConfig(max_num_tokens=18)
    scheduler, engine = Scheduler(config, LIMITS), FakeEngine(LIMITS)
    recorder = JsonRecorder(str(path), config, LIMITS)
    for iteration in range(5):
        inputs = IterationInput(iteration, iteration + 1, requests if iteration == 0 else ())
        scheduler.accept(inputs)
        batch = scheduler.schedule()
        recorder.begin(inputs, batch)
        if unanswered and iteration == 3:
            break
        output = engine.decode(batch, engine.forward(batch))
        recorder.end(output, None, iteration + 2)
        scheduler.update(batch, output, iteration + 2)
    recorder.close()


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace"
    simple_trace(path)
    assert outcome(path)[0] == IDENTICAL
    return path


def change(path, index: int, **fields) -> None:
    """Change fields of one record."""
    records = raw_records(path)
    records[index] = msgspec.structs.replace(records[index], **fields)
    write(path, records)


def test_another_token_of_the_device_ends_another_sequence(trace):
    output = raw_records(trace)[4].output
    assert raw_records(trace)[4].iteration == 1
    change(trace, 4, output=replace(output, token_ids=[(END_ID,), *output.token_ids[1:]]))
    code, report = outcome(trace)
    assert code == DIFFERENT
    assert report == (
        "iteration 2 (line 6) differs, after 2 identical ones:\n"
        "  batch.released_slots: recorded (), replayed (0,)\n"
        "  batch.generation_slots: recorded (0, 1, 2), replayed (1, 2)\n"
    )


def test_another_configuration_decides_otherwise(trace):
    header = raw_records(trace)[0]
    change(trace, 0, config=replace(header.config, max_num_tokens=17))
    code, report = outcome(trace)
    assert code == DIFFERENT and report.startswith("iteration 0 (line 2) differs, after 0 identical ones:\n")
    assert "  batch.context: recorded (ContextChunk(slot=0, " in report


def test_a_failure_is_another_outcome_than_an_answer(trace):
    change(trace, 4, output=None, error_code="INTERNAL", error="it failed")
    code, report = outcome(trace)
    assert code == DIFFERENT and report.startswith("iteration 2 (line 6) differs")


def test_a_batch_where_there_was_none(trace):
    change(trace, 3, batch=None)
    code, report = outcome(trace)
    assert code == DIFFERENT
    assert "  batch: recorded nothing, replayed a batch of 3 rows, 3 tokens\n" in report


def test_a_crash_of_the_core_is_a_crash_again(trace):
    """An output without tokens is none that the scheduler can take: the loop would have died of it."""
    change(trace, 4, output=ModelOutput(1))
    code, report = outcome(trace)
    assert code == DIFFERENT
    assert "line 5: the scheduler failed after iteration 1 began\nTraceback " in report
    assert report.rstrip().endswith("StopIteration")


def test_numbers_that_are_none_are_equal_to_themselves():
    def batch(score: float) -> ScheduledBatch:
        return ScheduledBatch(1, beam_groups=(BeamGroup((0,), (score,), 2),))

    assert list(differences("batch", batch(float("nan")), batch(float("nan")))) == []
    assert list(differences("batch", batch(float("nan")), batch(1.0))) == [
        "batch.beam_groups[0].scores[0]: recorded nan, replayed 1.0"
    ]


def test_many_differences_are_cut(trace):
    record = raw_records(trace)[1]
    chunks = tuple(replace(chunk, token_ids=(9,) * 18) for chunk in record.batch.context)
    shifted = tuple(replace(chunk, slot=9, start=9, token_ids=(8,) * 6) for chunk in record.batch.context)
    change(trace, 1, batch=replace(record.batch, context=shifted))
    assert outcome(trace)[1].count("\n") == 21
    change(trace, 1, batch=replace(record.batch, context=chunks * 20))
    (line,) = [line for line in outcome(trace)[1].splitlines() if "batch.context: " in line]
    assert len(line) < 500 and "characters)" in line


# ---------------------------------------------------------------------- how traces end


def test_a_trace_of_a_hang_says_what_was_running(tmp_path):
    simple_trace(tmp_path / "trace", unanswered=True)
    assert outcome(tmp_path / "trace") == (
        IDENTICAL,
        "4 iterations replayed, identical\n"
        "3 requests, 0 answered to the end\n"
        "iteration 3 was running: 3 rows (0 context chunks of 0 tokens, 3 in generation), requests 1, 2, 3\n",
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_may_end_anywhere(seed, tmp_path):
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


def test_beams_belong_to_their_request(tmp_path):
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


def test_a_batch_in_words():
    batch = ScheduledBatch(
        3,
        context=(ContextChunk(0, 0, (1, 2, 3), True), ContextChunk(4, 0, (1, 2), False)),
        generation_slots=(1, 2, 3),
    )
    owners = {0: 7, 1: 9, 2: 9, 3: 12}
    assert describe_batch(batch, owners.get) == (
        "5 rows (2 context chunks of 5 tokens, 3 in generation), requests 7, ?, 9, 12"
    )


# ---------------------------------------------------------------------- the program


def test_until_stops_after_an_iteration_and_its_answer(trace):
    assert outcome(trace, until=2) == (
        IDENTICAL,
        "3 iterations replayed, identical\n3 requests, 0 answered to the end\n",
    )
    assert outcome(trace, until=1000)[1].startswith("5 iterations")


def test_verbose_tells_of_every_iteration(trace):
    lines = outcome(trace, verbose=True)[1].splitlines()
    assert lines[0] == (
        "iteration 0: request 1 (6 tokens); request 2 (6 tokens); request 3 (6 tokens); slot 0 to request 1; "
        "slot 1 to request 2; slot 2 to request 3; 3 context chunks (18 tokens), 0 in generation"
    )
    assert lines[1] == "iteration 1: 0 context chunks (0 tokens), 3 in generation"
    assert lines[5:8] == [f"  request {number} has ended: LENGTH" for number in (1, 2, 3)]


def test_the_state_is_json_and_alone_on_stdout(trace, capsys):
    assert main([str(trace), "--state", "--until", "2"]) == IDENTICAL
    out, err = capsys.readouterr()
    state = json.loads(out)
    assert [running["request_id"] for running in state["running"]] == [1, 2, 3]
    assert [running["generated_tokens"] for running in state["running"]] == [3, 3, 3]
    assert err.startswith("3 iterations replayed, identical")


def test_the_state_comes_after_a_difference_too(trace, capsys):
    change(trace, 7, batch=ScheduledBatch(3, generation_slots=(0,)))
    assert main([str(trace), "--state"]) == DIFFERENT
    assert json.loads(capsys.readouterr().out)["iteration"] == 3


def test_the_program_prints_its_report(trace, capsys):
    assert main([str(trace)]) == IDENTICAL
    assert capsys.readouterr().out.startswith("5 iterations replayed, identical\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b""), "no complete first line"),
        (lambda path: change(path, 0, version=99), "version 99"),
        (lambda path: change(path, 0, config=SchedulerConfig(max_num_tokens=1)), "max_num_tokens is 1"),
        (lambda path: change(path, 2, iteration=5), "line 3: an answer to iteration 5"),
        (lambda path: write(path, [*raw_records(path), End(4, 1)]), "line 12: an answer to iteration 4"),
    ],
)
def test_what_cannot_be_replayed_is_said_on_stderr(trace, spoil, said, capsys):
    spoil(trace)
    assert main([str(trace)]) == UNREADABLE
    err = capsys.readouterr().err
    assert said in err and str(trace) in err and "Traceback" not in err


def test_a_header_alone_is_a_trace(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(encode(Header(SchedulerConfig(), LIMITS)))
    assert outcome(path) == (
        IDENTICAL,
        "0 iterations replayed, identical\n0 requests, 0 answered to the end\n",
    )
