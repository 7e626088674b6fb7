"""Several ranks under mpirun give the results of one rank, for requests of every kind.

Every rank runs the loop. Two more requests are stopped and fail.
"""

from __future__ import annotations

import json

import pytest

from inflight.config import EngineConfig
from inflight.engine.load import load_engine
from tests.engine.serving import serve
from tests.models.zoo import Zoo
from tests.ranks import requests
from tests.ranks.mpirun import run_ranks
from tests.tiers import with_all


def plain(found: dict) -> dict:
    """Round the values that are sums over ranks."""
    return {**found, "log_probs": [pytest.approx(values, abs=1e-4) for values in found["log_probs"]]}


@pytest.mark.parametrize(
    ("case", "tp_size", "pp_size", "moe_ep_size"),
    with_all(
        [
            ("llama-gqa", 2, 1, 1),
            ("gpt2", 1, 2, 1),
            ("mistral-window", 2, 2, 1),
            ("mixtral-even", 2, 1, 2),
            ("gemma3n", 1, 2, 1),
        ],
        ["mixtral-even"],
    ),
)
def test_several_ranks_give_the_results_of_one(
    zoo: Zoo, case: str, tp_size: int, pp_size: int, moe_ep_size: int
) -> None:
    folder = str(zoo[case].folder)
    config = EngineConfig(folder, **requests.ENGINE, max_tokens_in_paged_kv_cache=8 * 100)
    alone = load_engine(config)
    expected = requests.answers(serve(alone, requests.CONFIG, requests.make_requests()))
    stopped, faulty = requests.make_doomed()
    whole = serve(alone, requests.CONFIG, [stopped]).tokens(requests.STOPPED)

    sizes = map(str, (tp_size, pp_size, moe_ep_size))
    said = run_ranks(tp_size * pp_size, "tests.ranks.rank_program", folder, *sizes)

    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    ranks.sort(key=lambda rank: rank["rank"])
    assert [rank["rank"] for rank in ranks] == list(range(tp_size * pp_size))
    leader = ranks[0]
    got = {tuple(found["key"]): found for found in leader["answers"]}
    cut_short = got.pop((requests.STOPPED, 0))
    assert [got[key] for key in sorted(got)] == [plain(found) for found in expected]
    assert cut_short["reasons"] == ["CANCELLED"]
    streamed = leader["streamed"]
    assert 0 < len(streamed) < stopped.max_new_tokens and streamed == whole[: len(streamed)]
    ((faulty_id, (code, text)),) = leader["errors"].items()
    assert (faulty_id, code) == (str(faulty.request_id), "INTERNAL") and faulty.request_id == requests.GUILTY
    assert "FloatingPointError: the model's highest logit is nan" in text
    for rank in ranks:
        assert rank["num_blocks"] == requests.NUM_BLOCKS, "as many as the rank with the least room has"
        assert rank["left"] == [0, 0]
        for name in ("finished", "failed", "counts"):
            assert rank[name] == leader[name], "all ranks have done the same"
    assert leader["failed"] == {"INTERNAL": 1}
    assert leader["counts"][0] > 0, "nobody was paused"
    assert all(rank["answers"] == [] for rank in ranks[1:])
