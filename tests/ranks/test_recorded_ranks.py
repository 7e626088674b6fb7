"""Sums over ranks recorded with the layers: by a tape over gloo, by CUDA graphs over NCCL on two GPUs."""

from __future__ import annotations

import json

import pytest

from tests.models.zoo import Zoo
from tests.ranks.mpirun import run_ranks
from tests.ranks.test_torch_collectives import _GPU


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_GPU)])
@pytest.mark.parametrize("case", ["llama-gqa-tied", "gpt2"])
def test_replayed_iterations_of_two_ranks_have_the_tokens_of_one(zoo: Zoo, case: str, device: str) -> None:
    model = zoo[case]
    prompts = [model.prompt(5 + 7 * number, number) for number in range(3)]
    texts = [json.dumps(list(prompt)) for prompt in prompts]
    said = run_ranks(2, "tests.ranks.recorded_ranks_program", str(model.folder), device, *texts)
    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    for rank in ranks:
        for prompt, tokens in zip(prompts, rank["tokens"], strict=True):
            assert tokens == model.greedy(prompt, len(tokens))
        assert device == "cuda" or rank["replayed"] == 7, "two iterations with chunks, and five without"
