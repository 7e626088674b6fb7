"""On a GPU: the same results as on the CPU."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.attention.check import CannotAttend, check_attention, pack_rows
from inflight.engine.attention.find import torch_paged_attention, triton_attention
from inflight.engine.attention.gathering import BY_PRODUCTS, GATHERING, GatheringAttention
from inflight.engine.cuda.row_kernels import check_peaks_of
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_quantization import FP8_LEVELS, INT8_LEVELS, KvQuantization
from inflight.engine.layers.grouped_linear import GroupedLinear
from inflight.engine.layers.layer_check import find_operations
from inflight.engine.layers.quantized_linear import (
    QuantizedLinear,
    dequantizing_product,
    find_float8_quantizer,
    float8_reference,
    quantize_float8,
)
from inflight.engine.layers.torch_sink import TorchSink
from inflight.engine.windows import AttentionWindow
from inflight.models import read_model_description
from inflight.sampling import LogitsPostProcessors
from inflight.sampling.nan_check import find_peaks
from tests.engine.driver import Driver, Row, alone, load_engine
from tests.engine.layers.test_kept_levels import draw
from tests.engine.lora import make_adapter, stored
from tests.engine.paged_rows import Rows, largest_error
from tests.engine.serving import Served, config_of, load, serve, to_torch
from tests.engine.test_overlapped_iterations import assert_same, without_host_waits
from tests.engine.test_post_processors import by_post_processor, no_repeats, some_of_everything
from tests.models.quantized import FORMATS, write
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

_CAPTURE = "inflight.engine.cuda.graph_capture.GraphCapture"
_TRITON = "inflight.engine.attention.find.triton_attention"
CUDA = torch.device("cuda")
EDGES = (1, 63, 64, 65, 128, 129)
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
AMPERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def _varlen_reads_blocks() -> bool:
    """Return whether this torch's `varlen_attn` takes block tables, as it does from version 2.12 on."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters


needs_varlen_blocks = pytest.mark.skipif(
    not (AMPERE and _varlen_reads_blocks()),
    reason="torch's attention reads KV blocks in place on processors from Ampere on, from torch 2.12 on",
)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_logits_in_float32_are_those_of_transformers(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    prompt = model.prompt(27)
    engine = load_engine(model.folder, device="cuda", kv_cache_free_gpu_mem_fraction=0.05)
    row = alone(engine, prompt, 64)
    assert row.generated == model.greedy(prompt, 64)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "llama-gqa", "llama-head-dim", "gpt2"])
@pytest.mark.parametrize("attention", [GATHERING, BY_PRODUCTS], ids=["gathering", "by-products"])
def test_attention_is_right_at_the_edges_of_tiles(
    zoo: Zoo, case: str, dtype: torch.dtype, attention: GatheringAttention
) -> None:
    """The check that loading makes passes, with more windows."""
    decoder = read_model_description(zoo[case].folder).decoder
    windows = (None, AttentionWindow(1), AttentionWindow(5), AttentionWindow(40, 8), AttentionWindow(300))
    check_attention(attention, decoder, 32, windows, dtype, torch.device("cuda"))


