"""Tiny tokenizers of every family, trained on a few lines in many scripts."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from inflight.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps. the end",
    "  two  leading spaces\n\tand a tab\n\n",
    "Größe, naïve café, déjà vu; ñandú",
    "今天天气很好,我们去公园吧。今天",
    "日本語のテキストと絵文字 👩‍👩‍👧‍👦🎉",
    "Привет, мир! Как дела?",
    "a\u0301 combining, e\u0308 too",
    "1234567890 + 42 = 1234567932",
] * 3

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
NAMES = ["byte_level", "llama", "gemma", "metaspace", "wordpiece", "word_suffix", "no_decoder"]
BYTE_NAMES = ["byte_level", "llama", "gemma"]


@cache
def backend(name: str) -> tokenizers.Tokenizer:
    return _BUILDERS[name]()


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(backend(name))


def byte_ids(name: str, data: bytes) -> list[int]:
    """The ids that spell `data` byte by byte."""
    if name == "byte_level":
        # The token of a byte is found by the byte-level spelling, the only text that contains it.
        spelling = {i: s for s, i in backend(name).get_vocab().items() if len(s) == 1}
        decoder = tokenizer(name).token_decoder
        by_byte = {decoder.raw_bytes(s): i for i, s in spelling.items()}
        return [by_byte[bytes([byte])] for byte in data]
    return [backend(name).token_to_id(BYTE_TOKENS[byte]) for byte in data]


def _train(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _byte_level() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(
        result,
        trainers.BpeTrainer(
            show_progress=False, vocab_size=400, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet)
        ),
    )


def _sentencepiece_bpe(decoder: decoders.Decoder, prepend: bool) -> tokenizers.Tokenizer:
    spaces = normalizers.Replace(" ", "▁")
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepend else spaces
    trained.decoder = decoder
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(show_progress=False, vocab_size=150, limit_alphabet=45, max_token_length=6),
    )
    # As in SentencePiece, bytes are ordinary tokens of the model, before the learned ones.
    learned = json.loads(trained.to_str())["model"]
    tokens = [*SPECIAL, *BYTE_TOKENS, *learned["vocab"]]
    trained.model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        [tuple(merge) for merge in learned["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    trained.add_special_tokens(SPECIAL)
    trained.add_tokens([AddedToken("<tool>", normalized=False)])
    return trained


def _llama() -> tokenizers.Tokenizer:
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ]
    return _sentencepiece_bpe(decoders.Sequence(parts), prepend=True)


def _gemma() -> tokenizers.Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece_bpe(decoders.Sequence(parts), prepend=False)


def _metaspace() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.Unigram())
    result.pre_tokenizer = pre_tokenizers.Metaspace()
    result.decoder = decoders.Metaspace()
    return _train(
        result,
        trainers.UnigramTrainer(
            show_progress=False, vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>"
        ),
    )


def _wordpiece() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.decoder = decoders.WordPiece()
    return _train(
        result, trainers.WordPieceTrainer(show_progress=False, vocab_size=300, special_tokens=SPECIAL)
    )


def _word_suffix() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result.decoder = decoders.BPEDecoder()
    return _train(
        result,
        trainers.BpeTrainer(
            show_progress=False, vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>"
        ),
    )


def _no_decoder() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    return _train(result, trainers.WordLevelTrainer(show_progress=False, special_tokens=SPECIAL))


_BUILDERS = {
    "byte_level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
    "word_suffix": _word_suffix,
    "no_decoder": _no_decoder,
}
