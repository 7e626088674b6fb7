"""Prompts of a tokenizer that adds BOS: as in transformers, and with `auto` never twice."""

from __future__ import annotations

import pytest
import tokenizers
import transformers
from tokenizers.processors import TemplateProcessing

from inflight.config import SpecialTokens
from inflight.text.text_encoder import TextEncoder
from inflight.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import backend

AROUND = {
    "bos": ["<s>", "$A"],
    "bos and eos": ["<s>", "$A", "</s>"],
    "two in front": ["<s>", "<unk>", "$A"],
    "none": ["$A"],
}
BARE, TEMPLATED = "the dog", "<s><unk>the dog"


@pytest.fixture(params=AROUND)
def made(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    made = backend("llama")
    made.post_processor = TemplateProcessing(
        AROUND[request.param], special_tokens=[("<unk>", 0), ("<s>", 1), ("</s>", 2)]
    )
    return made


def encode(made: tokenizers.Tokenizer, special_tokens: SpecialTokens, text: str) -> list[int]:
    tokenizer = Tokenizer(made)
    (ids,) = TextEncoder(lambda: tokenizer, special_tokens).prompts([text])
    return list(ids)


@pytest.mark.parametrize("text", [BARE, TEMPLATED])
@pytest.mark.parametrize("special_tokens", [SpecialTokens.ADDED, SpecialTokens.LEFT_OUT])
def test_adding_and_omitting_special_tokens_gives_transformers_ids(
    made: tokenizers.Tokenizer, special_tokens: SpecialTokens, text: str
) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    expected = theirs.encode(text, add_special_tokens=special_tokens is SpecialTokens.ADDED)
    assert encode(made, special_tokens, text) == expected


def test_auto_adds_only_missing_special_tokens(made: tokenizers.Tokenizer) -> None:
    bare = encode(made, SpecialTokens.AUTO, BARE)
    assert bare == encode(made, SpecialTokens.ADDED, BARE)
    ids = encode(made, SpecialTokens.AUTO, TEMPLATED)
    without = encode(made, SpecialTokens.LEFT_OUT, TEMPLATED)
    assert ids[: len(without)] == without and ids.count(1) == 1
    assert ids[len(without) :] == ([2] if bare[-1] == 2 else [])


def test_auto_decides_for_each_text_of_a_batch(made: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(made)
    encoder = TextEncoder(lambda: tokenizer, SpecialTokens.AUTO)
    assert encoder.prompts([BARE, TEMPLATED]) == [
        encode(made, SpecialTokens.AUTO, text) for text in (BARE, TEMPLATED)
    ]
