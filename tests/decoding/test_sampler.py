"""The fast pipeline against the slow, obvious one, and its edges."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.core.sampling_config import SamplingConfig
from inflight.decoding import reference
from inflight.decoding.rng import Purpose
from tests.decoding.factories import sample_rows

MARGIN = 1e-9  # a draw or a boundary nearer than this to a step may fall on either side of it

samplings = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.7, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 30, 100]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.7, 0.9, 0.999, 1.0]),
    random_seed=st.integers(0, 2**64 - 1),
)
# Few distinct values, so that there are ties at every boundary, as there are with bfloat16 logits.
logit_values = st.sampled_from([-3.0, -1.5, -0.0, 0.0, 0.25, 1.0, 2.0, 4.0]) | st.floats(-20, 20, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplingConfig], list[int]]:
    num_rows, vocab_size = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    row = st.lists(logit_values, min_size=vocab_size, max_size=vocab_size)
    return (
        draw(st.lists(row, min_size=num_rows, max_size=num_rows)),
        draw(st.lists(samplings, min_size=num_rows, max_size=num_rows)),
        draw(st.lists(st.integers(0, 10**6), min_size=num_rows, max_size=num_rows)),
    )


def _is_decided(logits: list[float], sampling: SamplingConfig, index: int, position: int) -> bool:
    """Whether neither the edge of top-p nor the draw is within rounding of another outcome."""
    if sampling.greedy:
        return True
    unlimited = SamplingConfig(sampling.temperature, sampling.top_k, 1.0)
    cumulative = 0.0
    for probability in reference.filtered_probabilities(logits, unlimited).values():
        cumulative += probability
        if 0 < sampling.top_p < 1 and abs(cumulative - sampling.top_p) < MARGIN:
            return False
    number = reference.uniform(sampling.random_seed, index, position, Purpose.SAMPLE)
    cumulative = 0.0
    for _, probability in sorted(reference.filtered_probabilities(logits, sampling).items()):
        cumulative += probability
        if abs(cumulative - number) < MARGIN:
            return False
    return True


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much]
)
@given(batches())
def test_tokens_are_those_of_the_reference(
    batch: tuple[list[list[float]], list[SamplingConfig], list[int]],
) -> None:
    logits, configs, positions = batch
    assume(all(_is_decided(*row) for row in zip(logits, configs, range(len(logits)), positions)))
    expected = [
        reference.next_token(row, config, index, position)
        for index, (row, config, position) in enumerate(zip(logits, configs, positions, strict=True))
    ]
    assert sample_rows(torch.tensor(logits), configs, positions) == expected


def test_a_row_gets_the_same_token_in_any_batch() -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    configs = [
        SamplingConfig(1.0, top_k, top_p, random_seed=5)
        for top_k, top_p in [
            (0, 0.0),
            (0, 0.9),
            (3, 0.0),
            (200, 0.5),
            (0, 1.0),
            (499, 0.0),
            (5000, 0.3),
            (1, 0.5),
        ]
    ]
    together = sample_rows(logits, configs, range(8))
    for row in range(8):
        # The other rows change what the batch has to look for; slots stay, as they key the numbers here.
        others = [config if index == row else SamplingConfig() for index, config in enumerate(configs)]
        assert sample_rows(logits, others, range(8))[row] == together[row]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    sample_rows(
        logits, [SamplingConfig(0.5, 5), SamplingConfig(0.5, 0, 0.5), SamplingConfig(0.5, 0, 1.0)], [1, 2, 3]
    )
    assert torch.equal(logits, before)


def test_a_greedy_batch_costs_one_argmax() -> None:
    calls = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    greedy = [SamplingConfig(), SamplingConfig(0.0, 5), SamplingConfig(1.0, 1), SamplingConfig(0.5)]
    logits = torch.randn(4, 100)
    with Noted():
        sample_rows(logits, greedy, [0] * 4)
    assert calls == ["argmax"]


def test_no_sort_of_the_vocabulary_with_a_top_k() -> None:
    logits = torch.randn(2, 1000)
    sorted_sizes = []
    original = torch.Tensor.sort

    def spy(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        sorted_sizes.append(self.shape)
        return original(self, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "sort", spy):
        sample_rows(logits, [SamplingConfig(1.0, 7, 0.9), SamplingConfig(1.0, 20)], [0, 0])
    assert sorted_sizes == [(2, 20)]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 0.0, [0, 1]), (0, 0.6, [0, 1, 2]), (0, 1.0, [0, 1, 2, 3])]
)
def test_equal_logits_keep_the_lower_ids(top_k: int, top_p: float, kept: list[int]) -> None:
    logits, sampling = [1.0] * 4, SamplingConfig(1.0, top_k, top_p)
    assert list(reference.filtered_probabilities(logits, sampling)) == kept
    drawn = {sample_rows(torch.tensor([logits]), [sampling], [position])[0] for position in range(200)}
    assert drawn == set(kept)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 are exact, and so is a top_p of 3/4."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()
    for top_p, kept in (
        (0.4, [0]),
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.75, [0, 1]),
        (0.76, [0, 1, 2]),
        (0.9, [0, 1, 2, 3]),
    ):
        config = SamplingConfig(top_p=top_p)
        assert list(reference.filtered_probabilities(logits, config)) == kept
        drawn = {sample_rows(torch.tensor([logits]), [config], [position])[0] for position in range(300)}
        assert drawn == set(kept)


def test_logits_that_are_no_numbers_give_some_token() -> None:
    logits = torch.full((4, 10), torch.nan)
    configs = [
        SamplingConfig(),
        SamplingConfig(1.0, 3),
        SamplingConfig(1.0, 0, 0.5),
        SamplingConfig(1.0, 0, 1.0),
    ]
    assert all(0 <= token < 10 for token in sample_rows(logits, configs, [0] * 4))


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((3, 10), -torch.inf)
    logits[:, 6] = -50.0
    configs = [SamplingConfig(9.0, 3), SamplingConfig(9.0, 0, 0.99), SamplingConfig(9.0, 0, 1.0)]
    assert sample_rows(logits, configs, [0] * 3) == [6, 6, 6]
