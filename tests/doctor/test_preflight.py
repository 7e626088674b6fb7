"""Reasons that a server cannot start are found before it is started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import serve_command
from inflight.block_store import BlockFiles
from inflight.doctor import disks, in_use, preflight
from inflight.doctor.finding import red
from inflight.engine_parts import label_of_blocks
from inflight.gguf import folder as gguf_folder
from inflight.gguf.folder import checkpoint_of
from inflight.openai.batches.folder import BatchFolder
from inflight.openai.options import OpenAiOptions
from inflight.openai.responses.file import ResponseFile
from inflight.server import launch
from inflight.server.errors import OptionError
from inflight.server.launch import ServerOptions
from inflight.server.ports import Ports
from inflight.server.repository import RuntimeRepository, Wanted, default_repository
from tests.models.draft_heads import make_drafting_model
from tests.models.eagle_heads import make_random_head
from tests.models.gemma4_heads import make_head, make_target
from tests.models.gguf_files import write as write_gguf
from tests.models.zoo import make_model
from tests.openai_endpoint.small_models import make_classifier, make_qwen3

DEMO_MODEL = default_repository() / "tensorrt_llm" / "1" / "demo_model"
Limit = Callable[[float], None]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"


def make_checkpoint(folder: Path, architecture: str, **values: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    return folder


def problem(folder: Path, **wanted: Any) -> str:
    (found,) = preflight.problems(ServerOptions(wanted=Wanted(folder, **wanted)))
    return found


def test_the_demo_model_has_no_problem() -> None:
    options = ServerOptions(wanted=Wanted(DEMO_MODEL))
    assert not [*preflight.problems(options), *preflight.warnings(options)]


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt_llm_draft"])
def test_a_repository_that_names_a_missing_checkpoint(tmp_path: Path, name: str) -> None:
    repository = tmp_path / "models"
    shutil.copytree(default_repository(), repository)
    shutil.copytree(repository / "tensorrt_llm", repository / "tensorrt_llm_draft")
    draft = repository / "tensorrt_llm_draft" / "config.pbtxt"
    draft.write_text(draft.read_text().replace('name: "tensorrt_llm"', 'name: "tensorrt_llm_draft"'))
    settings = {"tensorrt_llm_draft_model_name": "tensorrt_llm_draft"}
    options = ServerOptions(repository, Wanted(None, settings=settings))
    assert not [*preflight.problems(options)]
    config = repository / name / "config.pbtxt"
    config.write_text(config.read_text().replace("${engine_dir}", str(tmp_path / "large")))
    (found,) = preflight.problems(options)
    assert found == (
        f"gpt_model_path of the model {name}: {tmp_path}/large is not a folder, expected a Hugging Face "
        "checkpoint folder"
    )


def test_an_eagle_head_of_another_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama-gqa")
    head = make_random_head(tmp_path / "head", model)
    options = Wanted(model.folder, speculate="eagle3", draft_model=head.folder)
    assert not [*preflight.problems(ServerOptions(wanted=options))]
    found = problem(DEMO_MODEL, speculate="eagle3", draft_model=head.folder)
    assert "key 'hidden_size' is 64, expected 256 as in" in found
    found = problem(model.folder, speculate="eagle3", draft_model=head.folder, engine="transformers")
    assert found.startswith(
        "speculative_decoding_mode is eagle3, expected none, prompt-lookup or suffix: engine is"
    )
    found = problem(DEMO_MODEL, speculate="eagle3", draft_model=tmp_path / "nothing")
    told = f"{tmp_path / 'nothing'} is not a folder, expected a Hugging Face checkpoint folder"
    assert found == f"--draft-model: {told}"
    found = problem(DEMO_MODEL, speculate="eagle3")
    assert "speculative_decoding_mode: got eagle3, expected speculative_model_dir with the folder" in found


@pytest.mark.parametrize(("dtype", "least"), [(None, 65536), ("float32", 131072)])
def test_files_without_room_for_a_block(tmp_path: Path, dtype: str | None, least: int) -> None:
    found = problem(DEMO_MODEL, kv_cache_dir=tmp_path, kv_cache_disk_bytes=1024, dtype=dtype)
    assert found == (
        f"--kv-cache-disk is 1024 bytes, and the file of one KV block has at least {least} bytes: give room for "
        "many blocks, such as 10G"
    )


def test_models_that_cannot_be_divided_among_the_ranks(tmp_path: Path) -> None:
    def of_ranks(wanted: Wanted, tp: int, pp: int) -> list[str]:
        return [*preflight.problems(ServerOptions(wanted=wanted, tp=tp, pp=pp))]

    model = make_model(tmp_path / "model", "llama-gqa")
    head = make_random_head(tmp_path / "head", model)
    own = make_drafting_model(tmp_path / "own", "qwen3.5")
    heads = ((model.folder, "eagle3", head.folder), (own.folder, "mtp", None))
    for folder, mode, of_folder in heads:
        wanted = Wanted(folder, speculate=mode, draft_model=of_folder)
        assert of_ranks(wanted, 2, 1) == of_ranks(wanted, 1, 2) == []
    gemma = make_target(tmp_path / "gemma", "gemma4")
    wanted = Wanted(
        gemma.folder, speculate="mtp:3", draft_model=make_head(tmp_path / "of-gemma", gemma).folder
    )
    (found,) = of_ranks(wanted, 1, 2)
    assert found.startswith(
        "pipeline_parallel_size is 2, expected at most 1: layers 0 to 2 must be in one stage"
    )
    small = Wanted(model.folder, kv_cache_dir=tmp_path, kv_cache_disk_bytes=1024)
    (found,) = of_ranks(small, 2, 1)
    assert found.startswith(
        "--kv-cache-disk is 1024 bytes, and the file of one KV block on each of 2 ranks has"
    )


def test_a_gemma_4_head_of_another_model(tmp_path: Path) -> None:
    model = make_target(tmp_path / "model", "gemma4")
    head = make_head(tmp_path / "head", model)
    options = Wanted(model.folder, speculate="mtp:3", draft_model=head.folder)
    assert not [*preflight.problems(ServerOptions(wanted=options))]
    found = problem(DEMO_MODEL, speculate="mtp:3", draft_model=head.folder)
    assert found.endswith(f"expected a head for {DEMO_MODEL}, which is not a Gemma 4")
    wider = make_head(tmp_path / "wider", model, backbone_hidden_size=96)
    found = problem(model.folder, speculate="mtp:3", draft_model=wider.folder)
    assert "key 'backbone_hidden_size' is 96, expected 64, the hidden_size of" in found


def test_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "t5", "T5ForConditionalGeneration", is_encoder_decoder=True)
    assert "is T5ForConditionalGeneration, an encoder with a decoder" in problem(folder)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification"])
def test_models_that_compute_no_next_token(tmp_path: Path, architecture: str) -> None:
    assert "computes embeddings or classes" in problem(make_checkpoint(tmp_path / "bert", architecture))


def with_pooling(folder: Path, mode: str) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_a_decoder_without_output_projection_is_for_embeddings_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bare", "Qwen3Model")
    told = problem(folder)
    assert "is Qwen3Model, a decoder without its output projection, which --convert embed serves" in told
    assert preflight.unservable(folder, None) is not None  # it has no sizes
    with_pooling(folder, "lasttoken")
    assert "without its output projection" not in " ".join(
        preflight.problems(ServerOptions(wanted=Wanted(folder)))
    )


def test_a_decoder_that_classifies(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "classifier")
    assert not list(preflight.problems(ServerOptions(wanted=Wanted(folder))))
    text = ServerOptions(wanted=Wanted(folder), openai=OpenAiOptions(convert="none"))
    (told,) = preflight.problems(text)
    assert "a decoder without its output projection, which --convert auto or embed serves" in told
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "model.safetensors has no tensor score.weight" in problem(folder)


def test_an_encoder_is_refused_by_its_class_and_a_decoder_by_its_pooling(tmp_path: Path) -> None:
    encoder = with_pooling(make_checkpoint(tmp_path / "bert", "XLMRobertaModel"), "cls_token")
    assert "is XLMRobertaModel, which computes embeddings or classes" in problem(encoder)
    decoder = with_pooling(make_checkpoint(tmp_path / "mean", "Qwen3ForCausalLM"), "mean_tokens")
    assert "has the pooling mean_tokens, expected lasttoken" in problem(decoder)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs(tmp_path: Path, file: str) -> None:
    folder = make_checkpoint(tmp_path / "llama", "LlamaForCausalLM")
    (folder / file).write_text(POINTER)
    assert f"{folder / file} is a pointer of Git LFS instead of the file: run `git lfs pull`" in problem(
        folder
    )


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    assert "no LoRA adapter in that folder" in problem(DEMO_MODEL, adapters=(("sql", tmp_path),))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer_dir", "{missing}", "there is no such folder"),
        ("lora_dir", "{file}", "a file, expected a folder"),
        ("receipt_key_file", "{missing}", "there is no such file"),
        ("logits_post_processor_module", "{missing}/rules.py", "there is no such file"),
        ("record_path", "{missing}/trace", "its folder {missing} does not exist"),
        ("record_path", "/proc/trace", "no file can be made in /proc: No such file or directory"),
        ("debug_tensors_dir", "{file}/tensors", "{file} is not a folder"),
        ("debug_tensors_dir", "/proc/tensors", "no file can be made in /proc: No such file or directory"),
        ("engine_endpoint", "{missing}/engine.sock", "its folder {missing} does not exist"),
        ("engine_endpoint", f"/tmp/{'e' * 103}", "longer than the 107 bytes of a socket's path"),
    ],
)
def test_files_and_folders_that_settings_name(key: str, value: str, said: str, tmp_path: Path) -> None:
    places = {"missing": str(tmp_path / "missing"), "file": str(tmp_path / "file")}
    (tmp_path / "file").touch()
    value, said = value.format(**places), said.format(**places)
    assert problem(DEMO_MODEL, settings={key: value}) == f"--set {key}={value}: {said}"


@pytest.mark.parametrize(
    "option",
    [
        *("--model", "--draft-model", "--model-repository", "--lora a=", "--set tokenizer_dir="),
        *("--set record_path=", "--set receipt_key_file="),
    ],
)
def test_a_path_that_the_system_refuses(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As in a folder that this user may not search, which root may.
    path = tmp_path / ("n" * 300) / "file"
    flag, _, name = option.partition(" ")
    assert serve_command.main([flag, f"{name}{path}", "--no-triton", "--port", "0"]) == OptionError.exit_code
    assert capsys.readouterr().err in {f"serve: {each}: File name too long\n" for each in (path, path.parent)}


def test_adapters_whose_files_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (tmp_path / "adapter_model.safetensors").touch()
    found = problem(DEMO_MODEL, adapters=(("sql", tmp_path),))
    assert found == f"--lora sql={tmp_path}: adapter_config.json: peft_type is 'IA3', expected 'LORA'"
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "is no safetensors file: download it again" in problem(DEMO_MODEL, adapters=(("sql", tmp_path),))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"default_end_ids": "99999"}, "default_end_ids has 99999, expected token ids in [0, 3071]"),
        ({"speculative_decoding_mode": "mtp:2"}, "expected a family with a draft head"),
        ({"engine": "transformers", "dtype": "fp8"}, "dtype is fp8, expected float32, bfloat16 or float16"),
        (
            {"max_tokens_in_paged_kv_cache": "2047"},
            "max_tokens_in_paged_kv_cache is 2047, expected at least 2048: one block of 32 tokens",
        ),
        ({"gpu_device_ids": "0"}, "gpu_device_ids has 0, but this machine has no NVIDIA GPU"),
    ],
)
def test_settings_that_the_model_or_the_machine_lacks(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    options = ServerOptions(wanted=Wanted(DEMO_MODEL, settings=settings))
    (found,) = preflight.problems(options, tmp_path)
    assert said in found


def test_an_invalid_setting() -> None:
    found = problem(DEMO_MODEL, settings={"max_num_tokens": "x"})
    assert found.startswith("--set max_num_tokens (or --max-num-batched-tokens or --max-num-tokens): got 'x'")
    assert problem(DEMO_MODEL, settings={"enable_kv_cache_reuse": "x"}).startswith(
        "--set enable_kv_cache_reuse: got 'x'"
    )


def test_sequences_that_the_models_positions_do_not_reach() -> None:
    found = problem(DEMO_MODEL, settings={"max_sequence_length": "1025"})
    assert found.startswith(
        "max_sequence_length is 1025, expected at most 1024, which is how far the positions of "
    )
    options = ServerOptions(wanted=Wanted(DEMO_MODEL, settings={"max_sequence_length": "1024"}))
    assert not [*preflight.problems(options)]


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Return a function that lets a share of the size of the demo model's files be available as memory."""
    monkeypatch.setattr(preflight, "has_gpu", lambda root: False)
    size = (DEMO_MODEL / "model.safetensors").stat().st_size
    return lambda share: monkeypatch.setattr(preflight, "available_cpu_memory", lambda: int(share * size))


