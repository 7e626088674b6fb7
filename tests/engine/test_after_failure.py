"""An engine continues after an exception: requests of the failed batch start again, others are unaffected."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import BeamMove, ContextChunk, ScheduledBatch
from inflight.engine import runner as engine_module
from inflight.engine.engine import ModelEngine
from inflight.sampling import sampler as sampler_module
from tests.engine.driver import Driver, Row, alone, load_engine
from tests.engine.failing import Fault, Saboteur, serve_through_faults, spoil
from tests.engine.kernels import needs_native
from tests.engine.search import Search
from tests.engine.serving import config_of, load, to_torch
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CASE = "mistral-window"
PENALIZED = SamplingConfig(
    temperature=1.1,
    top_k=40,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    no_repeat_ngram_size=3,
    random_seed=5,
)
DECAYING = SamplingConfig(temperature=1.2, top_p=0.9, top_p_decay=0.9, top_p_min=0.3, random_seed=6)
DETAILS = OutputOptions(
    return_log_probs=True, num_top_log_probs=2, return_context_logits=True, return_generation_logits=True
)

Part = Callable[[ModelEngine], Any]
# name: object, function, whether it raises after its work, number of calls before that
STAGES: dict[str, tuple[Part, str, bool, int]] = {
    "before anything": (lambda engine: engine.sampler, "apply", False, 0),
    "before the runner": (lambda engine: engine.runner, "run", False, 0),
    "amid moves": (lambda engine: engine.runner.slots, "_move", True, 0),
    "amid block tables": (lambda engine: engine.runner.slots, "_append", False, 0),
    "after block tables": (lambda engine: engine.runner.slots, "apply", True, 0),
    "amid starts": (lambda engine: engine.sampler._slots, "start", True, 0),
    "after the second start": (lambda engine: engine.sampler._slots, "start", True, 1),
    "amid beams' parameters": (lambda engine: engine.sampler._slots, "move", True, 0),
    "amid histories": (lambda engine: engine.sampler._history, "start", True, 0),
    "amid beams' histories": (lambda engine: engine.sampler._history, "move", True, 0),
    "after starts": (lambda engine: engine.sampler, "apply", True, 0),
    "before context outputs": (lambda engine: engine.runner.context_outputs, "apply", False, 0),
    "before copies": (lambda engine: engine.runner.cache, "copy", False, 0),
    "after copies": (lambda engine: engine.runner.cache, "copy", True, 0),
    "before blocks are cleared": (lambda engine: engine.runner.cache, "clear", False, 0),
    "after blocks are cleared": (lambda engine: engine.runner.cache, "clear", True, 0),
    "packing": (lambda engine: engine_module, "pack", True, 0),
    "before the cache's second layer": (lambda engine: engine.runner.cache, "write", False, 1),
    "in the second layer": (lambda engine: engine.runner.decoder._attention._attention, "attend", False, 1),
    "after the last layer": (lambda engine: engine.runner.decoder, "forward", True, 0),
    "amid context outputs": (lambda engine: engine.runner.context_outputs, "_details", True, 0),
    "before logits": (lambda engine: engine.runner.decoder, "logits", False, 0),
    "after logits": (lambda engine: engine.runner.decoder, "logits", True, 0),
    "after the forward pass": (lambda engine: engine.runner, "run", True, 0),
    "before decoding": (lambda engine: engine.sampler, "decode", False, 0),
    "after penalties": (lambda engine: sampler_module, "process", True, 0),
    "in the sampler": (lambda engine: engine.sampler, "_choose_on_host", True, 0),
    "amid drafts": (lambda engine: engine.sampler, "_accept", True, 0),
    "amid candidates": (lambda engine: engine.sampler, "_candidates", True, 0),
    "after histories": (lambda engine: engine.sampler, "_remember", True, 0),
    "after decoding": (lambda engine: engine.sampler, "decode", True, 0),
    "after everything": (lambda engine: engine.runner.slots, "remember", True, 0),
}

IN_ANY_KERNELS = [
    "after block tables", "before copies", "after copies", "packing", "after the last layer",
    "amid context outputs", "before logits", "after logits", "in the sampler",
]  # fmt: skip
IN_STATES = ["after block tables", "after the last layer", "in the sampler", "after everything"]
every_stage = pytest.mark.parametrize(
    ("stage", "kernels"),
    with_all(
        [(stage, "torch") for stage in STAGES]
        + [pytest.param(stage, "native", marks=needs_native) for stage in IN_ANY_KERNELS],
        [
            ("in the second layer", "torch"),
            ("after block tables", "native"),
            ("in the sampler", "native"),
        ],
    ),
)


def make_requests(model: ZooModel) -> list[Request]:
    """Return requests of every kind for which an engine keeps state."""
    kinds: list[dict[str, Any]] = [
        {"output": DETAILS, "streaming": True},
        {"sampling": PENALIZED, "bad_words": ((11,), (12, 13))},
        {"sampling": SamplingConfig(beam_width=3, repetition_penalty=1.3)},
        {"sampling": DECAYING, "streaming": True},
        {"prompt_lookup_num_tokens": 4, "sampling": SamplingConfig(repetition_penalty=0.5)},
        {"draft": ExternalDraft(model.prompt(4, 99)), "sampling": replace(PENALIZED, random_seed=8)},
        {"sampling": SamplingConfig(beam_width=2), "output": OutputOptions(return_log_probs=True)},
        {"sampling": SamplingConfig(top_p=1.0, num_return_sequences=2), "output": DETAILS},
    ]
    shared = model.prompt(19)
    return [
        Request(number, (*(shared if number % 2 else ()), *model.prompt(6 + 3 * number, number)), 12, **kind)
        for number, kind in enumerate(kinds)
    ]


CONFIG = config_of("chunked", max_beam_width=3)


def assert_same(result: SequenceResult, expected: SequenceResult) -> None:
    """Compare tokens exactly; matrix kernels may round logits differently in another batch."""
    assert result.output_token_ids == expected.output_token_ids
    assert result.finish_reasons == expected.finish_reasons
    assert result.cum_log_probs == pytest.approx(expected.cum_log_probs, abs=1e-3)
    for found, wanted in zip(_logits(result), _logits(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def _logits(result: SequenceResult) -> list[torch.Tensor]:
    context = () if result.context_logits is None else (result.context_logits,)
    return [to_torch(tensor) for tensor in (*context, *(result.generation_logits or ()))]


@functools.cache
def undisturbed(model: ZooModel, kernels: str) -> dict[tuple[int, int], SequenceResult]:
    return serve_through_faults(load(model.folder, 100, 7, kernels=kernels), CONFIG, make_requests(model))


@every_stage
def test_tokens_equal_those_of_a_run_without_failures(
    zoo: Zoo, stage: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler runs halves of a failed batch separately; none of its requests is at fault."""
    assert_undisturbed_by_faults(zoo[CASE], stage, kernels, monkeypatch)


