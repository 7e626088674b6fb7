"""Summaries of the runs of all sides."""

from __future__ import annotations

import json

import pytest

from benchmarks.comparing.results import (
    Best,
    Run,
    Spread,
    best_peers,
    print_tables,
    ratios,
    spreads,
    to_values,
    values_of,
)

FAILED = {}


def w(side: str, tokens_per_s: float, **more: float) -> Run:
    return Run(side, {"w": {"output_tokens_per_s": tokens_per_s, **more}})


class TestReadFigures:
    def test_latencies_are_medians_and_null_values_are_left_out(self):
        told = {"w": {"output_tokens_per_s": 5, "ttft_ms": {"p50": 2.5, "p99": 9}, "itl_ms": None}}
        assert values_of(told, 30.0)["w"] == {"output_tokens_per_s": 5.0, "ttft_ms": 2.5}

    def test_lone_figures_have_the_measured_memory_bandwidth(self):
        told = {"lone": {"itl_ms": {"p50": 7}}, "memory_gb_per_s": 99}
        assert values_of(told, 30.0)["lone"] == {"itl_ms": 7.0, "memory_gb_per_s": 30.0}

    def test_figures_of_the_process_are_separate_from_the_workloads(self):
        told = {"w": {"output_tokens_per_s": 5}, "start_s": 2, "peak_rss_bytes": 100, "beyond_bytes": -5}
        values = values_of(told, 30.0)
        assert values["process"] == {"start_s": 2.0, "peak_rss_bytes": 100.0, "beyond_bytes": -5.0}
        assert "lone" not in values


class TestRounds:
    def test_a_spread_has_the_median_and_the_extremes(self):
        assert spreads([w("ours", value) for value in (10, 40, 30)], "w", "ours") == {
            "output_tokens_per_s": Spread(30, 10, 40)
        }

    def test_the_spread_of_peak_memory_keeps_the_highest(self):
        runs = [Run("ours", {"process": {"peak_rss_bytes": value, "start_s": value}}) for value in (1, 2, 9)]
        found = spreads(runs, "process", "ours")
        assert (found["peak_rss_bytes"].typical, found["start_s"].typical) == (9, 2)

    def test_a_ratio_is_of_medians_with_the_extremes_of_single_rounds(self):
        runs = [w("ours", v) for v in (10, 40, 30)] + [w("vllm", v) for v in (10, 20, 15)]
        assert ratios(runs, "w", "vllm") == {"output_tokens_per_s": Spread(2, 1, 2)}

    def test_failed_runs_are_not_counted(self):
        runs = [w("ours", 10), w("ours", 90), Run("vllm", FAILED), w("vllm", 30)]
        assert ratios(runs, "w", "vllm")["output_tokens_per_s"] == Spread(pytest.approx(50 / 30), 3, 3)

    def test_there_is_no_ratio_if_one_side_lacks_the_figure(self):
        runs = [w("ours", 10, itl_ms=1), w("vllm", 10, ttft_ms=5)]
        assert ratios(runs, "w", "vllm").keys() == {"output_tokens_per_s"}

    def test_metrics_without_a_better_direction_have_no_ratio(self):
        runs = [Run(side, {"lone": {"memory_gb_per_s": 30.0, "itl_ms": 5.0}}) for side in ("ours", "vllm")]
        assert ratios(runs, "lone", "vllm").keys() == {"itl_ms"}


class TestTheBestPeer:
    RUNS = (w("ours", 30, itl_ms=4), w("vllm", 20, itl_ms=5), w("openvino", 25, itl_ms=8))

    def test_the_best_peer_is_chosen_per_metric(self):
        best = best_peers(self.RUNS, "w")
        assert best["output_tokens_per_s"] == Best("openvino", pytest.approx(30 / 25))
        assert best["itl_ms"] == Best("vllm", pytest.approx(4 / 5))

    def test_the_table_has_every_sides_spread_and_the_best_peer(self, capsys):
        print_tables([*self.RUNS, w("ours", 32, itl_ms=4), Run("vllm", FAILED)])
        shown = capsys.readouterr().out
        assert "31.0 (30.0–32.0)" in shown and "1 of 2" in shown and "1.24 openvino" in shown

    @pytest.mark.smoke
    def test_the_json_has_the_best_peer_beside_the_sides(self):
        values = json.loads(json.dumps(to_values(self.RUNS)))["w"]
        assert values["best_peer"]["itl_ms"] == {"side": "vllm", "ratio": 0.8}
        assert values["vllm"]["ratios"] == {"output_tokens_per_s": 1.5, "itl_ms": 0.8}
        assert "ratios" not in values["ours"]

    def test_there_is_no_best_peer_if_all_have_failed(self):
        assert best_peers([w("ours", 30), Run("vllm", FAILED)], "w") == {}
