"""Batches that feed themselves: the next one starts before the host has read their tokens, with equal results."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.engine.engine import ModelEngine, Pending
from inflight.sampling import transfer
from tests.engine.driver import Driver, Row, load_engine
from tests.engine.failing import Saboteur, serve_through_faults, spoil
from tests.engine.fake_device import DEVICE, FakeDevice
from tests.engine.kernels import by_default_and
from tests.engine.paging import load_paged
from tests.engine.serving import WAYS, Served, config_of, load, serve
from tests.engine.tape import Tape
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CASE = "llama-gqa"
TWO_WAYS = ["no-evict", "utilization-chunked-no-reuse"]
FAST = list(zip(TWO_WAYS, ["torch", None], strict=True))
"""The ways of serving that differ most, each on other kernels."""
SAMPLINGS = (
    {},
    {"temperature": 0.7, "top_p": 1.0, "random_seed": 3},
    {"top_k": 5, "random_seed": 4},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "random_seed": 5, "num_return_sequences": 2},
    {"min_p": 0.1, "random_seed": 6},
    {"min_length": 9},
)


def ahead(engine: ModelEngine) -> ModelEngine:
    """Let an engine on the CPU overlap iterations as on a GPU."""
    engine.limits = replace(engine.limits, overlaps_iterations=True)
    return engine


def bias_of(model: ZooModel) -> FloatTensor:
    """Return a bias that makes some tokens likely, an end id among them."""
    size = load_vocab_size(model)
    values = [3.0 if token % 7 == 0 else 0.0 for token in range(size)]
    return FloatTensor((size,), array("f", values).tobytes())


def load_vocab_size(model: ZooModel) -> int:
    return int(model.logits(model.prompt(2)).shape[-1])


def without_host_waits(model: ZooModel) -> list[Request]:
    """Return requests of every kind that continues without the host; they end by length, end id and stop word."""
    shared, bias = model.prompt(18, 3), bias_of(model)
    requests = []
    for number in range(12):
        own = model.prompt(4 + 3 * number, number)
        requests.append(
            Request(
                number,
                (*shared, *own) if number % 3 == 0 else own,
                6 + 2 * number,
                streaming=number % 2 == 0,
                end_ids=tuple(range(number % 4, 200, 11)) if number % 2 else (),
                sampling=SamplingConfig(**SAMPLINGS[number % 6]),
                stop_words=((5 * number,), tuple(range(200))[3:5]) if number % 4 == 2 else (),
                bad_words=((7,), (21,)) if number % 4 == 1 else (),
                embedding_bias=bias if number % 5 == 4 else None,
                output=OutputOptions(return_prompt_log_probs=number == 6),
            )
        )
    assert not any(request.needs_host for request in requests)
    return requests


@cache
def in_turn(model: ZooModel, way: str, kernels: str | None = None) -> Served:
    """Serve these requests without overlap: no batch starts before the previous batch's tokens are known."""
    return serve(load(model.folder, 60, kernels=kernels), config_of(way), without_host_waits(model))


def with_host_waits(model: ZooModel) -> list[Request]:
    """Return requests of every kind that waits for the host."""
    kinds: list[dict[str, Any]] = [
        {"sampling": SamplingConfig(beam_width=3)},
        {"sampling": SamplingConfig(repetition_penalty=1.3, no_repeat_ngram_size=3)},
        {"sampling": SamplingConfig(temperature=0.8, top_p=0.9, random_seed=1)},
        {"sampling": SamplingConfig(top_k=20, top_p=0.9, top_p_decay=0.8, top_p_reset_id=7, random_seed=2)},
        {"prompt_lookup_num_tokens": 3},
        {"draft": ExternalDraft(model.prompt(3, 50))},
        {"output": OutputOptions(return_log_probs=True, num_top_log_probs=2, return_generation_logits=True)},
        {"bad_words": ((11, 12),)},
    ]
    requests = [
        Request(100 + number, model.prompt(6 + 2 * number, 60 + number), 8, **kind)
        for number, kind in enumerate(kinds)
    ]
    assert all(request.needs_host for request in requests)
    return requests


