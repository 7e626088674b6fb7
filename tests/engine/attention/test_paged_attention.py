"""Attention that reads blocks in place: the same results as over gathered blocks, and when it is chosen."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest

from inflight.config import EngineConfig
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.attention.check import CannotAttend, check_attention
from inflight.engine.attention.find import find_attention
from inflight.engine.attention.gathering import GATHERING
from inflight.engine.attention.interface import Attention
from inflight.engine.attention.paged import PagedAttention
from inflight.engine.engine import ModelEngine
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow
from inflight.models import read_model_description
from tests.engine.driver import alone, load_engine
from tests.engine.fixed_rows import FixedRowsAttention
from tests.engine.paging import load_paged
from tests.engine.serving import config_of, load, serve
from tests.engine.varlen import ReferenceVarlen
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CPU = torch.device("cpu")


def paged(**changes: Any) -> PagedAttention:
    return PagedAttention(ReferenceVarlen(**changes), takes_key_bounds=True)


@pytest.mark.parametrize(
    "case", ["llama", "llama-gqa", "llama-head-dim", "gpt2", "mistral-window", "gpt-oss"]
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_tokens_and_logits_equal_those_of_the_model(zoo: Zoo, case: str, chunk: int | None) -> None:
    model = zoo[case]
    engine = load_paged(model.folder)
    row = alone(engine, model.prompt(19), 12)
    assert row.generated == model.greedy(model.prompt(19), 12)
    expected = model.logits(row.tokens)[len(model.prompt(19)) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=1e-4)


def requests_of(model: ZooModel) -> list[Request]:
    """Return sampled and greedy requests, beam searches, drafts and prompts that share a prefix."""
    shared = model.prompt(17, 9)
    samplings = (
        SamplingConfig(),
        SamplingConfig(temperature=0.8, top_p=0.9, random_seed=1),
        SamplingConfig(beam_width=3),
        SamplingConfig(top_k=5, random_seed=2, repetition_penalty=1.2),
    )
    return [
        Request(
            number,
            (*shared, *model.prompt(3 + 2 * number, number)),
            6 + number,
            sampling=samplings[number % 4],
            prompt_lookup_num_tokens=3 if number % 4 == 0 else 0,
        )
        for number in range(10)
    ]


@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
@pytest.mark.parametrize(
    "windows",
    with_all([{}, {"max_attention_window_size": (12, 40)}], [{"max_attention_window_size": (12, 40)}]),
)
def test_served_tokens_are_as_with_gathered_blocks(zoo: Zoo, way: str, windows: dict[str, Any]) -> None:
    model = zoo["llama-gqa"]
    requests = requests_of(model)
    expected = serve(
        load(model.folder, 60, 6, kernels="torch", max_sequence_length=96, **windows),
        config_of(way),
        requests,
    )
    served = serve(load_paged(model.folder, 60, **windows), config_of(way), requests)
    for request in requests:
        assert served.beams(request) == expected.beams(request)


@pytest.mark.parametrize(
    ("window", "dtype"),
    with_all(
        [
            (window, dtype)
            for window in (None, AttentionWindow(1), AttentionWindow(5), AttentionWindow(300))
            for dtype in (torch.float32, torch.bfloat16)
        ],
        [(None, torch.float32), (AttentionWindow(5), torch.bfloat16)],
    ),
)
def test_a_correct_paged_kernel_is_used(zoo: Zoo, dtype: torch.dtype, window: Any) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    kernel = ReferenceVarlen()
    check_attention(PagedAttention(kernel, True), decoder, 16, (window, None, window), dtype, CPU)
    calls_of_a_batch = 2 if window else 1
    chunks = [num_rows + 2 for num_rows in (1, 9, 63, 64, 65, 128, 129) for _ in ("alone", "behind a prefix")]
    expected = [num_rows for num_rows in (*chunks, 3, 3) for _ in range(calls_of_a_batch)]
    assert kernel.num_rows == expected, "one call a batch and window"


@pytest.mark.parametrize("tokens_per_block", with_all([1, 2, 3, 5], [1, 3]))
def test_the_check_at_load_accepts_blocks_of_any_size(zoo: Zoo, tokens_per_block: int) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    check_attention(paged(), decoder, tokens_per_block, (None,), torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "tokens_per_block", "window", "message"),
    [
        ({"dtypes": (torch.bfloat16,)}, 16, None, "^FlashAttention only support fp16 and bf16 data type$"),
        ({"block_multiple": 256}, 32, None, "^Paged KV cache block size must be divisible by 256$"),
        ({}, 16, AttentionWindow(5, 2), "no windows with sinks"),
        ({}, 16, AttentionWindow(5, is_chunk=True), "no chunked attention"),
    ],
)
def test_the_refusal_of_a_kernel_is_reported(
    zoo: Zoo, changes: dict[str, Any], tokens_per_block: int, window: Any, message: str
) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    with pytest.raises(CannotAttend, match=message):
        check_attention(paged(**changes), decoder, tokens_per_block, (window,), torch.float32, CPU)


class Spoilt(ReferenceVarlen):
    """Returns wrong results for the batches that `spoils` selects."""

    def __init__(self, value: float, spoils_generation: bool) -> None:
        super().__init__()
        self._value, self._spoils_generation = value, spoils_generation

    def __call__(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read = super().__call__(query, *args, **kwargs)
        if (args[4] == 1) == self._spoils_generation:
            read[-1, 0, 0] += self._value
        return read


@pytest.mark.parametrize("value", [0.2, float("nan")])
@pytest.mark.parametrize("spoils_generation", [True, False])
def test_a_wrong_paged_kernel_is_not_used(zoo: Zoo, value: float, spoils_generation: bool) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    attention = PagedAttention(Spoilt(value, spoils_generation), True)
    with pytest.raises(CannotAttend, match="its results are wrong by"):
        check_attention(attention, decoder, 16, (None,), torch.float32, CPU)


class Misplaced(FixedRowsAttention):
    """Starts chunks of a recorded batch one row too early."""

    def prepare(self, packed: PackedBatch, *arguments: Any) -> Any:
        if packed.fixed is not None:
            tiles = packed.fixed.tiles - torch.tensor([0, 0, 0, 1])
            packed = replace(packed, fixed=replace(packed.fixed, tiles=tiles))
        return super().prepare(packed, *arguments)


@pytest.mark.parametrize(
    "windows", with_all([[AttentionWindow(20)], [None, AttentionWindow(20)]], [[AttentionWindow(20)]])
)
def test_the_check_at_load_tries_recorded_batches(zoo: Zoo, windows: list[AttentionWindow | None]) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    check_attention(FixedRowsAttention(), decoder, 16, windows, torch.float32, CPU)
    with pytest.raises(CannotAttend, match=r"wrong by .* with a chunk of"):
        check_attention(Misplaced(), decoder, 16, windows, torch.float32, CPU)


def no_other(for_chunks: Any) -> Any:
    raise CannotAttend("the package triton is not installed")


def find(zoo: Zoo, kernel: Any, other: Any = no_other) -> Any:
    """Find the attention for a GPU with this kernel; `other` is the kernel in Triton's language."""
    config = EngineConfig("", tokens_per_block=32)
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    with (
        mock.patch("inflight.engine.attention.find.torch_paged_attention", lambda *_: kernel()),
        mock.patch("inflight.engine.attention.find.triton_attention", lambda _, found: other(found)),
        mock.patch("inflight.engine.attention.find.check_attention", on_the_cpu),
    ):
        return find_attention(config, decoder, (None,), torch.float32, torch.device("cuda"))


