"""What `scripts/bench compare` makes of its options and of what programs print, and what peers' programs share."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from inflight.bench import compare as program
from inflight.bench.compare import Run, compare, medians, peers_of, values_of
from inflight.bench.peers.peer_program import Request, Setting, figures, measure, warm_up
from inflight.bench.sides import (
    PEER_NAMES,
    Peer,
    Printed,
    last_json_line,
    missing_libraries,
    peer_environment,
)


def _run(side: str, tokens_per_s: float, workload="w", **more: float) -> Run:
    return Run(side, workload, {"output_tokens_per_s": tokens_per_s, **more})


class TestOptions:
    def test_python_and_model_belong_to_the_peer_before_them(self):
        options = [("--peer", "openvino"), ("--peer-model", "m"), ("--peer-python", "a"), ("--peer", "vllm")]
        assert peers_of([*options, ("--peer-python", "b")]) == [
            Peer("openvino", Path("a"), Path("m")),
            Peer("vllm", Path("b"), None),
        ]

    def test_a_peer_that_is_given_twice_is_refused(self):
        peer = [("--peer", "openvino"), ("--peer-python", "p")]
        with pytest.raises(ValueError, match="--peer openvino: given twice"):
            peers_of([*peer, *peer])

    def test_a_python_before_any_peer_is_refused(self):
        with pytest.raises(ValueError, match="--peer-python x: expected after"):
            peers_of([("--peer-python", "x"), ("--peer", "vllm")])

    def test_a_peer_without_a_python_is_refused(self):
        with pytest.raises(ValueError, match="--peer vllm: expected a --peer-python"):
            peers_of([("--peer", "vllm"), ("--peer", "openvino"), ("--peer-python", "x")])

    def test_every_peer_has_a_program(self):
        folder = Path(program.__file__).parent / "peers"
        assert {path.name for path in folder.glob("run_*.py")} == {f"run_{name}.py" for name in PEER_NAMES}


class TestWhatIsPrinted:
    def test_figures_are_the_last_object_whatever_else_was_said(self):
        assert last_json_line('{"a": 1}\nloading {"c": 3}\n{"b": 2}\n[1]\nbye\n') == {"b": 2}

    @pytest.mark.parametrize("text", ["", "bye", "3", "[1]", '{"b": '])
    def test_anything_else_is_no_figures(self, text):
        assert last_json_line(text) is None

    def test_latencies_are_their_medians_and_what_is_null_is_left_out(self):
        told = {"output_tokens_per_s": 5, "ttft_ms": {"p50": 2.5, "p99": 9}, "itl_ms": None, "bench": "x"}
        assert values_of(told) == {"output_tokens_per_s": 5.0, "ttft_ms": 2.5}


class TestRatios:
    def test_a_ratio_is_our_median_by_the_peers(self):
        runs = [_run("ours", value) for value in (10, 40, 30)] + [
            _run("vllm", value) for value in (10, 20, 15)
        ]
        comparison = compare(runs, "w", "vllm")
        assert comparison.medians == {"output_tokens_per_s": 15}
        assert comparison.ratios == {"output_tokens_per_s": 2}
        assert comparison.ranges == {"output_tokens_per_s": (1, 2)}

    def test_failed_runs_count_neither_in_medians_nor_in_ranges(self):
        runs = [_run("ours", 10), _run("ours", 90), Run("vllm", "w", {}), _run("vllm", 30)]
        comparison = compare(runs, "w", "vllm")
        assert comparison.ratios["output_tokens_per_s"] == pytest.approx(50 / 30)
        assert comparison.ranges["output_tokens_per_s"] == (3, 3)

    def test_there_is_no_ratio_where_one_side_has_no_figure(self):
        runs = [_run("ours", 10, load_s=1), _run("vllm", 10, ttft_ms=5)]
        assert compare(runs, "w", "vllm").ratios == {"output_tokens_per_s": 1}

    def test_workloads_are_apart(self):
        runs = [_run("ours", 10), _run("ours", 70, workload="lone")]
        assert medians(runs, "lone", "ours") == {"output_tokens_per_s": 70}


class TestEnvironment:
    def test_vllm_gets_the_openmp_of_its_own_environment(self, tmp_path):
        python, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
        assert str(openmp) in missing_libraries(Peer("vllm", python))
        openmp.parent.mkdir()
        openmp.touch()
        assert str(openmp) not in missing_libraries(Peer("vllm", python))
        assert str(openmp) in peer_environment(Peer("vllm", python), 1)["LD_PRELOAD"].split(":")

    def test_vllm_is_bound_to_as_many_cpus_as_there_are_threads(self, tmp_path):
        variables = peer_environment(Peer("vllm", tmp_path / "bin" / "python"), 1)
        assert variables["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))

    def test_our_own_packages_are_not_on_a_peers_path(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "ours")
        assert "PYTHONPATH" not in peer_environment(Peer("openvino", Path("python")), 2)


class TestRounds:
    """`main`, with scripts for the interpreters of peers."""

    @pytest.fixture
    def interpreter(self, tmp_path):
        def make(name: str, source: str) -> str:
            path = tmp_path / name
            program = tmp_path / f"{name}.py"
            program.write_text(f"import json, sys\n{source}\n")
            # Not in the first line: a path there may have no space.
            path.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{program}' \"$@\"\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
            return str(path)

        return make

    def _compare(self, monkeypatch, capsys, tmp_path, *arguments: str) -> list[dict]:
        (tmp_path / "config.json").write_text('{"vocab_size": 100}')
        ours = Printed({"output_tokens_per_s": 30.0, "ttft_ms": {"p50": 1, "p99": 1}})
        monkeypatch.setattr(program, "run_ours", lambda work: ours)
        monkeypatch.setattr(program, "read_gb_per_s", lambda threads: 1.0)
        monkeypatch.setattr(sys, "argv", ["compare", "--model", str(tmp_path), *arguments])
        program.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    def test_sides_take_turns_and_a_peer_that_fails_does_not_stop_the_others(
        self, monkeypatch, capsys, tmp_path, interpreter
    ):
        bad = interpreter("bad", "sys.exit('no such kernel')")
        good = interpreter("good", """print("hello"); print(json.dumps({"output_tokens_per_s": 20}))""")
        peers = ["--peer", "vllm", "--peer-python", bad, "--peer", "transformers", "--peer-python", good]
        *runs, last = self._compare(monkeypatch, capsys, tmp_path, *peers, "--rounds", "2", "--workload", "w")
        assert [(run["round"], run["side"]) for run in runs] == [
            (number, side) for number in (1, 2) for side in ("ours", "vllm", "transformers")
        ]
        assert "no such kernel" in runs[1]["failed"] and "failed" not in runs[2]
        assert last["results"]["w"]["transformers"]["ratios"] == {"output_tokens_per_s": 1.5}
        assert last["results"]["w"]["vllm"]["ratios"] == {}

    def test_a_peer_is_given_the_requests_and_its_own_model(self, monkeypatch, capsys, tmp_path, interpreter):
        echo = interpreter(
            "echo",
            "given = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
            "requests = json.load(open(given['--requests']))\n"
            "print(json.dumps({'given': given, 'lengths': [len(r['prompt']) for r in requests]}))",
        )
        weights = tmp_path / "weights.gguf"
        weights.touch()
        peer = ["--peer", "llama_cpp", "--peer-python", echo, "--peer-model", str(weights)]
        options = ["--rounds", "1", "--workload", "lone", "--dtype", "int8", "--threads", "3"]
        _, run, _ = self._compare(monkeypatch, capsys, tmp_path, *peer, *options)
        assert run["lengths"] == [128] * 4
        assert (
            run["given"].items()
            >= {
                "--model": str(weights),
                "--mode": "lone",
                "--dtype": "int8",
                "--threads": "3",
            }.items()
        )


class _Recorder:
    """A peer that generates what was asked for, less `missing` tokens of each request."""

    def __init__(self, missing: int = 0) -> None:
        self.calls: list[int] = []
        self._missing = missing

    def run(self, requests):
        self.calls.append(len(requests))
        return [[time.perf_counter()] * (request.max_tokens - self._missing) for request in requests]


def _setting(mode: str, count: int = 3) -> Setting:
    return Setting("model", (Request([5] * 7, 20),) * count, mode, "bfloat16", 1)


class TestPeerPrograms:
    def test_requests_of_w_are_submitted_together_and_lone_ones_one_by_one(self):
        together, apart = _Recorder(), _Recorder()
        measure(together, _setting("w"))
        measure(apart, _setting("lone"))
        assert (together.calls, apart.calls) == ([3], [1, 1, 1])

    def test_a_request_that_ends_early_is_an_error(self):
        with pytest.raises(RuntimeError, match="request 0 ended with 19 tokens, expected 20"):
            measure(_Recorder(missing=1), _setting("w"))

    def test_figures_are_of_all_requests_together(self):
        told = figures([[0.1, 0.2, 0.4], [0.3, 0.4]], seconds=0.5)
        assert told["output_tokens_per_s"] == 10
        assert told["ttft_ms"] == {"p50": 100, "p99": 300}
        assert told["itl_ms"] == {"p50": 100, "p99": 200}

    def test_one_token_has_no_latency_between_tokens(self):
        assert figures([[0.1]], seconds=0.1)["itl_ms"] is None

    def test_everything_warms_up_or_one_request_of_those_that_come_one_by_one(self):
        together, one_by_one = _setting("w", count=20), _setting("lone")
        assert warm_up(together) == list(together.requests)
        assert warm_up(one_by_one) == list(one_by_one.requests[:1])
