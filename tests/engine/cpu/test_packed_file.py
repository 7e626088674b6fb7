"""Packed weights in a file: the first load writes it, later ones map it, and results are those of other loads."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.engine import load_decoder
from inflight.engine.cpu import packed_file
from inflight.engine.cpu.packed_file import PackedFile
from inflight.engine.engine import ModelEngine
from inflight.engine.host_memory import Arena
from inflight.engine.load_decoder import runs_compiled
from inflight.models import read_model_description
from inflight.testing.make_model import make_model
from tests.engine.cpu.test_native_adapters import serve as serve_adapted
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.merged import make_adapter
from tests.engine.serving import serve
from tests.engine.thread_ranks import ThreadRanks
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo
from tests.models.zoo_configs import CASES
from tests.ranks.requests import CONFIG, ENGINE, answers, make_requests
from tests.tiers import with_all

pytestmark = needs_native
PROMPT = tuple(range(5, 30))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(packed_file, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo["llama-gqa"].folder, tmp_path / "llama"))


def load(folder: Path, **changes: Any) -> ModelEngine:
    return load_engine(folder, **{"kernels": "native", "weights": "mmap", **changes})


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("packed/*.weights"))


def is_mapped(engine: ModelEngine) -> bool:
    return engine.runner.decoder.num_mapped_bytes > 0


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the checkpoint is read")

    monkeypatch.setattr(load_decoder, "load_weights_into", refuse)


def assert_equal_loads(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Compare a load into memory, a load that writes the file, and one that may not read the weights."""
    rows = [
        alone(load(folder, weights="memory", **changes), PROMPT, 8),
        alone(load(folder, **changes), PROMPT, 8),
    ]
    with monkeypatch.context() as patched:
        refuse_to_read(patched)
        engine = load(folder, **changes)
    assert is_mapped(engine)
    rows.append(alone(engine, PROMPT, 8))
    for row in rows[1:]:
        assert torch.equal(torch.stack(row.logits), torch.stack(rows[0].logits))
        assert row.generated == rows[0].generated