def on_the_cpu(attention: Attention, *arguments: Any) -> None:
    # test_the_check_at_load_tries_recorded_batches tries this one.
    if not isinstance(attention, FixedRowsAttention):
        check_attention(attention, *arguments[:4], CPU)


def test_kernels_in_tritons_language_come_first_and_torchs_is_for_chunks(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    torchs, others = paged(), []

    def other(for_chunks: Any) -> Attention:
        others.append(for_chunks)
        return FixedRowsAttention()

    with caplog.at_level(logging.WARNING):
        assert isinstance(find(zoo, lambda: torchs, other), FixedRowsAttention)
        assert isinstance(find(zoo, lambda: paged(block_multiple=256), other), FixedRowsAttention)
    assert others == [torchs, None] and not caplog.records


def test_torchs_kernel_alone_reads_blocks_in_place(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    attention = paged()
    with caplog.at_level(logging.WARNING):
        assert find(zoo, lambda: attention) is attention
        assert find(zoo, lambda: attention, lambda _: paged(dtypes=())) is attention
    first, second = caplog.messages
    assert "only generation is recorded" in first and "triton is not installed" in first
    assert "only support fp16" in second


def test_a_kernel_that_cannot_read_in_place_gathers_and_logs_once(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert find(zoo, lambda: paged(block_multiple=256)) is GATHERING
    (record,) = caplog.records
    assert "blocks of 32 tokens" in record.message and "must be divisible by 256" in record.message


def test_without_a_kernel_for_blocks_in_torch_attention_gathers_blocks(zoo: Zoo) -> None:
    assert find(zoo, mock.Mock(side_effect=CannotAttend("torch 2.6 has none"))) is GATHERING


@dataclass
class WithSums(ReferenceVarlen):
    """Returns sums as required for models with learned sinks; rows first if `transposed`."""

    transposed: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        read, sums = super().__call__(*args, **kwargs, return_aux=AuxRequest(lse=True))
        return read, sums.T if self.transposed else sums


@pytest.mark.parametrize("dtype", with_all([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_the_check_at_load_tries_learned_sinks(zoo: Zoo, dtype: torch.dtype) -> None:
    decoder = read_model_description(zoo["gpt-oss"].folder).decoder
    windows = (None, AttentionWindow(5))
    check_attention(PagedAttention(WithSums(), True), decoder, 16, windows, dtype, CPU)
    for attention in (PagedAttention(WithSums(transposed=True), True), IgnoringSinks(GATHERING)):
        with pytest.raises(CannotAttend):
            check_attention(attention, decoder, 16, windows, dtype, CPU)


@dataclass
class IgnoringSinks:
    """An attention that ignores learned sinks."""

    attention: Attention
    has_fixed_shapes: bool = False
    takes_fixed_rows: bool = False
    name: str = "another"

    def prepare(self, *args: Any) -> Any:
        return self.attention.prepare(*args)

    def attend(self, *args: Any) -> torch.Tensor:
        return self.attention.attend(*args[:-1])


def test_attention_on_a_cpu_gathers_blocks(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    engine: ModelEngine = load_engine(zoo["llama"].folder, kernels="torch")
    assert not engine.runner.decoder.has_fixed_shapes
    assert not caplog.records
