"""The benchmark of draft heads, with heads that guess right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import draft_head
from inflight.testing.make_model import make_model as make_checkpoint
from tests.models.draft_heads import make_drafting_model
from tests.models.eagle_heads import make_right_head, weaken
from tests.models.zoo import make_model


@pytest.mark.smoke
def test_a_run_prints_figures_of_right_and_of_wrong_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_checkpoint(tmp_path / "with-tokenizer", shape="tiny") / "tokenizer.json"
    size = len(json.loads(tokenizer.read_text())["model"]["vocab"])
    model = make_model(tmp_path / "model", "llama-gqa", changes={"vocab_size": size + 300})
    weaken(model)
    shutil.copy(tokenizer, model.folder)
    head = make_right_head(tmp_path / "head", model)
    options = f"--draft-model {head.folder} --model {model.folder} --streams 1 2 --tokens 40 --rounds 1"
    monkeypatch.setattr("sys.argv", ["draft_head", *options.split(), "--threads", "1", "--ignore-cost"])
    draft_head.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["streams"], row["method"]) for row in found["rows"]] == [
        (streams, method) for streams in (1, 2) for method in ("plain", "head", "wrong head")
    ]
    for row in found["rows"]:
        if row["method"] == "head":
            assert 5 < row["accepted"] <= row["drafted"]
        elif row["method"] == "wrong head":
            assert row["accepted"] < row["drafted"] / 5
        else:
            assert row["drafted"] == 0


def test_a_checkpoints_own_head_drafts_without_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_checkpoint(tmp_path / "with-tokenizer", shape="tiny") / "tokenizer.json"
    size = {"vocab_size": len(json.loads(tokenizer.read_text())["model"]["vocab"]) + 300}
    folder = make_drafting_model(tmp_path / "model", "qwen3.5", agrees=True, changes=size).folder
    shutil.copy(tokenizer, folder)
    options = f"--model {folder} --streams 1 2 --tokens 20 --rounds 1 --threads 1 --ignore-cost"
    monkeypatch.setattr("sys.argv", ["draft_head", *options.split()])
    draft_head.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["streams"], row["method"]) for row in found["rows"]] == [
        (streams, method) for streams in (1, 2) for method in ("plain", "head")
    ]
    assert all((row["drafted"] > 0) == (row["method"] == "head") for row in found["rows"])