@pytest.mark.parametrize("tokens_per_block", [1, 16, 31, 32, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama", "llama-gqa", "llama-head-dim", "gpt2", "gemma2", "gpt-oss"])
def test_triton_attention_passes_the_check_at_load(
    zoo: Zoo, case: str, dtype: torch.dtype, tokens_per_block: int
) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    windows = (None, AttentionWindow(1), AttentionWindow(5), AttentionWindow(40, 8), AttentionWindow(300))
    for head_dim in (decoder.head_dim, 64, 128):
        shape = replace(decoder, head_dim=head_dim)
        check_attention(
            triton_attention(shape), shape, tokens_per_block, windows, dtype, torch.device("cuda")
        )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "tokens_per_block"),
    [
        *((2, group, 64, 32) for group in (1, 2, 3, 4, 8)),
        *((1, group, 64, 32) for group in (7, 16, 17, 64)),
        *((2, 4, 128, tokens_per_block) for tokens_per_block in (8, 32)),
        (1, 8, 256, 16),
    ],
)
def test_triton_attention_is_right_at_edges_of_tiles_and_blocks(
    zoo: Zoo, dtype: torch.dtype, kv_heads: int, group: int, head_dim: int, tokens_per_block: int
) -> None:
    """Chunks and generation rows after 31, 32 and 33 blocks, one token less and one more."""
    shared = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    if dtype is torch.float32 and head_dim == 256 and shared < 101 << 10:
        pytest.skip(f"tiles of such heads take 100 KiB of shared memory, and there are {shared >> 10}")
    shape = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, **shape)
    rows = Rows(decoder, tokens_per_block, 34 * tokens_per_block + max(EDGES), dtype, 0, CUDA)
    attention = triton_attention(decoder)
    for window in (None, AttentionWindow(40, 8), AttentionWindow(33 * tokens_per_block)):
        for start in (blocks * tokens_per_block + more for blocks in (31, 32, 33) for more in (-1, 0, 1)):
            for num_rows in EDGES:
                error = largest_error(attention, rows, num_rows, start, (start + 1, start), window)
                assert error < BOUNDS[dtype], f"{num_rows} rows behind {start} tokens, {window}"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("window", [None, AttentionWindow(700, 4)])
def test_a_generation_row_is_the_same_alone_and_among_others(
    zoo: Zoo, dtype: torch.dtype, window: AttentionWindow | None
) -> None:
    """Results are bitwise equal for any lengths of other rows and any number of programs that share the row's
    keys."""
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, head_dim=64)
    attention, lengths = triton_attention(decoder), tuple(range(2000, 0, -10))
    rows = Rows(decoder, 32, 2000, dtype, 0, CUDA, sequences=len(lengths))
    slots = tuple(range(len(lengths)))
    together = rows.attend(attention, pack_rows((), slots, lengths, rows.tables), window)
    for slot in (0, 1, 77, 198, 199):
        single = pack_rows((), (slot,), (lengths[slot],), rows.tables)
        assert torch.equal(rows.attend(attention, single, window)[0], together[slot])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama-gqa", "qwen3", "gpt2", "gemma2", "granite", "gpt-oss"])