def test_weights_that_exceed_the_memory(little_memory: Limit) -> None:
    little_memory(0.1)
    assert "GiB of weights in bfloat16, and" in problem(DEMO_MODEL)
    assert not list(preflight.problems(ServerOptions(wanted=Wanted(DEMO_MODEL, weights="mmap"))))
    elsewhere = ServerOptions(wanted=Wanted(DEMO_MODEL), write_repository=Path("models"))
    assert not list(preflight.problems(elsewhere)), "another machine's memory counts"


@pytest.mark.parametrize(
    ("dtype", "fits", "exceeds", "advised"),
    [
        (None, 1.01, 0.9, "--dtype int8, --weights mmap or a machine"),
        ("float16", 1.01, 0.9, "take --dtype int8 or a machine"),
        ("float32", 2.01, 1.9, "--dtype bfloat16, --weights mmap or a machine"),
        ("float32", 2.01, 0.9, "--dtype int8, --weights mmap or a machine"),
        ("float32", 2.01, 0.4, "take --weights mmap or a machine"),
        ("int8", 0.51, 0.4, "take --weights mmap or a machine"),
        ("fp8", 0.51, 0.4, "take a machine"),
    ],
)
def test_weights_of_a_given_dtype(
    dtype: str | None, fits: float, exceeds: float, advised: str, little_memory: Limit
) -> None:
    little_memory(fits)
    assert not list(preflight.problems(ServerOptions(wanted=Wanted(DEMO_MODEL, dtype=dtype))))
    little_memory(exceeds)
    assert advised in problem(DEMO_MODEL, dtype=dtype)


