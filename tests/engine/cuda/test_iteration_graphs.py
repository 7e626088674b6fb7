"""Recorded and replayed generation batches have the same tokens as launched ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.cuda.iteration_graphs import IterationGraphs, RecordedKinds, mixed_sizes, recorded_sizes
from inflight.engine.engine import ModelEngine
from tests.engine.attention.test_paged_attention import requests_of
from tests.engine.driver import Driver, load_engine
from tests.engine.fixed_rows import FixedRowsAttention
from tests.engine.lora import make_adapter, stored
from tests.engine.paging import load_paged
from tests.engine.serving import config_of, serve
from tests.engine.tape import Tape
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import examples, with_all


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]),
    ],
)
def test_few_sizes_are_recorded_up_to_the_number_of_slots(most: int, sizes: list[int]) -> None:
    assert recorded_sizes(most) == sizes
    assert RecordedKinds(tuple(sizes)).num_bytes == len(sizes) << 25


def test_recorded_sizes_are_at_most_8_rows_or_a_quarter_apart() -> None:
    for most in range(1, 700):
        sizes = recorded_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(after - before <= max(8, before / 4) for before, after in pairwise(sizes))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (5, [5]),
        (16, [16]),
        (40, [16, 24, 32, 40]),
        (8192, [*range(16, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 512, 64),
                *range(512, 1025, 128)]),
    ],
)  # fmt: skip
def test_batches_with_chunks_are_recorded_up_to_1024_rows(most: int, sizes: list[int]) -> None:
    assert mixed_sizes(most) == sizes


def replay_everything(engine: ModelEngine, model_prompt: Callable[[int, int], list[int]]) -> list[list[int]]:
    """Run batches of 1 to 11 rows; sequences join and end, and their slots are reused."""
    driver = Driver(engine)
    rows, ended = [], []
    for number in range(11):
        rows.append(driver.start(model_prompt(5 + 3 * number, number)))
        driver.step({rows[-1]: len(rows[-1].tokens)}, rows[:-1])
        driver.step(generation=rows)
        driver.step(generation=rows[::-1])
    for number in range(6):
        ended.append(rows.pop(number % len(rows)))
        driver.release(ended[-1])
        driver.step(generation=rows)
        if number % 2:
            rows.append(driver.start(model_prompt(9, 50 + number)))
            driver.step({rows[-1]: 9}, rows[:-1])
            driver.step(generation=rows)
    return [row.generated for row in (*ended, *rows)]


@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2", "mistral-window"], ["mistral-window"]))
def test_tokens_are_the_same_below_at_and_above_recorded_sizes(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    tape = Tape()
    replayed = replay_everything(load_paged(model.folder, 200, 11, tape), model.prompt)
    eager = replay_everything(
        load_engine(model.folder, max_num_sequences=11, kernels="torch", max_sequence_length=96), model.prompt
    )
    assert replayed == eager
    assert set(tape.replayed) == set(range(5)), "11, 8, 4, 2 and 1 rows, recorded in this order"


@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2", "mistral-window"], ["mistral-window"]))
def test_recorded_batches_with_chunks_give_the_same_tokens(zoo: Zoo, case: str) -> None:
    """Padding rows get NaN from attention, which no sequence sees."""
    model, tape = zoo[case], Tape()
    options = {"attention": FixedRowsAttention(), "max_num_tokens": 64}
    engine = load_paged(model.folder, 200, 11, tape, **options)
    replayed = replay_everything(engine, model.prompt)
    eager = replay_everything(
        load_engine(model.folder, max_num_sequences=11, kernels="torch", max_sequence_length=96), model.prompt
    )
    assert replayed == eager
    assert engine.recorded.mixed_sizes == (16, 24, 32, 40, 48, 56, 64)
    sizes = engine.recorded.generation_sizes + engine.recorded.mixed_sizes
    of_replays = {sorted(sizes, reverse=True)[index] for index in tape.replayed}
    assert len(tape.replayed) == 11 * 3 + 6 + 2 * 3, "every iteration"
    assert of_replays == set(sizes) - {56, 64}


def test_long_chunks_and_several_of_them_are_replayed(zoo: Zoo) -> None:
    """Chunks of one tile, of a full recording and of one row more, with generation rows between them in slot
    order."""
    model, tape = zoo["llama-gqa"], Tape()
    options = {"attention": FixedRowsAttention(), "max_num_tokens": 144}
    driver = Driver(load_paged(model.folder, 200, 8, tape, **options))
    rows = [driver.start(model.prompt(length, length)) for length in (90, 65, 64, 7)]
    driver.step({rows[0]: 64, rows[1]: 65, rows[3]: 6})
    driver.step({rows[2]: 64, rows[0]: 26}, [rows[1]])
    driver.step({rows[3]: 1}, rows[:3])
    driver.step(generation=rows)
    assert len(tape.replayed) == 4
    for row in rows:
        assert row.generated == model.greedy(row.tokens[: row.prompt_length], len(row.generated))


def test_batches_with_more_rows_or_chunks_than_recorded_run_without_a_recording(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.engine.cuda.iteration_graphs._MAX_CHUNKS", 2)
    monkeypatch.setattr("inflight.engine.cuda.iteration_graphs._MAX_ROWS", 40)
    model, tape = zoo["llama"], Tape()
    driver = Driver(load_paged(model.folder, 200, 8, tape, FixedRowsAttention()))
    rows = [driver.start(model.prompt(5 + length, length)) for length in range(3)]
    driver.step(dict.fromkeys(rows, 5))
    assert not tape.replayed, "three tiles"
    driver.step({rows[1]: 1, rows[2]: 2}, rows[:1])
    assert len(tape.replayed) == 1
    rows.append(driver.start(model.prompt(41, 9)))
    driver.step({rows[-1]: 39}, rows[:2])
    assert len(tape.replayed) == 1, "41 rows"
    driver.step({rows[-1]: 2}, rows[:3])
    assert len(tape.replayed) == 2
    for row in rows:
        assert row.generated == model.greedy(row.tokens[: row.prompt_length], len(row.generated))


@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse", "chunked"], ["utilization-chunked-no-reuse"])
)
def test_served_requests_get_the_same_results_with_recorded_chunks(zoo: Zoo, way: str) -> None:
    model = zoo["llama-gqa"]
    requests, tape = requests_of(model)[: examples(5, all=10)], Tape()
    expected = serve(load_paged(model.folder, 60), config_of(way), requests)
    options = {"attention": FixedRowsAttention(), "max_num_tokens": 128}
    served = serve(load_paged(model.folder, 60, capture=tape, **options), config_of(way), requests)
    for request in requests:
        assert served.beams(request) == expected.beams(request)
    assert tape.replayed


def serve_adapters(engine: ModelEngine, model: ZooModel, ranks: list[int], **options: Any) -> list[list[int]]:
    """Serve two rows for each adapter of these ranks, and rows without; adapters come and go meanwhile."""
    driver = Driver(engine)
    rows, ended = [], []
    for number, rank in enumerate(ranks):
        weights = make_adapter(model, number, r=rank, lora_alpha=rank / 2, **options).weights
        page = driver.put(stored(weights, number))
        new = [driver.start(model.prompt(5 + number, seed), adapter=page) for seed in range(2)]
        driver.step(dict.fromkeys(new, 5 + number), rows)
        rows += new
        driver.step(generation=rows)
        if len(rows) > 4:
            ended.append(rows.pop(0))
            driver.release(ended[-1])
            rows.append(driver.start(model.prompt(4, number)))
            driver.step({rows[-1]: 4}, rows[:-1])
        driver.step(generation=rows[::-1])
    driver.step(generation=[row for row in rows if row.start.adapter < 0] or rows)
    return [row.generated for row in (*ended, *rows)]


@pytest.mark.parametrize("case", with_all(["llama-gqa", "gpt2"], ["llama-gqa"]))
def test_recorded_batches_give_the_same_tokens_with_adapters(zoo: Zoo, case: str) -> None:
    """Results are equal although the adapters' pages and numbers of rows differ between replays."""
    model, tape = zoo[case], Tape()
    recorded = load_paged(model.folder, 200, 11, tape, num_adapter_pages=40)
    ranks = [8, 20, 1, 33]
    assert serve_adapters(recorded, model, ranks) == serve_adapters(
        load_engine(model.folder, max_num_sequences=11, kernels="torch", max_sequence_length=96), model, ranks
    )
    assert len(tape.replayed) == 2 * len(ranks) + 1, "all that only generate"
    assert {index < 5 for index in tape.replayed} == {True, False}, "with adapters, and without"


