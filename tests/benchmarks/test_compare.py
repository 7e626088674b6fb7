"""Options of `scripts/bench compare`, its reading of the programs' output, and the code its peers share."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import compare as program
from benchmarks.compare import Progress, peers_of, weigh
from benchmarks.comparing import sides
from benchmarks.comparing.peers.peer_program import Request, Setting, Workload, figures, measure, warm_up
from benchmarks.comparing.sides import (
    OURS,
    PEER_NAMES,
    Printed,
    Side,
    Work,
    command,
    environment,
    last_json_line,
    missing_libraries,
    ours,
    run,
)
from inflight.processes import ProcessId
from inflight.testing.make_model import make_model

from .factories import SHAPE

_DEADLINE_S = 120.0


class TestOptions:
    def test_python_and_model_belong_to_the_peer_before_them(self):
        options = [("--peer", "openvino"), ("--peer-model", "m"), ("--peer-python", "a"), ("--peer", "vllm")]
        assert peers_of([*options, ("--peer-python", "b")]) == [
            Side("openvino", Path("a"), Path("m")),
            Side("vllm", Path("b"), None),
        ]

    def test_a_repeated_peer_is_refused(self):
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
        folder = Path(sides.__file__).parent / "peers"
        names = {path.name for path in folder.glob("run_*.py")}
        assert names == {f"run_{name}.py" for name in (OURS, *PEER_NAMES)}


class TestPrintedFigures:
    def test_figures_are_the_last_object_of_the_output(self):
        assert last_json_line('{"a": 1}\nloading {"c": 3}\n{"b": 2}\n[1]\nbye\n') == {"b": 2}

    @pytest.mark.parametrize("text", ["", "bye", "3", "[1]", '{"b": '])
    def test_output_without_a_json_object_on_its_last_line_has_no_figures(self, text):
        assert last_json_line(text) is None


class TestProgress:
    def test_the_time_left_is_that_of_the_remaining_runs(self):
        progress = Progress(["ours", "vllm"], 2)
        progress.has_run("ours", 10.0)
        assert progress.left_s() == 30.0  # vllm's duration is unknown yet
        progress.has_run("vllm", 100.0)
        assert progress.left_s() == 110.0

    def test_an_excluded_side_takes_no_time(self, capsys):
        progress = Progress(["ours", "vllm"], 3)
        progress.has_run("ours", 60.0)
        progress.has_run("vllm", 1000.0)
        progress.gives_up("vllm")
        progress.starts(2, "ours")
        assert capsys.readouterr().err == "round 2: ours (run 3 of 4, about 2 min left)\n"


class TestMemory:
    def test_memory_beyond_weights_and_cache_is_reported(self):
        figures = {"peak_rss_bytes": 5_000_000, "kv_cache": {"tokens": 1000, "value_bytes": 2}}
        cache = 2 * 2 * 1 * 4 * 1000 * 2  # keys and values, layers, heads, head_dim, tokens, bytes
        assert weigh(figures, SHAPE, "bfloat16") == {
            "weight_bytes": 2_100_000,
            "kv_cache_bytes": cache,
            "beyond_bytes": 5_000_000 - 2_100_000 - cache,
        }
        assert weigh(figures, SHAPE, "int8")["weight_bytes"] == 1_050_000

    def test_a_program_without_cache_figures_gets_no_weights_and_cache(self):
        assert weigh({"peak_rss_bytes": 5}, SHAPE, "bfloat16") == {}


class TestEnvironment:
    def test_vllm_gets_the_openmp_of_its_own_environment(self, tmp_path):
        python, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
        assert str(openmp) in missing_libraries(Side("vllm", python))
        openmp.parent.mkdir()
        openmp.touch()
        assert str(openmp) not in missing_libraries(Side("vllm", python))
        assert str(openmp) in environment(Side("vllm", python), 1)["LD_PRELOAD"].split(":")

    def test_vllm_is_bound_to_as_many_cpus_as_there_are_threads(self, tmp_path):
        variables = environment(Side("vllm", tmp_path / "bin" / "python"), 1)
        assert variables["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))

    def test_our_packages_are_not_on_a_peers_path(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "ours")
        assert "PYTHONPATH" not in environment(Side("openvino", Path("python")), 2)

    def test_our_side_inherits_the_environment(self, monkeypatch):
        monkeypatch.setenv("GOMP_SPINCOUNT", "5")
        assert environment(ours(), 2)["GOMP_SPINCOUNT"] == "5"


@pytest.fixture
def interpreter(tmp_path):
    """Make scripts in place of interpreters: `sys.argv[1]` is the side's program, followed by its options."""

    def make(name: str, source: str) -> str:
        path = tmp_path / name
        program = tmp_path / f"{name}.py"
        program.write_text(f"import json, os, signal, subprocess, sys, time\n{source}\n")
        # A path in the first line must not have spaces.
        path.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{program}' \"$@\"\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def _work(tmp_path: Path, timeout_s: float = _DEADLINE_S) -> Work:
    return Work(tmp_path, tmp_path / "requests.json", "bfloat16", 1, 128, timeout_s)


_HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
sys.stderr.write("loading\\n"); sys.stderr.flush()
open({path!r} + ".part", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename({path!r} + ".part", {path!r})
time.sleep(1000)
"""


class TestProcesses:
    def test_a_sides_command_line_has_all_options(self, tmp_path):
        work = Work(Path("model"), Path("r.json"), "int8", 3, 256, 60)
        python, script, *options = command(Side("openvino", Path("py"), Path("export")), work)
        assert (python, Path(script).name) == ("py", "run_openvino.py")
        assert dict(zip(options[::2], options[1::2])) == {
            "--model": "export",
            "--requests": "r.json",
            "--dtype": "int8",
            "--threads": "3",
            "--kv-cache-tokens": "256",
        }

    def test_our_side_runs_in_this_environment_and_loads_the_checkpoint(self):
        python, script, _, model, *_ = command(ours(), _work(Path("model")))
        assert (python, Path(script).name, model) == (sys.executable, "run_ours.py", "model")

    def test_a_side_that_hangs_is_ended_with_its_children(self, tmp_path, interpreter):
        pids = tmp_path / "pids"
        hangs = interpreter("hangs", _HANGS.format(path=str(pids)))
        printed = run(Side("vllm", Path(hangs)), _work(tmp_path, timeout_s=5))
        assert printed.has_hung and printed.figures is None
        assert "ended after 5 s" in printed.failure and "loading" in printed.failure
        _assert_ended(pids)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_running_side_ends_with_compare(self, tmp_path, interpreter, number):
        pids = tmp_path / "pids"
        hangs = interpreter("hangs", _HANGS.format(path=str(pids)))
        model = str(make_model(tmp_path / "model", shape="tiny"))
        source = (
            "import sys; from benchmarks import compare\n"
            f"compare.ours = lambda: compare.Side('ours', {hangs!r})\n"
            f"sys.argv[1:] = ['--model', {model!r}, '--peer', 'vllm', '--peer-python', {hangs!r}]\n"
            "compare.read_gb_per_s = lambda threads: 1.0\n"
            "compare.main()"
        )
        process = subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.DEVNULL)
        try:
            _wait_for(pids)
            process.send_signal(number)
            assert process.wait(_DEADLINE_S) != 0
        finally:
            process.kill()
            process.wait()
        _assert_ended(pids)

    def test_a_missing_program_is_a_failure(self, tmp_path):
        assert "No such file" in run(Side("vllm", tmp_path / "python"), _work(tmp_path)).failure


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def _assert_ended(pids: Path) -> None:
    for pid in map(int, pids.read_text().split()):
        process = ProcessId.of(pid)
        assert process is None or process.wait(_DEADLINE_S)


class TestRounds:
    """`main`, with scripts in place of the peers' interpreters."""

    OURS = Printed({"w": {"output_tokens_per_s": 30.0}, "memory_gb_per_s": 99, "versions": {"inflight": "1"}})

    def _compare(self, monkeypatch, capsys, tmp_path, *arguments: str) -> list[dict]:
        def run_or_pretend(side: Side, work: Work) -> Printed:
            return self.OURS if side.name == OURS else run(side, work)

        model = make_model(tmp_path / "model", shape="tiny")
        monkeypatch.setattr(program, "run", run_or_pretend)
        monkeypatch.setattr(program, "read_gb_per_s", lambda threads: 1.0)
        monkeypatch.setattr(program.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["compare", "--model", str(model), *arguments])
        self.status = program.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    @pytest.mark.smoke
    def test_sides_take_turns_and_a_failing_peer_does_not_stop_the_others(
        self, monkeypatch, capsys, tmp_path, interpreter
    ):
        bad = interpreter("bad", "sys.exit('no such kernel')")
        good = interpreter(
            "good", """print("hello"); print(json.dumps({"w": {"output_tokens_per_s": 20}}))"""
        )
        peers = ["--peer", "vllm", "--peer-python", bad, "--peer", "transformers", "--peer-python", good]
        *runs, last = self._compare(monkeypatch, capsys, tmp_path, *peers, "--rounds", "2", "--workload", "w")
        assert [(run["round"], run["side"]) for run in runs] == [
            (number, side) for number in (1, 2) for side in ("ours", "vllm", "transformers")
        ]
        assert "no such kernel" in runs[1]["failed"] and "failed" not in runs[2]
        assert last["results"]["w"]["transformers"]["ratios"] == {"output_tokens_per_s": 1.5}
        assert last["results"]["w"]["vllm"]["ratios"] == {}
        assert (self.status, last["failed_runs"]) == (1, {"vllm": 2})
        assert last["setup"]["versions"]["ours"] == {"inflight": "1"}

    def test_memory_bandwidth_is_measured_for_all_sides(self, monkeypatch, capsys, tmp_path, interpreter):
        peer = interpreter("peer", """print('{"memory_gb_per_s": 77}')""")
        options = ["--peer", "vllm", "--peer-python", peer, "--rounds", "1", "--workload", "w"]
        *runs, _ = self._compare(monkeypatch, capsys, tmp_path, *options)
        assert [run["memory_gb_per_s"] for run in runs] == [{"before": 1.0, "after": 1.0}] * 2

    def test_a_hanging_peer_is_not_run_again_and_others_continue(
        self, monkeypatch, capsys, tmp_path, interpreter
    ):
        hangs = interpreter("hangs", "time.sleep(1000)")
        options = ["--peer", "vllm", "--peer-python", hangs, "--timeout", "1", "--rounds", "3"]
        *runs, last = self._compare(monkeypatch, capsys, tmp_path, *options)
        assert [run["side"] for run in runs] == ["ours", "vllm", "ours", "ours"]
        assert "ended after 1 s" in runs[1]["failed"]
        assert last["results"]["w"]["ours"]["medians"] == {"output_tokens_per_s": 30}

    def test_a_peer_gets_all_requests_together_and_a_kv_cache_large_enough_for_them(
        self, monkeypatch, capsys, tmp_path, interpreter
    ):
        echo = interpreter(
            "echo",
            "given = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
            "requests = json.load(open(given['--requests']))\n"
            "lengths = {name: [len(r['prompt']) + r['max_tokens'] for r in rs] for name, rs in requests.items()}\n"
            "print(json.dumps({'given': given, 'lengths': lengths}))",
        )
        options = [
            "--peer",
            "vllm",
            "--peer-python",
            echo,
            "--rounds",
            "1",
            "--requests",
            "3",
            "--threads",
            "3",
        ]
        _, run, last = self._compare(monkeypatch, capsys, tmp_path, *options)
        assert run["lengths"]["lone"] == [192] * 4 and len(run["lengths"]["w"]) == 3
        room = sum(-(-length // 128) * 128 for length in run["lengths"]["w"])
        assert run["given"]["--kv-cache-tokens"] == str(room) == str(last["setup"]["kv_cache_tokens"])

    @pytest.mark.parametrize(
        ("peer", "match"),
        [
            (["--peer", "openvino", "--peer-python", "sh"], "expected a --peer-model"),
            (["--peer", "vllm", "--peer-python", "no-such-python"], "expected an interpreter"),
            (["--peer", "llama_cpp", "--peer-python", "sh", "--peer-model", "nothing"], "cannot be read"),
            ([], "expected a --peer"),
        ],
    )
    def test_impossible_comparisons_are_refused_before_anything_runs(
        self, monkeypatch, capsys, tmp_path, peer, match
    ):
        with pytest.raises(SystemExit):
            self._compare(monkeypatch, capsys, tmp_path, *peer)
        assert match in capsys.readouterr().err


def test_our_own_program_runs_both_workloads_in_one_process(tmp_path):
    model = make_model(tmp_path, shape="tiny")
    path = tmp_path / "requests.json"
    requests = [{"prompt": [11, 12, 13], "max_tokens": count} for count in (3, 5)]
    path.write_text(json.dumps({"w": requests, "lone": requests[:1]}))
    printed = run(ours(), Work(model, path, "bfloat16", 1, 256, _DEADLINE_S))
    assert printed.failure == ""
    told = printed.figures
    assert told["w"]["output_tokens_per_s"] > 0 and told["lone"]["itl_ms"]["p50"] > 0
    assert told["start_s"] > told["load_s"] > 0
    assert told["kv_cache"] == {"tokens": 256, "value_bytes": 2}
    assert told["kernels"]["asked"] == "default" and told["kernels"]["ran"] in ("native", "torch")


class _Recorder:
    """A peer that generates the requested tokens, less `missing` tokens per request."""

    def __init__(self, missing: int = 0) -> None:
        self.calls: list[int] = []
        self._missing = missing

    def run(self, requests):
        self.calls.append(len(requests))
        return [[time.perf_counter()] * (request.max_tokens - self._missing) for request in requests]


def _workload(name: str, count: int = 3) -> Workload:
    return Workload(name, (Request([5] * 7, 20),) * count)


class TestPeerPrograms:
    def test_requests_of_w_run_together_and_lone_ones_one_after_another(self):
        together, apart = _Recorder(), _Recorder()
        measure(together, _workload("w"))
        measure(apart, _workload("lone"))
        assert (together.calls, apart.calls) == ([3], [1, 1, 1])

    def test_a_request_that_ends_early_is_an_error(self):
        with pytest.raises(RuntimeError, match="request 0 ended with 19 tokens, expected 20"):
            measure(_Recorder(missing=1), _workload("w"))

    def test_figures_are_over_all_requests(self):
        told = figures([[0.1, 0.2, 0.4], [0.3, 0.4]], seconds=0.5)
        assert told["output_tokens_per_s"] == 10
        assert told["ttft_ms"] == {"p50": 100, "p99": 300}
        assert told["itl_ms"] == {"p50": 100, "p99": 200}

    def test_one_token_has_no_latency_between_tokens(self):
        assert figures([[0.1]], seconds=0.1)["itl_ms"] is None

    def test_warm_up_is_all_requests_or_one_of_lone_requests(self):
        together, one_by_one = _workload("w", count=20), _workload("lone")
        assert warm_up(together) == list(together.requests)
        assert warm_up(one_by_one) == list(one_by_one.requests[:1])

    def test_a_system_has_memory_for_the_larger_workload(self):
        setting = Setting("model", (_workload("w", 5), _workload("lone", 9)), "bfloat16", 1, 300)
        assert (setting.max_together, setting.longest) == (5, 27)
        assert (setting.kv_cache_blocks(128), setting.kv_cache_blocks(100)) == (3, 3)
