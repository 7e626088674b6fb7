"""Errors for plans that cannot be served with the given parameters: one sentence each."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.additional_outputs import parse_outputs
from inflight.config import EngineConfig, Parameters
from inflight.engine.load import load_engine
from inflight.engine.load_options import LoadOptions
from inflight.engine.tensorrt.checks import check_processor, longest_of_plans
from inflight.engine.tensorrt.load import load_runner
from inflight.engine.tensorrt.sidecar import Sidecar, file_digest
from inflight.errors import ConfigError
from inflight.load_model import load_model
from inflight.models import read_model_description
from inflight.ranks.topology import Mapping
from tests.engine.tensorrt.conftest import Plans
from tests.engine.tensorrt.engines import load, standing_in
from tests.models.zoo import Zoo, ZooModel


@pytest.fixture
def model(zoo: Zoo) -> ZooModel:
    return zoo["llama-gqa"]


@pytest.fixture
def copied(model: ZooModel, plans: Plans, tmp_path: Path) -> Path:
    """A copied folder of plans that a test may change."""
    return Path(shutil.copytree(plans(model), tmp_path / "moved"))


def change(folder: Path, **changes: Any) -> None:
    path = folder / "rank0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil(name: str) -> Callable[[Path], None]:
    def of(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes() + b"\0")

    return of


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (spoil("rank0.plan"), r"rank0\.plan does not match its description"),
        (spoil("rank0.head.plan"), r"rank0\.head\.plan does not match its description"),
        (lambda folder: (folder / "rank0.plan").unlink(), r"rank0\.plan: No such file"),
        (lambda folder: change(folder, format=99), r"format is 99, expected \d+: build the engine again"),
        (
            lambda folder: change(folder, module_version="1.0"),
            r"were built with tensorrt_rtx 1\.0, and 1\..* is",
        ),
        (lambda folder: (folder / "rank0.json").unlink(), r"has no rank0\.json, expected a folder that"),
    ],
)
def test_plans_and_descriptions_that_do_not_match_are_refused(
    copied: Path, do: Callable[[Path], None], message: str
) -> None:
    load(copied)
    do(copied)
    with pytest.raises(ConfigError, match=message):
        load(copied)


def test_a_changed_configuration_is_refused(copied: Path) -> None:
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 300}))
    with pytest.raises(
        ConfigError, match=r"config\.json has a vocab_size of 300, but the plans of .* have 211"
    ):
        load(copied)


def test_a_file_that_is_not_a_plan_is_refused(copied: Path) -> None:
    """The file's digest is correct, so TensorRT itself reports that the file is not a plan."""
    (copied / "rank0.plan").write_bytes(b"nothing")
    layers = json.loads((copied / "rank0.json").read_text())["layers"]
    layers["file"]["digest"] = file_digest(copied / "rank0.plan")
    change(copied, layers=layers)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and TensorRT; this machine has no GPU"):
        load(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_sequences": 7}, "max_batch_size is 7, but the plans of .* have 6 slots"),
        ({"max_sequence_length": 129}, "max_sequence_length is 129, but the plans' slots have room for 128"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16, but the plans of .* are of float32"),
        ({"kernels": "native"}, "kernels is native"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8, expected auto with the engine tensorrt"),
        ({"max_attention_window_size": (16,)}, "cannot change the windows of plans"),
        ({"sink_token_length": 2, "max_attention_window_size": (16,)}, "cannot change the windows of plans"),
        (
            {"additional_model_outputs": parse_outputs("hidden_states_1")},
            "has hidden_states_1, but the plans of .* give none",
        ),
        ({"lora_cache_gpu_memory_fraction": 0.1}, "but the plans take no adapters"),
        (
            {"shares_blocks": False, "num_blocks": 3},
            "max_tokens_in_paged_kv_cache is 24, expected at least 32: a block of 8 tokens for each of 4",
        ),
    ],
)
def test_limits_beyond_those_of_the_plans_are_refused(
    model: ZooModel, plans: Plans, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(plans(model), **changes)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (Mapping(tp_size=2, rank=1), "tensor_parallel_size is 2, but the plans of .* are for 1"),
        (Mapping(pp_size=2), "pipeline_parallel_size is 2, expected 1"),
        (Mapping(tp_size=2, moe_ep_size=2), "moe_expert_parallel_size is 2, expected 1"),
    ],
)
def test_plans_of_another_number_of_ranks_are_refused(
    model: ZooModel, plans: Plans, mapping: Mapping, message: str
) -> None:
    config = EngineConfig(str(plans(model)), device="cpu", max_num_sequences=4, implementation="tensorrt")
    with standing_in(), pytest.raises(ConfigError, match=message):
        load_runner(LoadOptions(config, mapping))


def test_plans_of_another_checkpoint_are_refused(
    zoo: Zoo, model: ZooModel, plans: Plans, tmp_path: Path
) -> None:
    config = EngineConfig(
        str(model.folder),
        engine_dir=str(plans(model)),
        device="cpu",
        max_num_sequences=4,
        implementation="tensorrt",
    )
    with standing_in():
        load_engine(config)
        other = replace(config, gpt_model_path=str(zoo["llama"].folder))
        with pytest.raises(ConfigError, match="were built from another checkpoint than"):
            load_engine(other)


