"""Findings about checkpoints: the demo model, and copies of it with faults."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from inflight.doctor.checkpoint import check_checkpoint
from inflight.doctor.finding import Finding
from inflight.engine import load_decoder, memory
from inflight.engine.cpu import library
from inflight.gguf import folder as gguf_folder
from inflight.models import checkpoint as stored
from inflight.server.repository import default_repository
from inflight.testing.make_model import make_model as make_random_model
from tests.engine.kernels import needs_native
from tests.models.gguf_files import write as write_gguf
from tests.models.mxfp4 import pack
from tests.models.sparse_files import write_35b_mixture
from tests.models.zoo import make_model
from tests.openai_endpoint.small_models import make_classifier, make_qwen3, write_pooling
from tests.tiers import with_all

from .test_machine import GREEN, RED, YELLOW

DEMO = default_repository() / "tensorrt_llm" / "1" / "demo_model"


def check(folder: Path, dtype: str | None = None, **settings: str) -> dict[str, Finding]:
    return {found.name: found for found in check_checkpoint(str(folder), None, dtype, settings)}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "copy"))


def change(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_demo_model_is_described():
    found = check(DEMO, "float32")
    weights = sum(tensor.numel() * 4 for tensor in load_file(DEMO / "model.safetensors").values())
    assert found["checkpoint"].level is GREEN
    says = f"LlamaForCausalLM, 4 layers, {weights / 4e6:.2f} million parameters, {weights / 2**20:.1f} MiB"
    assert f"{says} of weights in float32, stored as bf" in found["checkpoint"].says
    assert "not quantized" in found["checkpoint"].says
    assert found["room"].level is GREEN and "131072 tokens" in found["room"].says
    assert found["tokenizer"].says == "3072 tokens"


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("bad", "good"), "classifies texts, 2 classes (bad, good): /v1/classify"),
        (("relevant",), "classifies texts, 1 class (relevant): /v1/classify, /v1/rerank and /v1/score"),
        (tuple("abcdefg"), "classifies texts, 7 classes (a, b, c, d, e, …): /v1/classify"),
    ],
)
def test_a_checkpoint_that_classifies(tmp_path: Path, labels: tuple[str, ...], says: str):
    found = check(make_classifier(tmp_path / "classifier", labels=labels))
    assert (found["task"].level, found["task"].says) == (GREEN, says)
    assert found["checkpoint"].says.startswith("Qwen3ForSequenceClassification, 2 layers")


def test_a_head_that_is_missing(tmp_path: Path):
    folder = make_classifier(tmp_path / "classifier")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")
    found = check(folder)["task"]
    assert found.level is RED and "no tensor score.weight" in found.says


def test_a_checkpoint_that_embeds(tmp_path: Path):
    found = check(write_pooling(make_qwen3(tmp_path / "embedder")))
    assert (found["task"].level, found["task"].says) == (GREEN, "embeds texts: /v1/embeddings")
    other = check(write_pooling(make_qwen3(tmp_path / "other"), "mean_tokens"))
    assert other["checkpoint"].level is RED and "has the pooling mean_tokens" in other["checkpoint"].says
    assert "task" not in check(DEMO)


def test_plans_need_a_gpu_and_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.engine.tensorrt import engines

    folder = engines.build(DEMO, tmp_path / "plans")
    found = check(folder)
    assert found["plans"].level is RED
    says = "LlamaForCausalLM, 4 layers of float32, 6 slots of 128 tokens, 1 rank(s)"
    assert found["plans"].says.startswith(says) and "this machine has no GPU" in found["plans"].says
    assert found["tokenizer"].says == "3072 tokens"
    assert "have 6 slots" in check(folder, max_batch_size="9")["plans"].says
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    assert check(folder)["plans"].level is YELLOW
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert "this one has 9.0: TensorRT for RTX does not run on it" in check(folder)["plans"].says


@pytest.mark.parametrize(
    "case", with_all(["mixtral", "qwen2-moe", "olmoe", "gpt-oss"], ["qwen2-moe", "gpt-oss"])
)
def test_all_and_active_parameters_of_a_mixture_are_reported(tmp_path: Path, case: str):
    """The finding has the number of all parameters, and of those that are active for a token."""
    model = make_model(tmp_path / "model", case)
    config = model.oracle.config
    sizes = {name: parameter.numel() for name, parameter in model.oracle.named_parameters()}
    total, of_experts = sum(sizes.values()), sum(sizes[name] for name in sizes if ".experts." in name)
    idle = 1 - config.num_experts_per_tok / config.num_experts
    active = total - round(of_experts * idle)
    says = check(model.folder, "float32")["checkpoint"].says
    assert says.startswith(
        f"{type(model.oracle).__name__}, 3 layers, {total / 1e6:.2f} million parameters, "
        f"{active / 1e6:.2f} million of them active for a token, "
    )


def test_the_text_part_of_a_multimodal_model_is_described(tmp_path: Path):
    found = check(make_model(tmp_path / "model", "qwen2.5-vl").folder, "float32")
    assert found["checkpoint"].says.startswith("Qwen2_5_VLForConditionalGeneration, 3 layers, ")
    assert found["inputs"].level is YELLOW
    assert found["inputs"].says.endswith("alone is served: requests with pictures and videos are refused")


def test_packed_experts_are_described(tmp_path: Path):
    folder = make_model(tmp_path / "model", "gpt-oss").folder
    plain = check(folder, "bfloat16")["checkpoint"].says
    pack(folder)
    packed = check(folder, "bfloat16")["checkpoint"]
    assert packed.level is GREEN
    assert packed.says == plain.replace("not quantized", "mxfp4 unpacked when it is loaded")


@pytest.mark.exhaustive
def test_the_room_for_a_mixture_of_35b_in_4_bits_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_35b_mixture(tmp_path, "int4")
    monkeypatch.setattr(memory, "available_cpu_memory", lambda: 24 << 30)
    room = check(tmp_path, max_batch_size="8")["room"]
    assert "24.00 GiB of memory: 19.56 GiB for weights, 1.50 GiB for recurrent states, 1.4" in room.says
    assert room.level is YELLOW and "less than one sequence of 262144 tokens" in room.says


def test_settings_change_the_reported_room_for_tokens():
    room = check(DEMO, max_batch_size="4", max_sequence_length="64")["room"]
    assert f"{2 * 4 * 64} tokens" in room.says


def test_an_8_bit_kv_cache_has_room_for_more_tokens():
    rooms = [
        check(DEMO, max_batch_size="16", kv_cache_free_cpu_mem_fraction="0.001", **more)["room"]
        for more in ({}, {"kv_cache_dtype": "int8"})
    ]
    tokens = [int(re.findall(r"KV cache of (\d+) tokens", room.says)[0]) for room in rooms]
    assert "tokens in int8" in rooms[1].says
    assert tokens[1] > 1.7 * tokens[0]
    refused = check(DEMO, no_such_parameter="1")["checkpoint"]
    assert refused.level is RED and "no_such_parameter" in refused.says


@pytest.mark.parametrize(
    ("plant", "says", "mend"),
    [
        (
            lambda folder: change(folder, quantization_config={"quant_method": "bitsandbytes"}),
            "bitsandbytes' formats need its own kernels",
            "--dtype int8",
        ),
        (lambda folder: change(folder, architectures=["NoForCausalLM"]), "architectures", "supported family"),
        (lambda folder: change(folder, architectures=["BertModel"]), "embeddings", "families"),
        (lambda folder: change(folder, num_hidden_layers=5), "missing", "download"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 8),
            "cannot be read as safetensors",
            "download",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "safetensors files only",
            "save_pretrained",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "JSON", "download"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json", "name its folder"),
    ],
)
def test_a_faulty_checkpoint_is_reported_with_a_fix(
    copy: Path, plant: Callable[[Path], object], says: str, mend: str
):
    plant(copy)
    found = check(copy)["checkpoint"]
    assert found.level is RED and says in found.says and mend in found.mend


def test_weights_for_transformers_code_that_do_not_fit_are_reported(monkeypatch: pytest.MonkeyPatch):
    assert "room" not in check(DEMO, engine="transformers")
    monkeypatch.setattr(memory, "available_cpu_memory", lambda: 1 << 20)
    room = check(DEMO, engine="transformers")["room"]
    assert room.level is RED and "the weights do not fit: they take " in room.says


def test_checkpoints_that_transformers_would_run_are_reported(copy: Path, monkeypatch: pytest.MonkeyPatch):
    asked = check(DEMO, engine="transformers")["its layers"]
    assert asked.level is YELLOW and "transformers' own code (LlamaForCausalLM)" in asked.says
    change(copy, model_type="nemotron", architectures=["NemotronForCausalLM"])
    by_itself = check(copy)["its layers"]
    assert by_itself.level is YELLOW and "transformers' own code (NemotronForCausalLM)" in by_itself.says
    refused = check(copy, engine="torch")["checkpoint"]
    assert refused.level is RED and "expected one of LlamaForCausalLM" in refused.says
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = check(copy)["checkpoint"]
    assert missing.level is RED and "is not installed" in missing.says and "[transformers]" in missing.mend


def test_a_file_that_cannot_be_mapped_is_reported(copy: Path, monkeypatch: pytest.MonkeyPatch):
    def too_large(*_: object, **__: object) -> None:
        raise RuntimeError(
            "unable to mmap 136913201200 bytes from file <model.safetensors>: Cannot allocate memory"
        )

    monkeypatch.setattr(stored, "safe_open", too_large)
    found = check(copy)["checkpoint"]
    assert found.level is RED and "cannot be mapped" in found.says and "max_shard_size" in found.mend


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_batch_size": "10000"}, "max_num_tokens is 8192; it must be at least max_batch_size (10000)"),
        ({"kv_cache_free_cpu_mem_fraction": "3"}, "expected a number > 0 and <= 1"),
    ],
)
def test_settings_that_a_start_refuses_are_reported(settings: dict[str, str], says: str):
    found = check(DEMO, **settings)["checkpoint"]
    assert found.level is RED and says in found.says and "docs/settings.md" in found.mend


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tokenizer_dir": "/nowhere"}, "--set tokenizer_dir=/nowhere: there is no such folder"),
        ({"default_end_ids": "99999"}, "default_end_ids has 99999"),
    ],
)
def test_settings_that_name_what_is_not_there_are_reported(settings: dict[str, str], says: str):
    found = check(DEMO, **settings)["settings"]
    assert found.level is RED and says in found.says and "docs/settings.md" in found.mend


def test_a_folder_whose_name_is_not_utf8_is_reported(tmp_path: Path):
    folder = tmp_path / os.fsdecode("Modèle".encode("latin-1"))
    shutil.copytree(DEMO, folder)
    found = check(folder)["checkpoint"]
    assert found.level is RED and "name is not UTF-8" in found.says and found.mend == "rename the folder"


def test_a_missing_folder_is_reported(tmp_path: Path):
    found = check(tmp_path / "nothing")["checkpoint"]
    assert found.level is RED and "not a folder" in found.says and "name its folder" in found.mend


def test_weights_or_kv_cache_that_do_not_fit_are_reported(monkeypatch: pytest.MonkeyPatch):
    weights = sum(tensor.numel() * 2 for tensor in load_file(DEMO / "model.safetensors").values())
    for free, level, says in (
        (1 << 20, RED, "do not fit"),
        (weights + 500_000, RED, "fewer than one for each of 64 sequences"),
        (40 << 30, GREEN, "40.00 GiB"),
    ):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        found = check(DEMO)["room"]
        assert found.level is level and says in found.says, found
    monkeypatch.setattr(memory, "free_memory", lambda device: 40 << 30)
    found = check(DEMO, max_batch_size="1", max_tokens_in_paged_kv_cache="512")["room"]
    assert found.level is YELLOW and "max_sequence_length=512" in found.mend


@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_take_the_size_of_packed_weights(
    copy: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
):
    """Each number of a multiplied matrix takes one byte; the embedding and the norms stay bfloat16."""
    path = copy / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    if not tied:
        tensors["lm_head.weight"] = embedding + 1
        save_file(tensors, path)
        change(copy, tie_word_embeddings=False)
    vectors = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 1)
    matrices = sum(
        tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2 and "layers" in name
    )
    expected = matrices + embedding.numel() + 2 * (embedding.numel() + vectors)
    monkeypatch.setattr(library, "foresee", lambda *_: "kept from an earlier start")
    found = check(copy, "int8")
    assert f"{expected / 2**20:.1f} MiB of weights in int8" in found["checkpoint"].says
    monkeypatch.setattr(memory, "free_memory", lambda device: expected - 1)
    room = check(copy, "int8")["room"]
    assert room.level is RED and "do not fit" in room.says and "--dtype" not in room.mend
    assert "--dtype int8" in check(copy, "bfloat16")["room"].mend


def test_the_kernels_that_will_compute_the_layers_are_reported(monkeypatch: pytest.MonkeyPatch):
    def cannot(*_: object) -> str:
        raise library.CannotBuild("there is no C++ compiler")

    monkeypatch.setattr(library, "foresee", lambda *_: "kept from an earlier start")
    monkeypatch.setattr(library, "describe_target", lambda *_: "avx2: the processor lacks avx512f")
    found = check(DEMO)["its layers"]
    assert found.level is GREEN
    assert found.says == "compiled layers (avx2: the processor lacks avx512f), kept from an earlier start"
    monkeypatch.setattr(library, "foresee", cannot)
    assert check(DEMO)["its layers"].level is YELLOW
    monkeypatch.setattr(library, "foresee", lambda *_: "kept from an earlier start")
    monkeypatch.setattr(load_decoder, "MAX_HEAD_DIM", 8)
    found = check(DEMO)["its layers"]
    assert "head_dim up to 8" in found.says and "--dtype" not in found.mend
    found = check(DEMO, kernels="native")["its layers"]
    assert found.level is RED and "leave out" in found.mend


def test_the_chat_template_and_tokenizer_are_checked(copy: Path):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    assert check(copy)["chat template"].level is YELLOW
    (copy / "chat_template.jinja").write_text(template)
    assert check(copy)["chat template"].level is GREEN
    (copy / "chat_template.jinja").write_text("{% for %}")
    found = check(copy)["chat template"]
    assert found.level is YELLOW and "chats are refused" in found.says
    (copy / "tokenizer.json").write_text("{}")
    found = check(copy)
    assert found["tokenizer"].level is YELLOW and "chat template" not in found


@needs_native
@pytest.mark.parametrize(
    ("quantize", "says"), [("awq", "awq kept as it is (4 bits)"), ("fp8", "fp8 unpacked when")]
)
def test_handling_of_quantized_weights_is_reported(tmp_path: Path, quantize: str, says: str):
    make_random_model(tmp_path, quantize=quantize)
    found = check(tmp_path)
    assert says in found["checkpoint"].says
    assert "unpacked when" in check(tmp_path, "bfloat16")["checkpoint"].says


def test_packed_experts_are_kept(tmp_path: Path):
    make_random_model(tmp_path, "gpt_oss", quantize="mxfp4")
    kept, unpacked = (check(tmp_path, *dtype)["checkpoint"].says for dtype in ((), ("bfloat16",)))
    assert "mxfp4 kept as it is (4-bit floats)" in kept
    assert "mxfp4 unpacked when" in unpacked


def test_a_gguf_file_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)
    found = check(write_gguf(tmp_path / "m.gguf", "llama", "Q4_0", "Q8_0").folder)
    assert found["checkpoint"].level is GREEN
    assert found["checkpoint"].says.startswith("LlamaForCausalLM, 3 layers, ")
    assert "a GGUF file of Q4_0, Q8_0 " in found["checkpoint"].says
    says = check(write_gguf(tmp_path / "n.gguf", "llama", "Q4_1", "Q8_0").folder)["checkpoint"].says
    assert "Q4_1, Q8_0 kept as it is (8 bits in groups of inputs; Q4_1 unpacked)" in says
    assert found["room"].level is GREEN and found["tokenizer"].level is YELLOW


def test_a_gguf_file_that_cannot_be_read_is_reported_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path)
    file = write_gguf(tmp_path / "whole.gguf", "llama", "F32").folder
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    clamped = write_gguf(tmp_path / "clamped.gguf", "llama", "F32", attention_clamp__kqv=8).folder
    for faulty, says, mend in (
        (cut, "not a complete GGUF file", "download the file again"),
        (clamped, "llama.attention.clamp_kqv' is 8", "docs/models.md lists"),
    ):
        found = check(faulty)["checkpoint"]
        assert found.level is RED and says in found.says and mend in found.mend, found
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: None)
    assert "XDG_CACHE_HOME" in check(file)["checkpoint"].mend
