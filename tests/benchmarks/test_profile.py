"""The clock around an iteration's stages, a server's engine under load, and the results made from both."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.measuring.report import Percentiles, Timeline
from benchmarks.measuring.workload import BenchRequest
from benchmarks.profiling.plots import draw_plots
from benchmarks.profiling.results import (
    CacheRun,
    CacheSample,
    IterationCost,
    LoadPoint,
    Profile,
    to_json,
    to_markdown,
)
from benchmarks.profiling.served_engine import ServedEngine
from benchmarks.profiling.stopwatch import Iteration, Place, Stage, Stopwatch
from inflight.errors import InvalidArgument
from inflight.testing.fake_server import load_fake
from tests.benchmarks.factories import SETUP

SETTINGS = {
    "gpt_model_path": "vocab=100,step_us=500",
    "max_batch_size": "4",
    "max_sequence_length": "64",
    "tokens_per_block": "32",
    "max_tokens_in_paged_kv_cache": "256",
    "enable_kv_cache_reuse": "false",
    "stats_check_period_ms": "1",
}
REQUESTS = [BenchRequest((1, 2, number), 5) for number in range(6)]


class Loop:
    """A loop with a simulated clock: an iteration calls `forward`, which calls `compute`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def step(self, batch: SimpleNamespace | None, fails: bool = False) -> bool:
        self.now_ns += 1
        if batch is not None:
            try:
                self.forward(batch, fails)
            except ValueError:
                self.now_ns += 10
        self.now_ns += 2
        return True

    def forward(self, batch: SimpleNamespace, fails: bool) -> None:
        self.now_ns += 100
        self.compute(fails)
        self.now_ns += 200

    def compute(self, fails: bool) -> None:
        self.now_ns += 5000
        if fails:
            raise ValueError


BATCH = SimpleNamespace(context=(1,), generation_slots=(1, 2))


def watch(loop: Loop) -> Stopwatch:
    return Stopwatch(
        Place(Loop, "step", Stage.OTHER),
        Place(Loop, "forward", Stage.PACK),
        [Place(Loop, "compute", Stage.FORWARD)],
        lambda: loop.now_ns,
    )


def test_the_time_of_a_stage_excludes_inner_stages():
    loop = Loop()
    with watch(loop) as stopwatch:
        assert loop.step(BATCH)
    (found,) = stopwatch.iterations
    times_ns = {stage: found.stages_ns[stage] for stage in Stage if found.stages_ns[stage]}
    assert times_ns == {Stage.OTHER: 3, Stage.PACK: 300, Stage.FORWARD: 5000}
    assert (found.num_chunks, found.num_generation) == (1, 2)


def test_a_stage_ends_when_its_function_raises():
    loop = Loop()
    with watch(loop) as stopwatch:
        loop.step(BATCH, True)
        loop.step(BATCH)
    failed, later = stopwatch.iterations
    assert (failed.stages_ns[Stage.PACK], failed.stages_ns[Stage.OTHER]) == (100, 13)
    assert later.stages_ns[Stage.OTHER] == 3


def test_iterations_without_a_batch_are_not_kept():
    loop = Loop()
    with watch(loop) as stopwatch:
        loop.step(BATCH)
        loop.step(None)
    assert len(stopwatch.iterations) == 1


def test_functions_are_unwrapped_afterwards():
    before = Loop.step, Loop.forward, Loop.compute
    loop = Loop()
    with watch(loop) as stopwatch:
        assert Loop.step is not before[0]
    loop.step(BATCH)
    assert (Loop.step, Loop.forward, Loop.compute) == before
    assert not stopwatch.iterations


def iteration(num_chunks: int, num_generation: int, layers_ms: int, pack_ms: int) -> Iteration:
    stages_ns = [0] * len(Stage)
    stages_ns[Stage.FORWARD], stages_ns[Stage.PACK] = layers_ms * 1_000_000, pack_ms * 1_000_000
    return Iteration(num_chunks, num_generation, tuple(stages_ns))


