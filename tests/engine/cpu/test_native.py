"""The compiled layers compared with torch's operators: the same tokens in every setting."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.engine import load, load_decoder
from inflight.engine.cpu import packing
from inflight.engine.cpu.library import load_library
from inflight.engine.cpu.packing import Packer
from inflight.engine.quantize import quantize_int8
from inflight.errors import ConfigError
from inflight.models.decoder_weights import Linear
from inflight.sampling.nan_check import find_peaks
from inflight.testing.make_model import Shape, make_model
from tests.engine.driver import Driver, alone, load_engine
from tests.engine.kernels import needs_native
from tests.engine.pictures import Picture, make_prompt, request_of
from tests.engine.serving import Served, serve
from tests.engine.thread_ranks import ThreadRanks
from tests.models.zoo import Zoo
from tests.ranks.requests import CONFIG, ENGINE, answers, make_requests
from tests.tiers import with_all

TOLERANCE = 1e-4
PROMPT = tuple(range(5, 40))


def _tokens(served: Served) -> list[Any]:
    return [(answer["key"], answer["tokens"]) for answer in answers(served)]


def check_pictures(zoo: Zoo, tolerance: float, **settings: Any) -> None:
    """Compare logits after pictures, whose tokens see each other, with those by torch's operators; `tolerance`: of
    the root mean square of errors, in standard deviations of the logits."""
    model = zoo["gemma3-vision"]
    prompt = make_prompt(model, (5, Picture(6, 7, 1), 6, Picture(3, 3, 2), 1, Picture(5, 5, 3)), 0)
    table = request_of(model, 1, prompt).prompt_table
    rows = [
        alone(load_engine(model.folder, kernels=kernels, **settings), prompt.token_ids, 9, prompt_table=table)
        for kernels in ("native", "torch")
    ]
    found, expected = (torch.stack(row.logits[:1]) for row in rows)
    assert (found - expected).square().mean().sqrt() < tolerance * expected.std()
    if tolerance < 0.01:
        assert rows[0].generated == rows[1].generated


@needs_native
@pytest.mark.parametrize(("window", "num_sinks"), [(1000, 0), (12, 3)])
@pytest.mark.parametrize("tokens_per_block", with_all([7, 16, 32], [7, 32]))
def test_pictures_whose_tokens_see_each_other_give_torchs_logits(
    zoo: Zoo, window: int, num_sinks: int, tokens_per_block: int
) -> None:
    check_pictures(
        zoo,
        1e-4,
        max_attention_window_size=(window,),
        sink_token_length=num_sinks,
        tokens_per_block=tokens_per_block,
    )


@needs_native
@pytest.mark.parametrize(("dtype", "kind", "tolerance"), [("bfloat16", None, 0.1), ("float32", "int8", 0.01)])
def test_pictures_in_fewer_bits_give_about_torchs_logits(
    zoo: Zoo, dtype: str, kind: str | None, tolerance: float
) -> None:
    check_pictures(zoo, tolerance, dtype=dtype, kv_cache_dtype=kind)


@needs_native
@pytest.mark.parametrize(("windows", "num_sinks"), [((12,), 0), ((12,), 3), ((9, 1000), 0)])
@pytest.mark.parametrize("tokens_per_block", with_all([7, 16, 32], [7, 32]))
def test_windows_sinks_and_blocks_of_any_size_give_torchs_logits(
    zoo: Zoo, windows: tuple[int, ...], num_sinks: int, tokens_per_block: int
) -> None:
    model = zoo["llama-gqa"]
    prompt = model.prompt(150)
    rows = [
        alone(
            load_engine(
                model.folder,
                kernels=kernels,
                max_attention_window_size=windows,
                sink_token_length=num_sinks,
                tokens_per_block=tokens_per_block,
            ),
            prompt,
            20,
        )
        for kernels in ("native", "torch")
    ]
    torch.testing.assert_close(*(torch.stack(row.logits) for row in rows), rtol=0, atol=TOLERANCE)
    assert rows[0].generated == rows[1].generated


@needs_native
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama-gqa", {}),
        ("llama-gqa", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("neox", {}),  # parallel attention and MLP
        ("olmo2", {}),  # norms after attention and MLP
        ("qwen2-moe", {}),  # a shared MLP with a gate
        ("deepseek-v3", {}),  # latent attention
        ("qwen3.5", {}),  # gates on attention
        ("lfm2", {}),
    ],
)
def test_the_last_layer_of_sampled_rows_alone_gives_the_same_logits(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, case: str, settings: dict[str, Any]
) -> None:
    """The last layer computes only rows that are sampled, unless hidden states of all rows are wanted. Chunks with
    and without sampled rows, drafts and generation."""

    def logits(computes_all: bool) -> list[torch.Tensor]:
        engine = load_engine(zoo[case].folder, kernels="native", **settings)
        decoder, found = engine.runner.decoder, list[torch.Tensor]()
        compute = decoder.forward_to_logits

        def note(packed: Any, cache: Any, hidden: Any) -> torch.Tensor:
            if computes_all:
                logits = decoder.logits(decoder.forward(packed, cache, hidden), packed.sampled_rows)
            else:
                logits = compute(packed, cache, hidden)
            found.append(logits.clone())
            return logits

        monkeypatch.setattr(decoder, "forward_to_logits", note)
        driver = Driver(engine)
        first, second, third = (driver.start(zoo[case].prompt(length)) for length in (40, 21, 37))
        driver.step({first: 19})
        driver.step({first: 21, second: 10})
        driver.step({second: 11, third: 36}, [first])
        driver.step({third: 1, first: 1}, [second], {first: [7, 8, 9]})
        driver.step(generation=[first, second, third])
        return found

    expected = logits(computes_all=True)
    assert [len(each) for each in expected] == [0, 1, 2, 6, 3]
    torch.testing.assert_close(logits(computes_all=False), expected, rtol=0, atol=0)


@needs_native
@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2", "qwen3"], ["gpt2", "qwen3"]))
def test_beams_drafts_sampling_chunks_and_pauses_are_as_with_torch(zoo: Zoo, case: str) -> None:
    served = [
        serve(
            load.load_engine(EngineConfig(str(zoo[case].folder), **ENGINE, kernels=kernels)),
            CONFIG,
            make_requests(),
        )
        for kernels in ("native", "torch")
    ]
    assert _tokens(served[0]) == _tokens(served[1])


@needs_native
# Two stages of two ranks use both ways of dividing a model.
@pytest.mark.parametrize(("tp_size", "pp_size"), with_all([(2, 1), (1, 2), (2, 2)], [(2, 2)]))
def test_ranks_give_the_results_of_one(zoo: Zoo, tp_size: int, pp_size: int) -> None:
    config = EngineConfig(str(zoo["llama-gqa"].folder), **ENGINE, kernels="native")
    one = serve(load.load_engine(config), CONFIG, make_requests())
    several = serve(ThreadRanks(config, tp_size, pp_size), CONFIG, make_requests())
    assert _tokens(several) == _tokens(one)


@needs_native
@pytest.mark.parametrize(
    ("shape", "dtype", "tokens_per_block", "reason"),
    [
        ((96, 16, 1), "float32", 8, "up to 12 query heads per key head; this model has 16"),
        ((640, 2, 1), "float32", 8, "head_dim up to 256; this model has 320"),
        ((64, 4, 2), "bfloat16", 7, "in bfloat16, compiled layers need an even tokens_per_block; it is 7"),
        ((64, 4, 2), "int8", 1, "in bfloat16, compiled layers need an even tokens_per_block; it is 1"),
    ],
)
def test_unsupported_sizes_are_computed_by_torch(
    tmp_path: Path,
    shape: tuple[int, int, int],
    dtype: str,
    tokens_per_block: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hidden, heads, kv_heads = shape
    folder = make_model(tmp_path, shape=Shape(1, hidden, heads, kv_heads, 32, 300, 64, 10_000.0))
    settings = {"dtype": dtype, "tokens_per_block": tokens_per_block}
    with caplog.at_level(logging.WARNING):
        engine = load_engine(folder, **settings)
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert len(alone(engine, (5, 6, 7), 4).generated) == 4
    with pytest.raises(ConfigError, match=reason):
        load_engine(folder, kernels="native", **settings)


@needs_native
@pytest.mark.parametrize(("shape", "tokens_per_block"), [((96, 12, 1), 7), ((512, 2, 2), 1)])
def test_the_largest_supported_sizes_give_torchs_logits(
    tmp_path: Path, shape: tuple[int, int, int], tokens_per_block: int
) -> None:
    hidden, heads, kv_heads = shape
    folder = make_model(tmp_path, shape=Shape(2, hidden, heads, kv_heads, 32, 300, 64, 10_000.0))
    rows = [
        alone(
            load_engine(folder, dtype="float32", kernels=kernels, tokens_per_block=tokens_per_block),
            PROMPT,
            8,
        )
        for kernels in ("native", "torch")
    ]
    torch.testing.assert_close(*(torch.stack(row.logits) for row in rows), rtol=0, atol=1e-4)


_COUNT_THREADS = """
import os, sys
from tests.engine.driver import load_engine

