"""Checkpoint folders with tokenizers of every kind, and with files that disagree on special tokens.

They resemble real checkpoints: of transformers before and after version 5, of converted "slow" tokenizers,
and with files that were changed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.text.tiny_tokenizers import CORPUS, SPECIAL, backend

Json = dict[str, Any]
CHAT = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def token(content: str, **flags: bool) -> Json:
    """An added token as tokenizer_config.json lists it."""
    every = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **every, **flags}


def listed(name: str, *tokens: Json, first: int | None = None) -> Json:
    """`added_tokens_decoder` with the tokenizer's own tokens and these after its vocabulary."""
    known = {
        str(token_id): token(added.content, special=added.special, normalized=added.normalized)
        for token_id, added in backend(name).get_added_tokens_decoder().items()
    }
    start = backend(name).get_vocab_size() if first is None else first
    return {"added_tokens_decoder": known | {str(start + i): one for i, one in enumerate(tokens)}}


def chat(name: str, **settings: Any) -> Json:
    """The settings of a chat model whose special tokens tokenizer.json lacks."""
    return {
        **listed(name, *[token(content) for content in CHAT]),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        **settings,
    }


def write(
    folder: Path,
    pipeline: tokenizers.Tokenizer,
    settings: Json | None = None,
    model_type: str | None = None,
    **files: Json,
) -> None:
    pipeline.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def changed(name: str, **parts: Any) -> tokenizers.Tokenizer:
    """One of the tiny tokenizers with changed parts."""
    result = tokenizers.Tokenizer.from_str(backend(name).to_str())
    for part, value in parts.items():
        setattr(result, part, value)
    return result


def begin(name: str, *, end: bool = False) -> processors.TemplateProcessing:
    template = ["<s>", "$A", *(["</s>"] if end else [])]
    ids = [(content, backend(name).token_to_id(content)) for content in ("<s>", "</s>")]
    return processors.TemplateProcessing(single=template, special_tokens=ids)


FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MARKED = {**LLAMA, "bos_token": {"__type": "AddedToken", **token("<s>")}}


def _unigram_bytes() -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            show_progress=False, vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>"
        ),
    )
    vocab = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    trained.model = models.Unigram(vocab, unk_id=0, byte_fallback=True)
    trained.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return trained


def _saved_by_transformers(folder: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=changed("byte_level"), eos_token="<|im_end|>", pad_token="</s>"
    )
    theirs.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    theirs.add_tokens([AddedToken("<call>", rstrip=True), "plain"])
    theirs.save_pretrained(str(folder))


def _digits() -> tokenizers.Tokenizer:
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return changed("byte_level", normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.Sequence(cut))


def _flags() -> Json:
    return listed(
        "byte_level",
        token("<left>", lstrip=True),
        token("<right>", rstrip=True),
        token("<both>", lstrip=True, rstrip=True, special=False),
        token("<word>", single_word=True),
        token("Dog", normalized=True, special=False),
        token("the", single_word=True, special=False),
    )


def _bert() -> tokenizers.Tokenizer:
    around = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"], special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return changed("wordpiece", normalizer=normalizers.BertNormalizer(), post_processor=around)


