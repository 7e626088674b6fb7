"""Recurrent states of slots after batches, compared with a scan of each sequence alone."""

from __future__ import annotations

import pytest
import torch

from inflight.core.request.request import Request
from inflight.core.schedule.batch import (
    BeamMove,
    ContextChunk,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    StateSave,
)
from inflight.engine.packing import pack
from inflight.engine.recurrent.mixers import empty_state
from inflight.engine.recurrent.states import RecurrentStates, state_bytes
from inflight.engine.slots import SlotTable
from tests.engine.recurrent.test_mixers import gated_delta, hidden_states

CPU = torch.device("cpu")
NUM_LAYERS = 2


def limits_of_states() -> EngineLimits:
    return EngineLimits(100, 200, 4, 100, tokens_per_block=4, has_state=True, num_state_snapshots=3)


class Driver:
    """A slot table and recurrent states; token id i has row i of one table of projected hidden states."""

    def __init__(self) -> None:
        _, self.config, self.mixer, self.project, _ = gated_delta()
        self.table = SlotTable(limits_of_states(), 100, CPU)
        self.states = RecurrentStates(self.config, NUM_LAYERS, 4, 3, torch.float32, CPU)
        self.rows = self.project(hidden_states(100))
        self.next_block = 0

    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run a batch, and return the outputs of the last layer."""
        self.table.apply(batch)
        self.states.apply(batch)
        packed = pack(batch, self.table)
        self.states.begin(batch, packed)
        outputs = [
            self.states.run(layer, self.mixer, self.rows[packed.token_ids]) for layer in range(NUM_LAYERS)
        ]
        self.table.advance(batch)
        torch.testing.assert_close(outputs[0], outputs[1])
        return outputs[-1]

    def expected(self, token_ids: range | list[int]) -> torch.Tensor:
        state = empty_state(self.config, torch.float32, CPU)
        return self.mixer.scan(self.rows[list(token_ids)], state)[0]


def start(slot: int, snapshot: int = -1) -> SlotStart:
    return SlotStart(slot, Request(slot, (1,), 50), snapshot=snapshot)


def chunk(
    slot: int, first: int, ids: range | list[int], drafts: int = 0, is_last: bool = True
) -> ContextChunk:
    return ContextChunk(slot, first, tuple(ids), is_last, num_draft_tokens=drafts)


def blocks(*slots: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((slot, tuple(range(slot * 20, slot * 20 + 20))) for slot in slots)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def feed(driver: Driver, batch: ScheduledBatch, *tokens: tuple[int, ...]) -> None:
    output = ModelOutput(batch.iteration, list(tokens))
    driver.table.remember(batch, output)
    driver.states.accept(batch, output)


def test_chunks_and_generation_continue_from_the_last_batch(driver: Driver) -> None:
    first = ScheduledBatch(
        0,
        starts=(start(0), start(1)),
        new_blocks=blocks(0, 1),
        context=(chunk(0, 0, range(10), is_last=False), chunk(1, 0, range(20, 27))),
    )
    outputs = driver.run(first)
    torch.testing.assert_close(outputs[:10], driver.expected(range(10)))
    torch.testing.assert_close(outputs[10:], driver.expected(range(20, 27)))
    feed(driver, first, (27,))
    second = ScheduledBatch(1, context=(chunk(0, 10, range(10, 15)),), generation_slots=(1,))
    outputs = driver.run(second)
    torch.testing.assert_close(outputs[:5], driver.expected(range(15))[10:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[5:], driver.expected(range(20, 28))[7:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_only_accepted_drafts_change_the_state(driver: Driver, num_accepted: int) -> None:
    known, drafts = list(range(6)), [10, 11, 12]
    batch = ScheduledBatch(
        0, starts=(start(2),), new_blocks=blocks(2), context=(chunk(2, 0, known + drafts, drafts=3),)
    )
    outputs = driver.run(batch)
    torch.testing.assert_close(outputs, driver.expected(known + drafts), rtol=1e-4, atol=1e-5)
    feed(driver, batch, (*drafts[:num_accepted], 50))
    outputs = driver.run(ScheduledBatch(1, generation_slots=(2,)))
    expected = driver.expected([*known, *drafts[:num_accepted], 50])
    torch.testing.assert_close(outputs, expected[-1:], rtol=1e-4, atol=1e-5)


def test_drafts_can_be_accepted_after_the_next_batch_of_other_slots(driver: Driver) -> None:
    """With two micro-batches in flight, the next batch runs before the drafts are verified."""
    batch = ScheduledBatch(
        0, starts=(start(2),), new_blocks=blocks(2), context=(chunk(2, 0, [*range(6), 10, 11], drafts=2),)
    )
    driver.run(batch)
    driver.run(ScheduledBatch(1, starts=(start(1),), new_blocks=blocks(1), context=(chunk(1, 0, range(5)),)))
    feed(driver, batch, (10, 11, 50))
    outputs = driver.run(ScheduledBatch(2, generation_slots=(2,)))
    torch.testing.assert_close(outputs, driver.expected([*range(6), 10, 11, 50])[-1:], rtol=1e-4, atol=1e-5)


def test_slots_start_from_snapshots_inside_and_at_the_end_of_chunks(driver: Driver) -> None:
    batch = ScheduledBatch(
        0,
        starts=(start(0),),
        new_blocks=blocks(0),
        context=(chunk(0, 0, range(8)),),
        state_saves=(StateSave(0, 8, 2), StateSave(0, 4, 0)),
    )
    driver.run(batch)
    again = ScheduledBatch(
        1,
        starts=(start(1, snapshot=0), start(3, snapshot=2)),
        new_blocks=blocks(1, 3),
        context=(chunk(1, 4, [60, 61]), chunk(3, 8, [62])),
    )
    outputs = driver.run(again)
    torch.testing.assert_close(outputs[:2], driver.expected([0, 1, 2, 3, 60, 61])[4:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[2:], driver.expected([*range(8), 62])[8:], rtol=1e-4, atol=1e-5)


def test_a_snapshot_saved_in_generation_includes_the_rows_token(driver: Driver) -> None:
    first = ScheduledBatch(0, starts=(start(0),), new_blocks=blocks(0), context=(chunk(0, 0, range(7)),))
    driver.run(first)
    feed(driver, first, (7,))
    driver.run(ScheduledBatch(1, generation_slots=(0,), state_saves=(StateSave(0, 8, 1),)))
    again = ScheduledBatch(
        2, starts=(start(1, snapshot=1),), new_blocks=blocks(1), context=(chunk(1, 8, [70, 71]),)
    )
    expected = driver.expected([*range(8), 70, 71])[8:]
    torch.testing.assert_close(driver.run(again), expected, rtol=1e-4, atol=1e-5)


def test_moves_of_beams_are_applied_simultaneously(driver: Driver) -> None:
    first = ScheduledBatch(
        0,
        starts=(start(0), start(1)),
        new_blocks=blocks(0, 1),
        context=(chunk(0, 0, range(4)), chunk(1, 0, range(30, 34))),
    )
    driver.run(first)
    feed(driver, first, (), ())
    moves = (BeamMove(0, 1, 80), BeamMove(1, 0, 81))
    outputs = driver.run(ScheduledBatch(1, moves=moves, generation_slots=(0, 1)))
    expected = [driver.expected([*range(30, 34), 80])[-1], driver.expected([*range(4), 81])[-1]]
    torch.testing.assert_close(outputs, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_a_restarted_slot_begins_with_the_initial_state(driver: Driver) -> None:
    batch = ScheduledBatch(0, starts=(start(0),), new_blocks=blocks(0), context=(chunk(0, 0, range(9)),))
    driver.run(batch)
    torch.testing.assert_close(driver.run(batch), driver.expected(range(9)))


def test_state_bytes_is_the_size_of_the_states_tensors(driver: Driver) -> None:
    conv, state = 2 * 2 * 8 + 4 * 12, 4 * 8 * 12
    assert state_bytes(driver.config, NUM_LAYERS, torch.bfloat16) == NUM_LAYERS * (conv * 3 * 2 + state * 4)
