"""Requests through a GptManager in this process, and the measurement of their times."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.measuring.options import Options
from benchmarks.measuring.setup import Kernels, Setup
from benchmarks.measuring.workload import BenchRequest
from benchmarks.offline import ClosedLoop, InProcess, _with_kept_weights
from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.stop import FinishReason
from inflight.engine.cpu.library import find_target
from inflight.errors import InvalidArgument, StepFailed
from inflight.models import read_model_description
from inflight.testing.fake_server import load_fake
from inflight.testing.make_model import make_model
from tests.engine.kernels import needs_native

REQUESTS = [BenchRequest((1, 2, number), 3) for number in range(5)]
SETTINGS = {
    "gpt_model_path": "vocab=100,step_us=0",
    "max_batch_size": "4",
    "max_sequence_length": "64",
    "max_tokens_in_paged_kv_cache": "512",
    "enable_kv_cache_reuse": "false",
}


def response(request_id: int, num_tokens: int, is_final: bool) -> Response:
    result = SequenceResult(((7,) * num_tokens,), 3, (num_tokens,), (FinishReason.NOT_FINISHED,))
    return Response(request_id, result, is_final=is_final)


def test_no_more_requests_are_in_flight_than_wanted():
    loop = ClosedLoop(REQUESTS, 2, 1)
    assert [request.request_id for request in loop.get(-1)] == [1, 2]
    assert not loop.get(-1)
    loop.take(response(2, 2, is_final=False))
    assert not loop.get(-1)
    loop.take(response(2, 1, is_final=True))
    assert [request.request_id for request in loop.get(-1)] == [3]


def test_get_returns_at_most_the_wanted_number_of_requests():
    loop = ClosedLoop(REQUESTS, 5, 1)
    assert not loop.get(0)
    assert len(loop.get(3)) == 3
    assert len(loop.get(3)) == 2


def test_a_request_counts_as_sent_when_the_one_before_has_ended():
    loop = ClosedLoop(REQUESTS[:2], 1, 1)
    loop.get(-1)
    loop.take(response(1, 3, is_final=True))
    loop.get(-1)
    loop.take(response(2, 3, is_final=True))
    first, second = loop.wait()
    assert second.sent_ns == first.responses_ns[-1]


def test_missing_tokens_are_an_error():
    loop = ClosedLoop(REQUESTS[:1], 1, 1)
    loop.get(-1)
    loop.take(response(1, 2, is_final=True))
    with pytest.raises(AssertionError, match="2 tokens of 3"):
        loop.wait()


def test_a_request_that_fails_ends_the_run():
    loop = ClosedLoop(REQUESTS, 1, 1)
    loop.get(-1)
    loop.take(Response(1, error=StepFailed("out of luck"), is_final=True))
    assert not loop.get(-1)
    with pytest.raises(StepFailed, match="out of luck"):
        loop.wait()


@pytest.mark.smoke
@pytest.mark.parametrize("concurrency", [1, 3, 5])
def test_every_request_of_every_run_is_answered(concurrency):
    with InProcess(SETTINGS, load_fake) as engine:
        for _ in range(2):
            timelines = engine.run(REQUESTS, concurrency)
            assert [len(timeline.responses_ns) for timeline in timelines] == [3] * 5
            assert all(timeline.sent_ns <= timeline.responses_ns[0] for timeline in timelines)


def test_starting_takes_longer_than_loading():
    with InProcess(SETTINGS, load_fake) as engine:
        resources = engine.resources()
    assert 0 < resources.load_s < resources.start_s
    assert resources.peak_rss_bytes > 0


@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", None), ("int8", "bfloat16")])
def test_the_reported_kernels_are_those_in_use(tmp_path, dtype, products):
    settings = SETTINGS | {"gpt_model_path": str(make_model(tmp_path, shape="tiny")), "dtype": dtype}
    with InProcess(settings | {"kernels": "torch"}) as engine:
        assert engine.kernels == Kernels("torch", "torch", (), products)
    with InProcess(settings) as engine:
        ran = engine.kernels
    assert ran.asked == "default"
    if ran.ran == "native":  # if this machine can have it
        target = find_target("bfloat16", dtype == "int8")
        assert set(ran.instruction_sets) == target.instruction_sets("bfloat16", dtype == "int8")
        assert ran.int8_products == (target.int8_products if dtype == "int8" else None)


def test_requests_run_one_after_another_do_not_overlap():
    with InProcess(SETTINGS, load_fake) as engine:
        timelines = engine.run(REQUESTS, 1)
    for earlier, later in itertools.pairwise(timelines):
        assert later.sent_ns == earlier.responses_ns[-1]


def test_a_request_that_the_engine_refuses_is_raised():
    with InProcess(SETTINGS, load_fake) as engine, pytest.raises(InvalidArgument, match="request_output_len"):
        engine.run([BenchRequest((1,), 1000)], 1)


@needs_native
def test_kept_quantized_weights_are_described(tmp_path):
    folder = make_model(tmp_path, quantize="awq")
    settings = SETTINGS | {"gpt_model_path": str(folder)}
    model = read_model_description(folder)
    options = Options(folder, "lone", 1, 1, None, None, 1, 64, 1)
    with InProcess(settings) as engine:
        plain = Setup.of(options, model.decoder, [REQUESTS[0]], engine.kernels)
        setup = _with_kept_weights(plain, settings, model)
    assert (engine.kernels.int8_products, setup.dtype) == (
        find_target("bfloat16", True).int8_products,
        "4 bits",
    )
    assert setup.weight_bytes < plain.weight_bytes
    assert _with_kept_weights(plain, settings | {"dtype": "bfloat16"}, model) == plain
