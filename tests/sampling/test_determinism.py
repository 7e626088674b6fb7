"""A sequence's tokens depend only on its request, not on batch, order of rows, slot or pauses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from inflight.core.request.request import OutputOptions
from inflight.core.schedule.batch import ScheduledBatch
from tests.sampling.factories import Row, choose_tokens, decode_rows, make_request, make_sampler

pytestmark = pytest.mark.usefixtures("row_kernels")

_EVERY_KIND = [
    {},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"top_k": 3},
    {"top_k": 200, "top_p": 0.5, "repetition_penalty": 1.3},
    {"top_k": 700},
    {"top_p": 0.3},
    {"top_p": 0.99, "temperature": 2.0, "frequency_penalty": 0.3},
    {"top_p": 1.0, "no_repeat_ngram_size": 2},
    {"min_p": 0.05, "bad_words": [(3,), (4, 5)]},
    {"top_p": 0.9, "top_p_decay": 0.8, "top_p_reset_id": 2, "min_length": 4, "end_ids": [8]},
    {"output": OutputOptions(return_log_probs=True, num_top_log_probs=3), "top_p": 0.7},
]


def _rows(count: int) -> list[Row]:
    numbers = random.Random(0)
    rows = []
    for seed in range(count):
        prompt = numbers.choices(range(10), k=numbers.randint(1, 40))
        request = make_request(prompt, random_seed=seed // 3, **_EVERY_KIND[seed % len(_EVERY_KIND)])
        rows.append(Row(request, tuple(numbers.choices(range(10), k=3)), seed % 4))
    return rows


@pytest.mark.parametrize("vocab_size", [37, 3001])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_tokens_are_the_same_alone_in_a_batch_and_in_any_order(vocab_size: int, num_threads: int) -> None:
    rows = _rows(64)
    logits = (
        torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0)).mul_(3).bfloat16().float()
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = [choose_tokens(logits[[index]], [row])[0] for index, row in enumerate(rows)]
    finally:
        torch.set_num_threads(before)
    assert choose_tokens(logits.clone(), rows) == alone
    for seed in range(5):
        order = random.Random(seed).sample(range(64), 64)
        slots = random.Random(-seed).sample(range(100), 64)
        sampler = make_sampler(100, vocab_size)
        output = decode_rows(logits[order], [rows[index] for index in order], sampler, slots)
        assert output.token_ids == [(alone[index],) for index in order]


def test_a_paused_sequence_continues_with_the_same_tokens() -> None:
    """For each kind of sampling, six tokens in a row equal three tokens, a pause in which another sequence
    uses the slot, and three more."""
    logits = torch.randn(6, 1, 50, generator=torch.Generator().manual_seed(1)) * 2
    for row in _rows(2 * len(_EVERY_KIND)):
        expected = _generate(logits, row, pause_after=None)
        assert _generate(logits, row, pause_after=3) == expected


def _generate(logits: torch.Tensor, row: Row, pause_after: int | None) -> list[int]:
    sampler, slot = make_sampler(2, 50), 0
    generated: tuple[int, ...] = ()
    running = False
    for index, values in enumerate(logits):
        if index == pause_after:
            other = Row(make_request([1, 2], presence_penalty=1.0, top_p=1.0))
            decode_rows(values.clone(), [other], sampler, [slot])
            running, slot = False, 1
        position = row.request.prompt_length + len(generated)
        if running:
            batch = ScheduledBatch(0, generation_slots=(slot,))
            sampler.apply(batch)
            output = sampler.decode(batch, values.clone(), np.array([position]))
        else:
            output = decode_rows(
                values.clone(), [Row(row.request, generated, row.sequence_index)], sampler, [slot]
            )
            running = True
        generated += output.token_ids[0]
    return list(generated)