@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"])
)
def test_recorded_batches_give_the_same_beams_drafts_and_samples(zoo: Zoo, way: str) -> None:
    model = zoo["llama-gqa"]
    requests, tape = requests_of(model)[: examples(5, all=10)], Tape()
    expected = serve(load_paged(model.folder, 60), config_of(way), requests)
    served = serve(load_paged(model.folder, 60, capture=tape), config_of(way), requests)
    for request in requests:
        assert served.beams(request) == expected.beams(request)
    assert tape.replayed


def test_padding_rows_do_not_write_to_blocks_of_sequences(zoo: Zoo) -> None:
    engine = load_paged(zoo["llama-gqa"].folder, 20, 6, Tape())
    with torch.inference_mode():
        engine.runner.slots.last_tokens[engine.runner.slots.null_slot] = 7  # 0 is padding, whose keys are 0
    driver = Driver(engine)
    rows = [driver.start(zoo["llama-gqa"].prompt(8, seed)) for seed in range(5)]
    driver.step(dict.fromkeys(rows, 8))
    driver.step(generation=rows)
    cache = engine.runner.cache
    held = {block for row in rows for block in row.blocks}
    keys = torch.stack([cache.pages(layer)[0] for layer in range(3)]).flatten(2)
    assert not keys[:, [block for block in range(20) if block not in held]].any()
    assert keys[:, cache.null_block].any(), "where the sixth row wrote"


