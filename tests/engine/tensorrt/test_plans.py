"""Plans are built by TensorRT itself, without a GPU; unsupported models and options are refused by name."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.engine.load import load_engine
from inflight.engine.tensorrt.build import BuildOptions, build_engine
from inflight.engine.tensorrt.command import main
from inflight.engine.tensorrt.module import find_module
from inflight.engine.tensorrt.sidecar import (
    FORMAT,
    Alias,
    GpuTargets,
    PlanTensor,
    Sidecar,
    checkpoint_digest,
    file_digest,
)
from inflight.errors import ConfigError
from inflight.models import FAMILIES
from tests.engine.tensorrt.in_flight import SIZES
from tests.engine.tensorrt.interpreter import dump
from tests.engine.test_every_family import CASE_OF
from tests.models.zoo import Zoo
from tests.tiers import with_all

WITH_KERNELS = {
    "gemma3_text": "gemma3-heads-16",
    "qwen3_moe": "qwen3-moe-even",
    "mixtral": "mixtral-heads-16",
    "ministral3": "ministral3-heads-16",
    "seed_oss": "seed-oss-heads-16",
    "glm4": "glm4-heads-16",
    "ernie4_5": "ernie4.5-heads-16",
}
"""Replace models with heads of 12 dimensions, for which TensorRT has no kernel, and one of many layers."""
REFUSED = {
    "apertus": "xIELU",
    "llama4_text": "experts with weighted inputs, attention in chunks",
    "granite_swa": "learned sinks",
    "granitemoe_swa": "learned sinks",
    "mistral4": "latent attention",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "glm4_moe_lite": "latent attention",
    "glm4_moe": "experts chosen otherwise than by softmax",
    "ernie4_5_moe": "experts chosen otherwise than by softmax",
    "hunyuan_v1_dense": "norms of rotated heads",
    "hunyuan_v1_moe": "norms of rotated heads",
    "minimax_m2": "experts chosen otherwise than by softmax",
    "gemma2": "soft caps of attention",
    "gemma3n_text": "norms of values, layers that read another layer's keys and values, per-layer embeddings",
    "gemma4_text": "heads or MLPs that differ from layer to layer, keys that are also values",
    "gemma4_unified_text": "heads or MLPs that differ from layer to layer, keys that are also values",
    "gpt_oss": "learned sinks, clamped SwiGLU, biases of experts",
    "qwen3_5_text": "recurrent layers, gates of attention",
    "qwen3_5_moe_text": "recurrent layers, gates of attention",
    "qwen3_next": "recurrent layers, gates of attention",
    "olmo_hybrid": "recurrent layers",
    "granitemoehybrid": "recurrent layers",
    "lfm2": "recurrent layers",
    "lfm2_moe": "recurrent layers",
    "lfm3": "proportional rotary positions, gates of heads, recurrent layers",
    "nemotron_h": "layers without attention or without an MLP",
    "falcon_h1": "attention beside recurrent layers, fixed factors of activations",
    "kimi_linear": "latent attention, recurrent layers",
    "bloom": "ALiBi, a norm on embeddings",
}
FAMILY_NAMES = [family.model_type for family in FAMILIES]


def _build(model: Path, folder: Path, **options: Any) -> list[Sidecar]:
    return build_engine(model, folder, BuildOptions(**(SIZES | {"dtype": "float32", **options})))


@pytest.mark.parametrize(
    "family", with_all([name for name in FAMILY_NAMES if name not in REFUSED], ["mixtral"])
)
def test_plans_of_every_family_can_be_built(zoo: Zoo, tmp_path: Path, family: str) -> None:
    (sidecar,) = _build(zoo[WITH_KERNELS.get(family, CASE_OF[family])].folder, tmp_path)
    for plan in (sidecar.layers, sidecar.head):
        assert (tmp_path / plan.file.name).stat().st_size > 100_000
        assert file_digest(tmp_path / plan.file.name) == plan.file.digest


@pytest.mark.parametrize(
    "family",
    with_all(REFUSED, ["deepseek_v2", "gemma2", "gpt_oss", "hunyuan_v1_dense", "glm4_moe", "qwen3_next"]),
)
def test_other_families_are_refused_by_name_before_a_build(zoo: Zoo, tmp_path: Path, family: str) -> None:
    with pytest.raises(ConfigError, match=f"do not express {REFUSED[family]}.*; the engine torch runs it"):
        _build(zoo[CASE_OF[family]].folder, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    "options",
    with_all(
        [
            {"dtype": "float16", "target": "sm80"},
            {"dtype": "bfloat16", "weights": "inputs", "additional_outputs": ("hidden_states_0",)},
            {"dtype": "bfloat16", "tensor_parallel_size": 2},
            {"dtype": "bfloat16", "max_lora_rank": 16},
            {"dtype": "fp8", "target": "sm89,sm120"},
            {"dtype": "int8", "weights": "inputs"},
        ],
        [{"dtype": "bfloat16", "max_lora_rank": 16}],
    ),
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_plans_can_be_built_with_every_option(zoo: Zoo, tmp_path: Path, options: dict[str, Any]) -> None:
    sidecars = _build(zoo["llama-heads-16"].folder, tmp_path, **options)
    assert [sidecar.rank for sidecar in sidecars] == list(range(options.get("tensor_parallel_size", 1)))
    for sidecar in sidecars:
        assert (tmp_path / sidecar.layers.file.name).stat().st_size > 100_000
        assert (sidecar.weights is not None) == (options.get("weights") == "inputs")


@pytest.mark.exhaustive
def test_plans_of_experts_can_be_built_in_8_bits(zoo: Zoo, tmp_path: Path) -> None:
    _build(zoo["mixtral-heads-16"].folder, tmp_path, dtype="int8")


def test_packed_attention_is_not_built_by_tensorrt_rtx(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no kernel for packed attention here, expected split$"):
        _build(zoo["llama-heads-16"].folder, tmp_path, dtype="bfloat16", attention="packed")
    assert not list(tmp_path.iterdir())


def test_heads_without_a_kernel_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no attention kernel for heads of 12 dimensions in float32 and"):
        _build(zoo["gemma3"].folder, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int2"}, "dtype is int2, expected one of float32, bfloat16, float16, int8, fp8, int4"),
        ({"dtype": "int4"}, "dtype is int4, but .* has no matrix of 4 bits that can be kept"),
        ({"target": "sm90"}, "target is sm90, expected portable, current or some of sm75, .*, sm121"),
        ({"target": "current"}, "the GPU of this machine, but this machine has none"),
        (
            {"dtype": "fp8", "target": "sm80"},
            "fp8 is not supported by compute capability 8.0.* expected 8.9 or later",
        ),
        ({"dtype": "bfloat16", "target": "sm75,sm89"}, "bfloat16 is not supported by compute capability 7.5"),
        ({"max_seq_len": 257}, "max_seq_len is 257, expected at least 2, at most 256"),
        ({"max_seq_len": 1}, "max_seq_len is 1, expected at least 2, at most 256"),
        ({"max_batch_size": 1, "max_num_tokens": 1}, "max_num_tokens is 1, expected at least 2"),
        ({"max_num_tokens": 3}, "max_num_tokens is 3, expected at least max_batch_size, 5"),
        ({"max_batch_size": 0}, "max_batch_size is 0, expected at least 1"),
        ({"max_context_chunks": 6}, "max_context_chunks is 6, expected at least 1, at most 5"),
        ({"max_lora_rank": -1}, "max_lora_rank is -1, expected at least 0"),
        ({"tensor_parallel_size": 3}, "3 ranks does not divide this model"),
        ({"tensor_parallel_size": 0}, "tp is 0, expected at least 1"),
        ({"additional_outputs": ("hidden_states_4",)}, "hidden_states_4, expected hidden_states_0 to"),
        ({"additional_outputs": ("top_3_logits",)}, "top_3_logits, expected hidden_states_0 to"),
        ({"attention": "flat"}, "attention is flat, expected split or packed"),
        ({"attention": "packed", "max_seq_len": 64}, "packed attention has no mask"),
        ({"weights": "files"}, "weights is files, expected constants or inputs"),
    ],
)
def test_contradicting_options_are_refused(
    zoo: Zoo, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(zoo["mistral-window"].folder, tmp_path, **options)


def test_the_sidecar_describes_the_plans(zoo: Zoo, tmp_path: Path) -> None:
    (built,) = build_engine(
        zoo["mistral-window"].folder,
        tmp_path,
        BuildOptions(**SIZES, dtype="bfloat16", max_lora_rank=8, additional_outputs=("hidden_states_1",)),
        serialize=dump,
    )
    read = Sidecar.read(tmp_path / "rank0.json")
    assert read == built
    assert (read.format, read.module, read.module_version) == (
        FORMAT,
        "tensorrt_rtx",
        find_module().__version__,
    )
    assert read.layers.tensor("k_cache_2") == PlanTensor("k_cache_2", "bfloat16", (5, 2, 64, 8))
    assert read.layers.tensor("ctx_q_gather") == PlanTensor("ctx_q_gather", "int32", (-1, -1))
    assert read.layers.tensor("lora_b_0_attn_k") == PlanTensor("lora_b_0_attn_k", "bfloat16", (16, -1))
    assert read.layers.tensor("hidden_states_1") == PlanTensor("hidden_states_1", "bfloat16", (-1, 64))
    assert read.head.most_rows("hidden") == 48
    assert read.head.outputs == (
        PlanTensor("normalized", "bfloat16", (-1, 64)),
        PlanTensor("logits", "float32", (-1, 211)),
    )
    assert Alias("v_cache_1", "v_cache_out_1") in read.layers.aliases
    assert len(read.layers.aliases) == 6
    generation, context = read.layers.profiles
    assert (generation.name, context.name) == ("generation", "context")
    rows = {each.name: each for each in generation.ranges}
    assert (rows["input_ids"].min, rows["input_ids"].max) == ((1,), (5,))
    assert rows["ctx_slots"].max == (0,)
    rows = {each.name: each for each in context.ranges}
    assert (rows["input_ids"].min, rows["input_ids"].max) == ((1,), (48,))
    assert (rows["ctx_q_gather"].min, rows["ctx_q_gather"].max) == ((0, 1), (5, 48))
    assert rows["lora_a_2_attn_dense"].max == (8, 64)
    assert read.model.sliding_windows == (19, 19, 19)
    assert read.checkpoint_digest == checkpoint_digest(zoo["mistral-window"].folder)


def test_an_unusable_sidecar_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    build_engine(zoo["gpt2"].folder, tmp_path, BuildOptions(**SIZES, dtype="float32"), serialize=dump)
    path = tmp_path / "rank0.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"format": FORMAT + 1}))
    with pytest.raises(
        ConfigError, match=f"format is {FORMAT + 1}, expected {FORMAT}: build the engine again"
    ):
        Sidecar.read(path)
    del values["layers"]
    path.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match="missing required field `layers`, expected what scripts/build writes"
    ):
        Sidecar.read(path)
    with pytest.raises(ConfigError, match="No such file or directory, expected what scripts/build writes"):
        Sidecar.read(tmp_path / "rank1.json")


def test_digests_tell_checkpoints_apart(zoo: Zoo, tmp_path: Path) -> None:
    own = zoo["gpt2"].folder
    copied = tmp_path / "copied"
    shutil.copytree(own, copied)
    assert checkpoint_digest(copied) == checkpoint_digest(own)
    config = copied / "config.json"
    config.write_text(
        config.read_text().replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": 1e-06')
    )
    assert checkpoint_digest(copied) != checkpoint_digest(own)
    assert checkpoint_digest(zoo["gpt2-inner"].folder) != checkpoint_digest(own)
    with pytest.raises(ConfigError, match=r"config.json: No such file or directory, expected a checkpoint"):
        checkpoint_digest(tmp_path)


def test_a_plan_runs_on_its_gpus_and_if_portable_on_later_ones() -> None:
    portable, exact = GpuTargets((80, 86, 89, 120), and_later=True), GpuTargets((89, 120), and_later=False)
    assert [portable.include(each) for each in (75, 80, 89, 90, 120, 121)] == [
        False,
        True,
        True,
        False,
        True,
        True,
    ]
    assert [exact.include(each) for each in (86, 89, 120, 121)] == [False, True, True, False]
    assert (str(portable), str(exact)) == ("8.0, 8.6, 8.9, 12.0 and later", "8.9, 12.0")


def test_a_rebuilt_engine_is_missing_until_it_is_complete(zoo: Zoo, tmp_path: Path) -> None:
    """Files of an earlier build are removed, and no other files."""
    folder, checkpoint = tmp_path / "engine", tmp_path / "checkpoint"
    shutil.copytree(zoo["llama-gqa"].folder, checkpoint)
    (checkpoint / "chat_template.jinja").write_text("of the first checkpoint")
    options = BuildOptions(**SIZES, dtype="float32")
    two = dataclasses.replace(options, tensor_parallel_size=2, weights="inputs")
    (first, _) = build_engine(checkpoint, folder, two, serialize=dump)
    assert first.copied == ("chat_template.jinja", "config.json", "generation_config.json")
    (folder / "notes.txt").write_text("somebody's own")
    seen: list[list[str]] = []

    def noting(definition: Any) -> bytes:
        seen.append(sorted(path.name for path in folder.iterdir()))
        return dump(definition)

    build_engine(zoo["llama-gqa"].folder, folder, options, serialize=noting)
    assert seen == [["notes.txt"], ["notes.txt", "rank0.plan"]]
    names = [
        "config.json",
        "generation_config.json",
        "notes.txt",
        "rank0.head.plan",
        "rank0.json",
        "rank0.plan",
    ]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_build_that_fails_at_its_last_rank_leaves_no_files(zoo: Zoo, tmp_path: Path) -> None:
    built: list[bytes] = []

    def failing(definition: Any) -> bytes:
        if len(built) == 3:
            raise KeyboardInterrupt
        built.append(dump(definition))
        return built[-1]

    options = BuildOptions(**SIZES, dtype="float32", tensor_parallel_size=2)
    with pytest.raises(KeyboardInterrupt):
        build_engine(zoo["llama-gqa"].folder, tmp_path, options, serialize=failing)
    assert not list(tmp_path.iterdir())


def test_plans_cannot_be_built_from_a_folder_of_plans(zoo: Zoo, tmp_path: Path) -> None:
    build_engine(zoo["llama-gqa"].folder, tmp_path / "first", BuildOptions(**SIZES), serialize=dump)
    with pytest.raises(ConfigError, match=r"first is a folder of plans, expected the checkpoint that they"):
        build_engine(tmp_path / "first", tmp_path / "second", BuildOptions(**SIZES), serialize=dump)


@pytest.mark.exhaustive
def test_plans_of_the_smallest_sizes_can_be_built(zoo: Zoo, tmp_path: Path) -> None:
    _build(zoo["llama-heads-16"].folder, tmp_path, max_batch_size=1, max_num_tokens=2, max_seq_len=2)


def test_the_checkpoints_own_folder_is_refused(zoo: Zoo) -> None:
    """A plan built there would become part of the checkpoint that it is compared with."""
    folder = zoo["llama-gqa"].folder
    with pytest.raises(ConfigError, match=r"output is .*, the folder of the checkpoint: expected another"):
        build_engine(folder, folder.parent / "." / folder.name, BuildOptions(**SIZES), serialize=dump)
    assert not list(folder.glob("rank*"))


def test_a_missing_tensorrt_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"^neither tensorrt nor tensorrt_rtx is installed: pip install -e"):
        find_module()
    with pytest.raises(ConfigError, match=r"^tensorrt is not installed: pip install -e"):
        find_module("tensorrt")


def test_a_broken_tensorrt_is_distinguished_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(
        ConfigError, match=r"installed but cannot be loaded: tensorrt: libnvinfer.so.11: cannot"
    ):
        find_module("tensorrt")


@pytest.fixture(scope="module")
def arguments(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command's arguments, without the target."""
    sizes = ["--max-batch-size", "3", "--max-seq-len", "32", "--max-num-tokens", "16"]
    folder = tmp_path_factory.mktemp("command") / "engine"
    return ["--output", str(folder), "--model", str(zoo["gpt2"].folder), *sizes]


