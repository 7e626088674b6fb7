"""The byte-level pre-tokenizers of GGUF files (`tokenizer.ggml.pre`), as parts of tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.json_values import Json
from inflight.word_patterns import (
    DEEPSEEK3_WORDS,
    GPT4O_WORDS,
    KIMI_WORDS,
    LLAMA3_WORDS,
    QWEN2_WORDS,
    QWEN3_5_WORDS,
    SEED_WORDS,
    TEKKEN_WORDS,
)

BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level tokenizer divides a text into words.

    Attributes:
        patterns: Regular expressions that split the text one after another; empty: GPT-2's.
        splits_digits: Whether each digit is a word.
        composes: Whether characters are composed first (NFC).
        keeps_words: Whether a word that is in the vocabulary is never split.
        begins: Whether a text begins with the begin token, unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    splits_digits: bool = False
    composes: bool = False
    keeps_words: bool = False
    begins: bool = False

    def parts(self) -> Json:
        """Return `normalizer`, `pre_tokenizer` and `decoder` of tokenizer.json."""
        splits: list[Json] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        if self.splits_digits:
            splits.append({"type": "Digits", "individual_digits": True})
        by_bytes = {**BYTE_LEVEL, "use_regex": not self.patterns}
        return {
            "normalizer": {"type": "NFC"} if self.composes else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, by_bytes]}
            if splits
            else by_bytes,
            "decoder": BYTE_LEVEL,
        }


QWEN2 = ("qwen2", "deepseek-r1-qwen")
QWEN3_5 = ("qwen35",)
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")

PRE_TOKENIZERS: Mapping[str | None, PreTokenizer] = {
    **dict.fromkeys((None, "default", "gpt-2", "exaone4"), PreTokenizer()),
    **dict.fromkeys(_LLAMA3, PreTokenizer((LLAMA3_WORDS,), keeps_words=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMA3_WORDS,))),
    "glm4": PreTokenizer((LLAMA3_WORDS,), keeps_words=True),
    **dict.fromkeys(QWEN2, PreTokenizer((QWEN2_WORDS,), composes=True)),
    **dict.fromkeys(QWEN3_5, PreTokenizer((QWEN3_5_WORDS,), composes=True)),
    "tekken": PreTokenizer((TEKKEN_WORDS,), keeps_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), PreTokenizer((GPT4O_WORDS,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(DEEPSEEK3_WORDS)),
    "kimi-k2": PreTokenizer((KIMI_WORDS,), keeps_words=True),
    "seed-coder": PreTokenizer((SEED_WORDS,)),
    **dict.fromkeys(("refact", "starcoder", "smollm"), PreTokenizer(splits_digits=True)),
    "command-r": PreTokenizer(splits_digits=True, composes=True),
}
