"""The task of a checkpoint, by sentence-transformers' files and the flag --convert."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.pooling import Pooling, Task, find_task, read_pooling

LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


def write(folder: Path, pooling: dict[str, object], *kinds: str) -> Path:
    """Write a modules.json with these classes, and the pooling's config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {
            "idx": index,
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize("pooling", [LAST, {"pooling_mode": "lasttoken", "embedding_dimension": 64}])
def test_the_pooling_of_the_last_token(tmp_path: Path, pooling: dict[str, object]) -> None:
    assert read_pooling(write(tmp_path, pooling, "Transformer", "Pooling")) == Pooling(normalizes=False)
    folder = write(tmp_path, pooling, "Transformer", "Pooling", "Normalize")
    assert read_pooling(folder) == Pooling(normalizes=True)
    tasks = {convert: find_task(folder, convert) for convert in ("auto", "none", "embed", "classify")}
    assert tasks == {
        "auto": Task.EMBED,
        "none": Task.GENERATE,
        "embed": Task.EMBED,
        "classify": Task.RERANK,
    }


def test_a_checkpoint_without_a_pooling_generates_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    assert find_task(tmp_path, "auto") is Task.GENERATE
    assert find_task(tmp_path, "embed") is Task.EMBED
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    assert find_task(tmp_path, "auto") is Task.GENERATE


@pytest.mark.parametrize(
    ("architecture", "tasks"),
    [
        ("Qwen3ForSequenceClassification", (Task.CLASSIFY, Task.CLASSIFY, Task.EMBED, Task.GENERATE)),
        ("Qwen3ForCausalLM", (Task.GENERATE, Task.RERANK, Task.EMBED, Task.GENERATE)),
    ],
)
def test_a_checkpoint_for_sequence_classification_classifies(
    tmp_path: Path, architecture: str, tasks: tuple[Task, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert tuple(find_task(tmp_path, convert) for convert in ("auto", "classify", "embed", "none")) == tasks
    assert [task.pools for task in Task] == [False, True, True, False]


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "pooling mean_tokens"),
        ({"pooling_mode_cls_token": True}, "pooling cls_token"),
        ({**LAST, "pooling_mode_max_tokens": True}, "lasttoken and max_tokens"),
        ({"pooling_mode": "mean"}, "pooling mean"),
        ({}, "pooling none"),
    ],
)
def test_other_poolings_are_refused_by_name(tmp_path: Path, pooling: dict[str, object], named: str) -> None:
    folder = write(tmp_path, pooling, "Transformer", "Pooling")
    for convert in ("auto", "embed"):
        with pytest.raises(ConfigError, match=f"{named}, expected lasttoken"):
            find_task(folder, convert)
    assert find_task(folder, "none") is Task.GENERATE


def test_other_modules_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the module Dense, expected Transformer, Pooling, Normalize"):
        read_pooling(write(tmp_path, LAST, "Transformer", "Pooling", "Dense"))


@pytest.mark.parametrize("text", ["[", '[{"path": ""}]', "[1]"])
def test_broken_modules(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_pooling(tmp_path)