def test_every_layer_kernel_passes_the_check_at_load(
    zoo: Zoo, case: str, dtype: torch.dtype, head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Every kernel of the layers passes the check that loading makes, at edges of tiles."""
    from inflight.engine.layers.kernel_operations import KernelLayerOperations  # imports triton

    decoder = read_model_description(zoo[case].folder).decoder
    for hidden_size in (decoder.hidden_size, 2048, 4096):
        shape = replace(
            decoder, head_dim=head_dim, hidden_size=hidden_size, intermediate_size=3 * hidden_size
        )
        operations = find_operations(shape, dtype, torch.device("cuda"))
        assert operations.parts == KernelLayerOperations(shape).parts
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["qwen3.5", "kimi-linear", "nemotron-h", "falcon-h1", "lfm2"])
def test_kernels_of_recurrent_layers_pass_the_check_at_load(
    zoo: Zoo, case: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    from inflight.engine.layers.kernel_operations import KernelLayerOperations  # imports triton

    decoder = read_model_description(zoo[case].folder).decoder
    operations = find_operations(decoder, dtype, torch.device("cuda"))
    assert operations.parts == KernelLayerOperations(decoder).parts
    assert not caplog.records


@pytest.mark.parametrize("quantization", [INT8_LEVELS, FP8_LEVELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama-gqa", "gpt-oss", "gemma2"])
def test_kernels_over_8_bit_kv_blocks_pass_the_check_at_load(
    zoo: Zoo, case: str, dtype: torch.dtype, quantization: KvQuantization, caplog: pytest.LogCaptureFixture
) -> None:
    from inflight.engine.layers.kernel_operations import KernelLayerOperations  # imports triton

    decoder, device = read_model_description(zoo[case].folder).decoder, torch.device("cuda")
    windows = (None, AttentionWindow(5), AttentionWindow(40, 8))
    for head_dim in (decoder.head_dim, 64, 128):
        shape = replace(decoder, head_dim=head_dim)
        for tokens_per_block in (8, 32):
            check_attention(
                triton_attention(shape), shape, tokens_per_block, windows, dtype, device, quantization
            )
        operations = find_operations(shape, dtype, device, quantization)
        assert operations.parts == KernelLayerOperations(shape).parts
    assert not caplog.records


@pytest.mark.parametrize("vocab_size", [5, 4096, 4097, 128_256])
def test_the_highest_logits_and_their_tokens_equal_those_of_torch(vocab_size: int) -> None:
    from inflight.engine.cuda.kernels.peaks import KernelRowKernels  # imports triton

    check_peaks_of(KernelRowKernels(), vocab_size, CUDA)
    for num_rows in EDGES:
        logits = torch.randn((num_rows, vocab_size), device=CUDA)
        found, expected = KernelRowKernels().find_peaks(logits), find_peaks(logits)
        assert torch.equal(found.highest, expected.highest) and torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_float8_rounding_equals_that_of_torch(dtype: torch.dtype) -> None:
    """Kernels round to the same levels as torch's operators."""
    found = find_float8_quantizer(CUDA, dtype)
    assert found is not quantize_float8
    for num_rows in EDGES:
        for size in (7, 2048, 14_336):
            x = torch.randn((num_rows, size), device=CUDA).to(dtype)
            for levels, expected in zip(found(x), quantize_float8(x), strict=True):
                assert torch.equal(levels.float(), expected.float())


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("num_rows", [1, 17, 33, 63, 64, 65, 128, 129])
@pytest.mark.parametrize(
    ("case", "windows"),
    [
        ("llama-gqa", {}),
        ("llama-gqa", {"max_attention_window_size": (12, 40)}),
        ("llama-gqa", {"max_attention_window_size": (40,), "sink_token_length": 8}),
        ("mistral-window", {}),
    ],
)
def test_chunks_at_the_edges_of_tiles_have_the_cpus_logits(
    zoo: Zoo, case: str, windows: dict[str, Any], num_rows: int, recorded: bool
) -> None:
    """The last row of a chunk, which is sampled, is correct with and without an earlier chunk of its prompt."""
    model = zoo[case]
    logits = []
    for device in ("cpu", "cuda"):
        engine = load_engine(
            model.folder,
            device=device,
            kernels="torch",
            max_tokens_in_paged_kv_cache=4096,
            max_num_tokens=256,
            cuda_graph_mode=recorded,
            **windows,
        )
        assert bool(engine.recorded.mixed_sizes) == (recorded and device == "cuda")
        driver = Driver(engine)
        first, second = (driver.start(model.prompt(num_rows + before, before)) for before in (0, 23))
        driver.step({first: num_rows, second: 23})
        driver.step({second: num_rows}, [first])
        logits.append(torch.stack([*first.logits, *second.logits]))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


def test_gathered_attention_passes_the_check_at_load(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    for case in ("llama-gqa", "mistral-window"):
        load_engine(zoo[case].folder, device="cuda", max_tokens_in_paged_kv_cache=4096)
    assert "matrix products" not in caplog.text


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "gpt2"])
def test_sampled_tokens_of_a_mixed_batch_equal_the_cpus(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    engines = [
        load_engine(model.folder, device=device, max_tokens_in_paged_kv_cache=4096)
        for device in ("cpu", "cuda")
    ]
    samplings = (
        SamplingConfig(),
        SamplingConfig(temperature=0.8, top_p=0.9, random_seed=1),
        SamplingConfig(top_k=5, random_seed=2),
        SamplingConfig(top_p=1.0, random_seed=3),
    )
    results = []
    for engine in engines:
        driver = Driver(engine)
        rows = [driver.start(model.prompt(20 + i, i), sampling) for i, sampling in enumerate(samplings)]
        driver.step(dict.fromkeys(rows, 11))
        driver.step({row: 9 + i for i, row in enumerate(rows)})
        for _ in range(20):
            driver.step(generation=rows)
        results.append([row.generated for row in rows])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_error_in_half_precision_is_bounded(zoo: Zoo, dtype: str) -> None:
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, device="cuda", dtype=dtype, max_tokens_in_paged_kv_cache=4096)
    row = alone(engine, model.prompt(32), 24)
    exact = model.logits(row.tokens)[31:-1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error < {"bfloat16": 0.15, "float16": 0.02}[dtype]


GRAPHED = {"dtype": "bfloat16", "device": "cuda", "max_num_sequences": 11, "max_sequence_length": 200}


def _load_graphed(model: ZooModel, **changes: Any) -> ModelEngine:
    """Load with the smallest blocks that FlashAttention 2 accepts, which is used for launched chunks."""
    values = {**GRAPHED, "tokens_per_block": 256, "max_tokens_in_paged_kv_cache": 256 * 40, **changes}
    return load_engine(model.folder, **values)


def _grow_and_shrink(engine: ModelEngine, model: ZooModel) -> list[tuple[list[int], torch.Tensor]]:
    """Run batches of 1 to 11 rows, with and without contexts; return tokens and logits of every sequence."""
    driver = Driver(engine)
    rows: list[Row] = []
    ended: list[Row] = []
    for number in range(11):
        rows.append(driver.start(model.prompt(5 + 7 * number, number)))
        driver.step({rows[-1]: len(rows[-1].tokens)}, rows[:-1])
        driver.step(generation=rows)
        driver.step(generation=rows[::-1])
    while rows:
        driver.step(generation=rows)
        ended.append(rows.pop(len(rows) // 2))
        driver.release(ended[-1])
    return [(row.generated, torch.stack(row.logits)) for row in ended]


@pytest.mark.parametrize("tokens_per_block", [32, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["llama", "llama-gqa", "gpt2", "mistral-window"])
def test_blocks_are_read_in_place_and_batches_recorded(
    zoo: Zoo, case: str, dtype: str, tokens_per_block: int
) -> None:
    engine = _load_graphed(zoo[case], dtype=dtype, tokens_per_block=tokens_per_block, max_num_tokens=100)
    assert engine.recorded.generation_sizes == (1, 2, 4, 8, 11)
    assert engine.recorded.mixed_sizes == (16, 24, 32, 40, 48, 56, 64, 80, 96, 100)


@needs_varlen_blocks
@pytest.mark.parametrize("case", ["llama", "llama-gqa", "gpt2", "mistral-window"])
def test_without_the_kernels_torchs_attention_reads_in_place_and_generation_is_recorded(
    zoo: Zoo, case: str
) -> None:
    with mock.patch(_TRITON, side_effect=CannotAttend("there is none")):
        engine = _load_graphed(zoo[case])
        assert engine.recorded.generation_sizes == (1, 2, 4, 8, 11) and not engine.recorded.mixed_sizes
        row = alone(engine, zoo[case].prompt(60), 20)
    exact = zoo[case].logits(row.tokens)[59:-1]
    assert (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std() < 0.15


@needs_varlen_blocks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learned_sinks_over_blocks_in_place_pass_the_check_at_load(zoo: Zoo, dtype: torch.dtype) -> None:
    decoder = replace(read_model_description(zoo["gpt-oss"].folder).decoder, head_dim=64)
    device, windows = torch.device("cuda"), (None, AttentionWindow(128), AttentionWindow(5))
    check_attention(torch_paged_attention(device, decoder), decoder, 256, windows, dtype, device)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "mistral-window"])
def test_graphs_give_exactly_the_results_of_their_operations(zoo: Zoo, case: str) -> None:
    """Both runs are padded to the same number of rows, since matrix products of other sizes may be rounded
    differently."""
    model = zoo[case]
    recorded = _grow_and_shrink(_load_graphed(model), model)
    with mock.patch(_CAPTURE, lambda device: lambda operations: operations):
        launched = _grow_and_shrink(_load_graphed(model), model)
    for (tokens, logits), (expected_tokens, expected) in zip(recorded, launched, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
def test_recorded_adapters_give_exactly_the_results_of_launched_ones(zoo: Zoo, case: str) -> None:
    """In float32, tokens are PEFT's. In bfloat16, recorded results are bitwise those of launches one by one,
    and their logits are near those of float32."""
    model = zoo[case]
    adapters = [make_adapter(model, rank, r=rank, lora_alpha=4) for rank in (8, 20)]

    def serve_all(engine: ModelEngine) -> list[Row]:
        driver = Driver(engine)
        pages = [driver.put(stored(each.weights, number)) for number, each in enumerate(adapters)]
        rows = [driver.start(model.prompt(30, page), adapter=page) for page in (*pages, -1)]
        driver.step(dict.fromkeys(rows, 30))
        for number in range(40):
            driver.step(generation=rows if number % 3 else rows[:2])
        return rows

    exact = serve_all(load_engine(model.folder, device="cuda", max_tokens_in_paged_kv_cache=4096))
    oracles = [*(adapter.oracle for adapter in adapters), model]
    for row, oracle in zip(exact, oracles, strict=True):
        assert row.generated == oracle.greedy(tuple(row.tokens[:30]), len(row.generated))
    recorded = serve_all(_load_graphed(model))
    with mock.patch(_CAPTURE, lambda device: lambda operations: operations):
        launched = serve_all(_load_graphed(model))
    for row, other, oracle in zip(recorded, launched, oracles, strict=True):
        assert torch.equal(torch.stack(row.logits), torch.stack(other.logits))
        expected = oracle.logits(row.tokens)[29:-1]
        error = (torch.stack(row.logits) - expected).square().mean().sqrt() / expected.std()
        assert error < 0.15


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window"])
def test_half_precision_is_close_however_blocks_are_read(zoo: Zoo, case: str) -> None:
    """Recorded, launched and gathering runs are each compared with float32 logits of the tokens that they
    chose."""
    model = zoo[case]
    gathered = {"tokens_per_block": 8}  # FlashAttention 2 refuses such blocks
    for changes, why_not in (
        ({}, None),
        ({"cuda_graph_mode": False}, None),
        (gathered, CannotAttend("none")),
    ):
        with mock.patch(_TRITON, side_effect=why_not) if why_not else contextlib.nullcontext():
            row = alone(_load_graphed(model, **changes), model.prompt(60), 60)
        exact = model.logits(row.tokens)[59:-1]
        error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
        assert error < 0.15, changes


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.2), ("fp8", 0.6)])
@pytest.mark.parametrize("case", ["llama-gqa", "qwen3", "gpt2"])
def test_error_of_8_bit_weights_is_bounded(zoo: Zoo, case: str, kind: str, most: float) -> None:
    """A recorded run in bfloat16 is compared with the unrounded weights."""
    model = zoo[case]
    row = alone(_load_graphed(model, dtype=kind), model.prompt(60), 30)
    exact = model.logits(row.tokens)[59:-1]
    assert (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std() < most


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 63, 64, 65, 128, 129])
def test_8_bit_products_are_near_float64_and_use_the_gpus_own_operator(kind: str, num_rows: int) -> None:
    """Products are compared with float64, in sizes for which processors have special instructions."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(num_rows)
    weight, x = (torch.randn((rows, 512), generator=generator, device=device) for rows in (768, num_rows))
    linear = TorchSink(torch.bfloat16, device, kind).linear(weight.bfloat16())
    assert isinstance(linear, QuantizedLinear)
    taken = x.bfloat16().float()
    if kind == "fp8":
        levels, scales = quantize_float8(taken)
        taken = levels.float() * scales[:, None]
    exact = taken.double() @ linear.dequantized().double().T
    error = (linear(x.bfloat16()).double() - exact).square().mean().sqrt() / exact.std()
    assert error < 0.01
    assert linear.product not in (dequantizing_product, float8_reference), "the processor's own"


@pytest.mark.parametrize(
    "name",
    [
        "gptq-act-order",
        "awq",
        "ct-int4-channel",
        "ct-int8",
        "gptq-8",
        "fp8-tensor",
        "fbgemm",
        "ct-float-block",
    ],
)
def test_quantized_checkpoints_stay_quantized(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """Recorded runs in bfloat16 are compared with the dequantized weights; float8 by row rounds activations
    too."""
    model = write(zoo["llama-gqa"], tmp_path, FORMATS[name], dtype="bfloat16")
    row = alone(_load_graphed(model, dtype=None), model.prompt(60), 30)
    exact = model.logits(row.tokens)[59:-1]
    error = (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std()
    assert error < (0.6 if name in ("fp8-tensor", "fbgemm") else 0.15)


@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "int8", "uint8-zeros", "float8", "float4"])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 63, 64, 65, 128, 300])
def test_products_with_quantized_weights_are_near_float64(kind: str, num_rows: int) -> None:
    """The kernel, and for many rows torch's product, are compared with float64."""
    device = torch.device("cuda")
    for shape in ((768, 512, 128), (96, 192, 32), (80, 1000, 1000)):
        matrix = draw(kind, *shape, shuffled=shape[2] == 32)
        linear = TorchSink(torch.bfloat16, device).linear(matrix)
        assert isinstance(linear, GroupedLinear) and linear.has_kernel
        x = torch.randn((num_rows, shape[1]), device=device).bfloat16()
        exact = x.double() @ matrix.dequantized().double().to(device).T
        error = (linear(x).double() - exact).square().mean().sqrt() / exact.std()
        assert error < 0.01


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}])
def test_an_iteration_waits_for_the_device_once(zoo: Zoo, sampling: dict[str, Any]) -> None:
    model = zoo["llama-gqa"]
    driver = Driver(_load_graphed(model))
    rows = [driver.start(model.prompt(9, seed), SamplingConfig(**sampling)) for seed in range(3)]
    driver.step(dict.fromkeys(rows, 9))
    driver.step(generation=rows)
    batch = driver.batch({}, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = driver.engine.forward(batch)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            driver.engine.decode(batch, pending)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in waits if "synchroniz" in str(each.message)]) == 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 1.0}, {"top_k": 5}])
