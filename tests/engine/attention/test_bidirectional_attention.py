"""Attention in which the rows of a picture see each other in both directions, compared with its definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from inflight.config import EngineConfig
from inflight.engine.attention.by_layer import AttentionByLayer
from inflight.engine.attention.check import CannotAttend, pack_rows
from inflight.engine.attention.find import find_picture_attention
from inflight.engine.attention.gathering import BY_PRODUCTS, GATHERING
from inflight.engine.attention.interface import Attention
from inflight.engine.attention.paged import PagedAttention
from inflight.engine.packing import PackedBatch, PackedChunk
from inflight.engine.windows import AttentionWindow, layer_windows, picture_windows
from inflight.models import read_model_description
from tests.engine.paged_rows import Rows
from tests.models.zoo import Zoo
from tests.tiers import with_all

WINDOWS = [
    AttentionWindow(1000, is_bidirectional=True),
    AttentionWindow(19, is_bidirectional=True),
    AttentionWindow(19, 4, is_bidirectional=True),
    AttentionWindow(5, is_bidirectional=True),
]
CHUNKS = [
    (0, 40, {0: 8, 10: 35}),
    (23, 40, {20: 29, 30: 55, 62: 63}),  # begins inside of a picture, and ends with one
    (0, 300, {240: 300}),  # a picture in two pieces of the chunk
    (7, 300, {10: 12, 200: 290}),
]


def pack(rows: Rows, start: int, count: int, spans: Mapping[int, int]) -> PackedBatch:
    """A chunk, whose pictures are at the positions `spans` (begin: end), beside two generation rows."""
    packed = pack_rows((PackedChunk(0, 0, count, start),), (1, 2), (33, 9), rows.tables)
    ends = packed.positions.numpy().copy()
    for begin, end in spans.items():
        ends[max(0, begin - start) : end - start] = end - 1
    return replace(packed, ends=ends)


def expected(rows: Rows, packed: PackedBatch, window: AttentionWindow) -> torch.Tensor:
    """Attention by its definition, row by row."""
    assert packed.ends is not None
    keys, values = (page.flatten(0, 1) for page in rows.cache.pages(0))
    size, group = rows.cache.tokens_per_block, rows.decoder.num_heads // rows.decoder.num_kv_heads
    found = []
    for slot, position, end in zip(packed.slots.tolist(), packed.positions.tolist(), packed.ends.tolist()):
        seen = [
            at for at in range(end + 1) if at > position - window.recent or at < window.sinks
        ]  # the window does not end at the row
        at = torch.tensor(seen)
        places = rows.tables[slot, at // size] * size + at % size
        key, value = (each[places].repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("hd,khd->hk", rows.queries[slot, position], key) * rows.decoder.head_dim**-0.5
        found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("tokens_per_block", with_all([3, 32], [3]))
@pytest.mark.parametrize("attention", [GATHERING, BY_PRODUCTS], ids=["kernel", "products"])
def test_rows_of_a_picture_see_its_later_rows(
    zoo: Zoo, attention: Attention, tokens_per_block: int, window: AttentionWindow
) -> None:
    decoder = replace(read_model_description(zoo["llama-gqa"].folder).decoder, attention_scale=None)
    rows = Rows(decoder, tokens_per_block, 320, torch.float32, seed=1)
    for start, count, spans in CHUNKS:
        packed = pack(rows, start, count, spans)
        found = rows.attend(attention, packed, window)
        torch.testing.assert_close(found, expected(rows, packed, window), rtol=0, atol=1e-5)


def test_only_batches_with_pictures_have_other_windows(zoo: Zoo) -> None:
    decoder = read_model_description(zoo["gemma4-large"].folder).decoder
    assert decoder.bidirectional_layers == (True, False, False)
    windows = layer_windows(decoder.sliding_windows, (), 0, 256)
    assert picture_windows(windows, decoder.bidirectional_layers, 256) == (
        AttentionWindow(19, is_bidirectional=True),
        None,
        None,
    )
    assert picture_windows((None, None), (True, False), 256) == (
        AttentionWindow(256, is_bidirectional=True),
        None,
    )
    usual, of_pictures = mock.Mock(), mock.Mock()
    by_layer = AttentionByLayer(usual, windows, decoder.bidirectional_layers, 256, of_pictures)
    assert by_layer.windows == (AttentionWindow(19), None)
    packed = pack_rows((), (0,), (5,), torch.zeros(1, 1, dtype=torch.int64))
    usual.prepare.return_value = dict.fromkeys(windows)
    by_layer.prepare(packed, mock.Mock())
    of_pictures.prepare.assert_not_called()
    of_pictures.prepare.return_value = mock.MagicMock()
    by_layer.prepare(replace(packed, ends=np.zeros(1, np.int64)), mock.Mock())
    assert usual.prepare.call_count == of_pictures.prepare.call_count == 1


def test_a_kernel_without_bidirectional_attention_refuses_it(zoo: Zoo) -> None:
    rows = Rows(read_model_description(zoo["llama-gqa"].folder).decoder, 3, 40, torch.float32, seed=1)
    with pytest.raises(ValueError, match="it has no bidirectional attention"):
        rows.attend(PagedAttention(mock.Mock(), True), pack(rows, 0, 9, {2: 5}), WINDOWS[0])


@pytest.mark.parametrize("case", ["gemma3-vision", "gemma4-large"])
def test_on_a_gpu_pictures_are_computed_over_gathered_blocks(zoo: Zoo, case: str) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    given = EngineConfig(""), decoder, (None,), torch.float32
    assert find_picture_attention(*given, torch.device("cpu")) is None
    causal = replace(decoder, bidirectional_layers=())
    assert find_picture_attention(given[0], causal, *given[2:], torch.device("cuda")) is None
    place = "inflight.engine.attention.find"
    with mock.patch(f"{place}.check_attention") as check:
        found = find_picture_attention(*given, torch.device("cuda"))
    assert found is not None and found.name == "over gathered KV blocks"
    assert check.call_count == len({decoder.only(layer) for layer in decoder.cached_layers})
    with (
        mock.patch(f"{place}.check_attention", side_effect=CannotAttend("wrong")),
        mock.patch(f"{place}.by_plain_products", return_value=BY_PRODUCTS),
    ):
        assert find_picture_attention(*given, torch.device("cuda")) is BY_PRODUCTS
