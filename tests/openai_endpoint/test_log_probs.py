"""Log probs in the formats of both routes, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.core.request.request import FloatTensor
from inflight.core.request.response import TopLogProbs
from inflight.openai.log_probs import (
    CompletionLogProbs,
    TokenNames,
    chat_log_probs,
    finite,
    prompt_log_probs_json,
    ranks_in_prompt,
    top_of_prompt,
)

TABLE = [b" Hello", b" world", b"\xf0\x9f", b"\x98\x80", b"</s>", b"Hello"]
HIDDEN = frozenset({4})


def test_tokens_that_are_not_characters_have_distinct_names() -> None:
    names = TokenNames(TABLE)
    assert [names.name(each) for each in (0, 2, 3)] == [" Hello", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert names.name(99) == "" and names.bytes_of(99) == b""
    assert TokenNames(TABLE, by_id=True).name(2) == "token_id:2"


def test_offsets_are_character_positions_in_the_text() -> None:
    told = CompletionLogProbs(TokenNames(TABLE), 0)
    first = told.add([0, 2, 3], [-1.0, -2.0, -3.0], [], HIDDEN)
    assert first["text_offset"] == [0, 6, 6]
    assert told.add([4, 1], [-1.0, -1.0], [], HIDDEN)["text_offset"] == [7, 7]


@pytest.mark.parametrize("ids", [[4, 0, 1], [4, 5, 1]], ids=["with a leading space", "without a space"])
def test_offsets_after_a_prompt_start_at_its_end(ids: list[int]) -> None:
    told = CompletionLogProbs(TokenNames(TABLE), 0)
    told.start_with("Hello world", ids, HIDDEN)
    assert told.add([*ids, 0], [None, -1.0, -1.0, -1.0], [], HIDDEN)["text_offset"] == [0, 0, 5, 11]


def test_the_chosen_token_is_listed_with_the_likeliest() -> None:
    told = CompletionLogProbs(TokenNames(TABLE), 1)
    tops = [TopLogProbs((0, 1), (-0.5, -1.5)), None]
    answer = told.add([1, 0], [-1.5, float("-inf")], tops, HIDDEN)
    assert answer["top_logprobs"] == [{" Hello": -0.5, " world": -1.5}, {" Hello": -9999.0}]
    assert answer["token_logprobs"] == [-1.5, finite(float("-inf"))]


def test_chat_log_probs_have_bytes() -> None:
    told = chat_log_probs(TokenNames(TABLE), 1, [2], [-1.0], [TopLogProbs((3, 0), (-0.1, -4.0))])
    (entry,) = told["content"]
    assert entry["bytes"] == [0xF0, 0x9F]
    assert entry["top_logprobs"] == [{"token": "bytes:\\x98\\x80", "logprob": -0.1, "bytes": [0x98, 0x80]}]


@pytest.mark.parametrize("num_top", [1, 5, 50])
def test_likeliest_prompt_tokens_equal_those_of_torch(num_top: int) -> None:
    logits = np.random.default_rng(1).normal(scale=5, size=(6, 50)).astype(np.float32)
    tops = top_of_prompt(FloatTensor(logits.shape, logits.tobytes()), list(range(6)), num_top)
    expected = torch.from_numpy(logits).double().log_softmax(-1).topk(num_top)
    assert len(tops) == 5
    for row, top in enumerate(tops):
        assert top.token_ids == tuple(expected.indices[row].tolist())
        assert top.log_probs == pytest.approx(expected.values[row].tolist(), abs=1e-5)


def test_ranks_of_a_prompt_count_likelier_tokens() -> None:
    logits = np.random.default_rng(1).integers(0, 4, size=(6, 8)).astype(np.float32)  # many of them equal
    tensor, ids = FloatTensor(logits.shape, logits.tobytes()), [3, 1, 7, 0, 5, 5]
    tops = top_of_prompt(tensor, ids, 8)
    assert ranks_in_prompt(tensor, ids) == [
        1 + top.token_ids.index(token_id) for top, token_id in zip(tops, ids[1:])
    ]


def test_the_prompts_token_comes_first() -> None:
    tops = [TopLogProbs((0, 1), (-0.5, -1.0)), TopLogProbs((1, 0), (-0.1, -3.0))]
    first, second, third = prompt_log_probs_json(
        TokenNames(TABLE), [5, 2, 1], [0.0, -4.0, -0.1], tops, 2, [3, 1]
    )
    assert first is None and second is not None and third is not None
    assert [(name, each["rank"]) for name, each in second.items()] == [("2", 3), ("0", 1), ("1", 2)]
    assert [(name, each["rank"]) for name, each in third.items()] == [("1", 1), ("0", 2)]