def test_the_host_does_not_wait_between_forward_passes(zoo: Zoo, sampling: dict[str, Any]) -> None:
    """The host waits only for the arrival of tokens, which torch does not count as synchronization."""
    model = zoo["llama-gqa"]
    answers = []
    for samples_on_device in (False, True):
        driver = Driver(_load_graphed(model))
        rows = [driver.start(model.prompt(9, seed), SamplingConfig(**sampling)) for seed in range(3)]
        driver.step(dict.fromkeys(rows, 9))
        if not samples_on_device:
            for _ in range(6):
                driver.step(generation=rows)
            answers.append([row.generated[1:] for row in rows])
            continue
        begun = []
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                batch = replace(driver.batch({}, rows), samples_on_device=True)
                begun.append((batch, driver.engine.forward(batch)))
                for row in rows:
                    row.num_computed += 1
            outputs = [driver.engine.decode(*each) for each in begun]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        answers.append([list(tokens) for tokens in zip(*(sum(each.token_ids, ()) for each in outputs))])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
def test_requests_that_do_not_need_the_host_run_with_two_iterations_in_flight(zoo: Zoo, way: str) -> None:
    model = zoo["llama-gqa"]
    requests = without_host_waits(model)
    expected = serve(load(model.folder, 60), config_of("no-evict"), requests)
    served = serve(load(model.folder, 60, device="cuda"), config_of(way), requests)
    assert served.most_in_flight == 2
    assert_same(served, expected)


