"""Attention by kernels in Triton's language, interpreted: the same as by plain products, for all sizes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight.engine import packing
from inflight.engine.attention.by_kernels import KernelAttention
from inflight.engine.attention.check import CannotAttend, check_attention, pack_rows
from inflight.engine.attention.gathering import by_plain_products
from inflight.engine.attention.paged import PagedAttention
from inflight.engine.cuda.kernels import attention as kernels
from inflight.engine.kv_quantization import FP8_LEVELS, INT8_LEVELS, KvQuantization
from inflight.engine.layers.kernel_operations import KernelLayerOperations
from inflight.engine.packing import PackedChunk
from inflight.engine.windows import AttentionWindow
from inflight.models import read_model_description
from tests.engine.attention.test_paged_attention import requests_of
from tests.engine.driver import Driver, alone
from tests.engine.paged_rows import Rows, largest_error
from tests.engine.paging import load_paged
from tests.engine.serving import config_of, serve
from tests.engine.varlen import ReferenceVarlen
from tests.models.zoo import Zoo

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels divide even short sequences into parts, as they divide long ones."""
    monkeypatch.setattr(kernels, "_MIN_PART", 16)
    monkeypatch.setattr(kernels, "_TILE_KEYS", 16)
    monkeypatch.setattr(kernels, "num_parts", lambda num_kv_heads, longest: 4)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles, because an interpreted program's duration is proportional to the tile size."""
    for module in (kernels, packing):
        monkeypatch.setattr(module, "TILE_ROWS", 16)


def cases() -> Iterator[tuple[int, dict[str, Any], int, AttentionWindow | None, torch.dtype, Any]]:
    draw = random.Random(0)
    for seed in range(32):
        kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 7, 17])
        changes = {
            "num_heads": kv_heads * group,
            "num_kv_heads": kv_heads,
            "head_dim": draw.choice([8, 16, 24, 64, 80]),
            "attention_scale": draw.choice([None, 0.3]),
            "attention_soft_cap": draw.choice([None, None, 3.0]),
            "learned_sinks": draw.random() < 0.3,
        }
        window = draw.choice(
            [None, None, AttentionWindow(1), AttentionWindow(9), AttentionWindow(40), AttentionWindow(30, 5)]
        )
        dtype = draw.choice([torch.float32, torch.float16])
        quantization = draw.choice([None, INT8_LEVELS, FP8_LEVELS]) if seed >= 24 else None
        yield seed, changes, draw.choice([1, 3, 8, 32, 100]), window, dtype, quantization


@pytest.mark.usefixtures("small_parts", "small_tiles")
@pytest.mark.parametrize(
    ("seed", "changes", "tokens_per_block", "window", "dtype", "quantization"), list(cases())
)
def test_results_are_those_of_plain_products(
    zoo: Zoo,
    seed: int,
    changes: Any,
    tokens_per_block: int,
    window: Any,
    dtype: torch.dtype,
    quantization: KvQuantization | None,
) -> None:
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, **changes)
    rows = Rows(decoder, tokens_per_block, 150, dtype, seed, quantization=quantization)
    draw = random.Random(seed)
    for _ in range(3):
        start = draw.choice([0, 5, 64])
        chunk = PackedChunk(0, 0, draw.choice([1, 15, 16, 17, 40]), start)
        lengths = sorted((draw.randrange(1, 151) for _ in range(2)), reverse=True)
        packed = pack_rows((chunk,), (1, 2), lengths, rows.tables)
        found = rows.attend(KernelAttention(decoder), packed, window)
        expected = rows.attend(by_plain_products(decoder), packed, window)
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.float16), (4, torch.float32)])
@pytest.mark.parametrize("blocks", [31, 32, 33])
def test_results_are_right_at_edges_of_tiles_and_blocks(
    zoo: Zoo, blocks: int, group: int, dtype: torch.dtype
) -> None:
    """The cases that test_gpu.py runs for all sizes; tiles and parts have the sizes of a GPU."""
    shape = {"num_heads": group, "num_kv_heads": 1, "head_dim": 16}
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, **shape)
    rows = Rows(decoder, 8, 34 * 8 + 65, dtype, blocks)
    attention = KernelAttention(decoder)
    for num_rows, start, window in ((65, 8 * blocks - 1, None), (64, 8 * blocks, AttentionWindow(70, 3))):
        lengths = 8 * blocks + 1, 8 * blocks
        assert largest_error(attention, rows, num_rows, start, lengths, window) < BOUNDS[dtype]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("quantization", [None, INT8_LEVELS])
