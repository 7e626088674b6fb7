"""Optional features of requests with plans: adapters, tables, logits, hidden states; and recorded batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.engine.cuda.iteration_graphs import Capture, IterationGraphs
from inflight.errors import InflightError
from tests.engine import test_additional_outputs as additional
from tests.engine import test_after_failure as failures
from tests.engine import test_prompt_tables as tables
from tests.engine import test_served_adapters as adapters
from tests.engine.cuda.test_iteration_graphs import replay_everything
from tests.engine.driver import Driver, load_engine
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.failing import Saboteur, serve_through_faults
from tests.engine.lora import make_adapter, stored
from tests.engine.ranks import assert_same, ranks
from tests.engine.serving import config_of, serve, to_torch
from tests.engine.serving import load as load_torch
from tests.engine.tape import Tape
from tests.engine.tensorrt.conftest import Plans
from tests.engine.tensorrt.engines import load, standing_in
from tests.engine.test_adapters import assert_contained
from tests.models.zoo import Zoo
from tests.tiers import with_all

LORA_RANKS = 24
"""Ranks of all adapters in a part of a batch: two of the tests' adapters, or one."""
NUM_WITH_ADAPTERS = 15
"""Number of requests with adapters, or none: some of every kind."""


# ---------------------------------------------------------------------- LoRA adapters


def without_magnitudes(requests: tuple[Request, ...]) -> list[Request]:
    return [each for each in requests if each.lora is None or each.lora.task_id != 3]


@pytest.mark.parametrize("way", with_all(["chunked", "utilization"], ["chunked"]))
def test_adapters_in_one_batch_give_the_results_of_each_alone(zoo: Zoo, plans: Plans, way: str) -> None:
    """More adapters than a plan takes at once are computed in parts; with few pages, they are often reloaded."""
    model = zoo["llama-gqa"]
    requests = without_magnitudes(adapters.requests_of(model)[:NUM_WITH_ADAPTERS])
    with adapters.few_pages():
        engine = load(plans(model, max_lora_rank=LORA_RANKS), 40, max_num_sequences=6)
    assert engine.limits.max_adapter_rank == LORA_RANKS
    served = adapters.serve(engine, config_of(way), requests, model)
    expected = adapters.alone(model, "torch", NUM_WITH_ADAPTERS)
    assert len({key[0] for key in served.responses}) == len(requests)
    for request_id, index in served.responses:
        found = served.result(request_id, index)
        adapters.assert_same_result(found, expected[request_id].result(request_id, index))


def test_an_adapter_with_magnitudes_ends_its_request_alone(zoo: Zoo, plans: Plans) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model, max_lora_rank=LORA_RANKS), 60)
    requests = list(adapters.requests_of(model)[:6])
    weights = make_adapter(model, 3, **adapters.CONFIGS[3]).weights
    served = adapters.serve(engine, config_of("no-evict"), requests, model, bad={3: weights})
    (error,) = served.errors.values()
    assert isinstance(error, InflightError) and "has magnitudes (DoRA)" in str(error)
    assert len(served.responses) == 5 and served.errors.keys() == {3}


@pytest.mark.parametrize("where", ["A", "B"])
def test_an_adapter_with_nan_affects_no_other_row(zoo: Zoo, plans: Plans, where: str) -> None:
    engine = load(plans(zoo["llama-gqa"], max_lora_rank=LORA_RANKS), 60)
    assert_contained(engine, zoo["llama-gqa"], where)


def test_an_adapter_page_has_no_more_ranks_than_the_plan_takes(zoo: Zoo, plans: Plans) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model, max_lora_rank=4), 60)
    assert (engine.limits.adapter_page_rank, engine.limits.max_adapter_rank) == (4, 4)
    driver, adapter = Driver(engine), make_adapter(model, 1, r=4)
    row = driver.start(model.prompt(9), adapter=driver.put(stored(adapter.weights, 1), [0]))
    driver.step({row: 9})
    assert row.generated == adapter.merged().greedy(model.prompt(9), 1)


def test_plans_built_without_adapters_have_no_adapter_pages(zoo: Zoo, plans: Plans) -> None:
    assert load(plans(zoo["llama-gqa"])).limits.num_adapter_pages == 0


# ---------------------------------------------------------------------- tables, logits, hidden states