@pytest.fixture(scope="module")
def said(arguments: list[str]) -> str:
    """The command's messages after it has built plans with TensorRT."""
    with redirect_stderr(StringIO()) as stderr:
        assert main([*arguments, "--target", "sm89"]) == 0
    return stderr.getvalue()


def test_the_command_builds_plans(arguments: list[str], said: str) -> None:
    (told,) = said.splitlines()[-1:]
    assert "rank0.json: float32, 3 sequences of 32 tokens, 0.0" in told
    assert told.endswith("for compute capability 8.9")
    settings = Sidecar.read(Path(arguments[1]) / "rank0.json").settings
    assert (settings.max_batch_size, settings.max_seq_len, settings.max_num_tokens) == (3, 32, 16)


def test_the_command_refuses_a_wrong_target(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--target", "sm90"]) == 1
    assert capfd.readouterr().err.startswith("scripts/build: target is sm90, expected portable")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tensorrts_own_runtime_refuses_without_a_gpu(arguments: list[str], said: str) -> None:
    """Loads a plan that TensorRT itself has built, without the stand-in for TensorRT."""
    config = EngineConfig(arguments[1], device="cpu", max_num_sequences=3, implementation="tensorrt")
    with pytest.raises(
        ConfigError, match=r"rank0\.plan needs an NVIDIA GPU and TensorRT; this machine has no"
    ):
        load_engine(config)
