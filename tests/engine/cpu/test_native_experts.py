"""The experts of a compiled layer in isolation, compared with torch's operators on the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.cpu.library import load_library
from inflight.engine.cpu.packing import PackedLinear, Packer
from inflight.engine.cpu.structs import BatchStruct
from inflight.engine.layers.experts import mix_experts
from inflight.engine.layers.layer_operations import apply_norm
from inflight.engine.quantize import quantize_int8
from inflight.models import DecoderConfig, decoder_weights
from inflight.models.decoder_config import ClampedSwiglu, ExpertsConfig, NormPlacement, Scoring
from inflight.models.decoder_weights import DecoderWeights, ExpertWeights, LayerWeights, Linear, Norm
from inflight.models.sharding import Part
from tests.engine.cpu.targets import on_every_target
from tests.engine.kernels import needs_native

pytestmark = [needs_native, on_every_target, pytest.mark.usefixtures("target")]
MLP = 1  # the second half of a layer


@dataclass(frozen=True)
class Case:
    """Sizes of a layer with experts, and of a batch."""

    rows: int
    count: int = 8
    per_token: int = 2
    hidden: int = 64
    inner: int = 40
    shared: int = 0
    has_gate: bool = False
    is_normalized: bool = True
    norms: NormPlacement = "before"
    has_biases: bool = False
    swiglu: ClampedSwiglu | None = None
    scoring: Scoring = "softmax"
    has_choice_bias: bool = False
    groups: tuple[int, int, int] = (1, 1, 1)
    scale: float = 1.0

    @property
    def experts(self) -> ExpertsConfig:
        return ExpertsConfig(
            self.count,
            self.per_token,
            self.inner,
            self.is_normalized,
            (True,),
            self.shared,
            self.has_gate,
            has_router_bias=self.has_biases,
            has_bias=self.has_biases,
            scoring=self.scoring,
            has_choice_bias=self.has_choice_bias,
            num_groups=self.groups[0],
            num_groups_per_token=self.groups[1],
            scores_per_group=self.groups[2],
            result_scale=self.scale,
        )

    def activate(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        if self.swiglu is None:
            return F.silu(gate) * up
        limit = self.swiglu.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(self.swiglu.alpha * gate) * (up + 1)


CASES = {
    "one-row": Case(1),
    "few-rows": Case(5, per_token=3),
    "all-experts": Case(7, count=3, per_token=3),
    "one-expert": Case(30, count=1, per_token=1, hidden=37, inner=21),
    "many-rows": Case(700, count=4),
    "most-experts-idle": Case(3, count=130, per_token=4),
    "chances-as-they-are": Case(9, is_normalized=False),
    "shared": Case(9, shared=56),
    "shared-by-gate": Case(33, shared=56, has_gate=True, is_normalized=False),
    "odd-sizes": Case(9, hidden=37, inner=21, shared=11, has_gate=True),
    "biases": Case(33, hidden=37, inner=21, has_biases=True),
    "biases-and-gate": Case(9, shared=56, has_gate=True, has_biases=True),
    "clamped": Case(9, has_biases=True, swiglu=ClampedSwiglu(alpha=1.7, limit=0.5)),
    "sigmoids": Case(33, scoring="sigmoid", scale=2.5),
    "sigmoids-and-bias": Case(33, count=21, scoring="sigmoid", has_choice_bias=True, is_normalized=False),
    "softmax-and-bias": Case(33, has_choice_bias=True, shared=56),
    "groups": Case(33, count=20, per_token=3, groups=(5, 2, 1), is_normalized=False, scale=1.5),
    "groups-of-sigmoids": Case(
        33, count=24, per_token=4, scoring="sigmoid", has_choice_bias=True, groups=(6, 3, 2), scale=2.5
    ),
    "all-groups": Case(9, count=8, scoring="sigmoid", groups=(4, 4, 2)),
}


class Layer:
    """A random layer, compiled and in torch, of which only the second half has an effect.

    Its norm has float32 weights, as in compiled layers.
    """

    def __init__(self, case: Case, dtype: str, num_threads: int = 2, router_scale: float = 4) -> None:
        self.case, self.is_int8 = case, dtype == "int8"
        self.dtype = torch.bfloat16 if self.is_int8 else getattr(torch, dtype)
        self._generator = torch.Generator().manual_seed(3)
        self.weights = self._draw(router_scale)
        self.config = DecoderConfig(
            norm_placement=case.norms,
            residual_scale=0.5,
            vocab_size=8,
            hidden_size=case.hidden,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=case.inner,
            max_positions=8,
            norm="rms",
            norm_eps=1e-5,
            activation="silu",
            gated_mlp=True,
            ropes=(None,),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            sliding_windows=(None,),
            tied_embeddings=False,
            experts=case.experts,
            clamped_swiglu=case.swiglu,
        )
        packer = Packer(
            load_library(str(self.dtype).removeprefix("torch."), self.is_int8),
            self.dtype,
            int8=self.is_int8,
            num_threads=num_threads,
        )
        part, experts = Part.whole(self.config), self.weights.experts
        assert experts is not None
        up, down = experts.up, experts.down

        def pack(linear: Linear, is_gated: bool = False) -> PackedLinear:
            return packer.linear(linear.weight, linear.bias, is_gated)

        packed_up = packer.stack(iter(up.weight), up.weight.shape, up.bias, is_gated=True)
        packed_down = packer.stack(iter(down.weight), down.weight.shape, down.bias)
        packed = replace(
            self.weights,
            input_projection=pack(self.weights.qkv),
            output_projection=pack(self.weights.output),
            up=self.weights.up and pack(self.weights.up, is_gated=True),
            down=self.weights.down and pack(self.weights.down),
            experts=replace(experts, up=packed_up, down=packed_down),
        )
        weights = DecoderWeights(None, None, (packer.layer(packed),), None, None)
        self.decoder = NativeDecoder(self.config, weights, packer, (None,), 8, 8, part)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).mul_(shape[-1] ** -0.5).to(self.dtype)

    def _draw_bias(self, *shape: int) -> Tensor | None:
        return self._random(*shape) if self.case.has_biases else None

    def _draw(self, router_scale: float) -> LayerWeights:
        case, hidden = self.case, self.case.hidden
        shared = case.shared
        return decoder_weights.Layer(
            attention_norm=None,
            input_projection=Linear(self._random(6, hidden)),
            query_norm=None,
            key_norm=None,
            output_projection=Linear(torch.zeros(hidden, 2, dtype=self.dtype)),
            attention_post_norm=None,
            mlp_norm=None if case.norms == "after" else self._draw_norm(),
            up=Linear(self._random(2 * shared, hidden)) if shared else None,
            down=Linear(self._random(hidden, shared)) if shared else None,
            mlp_post_norm=None if case.norms == "before" else self._draw_norm(),
            experts=ExpertWeights(
                Linear(router_scale * self._random(case.count, hidden), self._draw_bias(case.count)),
                Linear(
                    self._random(case.count, 2 * case.inner, hidden),
                    self._draw_bias(case.count, 2 * case.inner),
                ),
                Linear(self._random(case.count, hidden, case.inner), self._draw_bias(case.count, hidden)),
                Linear(4 * self._random(1, hidden)) if case.has_gate else None,
                torch.randn(case.count, generator=self._generator) * 0.3 if case.has_choice_bias else None,
            ),
        )

    def _draw_norm(self) -> Norm:
        return Norm(torch.rand(self.case.hidden, generator=self._generator) + 0.5)

    def rows(self) -> Tensor:
        x = torch.randn(self.case.rows, self.case.hidden, generator=torch.Generator().manual_seed(5))
        return x.to(self.dtype)

    def compiled(self, x: Tensor) -> Tensor:
        """Return the output of the layer's MLP half for rows [rows, hidden], by the compiled code."""
        x, partial = x.clone(), torch.empty_like(x)
        ids, spans, tables = (
            torch.zeros(len(x), dtype=torch.int64),
            np.zeros((0, 4), np.int64),
            torch.zeros(1, 1),
        )
        batch = BatchStruct(
            len(x), ids.data_ptr(), ids.data_ptr(), 0, spans.ctypes.data, tables.data_ptr(), 1
        )
        self.decoder._run(batch, x, 0, 1, partial, MLP)
        return partial

    def plain(self, x: Tensor) -> Tensor:
        """Return the output of the layer's MLP half in float32, by torch's operators and with the weights as
        they were packed."""
        weights, experts = self.weights, self.weights.experts
        assert experts is not None
        norm, read = weights.mlp_norm, x.float()
        if norm is not None:
            read = apply_norm(x, norm, self.config.norm_eps).float()
        router_bias, up_bias, down_bias = (
            None if linear.bias is None else linear.bias.float()
            for linear in (experts.router, experts.up, experts.down)
        )
        wide = ExpertWeights(
            Linear(experts.router.weight.float(), router_bias),
            Linear(torch.stack([self._as_packed(each) for each in experts.up.weight]), up_bias),
            Linear(torch.stack([self._as_packed(each) for each in experts.down.weight]), down_bias),
            None,
            experts.choice_bias,
        )
        result = mix_experts(read, wide, self.case.experts, self.case.activate)
        if weights.up is not None and weights.down is not None:
            inner = self.case.activate(F.linear(read, self._as_packed(weights.up.weight)))
            shared = F.linear(inner, self._as_packed(weights.down.weight))
            if experts.shared_gate is not None:
                shared *= torch.sigmoid(F.linear(read, experts.shared_gate.weight.float()))
            result += shared
        norm = weights.mlp_post_norm
        return result if norm is None else apply_norm(result, norm, self.config.norm_eps)

    def _as_packed(self, weight: Tensor) -> Tensor:
        if not self.is_int8:
            return weight.float()
        levels, scales = quantize_int8(weight)
        return levels * scales[:, None]


