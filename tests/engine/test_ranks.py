"""Ranks that share every layer, pipeline stages, and both: the results equal those of one rank, in float32."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import pytest
import torch

from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ContextDetails
from inflight.engine.engine import ModelEngine
from inflight.engine.runner import ModelRunner
from inflight.errors import StepFailed, Unavailable
from inflight.ranks.failure_detector import NEVER
from tests.engine import test_served_beams as beams
from tests.engine import test_served_controls as controls
from tests.engine import test_served_details as details
from tests.engine import test_served_drafts as drafts
from tests.engine.driver import Driver
from tests.engine.failing import Saboteur, serve_through_faults, spoil
from tests.engine.kernels import by_default_and
from tests.engine.ranks import TOPOLOGIES, assert_same, assert_same_result, ranks
from tests.engine.serving import WAYS, Served, config_of, load, serve, to_torch
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

NUM_TOKENS = 16
LOGITS = OutputOptions(return_generation_logits=True, return_context_logits=True)


def _runner(stage: ModelRunner | ModelEngine) -> ModelRunner:
    return stage.runner if isinstance(stage, ModelEngine) else stage


every_topology = pytest.mark.parametrize(
    "topology",
    with_all([pytest.param(sizes, id=name) for name, sizes in TOPOLOGIES.items()], [(2, 1), (2, 2)]),
)
both_ways_at_once = pytest.mark.parametrize(
    "topology", with_all([pytest.param(sizes, id=name) for name, sizes in TOPOLOGIES.items()], [(2, 2)])
)
"""All topologies, by default the one whose ranks share layers and are stages too."""

LOGITS_ERROR = 1e-4


@pytest.mark.parametrize(
    "topology",
    with_all(
        [pytest.param(sizes, id=name) for name, sizes in {**TOPOLOGIES, "tp4": (4, 1)}.items()],
        [(2, 1), (1, 3)],
    ),
)
@pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(
            ["llama-gqa-tied", "llama-mlp-bias", "gpt2"],
            [
                "llama", "llama-gqa", "llama-gqa-tied", "llama-mlp-bias", "mistral-window", "qwen2",
                "qwen2-window", "qwen3", "gpt2",
            ],
        ),
        [("llama-gqa-tied", None), ("llama-mlp-bias", "torch"), ("qwen3", None), ("gpt2", None)],
    ),
)  # fmt: skip
def test_tokens_and_logits_of_every_family_are_those_of_transformers(
    zoo: Zoo, case: str, kernels: str | None, topology: tuple[int, int]
) -> None:
    model = zoo[case]
    requests = [Request(n, model.prompt(27 + n, n), NUM_TOKENS, output=LOGITS) for n in range(3)]
    with ranks(model.folder, topology, kernels=kernels) as engine:
        served = serve(engine, config_of("no-evict"), requests)
        calls = [collectives.num_calls for collectives in engine.collectives]
        caches = [_runner(stage).cache for stage in engine.stages]

    for request in requests:
        tokens = served.tokens(request)
        assert tokens == model.greedy(request.input_token_ids, NUM_TOKENS)
        expected = model.logits([*request.input_token_ids, *tokens])
        result, length = served.result(request), request.prompt_length
        for found, wanted in (
            (to_torch(result.generation_logits[0]), expected[length - 1 : -1]),
            (to_torch(result.context_logits), expected[:length]),
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=LOGITS_ERROR)
    tp_size, pp_size = topology
    assert served.most_in_flight == pp_size
    layers, kv_heads = 3, getattr(model.oracle.config, "num_key_value_heads", None) or 4
    assert sum(cache._blocks[0].shape[0] for cache in caches) == tp_size * layers, (
        "every layer is in one stage"
    )
    assert {cache._head_shapes[0][0] for cache in caches} == {max(1, kv_heads // tp_size)}, (
        "its own key heads alone"
    )
    if tp_size > 1:
        sums, gathers = (2 * layers + 1) * served.num_iterations, served.num_iterations + len(requests)
        assert sum(calls) == tp_size * (sums + gathers), "two sums a layer, the embedding's, and the logits"


def _some_of_everything(model: ZooModel) -> list[Request]:
    prompt, other = model.prompt(33), model.prompt(21, seed=1)
    sampled = SamplingConfig(temperature=0.8, top_k=20, top_p=0.9, random_seed=3, repetition_penalty=1.2)
    controlled = SamplingConfig(
        allowed_token_ids=tuple(range(0, 60, 2)), logit_bias_ids=(4, 8), logit_bias_values=(3.0, -2.0)
    )
    bias = FloatTensor((VOCAB_SIZE,), controls.bias().numpy().tobytes())
    log_probs = OutputOptions(return_log_probs=True, num_top_log_probs=3, return_prompt_log_probs=True)
    return [
        Request(1, prompt, 20, streaming=True),
        Request(2, prompt, 20, sampling=sampled, output=log_probs),
        Request(3, other, 16, sampling=SamplingConfig(beam_width=3, length_penalty=1.0)),
        Request(4, (*prompt, 7), 16, prompt_lookup_num_tokens=3),
        Request(5, other, 12, draft=ExternalDraft((5, 6, 7))),
        Request(6, other[:9], 14, sampling=SamplingConfig(num_return_sequences=2, top_k=5, random_seed=1)),
        *(Request(number, model.prompt(6 + number, number), 40) for number in (7, 8, 9, 10)),
        Request(11, other, 12, sampling=controlled, embedding_bias=bias, prompt_lookup_num_tokens=2),
    ]


@cache
def _by_one_rank(model: ZooModel, way: str, num_blocks: int, kernels: str | None = None) -> Served:
    return serve(
        load(model.folder, num_blocks, 8, kernels=kernels), config_of(way), _some_of_everything(model)
    )


def _shorter_ones(model: ZooModel) -> list[Request]:
    """Return the requests of every kind, without the four of 40 tokens."""
    return [each for each in _some_of_everything(model) if each.max_new_tokens < 40]


@cache
def _by_one_rank_through_faults(model: ZooModel) -> dict[tuple[int, int], SequenceResult]:
    """Serve with the same order of batches as through faults, but without any fault."""
    return serve_through_faults(load(model.folder, 64, 8), config_of("chunked"), _shorter_ones(model))


@pytest.mark.parametrize(
    ("way", "kernels", "topology"),
    with_all(
        [
            pytest.param(way.values[0], way.values[1], sizes, id=f"{way.id}-{name}")
            for way in by_default_and(["utilization-chunked-no-reuse"], list(WAYS))
            for name, sizes in TOPOLOGIES.items()
        ],
        [
            ("utilization-chunked-no-reuse", None, (2, 2)),
            ("utilization-chunked-no-reuse", "torch", (2, 1)),
        ],
    ),
)
def test_mixed_requests_give_one_ranks_results_in_every_way_of_serving(
    zoo: Zoo, way: str, kernels: str | None, topology: tuple[int, int]
) -> None:
    """Sampling, penalties, beams, drafts, several sequences, log probs; with chunks, reuse and pauses."""
    model = zoo["llama-gqa"]
    requests = _some_of_everything(model)
    one = _by_one_rank(model, way, 20, kernels)
    with ranks(model.folder, topology, 20, 8, kernels=kernels) as engine:
        many = serve(engine, config_of(way), requests)
    assert many.most_in_flight == topology[1]
    assert_same(many, one)
    if "utilization" in way:
        assert many.num_pauses > 0
    if topology[1] == 1:
        assert (many.num_iterations, many.num_pauses) == (one.num_iterations, one.num_pauses)


@cache
def _requests(kind: str, model: ZooModel) -> tuple[Request, ...]:
    """Return the requests of the tests that compare one rank with transformers or the reference."""
    if kind == "processors":
        return tuple(controls.processed(model)[0])
    if kind == "bans":
        return tuple(controls.banned(model)[0])
    if kind == "sampling":
        return tuple(controls.sampling_requests(model))
    if kind == "beams":
        changes = [{}, {"sampling": {"no_repeat_ngram_size": 2}}, {"sampling": {"repetition_penalty": 1.3}}]
        asked = [
            beams.make_request(model, number, **change)
            for number, change in zip((4, 13, 30), changes, strict=True)
        ]
        return (*asked, replace(asked[0], request_id=90, streaming=False, output=details.EVERYTHING))
    if kind == "details":
        return tuple(details.make_requests(model))
    plain = drafts.make_requests(model)
    if kind == "lookup":
        return tuple(
            replace(r, input_token_ids=r.input_token_ids * 2, prompt_lookup_num_tokens=5) for r in plain
        )
    assert kind == "drafts"
    tokens = drafts.plain_run(model, plain)
    return tuple(
        replace(r, draft=ExternalDraft((*found[: r.request_id % 4], 3, 4)))
        for r, found in zip(plain, tokens, strict=True)
    )


@cache
def _answers(kind: str, model: ZooModel) -> Served:
    return serve(load(model.folder, 300, 20), config_of("no-evict"), _requests(kind, model))


KINDS = ["processors", "bans", "sampling", "beams", "details", "drafts", "lookup"]


@both_ways_at_once
@pytest.mark.parametrize("kind", with_all(KINDS, ["sampling", "beams"]))
def test_every_control_has_the_same_effect_as_on_one_rank(
    zoo: Zoo, kind: str, topology: tuple[int, int]
) -> None:
    """Prompts are computed in chunks, with a small cache."""
    model = zoo["llama-gqa"]
    slots = 20 if kind == "beams" else 6
    with ranks(model.folder, topology, 60 if kind in ("beams", "lookup") else 40, slots) as engine:
        many = serve(engine, config_of("utilization-chunked-no-reuse"), _requests(kind, model))
    assert many.most_in_flight == topology[1]
    assert_same(many, _answers(kind, model))


def test_prompt_outputs_are_kept_by_the_reporting_rank_alone(zoo: Zoo) -> None:
    """The other rank takes part in the computation, and keeps nothing on the host."""
    model = zoo["llama-gqa"]
    with ranks(model.folder, (2, 1)) as engine:
        driver = Driver(engine)
        both = OutputOptions(return_context_logits=True, return_prompt_log_probs=True)
        row = driver.start(model.prompt(20), output=both)
        batch = driver.batch({row: 20})
        kept = []
        runner = _runner(engine.stages[1])
        run = runner.run
        runner.run = lambda *args: kept.append(run(*args)) or kept[-1]
        output = engine.decode(batch, engine.forward(batch))
        assert len(output.context[row.slot].logits) == 20 * VOCAB_SIZE * 4
        assert [outputs.context for outputs in kept] == [{row.slot: ContextDetails()}]


@both_ways_at_once
def test_a_stopped_request_does_not_affect_others(zoo: Zoo, topology: tuple[int, int]) -> None:
    """A request in its context, one in generation and a beam search are stopped while their batches are in
    flight."""
    model = zoo["llama-gqa"]
    requests = _some_of_everything(model)
    one = _by_one_rank(model, "chunked", 64)
    stops = {1: 2, 3: 8, 5: 5}
    with ranks(model.folder, topology, 64, 8) as engine:
        many = serve(engine, config_of("chunked"), requests, per_iteration=3, stops=stops)
        again = serve(engine, config_of("chunked"), requests)
    for key in one.responses:
        if key[0] in stops:
            assert set(many.result(*key).finish_reasons) == {FinishReason.CANCELLED}
        else:
            assert_same_result(many.result(*key), one.result(*key))
    assert_same(again, one)


# ---------------------------------------------------------------- when something fails

STAGES = {
    "first stage": (0, "run", False),
    "first stage, having computed": (0, "run", True),
    "last stage": (-1, "run", False),
    "choice of tokens": (-1, "choose", False),
}


@pytest.mark.parametrize(
    "topology",
    with_all([pytest.param((1, pp_size), id=f"pp{pp_size}") for pp_size in (1, 2, 3)], [(1, 2)]),
)
@pytest.mark.parametrize("where", STAGES)
def test_failed_batches_change_no_token(
    zoo: Zoo, topology: tuple[int, int], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both neighbouring stages are notified of the failure while later batches are in flight."""
    model = zoo["mistral-window"]
    requests = _shorter_ones(model)
    config = config_of("chunked")
    expected = _by_one_rank_through_faults(model)
    stage, name, after = STAGES[where]
    with ranks(model.folder, topology, 64, 8) as engine:
        saboteur = Saboteur(
            monkeypatch,
            engine.stages[stage] if name == "choose" else _runner(engine.stages[stage]),
            name,
            after,
        )
        served = serve_through_faults(engine, config, requests, saboteur)
        failures = list(engine.failures)
    assert saboteur.num_faults > 0, "nothing failed"
    assert len(failures) >= (saboteur.num_faults if name == "run" else 0)
    assert served.keys() == expected.keys()
    for key, result in served.items():
        assert_same_result(result, expected[key])


