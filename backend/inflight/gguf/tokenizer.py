"""Convert the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json.

The file has the vocabulary, and the merges or scores. Normalization and pre-tokenization are determined by
its key `tokenizer.ggml.pre`, or by the architecture, to equal the tokenizers that llama.cpp's converter
read.
"""

from __future__ import annotations

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.json_values import Json, is_list
from inflight.word_patterns import LLAMA3_WORDS, QWEN2_WORDS, TEKKEN_WORDS

_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"

_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_WORDS = {
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe"), LLAMA3_WORDS),
    **dict.fromkeys(_QWEN2, QWEN2_WORDS),
    "tekken": TEKKEN_WORDS,
}
_GPT2 = (None, "default", "gpt-2")
_BEGINS = (*_LLAMA3, "tekken")
"""Pre-tokenizers whose tokenizers add a begin token, and never split a word that is in the vocabulary."""
_CLASSES = {
    "llama": "LlamaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}


def make_tokenizer(architecture: str, keys: ConfigFile) -> tuple[Json, Json] | None:
    """Return the contents of tokenizer.json and tokenizer_config.json; None if the file has no vocabulary.

    Raises:
        ConfigError: A key is missing or has an unsupported value. The message has the file, the key, its
            value and the expected value.
    """
    tokens = list(keys.texts(f"{_KEY}tokens"))
    if not tokens:
        return None
    kind = keys.text_or_none(f"{_KEY}model")
    if kind not in ("llama", "gpt2"):
        raise keys.error(f"{_KEY}model", "llama or gpt2")
    if kind == "llama":
        pipeline = _sentence_pieces(architecture, keys, tokens)
    else:
        pipeline = _byte_level(keys, tokens)
    named = _named(keys, tokens)
    adds_begin = keys.boolean(
        f"{_KEY}add_bos_token", kind == "llama" or keys.text_or_none(f"{_KEY}pre") in _BEGINS
    )
    ends = keys.boolean(f"{_KEY}add_eos_token", False)
    pipeline["added_tokens"] = _added_tokens(keys, tokens, pipeline["model"]["vocab"], set(named.values()))
    pipeline["post_processor"] = _template(
        named.get("bos_token") if adds_begin else None, named.get("eos_token") if ends else None, tokens
    )
    settings: Json = {**named, "clean_up_tokenization_spaces": False}
    settings["tokenizer_class"] = _class_name(architecture, kind, keys)
    if kind == "llama":
        settings["add_prefix_space"] = _has_prefix_space(keys)
    if (template := _chat_template(keys)) is not None:
        settings["chat_template"] = template
    return {"version": "1.0", "truncation": None, "padding": None, **pipeline}, settings


def _class_name(architecture: str, kind: str, keys: ConfigFile) -> str:
    """Return `tokenizer_class`, by which the loader rebuilds some tokenizers.

    It is "" for phi3, whose tokenizer.json is used unchanged.
    """
    is_qwen = architecture in ("qwen2", "qwen3")
    if is_qwen and (kind != "gpt2" or keys.text_or_none(f"{_KEY}pre") not in _QWEN2):
        raise keys.error(f"{_KEY}pre", f"one of {', '.join(_QWEN2)} in a file of {architecture}")
    return _CLASSES.get(architecture, "") if is_qwen or kind == "llama" else "PreTrainedTokenizerFast"


def _byte_level(keys: ConfigFile, tokens: list[str]) -> Json:
    pre = keys.text_or_none(f"{_KEY}pre")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if pre in _GPT2:
        split: Json = byte_level
    elif pre in _WORDS:
        words = {"type": "Split", "pattern": {"Regex": _WORDS[pre]}, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [words, {**byte_level, "use_regex": False}]}
    else:
        raise keys.error(f"{_KEY}pre", f"one of {', '.join(('default', 'gpt-2', *_WORDS))}")
    merges = [merge.split(" ") for merge in keys.texts(f"{_KEY}merges")]
    return {
        "normalizer": {"type": "NFC"} if pre in _QWEN2 else None,
        "pre_tokenizer": split,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": _vocabulary(keys, tokens),
            "merges": merges,
            "ignore_merges": pre in _BEGINS,
        },
    }


