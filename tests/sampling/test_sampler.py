"""Drawing: top-k, top-p and min_p at their limits, and the cost of a batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.sampling import reference
from tests.sampling.factories import Row, choose_tokens, make_request, make_sampler, start_batch

pytestmark = pytest.mark.usefixtures("row_kernels")
only_torch = pytest.mark.parametrize("row_kernels", ["torch"], indirect=True)


def _rows(*samplings: dict[str, float], position: int = 1) -> list[Row]:
    return [Row(make_request([0] * position, **sampling)) for sampling in samplings]


@only_torch
def test_a_greedy_batch_costs_an_argmax_and_a_check_of_the_maxima() -> None:
    calls = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    greedy = _rows({}, {"temperature": 0.0, "top_k": 5}, {"top_k": 1}, {"temperature": 0.5})
    batch, positions = start_batch(greedy)
    sampler = make_sampler(4, 100)
    sampler.apply(batch)
    logits = torch.randn(4, 100)
    with Noted():
        output = sampler.decode(batch, logits, positions)
    to_host, views = ("resolve", "to", "detach"), ("lift_fresh", "slice", "unsqueeze", "squeeze")
    assert [call for call in calls if not call.startswith((*to_host, *views))] == ["gather"]  # numpy's argmax
    assert output.token_ids == [(token,) for token in logits.argmax(-1).tolist()]


@only_torch
@pytest.mark.parametrize(
    "sampling", [{"top_k": 7, "top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("scale", [0.1, 10.0], ids=["flat", "peaked"])
def test_the_vocabulary_is_never_sorted(sampling: dict[str, float], scale: float) -> None:
    logits = torch.randn(2, 40_000) * scale
    sizes = []
    originals = {name: getattr(torch.Tensor, name) for name in ("sort", "topk")}

    def spy(name: str) -> Any:
        def call(self: torch.Tensor, *args: object, **kwargs: object) -> object:
            sizes.append(self.shape[-1])
            return originals[name](self, *args, **kwargs)

        return call

    with mock.patch.multiple(torch.Tensor, sort=spy("sort"), topk=spy("topk")):
        choose_tokens(logits, _rows(sampling, sampling))
    assert max(sizes, default=0) < 10_000


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.5}, [0, 1]),
    ],
)
@pytest.mark.parametrize("unlikely", [0, 3000], ids=["short", "long"])
def test_equal_logits_keep_the_lower_ids(sampling: dict[str, float], kept: list[int], unlikely: int) -> None:
    logits = torch.tensor([1.0] * 4 + [-80.0] * unlikely)
    request = make_request(**sampling)
    assert list(reference.filtered_probabilities([1.0] * 4, request.sampling)) == kept
    rows = [Row(make_request([0] * length, **sampling)) for length in range(1, 201)]
    assert set(choose_tokens(logits.expand(200, -1).clone(), rows)) == set(kept)


@pytest.mark.parametrize("size", [500, 20_000])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.8])
def test_a_top_p_over_equal_logits_keeps_the_first(size: int, top_p: float) -> None:
    """All tokens are in one bin of the histogram of weights, and too many of them are needed to sort them."""
    rows = [Row(make_request([0] * length, top_p=top_p)) for length in range(1, 201)]
    tokens = choose_tokens(torch.zeros(200, size), rows)
    assert 0.9 * top_p * size < max(tokens) < top_p * size


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """The tokens' probabilities are 1/2, 1/4, 1/8 and 1/8."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    cases = [
        (0.4, [0]),
        (0.499, [0]),
        (0.501, [0, 1]),
        (0.749, [0, 1]),
        (0.751, [0, 1, 2]),
        (0.9, [0, 1, 2, 3]),
    ]
    for top_p, kept in cases:
        config = make_request(top_p=top_p).sampling
        assert list(reference.filtered_probabilities(logits.tolist(), config)) == kept
        rows = [Row(make_request([0] * length, top_p=top_p)) for length in range(1, 301)]
        assert set(choose_tokens(logits.expand(300, -1).clone(), rows)) == set(kept)


_EVERY_KIND = [
    {},
    {"top_k": 3},
    {"top_k": 300},
    {"top_p": 0.5},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"top_k": 4, "top_p": 0.7, "min_p": 0.2, "temperature": 0.3},
]


@pytest.mark.parametrize("size", [10, 5000])
def test_a_row_whose_tokens_are_all_banned_gets_none(size: int) -> None:
    words = [(token,) for token in range(size)]
    rows = [Row(make_request(bad_words=words, **sampling)) for sampling in _EVERY_KIND]
    assert choose_tokens(torch.randn(len(rows), size), rows) == [None] * len(rows)
    assert [reference.next_token([0.0] * size, row.request, row.tokens) for row in rows[:2]] == [None, None]


@pytest.mark.parametrize("size", [10, 5000])
def test_excluded_tokens_are_never_drawn(size: int) -> None:
    logits = torch.full((len(_EVERY_KIND), size), -torch.inf)
    logits[:, 6] = -50.0
    rows = _rows(*({**sampling, "temperature": 9.0} for sampling in _EVERY_KIND))
    assert choose_tokens(logits, rows) == [6] * len(rows)


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = torch.randn(400, 3000, generator=torch.Generator().manual_seed(0)) * 50
    kinds = [{"top_k": 5}, {"top_p": 0.9}, {"top_p": 1.0}, {"min_p": 0.5}] * 100
    cold = _rows(*({**sampling, "temperature": 1e-10} for sampling in kinds))
    assert choose_tokens(logits, cold) == logits.argmax(-1).tolist()
    hot = [Row(make_request([0] * length, top_p=1.0, temperature=1e10)) for length in range(1, 401)]
    assert len(set(choose_tokens(logits, hot))) > 300