EVERYTHING = OutputOptions(
    return_log_probs=True,
    num_top_log_probs=3,
    return_prompt_log_probs=True,
    return_context_logits=True,
    return_generation_logits=True,
    return_perf_metrics=True,
)
SAMPLINGS = (
    SamplingConfig(beam_width=2, length_penalty=1.0),
    SamplingConfig(beam_width=5, early_stopping=1, num_return_sequences=3, no_repeat_ngram_size=2),
    SamplingConfig(beam_width=3, early_stopping=2, length_penalty=2.0, repetition_penalty=1.2),
    SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.4, min_length=8),
    SamplingConfig(temperature=1.1, top_p=0.9, min_p=0.02, presence_penalty=0.5, random_seed=5),
    SamplingConfig(temperature=0.9, top_k=12, num_return_sequences=2, random_seed=6),
)


def _mixed_requests(model: ZooModel) -> list[Request]:
    """Return searches of several widths, penalties, sampling; every other request that can uses prompt lookup."""
    requests = []
    for number, sampling in enumerate(SAMPLINGS * 2):
        prompt = (*(model.prompt(17) if number % 2 else ()), *model.prompt(6 + 2 * number, number) * 2)
        lookup = 0 if sampling.uses_beams or number % 2 else 4
        requests.append(
            Request(
                number,
                prompt,
                20,
                end_ids=(7,),
                sampling=sampling,
                output=EVERYTHING,
                bad_words=((5,), (8, 9)),
                prompt_lookup_num_tokens=lookup,
            )
        )
    return requests