def _sentence_pieces(architecture: str, keys: ConfigFile, tokens: list[str]) -> Json:
    """Return the BPE tokenizer that is equivalent to a SentencePiece tokenizer: merges are derived from scores."""
    is_gemma = _CLASSES.get(architecture) == "GemmaTokenizer"
    if is_gemma:  # llama.cpp's converter spells runs of spaces as spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-float(index) for index in range(len(tokens))]
    else:
        scores = _numbers(keys, "scores", len(tokens))
    vocabulary = _vocabulary(keys, tokens)
    spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    joined: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if _has_prefix_space(keys):
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        joined.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": joined},
        "model": {
            "type": "BPE",
            "unk_token": _named(keys, tokens).get("unk_token"),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges(vocabulary, scores),
        },
    }


def _has_prefix_space(keys: ConfigFile) -> bool:
    return keys.boolean(f"{_KEY}add_space_prefix", True)


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Return every split of a token into two other tokens, in transformers' order: highest score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], -cut, cut - len(token), left, right))
    found.sort(key=lambda each: each[:3])
    return [[left, right] for *_, left, right in found]


def _vocabulary(keys: ConfigFile, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ConfigError(f"{keys.path}: key '{_KEY}tokens' has {twice!r} twice, expected distinct tokens")
    return vocabulary


def _numbers(keys: ConfigFile, key: str, count: int) -> list[float]:
    """Return a list of `count` numbers."""
    values = keys.value(_KEY + key)
    if not is_list(values) or len(values) != count:
        raise ConfigError(f"{keys.path}: key '{_KEY}{key}' must have {count} numbers, one for each token")
    return values


def _added_tokens(
    keys: ConfigFile, tokens: list[str], vocabulary: dict[str, int], named: set[str]
) -> list[Json]:
    """Return the added tokens of tokenizer.json: control tokens, which are special, and user-defined tokens."""
    has_types = keys.has(f"{_KEY}token_type")
    types = _numbers(keys, "token_type", len(tokens)) if has_types else [_NORMAL] * len(tokens)
    added: list[Json] = []
    for index, (token, kind) in enumerate(zip(tokens, types)):
        is_special = kind == _CONTROL or token in named
        if not token or token not in vocabulary or not (is_special or kind == _USER_DEFINED):
            continue
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": index, "content": token, **plain, "special": is_special})
    return added


def _named(keys: ConfigFile, tokens: list[str]) -> dict[str, str]:
    """Return the special tokens by their keys in tokenizer_config.json, such as `eos_token`."""
    named: dict[str, str] = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        key = f"{_KEY}{name}_token_id"
        token_id = keys.value(key)
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise keys.error(key, f"an id below {len(tokens)}, the number of tokens")
        named[f"{role}_token"] = tokens[token_id]
    return named


def _template(begin: str | None, end: str | None, tokens: list[str]) -> Json | None:
    """Return the post-processor that puts special tokens around a text; None if there are none."""
    if begin is None and end is None:
        return None

    def around(*texts: str) -> list[Json]:
        found: list[Json] = []
        for index, text in enumerate(texts):
            inner: list[Json] = [{"Sequence": {"id": text, "type_id": index}}]
            for token, place in ((begin, 0), (end, len(inner) + 1)):
                if token is not None:
                    inner.insert(place, {"SpecialToken": {"id": token, "type_id": index}})
            found += inner
        return found

    special = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        for token in (begin, end)
        if token is not None
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": special,
    }


def _chat_template(keys: ConfigFile) -> str | list[Json] | None:
    """Return the chat template, or a list of named ones."""
    default = keys.text_or_none("tokenizer.chat_template")
    names = [name for name in keys.texts("tokenizer.chat_templates") if name != "default"]
    named = {name: keys.text_or_none(f"tokenizer.chat_template.{name}") for name in names}
    if not named:
        return default
    templates = ({"default": default} if default is not None else {}) | named
    return [{"name": name, "template": template} for name, template in templates.items()]
