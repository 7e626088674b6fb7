"""Vocabularies, engines and requests for guides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from inflight.config import EngineConfig
from inflight.core.request.guide import Guide
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.guided.backend import GuideBackend, MaskJob
from inflight.guided.grammars import GrammarLibrary, Grammars
from inflight.guided.make_backend import make_backend
from inflight.guided.vocabulary import GuideVocabulary
from tests.models.zoo_configs import VOCAB_SIZE

END_ID = 2
_PIECES = [
    '{"',
    '":',
    '", "',
    "true",
    "false",
    "null",
    '"}',
    "ab",
    "cd",
    "the",
    "</",
    "<f",
    "123",
    "..",
    "]}",
]


@cache
def tiny_vocabulary() -> GuideVocabulary:
    """The tokens of the random models: three special ones, the bytes of ASCII, some pieces, two halves of é."""
    ascii_bytes = [bytes([each]) for each in (9, 10, *range(32, 127))]
    tokens = [b"<pad>", b"<s>", b"</s>", *ascii_bytes, *(each.encode() for each in _PIECES), b"\xc3", b"\xa9"]
    return GuideVocabulary.of_size(VOCAB_SIZE, tokens, {0, 1, 2})


@cache
def tiny_backend(name: str = "llguidance") -> GuideBackend:
    return make_backend(name, tiny_vocabulary())


def grammars_of(backend: GuideBackend, vocabulary: GuideVocabulary, **changes: Any) -> Grammars:
    return Grammars(lambda: GrammarLibrary(backend, vocabulary), **changes)


def tiny_grammars(vocab_size: int = VOCAB_SIZE, name: str = "llguidance") -> Grammars:
    assert vocab_size == VOCAB_SIZE
    return grammars_of(tiny_backend(name), tiny_vocabulary())


def load(
    folder: Path,
    num_blocks: int = 256,
    max_num_sequences: int = 32,
    make_grammars: Callable[[int], Grammars | None] = tiny_grammars,
    **changes: Any,
) -> ModelEngine:
    """A float32 engine on the CPU with blocks of 8 tokens that follows guides."""
    values = {"dtype": "float32", "device": "cpu", "max_num_tokens": 512, "tokens_per_block": 8, **changes}
    config = EngineConfig(
        str(folder),
        max_num_sequences=max_num_sequences,
        max_tokens_in_paged_kv_cache=values["tokens_per_block"] * num_blocks,
        **values,
    )
    return load_engine(config, make_grammars=make_grammars)


def make_request(
    number: int,
    prompt: Sequence[int],
    guide: Guide | None,
    num_tokens: int = 100,
    end_ids: tuple[int, ...] = (END_ID,),
    sampling: dict[str, Any] | None = None,
    **changes: Any,
) -> Request:
    chosen = {"top_p": 1.0, "temperature": 1.0, "random_seed": number, **(sampling or {})}
    return Request(
        number, tuple(prompt), num_tokens, end_ids=end_ids, guide=guide, sampling=SamplingConfig(**chosen),
        **changes,
    )  # fmt: skip


def text_of(vocabulary: GuideVocabulary, tokens: Sequence[int]) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()


def check_tokens(
    backend: GuideBackend, vocabulary: GuideVocabulary, guide: Guide, tokens: Sequence[int], has_ended: bool
) -> None:
    """Assert that a separate matcher allows every token in order, and the end after the last one."""
    matcher = backend.load(guide, backend.compile(guide))
    for place, token in enumerate(tokens):
        masks = np.zeros((1, vocabulary.num_words), dtype=np.int32)
        assert not backend.fill([MaskJob(matcher, 0)], masks)
        assert has_bit(masks[0], token), (guide, tokens[:place], token)
        matcher.consume((token,))
    if has_ended:
        masks = np.zeros((1, vocabulary.num_words), dtype=np.int32)
        backend.fill([MaskJob(matcher, 0)], masks)
        assert has_bit(masks[0], vocabulary.end_id), (guide, tokens)


def has_bit(words: np.ndarray, index: int) -> bool:
    return bool(words.view(np.uint32)[index // 32] >> np.uint32(index % 32) & np.uint32(1))