@pytest.mark.parametrize("way", with_all(["no-evict", "chunked"], ["chunked"]))
def test_prompt_tables_give_the_logits_of_inputs_embeds(zoo: Zoo, plans: Plans, way: str) -> None:
    model = zoo["llama-gqa"]
    requests, rows = tables.mixed_requests(model, output=tables.LOGITS)
    folder = plans(model, max_context_chunks=2, max_num_tokens=10)  # fewer than a prompt's table rows
    engine = load(folder, 200, max_num_sequences=6)
    served = serve(engine, config_of(way), requests, per_iteration=8)
    tables.assert_as_transformers(model, requests, rows, served)
    for request, table in zip(requests, rows, strict=True):
        result, length = served.result(request), request.prompt_length
        expected = tables.TableOracle(model).logits(result.output_token_ids[0], table)
        assert result.context_logits is not None and result.generation_logits is not None
        for found, wanted in (
            (to_torch(result.generation_logits[0]), expected[length - 1 : -1]),
            (to_torch(result.context_logits), expected[:length]),
        ):
            torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"])
)
def test_additional_outputs_are_those_of_transformers(zoo: Zoo, plans: Plans, way: str) -> None:
    model = zoo["llama-gqa"]
    names = tuple(f"hidden_states_{number}" for number in range(3))
    folder = plans(model, additional_outputs=names, max_context_chunks=1)
    engine = load(folder, 40, additional_model_outputs=additional.OUTPUTS)
    requests = [
        additional.request_of(model, 1, 27),
        Request(2, model.prompt(20, 2), 12),
        additional.request_of(model, 3, 9, streaming=True),
        additional.request_of(model, 4, 33, draft=ExternalDraft(model.prompt(3, 9))),
    ]
    served = serve(engine, config_of(way), requests)
    for request in (requests[0], requests[2], requests[3]):
        tokens = model.greedy(request.input_token_ids, additional.NUM_TOKENS)
        assert served.tokens(request) == tokens
        additional.assert_outputs(model, request, served.result(request), tokens)


# ---------------------------------------------------------------------- recordings


def record(engine, capture: Capture, max_num_tokens: int = 64) -> None:
    """Let batches of up to this many rows be recorded, as on a GPU."""
    runner = engine.runner
    with torch.inference_mode():
        runner._graphs = IterationGraphs(runner.decoder, runner.slots, runner.cache, capture, max_num_tokens)
    runner.recorded = runner._graphs.kinds


class Replays:
    """A `Capture` that runs the operations again, including Python.

    Attributes:
        ran: The recordings that were replayed, in order.
    """

    def __init__(self) -> None:
        self.ran: list[int] = []
        self._count = 0

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        operations()
        number = self._count
        self._count += 1

        def replay() -> None:
            self.ran.append(number)
            operations()

        return replay


@pytest.mark.parametrize(
    ("case", "max_chunks"), with_all([("llama-gqa", 8), ("mistral-window", 1)], ["llama-gqa"])
)
def test_recorded_batches_give_the_same_tokens(zoo: Zoo, plans: Plans, case: str, max_chunks: int) -> None:
    """Padding rows are written after the sequences in the cache, and no sequence reads them."""
    model, replays = zoo[case], Replays()
    engine = load(plans(model, max_batch_size=12, max_context_chunks=max_chunks), 200, max_num_sequences=11)
    record(engine, replays)
    replayed = replay_everything(engine, model.prompt)
    eager = load_engine(model.folder, max_num_sequences=11, kernels="torch", max_sequence_length=96)
    assert replayed == replay_everything(eager, model.prompt)
    kinds = engine.runner.recorded
    assert kinds.generation_sizes == (1, 2, 4, 8, 11)
    assert kinds.mixed_sizes == (16, 24, 32, 40, 48, 56, 64)
    assert len(replays.ran) == 11 * 3 + 6 + 2 * 3, "every iteration"
    contexts = [key for key in engine.runner.decoder._layers._contexts if key[1] is not None]
    num_tiles = {(profile, tiles) for profile, (_, tiles, _) in contexts}
    assert len(contexts) == 12 and num_tiles == {(0, 0), (1, max_chunks)}, (
        "a context for each, of its profile"
    )
    sizes = sorted(kinds.generation_sizes + kinds.mixed_sizes, reverse=True)
    assert {sizes[number] for number in replays.ran} == set(sizes) - {56, 64}


@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"])
)
def test_recordings_serve_requests_of_every_kind(zoo: Zoo, plans: Plans, way: str) -> None:
    """Reused prefixes, pauses, searches, drafts: recorded batches, and others between them."""
    model, replays = zoo["llama-gqa"], Replays()
    engine = load(plans(model, max_context_chunks=3), 60)
    record(engine, replays)
    requests = some_of_everything(model, longest=14)
    served = serve(engine, config_of(way, max_beam_width=3), requests)
    assert_as_transformers(model, served, requests)
    num_mixed = len(engine.runner.recorded.mixed_sizes)
    assert min(replays.ran) < num_mixed <= max(replays.ran), "of both profiles"