@both_ways_at_once
def test_only_the_request_with_nan_logits_ends(zoo: Zoo, topology: tuple[int, int]) -> None:
    """One of seven has NaN logits from some token on; no rank's forward pass fails because of it."""
    model = zoo["llama-gqa"]
    requests = _shorter_ones(model)
    expected = _by_one_rank_through_faults(model)
    with ranks(model.folder, topology, 64, 8) as engine:
        sampler = next(stage for stage in engine.stages if isinstance(stage, ModelEngine))
        spoil(sampler, requests[1].request_id, num_tokens=38)
        served = serve_through_faults(
            engine, config_of("chunked"), requests, faulty_id=requests[1].request_id
        )
        assert engine.failures == []
    assert served.keys() == expected.keys() - {(requests[1].request_id, 0)}
    for key, result in served.items():
        assert_same_result(result, expected[key])


@pytest.mark.parametrize("topology", [(1, 2), (2, 2)], ids=["pp2", "tp2-pp2"])
def test_a_chunk_after_a_batch_with_nan_is_computed_by_all_ranks(zoo: Zoo, topology: tuple[int, int]) -> None:
    """The chunk continues a failed one, but its ranks learn that when it is in flight."""
    model = zoo["llama-gqa"]
    with ranks(model.folder, topology) as engine:
        driver = Driver(engine)
        row, faulty = driver.start(model.prompt(20)), driver.start(model.prompt(9, 1))
        sampler = next(stage for stage in engine.stages if isinstance(stage, ModelEngine))
        spoil(sampler, faulty.start.request.request_id, num_tokens=0)
        batches = [driver.batch({row: 8, faulty: 9})]
        row.num_computed = 8
        batches.append(driver.batch({row: 12}))
        begun = [engine.forward(batch) for batch in batches]
        with pytest.raises(StepFailed, match="the model's highest logit is nan"):
            engine.decode(batches[0], begun[0])
        output = engine.decode(batches[1], begun[1])
        assert engine.failures == []
    assert [list(tokens) for tokens in output.token_ids] == [model.greedy(model.prompt(20), 1)]


