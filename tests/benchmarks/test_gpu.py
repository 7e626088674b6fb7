"""The GPU benchmark runs on a CPU too, and its limits match the arithmetic."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import (
    Limits,
    Line,
    Model,
    Plan,
    draw_load,
    main,
    measure_iterations,
    measure_load,
    measure_vllm,
    table,
    with_plans,
)
from benchmarks.measuring.workload import BenchRequest
from inflight.testing.make_model import make_model
from tests.engine.tensorrt import runtime_stand_in
from tests.engine.tensorrt.engines import standing_in
from tests.tiers import with_all

ARGUMENTS = [
    *("--shapes=tiny", "--device=cpu", "--rows", "1", "3", "--context=40", "--iterations=3"),
    *(
        "--prompts",
        "16",
        "64",
        "--long-context=300",
        "--requests=4",
        "--copy-mib=8",
        "--matrix=64",
        "--dtype",
    ),
]
CPU = torch.device("cpu")
PLAN = Plan(CPU, "bfloat16", (1, 3), 40, 3, (16,), 0, 4, (), 32)
VLLM = """
class SamplingParams:
    def __init__(self, **given):
        self.max_tokens = given["max_tokens"]

class LLM:
    def __init__(self, **given):
        assert given["dtype"] == "bfloat16" and given["max_num_seqs"] == 3, given

    def generate(self, prompts, params, use_tqdm):
        import time
        assert len(prompts) == len(params) and all(each["prompt_token_ids"] for each in prompts)
        time.sleep(0.01 * max(each.max_tokens for each in params))
"""


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", with_all(["float32", "bfloat16", "int8", "fp8"], ["float32"]))
def test_the_program_prints_a_table_on_a_cpu(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = main([*ARGUMENTS, dtype, "--streams"])
    assert [line.what for line in lines] == [
        "iteration, 1 rows of 40",
        "iteration, 3 rows of 40",
        "first token of 16",
        "first token of 64",
        "first token of 300",
        "iteration, 1 row of 300",
        "load L, 4 requests",
    ]
    assert all(line.value > 0 and line.limit and line.bound in ("bandwidth", "FLOP") for line in lines)
    printed = capsys.readouterr().out
    told = json.loads(printed.splitlines()[-1])
    assert told["left_out"] == [] and len(told["lines"]) == len(lines)
    assert table(lines) in printed


def test_plans_are_measured_up_to_their_slot_size(tmp_path: Path) -> None:
    plan = Plan(CPU, "float32", (1, 3), 40, 3, (16, 2000), 3000, 2, (), 32)
    model = Model(make_model(tmp_path / "tiny", dtype="float32"), plan, Limits(1e9, 1e9))
    plans = with_plans(model, tmp_path / "plans", Limits(1e9, 1e9), runtime_stand_in.dump)
    with standing_in():
        lines = [*measure_iterations(plans), *measure_load(plans)]
    assert [line.what for line in lines] == [
        "iteration, 1 rows of 40",
        "iteration, 3 rows of 40",
        "first token of 16",
        "load L, 2 requests",
    ]
    assert all(line.model == "tiny, tensorrt" and line.value > 0 for line in lines)


def test_plans_without_a_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*ARGUMENTS, "float32", "--engine", "tensorrt"])
    assert (
        "--engine tensorrt needs an NVIDIA GPU and TensorRT, and the device is cpu" in capsys.readouterr().err
    )


def test_a_missing_gpu_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^gpu: torch finds no GPU here; [^\n]*$"):
        main(["--shapes", "tiny"])


def test_workloads_without_time_left_are_reported_as_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.time.monotonic", iter(range(0, 10**6, 1000)).__next__)
    assert main([*ARGUMENTS, "float32", "--seconds", "1", "--streams", "1"]) == []
    assert "left out: tiny through tritonserver: 1 s are over" in capsys.readouterr().out


def test_a_limit_follows_from_bytes_read_and_operations(tmp_path: Path) -> None:
    """tiny: 2 layers of 64 x (2 * 64 + 2 * 32 + 3 * 128) weights, 512 x 64 for logits; 256 bytes per token."""
    weights = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128) + 512 * 64
    folder = make_model(tmp_path / "tiny")
    slow_memory = Model(folder, PLAN, Limits(1.0, 1e30))
    assert slow_memory.limit(3, 100) == (2 * weights + 100 * 256, "bandwidth")
    slow_products = Model(folder, PLAN, Limits(1e30, 1.0))
    assert slow_products.limit(3, 100) == (2 * weights * 3 + 4 * 2 * 64 * 100, "FLOP")
    assert slow_products.prompt_limit(10) == (2 * weights * 10 + 4 * 2 * 64 * 50, "FLOP")
    requests = [BenchRequest((1,) * 10, 20), BenchRequest((1,) * 10, 20)]
    tokens_per_s, _ = slow_memory.load_limit(requests, 2)
    assert tokens_per_s == pytest.approx(40 / (20 * 2 * weights + 2 * 20 * 20 * 256))


def test_a_share_is_the_fraction_of_the_limit() -> None:
    assert Line("m", "w", "ms", 4.0, 1.0, "FLOP").share == 0.25
    assert Line("m", "w", "tokens/s", 1.0, 4.0, "FLOP").share == 0.25
    assert Line("m", "w", "ms", 4.0).share is None


def test_vllm_runs_in_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's program runs on a stand-in for the package vllm."""
    (tmp_path / "vllm.py").write_text(VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    model = Model(make_model(tmp_path / "tiny"), PLAN, Limits(1.0, 1.0))
    found = measure_vllm(python, model)
    assert found.keys() == {"iteration, 1 rows of 40", "iteration, 3 rows of 40", "load L, 4 requests"}
    assert found["iteration, 3 rows of 40"] == pytest.approx(10, rel=0.5), "ms of a token"
    (tmp_path / "vllm.py").write_text("raise ImportError('there is none')")
    with pytest.raises(RuntimeError, match=r"vLLM ended with 1: [\s\S]*there is none"):
        measure_vllm(python, model)


def test_requests_of_load_l_never_change() -> None:
    requests = draw_load(500, 40)
    assert requests[:10] == draw_load(500, 10)
    assert all(32 <= len(each.prompt) <= 512 and 64 <= each.num_output_tokens <= 256 for each in requests)
