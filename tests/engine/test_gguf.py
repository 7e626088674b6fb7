"""GGUF files, loaded as they are: results equal transformers' with the weights that `gguf` dequantizes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM

from inflight.checkpoint_config import checkpoint_name
from inflight.config import EngineConfig
from inflight.core.request.request import OutputOptions, Request
from inflight.engine.cpu import layout
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cpu.packing import GROUPED
from inflight.engine.load_decoder import weight_bytes
from inflight.errors import ConfigError
from inflight.gguf import folder as gguf_folder
from inflight.gguf.header import FLOAT_TYPES, QUANTIZED_TYPES
from inflight.hub import find_checkpoint
from inflight.models.levels import MatrixKind
from inflight.models.loader import check_weights, quantized_kinds
from inflight.models.registry import read_model_description
from inflight.models.sharding import Part
from inflight.text.tokenizer import Tokenizer
from tests.engine.driver import alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.llama_cpp_tokens import llama_cpp_tokens, needs_llama_cpp
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve, to_torch
from tests.models.gguf_files import CASES, write, write_model
from tests.models.zoo import ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

DEMO_MODEL = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the folders of GGUF files in the test's own folder; compiled layers stay in the user's."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: path)
    return path


def _check(model: ZooModel, **settings: str | None) -> None:
    """Compare the engine's tokens and logits with the oracle's."""
    settings.setdefault("dtype", "float32")
    row = alone(load_engine(find_checkpoint(str(model.folder)), **settings), model.prompt(20), 6)
    assert row.generated == model.greedy(model.prompt(20), 6)
    exact = model.logits(row.tokens)[19:-1]
    torch.testing.assert_close(torch.stack(row.logits), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", with_all(list(CASES), ["llama", "llama-3", "qwen3", "phi3", "gemma3"]))
def test_logits_of_every_architecture_equal_those_of_the_model(tmp_path: Path, case: str) -> None:
    _check(write(tmp_path / "m.gguf", case, "F32"))


@pytest.mark.parametrize(
    "kind",
    with_all(
        ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4"], ["BF16", "Q4_0", "Q4_1", "Q8_0", "MXFP4"]
    ),
)
def test_logits_equal_those_of_dequantized_weights(tmp_path: Path, kind: str) -> None:
    _check(write(tmp_path / "m.gguf", "llama", kind))


@pytest.mark.parametrize(
    "kinds", with_all(["Q4_K", "Q5_K", "Q6_K", "Q4_K Q6_K Q4_0"], ["Q5_K", "Q4_K Q6_K Q4_0"])
)
def test_logits_equal_those_of_dequantized_k_blocks(tmp_path: Path, kinds: str) -> None:
    _check(write(tmp_path / "m.gguf", "llama-wide", *kinds.split()))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Q4_0", {MatrixKind.INT4}),
        ("Q5_0", {MatrixKind.INT8}),
        ("Q8_0", {MatrixKind.INT8}),
        ("Q6_K", {MatrixKind.INT8}),
        ("Q4_1", set()),
    ],
)
def test_matrices_stay_quantized_in_formats_that_hold_them(
    tmp_path: Path, kind: str, expected: set[MatrixKind]
) -> None:
    model = write(tmp_path / "m.gguf", "llama-wide" if kind == "Q6_K" else "llama", kind)
    folder = find_checkpoint(str(model.folder))
    assert set(quantized_kinds(read_model_description(folder))) == expected
    for kernels in (None, "torch"):
        engine = load_engine(folder, dtype=None, kernels=kernels)
        if isinstance(engine.runner.decoder, NativeDecoder):
            found = {layer.struct.down.kind for layer in engine.runner.decoder._packed}
            assert found == ({GROUPED[kind] for kind in expected} or {layout.ELEMENT})
        row = alone(engine, model.prompt(20), 2)
        exact = model.logits(row.tokens)[19:-1]
        error = (torch.stack(row.logits).float() - exact).std() / exact.std()
        assert error < 0.15, "only activations and products are rounded"


@needs_native
@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_the_output_projection_stays_in_8_bits(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A tied embedding is looked up in it, with the numbers that it represents."""
    model = write(tmp_path / "m.gguf", case, "Q8_0")
    folder = find_checkpoint(str(model.folder))
    with caplog.at_level(logging.INFO):
        engine = load_engine(folder, dtype=None)
    assert "(12 in 8 bits in groups of inputs)" in caplog.text
    assert "the output projection keeps it too" in caplog.text
    decoder = engine.runner.decoder
    assert isinstance(decoder, NativeDecoder) and decoder._lm_head.kind == layout.GROUPED_INT8
    assert (decoder._embedding is None) == (case == "llama-tied")
    ids = torch.arange(VOCAB_SIZE)
    assert torch.equal(decoder._look_up(ids), model.oracle.get_input_embeddings().weight.bfloat16())
    description = read_model_description(folder)
    config = EngineConfig(str(folder), dtype=None, device="cpu")
    expected = weight_bytes(config, description, CPU, Part.whole(description.decoder))
    held = [tensor for layer in decoder._packed for tensor in layer.tensors]
    held += [*decoder._lm_head_tensors, *([] if decoder._embedding is None else [decoder._embedding])]
    found = sum(tensor.nbytes for tensor in held)
    assert abs(found / expected - 1) < 0.05, "panels are whole, and norms are float32"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"attention_clamp__kqv": 8},
            r"key 'llama\.attention\.clamp_kqv' is 8, expected no such key: its effect is unknown",
        ),
        (
            {"attention_value__length": 4},
            r"key 'llama\.attention\.value_length' is 4, expected the key length, 8",
        ),
    ],
)
def test_a_key_that_may_change_the_computation_is_refused(
    tmp_path: Path, keys: dict[str, int], said: str
) -> None:
    model = write(tmp_path / "m.gguf", "llama", "F32", **keys)
    with pytest.raises(ConfigError, match=rf"m\.gguf: {said}"):
        find_checkpoint(str(model.folder))


