from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from inflight.text.detokenizer import IncrementalDetokenizer
from tests.text.tiny_tokenizers import BYTE_NAMES, NAMES, backend, byte_ids, tokenizer
from tests.tiers import examples

# Small fragments reach edge cases more often than random code points.
FRAGMENTS = st.sampled_from(
    [
        " ",
        "  ",
        "   ",
        "\n",
        "\t",
        "a",
        "dog",
        "the",
        ".",
        " ,",
        "今",
        "天气",
        "é",
        "e\u0308",
        "👩‍👩‍👧‍👦",
        "🎉",
        "🇩🇪",
        "\u200d",
    ]
    + ["▁", "Ġ", "##", "�", "</s>", "<tool>", "<0xE4>", "ﷺ", "\u0000", "Привет"]
)
TEXTS = st.one_of(st.text(max_size=30), st.lists(FRAGMENTS, max_size=20).map("".join))
with_fewer_examples = settings(max_examples=examples(40, all=100))  # for each of many tokenizers
STREAMED = [name for name in NAMES if name != "word_suffix"]


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Draw ids, some outside of the vocabulary, and many that are bytes."""
    size = tokenizer(name).vocab_size
    anything = st.integers(0, size + 3)
    if name in BYTE_NAMES:
        data = st.sampled_from([*"今é🎉a ".encode(), 0x80, 0xC0, 0xE4, 0xED, 0xA0, 0xF0, 0xF4, 0x90, 0xFF])
        anything = st.one_of(anything, data.map(lambda byte: byte_ids(name, bytes([byte]))[0]))
    return st.lists(anything, max_size=40)


def stream(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int] | None = None) -> list[str]:
    """Feed `ids` cut into pieces of the given sizes (one by one without), and flush."""
    deltas, position = [], 0
    for size in [*(cuts or []), *[1] * len(ids)]:
        deltas.append(detokenizer.add(ids[position : position + size]))
        position += size
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
@with_fewer_examples
@given(data=st.data())
def test_deltas_concatenate_to_the_decoded_text(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name))
    cuts = data.draw(st.lists(st.integers(0, 7), max_size=10))
    skip = data.draw(st.booleans())
    deltas = stream(IncrementalDetokenizer(tokenizer(name), skip), ids, cuts)
    assert "".join(deltas) == tokenizer(name).decode(ids, skip)


@pytest.mark.parametrize("name", NAMES)
@with_fewer_examples
@given(text=TEXTS)
def test_encoded_text_streams_without_replacement_characters(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text)
    deltas = stream(IncrementalDetokenizer(tokenizer(name)), ids)
    decoded = backend(name).decode(ids)
    assert "".join(deltas) == decoded
    if "�" not in text:
        assert not any("�" in delta for delta in deltas)


@pytest.mark.parametrize("name", NAMES)
@with_fewer_examples
@given(data=st.data())
def test_with_a_prefix_the_deltas_continue_its_text(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, generated = ids[:cut], ids[cut:]
    prompt_text, text = tokenizer(name).decode(prompt), tokenizer(name).decode(ids)
    deltas = stream(IncrementalDetokenizer(tokenizer(name), prefix_ids=prompt), generated)
    if text.startswith(prompt_text):
        assert prompt_text + "".join(deltas) == text


@pytest.mark.parametrize("name", STREAMED)
@with_fewer_examples
@given(prompt=TEXTS, completion=TEXTS)
def test_the_last_ids_of_a_prompt_suffice(name: str, prompt: str, completion: str) -> None:
    prompt_ids, ids = tokenizer(name).encode(prompt), tokenizer(name).encode(completion)
    last = prompt_ids[-16:]
    assume(len(last) < 16 or tokenizer(name).decode(last))  # special tokens, for example, have no text
    few = stream(IncrementalDetokenizer(tokenizer(name), prefix_ids=last), ids)
    assert few == stream(IncrementalDetokenizer(tokenizer(name), prefix_ids=prompt_ids), ids)


@pytest.mark.parametrize("name", BYTE_NAMES)
@with_fewer_examples
@given(data=st.binary(max_size=24))
@example(b"\xe4\xbd\xa0" * 8 + b"\xff")
@example(b"\xf0\x9f\x98" * 8)
def test_at_most_three_bytes_are_held_back(name: str, data: bytes) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer(name))
    ids, text = byte_ids(name, data), ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.add([token_id])
        assert text in {tokenizer(name).decode(ids[: count - held]) for held in range(min(count, 3) + 1)}
    assert text + detokenizer.flush() == tokenizer(name).decode(ids)


def test_a_character_over_several_tokens_is_returned_once() -> None:
    for name in BYTE_NAMES:
        ids = byte_ids(name, "你🎉".encode())
        deltas = stream(IncrementalDetokenizer(tokenizer(name)), ids)
        assert [delta for delta in deltas if delta] == ["你", "🎉"]
        assert deltas[2] == "你"


def test_bytes_that_cannot_become_a_character_are_returned_at_once() -> None:
    detokenizer = IncrementalDetokenizer(tokenizer("byte_level"))
    assert detokenizer.add(byte_ids("byte_level", b"\xff")) == "�"
    assert detokenizer.add(byte_ids("byte_level", b"\xe4\xbd")) == ""
    assert detokenizer.add(byte_ids("byte_level", b"a")) == "�a"
    assert detokenizer.add(byte_ids("byte_level", b"\xe4")) == ""
    assert detokenizer.flush() == "�"


def test_a_damaged_run_of_byte_tokens_keeps_its_valid_characters() -> None:
    data = "你好".encode() + b"\xff" + "吗".encode() + b"\xe4\xbd"
    assert tokenizer("llama").decode(byte_ids("llama", data)) == "你好�吗��"


def test_a_completion_keeps_its_leading_space_after_a_prompt() -> None:
    llama = tokenizer("llama")
    prompt, generated = llama.encode("the dog"), llama.encode("sleeps")
    assert backend("llama").id_to_token(generated[0]).startswith("▁")
    assert "".join(stream(IncrementalDetokenizer(llama), generated)) == "sleeps"
    assert "".join(stream(IncrementalDetokenizer(llama, prefix_ids=prompt), generated)) == " sleeps"


@pytest.mark.parametrize("name", BYTE_NAMES)
def test_a_character_that_begins_in_the_prompt_is_completed(name: str) -> None:
    prompt = tokenizer(name).encode("the dog") + byte_ids(name, "你".encode()[:2])
    completes = byte_ids(name, "你".encode()[2:])
    breaks = byte_ids(name, b"a")
    assert "".join(stream(IncrementalDetokenizer(tokenizer(name), prefix_ids=prompt), completes)) == "你"
    assert "".join(stream(IncrementalDetokenizer(tokenizer(name), prefix_ids=prompt), breaks)) == "a"
    assert "".join(stream(IncrementalDetokenizer(tokenizer(name), prefix_ids=prompt), [])) == ""


def test_a_decoder_that_looks_ahead_returns_its_text_at_the_end() -> None:
    suffix = tokenizer("word_suffix")
    assert not suffix.token_decoder.is_token_by_token
    deltas = stream(IncrementalDetokenizer(suffix), suffix.encode("the dog sleeps"))
    assert deltas[-1] == "the dog sleeps"
    assert not any(deltas[:-1])


@pytest.mark.parametrize("name", STREAMED)
def test_the_cost_per_token_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    decoder = tokenizer(name).token_decoder
    join = decoder._join
    monkeypatch.setattr(decoder, "_join", lambda tokens: joined.append(len(tokens)) or join(tokens))
    ids = tokenizer(name).encode("the quick brown fox jumps over 今天天气. " * 20)
    stream(IncrementalDetokenizer(tokenizer(name)), ids)
    assert max(joined, default=0) <= 4
    assert sum(joined) <= 4 * len(ids)