def test_plans_in_engine_dir_from_another_checkpoint_are_refused(
    zoo: Zoo, model: ZooModel, plans: Plans
) -> None:
    config = EngineConfig(
        str(plans(zoo["llama-gqa-tied"])),
        engine_dir=str(plans(model)),
        device="cpu",
        max_num_sequences=4,
        implementation="tensorrt",
    )
    with standing_in(), pytest.raises(ConfigError, match="were built from another checkpoint than"):
        load_engine(config)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rank0.json", r"rank1\.json describes the plans of rank 0, expected rank 1"),
        ("settings", r"rank1\.json is of another build than rank0\.json, their settings differ"),
        ("checkpoint_digest", r"rank1\.json is of another build than rank0\.json, their checkpoint_digest"),
    ],
)
def test_descriptions_of_ranks_that_do_not_match_are_refused(
    model: ZooModel, plans: Plans, tmp_path: Path, source: str, message: str
) -> None:
    folder = Path(shutil.copytree(plans(model, tensor_parallel_size=2), tmp_path / "mixed"))
    path = folder / "rank1.json"
    if source == "rank0.json":
        shutil.copyfile(folder / source, path)
    elif source == "settings":
        settings = json.loads(path.read_text())["settings"] | {"max_seq_len": 64}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": settings}))
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {source: "0" * 32}))
    config = EngineConfig(str(folder), device="cpu", max_num_sequences=4, implementation="tensorrt")
    with standing_in(), pytest.raises(ConfigError, match=message):
        load_runner(LoadOptions(config, Mapping(tp_size=2, rank=1)))


def test_a_length_with_other_rotary_factors_than_the_plans_is_refused(
    zoo: Zoo, model: ZooModel, plans: Plans
) -> None:
    """LongRoPE, first trained with 64 positions, with plans for longer sequences."""
    decoder = read_model_description(zoo["phi3-longrope"].folder).decoder
    scaling = replace(decoder.ropes[0].scaling, original_max_positions=64)
    decoder = replace(decoder, ropes=(replace(decoder.ropes[0], scaling=scaling),))
    sidecar, config = Sidecar.read(plans(model) / "rank0.json"), EngineConfig(max_sequence_length=65)
    assert longest_of_plans(config, sidecar, decoder) == 65
    with pytest.raises(
        ConfigError, match=r"max_sequence_length is 64, .* as their max_seq_len is 128: leave"
    ):
        longest_of_plans(replace(config, max_sequence_length=64), sidecar, decoder)


def test_a_load_without_tensorrt_is_refused(
    model: ZooModel, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    config = EngineConfig(str(plans(model)), device="cpu", max_num_sequences=4, implementation="tensorrt")
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU and TensorRT; tensorrt_rtx is not"):
        load_engine(config)


@pytest.mark.parametrize(
    ("capability", "hint"), [((9, 0), "TensorRT for RTX does not run"), ((7, 5), "build")]
)
def test_plans_for_another_compute_capability_are_refused(
    model: ZooModel, plans: Plans, capability: tuple[int, int], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    sidecar = Sidecar.read(plans(model) / "rank0.json")
    message = rf"compute capability 8\.0.*, and this one has {capability[0]}\.{capability[1]}: {hint}"
    with pytest.raises(ConfigError, match=message):
        check_processor(sidecar, plans(model), torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    check_processor(sidecar, plans(model), torch.device("cuda"))


# ---------------------------------------------------------------------- how an engine is named


def parameters(**engine: Any) -> Parameters:
    return Parameters(engine=EngineConfig(device="cpu", max_num_sequences=4, **engine))


def test_a_folder_of_plans_is_recognized(model: ZooModel, plans: Plans, tmp_path: Path) -> None:
    folder = str(plans(model))
    with standing_in():
        for given in (
            parameters(gpt_model_path=folder),
            parameters(engine_dir=folder),
            parameters(engine_dir=folder, gpt_model_path=str(model.folder)),
            parameters(gpt_model_path=folder, implementation="tensorrt"),
        ):
            loaded = load_model(given, str(tmp_path), None)
            assert loaded.engine.kernels == "tensorrt"
            assert loaded.model_path == (given.engine.gpt_model_path or folder)
            assert loaded.engine.runner.cache._blocks is not None


def test_plans_have_kv_blocks_only_for_reuse_or_beams(model: ZooModel, plans: Plans, tmp_path: Path) -> None:
    given = parameters(gpt_model_path=str(plans(model)))
    for reuse, width, are_kept in ((True, 1, True), (False, None, True), (False, 2, True), (False, 1, False)):
        scheduler = replace(given.scheduler, enable_kv_cache_reuse=reuse, max_beam_width=width)
        with standing_in():
            loaded = load_model(replace(given, scheduler=scheduler), str(tmp_path), None)
        assert (loaded.engine.runner.cache._blocks is not None) == are_kept


def test_an_engine_refuses_a_folder_of_another_kind(model: ZooModel, plans: Plans, tmp_path: Path) -> None:
    given = parameters(gpt_model_path=str(plans(model)), implementation="torch")
    with pytest.raises(ConfigError, match=r"engine is torch, but .* is a folder of plans"):
        load_model(given, str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"engine is tensorrt, and .* has no rank0\.json"):
        load_model(
            parameters(gpt_model_path=str(model.folder), implementation="tensorrt"), str(tmp_path), None
        )


def test_a_stand_in_for_tensorrt_is_logged(
    model: ZooModel, plans: Plans, caplog: pytest.LogCaptureFixture
) -> None:
    load(plans(model))
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "nothing but a stand-in for TensorRT has run it" in record.getMessage()
