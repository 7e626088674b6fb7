"""top_n_sigma compared with llama.cpp's formula in numpy and with the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.request.sampling_config import SamplingConfig
from inflight.errors import InvalidArgument
from inflight.sampling import reference
from tests.sampling.factories import Row, beams_of, choose_tokens, decode_rows, make_request
from tests.sampling.margins import is_decided
from tests.sampling.strategies import logits_rows, requests
from tests.sampling.test_pipeline import many_examples
from tests.tiers import with_all

pytestmark = pytest.mark.usefixtures("row_kernels")

LIMITS = st.sampled_from([0.11, 0.37, 0.83, 1.31, 2.73])
"""Values of n at which no logit of these tests is exactly on the border."""


def kept_by_llama_cpp(logits: np.ndarray, n: float) -> np.ndarray:
    """Return the tokens that `llama_sampler_top_n_sigma_apply` keeps, computed over finite logits."""
    possible = logits[np.isfinite(logits)].astype(np.float64)
    deviation = np.sqrt(np.mean((possible - possible.mean()) ** 2))
    return logits.astype(np.float64) >= possible.max() - n * deviation


def random_logits(seed: int, size: int = 500) -> torch.Tensor:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, ::7] = -math.inf
    return logits


@pytest.mark.parametrize("temperature", with_all([0.5, 1.0, 3.0], [0.5, 3.0]))
@pytest.mark.parametrize("n", with_all([0.4, 0.9, 1.7], [0.4, 1.7]))
def test_sampled_tokens_are_those_that_llama_cpp_keeps(n: float, temperature: float) -> None:
    """The temperature has no effect, because it divides all logits."""
    logits = random_logits(int(10 * n))
    kept = set(np.flatnonzero(kept_by_llama_cpp(logits[0].numpy(), n)).tolist())
    rows = [
        Row(make_request(top_n_sigma=n, temperature=temperature, random_seed=seed)) for seed in range(900)
    ]
    drawn = set(choose_tokens(logits.repeat(len(rows), 1), rows))
    assert drawn <= kept and len(drawn) > 2
    config = SamplingConfig(top_n_sigma=n, temperature=temperature)
    shares = reference.filtered_probabilities((logits[0] / temperature).tolist(), config)
    assert set(shares) == kept
    weights = np.exp((logits[0].double().numpy() / temperature)[sorted(kept)])
    assert [shares[token] for token in sorted(kept)] == pytest.approx((weights / weights.sum()).tolist())


@given(st.data())
@many_examples
def test_tokens_with_any_other_control_equal_those_of_the_reference(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([5, 40, 300]))
    made = [data.draw(requests(vocab_size)) for _ in range(4)]
    limited = [
        replace(each, sampling=replace(each.sampling, top_n_sigma=data.draw(LIMITS))) for each in made[1:]
    ]
    rows = [Row(each) for each in (made[0], *limited)]
    logits = data.draw(logits_rows(4, vocab_size))
    chosen = choose_tokens(torch.tensor(logits), rows)
    for values, row, token in zip(logits, rows, chosen, strict=True):
        if is_decided(values, row.request, row.tokens):
            assert token == reference.next_token(values, row.request, row.tokens)


@given(st.data())
@many_examples
def test_drafts_are_verified_against_the_kept_tokens(data: st.DataObject) -> None:
    """Greedy drafts are verified by equality, sampled ones at random with the probabilities of the same rows."""
    drafts = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=3))
    made = data.draw(requests(40, top_n_sigma=data.draw(LIMITS), top_p=1.0, temperature=1.0))
    request = replace(made, draft=make_request(drafts=drafts).draft)
    logits = data.draw(logits_rows(len(drafts) + 1, 40))
    expected = reference.verify_drafts(logits, request, request.input_token_ids, drafts)
    known = [[*request.input_token_ids, *drafts[:index]] for index in range(len(drafts) + 1)]
    if all(is_decided(*each) for each in zip(logits, [request] * len(known), known, strict=True)):
        output = decode_rows(torch.tensor(logits), [Row(request, drafts=tuple(drafts))])
        assert list(output.token_ids[0]) == expected


def test_drafts_outside_the_kept_tokens_are_rejected() -> None:
    """Drafts with logits are accepted at random, or by a threshold that accepts all."""
    logits = torch.tensor([[4.0, 3.9, 0.0, 0.0, 0.0, 0.0]]).repeat(2, 1)
    for seed in range(30):
        request = make_request(
            drafts=[2], draft_logits=torch.zeros(1, 6), threshold=0.0, top_n_sigma=1.0, random_seed=seed
        )
        (tokens,) = decode_rows(logits.clone(), [Row(request, drafts=(2,))]).token_ids
        assert len(tokens) == 1 and tokens[0] in (0, 1)


def test_top_n_sigma_alone_samples_and_greedy_requests_ignore_it() -> None:
    assert not SamplingConfig(top_n_sigma=0.5).greedy
    assert SamplingConfig(top_n_sigma=0.5, temperature=0.0).greedy and SamplingConfig().greedy
    assert not make_request(top_n_sigma=0.5).needs_host and not make_request(top_n_sigma=0.5).banning_tensors
    logits = random_logits(3)
    assert choose_tokens(logits.clone(), [Row(make_request(top_n_sigma=0.5, top_k=1))]) == [
        int(logits.argmax())
    ]


def test_equal_logits_keep_all_tokens_and_banned_ones_keep_none() -> None:
    alike, nothing = torch.zeros(1, 6), torch.full((1, 6), -math.inf)
    rows = [Row(make_request(top_n_sigma=0.1, random_seed=seed)) for seed in range(60)]
    assert set(choose_tokens(alike.repeat(60, 1), rows)) == set(range(6))
    words = [(token,) for token in range(6)]
    assert choose_tokens(alike, [Row(make_request(top_n_sigma=0.1, bad_words=words))]) == [None]
    assert reference.filtered_probabilities(nothing[0].tolist(), SamplingConfig(top_n_sigma=0.1)) == {}


def test_beams_ignore_top_n_sigma() -> None:
    logits = random_logits(4, 60)[:, 1:7].repeat(2, 1)
    tokens, scores = [[4, 8, 3], [4, 8, 5]], [-1.0, -1.5]
    found = [
        beams_of(logits.clone(), make_request((4, 8), beam_width=2, top_n_sigma=n), tokens, scores, 6)
        for n in (0.0, 0.1)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("value", [-0.1, 2e10, math.nan, math.inf])
def test_values_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(InvalidArgument, match=rf"top_n_sigma must be in \[0, 1e\+10\], got {value}"):
        SamplingConfig(top_n_sigma=value).validate(20)