load_engine(sys.argv[1], kernels="native", engine_threads=1)
before = len(os.listdir("/proc/self/task"))
engine = load_engine(sys.argv[1], kernels="native", engine_threads=7)
print(len(os.listdir("/proc/self/task")) - before)
"""


@needs_native
@pytest.mark.exhaustive  # by default the next test and test_team.py test threads
def test_threads_are_started_when_the_engine_is_loaded(zoo: Zoo) -> None:
    """Runs in its own process, in which no other code starts threads."""
    program = [sys.executable, "-c", _COUNT_THREADS, str(zoo["llama"].folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6, "beside the one that calls; torch may have started threads of its own"


@needs_native
def test_threads_that_cannot_be_started_fail_the_load(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    real = load_library("float32")

    class WithoutThreads:
        def create(self, *_: object) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(load_decoder, "load_library", lambda *_: WithoutThreads())
    with pytest.raises(
        ConfigError, match=r"^5 threads for the forward pass cannot be started.*engine_threads"
    ):
        load_engine(zoo["llama"].folder, engine_threads=5)


@needs_native
def test_the_highest_logits_and_their_tokens_equal_those_of_torch(zoo: Zoo) -> None:
    engine = load_engine(zoo["llama-gqa"].folder, kernels="native")
    alone(engine, PROMPT, 1)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 1003, generator=generator)
    logits[3, 77] = logits[3, 900] = 50.0
    logits[4, 1002] = torch.inf
    logits[5, 11] = torch.nan
    logits[6] = -torch.inf
    logits[7, :1002] = -torch.inf
    found, expected = engine.runner.decoder.row_kernels.find_peaks(logits), find_peaks(logits)
    torch.testing.assert_close(found.highest, expected.highest, rtol=0, atol=0, equal_nan=True)
    usable = torch.arange(40) != 5
    assert found.tokens[3] == 77, "of equal ones, the first"
    assert torch.equal(found.tokens[usable], expected.tokens[usable])


@needs_native
@pytest.mark.parametrize("shape", [(7, 33), (100, 576), (3, 4)])
def test_int8_weights_equal_those_of_torch(shape: tuple[int, int]) -> None:
    packer = Packer(load_library("bfloat16", int8=True), torch.bfloat16, int8=True, num_threads=2)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[1] = 0
    found = torch.empty_like(weight, dtype=torch.int8)
    scales, sums = packer._quantize(weight, found)
    expected, expected_scales = quantize_int8(weight)
    assert torch.equal(found, expected) and torch.equal(scales, expected_scales)
    assert torch.equal(sums, expected.sum(1, dtype=torch.int32))


@needs_native
@pytest.mark.parametrize("column", [0, 20, 32])
def test_a_row_of_int8_weights_with_a_nan_has_a_scale_of_nan(column: int) -> None:
    packer = Packer(load_library("bfloat16", int8=True), torch.bfloat16, int8=True, num_threads=2)
    weight = torch.ones((2, 33), dtype=torch.bfloat16)
    weight[1, column] = torch.nan
    scales, _ = packer._quantize(weight, torch.empty_like(weight, dtype=torch.int8))
    assert scales.isnan().tolist() == [False, True]


@needs_native
@pytest.mark.parametrize("is_gated", [False, True])
def test_int8_weights_are_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch, is_gated: bool) -> None:
    linear = Linear(torch.randn(2 * 83, 41, generator=torch.Generator().manual_seed(1)).bfloat16())

    def pack() -> list[torch.Tensor]:
        packer = Packer(load_library("bfloat16", int8=True), torch.bfloat16, int8=True, num_threads=2)
        return list(packer.linear(linear.weight, linear.bias, is_gated).tensors)

    whole = pack()
    assert whole[0].count_nonzero() > 0.9 * linear.weight.numel()
    monkeypatch.setattr(packing, "_NUMBERS_AT_ONCE", 1)
    assert all(torch.equal(a, b) for a, b in zip(pack(), whole, strict=True))
