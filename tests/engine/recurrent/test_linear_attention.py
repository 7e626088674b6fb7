"""Linear attention, compared with transformers' code of gated DeltaNet, Kimi Delta Attention and Mamba-2."""

from __future__ import annotations

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from inflight.engine.recurrent.linear_attention import DIMENSION_PIECE, PIECE, scan, step

HEADS, KEY_DIM, VALUE_DIM = 3, 16, 24


def draw(num_tokens: int, has_beta: bool, seed: int = 0, by_dimension: bool = False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    queries, keys = normal(num_tokens, HEADS, KEY_DIM), normal(num_tokens, HEADS, KEY_DIM)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    shape = (num_tokens, HEADS, KEY_DIM) if by_dimension else (num_tokens, HEADS)
    log_decay = -torch.rand(shape, generator=generator) * 2
    beta = torch.rand((num_tokens, HEADS), generator=generator) if has_beta else None
    return queries, keys, normal(num_tokens, HEADS, VALUE_DIM), log_decay, beta


def draw_state(seed: int = 1) -> torch.Tensor:
    return torch.randn((HEADS, KEY_DIM, VALUE_DIM), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_tokens", [1, 5, PIECE, PIECE + 1, 3 * PIECE - 7])
def test_a_scan_equals_the_gated_delta_rule_of_transformers(num_tokens: int) -> None:
    queries, keys, values, log_decay, beta = draw(num_tokens, has_beta=True)
    state = draw_state()
    expected, expected_state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
        *(each[None] for each in (queries, keys, values)),
        g=log_decay[None],
        beta=beta[None],
        initial_state=state[None],
        output_final_state=True,
    )
    outputs, new_state = scan(queries * KEY_DIM**-0.5, keys, values, log_decay, beta, state)
    torch.testing.assert_close(outputs, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new_state, expected_state[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, DIMENSION_PIECE, 3 * DIMENSION_PIECE - 7])
def test_a_scan_with_a_decay_for_each_dimension_equals_kimi_delta_attention(num_tokens: int) -> None:
    queries, keys, values, log_decay, beta = draw(num_tokens, has_beta=True, by_dimension=True)
    state = draw_state()
    expected, expected_state = modeling_kimi_linear.recurrent_kimi_delta_attention(
        *(each[None] for each in (queries, keys, values, log_decay, beta)),
        initial_state=state[None],
        output_final_state=True,
    )
    outputs, new_state = scan(queries * KEY_DIM**-0.5, keys, values, log_decay, beta, state)
    torch.testing.assert_close(outputs, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new_state, expected_state[0], rtol=1e-4, atol=1e-4)


def test_equal_decays_of_all_dimensions_equal_one_decay_of_the_head() -> None:
    queries, keys, values, log_decay, beta = draw(50, has_beta=False)
    whole = scan(queries, keys, values, log_decay, beta, draw_state())
    of_dimensions = log_decay[..., None].expand(-1, -1, KEY_DIM)
    torch.testing.assert_close(scan(queries, keys, values, of_dimensions, beta, draw_state()), whole)


def test_strong_decays_do_not_overflow() -> None:
    queries, keys, values, log_decay, beta = draw(50, has_beta=True, by_dimension=True)
    outputs, state = scan(queries, keys, values, 200 * log_decay, beta, draw_state())
    assert outputs.isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("cut", [1, 30, PIECE, PIECE + 9])
def test_a_scan_in_two_parts_equals_one_scan(has_beta: bool, cut: int, by_dimension: bool) -> None:
    tokens = draw(PIECE + 40, has_beta, by_dimension=by_dimension)
    whole, last = scan(*tokens, draw_state())
    first, state = scan(*(None if each is None else each[:cut] for each in tokens), draw_state())
    second, state = scan(*(None if each is None else each[cut:] for each in tokens), state)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("has_beta", [False, True])
def test_a_scan_with_strong_decays_is_as_exact_as_steps(has_beta: bool, by_dimension: bool) -> None:
    queries, keys, values, log_decay, beta = draw(PIECE, has_beta, by_dimension=by_dimension)
    log_decay = 10 * log_decay
    exact, state = draw_state().double()[None], draw_state()
    for place in range(PIECE):
        rows = (each[place : place + 1].double() for each in (queries, keys, values, log_decay))
        _, exact = step(*rows, None if beta is None else beta[place : place + 1].double(), exact)
    _, found = scan(queries, keys, values, log_decay, beta, state)
    assert (found - exact[0]).norm() < 2e-7 * exact.norm()


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("has_beta", [False, True])
def test_steps_of_many_sequences_equal_a_scan_of_each(has_beta: bool, by_dimension: bool) -> None:
    sequences = [draw(20, has_beta, seed, by_dimension) for seed in range(4)]
    states = torch.stack([draw_state(seed) for seed in range(4)])
    expected = [scan(*tokens, state) for tokens, state in zip(sequences, states, strict=True)]
    outputs = []
    for place in range(20):
        rows = [
            None if parts[0] is None else torch.stack([part[place] for part in parts])
            for parts in zip(*sequences, strict=True)
        ]
        output, states = step(*rows, states)
        outputs.append(output)
    torch.testing.assert_close(
        torch.stack(outputs, 1), torch.stack([each for each, _ in expected]), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(states, torch.stack([each for _, each in expected]), rtol=1e-4, atol=1e-4)


def test_a_scan_without_the_delta_rule_equals_mamba2_of_transformers() -> None:
    num_tokens, groups = 100, 1
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((1, num_tokens, HEADS, VALUE_DIM), generator=generator)
    inputs, outputs_ = (torch.randn((1, num_tokens, groups, KEY_DIM), generator=generator) for _ in range(2))
    step_sizes = torch.rand((1, num_tokens, HEADS), generator=generator)
    rates = -torch.rand(HEADS, generator=generator)
    expected = modeling_mamba2.mamba2_chunk_scan(
        x, step_sizes, rates, inputs, outputs_, chunk_size=32, return_final_states=True
    )
    read, state = scan(
        outputs_[0].expand(-1, HEADS, -1),
        inputs[0].expand(-1, HEADS, -1),
        x[0] * step_sizes[0].unsqueeze(-1),
        step_sizes[0] * rates,
        None,
        torch.zeros(HEADS, KEY_DIM, VALUE_DIM),
    )
    torch.testing.assert_close(read, expected[0][0].view_as(read), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected[1][0].mT, rtol=1e-4, atol=1e-4)
