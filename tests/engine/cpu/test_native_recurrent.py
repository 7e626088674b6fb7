"""A compiled recurrent layer in isolation, compared with torch's operators on the same batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.core.schedule.batch import ModelOutput, ScheduledBatch, StateSave
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cpu.library import load_library
from inflight.engine.cpu.packing import Packer
from inflight.engine.kv_cache import KvCache
from inflight.engine.layers.layer_operations import apply_norm
from inflight.engine.packing import PackedBatch, pack
from inflight.engine.recurrent.mixers import make_mixer
from inflight.engine.recurrent.states import RecurrentStates
from inflight.engine.slots import SlotTable
from inflight.models import DecoderConfig, decoder_weights
from inflight.models.decoder_weights import DecoderWeights, Linear, Norm
from inflight.models.recurrent import (
    GatedDelta,
    Mamba2,
    RecurrentConfig,
    RecurrentWeights,
    ShortConv,
    total_size,
)
from inflight.models.sharding import Part
from tests.engine.cpu.targets import on_every_target
from tests.engine.kernels import needs_native
from tests.engine.recurrent.test_states import blocks, chunk, limits_of_states, start

pytestmark = [needs_native, on_every_target, pytest.mark.usefixtures("target")]

HIDDEN = 40
CPU = torch.device("cpu")
NUM_SLOTS, NUM_SNAPSHOTS = 4, 3
KINDS: dict[str, RecurrentConfig] = {
    "short-conv": ShortConv(HIDDEN, 3),
    "short-conv-odd": ShortConv(131, 2, has_conv_bias=True, has_bias=True),
    "delta": GatedDelta(2, 4, 8, 12, 4, 1e-6),
    "delta-wide": GatedDelta(1, 3, 40, 72, 4, 1e-6, beta_scale=2.0, has_conv_bias=True),
    "delta-odd": GatedDelta(3, 3, 7, 33, 5, 1e-5),
    "mamba": Mamba2(8, 8, 16, 2, 4, 1e-5),
    "mamba-odd": Mamba2(3, 33, 21, 1, 4, 1e-5, step_limit=(0.4, 0.9), has_conv_bias=True, has_bias=True),
    "mamba-wide": Mamba2(2, 64, 128, 1, 4, 1e-5),
}
ERROR = {"float32": 1e-5, "bfloat16": 0.03}
"""Root mean square error over standard deviation."""


@dataclass
class Side:
    """The states of one implementation, and its slots."""

    table: SlotTable
    states: RecurrentStates


class Layer:
    """A random recurrent layer, compiled and in torch, of which only the first half has an effect."""

    def __init__(self, kind: RecurrentConfig, dtype: str, num_threads: int = 2) -> None:
        self.kind, self.dtype = kind, getattr(torch, dtype)
        self._generator = torch.Generator().manual_seed(3)
        self._draw()
        self.config = DecoderConfig(
            vocab_size=8,
            hidden_size=HIDDEN,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=2,
            max_positions=200,
            norm="rms",
            norm_eps=1e-5,
            activation="silu",
            gated_mlp=False,
            ropes=(None,),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            sliding_windows=(None,),
            tied_embeddings=False,
            recurrent=kind,
            recurrent_layers=(True,),
        )
        packer = Packer(load_library(dtype), self.dtype, int8=False, num_threads=num_threads)

        def packed(linear: Linear):
            return packer.linear(linear.weight, linear.bias)

        zero = (
            Linear(torch.zeros(2, HIDDEN, dtype=self.dtype)),
            Linear(torch.zeros(HIDDEN, 2, dtype=self.dtype)),
        )
        layer = decoder_weights.Layer(
            attention_norm=self.norm,
            input_projection=packed(self.projection),
            query_norm=None,
            key_norm=None,
            output_projection=packed(self.output),
            attention_post_norm=None,
            mlp_norm=None,
            up=packed(zero[0]),
            down=packed(zero[1]),
            mlp_post_norm=None,
            recurrent=self.weights,
        )
        weights = DecoderWeights(None, None, (packer.layer(layer),), None, None)
        part = Part.whole(self.config)
        self.decoder = NativeDecoder(self.config, weights, packer, (None,), 200, 4, part)
        self.mixer = make_mixer(kind, self.weights, F.silu)
        self.native, self.torch = self._side(), self._side()
        self.cache = KvCache(self.config, 100, 4, self.dtype, CPU, states=self.native.states)
        self.rows = torch.randn((100, HIDDEN), generator=self._generator).to(self.dtype)

    def _side(self) -> Side:
        states = RecurrentStates(self.kind, 1, NUM_SLOTS, NUM_SNAPSHOTS, self.dtype, CPU)
        return Side(SlotTable(limits_of_states(), 100, CPU), states)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _draw(self) -> None:
        kind, columns = self.kind, total_size(self.kind.sections)
        bias = kind.has_bias or None
        self.norm = Norm(torch.rand(HIDDEN, generator=self._generator) + 0.5)
        self.projection = Linear(
            (self._random(columns, HIDDEN) * HIDDEN**-0.5).to(self.dtype),
            bias and self._random(columns).to(self.dtype),
        )
        self.output = Linear(
            (self._random(HIDDEN, kind.output_width) * kind.output_width**-0.5).to(self.dtype),
            bias and self._random(HIDDEN).to(self.dtype),
        )
        conv_columns = total_size(kind.conv_sections)
        self.weights = RecurrentWeights(
            self._random(conv_columns, kind.conv_width) * 0.5,
            self._random(conv_columns) if kind.has_conv_bias else None,
        )
        if kind.num_heads:
            self.weights = replace(
                self.weights,
                decay=-self._random(kind.num_heads).exp(),
                step_bias=self._random(kind.num_heads),
                skip=self._random(kind.num_heads) if isinstance(kind, Mamba2) else None,
                norm=self._random(total_size(kind.norm_sections)).to(self.dtype),
            )

    def _begin(self, side: Side, batch: ScheduledBatch) -> PackedBatch:
        side.table.apply(batch)
        side.states.apply(batch)
        packed = pack(batch, side.table)
        side.states.begin(batch, packed)
        side.table.advance(batch)
        return packed

    def compiled(self, batch: ScheduledBatch) -> Tensor:
        """Return the layer's contribution to the rows of a batch, [rows, hidden], by the compiled code."""
        packed = self._begin(self.native, batch)
        x = self.rows[packed.token_ids]
        return self.decoder.forward(packed, self.cache, x.clone()).float() - x.float()

    def plain(self, batch: ScheduledBatch) -> Tensor:
        """Return the same by torch's operators."""
        packed = self._begin(self.torch, batch)
        x = self.rows[packed.token_ids]
        projected = self.projection(apply_norm(x, self.norm, 1e-5))
        output = self.output(self.torch.states.run(0, self.mixer, projected).to(self.dtype))
        return (x + output).float() - x.float()

    def feed(self, side: Side, batch: ScheduledBatch, *tokens: tuple[int, ...]) -> None:
        output = ModelOutput(batch.iteration, list(tokens))
        side.table.remember(batch, output)
        side.states.accept(batch, output)