def test_a_generation_row_is_the_same_alone_and_among_others(
    zoo: Zoo, quantization: KvQuantization | None
) -> None:
    """Results are bitwise equal, for any number of programs that share the row's parts."""
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    rows = Rows(decoder, 8, 150, torch.float32, 0, quantization=quantization)
    attention = KernelAttention(decoder)
    together = rows.attend(attention, pack_rows((), (0, 1, 2), (150, 77, 16), rows.tables), None)
    for slot, length in enumerate((150, 77, 16)):
        alone_ = rows.attend(attention, pack_rows((), (slot,), (length,), rows.tables), None)
        assert torch.equal(alone_[0], together[slot])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_PROGRAMS", 1)
        assert torch.equal(
            rows.attend(attention, pack_rows((), (0, 1, 2), (150, 77, 16), rows.tables), None), together
        )


@pytest.mark.usefixtures("small_parts", "small_tiles")
@pytest.mark.parametrize("window", [None, AttentionWindow(20), AttentionWindow(24, 3)])
def test_results_of_a_context_do_not_depend_on_its_chunks(zoo: Zoo, window: AttentionWindow | None) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    rows, attention = Rows(decoder, 8, 150, torch.float32, 0), KernelAttention(decoder)
    whole = rows.attend(attention, pack_rows((PackedChunk(0, 0, 70, 0),), (), (), rows.tables), window)
    for begin, end in itertools.pairwise((0, 7, 23, 64, 70)):
        chunk = PackedChunk(0, 0, end - begin, begin)
        part = rows.attend(attention, pack_rows((chunk,), (), (), rows.tables), window)
        torch.testing.assert_close(part, whole[begin:end], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("quantization", [None, FP8_LEVELS])
def test_memory_after_a_rows_tokens_has_no_effect(zoo: Zoo, quantization: KvQuantization | None) -> None:
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    rows = Rows(decoder, 8, 150, torch.float32, 0, quantization=quantization)
    attention = KernelAttention(decoder)
    packed = pack_rows((PackedChunk(0, 0, 5, 30),), (1,), (50,), rows.tables)
    before = rows.attend(attention, packed, None)
    for slot, length in ((0, 35), (1, 50)):
        for position in range(length, 150):
            block = rows.tables[slot, position // 8]
            for page in rows.cache.pages(0) if quantization is None else ():
                page[block, position % 8] = torch.nan
            for scales in rows.cache.scales(0) or ():
                scales[block * 8 + position % 8] = torch.nan
    assert torch.equal(rows.attend(attention, packed, None), before)


@pytest.mark.usefixtures("small_parts", "small_tiles")
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "mistral-window", "gpt-oss", "gemma2"])
def test_tokens_equal_those_of_the_model(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    decoder = read_model_description(model.folder).decoder
    row = alone(load_paged(model.folder, attention=KernelAttention(decoder)), model.prompt(19), 8)
    assert row.generated == model.greedy(model.prompt(19), 8)


@pytest.mark.usefixtures("small_parts", "small_tiles")
def test_served_tokens_are_as_with_gathered_blocks(zoo: Zoo) -> None:
    """Requests are packed, chunked, paused and searched with beams; one layer has no window, the others have
    windows."""
    model, windows = zoo["llama-gqa"], {"max_attention_window_size": (12, 400, 40), "sink_token_length": 3}
    requests = requests_of(model)[:5]
    decoder = read_model_description(model.folder).decoder
    config = config_of("utilization-chunked-no-reuse")
    gathered = by_gathering(model.folder, windows)
    expected = serve(gathered, config, requests)
    served = serve(
        load_paged(model.folder, 40, attention=KernelAttention(decoder), **windows), config, requests
    )
    for request in requests:
        assert served.beams(request) == expected.beams(request)


def by_gathering(folder: Any, windows: dict[str, Any]) -> Any:
    decoder = read_model_description(folder).decoder
    return load_paged(folder, 40, attention=by_plain_products(decoder), **windows)


@pytest.mark.usefixtures("small_parts", "small_tiles")
def test_replayed_batches_give_the_models_tokens(zoo: Zoo) -> None:
    """Batches are padded up to the recording's size, and a replay reuses the recording's memory."""
    model = zoo["llama-gqa"]
    replays: list[int] = []

    def capture(operations: Callable[[], None]) -> Callable[[], None]:
        operations()
        return lambda: replays.append(1) or operations()

    attention = KernelAttention(read_model_description(model.folder).decoder)
    driver = Driver(load_paged(model.folder, 40, 4, capture, attention, max_num_tokens=40))
    rows = [driver.start(model.prompt(5 + 6 * number, number)) for number in range(3)]
    driver.step({row: len(row.tokens) for row in rows})
    for count in (3, 2, 1, 3, 2):
        driver.step(generation=rows[:count])
    rows.append(driver.start(model.prompt(30, 9)))
    driver.step({rows[-1]: 17}, rows[:2])
    driver.step({rows[-1]: 13}, rows[:1])
    driver.step(generation=rows)
    for row in rows:
        assert row.generated == model.greedy(row.tokens[: row.prompt_length], len(row.generated))
    assert len(replays) == 9, "of the first prompts together, and of the last in two chunks, too"


@pytest.mark.usefixtures("small_parts", "small_tiles")
@pytest.mark.parametrize("windows", [(None,), (None, AttentionWindow(20, 3))])
def test_the_check_at_load_accepts_both_kernels_for_chunks(zoo: Zoo, windows: Any) -> None:
    """`check_attention`, which runs at every load, accepts both kernels for chunks and the sizes of recordings."""
    decoder = read_model_description(zoo["llama-gqa"].folder).decoder
    for_chunks = PagedAttention(ReferenceVarlen(), True) if windows == (None,) else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inflight.engine.attention.check._CHUNK_ROWS", (17,))
        patch.setattr("inflight.engine.attention.check._LONG", (70, 17, 16))
        check_attention(KernelAttention(decoder, for_chunks), decoder, 8, windows, torch.float32, CPU)


def test_heads_that_are_too_wide_are_refused(zoo: Zoo) -> None:
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, head_dim=264)
    with pytest.raises(CannotAttend, match="heads of at most 256 values, and the model's have 264"):
        KernelAttention(decoder)


@pytest.mark.usefixtures("small_parts", "small_tiles")
def test_tokens_over_8_bit_blocks_equal_those_of_gathered_blocks(zoo: Zoo) -> None:
    """A prompt is computed in two chunks, the second beside a generation row."""
    model = zoo["llama-gqa"]
    decoder = read_model_description(model.folder).decoder
    by_kernels = {"attention": KernelAttention(decoder), "operations": KernelLayerOperations(decoder)}
    found = []
    for changes in ({"attention": by_plain_products(decoder)}, by_kernels):
        engine = load_paged(model.folder, 20, 2, quantization=FP8_LEVELS, max_num_tokens=24, **changes)
        driver = Driver(engine)
        first, second = driver.start(model.prompt(11)), driver.start(model.prompt(30, 1))
        driver.step({first: 11, second: 13})
        driver.step({second: 17}, [first])
        driver.step(generation=[first, second])
        found.append((first.generated, second.generated))
    assert found[0] == found[1]