def test_weights_in_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "has_gpu", lambda root: False)
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)
    file = write_gguf(tmp_path / "m.gguf", "llama-wide", "Q4_0").folder
    folder, size = checkpoint_of(file), file.stat().st_size
    for dtype, growth in ((None, 0.8), ("float32", 6)):
        monkeypatch.setattr(preflight, "available_cpu_memory", lambda free=int(growth * size): free)
        assert "GiB of weights" in problem(folder, dtype=dtype), growth
        assert not list(preflight.problems(ServerOptions(wanted=Wanted(folder, dtype=dtype, weights="mmap"))))
        monkeypatch.setattr(preflight, "available_cpu_memory", lambda free=int(1.5 * growth * size): free)
        assert not list(preflight.problems(ServerOptions(wanted=Wanted(folder, dtype=dtype)))), growth


def test_weights_of_several_ranks_count_together(
    little_memory: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_memory(0.9)
    for name in list(os.environ):
        if name.startswith(preflight.HOST_VARIABLES):
            monkeypatch.delenv(name)
    options = ServerOptions(wanted=Wanted(DEMO_MODEL), tp=2)
    (found,) = preflight.problems(options)
    assert "GiB of weights" in found
    assert not list(preflight.problems(replace(options, mpirun_arguments="--host a,b")))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert not list(preflight.problems(options)), "the job may have other machines"


def test_weights_that_transformers_code_would_read_are_not_mapped(
    tmp_path: Path, little_memory: Limit
) -> None:
    little_memory(0)
    folder = make_checkpoint(tmp_path / "phi", "PhiForCausalLM", model_type="phi", dtype="bfloat16")
    save_file({"a": torch.zeros(64, 64)}, folder / "model.safetensors")
    said = problem(folder, weights="mmap")
    assert "GiB of weights in bfloat16" in said and said.endswith(
        "are available: take a machine with more memory"
    )


def warn(monkeypatch: pytest.MonkeyPatch, free: int, **wanted: Any) -> list[str]:
    """Return the warnings about the demo model with `free` bytes on every disk."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free, 0, free))
    return [*preflight.warnings(ServerOptions(wanted=Wanted(DEMO_MODEL, **wanted)))]


def test_a_disk_without_room_for_saved_kv_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, of_cache = tmp_path / "kv", {"kv_cache_dir": tmp_path / "kv", "kv_cache_disk_bytes": 3 << 30}
    assert not warn(monkeypatch, 3 << 30, **of_cache)
    (found,) = warn(monkeypatch, 2 << 30, **of_cache)
    assert found.startswith(f"--kv-cache-dir: {folder}, 2.0 GiB free, and --kv-cache-disk is 3.0 GiB: ")
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "blocks").touch()
    os.truncate(folder / "model" / "blocks", 1 << 30)
    assert not warn(monkeypatch, 2 << 30, **of_cache), "files of earlier servers are part of the limit"


def test_a_cache_without_room_for_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "has_gpu", lambda root: False)
    monkeypatch.setattr(preflight, "full_for_compiled_layers", lambda dtype, int8: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not warn(monkeypatch, 1 << 20)
    (found,) = warn(monkeypatch, 1 << 20, weights="mmap")
    assert found.startswith(
        f"{tmp_path}/inflight, 1 MiB free, and the file of --weights mmap takes at least "
    )
    (tmp_path / "inflight" / "packed").mkdir()
    (tmp_path / "inflight" / "packed" / f"{DEMO_MODEL.name}-0123.weights").touch()
    assert not warn(monkeypatch, 1 << 20, weights="mmap"), "the file was written before"


def test_a_cache_without_room_for_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "has_gpu", lambda root: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disks, "foresee", lambda dtype, int8: "c++ compiles them at the first start")
    (found,) = warn(monkeypatch, 31 << 20)
    assert found.startswith(f"{tmp_path}/inflight, 31 MiB free: the compiled layers may not fit; ")
    assert not warn(monkeypatch, 32 << 20) and not warn(monkeypatch, 1 << 20, settings={"kernels": "torch"})
    monkeypatch.setattr(disks, "foresee", lambda dtype, int8: "kept from an earlier start")
    assert not warn(monkeypatch, 1 << 20)


def test_a_full_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage(100, 99, 1))
    assert "set TMPDIR to another folder" in problem(DEMO_MODEL)


def test_shared_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    full = red("/dev/shm", "3 of 64 MiB free; the models need 24 MiB to start", "docker run --shm-size=1g")
    monkeypatch.setattr(preflight, "check_shared_memory", lambda: [full])
    assert problem(DEMO_MODEL) == (
        "/dev/shm: 3 of 64 MiB free; the models need 24 MiB to start: docker run --shm-size=1g"
    )
    options = ServerOptions(wanted=Wanted(DEMO_MODEL), triton=False)
    assert not list(preflight.problems(options)), "only Triton's models need it"


def test_an_unknown_family(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "foo", "FooForCausalLM", model_type="foo")
    assert f"{folder} is FooForCausalLM, which is none of the" in problem(folder)
    assert "which is none of the" in problem(folder, settings={"engine": "torch"})


def test_a_missing_tokenizer_is_a_warning(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "LlamaForCausalLM")
    (warning,) = preflight.warnings(ServerOptions(wanted=Wanted(folder)))
    assert "no tokenizer.json: only requests with token ids are served" in warning


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    file = folder / "tokenizer.json"
    os.truncate(file, 500)
    said, mend = f"{file} cannot be read as JSON: ", ": download it again, or remove it to serve requests"
    for found in (problem(folder), problem(DEMO_MODEL, settings={"tokenizer_dir": str(folder)})):
        assert found.startswith(said) and mend in found
    file.unlink()
    assert not list(preflight.problems(ServerOptions(wanted=Wanted(folder))))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_truncated_file_is_to_be_downloaded_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / name).write_text('{"a": [1, ')
    found = problem(folder)
    assert found.startswith(f"{folder / name} cannot be read as JSON: ") and found.endswith(
        ": download it again"
    )


def test_missing_and_damaged_weights(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, 100_000)
    assert problem(folder) == f"{weights} is cut off: it has 100000 of {size} bytes: download it again"
    weights.write_bytes(bytes(8))
    assert problem(folder) == f"{weights} is no safetensors file: download it again"
    weights.unlink()
    assert problem(folder) == f"{folder} has no model.safetensors: download the checkpoint again"
    (folder / "pytorch_model.bin").touch()
    found = problem(folder)
    assert "has no model.safetensors, only pytorch_model.bin" in found and "save_pretrained" in found
    for damaged, reason in (("{", "Expecting property name"), ("{}", "it has no object weight_map")):
        (folder / "model.safetensors.index.json").write_text(damaged)
        assert f"{folder / 'model.safetensors.index.json'} cannot be read: {reason}" in problem(folder)
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").unlink()
    shutil.copy(DEMO_MODEL / "model.safetensors", folder / "model-1-of-2.safetensors")
    assert "has no model-2-of-2.safetensors" in problem(folder)


def test_serve_says_the_reason_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "bert", "BertModel")
    assert serve_command.main([str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"serve: {folder} is BertModel")


def test_a_misspelled_parameter_is_answered_with_max_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_command.main(["--set", "max_batch_sizes=3"]) == 2
    assert "did you mean max_batch_size?" in capsys.readouterr().err


def test_the_launcher_imports_no_torch() -> None:
    program = (
        "import sys, inflight.serve_command, inflight.doctor.preflight; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_decoder_without_the_tokens_of_scores(tmp_path: Path) -> None:
    def told_of(model: Path | None, **settings: str) -> list[str]:
        wanted = Wanted(model, settings=settings)
        return [*preflight.problems(ServerOptions(wanted=wanted, openai=OpenAiOptions(convert="classify")))]

    told = (
        "--convert classify: this model's tokenizer has no token 'yes', of which scores are made: name a reranker "
        "by --model"
    )
    assert told_of(DEMO_MODEL) == told_of(None) == [told]
    reranker = make_qwen3(tmp_path / "reranker")
    assert told_of(reranker) == []
    assert told_of(reranker, tokenizer_dir=str(DEMO_MODEL)) == [told]
    (reranker / "tokenizer.json").unlink()
    (found,) = told_of(reranker)
    assert found.startswith("--convert classify: ") and "tokenizer.json" in found


def test_an_interrupt_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    laid_out: list[Path] = []

    def lay_out(options: ServerOptions, target: Path) -> RuntimeRepository:
        laid_out.append(target)
        signal.raise_signal(signal.SIGINT)
        return launch.lay_out(options, target)

    monkeypatch.setattr(preflight, "lay_out", lay_out)
    with pytest.raises(KeyboardInterrupt):
        list(preflight.problems(ServerOptions(wanted=Wanted(DEMO_MODEL))))
    assert len(laid_out) == 1 and laid_out[0].is_relative_to(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_for_kv_blocks_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert (
        problem(DEMO_MODEL, kv_cache_dir=file / "kv") == f"--kv-cache-dir {file}/kv: {file} is not a folder"
    )
    assert not list(
        preflight.problems(ServerOptions(wanted=Wanted(DEMO_MODEL, kv_cache_dir=tmp_path / "new" / "kv")))
    )
    assert not (tmp_path / "new").exists()


def test_a_folder_for_kv_blocks_in_which_no_file_can_be_made(tmp_path: Path) -> None:
    # In /proc not even root can make a file.
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, reason in (
        ("nowhere", f"{tmp_path}/nowhere is not a folder"),
        ("nowhere/kv", f"{tmp_path}/nowhere is not a folder"),
        ("n" * 300, "File name too long"),
    ):
        assert (
            problem(DEMO_MODEL, kv_cache_dir=tmp_path / name) == f"--kv-cache-dir {tmp_path / name}: {reason}"
        )
    wanted = "--kv-cache-dir /proc/kv/blocks: no file can be made in /proc: "
    assert problem(DEMO_MODEL, kv_cache_dir=Path("/proc/kv/blocks")).startswith(wanted)


def test_a_folder_for_kv_blocks_in_which_another_server_has_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "_ENDS_S", 0.05)
    wanted = Wanted(DEMO_MODEL, kv_cache_dir=tmp_path)
    parameters = preflight._parameters(ServerOptions(wanted=wanted))
    assert parameters is not None
    label = label_of_blocks(parameters, str(DEMO_MODEL))
    files = BlockFiles(tmp_path, "0" * 32, 1000, 1 << 20, 1e6, label=label)
    told = "another server uses the blocks of this model there; give each server a folder of its own"
    assert problem(DEMO_MODEL, kv_cache_dir=tmp_path) == f"--kv-cache-dir {tmp_path}: {told}"
    alike = replace(
        wanted, kv_cache_disk_bytes=1 << 30, settings={"max_num_tokens": "64", "max_queue_size": "5"}
    )
    assert list(preflight.problems(ServerOptions(wanted=alike))) == [f"--kv-cache-dir {tmp_path}: {told}"]
    for other in (replace(wanted, dtype="float32"), replace(wanted, settings={"tokens_per_block": "16"})):
        assert not list(preflight.problems(ServerOptions(wanted=other)))
    files.close()
    assert not list(preflight.problems(ServerOptions(wanted=wanted)))


def test_files_and_sockets_that_another_server_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "_ENDS_S", 0.05)
    batches, store, path = tmp_path / "batches", tmp_path / "store", tmp_path / "socket"

    def found() -> list[str]:
        openai = OpenAiOptions(batch_dir=batches, response_store=store)
        wanted = Wanted(DEMO_MODEL, settings={"engine_endpoint": str(path)})
        return list(preflight.problems(ServerOptions(wanted=wanted, openai=openai, ports=Ports(openai=0))))

    assert not found()
    with (
        contextlib.closing(BatchFolder(batches, 1 << 20)),
        contextlib.closing(ResponseFile(store)),
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(str(path))
        listener.listen()
        assert found() == [
            f"--batch-dir {batches}: another server uses this folder; give each server a folder of its own"
        ]
        batches = tmp_path / "other"
        assert found() == [
            f"--response-store {store}: another server uses this file; give each server a file of its own"
        ]
        store = tmp_path / "other store"
        (said,) = found()
        assert said.startswith(f"--set engine_endpoint={path}: another server listens there")
    batches, store = tmp_path / "batches", tmp_path / "store"
    assert not found()
    assert not {"other", "other store"} & {each.name for each in tmp_path.iterdir()}, "no file is made"


def test_a_folder_for_kv_blocks_of_another_machine_is_not_looked_at(tmp_path: Path) -> None:
    wanted = Wanted(DEMO_MODEL, kv_cache_dir=Path("/proc/kv"))
    assert not list(preflight.problems(ServerOptions(wanted=wanted, write_repository=tmp_path / "models")))


def test_settings_with_which_kv_blocks_are_not_saved(tmp_path: Path) -> None:
    assert "which is missing" in problem(DEMO_MODEL, kv_cache_disk_bytes=1 << 30)
    no_reuse = {"enable_kv_cache_reuse": "false"}
    assert "no request would find a saved KV block" in problem(
        DEMO_MODEL, kv_cache_dir=tmp_path, settings=no_reuse
    )
    ranks = ServerOptions(wanted=Wanted(DEMO_MODEL, kv_cache_dir=tmp_path), tp=2)
    assert not list(preflight.problems(ranks))
