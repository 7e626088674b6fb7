"""Ranks that hold whole experts, or slices of some, generate transformers' tokens."""

from __future__ import annotations

import pytest

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve
from tests.models.zoo import Zoo
from tests.tiers import with_all


@pytest.mark.parametrize(
    ("topology", "moe_ep_size"),
    with_all(
        [
            pytest.param((2, 1), 2, id="tp2-ep2"),
            pytest.param((4, 1), 2, id="tp4-ep2"),
            pytest.param((4, 1), 1, id="tp4"),
            pytest.param((2, 2), 2, id="tp2-pp2-ep2"),
        ],
        [((4, 1), 2), ((2, 2), 2)],
    ),
)
@pytest.mark.parametrize(
    "case", with_all(["mixtral-even", "qwen2-moe", "qwen3-moe-even", "olmoe"], ["mixtral-even"])
)
def test_tokens_equal_those_of_one_rank(
    zoo: Zoo, case: str, topology: tuple[int, int], moe_ep_size: int
) -> None:
    """Packed prompts, generation of single rows (so that a rank has nothing to compute), a beam search."""
    model = zoo[case]
    requests = [
        Request(0, model.prompt(33), 14),
        Request(1, model.prompt(5, seed=1), 20),
        Request(2, model.prompt(21, seed=2), 12, sampling=SamplingConfig(beam_width=3)),
    ]
    with ranks(model.folder, topology, num_blocks=80, moe_ep_size=moe_ep_size) as engine:
        served = serve(engine, config_of("no-evict"), requests)
    for request in requests[:2]:
        assert served.tokens(request) == model.greedy(request.input_token_ids, request.max_new_tokens)
    expected = model.beams(
        requests[2].input_token_ids, 12, num_beams=3, num_return_sequences=3, length_penalty=0.0
    )
    assert served.beams(requests[2]) == [tokens for tokens, _ in expected]