@pytest.mark.parametrize(
    "kind", [each for each in GGMLQuantizationType if each.name not in FLOAT_TYPES + QUANTIZED_TYPES]
)
def test_types_that_are_not_read_are_refused_by_name(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """All types of the package `gguf`, among them every IQ type."""
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    block_bytes = GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("output.weight", np.zeros((1, block_bytes), np.uint8), raw_dtype=kind)
    _finish(writer)
    with pytest.raises(
        ConfigError, match=rf"tensor 'output\.weight' has type {kind.name}, expected one of F32"
    ):
        find_checkpoint(str(path))


def test_files_that_hold_no_whole_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, "llama", "Q8_0")
    whole = path.read_bytes()
    for damaged in (b"", b"GGUF", b"PK" + whole[2:], whole[:100], whole[:-1000]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"m\.gguf is not a complete GGUF file"):
            find_checkpoint(str(path))
    for architecture, key, value, said in (
        ("rwkv6", None, None, r"'general\.architecture' is 'rwkv6', expected one of llama, llama4"),
        ("llama", "general.type", "adapter", r"'general\.type' is 'adapter', expected 'model'"),
        ("llama", None, None, r"'llama\.embedding_length' is missing, expected an integer >= 1"),
    ):
        writer = GGUFWriter(path, architecture)
        if key is not None:
            writer.add_string(key, value)
        _finish(writer)
        with pytest.raises(ConfigError, match=rf"m\.gguf: key {said}"):
            find_checkpoint(str(path))


@pytest.fixture
def parts(tmp_path: Path) -> tuple[ZooModel, list[Path]]:
    """A model in three files, and their paths."""
    (tmp_path / "split").mkdir()
    model = write(tmp_path / "split" / "m.gguf", "llama", "Q8_0", most_tensors=10)
    return model, sorted(model.folder.parent.iterdir())


@pytest.mark.parametrize("named", [0, 2])
def test_a_model_in_several_files_is_loaded(parts: tuple[ZooModel, list[Path]], named: int) -> None:
    """Any of the files names the model."""
    model, paths = parts
    assert [path.name for path in paths] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    folder = find_checkpoint(str(paths[named]))
    assert folder == find_checkpoint(str(paths[0])) and checkpoint_name(folder) == "m"
    _check(ZooModel(folder, model.oracle))


def test_links_to_the_parts_of_a_model_are_followed(
    parts: tuple[ZooModel, list[Path]], tmp_path: Path
) -> None:
    """The hub's cache has links with the names of parts, to files that have others."""
    (tmp_path / "links").mkdir()
    for index, path in enumerate(parts[1]):
        path.rename(tmp_path / f"{index}")
        (tmp_path / "links" / path.name).symlink_to(tmp_path / f"{index}")
    folder = find_checkpoint(str(tmp_path / "links" / parts[1][0].name))
    check_weights(read_model_description(folder))


def test_parts_of_a_model_that_are_missing_or_have_wrong_names_are_refused(
    parts: tuple[ZooModel, list[Path]],
) -> None:
    first, second, third = parts[1]
    aside = second.rename(second.with_name("aside.gguf"))
    with pytest.raises(
        ConfigError, match=r"m-00002-of-00003\.gguf: .* does not exist; it is part 2 of 3 of m"
    ):
        find_checkpoint(str(first))
    with pytest.raises(
        ConfigError, match=r"'split\.count' is 3, expected 1, or a name such as MODEL-00001-of"
    ):
        find_checkpoint(str(aside))
    third.rename(second)
    aside.rename(third)
    with pytest.raises(ConfigError, match=r"m-00002-of-00003\.gguf: key 'split\.no' is 2, expected 1"):
        find_checkpoint(str(first))


@pytest.mark.parametrize("name", ["absent.gguf", "owner/absent.gguf", "/absent/absent.gguf"])
def test_a_gguf_file_that_does_not_exist_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match=r"/absent\.gguf: the GGUF file does not exist$"):
        find_checkpoint(name)


