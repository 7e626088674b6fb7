"""The guesses of an engine's draft head, and requests whose tokens do not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from inflight.config import SchedulingConfig
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache
from tests.engine.kernels import needs_native
from tests.engine.lora import make_adapter, stored
from tests.engine.serving import Served, config_of, load, serve
from tests.engine.thread_ranks import ThreadRanks
from tests.models.zoo import ZooModel

METRICS = OutputOptions(return_perf_metrics=True)
NUM_TOKENS = 24
KERNELS = pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_native), "torch"])
WAYS = ("no-evict", "utilization-chunked-no-reuse", "utilization")


@dataclass
class Guesses:
    """Collects what the head of an engine guesses: by request id, the number of known tokens and the guesses.

    Drafts are as long as requests allow, as if guesses took no time.
    """

    engine: ModelEngine
    found: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.limits = replace(self.engine.limits, guess_cost=0.0)
        head = self.engine.runner._draft_head
        guess = head.guess

        def listen(batch: ScheduledBatch, *arguments: Any) -> list[int]:
            tokens = guess(batch, *arguments)
            for chunk in batch.with_guesses(tokens).context:
                if count := chunk.num_draft_tokens:
                    known = chunk.start + len(chunk.token_ids) - count
                    self.found.append((self.owners[chunk.slot], known, chunk.token_ids[-count:]))
            return tokens

        def run_listening(batch: ScheduledBatch, messages: Any) -> Any:
            self.owners |= {start.slot: start.request.request_id for start in batch.starts}
            return run(batch, messages)

        head.guess = listen
        runner, run = self.engine.runner, self.engine.runner.run
        runner.run = run_listening


def make_requests(model: ZooModel, count: int = 6) -> list[Request]:
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


@torch.inference_mode()
def fill_with_garbage(cache: KvCache) -> None:
    """Fill all blocks but the null block with NaN, as sequences may leave them after an overflow."""
    for memory in cache._memories():
        if memory.is_floating_point():
            memory[:, :, : cache.null_block] = float("nan")


def requests_of_all_kinds(model: ZooModel) -> list[Request]:
    """Return requests with controls that must work beside drafts.

    Number 6 has adapter 3; number 7 is long, to be stopped.
    """
    first = Request(0, model.prompt(19), 20, output=METRICS)
    tokens = serve(load(model.folder, 60, kernels="torch"), config_of("no-evict"), [first]).tokens(0)
    return [
        first,
        replace(first, request_id=7, max_new_tokens=200),
        replace(first, request_id=1, sampling=SamplingConfig(beam_width=3)),
        replace(first, request_id=2, output=OutputOptions(return_generation_logits=True)),
        replace(
            first, request_id=3, output=OutputOptions(return_log_probs=True, return_prompt_log_probs=True)
        ),
        replace(first, request_id=4, stop_words=(tuple(tokens[6:8]),)),
        replace(first, request_id=5, draft=ExternalDraft((*tokens[:2], 5, 6))),
        replace(first, request_id=6, lora=LoraRequest(3)),
        replace(
            first,
            request_id=8,
            sampling=SamplingConfig(temperature=1.1, random_seed=7, num_return_sequences=2),
        ),
        replace(first, request_id=9, sampling=SamplingConfig(repetition_penalty=1.3), end_ids=(tokens[12],)),
        replace(first, request_id=10, input_token_ids=model.prompt(1)),
    ]


def check_results_of_all_kinds(
    model: ZooModel,
    load_model: Callable[[bool], ModelEngine],
    with_head: Callable[[str, int], SchedulingConfig],
) -> None:
    """Check that requests of all kinds have the same results with and without guesses.

    Args:
        model: The model, whose head is mostly right.
        load_model: Loads it with its head, or without.
        with_head: Returns the configuration of one of WAYS, with drafts of up to so many tokens.
    """
    requests = requests_of_all_kinds(model)
    adapters = {6: stored(make_adapter(model, r=4, lora_alpha=4, target_modules=["o_proj"]).weights, 3)}

    def run(way: str, count: int | None) -> Served:
        engine = load_model(count is not None)
        config = config_of(way) if count is None else with_head(way, count)
        return serve(engine, config, requests, stops={7: 9}, adapters=adapters)

    plain = run("no-evict", None)
    for way, count in (("no-evict", 2), ("utilization-chunked-no-reuse", 4)):
        served = run(way, count)
        for key in plain.responses:
            found, expected = served.result(*key), plain.result(*key)
            if key[0] == 7:  # stopped when it had more tokens
                assert 4 < len(plain.tokens(7)) <= len(served.tokens(7)) < 200
                assert served.tokens(7)[: len(plain.tokens(7))] == plain.tokens(7)
                continue
            assert (found.output_token_ids, found.finish_reasons) == (
                expected.output_token_ids,
                expected.finish_reasons,
            ), key
            for of_found, of_expected in zip(found.log_probs or (), expected.log_probs or (), strict=True):
                assert of_found == pytest.approx(of_expected, abs=1e-4)
        assert served.result(0).perf_metrics.num_accepted_draft_tokens > 3


def check_that_ranks_guess_the_same(
    many: ThreadRanks, one: ModelEngine, plain: Served, config: SchedulingConfig, requests: list[Request]
) -> None:
    """Check that several ranks have the tokens of `plain`, and the drafts of one rank.

    Drafts are compared for requests one after the other, because pipeline stages divide requests among batches.
    """
    together = serve(many, config, requests)
    accepted = 0
    for request in requests:
        assert together.tokens(request) == plain.tokens(request)
        found, expected = (serve(engine, config, [request]) for engine in (many, one))
        assert found.tokens(request) == expected.tokens(request) == plain.tokens(request)
        metrics = [served.result(request).perf_metrics for served in (found, expected)]
        assert metrics[0].num_draft_tokens == metrics[1].num_draft_tokens
        assert metrics[0].num_accepted_draft_tokens == metrics[1].num_accepted_draft_tokens
        accepted += metrics[0].num_accepted_draft_tokens
    assert accepted > 5


def check_that_a_wrong_head_is_left_alone(
    engine: ModelEngine, model: ZooModel, config: SchedulingConfig, count: int
) -> None:
    """Run `count` requests at once, and check that the head, which is hardly ever right, is soon not used.

    The head's part of later blocks is zero. Another request that goes on from these blocks has the right tokens.
    """
    head, num_filled = engine.runner._draft_head, list[int]()
    fill = head.fill

    def listen(packed: Any, slots: Any, *arguments: Any) -> None:
        num_filled.append(len(slots))
        fill(packed, slots, *arguments)

    head.fill = listen
    requests = [Request(number, model.prompt(9, number), 150, output=METRICS) for number in range(count)]
    served = serve(engine, config, requests, count)
    assert served.num_iterations > 140
    assert 0 < len(num_filled) < 70
    assert max(num_filled) == count
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 150)
        assert 2 <= served.result(request).perf_metrics.num_draft_tokens <= 12
    cache = engine.runner.cache
    is_used = [memory[0].flatten(2).any(dim=2).any(dim=0) for memory in cache._memories()]
    has_hidden, num_blocks = is_used[-1], -(-158 // cache.tokens_per_block)
    assert int(is_used[0].sum()) == count * num_blocks
    assert count <= int(has_hidden.sum()) < count * num_blocks / 2
    draft_layer = cache.draft_layer()._layers[0]
    assert torch.equal(draft_layer.flatten(2).any(dim=2).any(dim=0), has_hidden)

    num_filled.clear()
    again = [
        Request(100 + number, (*request.input_token_ids, *served.tokens(request)[:130]), 20, output=METRICS)
        for number, request in enumerate(requests)
    ]
    reused = serve(engine, config, again, count)
    for number, request in enumerate(requests):
        assert reused.tokens(again[number]) == served.tokens(request)[130:]
    assert num_filled
