"""Recurrent layers, compared with transformers' modules: in one scan, in parts, and token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from inflight.engine.recurrent.mixers import Mixer, empty_state, make_mixer
from inflight.models.recurrent import (
    GatedDelta,
    KimiDelta,
    Mamba2,
    RecurrentConfig,
    RecurrentWeights,
    ShortConv,
    total_size,
)

HIDDEN = 32
NUM_TOKENS = 75

Layer = tuple[nn.Module, RecurrentConfig, Mixer, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def gated_delta() -> Layer:
    settings = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        num_hidden_layers=4,
    )
    module = randomized(Qwen3_5GatedDeltaNet(settings, 0))
    config = GatedDelta(2, 4, 8, 12, 4, settings.rms_norm_eps)
    projections = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
    weights = RecurrentWeights(
        module.conv1d.weight.squeeze(1),
        decay=-module.A_log.exp(),
        step_bias=module.dt_bias,
        norm=module.norm.weight,
    )
    return (
        module,
        config,
        make_mixer(config, weights, F.silu),
        lambda x: torch.cat([each(x) for each in projections], 1),
        module.out_proj,
    )


def kimi_delta() -> Layer:
    settings = KimiLinearConfig(
        hidden_size=HIDDEN,
        linear_num_heads=4,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    module = randomized(KimiLinearDeltaAttention(settings, 0))
    config = KimiDelta(4, 8, 4, settings.rms_norm_eps)
    projections = (
        module.q_proj,
        module.k_proj,
        module.v_proj,
        module.forget_gate.f_a_proj,
        module.b_proj,
        module.g_a_proj,
    )
    weights = RecurrentWeights(
        module.conv1d.weight.squeeze(1),
        decay=-module.forget_gate.A_log.flatten().exp(),
        step_bias=module.forget_gate.dt_bias,
        norm=module.o_norm.weight,
        step_up=module.forget_gate.f_b_proj.weight,
        gate_up=module.g_b_proj.weight,
    )
    return (
        module,
        config,
        make_mixer(config, weights, F.silu),
        lambda x: torch.cat([each(x) for each in projections], 1),
        module.o_proj,
    )


def mamba2() -> Layer:
    settings = GraniteMoeHybridConfig(
        hidden_size=HIDDEN,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
        mamba_n_groups=2,
        mamba_d_conv=4,
        mamba_expand=2,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
    )
    module = randomized(GraniteMoeHybridMambaLayer(settings, 0))
    config = Mamba2(8, 8, 16, 2, 4, settings.rms_norm_eps)
    weights = RecurrentWeights(
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        decay=-module.A_log.exp(),
        step_bias=module.dt_bias,
        skip=module.D,
        norm=module.norm.weight,
    )
    return module, config, make_mixer(config, weights, F.silu), module.in_proj, module.out_proj


def short_conv() -> Layer:
    settings = Lfm2Config(hidden_size=HIDDEN, conv_L_cache=3, conv_bias=True, num_hidden_layers=2)
    module = randomized(Lfm2ShortConv(settings, 0))
    config = ShortConv(HIDDEN, 3)
    weights = RecurrentWeights(module.conv.weight.squeeze(1), module.conv.bias)
    return module, config, make_mixer(config, weights, F.silu), module.in_proj, module.out_proj


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.eval()


@pytest.fixture(params=[gated_delta, kimi_delta, mamba2, short_conv], ids=lambda each: each.__name__)
def layer(request: pytest.FixtureRequest) -> Layer:
    return request.param()


def hidden_states(count: int = NUM_TOKENS) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(3))


def start(config: RecurrentConfig, *leading: int):
    return empty_state(config, torch.float32, torch.device("cpu"), *leading)


def test_a_scan_equals_the_module_of_transformers(layer: Layer) -> None:
    module, config, mixer, project, output = layer
    x = hidden_states()
    assert project(x).shape[1] == total_size(config.sections)
    computed, _ = mixer.scan(project(x), start(config))
    assert computed.shape == (NUM_TOKENS, config.output_width)
    torch.testing.assert_close(output(mixer.finish(computed)), module(x[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (64,), (10, 70)])
def test_a_scan_in_parts_equals_one_scan(layer: Layer, cuts: tuple[int, ...]) -> None:
    _, config, mixer, project, _ = layer
    projected = project(hidden_states())
    whole, last = mixer.scan(projected, start(config))
    state, parts = start(config), []
    for part in projected.tensor_split(cuts):
        computed, state = mixer.scan(part, state)
        parts.append(computed)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


def test_steps_of_several_sequences_equal_a_scan_of_each(layer: Layer) -> None:
    _, config, mixer, project, _ = layer
    x = hidden_states(3 * 12).view(3, 12, HIDDEN)
    expected = [mixer.scan(project(each), start(config)) for each in x]
    states, outputs = start(config, 3), []
    for place in range(12):
        computed, states = mixer.step(project(x[:, place]), states)
        outputs.append(computed)
    torch.testing.assert_close(
        torch.stack(outputs, 1), torch.stack([each for each, _ in expected]), rtol=1e-4, atol=1e-4
    )
    for part, parts in zip(states, zip(*(state for _, state in expected), strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack(parts), rtol=1e-4, atol=1e-4)