@every_topology
def test_a_batch_that_breaks_the_contract_is_refused_by_all_ranks_alike(
    zoo: Zoo, topology: tuple[int, int]
) -> None:
    """Every rank of every stage refuses it before it waits for another; the next batch succeeds."""
    model = zoo["llama-gqa"]
    with ranks(model.folder, topology) as engine:
        driver = Driver(engine)
        row = driver.start(model.prompt(20))
        batch = driver.batch({row: 20})
        reason = "slot 0 has 0 blocks of 8 tokens, too few for position 0"
        with pytest.raises(StepFailed, match=reason if topology[1] == 1 else "failed in a pipeline stage"):
            engine.decode(batch, engine.forward(replace(batch, new_blocks=())))
        assert {rank for rank, _ in engine.failures} >= set(range(topology[0])), "the first stage's ranks"
        again = replace(batch, iteration=1)
        output = engine.decode(again, engine.forward(again))
    assert [list(tokens) for tokens in output.token_ids] == [model.greedy(model.prompt(20), 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_alone_reports_it_and_computes_no_more(
    zoo: Zoo, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank fails after sending everything that the other rank waits for, so that the other rank
    continues."""
    model = zoo["llama-gqa"]
    with ranks(model.folder, (2, 1)) as engine:
        saboteur = Saboteur(monkeypatch, _runner(engine.stages[rank]), "run", after=True)
        saboteur.arm()
        driver = Driver(engine)
        row = driver.start(model.prompt(20))
        batch = driver.batch({row: 20})
        begun = engine.forward(batch)
        assert begun[1 - rank].exception(10) is None
        engine.mates[0].leave()
        with pytest.raises(Unavailable, match=f"rank {rank} failed alone in iteration 0: BrokenBarrierError"):
            begun[rank].result(10)
        assert engine.failures == [(rank, 0), (rank, NEVER)]
        with pytest.raises(Unavailable, match=f"rank {rank} failed alone in iteration 0"):
            engine._ranks[rank].forward(batch)


def test_a_rank_that_fails_in_a_collective_is_detected_by_its_failed_call(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits in the collective until the test ends the wait."""
    model = zoo["llama-gqa"]
    with ranks(model.folder, (2, 1), kernels="torch") as engine:
        saboteur = Saboteur(monkeypatch, _runner(engine.stages[1]).decoder, "_mlp", after=False)
        saboteur.arm()
        noticed = threading.Event()
        original = engine.failures.append
        engine.failures = _Listener(original, noticed)
        driver = Driver(engine)
        row = driver.start(model.prompt(20))
        batch = driver.batch({row: 20})
        begun = engine.forward(batch)
        assert noticed.wait(60)
        assert not begun[0].done(), "rank 0 waits in a collective"
        engine.collectives[1].leave()
        with pytest.raises(StepFailed, match="BrokenBarrierError"):
            engine.decode(batch, begun)


class _Listener(list):
    def __init__(self, append, noticed: threading.Event) -> None:
        super().__init__()
        self._append, self._noticed = append, noticed

    def append(self, item) -> None:
        self._append(item)
        self._noticed.set()
