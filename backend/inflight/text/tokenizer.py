"""A checkpoint's tokenizer, based on the `tokenizers` library alone.

Encodes and decodes texts; `tokenizer_files` reads the checkpoint's files. Immutable once loaded; any thread.

Ids and texts equal those of transformers' `AutoTokenizer`, with two exceptions in decoding. First, the
setting `clean_up_tokenization_spaces` is never applied, because it would remove spaces that were already
streamed. Second, invalid bytes are replaced as described in `TokenDecoder.text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from inflight.errors import ConfigError, InvalidArgument
from inflight.file_names import native
from inflight.text.token_bytes import max_bytes_per_token
from inflight.text.token_decoder import TokenDecoder
from inflight.text.tokenizer_files import library_errors_as, read_tokenizer

_SMALL_BATCH = 8192
"""Number of characters whose tokenization takes a few milliseconds at most."""


class Tokenizer:
    """Converts between text and token ids.

    Args:
        backend: Tokenizer of the `tokenizers` library. Its truncation and padding are switched off.
        named_tokens: Spellings of special tokens by name, such as `eos_token`.
        special_tokens: Spellings of further special tokens, which `backend` may not mark as special.

    Attributes:
        bos_token_id: Id of the configuration files' beginning-of-sequence token, or None.
        eos_token_id: Id of the configuration files' end-of-sequence token, or None.
        pad_token_id: Id of the configuration files' padding token, or None.
        token_decoder: Decodes token strings to text.
        prefix_ids: The special tokens that tokenizer.json puts before a prompt; may be empty.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        special_tokens: Iterable[str] = (),
    ) -> None:
        named_tokens = named_tokens or {}
        backend.no_truncation()  # a file may have the settings of its training
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}.union(special_tokens)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(
            token_id for token_id, token in added.items() if token.content in special
        )
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            backend.token_to_id(named_tokens[name]) if name in named_tokens else None
            for name in ("bos_token", "eos_token", "pad_token")
        )
        self.prefix_ids = _prefix_ids(backend)
        self.token_decoder = TokenDecoder(backend)

    @classmethod
    def from_dir(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it; see `tokenizer_files`.

        Raises:
            ConfigError: A file is missing or broken. The message names the file.
        """
        path = Path(native(folder))
        files = read_tokenizer(path)
        with library_errors_as(ConfigError, f"{path / 'tokenizer.json'} cannot encode a text"):
            return cls(files.backend, files.named_tokens, files.special_tokens)

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """Maximum number of UTF-8 bytes that one token can represent; None if there is no bound."""
        return max_bytes_per_token(self._backend)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens. A model's vocabulary may be padded to a larger size."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, by default with the special tokens that tokenizer.json puts around a prompt.

        As in transformers, `add_bos_token` of tokenizer_config.json has no effect on these special tokens.

        Raises:
            InvalidArgument: The tokenizer has no tokens for a part of the text.
        """
        # A batch of one, because the library releases the GIL only for batches: a prompt of a megabyte takes
        # a second, during which the engine's process must serve other requests.
        return self._encode([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of several texts, like `encode`. A large batch is encoded on all processors.

        The library has one pool of threads, in which a batch waits for all earlier batches. Small batches
        are encoded outside of the pool, one text at a time.
        """
        if sum(map(len, texts)) <= _SMALL_BATCH or len(texts) == 1:
            return [self.encode(text, add_special_tokens) for text in texts]
        return self._encode(list(texts), add_special_tokens)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        with library_errors_as(InvalidArgument, "the model's tokenizer cannot encode this text"):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside of the vocabulary, including negative ones, give no text."""
        return self.token_decoder.text(self.tokens(ids, skip_special_tokens))

    def tokens(self, ids: Iterable[int], skip_special_tokens: bool = True) -> list[str]:
        """Return the token strings of `ids`, without ids that add nothing to the text."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        strings = (self._backend.id_to_token(i) for i in ids if i >= 0 and i not in skipped)
        return [string for string in strings if string is not None]

    def token_bytes(self) -> list[bytes]:
        """Return the bytes that each token adds to a text, indexed by id.

        For a special token these are its spelling.
        """
        decoder = self.token_decoder
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * (1 + max(vocabulary.values(), default=-1))
        for token, token_id in vocabulary.items():
            if token_id in self._special_ids or token in self._added_ids:
                table[token_id] = token.encode()
                continue
            raw = decoder.raw_bytes(token)
            table[token_id] = decoder.continued(token).encode() if raw is None else raw
        return table

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return self._special_ids

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Spellings of the special tokens within a text."""
        return frozenset(map(self.special_text, self._special_ids)) - {""}

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token, special or not, with this spelling; None if there is none."""
        return self._added_ids.get(text)

    def special_text(self, token_id: int) -> str:
        """Return the spelling of a special token within a text; "" for other ids."""
        if token_id not in self._special_ids:
            return ""
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self.token_decoder.within_text(token)


def _prefix_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """Return the special tokens that are added before the ids of a text."""
    bare, with_special_tokens = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    starts = range(len(with_special_tokens) - len(bare) + 1)
    return with_special_tokens[
        : next((at for at in starts if with_special_tokens[at : at + len(bare)] == bare), 0)
    ]