def assert_same(ours: Served, theirs: Served) -> None:
    """Compare every sequence's tokens, finish reason, log probs and logits."""
    assert ours.responses.keys() == theirs.responses.keys()
    for key in ours.responses:
        result, expected = ours.result(*key), theirs.result(*key)
        assert result.output_token_ids == expected.output_token_ids
        assert result.finish_reasons == expected.finish_reasons
        assert result.prompt_log_probs == pytest.approx(expected.prompt_log_probs, abs=1e-3)
        for found, wanted in zip(result.log_probs or (), expected.log_probs or (), strict=True):
            assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(("way", "kernels"), with_all(by_default_and(WAYS, list(WAYS)), FAST))
def test_tokens_equal_those_without_overlap(zoo: Zoo, way: str, kernels: str | None) -> None:
    model = zoo[CASE]
    requests, expected = without_host_waits(model), in_turn(model, way, kernels)
    served = serve(ahead(load(model.folder, 60, kernels=kernels)), config_of(way), requests)
    assert (expected.most_in_flight, served.most_in_flight) == (1, 2)
    assert_same(served, expected)
    reasons = {served.result(*key).finish_reasons[0] for key in served.responses}
    assert reasons == {FinishReason.LENGTH, FinishReason.END_ID, FinishReason.STOP_WORDS}


@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
def test_overlap_pauses_the_same_requests_when_blocks_are_short(zoo: Zoo, way: str) -> None:
    model = zoo[CASE]
    requests = without_host_waits(model)
    expected = serve(load(model.folder, 14), config_of(way), requests)
    served = serve(ahead(load(model.folder, 14)), config_of(way), requests)
    assert served.most_in_flight == 2
    assert bool(served.num_pauses) == bool(expected.num_pauses) == (way != "no-evict")
    assert_same(served, expected)


@pytest.mark.parametrize(("way", "kernels"), with_all(by_default_and(TWO_WAYS, TWO_WAYS), FAST))
def test_overlap_beside_requests_that_wait_for_the_host_changes_no_token(
    zoo: Zoo, way: str, kernels: str | None
) -> None:
    model = zoo[CASE]
    ours, theirs = without_host_waits(model), with_host_waits(model)
    # Only a few at a time, so that iterations with and without overlap alternate.
    requests = [*ours[:5], *theirs[:4], *ours[5:9], *theirs[4:], *ours[9:]]
    expected = serve(load(model.folder, 80, kernels=kernels), config_of(way), requests, 1)
    served = serve(ahead(load(model.folder, 80, kernels=kernels)), config_of(way), requests, 1)
    assert served.most_in_flight == 2
    assert_same(served, expected)


def test_a_batch_takes_its_tokens_from_the_replayed_one_before_it(zoo: Zoo) -> None:
    model, tape = zoo[CASE], Tape()
    requests = without_host_waits(model)
    expected = serve(load_paged(model.folder, 60), config_of("no-evict"), requests)
    served = serve(ahead(load_paged(model.folder, 60, capture=tape)), config_of("no-evict"), requests)
    assert served.most_in_flight == 2 and tape.replayed
    assert_same(served, expected)


def test_stopped_requests_do_not_affect_others(zoo: Zoo) -> None:
    model = zoo[CASE]
    requests, expected = without_host_waits(model), in_turn(model, "chunked")
    stops = {0: 1, 3: 9, 6: 7, 10: 20}
    engine = ahead(load(model.folder, 60))
    served = serve(engine, config_of("chunked"), requests, stops=stops)
    again = serve(engine, config_of("chunked"), requests)
    for key in expected.responses:
        result, whole = served.result(*key), expected.result(*key)
        if key[0] in stops and result.finish_reasons == (FinishReason.CANCELLED,):
            count = result.num_output_tokens[0]
            assert served.tokens(*key) == expected.tokens(*key)[:count]
        else:
            assert result.output_token_ids == whole.output_token_ids
    assert any(served.result(key).finish_reasons == (FinishReason.CANCELLED,) for key in stops)
    assert_same(again, expected)


# ---------------------------------------------------------------- one batch and the next, by hand


def feeding(driver: Driver, rows: Sequence[Row], chunks: dict[Row, int] | None = None) -> ScheduledBatch:
    """Return the next batch of these rows, whose last tokens the host does not know."""
    batch = replace(driver.batch(chunks or {}, rows), samples_on_device=True)
    for row in rows:
        row.num_computed += 1
    for row, length in (chunks or {}).items():
        row.num_computed += length
    return batch