@pytest.mark.parametrize(
    ("stage", "kernels"),
    with_all(
        [
            *((stage, "torch") for stage in IN_STATES),
            *(pytest.param(stage, "native", marks=needs_native) for stage in IN_STATES),
        ],
        [("after the last layer", "torch"), ("after the last layer", "native")],
    ),
)
@pytest.mark.parametrize("case", with_all(["qwen3.5", "granite-hybrid", "lfm2"], ["lfm2"]))
def test_recurrent_states_begin_anew_after_a_failure(
    zoo: Zoo, case: str, stage: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed batch has changed states and snapshots."""
    assert_undisturbed_by_faults(zoo[case], stage, kernels, monkeypatch)


def assert_undisturbed_by_faults(
    model: ZooModel, stage: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve requests through failures in one stage, and compare them with a run without failures."""
    engine = load(model.folder, 100, 7, kernels=kernels)
    part, name, after, skipped = STAGES[stage]
    saboteur = Saboteur(monkeypatch, part(engine), name, after, skipped)
    served = serve_through_faults(engine, CONFIG, make_requests(model), saboteur)
    assert saboteur.num_faults > 0, "nothing failed"
    expected = undisturbed(model, kernels)
    assert served.keys() == expected.keys()
    for key, result in served.items():
        assert_same(result, expected[key])


WIDTH = 2
SEARCHED = SamplingConfig(beam_width=WIDTH, repetition_penalty=1.3)
NUM_TOKENS = 12


@dataclass
class RunningSequences:
    """Sequences in generation and a beam search, started together."""

    rows: list[Row]
    search: Search

    @classmethod
    def start(cls, driver: Driver, model: ZooModel, seed: int) -> RunningSequences:
        samplings = (PENALIZED, DECAYING)
        rows = [driver.start(model.prompt(20 + i, seed + i), each) for i, each in enumerate(samplings)]
        return cls(rows, driver.search(model.prompt(14, seed + 9), SEARCHED))

    def chunks(self) -> dict[Row, int]:
        return {row: len(row.tokens) for row in (*self.rows, self.search.row)}

    def leave(self, driver: Driver) -> None:
        """Release slots and blocks, as after a failed batch."""
        for row in self.rows:
            driver.release(row)
        for slot in self.search.slots:
            driver.release(Row(slot, [], self.search.row.start, []))
        driver.free_blocks[:0] = sorted({block for beam in self.search.beams for block in beam.blocks})

    def start_again(self, driver: Driver) -> RunningSequences:
        """Restart sequences from their known tokens, and the search from its prompt."""
        rows = [
            driver.start(row.tokens, row.start.request.sampling, prompt_length=row.prompt_length)
            for row in self.rows
        ]
        return RunningSequences(rows, driver.search(self.search.row.tokens, SEARCHED))


def assert_undisturbed(company: RunningSequences, engine: ModelEngine, model: ZooModel, seed: int) -> None:
    """Check that all get the same results as in `engine` without any failure."""
    driver = Driver(engine)
    alone = RunningSequences.start(driver, model, seed)
    driver.step(alone.chunks(), searches=[alone.search])
    while len(alone.search.generated[0]) < len(company.search.generated[0]):
        driver.step(generation=alone.rows, searches=[alone.search])
    assert company.search.generated == alone.search.generated
    for row, other in zip(company.rows, alone.rows, strict=True):
        assert len(row.generated) >= len(other.generated)
        assert row.generated[: len(other.generated)] == other.generated


@every_stage
def test_sequences_outside_a_failed_batch_continue(
    zoo: Zoo, stage: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of all kinds fails beside running sequences, and its requests restart in other slots."""
    model = zoo[CASE]
    engine = load_engine(model.folder, max_num_sequences=12, kernels=kernels)
    part, name, after, skipped = STAGES[stage]
    saboteur = Saboteur(monkeypatch, part(engine), name, after, skipped)
    driver = Driver(engine)
    bystanders, victims = (
        RunningSequences.start(driver, model, 100),
        RunningSequences.start(driver, model, 200),
    )
    victims.search.copies_all = True
    ended = driver.start(model.prompt(9, 1))
    searches = [bystanders.search, victims.search]
    driver.step({**bystanders.chunks(), **victims.chunks(), ended: 9}, searches=searches)
    for _ in range(3):
        driver.step(generation=[*bystanders.rows, ended, *victims.rows], searches=searches)

    driver.release(ended)
    newcomers = [
        driver.start(model.prompt(18, 2), PENALIZED),
        driver.start(model.prompt(19, 3), output=OutputOptions(return_context_logits=True)),
    ]
    saboteur.arm()
    drafting, generating = victims.rows
    with pytest.raises(Fault):
        driver.step(
            {newcomers[0]: 18, newcomers[1]: 19, drafting: 1},
            [generating],
            drafts={drafting: [7, 8]},
            searches=[victims.search],
        )
    driver.step(generation=bystanders.rows, searches=[bystanders.search])
    for newcomer in newcomers:
        driver.release(newcomer)
    victims.leave(driver)
    driver.release(Row(ended.slot, [], ended.start, []))  # the release is repeated
    driver.free_slots = sorted(set(driver.free_slots), reverse=True)

    victims = victims.start_again(driver)
    searches = [bystanders.search, victims.search]
    driver.step(victims.chunks(), bystanders.rows, searches=searches)
    for _ in range(NUM_TOKENS - 1):
        driver.step(generation=[*victims.rows, *bystanders.rows], searches=searches)
    monkeypatch.undo()
    assert_undisturbed(bystanders, load_engine(model.folder, kernels=kernels), model, 100)
    assert_undisturbed(victims, load_engine(model.folder, kernels=kernels), model, 200)


def test_a_batch_that_continues_a_failed_one_writes_nothing(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot's block table may be that of an earlier sequence, whose blocks may now belong to another
    sequence."""
    model = zoo[CASE]
    engine = load_engine(model.folder)
    saboteur = Saboteur(monkeypatch, engine.runner, "run", after=False)
    driver = Driver(engine)
    driver.free_slots = [3]
    earlier = driver.start(model.prompt(20, 1))
    driver.generate(earlier, 2)
    driver.release(earlier)
    driver.free_slots = [0]
    owner = driver.start(model.prompt(20, 2), PENALIZED)  # takes the blocks of the earlier sequence
    driver.generate(owner, 2)
    driver.free_slots = [3]
    victim = driver.start(model.prompt(20, 3))
    saboteur.arm()
    with pytest.raises(Fault):
        driver.step({victim: 20})
    cache = engine.runner.cache._blocks[0].clone()
    for batch in (
        ScheduledBatch(50, generation_slots=(3,)),
        ScheduledBatch(51, context=(ContextChunk(3, 20, (5,), True),)),
        ScheduledBatch(52, new_blocks=((3, (40,)),)),
        ScheduledBatch(53, moves=(BeamMove(4, 3, 9),), generation_slots=(4,)),
    ):
        with pytest.raises(ValueError, match="the batch continues in slot 3, whose last batch failed"):
            engine.forward(batch)
    assert torch.equal(cache, engine.runner.cache._blocks[0])
    driver.generate(owner, 12)
    assert (
        owner.generated
        == alone(load_engine(model.folder), owner.tokens[:20], 12, sampling=PENALIZED).generated
    )


def test_unused_slots_can_be_released(zoo: Zoo) -> None:
    model = zoo[CASE]
    engine = load_engine(model.folder)
    driver = Driver(engine)
    row = driver.start(model.prompt(20), PENALIZED)
    driver.generate(row, 3)
    driver._released = [1, 5, 5, 2, 1]
    driver.generate(row, 5)
    again = driver.start(model.prompt(20), PENALIZED)
    driver._released = [again.slot, again.slot]
    driver.generate(again, 5)
    assert (
        row.generated == again.generated == alone(engine, model.prompt(20), 5, sampling=PENALIZED).generated
    )


def test_only_the_request_with_nan_logits_ends(zoo: Zoo) -> None:
    """One of four requests has NaN logits from some token on, in every batch."""
    model = zoo[CASE]
    requests = make_requests(model)[:4]
    engine = load(model.folder, 100, 7)
    expected = serve_through_faults(engine, CONFIG, requests)
    faulty = requests[1]
    spoil(engine, faulty.request_id, num_tokens=25)
    served = serve_through_faults(engine, CONFIG, requests, faulty_id=faulty.request_id)
    assert served.keys() == expected.keys() - {(faulty.request_id, 0)}
    for key, result in served.items():
        assert_same(result, expected[key])
