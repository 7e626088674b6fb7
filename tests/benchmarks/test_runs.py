"""A run of each benchmark that has no file of tests of its own, at the smallest size."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from inflight.testing.make_model import make_model

ROOT = Path(__file__).parents[2]
RUNS = {
    "cancel": "--streams 1 --rounds 1 --step-us 1000",
    "chunked": "--streams 1 --prompt 64 --chunk 64 --rounds 1 --threads 1",
    "core": "--requests 4 --prompt 800 --iterations 2",
    "decode_share": "--model MODEL --rows 2 --prompt 8 --iterations 2",
    "guided": "--rows 2 --vocab 512 --steps 3 --rounds 1 --shape none --model MODEL --tokens 4 --slow 1",
    "iteration": "--streams 1 --rounds 1 --step-us 1000",
    "loop": "--streams 1 --tokens 3 --send-us 1",
    "prefix_order": "--requests 8 --system-prompts 2 --system-tokens 64 --spacing 0 50 --overtaken 2",
    "prompt_lookup": "--tokens 4 --draft 2 --rounds 1 --threads 1",
    "ranks": "--model MODEL --streams 1 --prompt 32 --tokens 2 --rounds 1 --threads 2 --setups tp=2,pp=1",
    "reuse": "--prefix 64 --suffix 2 --rounds 1 --threads 1",
    "saved_blocks": "--shape tiny --rounds 1 --prompt 100 --conversations 3 --cached 2 --turns 2 --answer 2 "
    "--disk-mb-s 5",
    "sampling": "--rows 2 --vocab 64 --history 4 --repeats 1 --feature greedy",
    "serve": "--model MODEL --requests 2 --rounds 1 --threads 1",
    "snapshots": "--conversations 3 --turns 2 --concurrency 2 --snapshots 0 4",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), shape="tiny")


@pytest.mark.smoke
@pytest.mark.parametrize("name", RUNS)
def test_a_run_prints_its_figures(name, model, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)  # other tests may have left it; some benchmarks start modules of `benchmarks`
    monkeypatch.setattr("sys.argv", [name, *RUNS[name].replace("MODEL", str(model)).split()])
    importlib.import_module(f"benchmarks.{name}").main()
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["bench"] == name
