"""The bound on the bytes of a token's text, compared with the longest possible texts."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from inflight.text.token_bytes import max_bytes_per_token
from inflight.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import NAMES, backend, tokenizer
from tests.tiers import with_all

CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "NFD": normalizers.NFD(),
    "NFKD": normalizers.NFKD(),
    "Lowercase": normalizers.Lowercase(),
    "Replace": normalizers.Replace("aaa", "b"),
    "two of them": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
}


def changed(name: str, **parts: object) -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer.from_str(backend(name).to_str())
    for part, value in parts.items():
        setattr(result, part, value)
    return result


@cache
def normalizing(name: str, normalizer: str) -> Tokenizer:
    return Tokenizer(changed(name, normalizer=NORMALIZERS[normalizer]))


def size(text: str) -> int:
    return len(text.encode("utf-8"))


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
def test_the_bound_is_the_length_of_the_longest_token(name: str) -> None:
    bound = tokenizer(name).max_bytes_per_token
    spelled = [len(token) if name == "byte_level" else size(token) for token in backend(name).get_vocab()]
    assert bound == max(spelled)


@pytest.mark.parametrize("name", with_all(["byte_level", "llama", "gemma"], ["byte_level", "gemma"]))
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@given(text=st.text(max_size=40))
def test_no_text_has_fewer_tokens_than_the_bound_allows(name: str, normalizer: str, text: str) -> None:
    ours = normalizing(name, normalizer)
    assert ours.max_bytes_per_token is not None
    assert size(text) <= len(ours.encode(text)) * ours.max_bytes_per_token


def changed_by(change: Callable[[str], str]) -> list[str]:
    """Return the characters of all blocks of 256 that `change` changes: it changes no other character."""
    blocks = (CHARACTERS[begin : begin + 256] for begin in range(0, len(CHARACTERS), 256))
    return [each for block in blocks if change("".join(block)) != "".join(block) for each in block]


def longest_sources(form: str) -> dict[str, int]:
    """Return the most bytes of a character that normalizes to another one, by that other one."""
    longest: dict[str, int] = defaultdict(int)
    for character in changed_by(partial(unicodedata.normalize, form)):
        parts = unicodedata.normalize(form, character)
        if len(parts) == 1 and parts != character:
            longest[parts] = max(longest[parts], size(character))
    return longest


@pytest.mark.parametrize("form", with_all(["NFC", "NFKC", "NFD", "NFKD"], ["NFKC"]))
def test_unicode_normalization_shrinks_no_text_to_less_than_a_quarter(form: str) -> None:
    longest = longest_sources(form.replace("C", "D"))
    shrunk = []
    for character in {*changed_by(partial(unicodedata.normalize, "NFD")), *longest}:
        if unicodedata.is_normalized(form, character):
            parts = unicodedata.normalize("NFD", character)
            if sum(max(longest.get(part, 0), size(part)) for part in parts) > 4 * size(character):
                shrunk.append(character)
    assert not shrunk


def test_lower_case_shrinks_no_character_to_less_than_a_third() -> None:
    lower = normalizers.Lowercase()
    changed = changed_by(lower.normalize_str)
    assert "A" in changed
    assert all(size(character) <= 3 * size(lower.normalize_str(character)) for character in changed)


UNBOUNDED = {
    "stripped": changed("byte_level", normalizer=normalizers.Strip()),
    "accents": changed("byte_level", normalizer=normalizers.StripAccents()),
    "an expression": changed("byte_level", normalizer=normalizers.Replace(Regex(" +"), " ")),
    "deleted": changed("byte_level", normalizer=normalizers.Replace("a", "")),
    "cut out": changed(
        "byte_level",
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "no bytes": tokenizers.Tokenizer(tokenizers.models.BPE()),
}


@pytest.mark.parametrize("reason", UNBOUNDED)
def test_tokenizers_that_may_drop_text_have_no_bound(reason: str) -> None:
    assert max_bytes_per_token(UNBOUNDED[reason]) is None


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_tokenizers_with_a_token_that_strips_spaces_have_no_bound(side: str) -> None:
    stripping = changed("byte_level")
    stripping.add_tokens([AddedToken("<strip>", **{side: True})])
    assert max_bytes_per_token(stripping) is None
    ours, spaces = Tokenizer(stripping), " " * 10_000
    assert len(ours.encode(f"{spaces}<strip>" if side == "lstrip" else f"<strip>{spaces}")) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("byte_level", "llama", "gemma")])
def test_tokenizers_with_unknown_words_have_no_bound(name: str) -> None:
    assert tokenizer(name).max_bytes_per_token is None


def test_an_added_token_may_be_the_longest() -> None:
    longer = changed("byte_level")
    longer.add_special_tokens(["<|a special token with a long name|>"])
    assert max_bytes_per_token(longer) == len("<|a special token with a long name|>")