def test_a_row_without_a_block_is_refused_before_anything_is_written(zoo: Zoo) -> None:
    engine = load_paged(zoo["llama"].folder, capture=Tape())
    driver = Driver(engine)
    row = driver.start(zoo["llama"].prompt(8))
    driver.step({row: 8})
    short = ScheduledBatch(driver.batch({}, []).iteration, generation_slots=(row.slot,))
    with pytest.raises(ValueError, match=f"slot {row.slot} has 1 blocks of 8 tokens, too few for position 8"):
        engine.forward(short)


def test_sizes_that_cannot_be_recorded_run_without_a_recording_and_are_logged(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(operations: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = zoo["llama-gqa"]
    with caplog.at_level(logging.WARNING):
        engine = load_paged(model.folder, capture=refuse)
    (record,) = caplog.records
    assert "without CUDA graphs" in record.message and "stream is capturing" in record.message
    driver = Driver(engine)
    row = driver.start(model.prompt(10))
    assert driver.generate(row, 6) == model.greedy(model.prompt(10), 6)


def test_the_largest_size_is_recorded_first(zoo: Zoo) -> None:
    sizes: list[int] = []

    class Spy(IterationGraphs):
        def _run(self, recording: Any) -> None:
            sizes.append(recording.size)
            super()._run(recording)

    for attention, expected in (
        (None, [6, 6, 4, 4, 2, 2, 1, 1]),
        (FixedRowsAttention(), [30, 30, 24, 24, 16, 16, 6, 6, 4, 4, 2, 2, 1, 1]),
    ):
        sizes.clear()
        engine = load_paged(zoo["llama"].folder, attention=attention)
        with torch.inference_mode():
            Spy(engine.runner.decoder, engine.runner.slots, engine.runner.cache, Tape(), 30)
        assert sizes == expected


@pytest.mark.parametrize(("ranks", "options"), [([64, 64, 8], {}), ([8], {"use_dora": True})])
def test_more_adapters_than_recorded_and_magnitudes_run_without_a_recording(
    zoo: Zoo, ranks: list[int], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, tape = zoo["llama-gqa"], Tape()
    with caplog.at_level(logging.INFO):
        engine = load_paged(model.folder, 200, 11, tape, num_adapter_pages=40)
    assert "more than 128 ranks in total, or magnitudes" in caplog.text
    driver = Driver(engine)
    adapters = [make_adapter(model, rank, r=rank, lora_alpha=4, **options) for rank in ranks]
    rows = [
        driver.start(model.prompt(9, number), adapter=driver.put(stored(adapter.weights, number)))
        for number, adapter in enumerate(adapters)
    ]
    driver.step(dict.fromkeys(rows, 9))
    for _ in range(10):
        driver.step(generation=rows)
    assert not tape.replayed
    for row, adapter in zip(rows, adapters, strict=True):
        assert row.generated == adapter.oracle.greedy(tuple(row.tokens[:9]), 11)
    driver.release(rows.pop())
    other = driver.start(model.prompt(5))
    driver.step({other: 5})
    driver.step(generation=[other])
    assert len(tape.replayed) == 1, "without an adapter"


def test_padding_rows_have_no_adapter(zoo: Zoo) -> None:
    """Padding rows use no adapter even if rows at the same positions of an earlier batch did."""
    model = zoo["llama-gqa"]
    engine = load_paged(model.folder, 60, 6, Tape(), num_adapter_pages=20)
    driver = Driver(engine)
    page = driver.put(stored(make_adapter(model, 1, r=8).weights, 1))
    rows = [driver.start(model.prompt(8, seed), adapter=page) for seed in range(6)]
    driver.step(dict.fromkeys(rows, 8))
    driver.step(generation=rows)
    driver.step(generation=rows[:5])
    graphs = engine.runner._graphs
    assert graphs._adapters[2 * 16 :].tolist() == [page] * 5 + [-1]


def test_with_adapters_every_size_is_recorded_twice() -> None:
    kinds = {"generation_sizes": (1, 2, 4, 8), "mixed_sizes": (16, 24)}
    assert RecordedKinds(**kinds, with_adapters=True).num_bytes == 2 * RecordedKinds(**kinds).num_bytes


@pytest.mark.parametrize("lacking", ["nothing", "chunks", "all"])
def test_no_rank_records_an_iteration_that_another_cannot(
    zoo: Zoo, lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks of a stage sum row by row: either all of them have padding rows, or none has."""
    model, tape = zoo["llama-gqa"], Tape()
    options = {"attention": FixedRowsAttention(), "max_num_tokens": 64}
    engine = load_paged(model.folder, 200, 11, tape, **options)
    runner, kinds = engine.runner, engine.recorded
    others = {"nothing": [5, 7], "chunks": [5, 0], "all": [0]}[lacking]
    asked: list[int] = []

    def agree(number: int) -> int:
        asked.append(number)
        return min(number, others[len(asked) - 1])

    runner.agree_on_recordings(agree)
    assert asked == [len(kinds.generation_sizes), len(kinds.mixed_sizes)][: len(others)]
    assert bool(runner.recorded.generation_sizes) == (lacking != "all")
    assert bool(runner.recorded.mixed_sizes) == (lacking == "nothing")
    assert ("another rank cannot record them" in caplog.text) == (lacking != "nothing")
    tape.replayed.clear()
    driver = Driver(engine)
    rows = [driver.start(model.prompt(5 + number, number)) for number in range(2)]
    driver.step({row: len(row.tokens) for row in rows})
    driver.step(generation=rows)
    assert len(tape.replayed) == {"nothing": 2, "chunks": 1, "all": 0}[lacking]
    for row in rows:
        assert row.generated == model.greedy(row.tokens[: row.prompt_length], 2)


def test_a_rank_without_recordings_takes_part_in_the_agreement(zoo: Zoo) -> None:
    asked: list[int] = []
    load_paged(zoo["llama-gqa"].folder).runner.agree_on_recordings(lambda number: asked.append(number) or 0)
    assert asked == [0]
