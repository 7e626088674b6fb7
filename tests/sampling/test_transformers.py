"""The pipeline compared with transformers' logits processors of the same meaning, one by one and combined."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.sampling import reference
from tests.sampling.factories import Row, choose_tokens, make_request

VOCAB_SIZE = 100
END_ID = 7
PROMPT = [5, 9, 5, 9, 3, 3, 3, 8, 5, 9]
BAD_WORDS = [(11,), (9, 40), (5, 9, 41), (9, 5, 42), (13,), (0,)]
CASES = [
    ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    ({"repetition_penalty": 0.6}, [RepetitionPenaltyLogitsProcessor(0.6)]),
    (
        {"min_length": 3, "end_ids": [END_ID, 60]},
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [END_ID, 60])],
    ),
    (
        {"bad_words": BAD_WORDS},
        [NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS], eos_token_id=[END_ID])],
    ),
    *(({"no_repeat_ngram_size": size}, [NoRepeatNGramLogitsProcessor(size)]) for size in (1, 2, 3, 4)),
]


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(("changes", "processors"), CASES)
@pytest.mark.parametrize("generated", [(), (12,), (3, 3), (5, 9), (5, 9, 5), (3, 5, 9, 5)], ids=str)
def test_processed_logits_equal_those_of_transformers(
    changes: dict, processors: list, generated: tuple[int, ...]
) -> None:
    row = Row(make_request(PROMPT, **changes), generated)
    logits = _logits(len(generated))
    expected = LogitsProcessorList(processors)(torch.tensor([row.tokens]), logits.clone())

    got = reference.process(logits[0].tolist(), row.request, row.tokens)
    torch.testing.assert_close(torch.tensor([got]), expected)
    # The fast pipeline does not return processed logits, but changes logits that are not requested in place.
    changed = logits.clone()
    choose_tokens(changed, [row])
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 0.35, 0.0),
        (0, 0.83, 0.0),
        (5, 0.0, 0.0),
        (5, 0.83, 0.0),
        (40, 0.0, 0.1),
        (40, 0.35, 0.0),
        (40, 0.83, 0.05),
        (0, 0.0, 0.2),
        (0, 0.9, 0.02),
    ],
)
def test_filtered_distributions_equal_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Filters are temperature, top-k, top-p and min-p. transformers' top-p keeps a token if later ones do not
    reach 1 - p."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for seed in range(10):
        logits = _logits(seed)
        expected = (
            LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits).double().softmax(-1)
        )
        request = make_request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

        got = reference.distribution(logits[0].tolist(), request, [0])

        dense = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
        dense[0, list(got)] = torch.tensor(list(got.values()), dtype=torch.float64)
        torch.testing.assert_close(dense, expected, rtol=0, atol=1e-6)
