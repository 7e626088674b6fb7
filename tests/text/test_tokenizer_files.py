"""Tokenizers of many kinds of checkpoints, against transformers' `AutoTokenizer` on the same folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from inflight.models.families import FAMILIES
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_class import AS_IN_ITS_FILE, CLASS_OF_MODEL
from inflight.text.words import word_ids
from tests.text.checkpoint_folders import CHAT, FOLDERS, TEXTS
from tests.tiers import with_all


@cache
def loaded(name: str) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """Load our and transformers' tokenizer of one folder."""
    with TemporaryDirectory() as folder:
        FOLDERS[name](Path(folder))
        return Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_vocabulary_and_its_special_tokens_are_those_of_transformers(name: str) -> None:
    ours, theirs = loaded(name)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_those_of_transformers(name: str, add_special_tokens: bool) -> None:
    ours, theirs = loaded(name)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens) == ids, text


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_is_that_of_transformers_whole_and_streamed(name: str, skip: bool) -> None:
    ours, theirs = loaded(name)
    for text in TEXTS:
        ids = theirs.encode(text)
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip) == expected
        detokenizer = IncrementalDetokenizer(ours, skip)
        deltas = [detokenizer.add([token_id]) for token_id in ids]
        assert "".join(deltas) + detokenizer.flush() == expected


@pytest.mark.parametrize("name", with_all(FOLDERS, ["byte level", "LlamaTokenizer", "Mistral"]))
@given(data=st.data())
def test_any_streamed_ids_give_the_whole_text(name: str, data: st.DataObject) -> None:
    ours, _ = loaded(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 2), max_size=30))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(ours, skip)
    deltas = [detokenizer.add([token_id]) for token_id in ids]
    assert "".join(deltas) + detokenizer.flush() == ours.decode(ids, skip)


ROUND_TRIPS = [
    "byte level",
    "chat tokens in the settings",
    "extra tokens as a list",
    "an end token that no file lists",
    "LlamaTokenizer",
    "LlamaTokenizer with chat tokens",
    "Mistral",
]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_chat_survives_a_round_trip(name: str) -> None:
    ours, _ = loaded(name)
    text = "<|im_start|>user\nGröße, 今天 🎉?<|im_end|>\n<|im_start|>assistant\n"
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("chat tokens")])
def test_chat_tokens_are_one_token_each_and_are_skipped(name: str) -> None:
    ours, _ = loaded(name)
    for content in CHAT:
        token_id = ours.added_token_id(content)
        assert token_id is not None
        assert ours.decode([token_id]) == ""
        assert ours.decode([token_id], skip_special_tokens=False).strip() == content
        assert word_ids(ours, content)[0] == (token_id,)


def test_every_model_type_has_transformers_tokenizer_class() -> None:
    known = {family.model_type for family in FAMILIES} | CLASS_OF_MODEL.keys()
    for model_type in known:
        theirs = TOKENIZER_MAPPING_NAMES.get(model_type)
        expected = AS_IN_ITS_FILE if theirs == "TokenizersBackend" else theirs
        assert CLASS_OF_MODEL.get(model_type) == expected, model_type
