"""Read a checkpoint's tokenizer from its files like transformers' `AutoTokenizer`, without transformers.

The files are tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json, and
config.json for the kind of model. Their precedence for added tokens is that of transformers. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from inflight.checkpoint_config import CheckpointFacts, read_json
from inflight.errors import ConfigError, InflightError
from inflight.json_values import is_list, is_object
from inflight.text.tokenizer_class import (
    TokenizerClass,
    can_be_rebuilt,
    find_tokenizer_class,
    rebuilt,
)

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_MODELS_OWN = "model_specific_special_tokens"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer and special tokens in a checkpoint's files.

    Attributes:
        backend: The complete tokenizer.
        named_tokens: Special tokens by name, such as `eos_token`.
        special_tokens: Spellings of all special tokens.
    """

    backend: tokenizers.Tokenizer
    named_tokens: Mapping[str, str]
    special_tokens: frozenset[str]


@contextmanager
def library_errors_as(kind: type[InflightError], message: str) -> Generator[None]:
    """Raise an error of class `kind` with this message in place of any error of the `tokenizers` library.

    Its panics are not of the class Exception.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, InflightError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise kind(f"{message}: {error}") from error


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a checkpoint folder.

    Raises:
        ConfigError: A file is missing or broken. The message names the file.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: text can only be served with a tokenizer.json")
    settings, facts = _read_json(folder / "tokenizer_config.json"), CheckpointFacts.read(folder)
    model_type, class_name = facts.model_type, facts.tokenizer_class
    pipeline = read_json(path)
    with library_errors_as(ConfigError, f"{path} is not a tokenizer"):
        text = path.read_text(encoding="utf-8")
        tokenizer_class = find_tokenizer_class(settings, model_type, class_name, text)
        if tokenizer_class is not None and can_be_rebuilt(pipeline):
            pipeline_text = json.dumps(rebuilt(pipeline, tokenizer_class.parts(settings)))
        else:
            tokenizer_class, pipeline_text = None, text
        backend = tokenizers.Tokenizer.from_str(pipeline_text)
    return _with_added_tokens(folder, backend, pipeline.get("added_tokens") or [], settings, tokenizer_class)


def _with_added_tokens(
    folder: Path,
    backend: tokenizers.Tokenizer,
    in_pipeline: list[dict[str, Any]],
    settings: dict[str, Any],
    tokenizer_class: TokenizerClass | None,
) -> TokenizerFiles:
    try:
        settings, by_id = _added_tokens(folder, settings, in_pipeline)
        special = _NamedSpecialTokens(settings, by_id, tokenizer_class)
        tokens = [by_id[token_id] for token_id in sorted(by_id)]
        tokens += special.missing({token.content for token in tokens} | _contents(backend))
        names = set(special.named.values())
        for token in tokens:
            token.special = token.special or token.content in names
        backend.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]  its list has no type
        if tokenizer_class is not None and tokenizer_class.readds_special_tokens:
            added = [AddedToken(content, special=True) for content in special.all()]
            backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"the special and added tokens of {folder} cannot be read: {error!r}") from error
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    if tokenizer_class is not None and tokenizer_class.template is not None:
        backend.post_processor = _template(backend, tokenizer_class.template, special.named)
    added = [*tokens, *backend.get_added_tokens_decoder().values()]
    return TokenizerFiles(backend, special.named, frozenset(t.content for t in added if t.special))


def _added_tokens(
    folder: Path, settings: dict[str, Any], in_pipeline: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """Return the settings, and the added tokens by id.

    If tokenizer_config.json lists added tokens, this list takes precedence. If it has no list, the
    checkpoint is of an older format: special tokens are in special_tokens_map.json, other added tokens in
    added_tokens.json and tokenizer.json.
    """
    if own := _as_dict(settings.get("extra_special_tokens")):  # tokens by name; the key may also hold a list
        own = {**_as_dict(settings.get(_MODELS_OWN)), **own}
        settings = {**settings, _MODELS_OWN: own, "extra_special_tokens": None}
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings = {**settings, "extra_special_tokens": settings["additional_special_tokens"]}
    listed = settings.get("added_tokens_decoder")
    if listed is not None:
        return settings, {int(token_id): _added_token(token) for token_id, token in listed.items()}
    in_map = _read_json(folder / "special_tokens_map.json")
    extra = [
        *_as_list(settings.get("extra_special_tokens")),
        *_as_list(in_map.pop("extra_special_tokens", None)),
    ]
    settings = {**settings, **in_map}
    special = {_content(settings[name]) for name in _NAMES if settings.get(name)}
    special |= {_content(token) for token in extra}
    # As in transformers, this happens after tokens of added_tokens.json are made special, and has no effect
    # on them.
    extra = extra or _as_list(in_map.get("additional_special_tokens"))
    if extra:
        settings["extra_special_tokens"] = extra
    by_id = {
        token_id: AddedToken(content, normalized=content not in special, special=content in special)
        for content, token_id in _read_json(folder / "added_tokens.json").items()
    }
    for token in in_pipeline:
        by_id[token["id"]] = _added_token({key: value for key, value in token.items() if key != "id"})
    return settings, by_id


class _NamedSpecialTokens:
    """The special tokens that tokenizer_config.json names, and the tokenizer class's default special tokens."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        by_id: Mapping[int, AddedToken],
        tokenizer_class: TokenizerClass | None,
    ) -> None:
        defaults = tokenizer_class.special_tokens if tokenizer_class else dict[str, str]()
        self._known = {token.content: token for token in by_id.values()}
        self._named = {name: self._token(token) for name, token in _named(settings, defaults)}
        self._extra = [self._token(token) for token in _as_list(settings.get("extra_special_tokens"))]
        self.named = {name: token.content for name, token in self._named.items()}
        """Spellings of special tokens by name."""

    def all(self) -> list[str]:
        """The spellings of all special tokens, without repetitions."""
        tokens = [*self._named.values(), *self._extra]
        return list(dict.fromkeys(token.content for token in tokens))

    def missing(self, known: set[str]) -> list[AddedToken]:
        """Return the special tokens whose spellings are not in `known`."""
        tokens = {token.content: token for token in reversed([*self._named.values(), *self._extra])}
        return [tokens[content] for content in self.all() if content not in known]

    def _token(self, token: str | dict[str, Any]) -> AddedToken:
        if isinstance(token, str):
            return self._known.get(token) or AddedToken(token, special=True)
        return self._known.get(_content(token)) or _added_token({**token, "special": True})