def test_a_tensor_of_another_shape_or_name_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", "llama", "F32", feed__forward__length=97)
    with pytest.raises(ConfigError, match=r"model\.gguf: tensor .*mlp.* \[.*96.*\], expected \[.*97.*\]"):
        check_weights(read_model_description(find_checkpoint(str(model.folder))))


def test_the_folder_of_a_gguf_file_is_made_once_and_after_each_change(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "Some-Model-Q8_0.gguf"
    write(path, "llama", "Q8_0")
    folder = find_checkpoint(str(path))
    assert checkpoint_name(folder) == "Some-Model-Q8_0"
    made = (folder / "config.json").stat().st_mtime_ns
    assert find_checkpoint(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    write(path, "llama-tied", "F32")
    assert find_checkpoint(str(path)) != folder
    assert len(list((cache / "gguf").iterdir())) == 2


@pytest.mark.parametrize(("tp", "pp"), with_all([(2, 1), (1, 2)], [(2, 1)]))
def test_ranks_split_a_gguf_files_weights(tmp_path: Path, tp: int, pp: int) -> None:
    model = write(tmp_path / "m.gguf", "llama", "Q4_0")
    requests = [Request(number, model.prompt(9 + number, number), 8) for number in range(3)]
    with ranks(find_checkpoint(str(model.folder)), (tp, pp)) as engine:
        served = serve(engine, config_of("chunked"), requests)
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 8)


@needs_native
@pytest.mark.parametrize(("tp", "pp"), with_all([(2, 1), (1, 2)], [(2, 1)]))
def test_ranks_keep_8_bits_in_groups(tmp_path: Path, tp: int, pp: int) -> None:
    """Two ranks have 48 of 96 inputs each: groups of 32 become groups of 16, whose inputs are rounded less."""
    model = write(tmp_path / "m.gguf", "llama-tied", "Q8_0")
    output = OutputOptions(return_generation_logits=True)
    request = Request(1, model.prompt(30), 1, output=output)
    with ranks(find_checkpoint(str(model.folder)), (tp, pp), dtype=None) as engine:
        served = serve(engine, config_of("chunked"), [request])
    exact = model.logits(request.input_token_ids)[-1]
    (logits,) = served.result(request).generation_logits
    assert (to_torch(logits)[0] - exact).square().mean().sqrt() < 0.15 * exact.std()


def test_the_demo_model_as_a_gguf_file_gives_the_same_tokens(tmp_path: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model = write_model(tmp_path / "demo.gguf", "llama", oracle, "F32")
    row, original = (
        alone(load_engine(folder, dtype="float32"), model.prompt(20), 24)
        for folder in (find_checkpoint(str(model.folder)), DEMO_MODEL)
    )
    assert row.generated == original.generated == model.greedy(model.prompt(20), 24)


CODE = (
    "def read_lines(path):\n",
    "class Node:\n    def __init__(self, value):\n",
    "import os\nimport sys\n",
    "for name in names:\n",
    "    try:\n        return",
    "def parse_args(argv):\n",
    "if isinstance(value, str):\n",
    "async def close(self):\n",
)
"""Prompts for the demo model."""
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}
"""Types of whole files, with llama.cpp's numbers; some of a file's matrices have other types."""


@needs_llama_cpp
def test_the_demo_models_tokens_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Tokens of the file in F32 are equal. llama.cpp rounds the inputs of quantized matrices to 8 bits, so it may
    choose another token of almost the same likelihood. The log has the number of equal tokens."""
    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    source = tmp_path / "F32.gguf"
    write_model(source, "llama", oracle, "F32", vocab__size=oracle.config.vocab_size)
    prompts = [Tokenizer.from_dir(DEMO_MODEL).encode(text) for text in CODE]
    files = {str(tmp_path / f"{name}.gguf"): number for name, number in FILE_TYPES.items()}
    for path, answers in llama_cpp_tokens(source, prompts, 64, files).items():
        for dtype in ("float32",) if path == str(source) else ("float32", None):
            engine = load_engine(find_checkpoint(path), dtype=dtype)
            rows = [alone(engine, prompt, 64) for prompt in prompts]
            equal = [_num_equal(row.generated, theirs) for row, theirs in zip(rows, answers, strict=True)]
            behind = [
                float(row.logits[count].max() - row.logits[count][theirs[count]])
                for row, theirs, count in zip(rows, answers, equal, strict=True)
                if count < 64
            ]
            logging.info(
                "%s, %s: %s equal tokens; logits differ by %s", Path(path).stem, dtype, equal, behind
            )
            assert not behind if path == str(source) else max(behind, default=0) < 0.25


def _num_equal(tokens: list[int], others: list[int]) -> int:
    """Return how many tokens are equal before the first ones that differ."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(tokens))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["llama", "llama-tied", "qwen2", "gemma2"])
def test_transformers_reads_the_same_weights_from_these_files(tmp_path: Path, case: str) -> None:
    """Shows that the files are those that llama.cpp's converter would write."""
    model = write(tmp_path / "m.gguf", case, "Q8_0")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, vocab_size=VOCAB_SIZE
    )
    expected = dict(model.oracle.named_parameters())
    for name, parameter in read.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=name)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