@pytest.mark.parametrize(
    ("case", "dtype"),
    with_all(
        [
            *(
                (case, dtype)
                for case in ("llama-gqa", "llama-gqa-tied")
                for dtype in ("float32", "bfloat16", "int8")
            ),
            ("gpt2", "bfloat16"),
            ("mixtral", "bfloat16"),
            ("mixtral", "int8"),
            ("deepseek-v3", "float32"),
            ("qwen3.5-moe", "float32"),
        ],
        [
            ("llama-gqa", "float32"),
            ("llama-gqa-tied", "int8"),
            ("mixtral", "bfloat16"),
            ("deepseek-v3", "float32"),
            ("qwen3.5-moe", "float32"),
        ],
    ),
)
def test_mapped_weights_give_equal_logits(
    zoo: Zoo, case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal_loads(zoo[case].folder, monkeypatch, dtype=dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_every_family_of_the_compiled_layers_is_mapped(
    zoo: Zoo, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo[case]
    description = read_model_description(model.folder)
    if not runs_compiled(EngineConfig(str(model.folder)), description, torch.device("cpu")):
        pytest.skip("torch's operators run it")
    assert_equal_loads(model.folder, monkeypatch)


@pytest.mark.parametrize("name", with_all(["gptq-act-order", "awq", "ct-int8"], ["gptq-act-order"]))
def test_quantized_checkpoints_stay_quantized(
    zoo: Zoo, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = write(zoo["llama-gqa"], tmp_path / name, FORMATS[name]).folder
    (made / "config.json").write_text((made / "config.json").read_text().replace('"float32"', '"bfloat16"'))
    with caplog.at_level(logging.INFO):
        assert_equal_loads(made, monkeypatch)
    kept = [text for text in caplog.messages if "keep the checkpoint's format" in text]
    assert len(kept) == 3 and len(set(kept)) == 1, "the log of every load says so"


def test_experts_in_mxfp4_stay_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_model(tmp_path / "mxfp4", "gpt_oss", standard_deviation=0.1, quantize="mxfp4")
    assert_equal_loads(made, monkeypatch)


def test_adapters_run_on_mapped_weights(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    adapter = make_adapter(model)
    load(model.folder, dtype="float32")
    rows = [
        serve_adapted(load(model.folder, dtype="float32", weights=weights), adapter, model.prompt(20))
        for weights in ("memory", "mmap")
    ]
    assert torch.equal(*(torch.stack(row.logits) for row in rows))


def test_each_rank_has_a_file(zoo: Zoo, cache: Path) -> None:
    path = str(zoo["llama-gqa"].folder)

    def tokens(**changes: Any) -> list[Any]:
        config = EngineConfig(path, **ENGINE, kernels="native", **changes)
        return answers(serve(ThreadRanks(config, 2, 2), CONFIG, make_requests()))

    expected = tokens()
    assert tokens(weights="mmap") == tokens(weights="mmap") == expected
    assert len(files(cache)) == 4


def test_the_packed_file_is_private_and_the_only_file_left(folder: Path, cache: Path) -> None:
    load(folder)
    (file,) = files(cache)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".lock", ".weights"]


def _touch(folder: Path, cache: Path) -> None:
    os.utime(folder / "model.safetensors")


def _truncate(folder: Path, cache: Path) -> None:
    (file,) = files(cache)
    os.truncate(file, file.stat().st_size - 100)


def _empty(folder: Path, cache: Path) -> None:
    (file,) = files(cache)
    os.truncate(file, 0)


def _damage(folder: Path, cache: Path) -> None:
    """Change a byte of the pickle, which is before the trailer of 48 bytes."""
    (file,) = files(cache)
    content = bytearray(file.read_bytes())
    content[-60] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("change", [_touch, _truncate, _empty, _damage])
def test_a_file_of_another_checkpoint_or_a_damaged_one_is_replaced(
    folder: Path, cache: Path, change: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(load(folder), PROMPT, 4).generated
    change(folder, cache)
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="the checkpoint is read"):
        refuse_to_read(patched)
        load(folder)
    assert alone(load(folder), PROMPT, 4).generated == expected
    assert len(files(cache)) == 1
    with monkeypatch.context() as patched:
        refuse_to_read(patched)
        load(folder)


def test_other_dtypes_have_files_of_their_own(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        load(folder, dtype=dtype)
    assert len(files(cache)) == 3
    refuse_to_read(monkeypatch)
    for dtype in ("float32", "bfloat16", "int8"):
        load(folder, dtype=dtype)


def test_files_that_were_not_used_for_30_days_are_removed_by_a_write(folder: Path, cache: Path) -> None:
    load(folder, dtype="float32")
    (old,) = files(cache)
    os.utime(old, (0, 0))
    load(folder, dtype="bfloat16")
    assert len(files(cache)) == 1 and not old.exists()


@pytest.mark.parametrize("at", ["allocation", "folder"])
def test_without_room_on_the_disk_the_weights_are_in_memory(
    folder: Path, cache: Path, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if at == "folder":
        (cache / "packed").write_text("not a folder")
    else:
        calls = []

        def allocate(handle: int, begin: int, size: int) -> None:
            calls.append(size)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            os.ftruncate(handle, begin + size)

        monkeypatch.setattr(packed_file.os, "posix_fallocate", allocate)
    with caplog.at_level(logging.WARNING):
        engine = load(folder)
    assert not is_mapped(engine)
    (said,) = caplog.messages
    assert "the packed weights are in memory" in said
    assert at == "folder" or ("No space left" in said and not list((cache / "packed").glob("*.part")))
    expected = alone(load(folder, weights="memory"), PROMPT, 4).generated
    assert alone(engine, PROMPT, 4).generated == expected


def test_of_several_processes_one_writes_and_the_others_map(cache: Path, tmp_path: Path) -> None:
    file = PackedFile.of(tmp_path)
    assert file is not None
    calls: list[Arena] = []

    def pack(arena: Arena) -> torch.Tensor:
        calls.append(arena)
        return arena.empty(1000, torch.float32).fill_(3)

    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(file.load, pack) for _ in range(4)]]
    assert len(calls) == 1
    assert all(bool((each.content == 3).all()) and each.num_bytes for each in found)


@pytest.mark.parametrize("weights", ["memory", "mmap"])
def test_with_torchs_operators_mapping_has_no_effect_and_the_log_says_so(
    folder: Path, cache: Path, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(folder, kernels="torch", weights=weights)
    said = [text for text in caplog.messages if "weights is mmap, which has no effect" in text]
    assert len(said) == (weights == "mmap") and not files(cache)