def _assert_close(served: Served, expected: Served, request: Request, index: int) -> None:
    result, other = served.result(request, index), expected.result(request, index)
    assert result.output_token_ids == other.output_token_ids
    assert result.finish_reasons == other.finish_reasons
    for ours, theirs in (
        (result.log_probs, other.log_probs),
        ((result.prompt_log_probs,), (other.prompt_log_probs,)),
    ):
        for values, wanted in zip(ours, theirs, strict=True):
            assert list(values) == pytest.approx(list(wanted), abs=1e-3)
    for ours, theirs in zip(result.generation_logits, other.generation_logits, strict=True):
        torch.testing.assert_close(to_torch(ours), to_torch(theirs), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        to_torch(result.context_logits), to_torch(other.context_logits), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "gpt2"])
def test_beams_drafts_and_log_probs_equal_the_cpus(zoo: Zoo, case: str, way: str) -> None:
    model = zoo[case]
    requests = _mixed_requests(model)
    expected = serve(load(model.folder, 80, 12), config_of("no-evict"), requests)
    served = serve(load(model.folder, 60, 12, device="cuda"), config_of(way), requests)
    for request in requests:
        for index in range(request.sampling.num_sequences):
            _assert_close(served, expected, request, index)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_beams_and_drafts_in_half_precision_run(zoo: Zoo, dtype: str) -> None:
    model = zoo["llama-gqa"]
    requests = _mixed_requests(model)
    served = serve(load(model.folder, 60, 12, device="cuda", dtype=dtype), config_of("utilization"), requests)
    for request in requests:
        for tokens in served.beams(request):
            assert len(tokens) <= 20


def test_post_processors_get_the_stream_and_equal_the_same_control(zoo: Zoo) -> None:
    """Post-processors written like TensorRT-LLM's example run on the given stream, beside sampling, drafts
    and beams."""
    model, streams = zoo["llama-gqa"], set()

    def process(req_id, logits, ids, stream_ptr, client_id):
        streams.add(stream_ptr)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr)):
            no_repeats(req_id, logits, ids, stream_ptr, client_id)

    engine = load(model.folder, 28, 8, LogitsPostProcessors({"no-repeats": process}), device="cuda")
    requests = some_of_everything(model)
    expected = serve(engine, config_of("no-evict"), requests)
    served = serve(engine, config_of("no-evict"), by_post_processor(requests, "no-repeats"))
    assert served.responses.keys() == expected.responses.keys()
    for key in served.responses:
        assert served.result(*key).output_token_ids == expected.result(*key).output_token_ids
    assert streams == {torch.cuda.current_stream().cuda_stream}
