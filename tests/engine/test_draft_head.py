"""Draft heads: guesses as by transformers' layers, and tokens as without guesses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from inflight.config import Speculation
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.engine import ModelEngine
from tests.engine.serving import config_of, load, serve
from tests.models.draft_heads import DraftingModel, make_drafting_model
from tests.tiers import with_all

CASES = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "deepseek-v3", "glm4-moe", "glm4-moe-lite")
METRICS = OutputOptions(return_perf_metrics=True)
NUM_TOKENS = 24
WAYS = ("no-evict", "utilization-chunked-no-reuse", "utilization")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes each model once."""
    made: dict[tuple[str, bool], DraftingModel] = {}

    def get(case: str, agrees: bool = False) -> DraftingModel:
        if (case, agrees) not in made:
            made[case, agrees] = make_drafting_model(tmp_path_factory.mktemp(case), case, agrees)
        return made[case, agrees]

    return get


@dataclass
class Guesses:
    """Collects what the head of an engine guesses: by request id, the number of known tokens and the guesses."""

    engine: ModelEngine
    found: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = self.engine.runner._draft_head
        guess = head.guess

        def listen(batch: ScheduledBatch, *arguments: Any) -> ScheduledBatch:
            self.owners |= {start.slot: start.request.request_id for start in batch.starts}
            guessed = guess(batch, *arguments)
            for chunk in guessed.context:
                if count := chunk.num_draft_tokens:
                    known = chunk.start + len(chunk.token_ids) - count
                    self.found.append((self.owners[chunk.slot], known, chunk.token_ids[-count:]))
            return guessed

        head.guess = listen


def make_requests(model: DraftingModel, count: int = 6) -> list[Request]:
    """Return requests of which some have a prompt with a common beginning, and some sample."""
    samplings = (SamplingConfig(), SamplingConfig(temperature=0.9, top_k=20, random_seed=5))
    return [
        Request(
            number,
            (*model.prompt(17), *model.prompt(3 + 4 * number, number))[: 45 - number],
            NUM_TOKENS,
            sampling=samplings[number % 3 == 2],
            output=METRICS,
        )
        for number in range(count)
    ]


def with_head(way: str, count: int) -> Any:
    return config_of(way, speculative_decoding_mode=Speculation(Speculation.MTP, count))


@pytest.mark.parametrize("case", with_all(CASES, ("qwen3-next", "deepseek-v3", "qwen3.5")))
@pytest.mark.parametrize("way", with_all(WAYS, WAYS[:2]))
def test_guesses_are_those_of_transformers_layers(models: Any, case: str, way: str) -> None:
    """Chunks, reused blocks and pauses leave the head's cache complete, and no guess changes a token."""
    model = models(case)
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6, kernels="torch"), config_of(way), requests)
    engine = load(model.folder, 26, 4, has_draft_head=True)
    guesses = Guesses(engine)
    served = serve(engine, with_head(way, 3), requests)
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)
    assert len(guesses.found) > 3 * len(requests)
    for request_id, known, guessed in guesses.found[:: len(guesses.found) // 40 + 1]:
        tokens = [*requests[request_id].input_token_ids, *plain.tokens(request_id)][:known]
        assert list(guessed) == model.guesses(tokens, len(guessed)), (request_id, known)