def _named(
    settings: Mapping[str, Any], defaults: Mapping[str, str]
) -> Iterator[tuple[str, str | dict[str, Any]]]:
    """Yield (name, token) of the named special tokens: first names common to all models, then the model's own."""
    for name in _NAMES:
        token = settings[name] if name in settings else defaults.get(name)
        if token:
            yield name, token
    own: dict[str, Any] = {name: token for name, token in defaults.items() if name not in _NAMES}
    own |= {name: token for name, token in settings.items() if name.endswith("_token") and name not in _NAMES}
    own |= _as_dict(settings.get(_MODELS_OWN))
    for name, token in own.items():
        if isinstance(token, str) or (is_object(token) and "__type" in token):
            yield name, token


def _template(
    backend: tokenizers.Tokenizer, around: tuple[str, ...], named: Mapping[str, str]
) -> processors.TemplateProcessing:
    """Return the post-processor that puts `around` before a text: a begin token, or nothing."""
    before = [named[name] for name in around if name in named]
    ids = [(content, backend.token_to_id(content)) for content in before]
    return processors.TemplateProcessing(
        single=[*before, "$A"], pair=[*before, "$A", "$B"], special_tokens=ids
    )


def _added_token(token: dict[str, Any]) -> AddedToken:
    return AddedToken(**{key: value for key, value in token.items() if key != "__type"})


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _as_list(value: Any) -> list[Any]:
    return list(value) if is_list(value) else []


def _as_dict(value: Any) -> dict[str, Any]:
    return value if is_object(value) else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(path)
    if not is_object(content):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content
