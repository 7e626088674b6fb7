"""The loop over an engine that overlaps iterations: a batch begins before the previous tokens are read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.batch_manager.recording import Begin, End, JsonRecorder
from inflight.batch_manager.replay import IDENTICAL
from inflight.config import SchedulingConfig
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopSignal
from inflight.testing.fake_model import expected_tokens
from inflight.testing.simulation.integrity import check_integrity

from .recorded import outcome, read
from .test_gpt_manager import LIMITS
from .test_pipeline import Loop, check_tokens, prompts

PENALIZED = SamplingConfig(repetition_penalty=1.3)


def make_loop(recorder: JsonRecorder | None = None) -> Loop:
    return Loop(1, recorder, overlaps_iterations=True)


def names(loop: Loop) -> str:
    """The engine's calls as letters: f for forward, d for decode."""
    return "".join(name[0] for name, _ in loop.engine.calls)


def test_the_next_batch_begins_before_the_tokens_are_read():
    loop = make_loop()
    loop.run(Request(1, (1, 2, 7), 5))
    assert names(loop) == "f" + 4 * "fd" + "d"
    assert list(loop.responses[0].result.output_token_ids[0][3:]) == expected_tokens((1, 2, 7), 5, 50)


def test_tokens_are_those_of_each_request_alone_with_one_iteration_per_token():
    loop = make_loop()
    loop.run(*(Request(i, prompt, 8) for i, prompt in prompts(4).items()))
    check_tokens(loop, 4, 8)
    assert names(loop) == "f" + 7 * "fd" + "d"
    in_each = [told["Scheduled Requests"] for told in loop.stats]
    assert in_each == [4] * 8 + [0], "the last one only waits"


@pytest.mark.parametrize("ended_by", ["end_ids", "stop_words"])
def test_a_request_ended_by_an_end_id_is_answered_when_its_extra_row_is_back(ended_by):
    tokens = expected_tokens((1, 2, 7), 9, 50)
    last = next(at for at in range(3, 9) if tokens[at] not in tokens[:at])
    how = {"end_ids": (tokens[last],)} if ended_by == "end_ids" else {"stop_words": ((tokens[last],),)}
    loop = make_loop()
    loop.run(Request(1, (1, 2, 7), 20, **how))
    (final,) = loop.responses
    kept = tokens[:last] if ended_by == "end_ids" else tokens[: last + 1]
    assert list(final.result.output_token_ids[0][3:]) == kept
    assert names(loop).count("f") == last + 2
    assert loop.scheduler.kv_cache.pool.num_held == 0
    check_integrity(loop.scheduler)


def test_a_request_that_needs_the_host_runs_in_every_second_iteration():
    loop = make_loop()
    loop.run(Request(1, (1, 2, 7), 12), Request(2, (2, 3, 7), 5, sampling=PENALIZED))
    assert names(loop) == "f" + 11 * "fd" + "d", "12 iterations, each before the one before it is decoded"
    in_each = [told["Scheduled Requests"] for told in loop.stats]
    assert in_each == 4 * [2, 1] + [2, 1, 1, 1, 0]
    assert len(loop.responses) == 2
    for response, sampling, count in zip(loop.responses, (PENALIZED, None), (5, 12)):
        prompt = prompts(2)[response.request_id]
        tokens = expected_tokens(prompt, count, 50, sampling)
        assert response.result.output_token_ids[0] == (*prompt, *tokens)


def test_a_later_request_does_not_disturb_the_batch_in_flight():
    loop = make_loop()
    loop.pending.append(Request(1, (1, 2, 7), 12))
    for _ in range(3):
        loop.manager.step()
    assert names(loop) == "ffdfd"
    loop.pending.append(Request(2, (2, 3, 7), 2, sampling=PENALIZED))
    loop.manager.step()
    assert names(loop) == "ffdfdfd"
    loop.run()
    assert [told["Scheduled Requests"] for told in loop.stats] == [1, 1, 1, 2, 1, 2, *6 * [1], 0]
    assert sorted(response.request_id for response in loop.responses) == [1, 2]


@pytest.mark.parametrize("name", ["forward", "decode"])
def test_failures_of_batches_are_handled_in_order_and_no_request_loses_a_token(name):
    for iteration in range(8):
        loop = make_loop()
        loop.engine.fails.add((name, iteration))
        loop.run(
            *(Request(i, prompt, 8) for i, prompt in prompts(3).items()),
            Request(9, (9, 9), 4, sampling=SamplingConfig(beam_width=2) if iteration % 2 else PENALIZED),
        )
        assert loop.scheduler.returned == sorted(loop.scheduler.returned)
        has_failed = (name, iteration) in loop.engine.calls
        assert not (name == "forward" and has_failed and ("decode", iteration) in loop.engine.calls)
        finals = {response.request_id: response for response in loop.responses}
        assert len(finals) == len(loop.responses) == 4
        for i, prompt in prompts(3).items():
            assert finals[i].error is None, "it was not alone"
            assert list(finals[i].result.output_token_ids[0][3:]) == expected_tokens(prompt, 8, 50)
        assert loop.scheduler.kv_cache.pool.num_held == 0


def test_a_stop_ends_a_request_when_its_batch_in_flight_is_back():
    loop = make_loop()
    loop.pending += [Request(i, prompt, 50) for i, prompt in prompts(2).items()]
    for _ in range(5):
        loop.manager.step()
    loop.stops.append(StopSignal(1))
    for _ in range(2):
        loop.manager.step()
    (stopped,) = loop.responses
    assert stopped.is_final and stopped.result.finish_reasons == (FinishReason.CANCELLED,)
    prompt = prompts(2)[1]
    count = stopped.result.num_output_tokens[0]
    assert list(stopped.result.output_token_ids[0][3:]) == expected_tokens(prompt, count, 50)
    loop.stops.append(StopSignal(2))
    loop.run()
    assert len(loop.responses) == 2 and loop.in_flight()[-1] == 0
    assert loop.scheduler.kv_cache.pool.num_held == 0


def test_a_recorded_loop_replays_identically(tmp_path):
    path = tmp_path / "trace"
    limits = replace(LIMITS, overlaps_iterations=True)
    loop = make_loop(JsonRecorder(str(path), SchedulingConfig(), limits))
    loop.engine.fails |= {("forward", 4), ("decode", 9)}
    for _ in range(2):
        loop.run(*(Request(i, prompt, 12, streaming=True) for i, prompt in prompts(6).items()))
    loop.manager.shutdown()
    header, records = read(path)
    assert header.limits == limits and outcome(path)[0] == IDENTICAL
    kinds = [type(record) for record in records]
    assert any(kinds[at : at + 2] == [Begin] * 2 for at in range(len(kinds))), "nothing was in flight"
    assert sum(isinstance(record, End) and record.output is None for record in records) >= 2