def test_batches_too_large_for_plans_are_not_recorded(zoo: Zoo, plans: Plans) -> None:
    """More rows or chunks than the plan takes at once, and no space after the sequences."""
    model, replays = zoo["llama-gqa"], Replays()
    engine = load(plans(model, max_num_tokens=40, max_seq_len=32, max_context_chunks=2), 60)
    record(engine, replays)
    assert engine.runner.recorded.mixed_sizes == (16, 24, 32, 40)
    driver = Driver(engine)
    rows = [driver.start(model.prompt(length, length)) for length in (4, 5, 6)]
    driver.step({row: row.prompt_length for row in rows})
    assert not replays.ran, "three chunks, in two tiles"
    for row in rows[1:]:
        driver.release(row)
    (row,) = rows[:1]
    for _ in range(20):
        driver.step(generation=[row])
    assert len(replays.ran) == 20
    late = driver.start(model.prompt(29, 9))
    driver.step({late: 28})
    assert len(replays.ran) == 21, "28 rows and 4 more, for which there is room"
    driver.step({late: 1}, [row])
    assert len(replays.ran) == 21, "2 rows and 14 more: there is room for 3 and 7"
    for each in (row, late):
        assert each.generated == model.greedy(each.tokens[: each.prompt_length], len(each.generated))


@pytest.mark.exhaustive
def test_recorded_batches_with_adapters_give_the_tokens_of_each_alone(zoo: Zoo, plans: Plans) -> None:
    model, replays = zoo["llama-gqa"], Replays()
    requests = without_magnitudes(adapters.requests_of(model)[:NUM_WITH_ADAPTERS])
    engine = load(plans(model, max_lora_rank=LORA_RANKS), 60, max_num_sequences=6)
    record(engine, replays)
    assert engine.runner._graphs.adapter_ranks == LORA_RANKS
    served = adapters.serve(engine, config_of("no-evict"), requests, model)
    expected = adapters.alone(model, "torch", NUM_WITH_ADAPTERS)
    for request_id, index in served.responses:
        assert served.tokens(request_id, index) == expected[request_id].tokens(request_id, index)
    assert min(replays.ran) < 2 * len(engine.runner.recorded.mixed_sizes) <= max(replays.ran)


def test_operations_around_a_plan_can_be_recorded(
    zoo: Zoo, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operation around a plan asks the host for a value: a tape replays them without Python."""
    model = zoo["llama-gqa"]
    engine = load(plans(model), 60)
    hidden, seen = torch.randn(64, 64), []

    def run(inputs, recording=None):
        seen.append(inputs)
        rows = hidden[: len(inputs["input_ids"])]
        return {"hidden": rows + inputs["gen_kv_lengths"].sum() + inputs["ctx_q_gather"].sum()}

    monkeypatch.setattr(engine.runner.decoder._layers, "run", run)
    tape = Tape()
    record(engine, tape)
    num_recorded = len(seen)
    driver = Driver(engine)
    row = driver.start(model.prompt(9))
    del seen[:]
    driver.step({row: 9})
    for _ in range(3):
        driver.step(generation=[row])
    driver.step({driver.start(model.prompt(20)): 20}, [row])
    assert num_recorded == 2 * (3 + 7) and not seen and len(tape.replayed) == 5


# ---------------------------------------------------------------------- failures, ranks


@pytest.mark.parametrize(
    ("stage", "after"),
    with_all([("prepare", True), ("_load", False), ("write_through", False)], [("write_through", False)]),
)
def test_an_iteration_that_fails_changes_no_tokens(
    zoo: Zoo, plans: Plans, stage: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo["llama-gqa"]
    engine = load(plans(model), 100, max_num_sequences=6)
    requests = failures.make_requests(model)[:5]
    saboteur = Saboteur(monkeypatch, engine.runner.cache, stage, after)
    served = serve_through_faults(engine, failures.CONFIG, requests, saboteur)
    assert saboteur.num_faults > 0, "nothing failed"
    undisturbed = load_torch(model.folder, 100, 7, kernels="torch")
    expected = serve_through_faults(undisturbed, failures.CONFIG, requests)
    assert len(served) == len(requests)
    for key, result in served.items():
        failures.assert_same(result, expected[key])


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["llama-gqa", "llama-gqa-tied"])
def test_two_ranks_of_plans_give_transformers_tokens(zoo: Zoo, plans: Plans, case: str) -> None:
    model = zoo[case]
    folder = plans(model, tensor_parallel_size=2, additional_outputs=("hidden_states_1",))
    requests = [
        replace(each, output=OutputOptions(return_context_logits=True)) if each.request_id == 0 else each
        for each in some_of_everything(model, longest=12)[:6]
    ]
    with standing_in(), ranks(folder, (2, 1), 40, implementation="tensorrt") as engine:
        served = serve(engine, config_of("chunked", max_beam_width=3), requests)
        calls = [each.num_calls for each in engine.collectives]
    assert_as_transformers(model, served, requests)
    assert calls[0] == calls[1] > 0
    with ranks(model.folder, (2, 1), 40, kernels="torch") as engine:
        assert_same(served, serve(engine, config_of("chunked", max_beam_width=3), requests))
