"""Speculation with a draft model in a second torch engine: tokens keep the target model's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from inflight.batch_manager import GptManager
from inflight.config import SchedulingConfig
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.endpoint.drafting import DraftingClient
from inflight.endpoint.local import LocalEngineClient
from tests.endpoint.factories import Inbox

from .serving import load

FEW, END = 5, 3
PROMPT = (1, 4, 2)
TEMPERATURE = 0.7
NUM_REQUESTS = 700


def make_model(folder: Path, seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=FEW, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, max_position_embeddings=64, initializer_range=0.25,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@contextmanager
def running(folder: Path) -> Iterator[LocalEngineClient]:
    engine = load(folder, num_blocks=200, max_num_sequences=64)
    scheduler = Scheduler(SchedulingConfig(max_num_tokens=512), engine.limits)
    client = LocalEngineClient(EngineDescription(scheduler.limits), lambda: manager.notify())
    manager = GptManager(
        engine, scheduler, client.get_inference_requests, client.send_response, client.poll_stop_signals,
        on_death=client.fail_all,
    )  # fmt: skip
    yield client
    manager.shutdown()
    client.close()


def expected(model: transformers.LlamaForCausalLM) -> dict[tuple[int, ...], float]:
    """Return the probability of the first two tokens, or fewer if END comes, from transformers' logits."""

    @torch.no_grad()
    def following(*tokens: int) -> np.ndarray:
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].double()
        return (logits / TEMPERATURE).softmax(-1).numpy()

    first = following()
    shares: dict[tuple[int, ...], float] = {(): first[END]}
    for token in set(range(FEW)) - {END}:
        second = following(token)
        shares[(token,)] = first[token] * second[END]
        for other in set(range(FEW)) - {END}:
            shares[token, other] = first[token] * second[other]
    assert sum(shares.values()) == pytest.approx(1.0)
    return shares


def test_tokens_that_were_drafted_by_another_model_have_the_targets_distribution(tmp_path: Path) -> None:
    shares = expected(make_model(tmp_path / "target", seed=1))
    others = expected(make_model(tmp_path / "draft", seed=2))
    assert sum(abs(shares[key] - others[key]) for key in shares) > 0.3, "another model, indeed"
    inboxes = []
    with running(tmp_path / "target") as target, running(tmp_path / "draft") as draft:
        client = DraftingClient(target, draft)
        for seed in range(NUM_REQUESTS):
            sampling = SamplingConfig(top_p=1.0, temperature=TEMPERATURE, random_seed=seed)
            request = DraftedRequest(
                0, PROMPT, 4, True, (END,), sampling=sampling, num_draft_tokens=2, use_draft_logits=True
            )
            inboxes.append(Inbox())
            client.submit(request, inboxes[-1])
        for inbox in inboxes:
            assert inbox.final().error is None
        client.close()
    found = Counter(tuple(inbox.tokens[:2]) for inbox in inboxes)
    statistic = sum((found[key] - NUM_REQUESTS * p) ** 2 / (NUM_REQUESTS * p) for key, p in shares.items())
    freedom = len(shares) - 1
    # Seeds are fixed, so the result is deterministic. A draft model's own distribution is far outside.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, f"{statistic} of {freedom}"
