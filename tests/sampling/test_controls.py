"""allowed_token_ids and logit_bias: compared with the reference, and with values checked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InvalidArgument
from inflight.sampling import reference
from tests.sampling.factories import (
    Row,
    beams_of,
    choose_tokens,
    decode_rows,
    make_request,
    make_sampler,
    start_batch,
)

pytestmark = pytest.mark.usefixtures("row_kernels")

INF = math.inf
KINDS = [{}, {"top_k": 3}, {"top_k": 150}, {"top_p": 0.4}, {"top_p": 0.98}, {"top_p": 1.0}, {"min_p": 0.3}]
CONTROLLED = [
    {"allowed_token_ids": (7, 3, 200, 3)},
    {"allowed_token_ids": tuple(range(0, 300, 2))},
    {"logit_bias_ids": (5, 9, 5), "logit_bias_values": (3.0, -INF, 4.0)},
    {"logit_bias_ids": (299,), "logit_bias_values": (8.0,), "repetition_penalty": 1.5},
    {"allowed_token_ids": (1, 2, 3), "logit_bias_ids": (2, 4), "logit_bias_values": (5.0, 90.0)},
]


def _logits(rows: int, vocab_size: int = 300) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)).bfloat16().float()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_with_controls_equal_those_of_the_reference(kind: dict) -> None:
    """Rows with controls equal the reference, and plain rows of the same batch do not depend on them."""
    rows = [
        Row(make_request((4, 299, 8), random_seed=seed, **kind, **controls))
        for controls in [*CONTROLLED, {}]
        for seed in range(6)
    ]
    logits = _logits(len(rows))
    expected = [
        reference.next_token(values, row.request, row.tokens)
        for values, row in zip(logits.tolist(), rows, strict=True)
    ]
    assert choose_tokens(logits.clone(), rows) == expected
    assert choose_tokens(logits[-6:].clone(), rows[-6:]) == expected[-6:]


@pytest.mark.parametrize("kind", [{}, {"top_k": 3}, {"top_p": 1.0}], ids=str)
def test_a_device_chooses_the_same_tokens_without_the_host(kind: dict) -> None:
    rows = [Row(make_request((4,), random_seed=9, **kind, **controls)) for controls in CONTROLLED[:3]]
    assert not any(row.request.needs_host for row in rows)
    logits = _logits(3)
    sampler, (batch, positions) = make_sampler(3, 300), start_batch(rows)
    sampler.apply(batch)
    choice = sampler.begin(batch, logits.clone(), positions)
    assert sampler.finish(batch, choice, positions).token_ids == decode_rows(logits, rows).token_ids


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("kind", [{}, {"top_p": 0.9}], ids=str)
def test_draft_tokens_are_counted(kind: dict, with_logits: bool) -> None:
    for seed, controls in enumerate(CONTROLLED):
        logits = _logits(4)
        drafts = (7, 5, 2)
        proposed = _logits(3) if with_logits else None
        request = make_request(
            (4, 8), drafts=drafts, draft_logits=proposed, random_seed=seed, **kind, **controls
        )
        expected = reference.verify_drafts(
            logits.tolist(), request, (4, 8), drafts, 0, None if proposed is None else proposed.tolist()
        )
        assert list(decode_rows(logits, [Row(request, (), 0, drafts)]).token_ids[0]) == expected


@pytest.mark.parametrize("controls", CONTROLLED)
def test_beam_candidates_equal_those_of_the_reference(controls: dict) -> None:
    request = make_request((4, 8), beam_width=2, **controls)
    logits = _logits(2)
    tokens, scores = [[4, 8, 3], [4, 8, 7]], [-1.0, -1.5]
    found = beams_of(logits.clone(), request, tokens, scores, 6)
    expected = reference.beam_candidates(logits.tolist(), request, tokens, scores, 6)
    possible = [each for each in expected if each[2] > -INF]
    assert list(zip(found.rows, found.token_ids))[: len(possible)] == [each[:2] for each in possible]
    assert found.scores == pytest.approx([score for _, _, score in expected], abs=1e-5)


def test_only_allowed_tokens_are_chosen_with_any_bias() -> None:
    bias = [0.0] * 20
    bias[11] = INF
    request = make_request(allowed_token_ids=(3, 9), bias=bias, top_p=1.0, end_ids=(5,))
    rows = [Row(replace(request, sampling=replace(request.sampling, random_seed=seed))) for seed in range(99)]
    assert set(choose_tokens(torch.zeros(99, 20), rows)) == {3, 9}


def test_biases_of_a_token_add_up() -> None:
    """Sums may exceed float32, and -inf bans regardless of other values."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.5]]).repeat(4, 1)
    biases = [
        ((0, 0), (1.5, 1.5), 0),
        ((0, 0), (1.5, -1.5), 1),
        ((1, 3, 3), (90.0, 3e38, 3e38), 3),
        ((1, 1, 1), (3e38, 3e38, -INF), 2),
    ]
    rows = [Row(make_request(logit_bias_ids=ids, logit_bias_values=values)) for ids, values, _ in biases]
    assert choose_tokens(logits, rows) == [token for _, _, token in biases]


def test_a_request_that_bans_everything_gets_no_token() -> None:
    rows = [
        Row(make_request(allowed_token_ids=(3,), bad_words=[(3,)])),
        Row(make_request(logit_bias_ids=(0, 1, 2, 3, 4), logit_bias_values=(-INF,) * 5, top_k=2)),
        Row(make_request(allowed_token_ids=(4,), end_ids=(4,), min_length=2)),
        Row(make_request()),
    ]
    assert choose_tokens(torch.eye(4, 5), rows) == [None, None, None, 3]
    assert rows[0].request.banning_tensors == ["bad_words_list", "allowed_token_ids"]
    assert rows[1].request.banning_tensors == ["logit_bias_values"]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"allowed_token_ids": (3, 20)}, r"allowed_token_ids must be in \[0, 19\], got 20 at position 1"),
        ({"allowed_token_ids": (-1,)}, r"allowed_token_ids must be in \[0, 19\], got -1 at position 0"),
        (
            {"logit_bias_ids": (20,), "logit_bias_values": (1.0,)},
            r"logit_bias_ids must be in \[0, 19\], got 20",
        ),
        (
            {"logit_bias_ids": (1, 2), "logit_bias_values": (1.0,)},
            "logit_bias_ids has 2 token ids and logit_bias_values 1 values: send one value for each id",
        ),
        ({"logit_bias_values": (1.0,)}, "logit_bias_ids has 0 token ids and logit_bias_values 1"),
        (
            {"logit_bias_ids": (1, 2), "logit_bias_values": (1.0, math.nan)},
            "logit_bias_values must be finite numbers, or -inf to ban a token, got nan at position 1",
        ),
        ({"logit_bias_ids": (1,), "logit_bias_values": (INF,)}, "got inf at position 0"),
    ],
)
def test_values_out_of_range_are_refused(sampling: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingConfig(**sampling).validate(20)


def test_every_neutral_value_is_in_range_and_has_no_effect() -> None:
    neutral = SamplingConfig()
    neutral.validate(1)
    assert not any(neutral.uses(name) for name in CONTROLS)
    assert not make_request().banning_tensors and not make_request().needs_host
