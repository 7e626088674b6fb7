"""Figures computed from the times of responses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.measuring.report import (
    Bandwidth,
    Figures,
    Percentiles,
    Resources,
    Timeline,
    medians,
    summarize,
    to_line,
)

from .factories import SETUP, SHAPE

MS = 1_000_000
RESOURCES = Resources(1.5, 1000)


def figures(*timelines: Timeline, is_one_by_one: bool = False) -> Figures:
    return summarize(timelines, SHAPE, is_one_by_one, Bandwidth(30.0, 40.0), RESOURCES)


def test_a_rate_is_from_the_first_request_sent_to_the_last_response():
    early = Timeline(10, 2, 1000 * MS, (1100 * MS, 1200 * MS))
    late = Timeline(20, 4, 1500 * MS, (1600 * MS, 3000 * MS))
    found = figures(early, late)
    assert found.output_tokens_per_s == pytest.approx(6 / 2.0)
    assert found.total_tokens_per_s == pytest.approx(36 / 2.0)


def test_latencies_are_computed_per_request():
    first = Timeline(10, 3, 0, (100 * MS, 110 * MS, 130 * MS))
    second = Timeline(10, 2, 1000 * MS, (1300 * MS, 1340 * MS))
    found = figures(first, second)
    assert found.ttft_ms.p99 == pytest.approx(300)
    assert found.itl_ms == Percentiles(pytest.approx(20), pytest.approx(40))


def test_merged_responses_raise_the_tokens_per_response():
    assert figures(Timeline(10, 6, 0, (1 * MS, 2 * MS, 3 * MS))).tokens_per_response == 2.0


def test_operations_count_every_computed_and_every_sampled_token():
    # 10 prompt tokens and 2 of 3 outputs go through the layers; 3 tokens are sampled.
    found = figures(Timeline(10, 3, 0, (500 * MS, 700 * MS, 1000 * MS)))
    assert found.gflop_per_s == pytest.approx(2e-9 * (12 * SHAPE.layer_weights + 3 * SHAPE.head_weights))


def test_prefill_and_decode_figures_exist_only_for_lone_requests():
    timeline = Timeline(10, 3, 0, (100 * MS, 120 * MS, 140 * MS))
    together, apart = figures(timeline), figures(timeline, is_one_by_one=True)
    assert together.prefill_gflop_per_s is None and together.decode_gflop_per_s is None
    prompt = 2e-9 * (10 * SHAPE.layer_weights + SHAPE.head_weights)
    token = 2e-9 * (SHAPE.layer_weights + SHAPE.head_weights)
    assert apart.prefill_gflop_per_s == pytest.approx(prompt / 0.1)
    assert apart.decode_gflop_per_s == pytest.approx(token / 0.02)


def test_percentiles_are_the_median_and_an_observed_value():
    assert Percentiles.of([5.0, 1.0, 3.0]) == Percentiles(3.0, 5.0)
    assert Percentiles.of(list(map(float, range(1, 201)))) == Percentiles(100.5, 198.0)


def test_each_figure_has_its_own_median():
    one = figures(Timeline(10, 2, 0, (100 * MS, 200 * MS)))
    rounds = [
        replace(one, output_tokens_per_s=speed, ttft_ms=Percentiles(first, 9.0))
        for speed, first in ((1.0, 30.0), (2.0, 10.0), (9.0, 20.0))
    ]
    middle = medians(rounds)
    assert (middle.output_tokens_per_s, middle.ttft_ms) == (2.0, Percentiles(20.0, 9.0))
    assert middle.decode_gflop_per_s is None
    assert middle.resources == RESOURCES


def test_combined_rounds_have_the_highest_peak_of_memory():
    one = figures(Timeline(10, 2, 0, (100 * MS, 200 * MS)))
    resources = [Resources(load, peak, 2 * peak, 5 * load) for load, peak in ((1.0, 7), (2.0, 9), (9.0, 8))]
    middle = medians([replace(one, resources=each) for each in resources]).resources
    assert middle == Resources(2.0, 9, 18, 10.0)


@pytest.mark.smoke
def test_the_line_has_figures_and_setup():
    line = json.loads(to_line("offline", figures(Timeline(10, 2, 0, (100 * MS, 200 * MS))), SETUP, round=3))
    assert (line["bench"], line["round"], line["output_tokens_per_s"]) == ("offline", 3, 10.0)
    assert line["ttft_ms"] == {"p50": 100.0, "p99": 100.0}
    assert (line["load_s"], line["peak_rss_bytes"]) == (1.5, 1000)
    assert line["setup"]["shape"]["vocabulary"] == SHAPE.vocabulary
    assert line["setup"]["versions"]["torch"]
