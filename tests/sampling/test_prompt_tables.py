"""Virtual tokens, which stand for rows of a prompt table: no control reads or bans one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from inflight.sampling import reference
from inflight.sampling.logits_post_processors import LogitsPostProcessors
from tests.sampling.factories import (
    Row,
    beams_of,
    choose_tokens,
    decode_rows,
    make_request,
    make_sampler,
)

pytestmark = pytest.mark.usefixtures("row_kernels")

VOCAB_SIZE, NUM_TABLE_ROWS = 40, 9
CONTROLS = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3, "top_k": 5},
    {"frequency_penalty": -0.5, "repetition_penalty": 0.7, "top_p": 0.9},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    {"bad_words": [(3, 5), (7,)], "min_length": 2, "end_ids": (9,)},
]


def _rows(num_table_rows: int = NUM_TABLE_ROWS) -> list[Row]:
    numbers = random.Random(1)
    rows = []
    for seed in range(140):
        # Few different ids, so that n-grams recur.
        few = [*range(2, 10), *range(VOCAB_SIZE, VOCAB_SIZE + num_table_rows)]
        prompt = numbers.choices(few, k=numbers.randint(1, 30))
        controls = CONTROLS[seed % len(CONTROLS)]
        request = make_request(prompt, num_table_rows=num_table_rows, random_seed=seed, **controls)
        rows.append(Row(request, tuple(numbers.choices(range(2, 10), k=numbers.randint(0, 9)))))
    return rows


def _logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).bfloat16().float()


def test_tokens_of_rows_with_and_without_tables_equal_those_of_the_reference() -> None:
    rows = [row for pair in zip(_rows(), _rows(0)) for row in pair]
    logits = _logits(len(rows))
    expected = [
        reference.next_token(values, row.request, row.tokens)
        for values, row in zip(logits.tolist(), rows, strict=True)
    ]
    assert choose_tokens(logits, rows) == expected


def test_a_penalty_counts_the_same_with_table_rows_in_between() -> None:
    plain = make_request([4, 4, 6], frequency_penalty=2.0, presence_penalty=1.0)
    between = make_request(
        [40, 4, 41, 4, 48, 6, 40], num_table_rows=9, frequency_penalty=2.0, presence_penalty=1.0
    )
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, [4, 6]] = torch.tensor([4.5, 2.5])
    decode_rows(logits, [Row(plain), Row(between)])
    assert torch.equal(logits[0], logits[1]) and logits[0, 4] == -0.5 and logits[0, 6] == -0.5


@pytest.mark.parametrize(
    ("virtual", "plain"), [([40, 7, 40], [5, 7, 5]), ([40, 6, 7, 40, 6], [5, 6, 7, 5, 6])], ids=["2", "3"]
)
def test_an_ngram_with_a_table_row_may_repeat(virtual: list[int], plain: list[int]) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 7] = 1.0
    size = len(plain) // 2 + 1
    rows = [Row(make_request(ids, num_table_rows=9, no_repeat_ngram_size=size)) for ids in (virtual, plain)]
    assert choose_tokens(logits, rows) == [7, 0]


def test_drafts_and_beams_with_prompt_tables_equal_those_of_the_reference() -> None:
    logits = _logits(3)
    controls = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "num_table_rows": 9}
    for seed in range(20):
        prompt = random.Random(seed).choices([3, 4, 40, 41, 48], k=12)
        request = make_request(prompt, drafts=(3, 4), random_seed=seed, top_k=2, **controls)
        expected = reference.verify_drafts(logits.tolist(), request, prompt, (3, 4))
        assert list(decode_rows(logits.clone(), [Row(request, (), 0, (3, 4))]).token_ids[0]) == expected
        search = make_request(prompt, beam_width=2, **controls)
        tokens, scores = [[*prompt, 3], [*prompt, 4]], [-1.0, -1.5]
        found = beams_of(logits[:2].clone(), search, tokens, scores, 4)
        wanted = reference.beam_candidates(logits[:2].tolist(), search, tokens, scores, 4)
        assert list(zip(found.rows, found.token_ids)) == [each[:2] for each in wanted]


def test_a_post_processor_sees_the_ids_as_they_were_sent() -> None:
    seen: list[list[list[int]]] = []
    processors = LogitsPostProcessors({"look": lambda _, logits, ids, stream: seen.append(ids)})
    request = replace(make_request([40, 3, 48], num_table_rows=9), logits_post_processor_name="look")
    decode_rows(
        torch.zeros(1, VOCAB_SIZE), [Row(request)], make_sampler(1, VOCAB_SIZE, processors=processors)
    )
    assert seen == [[[40, 3, 48]]]