def test_only_generation_iterations_with_all_rows_are_counted():
    wanted = [iteration(0, 4, layers_ms, 1) for layers_ms in (2, 9, 3)]
    others = [iteration(1, 4, 50, 50), iteration(0, 3, 50, 50)]
    cost = IterationCost.of(4, [*others, *wanted])
    assert (cost.iterations, cost.total_ms, cost.outside_ms, cost.share_outside) == (3, 4.0, 1.0, 0.25)


def test_every_request_is_answered_within_the_concurrency():
    with ServedEngine(SETTINGS, load_fake) as engine:
        timelines = engine.run(REQUESTS, 2)
        engine.take_samples()
        engine.run(REQUESTS, 2)
        samples = engine.take_samples()
    assert [timeline.num_output_tokens for timeline in timelines] == [5] * 6
    assert max(sample.running + sample.waiting for sample in samples) <= 2
    assert max(sample.running for sample in samples) == 2


def test_requests_are_not_sent_before_their_time():
    with ServedEngine(SETTINGS, load_fake) as engine:
        begun_ns = time.monotonic_ns()
        timelines = engine.run(REQUESTS[:4], 4, [0.02, 0.03])
    after_ms = [1e-6 * (timeline.sent_ns - begun_ns) for timeline in timelines]
    assert all(after >= least for after, least in zip(after_ms, (0, 20, 50, 80), strict=True))


def test_requests_wait_if_the_cache_is_too_small():
    short = SETTINGS | {"max_tokens_in_paged_kv_cache": "64"}
    with ServedEngine(short, load_fake) as engine:
        engine.run(REQUESTS, len(REQUESTS))
        samples = engine.take_samples()
    assert engine.num_blocks == 2
    assert max(sample.used_blocks for sample in samples) == 2
    assert max(sample.running for sample in samples) == 2
    assert max(sample.waiting for sample in samples) >= 2
    assert samples[0].time_s == 0.0
    assert samples[-1].waiting == samples[-1].running == 0


def test_the_error_of_a_request_is_raised():
    with (
        ServedEngine(SETTINGS, load_fake) as engine,
        pytest.raises(InvalidArgument, match="request_output_len"),
    ):
        engine.run([BenchRequest((1,), 1000)], 1)


def profile() -> Profile:
    samples = tuple(CacheSample(0.1 * number, number % 7, number % 5, number % 3) for number in range(2000))
    timelines = [Timeline(10, 3, 0, (1_000_000, 2_000_000, 4_000_000))] * 2
    return Profile(
        iterations=tuple(IterationCost.of(rows, [iteration(0, rows, 19, 1)]) for rows in (1, 8)),
        load=tuple(LoadPoint.of(concurrency, timelines) for concurrency in (1, 2, 4)),
        cache=(CacheRun(None, 10, samples), CacheRun(3.5, 10, samples[:50])),
        setup=SETUP,
    )


def test_the_figures_of_a_load_are_computed_from_its_requests():
    point = profile().load[0]
    assert point.output_tokens_per_s == pytest.approx(6 / 0.004)
    assert (point.ttft_ms, point.itl_ms) == (Percentiles(1.0, 1.0), Percentiles(1.5, 2.0))


@pytest.mark.smoke
def test_a_profile_is_written_as_json_and_tables():
    found = json.loads(to_json(profile()))
    assert found["iterations"][0]["stages_ms"]["forward"] == 19.0
    assert found["iterations"][0]["share_outside"] == 0.05
    assert found["cache"][1]["requests_per_s"] == 3.5
    assert "| 8 | 20.0 ms | 19.0 ms |" in to_markdown(profile())
    assert "1.00 ms, 5.0%" in to_markdown(profile())


def test_plots_are_small_contain_text_and_are_reproducible(tmp_path):
    names = ("iteration.svg", "concurrency.svg", "kv_cache.svg")
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        draw_plots(profile(), folder)
    for name, text in zip(names, ("forward pass", "output tokens/s", "waiting"), strict=True):
        first = (tmp_path / "first" / name).read_text()
        assert first == (tmp_path / "again" / name).read_text()
        assert f">{text}<" in first
        assert len(first) < 60_000
        assert "fill: #ffffff" not in first
