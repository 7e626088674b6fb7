"""A checkpoint's tokenizer, over the `tokenizers` library alone.

Owns reading tokenizer.json and the two files that may stand beside it. Does not know prompts, chat templates or
streams. Immutable once loaded; any thread.

Ids and text are those of transformers' `AutoTokenizer`, with two exceptions in decoding. The setting
`clean_up_tokenization_spaces` is never applied: it removes spaces that the model has generated, and a streamed
text cannot take them back. And `TokenDecoder.text` says what becomes of invalid bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from inflight.errors import ConfigError
from inflight.text.token_decoder import TokenDecoder


class Tokenizer:
    """Text to ids and back.

    Attributes:
        bos_token_id: Id of the beginning-of-sequence token that the configuration files name, or None.
        eos_token_id: Id of their end-of-sequence token, or None.
        pad_token_id: Id of their padding token, or None.
        token_decoder: How token strings become text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        settings = settings or {}
        backend.no_truncation()  # a file may carry the settings of whoever trained it
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = _token_id(backend, settings.get("bos_token"))
        self.eos_token_id = _token_id(backend, settings.get("eos_token"))
        self.pad_token_id = _token_id(backend, settings.get("pad_token"))
        self.token_decoder = TokenDecoder(backend)

    @classmethod
    def from_dir(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json and special_tokens_map.json.

        Raises:
            ConfigError: A file is missing or broken; the message names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: text can only be served with a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        settings = _read_json(folder / "special_tokens_map.json") | _read_json(
            folder / "tokenizer_config.json"
        )
        return cls(backend, settings)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, by default with the special tokens that tokenizer.json puts around a prompt.

        The `add_bos_token` of a tokenizer_config.json has no say in that, as with transformers.
        """
        # A batch of one, because only batches are encoded with the GIL released: a prompt of a megabyte takes a
        # second, and the process that holds the engine has others to serve meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside of the vocabulary, negative ones too, decode to nothing."""
        return self.token_decoder.text(self.tokens(ids, skip_special_tokens))

    def tokens(self, ids: Iterable[int], skip_special_tokens: bool = True) -> list[str]:
        """The strings of those of `ids` that have a part in the text."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        strings = (self._backend.id_to_token(i) for i in ids if i >= 0 and i not in skipped)
        return [string for string in strings if string is not None]

    def added_token_id(self, text: str) -> int | None:
        """Id of the added token, special or not, that is written like this; None if there is none."""
        return self._added_ids.get(text)

    def special_text(self, token_id: int) -> str:
        """The spelling of a special token within a text; "" for an id that is none."""
        if token_id not in self._special_ids:
            return ""
        return self.token_decoder.within_text(self._backend.id_to_token(token_id))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _token_id(backend: tokenizers.Tokenizer, token: str | dict[str, Any] | None) -> int | None:
    """Id of a special token, which the files give as a string or as an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(content) if isinstance(content, str) else None