def batches() -> list[tuple[ScheduledBatch, tuple[tuple[int, ...], ...]]]:
    """Return batches with chunks, drafts, generation and snapshots, and the tokens that follow each of them."""
    return [
        (
            ScheduledBatch(
                0,
                starts=(start(0), start(1), start(2)),
                new_blocks=blocks(0, 1, 2),
                context=(
                    chunk(0, 0, range(70)),
                    chunk(1, 0, range(20, 25), is_last=False),
                    chunk(2, 0, [*range(6), 10, 11, 12], drafts=3),
                ),
                state_saves=(StateSave(0, 64, 0), StateSave(0, 33, 1)),
            ),
            ((70,), (10, 11, 90)),
        ),
        (
            ScheduledBatch(
                1,
                context=(chunk(1, 5, [30]),),
                generation_slots=(0, 2),
                state_saves=(StateSave(0, 71, 2),),
            ),
            ((31,), (71,), (91,)),
        ),
        (
            ScheduledBatch(
                2,
                starts=(start(3, snapshot=1),),
                new_blocks=blocks(3),
                context=(chunk(3, 33, [60, 61], is_last=False),),
                generation_slots=(2, 1, 0),
            ),
            ((92,), (32,), (72,)),
        ),
        (
            ScheduledBatch(
                3,
                starts=(start(0, snapshot=0), start(1, snapshot=2)),
                new_blocks=blocks(0, 1),
                context=(chunk(0, 64, range(64, 70)), chunk(1, 71, [3]), chunk(3, 35, range(40, 45))),
                generation_slots=(2,),
            ),
            ((1,), (2,), (3,), (4,)),
        ),
    ]


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().mean().sqrt() / expected.std()).item()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", KINDS)
def test_a_recurrent_layer_equals_that_of_torch(name: str, dtype: str) -> None:
    layer = Layer(KINDS[name], dtype)
    for batch, tokens in batches():
        assert error(layer.compiled(batch), layer.plain(batch)) < ERROR[dtype]
        for side in (layer.native, layer.torch):
            layer.feed(side, batch, *tokens)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", KINDS)
