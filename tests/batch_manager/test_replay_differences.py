"""Replays: differences from the recorded run, and the program's report of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import msgspec
import pytest

from inflight.batch_manager.recording import End, Header, encode
from inflight.batch_manager.replay import (
    DIFFERENT,
    IDENTICAL,
    UNREADABLE,
    differences,
)
from inflight.config import SchedulingConfig
from inflight.core.schedule.batch import BeamGroup, ModelOutput, ScheduledBatch
from inflight.replay_command import main
from inflight.testing.simulation.scenario import draw
from tests.batch_manager.recorded import (
    END_ID,
    LIMITS,
    outcome,
    raw_records,
    record_run,
    simple_trace,
    write,
)
from tests.tiers import with_all

SEEDS = range(60)


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


# ---------------------------------------------------------------------- differences


@pytest.mark.parametrize("seed", with_all(SEEDS, range(15)))
def test_any_changed_decision_is_reported_with_its_path(seed, tmp_path):
    """The report has the path of a changed number in a batch."""
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
    """Return the path of every integer in a JSON value, with its container and key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in pairs:
        at = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        if type(inner) is int:
            found.append((at, value, key))
        elif isinstance(inner, dict | list):
            found += integers(at, inner)
    return found


def test_a_changed_token_changes_the_replay(trace):
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


def test_a_changed_configuration_changes_the_replay(trace):
    header = raw_records(trace)[0]
    change(trace, 0, config=replace(header.config, max_num_tokens=17))
    code, report = outcome(trace)
    assert code == DIFFERENT and report.startswith("iteration 0 (line 2) differs, after 0 identical ones:\n")
    assert "  batch.context: recorded (ContextChunk(slot=0, " in report


def test_a_failure_in_place_of_an_output_is_a_difference(trace):
    change(trace, 4, output=None, error_kind="INTERNAL", error="it failed")
    code, report = outcome(trace)
    assert code == DIFFERENT and report.startswith("iteration 2 (line 6) differs")


def test_a_batch_that_was_not_recorded_is_a_difference(trace):
    change(trace, 3, batch=None)
    code, report = outcome(trace)
    assert code == DIFFERENT
    assert "  batch: recorded nothing, replayed a batch of 3 rows, 3 tokens\n" in report


def test_a_crash_of_the_core_is_reproduced(trace):
    """The scheduler cannot process an output without tokens: the loop would have died."""
    change(trace, 4, output=ModelOutput(1))
    code, report = outcome(trace)
    assert code == DIFFERENT
    assert "line 5: the scheduler failed after iteration 1 began\nTraceback " in report
    assert report.rstrip().endswith("StopIteration")


def test_nan_equals_nan():
    def batch(score: float) -> ScheduledBatch:
        return ScheduledBatch(1, beam_groups=(BeamGroup((0,), (score,), 2),))

    assert list(differences("batch", batch(float("nan")), batch(float("nan")))) == []
    assert list(differences("batch", batch(float("nan")), batch(1.0))) == [
        "batch.beam_groups[0].scores[0]: recorded nan, replayed 1.0"
    ]


def test_long_lists_of_differences_are_truncated(trace):
    record = raw_records(trace)[1]
    chunks = tuple(replace(chunk, token_ids=(9,) * 18) for chunk in record.batch.context)
    shifted = tuple(replace(chunk, slot=9, start=9, token_ids=(8,) * 6) for chunk in record.batch.context)
    change(trace, 1, batch=replace(record.batch, context=shifted))
    assert outcome(trace)[1].count("\n") == 21
    change(trace, 1, batch=replace(record.batch, context=chunks * 20))
    (line,) = [line for line in outcome(trace)[1].splitlines() if "batch.context: " in line]
    assert len(line) < 500 and "characters)" in line


# ---------------------------------------------------------------------- the program


def test_the_until_option_stops_after_an_iteration_and_its_outcome(trace):
    assert outcome(trace, until=2) == (
        IDENTICAL,
        "3 iterations replayed, identical\n3 requests, 0 answered to the end\n",
    )
    code, report = outcome(trace, until=1000)
    assert code == IDENTICAL and report.startswith("5 iterations replayed, identical\n")
    assert report.endswith("the trace ends before iteration 1000\n")


def test_verbose_prints_every_iteration(trace):
    lines = outcome(trace, verbose=True)[1].splitlines()
    assert lines[0] == (
        "iteration 0: request 1 (6 tokens); request 2 (6 tokens); request 3 (6 tokens); slot 0 to request 1; "
        "slot 1 to request 2; slot 2 to request 3; 3 context chunks (18 tokens), 0 in generation"
    )
    assert lines[1] == "iteration 1: 0 context chunks (0 tokens), 3 in generation"
    assert lines[5:8] == [f"  request {number} has ended: LENGTH" for number in (1, 2, 3)]


def test_only_the_states_json_is_on_stdout(trace, capsys):
    assert main([str(trace), "--state", "--until", "2"]) == IDENTICAL
    out, err = capsys.readouterr()
    state = json.loads(out)
    assert [running["request_id"] for running in state["running"]] == [1, 2, 3]
    assert [running["generated_tokens"] for running in state["running"]] == [3, 3, 3]
    assert err.startswith("3 iterations replayed, identical")


def test_the_state_is_printed_after_a_difference_too(trace, capsys):
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
        (lambda path: path.write_bytes(b""), "it is not a file that record_path wrote"),
        (lambda path: change(path, 0, version=99), "version 99"),
        (lambda path: change(path, 0, config=SchedulingConfig(max_num_tokens=1)), "max_num_tokens is 1"),
        (lambda path: change(path, 2, iteration=5), "line 3: a result of iteration 5"),
        (lambda path: write(path, [*raw_records(path), End(4, 1)]), "line 12: a result of iteration 4"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_an_error_on_stderr(trace, spoil, said, capsys):
    spoil(trace)
    assert main([str(trace)]) == UNREADABLE
    err = capsys.readouterr().err
    assert said in err and str(trace) in err and "Traceback" not in err


def test_a_header_without_records_is_a_trace(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(encode(Header(SchedulingConfig(), LIMITS)))
    assert outcome(path) == (
        IDENTICAL,
        "0 iterations replayed, identical\n0 requests, 0 answered to the end\n",
    )