FOLDERS: dict[str, Callable[[Path], None]] = {
    # tokenizer.json is complete
    "byte level": lambda folder: write(folder, backend("byte_level"), FAST),
    "without settings": lambda folder: write(folder, backend("byte_level")),
    "byte level, NFC, single digits": lambda folder: write(folder, _digits(), FAST),
    "lower case": lambda folder: write(
        folder, changed("byte_level", normalizer=normalizers.Lowercase()), {**FAST, **_flags()}
    ),
    "unigram": lambda folder: write(folder, backend("metaspace"), FAST),
    "unigram with bytes, NFKC": lambda folder: write(folder, _unigram_bytes(), FAST),
    "word pieces, lower case, without accents": lambda folder: write(folder, _bert(), FAST),
    "words": lambda folder: write(folder, backend("no_decoder"), FAST),
    "end of word": lambda folder: write(folder, backend("word_suffix"), FAST),
    "begin and end around a text": lambda folder: write(
        folder, changed("byte_level", post_processor=begin("byte_level", end=True)), FAST
    ),
    "settings that have no say": lambda folder: write(
        folder,
        changed("byte_level", post_processor=begin("byte_level")),
        {**FAST, "add_bos_token": False, "add_eos_token": True, "add_prefix_space": True},
    ),
    # special tokens elsewhere
    "chat tokens in the settings": lambda folder: write(folder, backend("byte_level"), chat("byte_level")),
    "chat tokens in the settings, SentencePiece": lambda folder: write(
        folder, backend("llama"), chat("llama")
    ),
    "chat tokens in the settings, unigram": lambda folder: write(
        folder, backend("metaspace"), chat("metaspace")
    ),
    "extra tokens as a list": lambda folder: write(
        folder, backend("byte_level"), {**FAST, "additional_special_tokens": CHAT}
    ),
    "extra tokens by name": lambda folder: write(
        folder,
        backend("byte_level"),
        {**FAST, "extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
    ),
    "extra tokens by name beside additional ones": lambda folder: write(
        folder,
        backend("byte_level"),
        {**FAST, "extra_special_tokens": {"image_token": "<image>"}, "additional_special_tokens": CHAT},
    ),
    "extra tokens by name beside a map": lambda folder: write(
        folder,
        backend("byte_level"),
        {**FAST, "extra_special_tokens": {"image_token": "<image>"}},
        special_tokens_map={"additional_special_tokens": CHAT},
    ),
    "a model's own tokens": lambda folder: write(
        folder, backend("byte_level"), {**FAST, "model_specific_special_tokens": {"image_token": "<image>"}}
    ),
    "an end token that no file lists": lambda folder: write(
        folder, backend("gemma"), {**FAST, "eos_token": "<|im_end|>", "pad_token": None}
    ),
    "a map of special tokens": lambda folder: write(
        folder,
        backend("byte_level"),
        special_tokens_map={"eos_token": token("<|im_end|>"), "additional_special_tokens": CHAT},
    ),
    "a map beside settings": lambda folder: write(
        folder,
        backend("byte_level"),
        {**FAST, "eos_token": "<s>"},
        special_tokens_map={"eos_token": "</s>", "cls_token": token("<cls>", lstrip=True)},
    ),
    "added tokens of a slow tokenizer": lambda folder: write(
        folder,
        backend("llama"),
        {**FAST, "eos_token": "<|im_end|>"},
        added_tokens={"<|im_end|>": 900, "<|im_start|>": 901, "<call>": 700},
        special_tokens_map={"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
    ),
    "tokens that strip, or are words": lambda folder: write(
        folder, backend("byte_level"), {**FAST, **_flags()}
    ),
    "settings that change a token": lambda folder: write(
        folder,
        backend("byte_level"),
        {
            **FAST,
            **listed(
                "byte_level", token("<tool>", rstrip=True), first=backend("byte_level").token_to_id("<tool>")
            ),
        },
    ),
    "texts bring no special tokens": lambda folder: write(
        folder, backend("byte_level"), chat("byte_level", split_special_tokens=True)
    ),
    "saved by transformers": _saved_by_transformers,
    # classes with a pipeline of their own
    "LlamaTokenizer": lambda folder: write(
        folder, changed("llama", post_processor=begin("llama")), {**LLAMA, "legacy": False}, "llama"
    ),
    "LlamaTokenizer, legacy": lambda folder: write(
        folder, changed("llama", post_processor=begin("llama")), {**MARKED, "legacy": True}, "llama"
    ),
    "LlamaTokenizer, no space before": lambda folder: write(
        folder, backend("llama"), {**LLAMA, "add_prefix_space": False}, "llama"
    ),
    "LlamaTokenizer with chat tokens": lambda folder: write(
        folder, backend("llama"), {**LLAMA, **chat("llama", tokenizer_class="LlamaTokenizerFast")}, "llama"
    ),
    "LlamaTokenizer without config.json": lambda folder: write(folder, backend("llama"), LLAMA),
    "LlamaTokenizer of bytes": lambda folder: write(
        folder,
        changed("byte_level", post_processor=begin("byte_level")),
        {**chat("byte_level"), "tokenizer_class": "LlamaTokenizerFast"},
        "llama",
    ),
    "CodeLlamaTokenizer": lambda folder: write(
        folder, backend("llama"), {**LLAMA, "tokenizer_class": "CodeLlamaTokenizer"}, "llama"
    ),
    "CodeLlamaTokenizer without a begin token": lambda folder: write(
        folder,
        backend("llama"),
        {**LLAMA, "tokenizer_class": "CodeLlamaTokenizer", "bos_token": None},
        "code_llama",
    ),
    "named tokens of every form": lambda folder: write(
        folder,
        backend("byte_level"),
        {
            **FAST,
            "image_token": {"__type": "AddedToken", **token("<image>", lstrip=True)},
            "audio_token": token("<audio>"),
            "add_bos_token": True,
            "call_token": None,
        },
    ),
    "Mistral": lambda folder: write(
        folder, changed("llama", post_processor=begin("llama")), {**LLAMA, "legacy": True}, "mistral"
    ),
    "Qwen2Tokenizer": lambda folder: write(
        folder, backend("byte_level"), chat("byte_level", tokenizer_class="Qwen2Tokenizer"), "qwen2"
    ),
    "Qwen2 that declares another class": lambda folder: write(folder, backend("byte_level"), FAST, "qwen2"),
    "Qwen3 with tokens that strip": lambda folder: write(
        folder,
        backend("byte_level"),
        {**_flags(), "tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<right>", "pad_token": "<left>"},
        "qwen3",
    ),
    "Qwen3 as its file says": lambda folder: write(folder, _digits(), FAST, "qwen3"),
    "Qwen2.5-VL": lambda folder: write(
        folder, backend("byte_level"), chat("byte_level", tokenizer_class="Qwen2Tokenizer"), "qwen2_5_vl"
    ),
    "Qwen3.5": lambda folder: write(
        folder, backend("byte_level"), chat("byte_level", tokenizer_class="Qwen3_5Tokenizer"), "qwen3_5_text"
    ),
    "GPT2Tokenizer": lambda folder: write(
        folder, _digits(), {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "gpt2"
    ),
    "gpt2 without a class": lambda folder: write(folder, _digits(), {}, "gpt2"),
    "GPTNeoXTokenizer": lambda folder: write(
        folder,
        changed("byte_level", post_processor=begin("byte_level")),
        {"tokenizer_class": "GPTNeoXTokenizer"},
        "llama",
    ),
    "GemmaTokenizer": lambda folder: write(
        folder,
        changed("llama", post_processor=begin("llama")),
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>"},
        "gemma",
    ),
}

SPECIALS = [*SPECIAL, *CHAT, "<tool>", "<image>", "<audio>", "<call>", "<cls>", "plain", "▁<PRE>"]
FLAGGED = ["<left>", "<right>", "<both>", "<word>", "Dog", "dog", "the"]
TEXTS = [
    "",
    " ",
    *CORPUS[:8],
    "I can't; they'll 3.14159 2024-01-01 ＡＢＣ ﬁ ½ é e\u0301 한국 한국",
    "  a\n\n\n b \t c\r\n   \u3000x\u00a0y\u200by ",
    "def f(x):\n    return {'a': [1, 2, 3]}  # ok, it's fine .",
    "<|im_start|>user\nHi there!<|im_end|>\n<|im_start|>assistant\n",
    "<s>the dog</s><tool> ▁Ġ <0xE4> �\u0000",
    "".join(f"{special}the" for special in SPECIALS),
    "".join(f" {special} dog{special}\n{special}" for special in (*SPECIALS, *FLAGGED)),
    "x<word>x <word> the-the thethe DOG <LEFT>\t<left>\t<right>\n\n <both>  z",
    "🎉👩‍👩‍👧‍👦 \U0001f1e9\U0001f1ea ar\u0631\u0639\u064e",
]
