"""Keys of KV blocks: digests of everything that determines a block's content, and the scopes that share blocks.

A block's key is the blake2b digest of its parent's key, its tokens and their extra ids, so that equal keys mean
equal prefixes. Python's `hash()` is not suitable: it is salted, collides for -1 and -2, and collisions can be
constructed, which would give a client access to another user's cache. A chain of digests starts from a scope:
sequences of one scope share blocks, and a sequence without a scope shares none. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest

from inflight.core.kv.picture_spans import Spans, span_at
from inflight.core.kv.retention import Retention, RetentionConfig
from inflight.errors import InvalidArgument, Name

ROOT_SCOPE = b"\x00" * 16

_DIGEST_SIZE = 16
# Distinguishes n tokens with extra ids from 2 n tokens without extra ids.
_WITH_EXTRA_IDS = b"extra ids"


def block_digest(parent: bytes, token_ids: Sequence[int], extra_ids: Sequence[int] = ()) -> bytes:
    """Return the key, 16 bytes, of a full block that follows the block with key `parent`.

    Args:
        parent: 16 bytes; for the first block, the scope.
        token_ids: The block's tokens.
        extra_ids: One per token, 0 .. 2**64 - 1; empty means that all are 0.
    """
    message = array("q", token_ids).tobytes()
    if not any(extra_ids):
        return blake2b(message, digest_size=_DIGEST_SIZE, key=parent).digest()
    assert len(extra_ids) == len(token_ids), f"{len(extra_ids)} extra ids for {len(token_ids)} tokens"
    message += array("Q", extra_ids).tobytes()
    return blake2b(message, digest_size=_DIGEST_SIZE, key=parent, person=_WITH_EXTRA_IDS).digest()


def id_of_text(text: str) -> int:
    """Return a 64-bit digest of a text, such as a salt or a client's name; never 0, which means none."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") or 1


def private_scope(key: int) -> bytes:
    """Return a 16-byte scope for a single request, given a number that is unique to the request."""
    return blake2b(key.to_bytes(16, "big"), digest_size=_DIGEST_SIZE).digest()


@dataclass(frozen=True, slots=True)
class CacheRules:
    """How a sequence shares its KV blocks, and how long its blocks are worth keeping.

    Attributes:
        scope: 16 bytes from which the sequence's chain of digests starts; None: the sequence neither finds cached
            blocks nor publishes its own.
        extra_ids: One per prompt token, 0 for text; empty: all are 0. Generated tokens have none.
        retention: The request's retention priorities.
        prompt_length: Number of prompt tokens; later tokens are generated.
        lora_task_id: The adapter's task id, for KV events; None: there is no adapter, or it has no id.
        spans: The prompt's picture spans, on which the keys and values of all of their tokens depend; empty for a
            model with causal attention.
        lora_label: The adapter's name, folder or id, for KV events; empty: the base model.
        namespace: The prompt's salt and tables in hexadecimal digits, for KV events; empty without any.
    """

    scope: bytes | None
    extra_ids: tuple[int, ...] = ()
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    prompt_length: int = 0
    lora_task_id: int | None = None
    spans: Spans = ()
    lora_label: str = ""
    namespace: tuple[str, ...] = ()

    def digest(self, parent: bytes, token_ids: Sequence[int], start: int, end: int) -> bytes:
        """Return the key of the block with tokens start .. end - 1, which follows the block with key `parent`.

        The key also covers the rest of a picture span that goes on after the block.
        """
        if span := span_at(self.spans, end):
            end = span[1]
        extra_ids = self.extra_ids_of(start, end) if self.extra_ids[start:end] else ()
        return block_digest(parent, token_ids[start:end], extra_ids)

    def extra_ids_of(self, start: int, end: int) -> tuple[int, ...]:
        """Return one extra id for each of the tokens start .. end - 1."""
        extra_ids = self.extra_ids[start:end]
        return extra_ids + (0,) * (end - start - len(extra_ids))

    def content(self, token_ids: Sequence[int], start: int, end: int) -> tuple[Hashable, ...]:
        """Return tokens start .. end - 1 as comparable values: token ids, or pairs of a token id and its extra
        id. A token of a picture span is paired with the key of the whole span too."""
        tokens, extra_ids = token_ids[start:end], self.extra_ids[start:end]
        values: list[Hashable] = list(tokens)
        if any(extra_ids):
            values = [(t, e) if e else t for t, e in zip_longest(tokens, extra_ids, fillvalue=0)]
        for begin, after in self.spans:
            if begin < end and start < after:
                key = self.digest(ROOT_SCOPE, token_ids, begin, after)
                for at in range(max(begin, start), min(after, end)):
                    values[at - start] = values[at - start], key
        return tuple(values)

    def retention_of(self, first_token: int) -> Retention | None:
        """Return the retention of the block starting at position `first_token`; None if the request sets none."""
        return self.retention.of_block(first_token, self.prompt_length)


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The properties other than tokens on which a prompt's keys and values depend; they are a part of every
    block key.

    Two requests share a block only if these properties, their adapters and their prompt tables are equal.

    Attributes:
        cache_salt_id: Only requests with the same salt share blocks. Tensor `cache_salt_id`.
        extra_ids: One per prompt token, 0 for text; empty: all 0. Tensor `prompt_table_extra_ids`.
    """

    cache_salt_id: int = 0
    extra_ids: tuple[int, ...] = ()

    def scope(self, root: bytes, adapter: bytes = b"", tables: bytes = b"") -> bytes:
        """Return the scope from which chains of digests start: `root` itself if the salt is the default and
        there is neither an adapter nor a table.

        Args:
            root: The scope for prompts without an adapter.
            adapter: Digest of the adapter's content; empty without one.
            tables: Keys of the prompt's tables (`PromptTable.key`, `RotaryTable.key`); empty without any. Equal
                ids with different tables are different prompts, whatever their extra ids are.
        """
        if not (self.cache_salt_id or adapter or tables):
            return root
        parts = (root, self.cache_salt_id.to_bytes(8, "big"), adapter, tables)
        # Each part is preceded by its length, so that the concatenation is unambiguous.
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return blake2b(framed, digest_size=16).digest()

    def namespace(self, tables: bytes = b"") -> tuple[str, ...]:
        """Return the salt and the keys of the prompt's tables in hexadecimal digits, without those that the prompt
        does not have."""
        salt = f"{self.cache_salt_id:016x}" if self.cache_salt_id else ""
        return tuple(part for part in (salt, tables.hex()) if part)

    def validate(self, prompt_length: int) -> None:
        """Raise InvalidArgument unless all ids fit 64 bits and there is one extra id per prompt token, or none."""
        _check_uint64("cache_salt_id", self.cache_salt_id)
        if not self.extra_ids:
            return
        if len(self.extra_ids) != prompt_length:
            raise InvalidArgument(
                Name("prompt_table_extra_ids"),
                f" must have one id for each of the {prompt_length} prompt tokens, got {len(self.extra_ids)}",
            )
        _check_uint64("prompt_table_extra_ids", min(self.extra_ids))
        _check_uint64("prompt_table_extra_ids", max(self.extra_ids))


def _check_uint64(name: str, value: int) -> None:
    if not 0 <= value < 1 << 64:
        raise InvalidArgument(Name(name), f" must be in [0, 2**64), got {value}")