ERROR = {"float32": 2e-6, "bfloat16": 0.01, "int8": 0.03}
"""Root mean square error over standard deviation. int8: from rounding rows; both sides have rounded weights."""


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", CASES)
def test_experts_equal_those_of_torch(name: str, dtype: str) -> None:
    layer = Layer(CASES[name], dtype)
    x = layer.rows()
    found, expected = layer.compiled(x).float(), layer.plain(x)
    assert (found - expected).square().mean().sqrt() < ERROR[dtype] * expected.std()


@pytest.mark.parametrize("norms", ["before", "after", "around"])
@pytest.mark.parametrize("shared", [0, 56])
def test_experts_results_are_added_to_the_residual_stream(norms: NormPlacement, shared: int) -> None:
    """The whole layer, with an attention whose output is zero."""
    layer = Layer(Case(7, shared=shared, norms=norms), "float32")
    x = layer.rows()
    expected = x + 0.5 * layer.plain(x)
    positions, keys = torch.arange(7), torch.zeros(2, 8 * 2)
    spans, tables = np.array([[0, 0, 7, 0]]), torch.zeros(1, 1, dtype=torch.int64)
    native = layer.decoder._layers[0]
    native.keys, native.values = (each.data_ptr() for each in keys)
    slots = torch.zeros(7, dtype=torch.int64)
    batch = BatchStruct(7, positions.data_ptr(), slots.data_ptr(), 1, spans.ctypes.data, tables.data_ptr(), 1)
    assert layer.decoder._library.prepare(layer.decoder._handle, batch, None, 0)
    layer.decoder._run(batch, x, 0, 1)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    "name", ["few-rows", "many-rows", "shared-by-gate", "odd-sizes", "groups-of-sigmoids"]
)
def test_a_row_gives_the_same_alone_and_with_any_number_of_threads(name: str, dtype: str) -> None:
    layer = Layer(CASES[name], dtype)
    x = layer.rows()[:40]
    together = layer.compiled(x)
    assert torch.equal(together, torch.cat([layer.compiled(row[None]) for row in x]))
    assert torch.equal(together, Layer(CASES[name], dtype, num_threads=5).compiled(x))
    assert torch.equal(together, layer.compiled(x.flip(0)).flip(0))


@pytest.mark.parametrize("dtype", ERROR)
def test_the_first_of_equally_scored_experts_are_chosen(dtype: str) -> None:
    layer = Layer(Case(6, count=5, per_token=2), dtype, router_scale=0)
    x = layer.rows()
    found = layer.compiled(x).float()
    assert layer.decoder.routed().experts == 2
    layer.case = Case(6, count=2, per_token=2)
    assert layer.weights.experts is not None
    up, down = (Linear(each.weight[:2]) for each in (layer.weights.experts.up, layer.weights.experts.down))
    first = replace(layer.weights.experts, router=Linear(torch.zeros(2, 64)))
    layer.weights = replace(layer.weights, experts=replace(first, up=up, down=down))
    expected = layer.plain(x)
    assert (found - expected).square().mean().sqrt() < ERROR[dtype] * expected.std()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", ["few-rows", "groups-of-sigmoids"])
def test_a_row_with_nan_does_not_affect_other_rows(name: str, dtype: str) -> None:
    layer = Layer(CASES[name], dtype)
    x = layer.rows()[:5]
    expected = layer.compiled(x)
    x[2, 7] = torch.nan
    found = layer.compiled(x)
    assert found[2].isnan().any()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])