def take(rows: Sequence[Row], output: ModelOutput) -> None:
    """Append the tokens of a batch of these rows."""
    for row, tokens in zip(rows, output.token_ids, strict=True):
        row.tokens += tokens


def test_tokens_of_a_batch_arrive_after_others_took_its_slots(zoo: Zoo) -> None:
    """A slot of the first batch belongs to another sequence in the second one."""
    model = zoo[CASE]
    driver = Driver(load_engine(model.folder))
    rows = [driver.start(model.prompt(9 + seed, seed)) for seed in range(3)]
    first = feeding(driver, [], {row: len(row.tokens) for row in rows})
    pending = [driver.engine.forward(first)]
    driver.release(rows[1])
    newcomer = driver.start(model.prompt(12, 7), SamplingConfig(top_k=3, random_seed=1))
    second = feeding(driver, [rows[0], rows[2]], {newcomer: 12})
    pending.append(driver.engine.forward(second))
    assert newcomer.slot == rows[1].slot
    take(rows, driver.engine.decode(first, pending[0]))
    take([newcomer, rows[0], rows[2]], driver.engine.decode(second, pending[1]))
    for row, count in zip(rows, (2, 1, 2)):
        assert row.generated == model.greedy(tuple(row.tokens[: row.prompt_length]), count)
    assert len(newcomer.generated) == 1


def test_a_batch_of_unfinished_contexts_returns_no_token(zoo: Zoo) -> None:
    model = zoo[CASE]
    driver = Driver(load_engine(model.folder))
    row = driver.start(model.prompt(20))
    first, second = feeding(driver, [], {row: 8}), feeding(driver, [], {row: 12})
    pending = [driver.engine.forward(batch) for batch in (first, second)]
    assert driver.engine.decode(first, pending[0]).token_ids == []
    take([row], driver.engine.decode(second, pending[1]))
    assert row.generated == model.greedy(model.prompt(20), 1)


def test_logits_are_not_kept_after_tokens_are_chosen(zoo: Zoo) -> None:
    model = zoo[CASE]
    driver = Driver(load_engine(model.folder))
    row = driver.start(model.prompt(9))
    pending = driver.engine.forward(feeding(driver, [], {row: 9}))
    assert isinstance(pending, Pending) and not isinstance(pending.result, torch.Tensor)


