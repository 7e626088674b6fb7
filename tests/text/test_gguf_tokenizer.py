"""Tokenizers of GGUF files: ids equal those of transformers' conversion, and of the tokenizers they come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.gguf.header import read_header
from inflight.gguf.pre_tokenizers import PRE_TOKENIZERS
from inflight.gguf.tokenizer import make_tokenizer
from inflight.text.tokenizer import Tokenizer

_TEXTS = [
    "Hello world, it's 12345 of them.",
    "  two spaces\n\n\ttab <|im_start|>user<think> x",
    "naïve café — 東京 😀\r\n",
    "I'LL don't",
    "",
    " a",
]
_CORPUS = [
    *_TEXTS,
    "the quick brown fox jumps over the lazy dog " * 3,
    "Hello hello world words 123 4567",
] * 3


def _byte_level(writer: GGUFWriter, pre: str) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(len(tokens) + 2)
    writer.add_bos_token_id(len(tokens))


def _sentence_pieces(writer: GGUFWriter, spaces: str = "▁") -> None:
    special = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "▁t",
        "he",
        "▁the",
        "▁world",
        "wo",
        "rl",
        "▁wo",
        "rld",
        "lo",
        "Hel",
        "Hello",
        "▁Hello",
        "el",
        "llo",
    ]
    letters = sorted(set("".join(_CORPUS)) - {" ", "\n", "\t", "\r", "東", "😀"}) + ["▁"]
    runs = [spaces * 2, spaces * 3]
    tokens = list(dict.fromkeys([*special, *raw, *pieces, *runs, *letters]))
    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    kinds |= dict.fromkeys(raw, TokenType.BYTE)
    if spaces == " ":
        kinds |= dict.fromkeys(runs, TokenType.USER_DEFINED)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if token in kinds else -float(i) for i, token in enumerate(tokens)])
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _gemma4_pieces(writer: GGUFWriter) -> None:
    """Add a vocabulary of Gemma 4, whose merges are in the file."""
    _sentence_pieces(writer)
    writer.kv_data[0].pop("tokenizer.ggml.model")
    writer.add_tokenizer_model("gemma4")
    pairs = ["▁ t", "h e", "▁t he", "e l", "l o", "H el", "l lo", "Hel lo", "▁ Hello", "w o", "▁ ▁", "▁▁ ▁"]
    writer.add_token_merges(pairs)
    writer.add_add_space_prefix(False)


def _write(path: Path, architecture: str, add: Callable[..., None], *arguments: str) -> Path:
    writer = GGUFWriter(path, architecture)
    add(writer, *arguments)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _made(path: Path, model_type: str) -> Tokenizer:
    """Return the tokenizer of the folder that is made for a GGUF file."""
    header, keys = read_header([path])
    files = make_tokenizer(header.architecture, keys)
    assert files is not None
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), files):
        path.with_name(name).write_text(json.dumps(content))
    path.with_name("config.json").write_text(json.dumps({"model_type": model_type}))
    return Tokenizer.from_dir(path.parent)


@pytest.mark.parametrize(
    ("architecture", "model_type", "add", "arguments"),
    [
        ("llama", "llama", _byte_level, ("llama-bpe",)),
        ("llama", "llama", _byte_level, ("tekken",)),
        ("llama", "llama", _byte_level, ("gpt-2",)),
        ("qwen2", "qwen2", _byte_level, ("qwen2",)),
        ("qwen3", "qwen3", _byte_level, ("qwen2",)),
        ("phi3", "phi3", _byte_level, ("dbrx",)),
        ("qwen3moe", "qwen3_moe", _byte_level, ("qwen2",)),
        ("qwen35moe", "qwen3_5_moe_text", _byte_level, ("qwen35",)),
        ("gpt-oss", "gpt_oss", _byte_level, ("gpt-4o",)),
        ("minimax-m2", "minimax_m2", _byte_level, ("minimax-m2",)),
        ("lfm2", "lfm2", _byte_level, ("lfm2",)),
        ("llama", "llama", _sentence_pieces, ()),
        ("phi3", "phi3", _sentence_pieces, ()),
        ("gemma2", "gemma2", _sentence_pieces, (" ",)),
        ("gemma3", "gemma3_text", _sentence_pieces, (" ",)),
        ("gemma4", "gemma4_text", _gemma4_pieces, ()),
    ],
)
def test_ids_and_texts_equal_those_of_transformers_conversion(
    tmp_path: Path, architecture: str, model_type: str, add: Callable[..., None], arguments: tuple[str, ...]
) -> None:
    path = _write(tmp_path / "m.gguf", architecture, add, *arguments)
    tokenizer = _made(path, model_type)
    exact, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    for text in _TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == exact.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == exact.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize(
    ("settings", "begins"), [({}, True), ({"add_bos_token": False}, False), ({"add_eos_token": True}, True)]
)
def test_special_tokens_stand_around_a_prompt_as_the_file_says(
    tmp_path: Path, settings: dict[str, bool], begins: bool
) -> None:
    def add(writer: GGUFWriter) -> None:
        _sentence_pieces(writer)
        for key, value in settings.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    tokenizer = _made(_write(tmp_path / "m.gguf", "llama", add), "llama")
    bare, whole = (tokenizer.encode("Hello", add_special_tokens=added) for added in (False, True))
    assert whole == [1] * begins + bare + [2] * ("add_eos_token" in settings)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_the_chat_template_and_named_ones_are_those_of_the_file(tmp_path: Path) -> None:
    def add(writer: GGUFWriter, *templates: Any) -> None:
        _sentence_pieces(writer)
        writer.add_chat_template(templates[0] if len(templates) == 1 else list(templates))

    def template(*templates: Any) -> Any:
        header, keys = read_header([_write(tmp_path / "m.gguf", "llama", add, *templates)])
        files = make_tokenizer(header.architecture, keys)
        assert files is not None
        return files[1]["chat_template"]

    assert template("{{ 1 }}") == "{{ 1 }}"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert template(*named) == named


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("llama", {"model": "rwkv"}, r"'tokenizer\.ggml\.model' is 'rwkv', expected llama, gpt2 or gemma4"),
        (
            "llama",
            {"pre": "grok-2"},
            r"'tokenizer\.ggml\.pre' is 'grok-2', expected one of default, gpt-2",
        ),
        ("qwen2", {"pre": "llama-bpe"}, r"'tokenizer\.ggml\.pre' is 'llama-bpe', expected one of qwen2"),
        ("llama", {"eos_token_id": 3}, r"'tokenizer\.ggml\.eos_token_id' is 3, expected an id below 3"),
        ("llama", {"tokens": ["a", "b", "a"]}, r"'tokenizer\.ggml\.tokens' has 'a' twice"),
        ("llama", {"token_type": [1]}, r"'tokenizer\.ggml\.token_type' must have 3 numbers"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], said: str
) -> None:
    values = {"model": "gpt2", "pre": "default", "tokens": ["a", "b", "ab"], "merges": ["a b"], **changes}
    keys = ConfigFile(tmp_path / "m.gguf", {f"tokenizer.ggml.{key}": value for key, value in values.items()})
    with pytest.raises(ConfigError, match=rf"m\.gguf: key {said}"):
        make_tokenizer(architecture, keys)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-v3", ["Ġ", "123", "45", "Ġcafé", "東京", "x", "!?\n"]),
        ("kimi-k2", ["Ġ", "123", "45", "Ġcafé", "東京", "x", "!?\n"]),
        ("seed-coder", ["Ġ", "1", "2", "3", "4", "5", "Ġcafé東京x", "!?", "\n"]),
        ("glm4", ["Ġ", "123", "45", "Ġcafé東京x", "!?\n"]),
        ("refact", ["Ġ", "1", "2", "3", "4", "5", "Ġcafé東京x", "!?", "\n"]),
        ("command-r", ["Ġ", "1", "2", "3", "4", "5", "Ġcafé東京x", "!?", "\n"]),
        ("gpt-2", ["Ġ12345", "Ġcafé東京x", "!?", "\n"]),
    ],
)
def test_texts_are_divided_into_words(pre: str, words: list[str]) -> None:
    """The expected words are those of llama.cpp, except that it does not compose characters."""
    parts = PRE_TOKENIZERS[pre].parts()
    empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    backend = Backend.from_str(json.dumps({"version": "1.0", **empty, **parts}))
    text = " 12345 cafe\u0301東京x!?\n" if pre == "command-r" else " 12345 café東京x!?\n"
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    found = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def by_bytes(word: str) -> str:
        return spelled.pre_tokenize_str(word.replace("Ġ", " "))[0][0]

    assert found == [by_bytes(word) for word in words]
