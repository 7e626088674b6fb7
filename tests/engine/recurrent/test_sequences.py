"""Several sequences of one request compute their prompt once, and continue the state that it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ScheduledBatch
from tests.engine.kernels import by_default_and
from tests.engine.serving import config_of, load, serve
from tests.models.zoo import Zoo
from tests.tiers import with_all

BLOCK, NUM_SEQUENCES, NUM_TOKENS = 8, 3, 16
CASES = ["qwen3.5", "granite-hybrid", "lfm2", "falcon-h1"]


class Counted:
    """An engine that counts the tokens of prompts that it computes."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self._engine = load(folder, num_blocks=80, **changes)
        self.num_prompt_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, batch: ScheduledBatch) -> Any:
        self.num_prompt_tokens += sum(len(chunk.token_ids) for chunk in batch.context)
        return self._engine.forward(batch)


@pytest.mark.parametrize(("case", "kernels"), with_all(by_default_and(CASES, CASES), [("qwen3.5", None)]))
@pytest.mark.parametrize("length", [33, 5])
def test_sequences_of_a_prompt_share_its_computation(
    zoo: Zoo, case: str, kernels: str | None, length: int
) -> None:
    """All but the first sequence compute only what follows the prompt's last whole block."""
    model = zoo[case]
    sampling = SamplingConfig(temperature=1.2, top_p=0.9, random_seed=3, num_return_sequences=NUM_SEQUENCES)
    request = Request(0, model.prompt(length), NUM_TOKENS, sampling=sampling)
    engine = Counted(model.folder, kernels=kernels, recurrent_state_snapshots=8)
    together = serve(engine, config_of("no-evict"), [request])
    after_blocks = length - length // BLOCK * BLOCK
    assert engine.num_prompt_tokens == length + (NUM_SEQUENCES - 1) * after_blocks
    without = Counted(model.folder, kernels=kernels, max_num_sequences=1, recurrent_state_snapshots=0)
    alone = serve(without, config_of("no-evict"), [request])
    assert without.num_prompt_tokens == NUM_SEQUENCES * length, (
        "without snapshots every sequence computes it all"
    )
    sequences = [together.tokens(request, index) for index in range(NUM_SEQUENCES)]
    assert sequences == [alone.tokens(request, index) for index in range(NUM_SEQUENCES)]
    assert len(set(map(tuple, sequences))) == NUM_SEQUENCES
