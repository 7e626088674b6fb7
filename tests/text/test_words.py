from __future__ import annotations

import pytest
import tokenizers

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer
from inflight.text.words import word_ids
from tests.text.tiny_tokenizers import NAMES, backend, tokenizer

WORDS = ["dog", "the", "sleeps", "今天", "naïve", "🎉"]
SPACED = ["byte_level", "llama", "gemma"]  # distinguishes a word after a space from one within another


def continued(name: str, ids: tuple[int, ...]) -> str:
    """Return the text that `ids` add after another text."""
    prefix = tokenizer(name).encode("the")
    detokenizer = IncrementalDetokenizer(tokenizer(name), skip_special_tokens=False, prefix_ids=prefix)
    return detokenizer.add(ids) + detokenizer.flush()


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_ids_as_written_and_after_a_space(name: str, word: str) -> None:
    assert [continued(name, ids) for ids in word_ids(tokenizer(name), word)] == [word, f" {word}"]


def test_the_ids_are_those_of_the_word_within_a_text() -> None:
    _, spaced = word_ids(tokenizer("byte_level"), "dog")
    assert tuple(tokenizer("byte_level").encode("a dog"))[-len(spaced) :] == spaced


@pytest.mark.parametrize("name", NAMES)
def test_every_tokenizer_has_ids_for_a_word(name: str) -> None:
    found = word_ids(tokenizer(name), "dog")
    assert found and len(set(found)) == len(found)
    assert all(backend(name).decode(list(ids)).strip() == "dog" for ids in found)


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_special_tokens_are_not_part_of_a_word(name: str) -> None:
    special = set(range(3))
    assert not any(special & set(ids) for ids in word_ids(tokenizer(name), "dog"))


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize("word", [" dog", "\n", "\n\n", "\t"])
def test_a_word_that_begins_with_a_space_has_one_spelling(name: str, word: str) -> None:
    (ids,) = word_ids(tokenizer(name), word)
    assert continued(name, ids).lstrip(" ") == word.lstrip(" ")


def test_an_empty_word_has_no_ids() -> None:
    assert word_ids(tokenizer("byte_level"), "") == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("word", "token_id"), [("</s>", 2), ("<tool>", None)])
def test_the_name_of_an_added_token_is_that_token(name: str, word: str, token_id: int | None) -> None:
    expected = backend(name).token_to_id(word) if token_id is None else token_id
    assert word_ids(tokenizer(name), word)[0] == (expected,)


def test_the_name_of_any_special_token_is_that_token() -> None:
    splitting = tokenizers.Tokenizer.from_str(backend("byte_level").to_str())
    splitting.encode_special_tokens = True
    ours = Tokenizer(splitting)
    assert ours.encode("</s>") != [2]
    assert word_ids(ours, "</s>")[0] == (2,)


def test_a_special_token_within_a_word_is_that_token() -> None:
    assert (*tokenizer("byte_level").encode("dog"), 2) in word_ids(tokenizer("byte_level"), "dog</s>")
