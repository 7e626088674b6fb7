"""Masks, vocabularies, and guides in messages and traces."""

from __future__ import annotations

import numpy as np
import torch

from inflight.batch_manager.recording import Begin, decode, encode
from inflight.core.request.guide import Guide, GuideEvent, GuideKind
from inflight.core.request.request import IterationInput
from inflight.core.request.sampling_config import SamplingConfig
from inflight.guided.backend import MaskJob
from inflight.guided.vocabulary import GuideVocabulary
from inflight.load_model import guide_vocabulary
from inflight.raw_buffers import BufferedDecoder, BufferedEncoder
from inflight.sampling.row_kernels import banned_by
from inflight.text.tokenizer import Tokenizer
from tests.guided.factories import has_bit, make_request, tiny_backend, tiny_vocabulary
from tests.guided.test_at_random import DEMO_MODEL


def test_masks_are_expanded_on_a_device_as_on_the_host() -> None:
    allowed = np.random.default_rng(0).random((5, 96)) < 0.3
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    assert np.array_equal(banned_by(torch.from_numpy(masks), 77).numpy(), ~allowed[:, :77])


def test_the_end_of_a_text_is_the_mask_bit_after_the_vocabulary() -> None:
    for size in (31, 32, 33):
        vocabulary = GuideVocabulary.of_size(size, [bytes([65 + each]) for each in range(26)], {3})
        assert vocabulary.end_id == size
        assert vocabulary.num_words == size // 32 + 1
        assert len(set(vocabulary.spelled())) == size + 1
        assert vocabulary.without_text() == [3, *range(26, size), size]


def test_a_guide_of_text_bans_special_tokens() -> None:
    guide = Guide(GuideKind.REGEX, "[^a]*")
    for name in ("llguidance", "xgrammar"):
        backend = tiny_backend(name)
        masks = np.zeros((1, tiny_vocabulary().num_words), dtype=np.int32)
        backend.fill([MaskJob(backend.load(guide, backend.compile(guide)), 0)], masks)
        assert [has_bit(masks[0], token) for token in (0, 1, 2, 5, 208)] == [False, False, False, True, False]


def test_a_guided_decoding_configs_vocabulary_equals_the_tokenizers() -> None:
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    vocabulary = guide_vocabulary(["unused"], text, [5])
    assert vocabulary.tokens == tuple(tokenizer.token_bytes())
    assert 5 in vocabulary.special_ids
    sentence = 'def f(x):\n    return "é" * x  # ü\n'
    assert b"".join(vocabulary.tokens[token] for token in tokenizer.encode(sentence)).decode() == sentence
    assert guide_vocabulary(["a", "ü"], None, [0]) == GuideVocabulary((b"a", "ü".encode()), frozenset([0]))


def test_guides_and_their_events_are_recorded_and_shared() -> None:
    request = make_request(7, (1, 2), Guide(GuideKind.JSON_SCHEMA, '{"type": "null"}'))
    inputs = IterationInput(3, 4, (request,), guides=(GuideEvent(7), GuideEvent(8, "INVALID_ARG", "wrong")))
    message, _ = BufferedEncoder().encode(inputs)
    assert BufferedDecoder(IterationInput).decode(message)[0] == inputs
    assert decode(encode(Begin(inputs))) == Begin(inputs)
    assert request.needs_host and not request.looks_back
    assert request.sampling == SamplingConfig(top_p=1.0, temperature=1.0, random_seed=7)