def test_results_do_not_depend_on_chunks_and_threads(name: str, dtype: str) -> None:
    whole = Layer(KINDS[name], dtype).compiled(
        ScheduledBatch(0, starts=(start(0),), new_blocks=blocks(0), context=(chunk(0, 0, range(70)),))
    )
    layer, parts = Layer(KINDS[name], dtype, num_threads=5), list[Tensor]()
    for number, (begin, end) in enumerate(((0, 1), (1, 34), (34, 35), (35, 70))):
        is_first = not number
        batch = ScheduledBatch(
            number,
            starts=(start(0), start(1)) if is_first else (),
            new_blocks=blocks(0, 1) if is_first else (),
            context=(
                chunk(1, 7 * number, range(80, 87), is_last=False),
                chunk(0, begin, range(begin, end), is_last=end == 70),
            ),
        )
        parts.append(layer.compiled(batch)[7:])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ["short-conv", "delta-wide", "mamba"])
def test_drafts_leave_the_state_unchanged_until_they_are_accepted(name: str) -> None:
    layer = Layer(KINDS[name], "float32")
    known = ScheduledBatch(0, starts=(start(0),), new_blocks=blocks(0), context=(chunk(0, 0, range(9)),))
    layer.compiled(known)
    before = [part.clone() for part in layer.native.states.memory]
    drafted = ScheduledBatch(1, context=(chunk(0, 9, [9, 10, 11], drafts=2),))
    layer.compiled(drafted)
    after_known = [part.clone() for part in layer.native.states.memory]
    assert not torch.equal(after_known[0], before[0]), "token 9 is no draft"
    layer.feed(layer.native, drafted, (40,))
    for part, expected in zip(layer.native.states.memory, after_known, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("name", ["short-conv", "delta", "mamba"])
def test_a_sequence_with_nan_does_not_affect_other_sequences(name: str) -> None:
    batch = ScheduledBatch(
        0,
        starts=(start(0), start(1)),
        new_blocks=blocks(0, 1),
        context=(chunk(0, 0, range(9)), chunk(1, 0, range(50, 60))),
    )
    expected = Layer(KINDS[name], "float32").compiled(batch)
    layer = Layer(KINDS[name], "float32")
    layer.rows[3] = torch.nan
    found = layer.compiled(batch)
    assert found[3:9].isnan().any()
    assert torch.equal(found[9:], expected[9:])
    assert torch.equal(found[:3], expected[:3])