@pytest.mark.parametrize(
    "samplings", with_all([*([each] * 3 for each in SAMPLINGS[:5]), [*SAMPLINGS[:5]]], [[*SAMPLINGS[:5]]])
)
def test_the_host_does_not_wait_between_forward_passes(
    zoo: Zoo, samplings: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only wait afterwards is for the tokens; before they arrive, the host's copy is undefined.

    By default all kinds of sampling are in one batch.
    """
    model = zoo[CASE]
    starts = [
        (model.prompt(5 + 4 * seed, seed), SamplingConfig(**{**sampling, "num_return_sequences": 1}))
        for seed, sampling in enumerate(samplings)
    ]
    with FakeDevice() as device:
        monkeypatch.setattr(transfer, "record_event", device.record_event)
        driver = Driver(load_paged(model.folder, device="meta"))
        rows = [driver.start(*each) for each in starts]
        batch = feeding(driver, [], {row: len(row.tokens) for row in rows})
        pending = driver.engine.forward(batch)
        for _ in range(10):
            device.waits.clear()
            following = feeding(driver, rows)
            after = driver.engine.forward(following)
            assert device.waits == []
            take(rows, driver.engine.decode(batch, pending))
            assert device.waits == ["an event"]
            batch, pending = following, after
        take(rows, driver.engine.decode(batch, pending))
    other = Driver(load_engine(model.folder, kernels="torch"))
    expected = [other.start(*each) for each in starts]
    other.step({row: len(row.tokens) for row in expected})
    for _ in range(10):
        other.step(generation=expected)
    assert [row.generated for row in rows] == [row.generated for row in expected]


def test_waiting_for_sent_arrays_waits_for_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDevice() as device:
        monkeypatch.setattr(transfer, "record_event", device.record_event)
        values = np.array([3, -1, 2**40]), np.array([0.5, np.nan], np.float32)
        arriving = transfer.Arriving.send(*(transfer.upload(array, DEVICE) for array in values))
        assert device.waits == []
        assert arriving.joined.numpy()[:8].view(np.int64) != [3]
        for ours, theirs in zip(arriving.wait(), values, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert device.waits == ["an event"]


# ---------------------------------------------------------------- when something fails

STAGES = {
    "before anything": (lambda engine: engine.sampler, "apply", False),
    "before the runner": (lambda engine: engine.runner, "run", False),
    "after the forward pass": (lambda engine: engine.runner, "run", True),
    "before slots": (lambda engine: engine.runner.slots, "apply", False),
    "before the choice": (lambda engine: engine.sampler, "begin", False),
    "after the choice": (lambda engine: engine.sampler, "begin", True),
    "having fed": (lambda engine: engine.runner.slots, "feed", True),
    "when the tokens come": (lambda engine: engine.sampler, "finish", False),
    "when the tokens are there": (lambda engine: engine.sampler, "finish", True),
}


@pytest.mark.parametrize(
    "stage", with_all(STAGES, [each for each in STAGES if each not in ("before anything", "before slots")])
)
@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"])
)
def test_failed_batches_change_no_token(
    zoo: Zoo, stage: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch is in flight when the failure is noticed, and continues from the failed one."""
    model = zoo[CASE]
    requests, expected = without_host_waits(model)[:8], in_turn(model, way)
    engine = ahead(load(model.folder, 60))
    part, name, after = STAGES[stage]
    saboteur = Saboteur(monkeypatch, part(engine), name, after)
    served = serve_through_faults(engine, config_of(way), requests, saboteur)
    assert saboteur.num_faults > 1
    assert served.keys() == {key for key in expected.responses if key[0] < 8}
    for key, result in served.items():
        assert result.output_token_ids == expected.result(*key).output_token_ids


def test_only_the_request_with_nan_logits_ends(zoo: Zoo, kernels: str | None) -> None:
    model = zoo[CASE]
    requests, expected = without_host_waits(model), in_turn(model, "chunked")
    faulty = requests[5]
    engine = ahead(load(model.folder, 60, kernels=kernels))
    spoil(engine, faulty.request_id, num_tokens=faulty.prompt_length + 4)
    served = serve_through_faults(engine, config_of("chunked"), requests, faulty_id=faulty.request_id)
    assert served.keys() == expected.responses.keys() - {(faulty.request_id, 0)}
    for key, result in served.items():
        assert result.output_token_ids == expected.result(*key).output_token_ids


def test_a_slot_restarted_by_the_next_batch_is_valid(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch started the slot without a row, and fails after the second gave it to another sequence."""
    model = zoo[CASE]
    driver = Driver(load_engine(model.folder))
    victim, unlucky = driver.start(model.prompt(9)), driver.start(model.prompt(5))
    first = feeding(driver, [], {victim: 9})
    pending = driver.engine.forward(first)
    driver.release(unlucky)
    newcomer = driver.start(model.prompt(12, 7))
    assert newcomer.slot == unlucky.slot
    second = feeding(driver, [victim], {newcomer: 12})
    after = driver.engine.forward(second)
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.sampler, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.engine.decode(first, pending)
    newcomer.tokens += driver.engine.decode(second, after).token_ids[0]
    with pytest.raises(ValueError, match=f"continues in slot {victim.slot}"):
        driver.engine.forward(ScheduledBatch(90, generation_slots=(victim.slot,)))
    driver.generate(newcomer, 6)
    assert newcomer.generated == model.greedy(model.prompt(12, 7), 6)


# ---------------------------------------------------------------- beside those that need the host


@pytest.mark.parametrize("kind", with_all(range(8), [0, 3, 7]))
def test_a_greedy_stream_gets_a_token_per_iteration_beside_a_request_that_needs_the_host(
    zoo: Zoo, kind: int
) -> None:
    """Each request gets the same tokens as when it runs alone."""
    model = zoo[CASE]
    stream = Request(1, model.prompt(9), 40, streaming=True)
    other = with_host_waits(model)[kind]
    served = serve(ahead(load(model.folder, 60)), config_of("no-evict"), [stream, other])
    assert served.most_in_flight == 2
    assert served.num_iterations == 40, (
        "an iteration of its own for each of the stream's tokens, and no other"
    )
    alone = serve(load(model.folder, 60), config_of("no-evict"), [stream])
    alone.responses |= serve(load(model.folder, 60), config_of("no-evict"), [other]).responses
    assert_same(served, alone)


def test_logits_that_the_host_needs_survive_the_replay_of_the_next_batch(zoo: Zoo) -> None:
    """The next batch of the same recorded size overwrites the logits."""
    model, tape = zoo[CASE], Tape()
    ours, theirs = without_host_waits(model)[:4], with_host_waits(model)
    requests = [each for pair in zip((*ours, *ours), theirs) for each in pair][:8]
    requests = [replace(each, request_id=number) for number, each in enumerate(requests)]
    expected = serve(load_paged(model.folder, 60), config_of("no-evict"), requests)
    served = serve(ahead(load_paged(model.folder, 60, capture=tape)), config_of("no-evict"), requests)
    assert served.most_in_flight == 2 and tape.replayed
    assert_same(served, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("penalty", {"sampling": SamplingConfig(repetition_penalty=1.3, presence_penalty=0.4)}),
        ("top_p", {"sampling": SamplingConfig(temperature=0.2, top_p=0.8, random_seed=5)}),
        ("top_p of many", {"sampling": SamplingConfig(temperature=100.0, top_p=0.99, random_seed=8)}),
        ("bad words", {"bad_words": ((6, 7), *((first, 9) for first in range(90)))}),
    ],
)
def test_beside_a_request_that_needs_the_host_only_tokens_are_waited_for(
    zoo: Zoo, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except if a top_p has to be drawn again: then the device is asked once more."""
    model = zoo[CASE]
    prompts = [model.prompt(9), model.prompt(13, 1)]
    with FakeDevice() as device:
        monkeypatch.setattr(transfer, "record_event", device.record_event)
        driver = Driver(load_paged(model.folder, device="meta"))
        rows = [driver.start(prompts[0]), driver.start(prompts[1], **options)]
        batch, taking = feeding(driver, [], {row: len(row.tokens) for row in rows}), rows
        pending = driver.engine.forward(batch)
        for number in range(8):
            device.waits.clear()
            of_following = rows[:1] if number % 2 == 0 else rows
            following = feeding(driver, of_following)
            after = driver.engine.forward(following)
            assert device.waits == []
            take(taking, driver.engine.decode(batch, pending))
            assert device.waits[0] == "an event" and (len(device.waits) == 1 or name == "top_p of many")
            batch, pending, taking = following, after, of_following
        take(taking, driver.engine.decode(batch, pending))
    other = Driver(load_engine(model.folder, kernels="torch"))
    expected = [other.start(prompts[0]), other.start(prompts[1], **options)]
    other.step({row: len(row.tokens) for row in expected})
    for _ in range(8):
        other.step(generation=expected)
    assert [len(row.generated) for row in rows] == [9, 5]
    for row, wanted in zip(rows, expected):
        assert row.generated == wanted.generated[: len(row.generated)]


@pytest.mark.parametrize("stage", with_all(STAGES, ["after the forward pass", "when the tokens come"]))
def test_failed_batches_with_rows_that_need_the_host_change_no_token(
    zoo: Zoo, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo[CASE]
    requests = [each for pair in zip(without_host_waits(model), with_host_waits(model)) for each in pair]
    expected = serve(load(model.folder, 80), config_of("chunked"), requests)
    engine = ahead(load(model.folder, 80))
    part, name, after = STAGES[stage]
    saboteur = Saboteur(monkeypatch, part(engine), name, after)
    served = serve_through_faults(engine, config_of("chunked"), requests, saboteur)
    assert saboteur.num_faults > 1
    assert served.keys() == expected.responses.keys()
    for key, result in served.items():
        assert result.output_token_ids == expected.result(*key).output_token_ids


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_request_with_nan_logits_ends_if_one_needs_the_host(zoo: Zoo, number: int) -> None:
    model = zoo[CASE]
    requests = [Request(1, model.prompt(9), 20), with_host_waits(model)[1]]
    expected = serve(load(model.folder, 60), config_of("no-evict"), requests)
    faulty = requests[number]
    engine = ahead(load(model.folder, 60))
    spoil(engine, faulty.request_id, num_tokens=faulty.prompt_length + 4)
    served = serve_through_faults(engine, config_of("no-evict"), requests, faulty_id=faulty.request_id)
    assert served.keys() == expected.responses.keys() - {(faulty.request_id, 0)}
    for key, result in served.items():
        assert result.output_token_ids == expected.result(*key).output_token_ids
