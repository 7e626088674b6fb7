"""Convert the tokenizer of a GGUF file to tokenizer.json and tokenizer_config.json.

The file has the vocabulary, and the merges or scores. Normalization and pre-tokenization are determined by
its key `tokenizer.ggml.pre`, or by the architecture, to equal the tokenizers that llama.cpp's converter
read.
"""

from __future__ import annotations

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.gguf.pre_tokenizers import PRE_TOKENIZERS, QWEN2, QWEN3_5, PreTokenizer
from inflight.json_values import Json, is_list

_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"

_CLASSES = {
    "llama": "LlamaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3n": "GemmaTokenizer",
    "gemma4": "GemmaTokenizer",
    **dict.fromkeys(("qwen2", "qwen3", "qwen2moe", "qwen3moe", "qwen3next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen35", "qwen35moe"), "Qwen3_5Tokenizer"),
}
_OF_QWEN = {"Qwen2Tokenizer": QWEN2, "Qwen3_5Tokenizer": QWEN3_5}


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
    if kind not in ("llama", "gpt2", "gemma4"):
        raise keys.error(f"{_KEY}model", "llama, gpt2 or gemma4")
    if kind == "gpt2":
        words = _pre_tokenizer(keys)
        pipeline, begins = _byte_level(words, keys, tokens), words.begins
    else:
        pipeline, begins = _sentence_pieces(architecture, keys, tokens), True
    named = _named(keys, tokens)
    adds_begin = keys.boolean(f"{_KEY}add_bos_token", begins)
    ends = keys.boolean(f"{_KEY}add_eos_token", False)
    pipeline["added_tokens"] = _added_tokens(keys, tokens, pipeline["model"]["vocab"], set(named.values()))
    pipeline["post_processor"] = _template(
        named.get("bos_token") if adds_begin else None, named.get("eos_token") if ends else None, tokens
    )
    settings: Json = {**named, "clean_up_tokenization_spaces": False}
    settings["tokenizer_class"] = _class_name(architecture, kind, keys)
    if kind != "gpt2":
        settings["add_prefix_space"] = _has_prefix_space(keys)
    if (template := _chat_template(keys)) is not None:
        settings["chat_template"] = template
    return {"version": "1.0", "truncation": None, "padding": None, **pipeline}, settings


def _class_name(architecture: str, kind: str, keys: ConfigFile) -> str:
    """Return `tokenizer_class`, by which the loader rebuilds some tokenizers; "" if tokenizer.json is used
    unchanged."""
    name = _CLASSES.get(architecture, "")
    expected = _OF_QWEN.get(name)
    if expected is None:
        return "PreTrainedTokenizerFast" if kind == "gpt2" else name
    if kind != "gpt2" or keys.text_or_none(f"{_KEY}pre") not in expected:
        raise keys.error(f"{_KEY}pre", f"one of {', '.join(expected)} in a file of {architecture}")
    return name


def _pre_tokenizer(keys: ConfigFile) -> PreTokenizer:
    found = PRE_TOKENIZERS.get(keys.text_or_none(f"{_KEY}pre"))
    if found is None:
        raise keys.error(f"{_KEY}pre", f"one of {', '.join(name for name in PRE_TOKENIZERS if name)}")
    return found


def _byte_level(words: PreTokenizer, keys: ConfigFile, tokens: list[str]) -> Json:
    model = {
        "type": "BPE",
        "vocab": _vocabulary(keys, tokens),
        "merges": _stored_merges(keys),
        "ignore_merges": words.keeps_words,
    }
    return {**words.parts(), "model": model}


def _stored_merges(keys: ConfigFile) -> list[list[str]]:
    return [merge.split(" ") for merge in keys.texts(f"{_KEY}merges")]


def _sentence_pieces(architecture: str, keys: ConfigFile, tokens: list[str]) -> Json:
    """Return the BPE tokenizer that is equivalent to a SentencePiece tokenizer.

    Merges are derived from scores, unless the file has them.
    """
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
            "merges": _stored_merges(keys) or _merges(vocabulary, scores),
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
