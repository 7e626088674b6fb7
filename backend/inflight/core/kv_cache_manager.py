"""Owns the block tables: which KV blocks each running sequence holds, shares with others or has set aside.

A block's key is the blake2b digest of its parent's key and its tokens, so that equal keys mean equal prefixes.
Python's `hash()` would not do: it is salted, collides for -1 and -2, and collisions can be made on purpose,
which here would mean reading another user's cache.

Only full blocks are shared, and never a sequence's last known token: its logits are needed, so it is computed.
A sequence reserves blocks at admission; growth within the reservation cannot fail. Called by the loop thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from inflight.core.block_pool import BlockPool

ROOT_DIGEST = b"\x00" * 16


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block that follows the block with key `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the beginning of a sequence already.

    Attributes:
        block_ids: In order from the first token.
        num_held: How many of them some running sequence holds; the others count as free until shared.
    """

    block_ids: tuple[int, ...] = ()
    num_held: int = 0


@dataclass(slots=True)
class _Table:
    block_ids: list[int]
    reserved: int  # blocks this sequence may still take without asking
    num_published: int
    parent: bytes  # digest of the last published block


@dataclass(slots=True)
class _Prompt:
    """Digests of a waiting sequence's full blocks, computed once and not at every look."""

    num_tokens: int
    digests: list[bytes] = field(default_factory=list)


class KvCacheManager:
    """Block tables by request id, over one pool."""

    def __init__(self, num_blocks: int, tokens_per_block: int, enable_reuse: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.num_reserved = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0
        self._enable_reuse = enable_reuse
        self._tables: dict[int, _Table] = {}
        self._prompts: dict[int, _Prompt] = {}

    @property
    def num_unreserved(self) -> int:
        """Free blocks that no running sequence counts on."""
        return self.pool.num_free - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def block_table(self, request_id: int) -> tuple[int, ...]:
        """The blocks of a running sequence, in order."""
        return tuple(self._tables[request_id].block_ids)

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of `token_ids` in full blocks, leaving at least one token to compute."""
        if not self._enable_reuse:
            return PrefixMatch()
        block_ids: list[int] = []
        for digest in self._digests(request_id, token_ids):
            block_id = self.pool.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return PrefixMatch(tuple(block_ids), sum(map(self.pool.is_held, block_ids)))

    def _digests(self, request_id: int, token_ids: Sequence[int]) -> list[bytes]:
        known = self._prompts.get(request_id)
        if known is None or known.num_tokens != len(token_ids):
            known = self._prompts[request_id] = _Prompt(len(token_ids))
            parent, size = ROOT_DIGEST, self.tokens_per_block
            for start in range(0, (len(token_ids) - 1) // size * size, size):
                parent = block_digest(parent, token_ids[start : start + size])
                known.digests.append(parent)
        return known.digests

    def blocks_to_admit(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks it takes to set aside room for `num_tokens` tokens, of which the matched ones are there."""
        return self.blocks_for(num_tokens) - match.num_held

    def admit(self, request_id: int, match: PrefixMatch, num_tokens: int) -> None:
        """Open a block table that begins with the matched blocks and reserves room for `num_tokens` tokens."""
        assert request_id not in self._tables, f"request {request_id} holds blocks already"
        known = self._prompts.pop(request_id, None)
        shared = len(match.block_ids)
        self.pool.share(match.block_ids)
        reserved = max(0, self.blocks_for(num_tokens) - shared)
        parent = known.digests[shared - 1] if known and shared else ROOT_DIGEST
        self._tables[request_id] = _Table(list(match.block_ids), reserved, shared, parent)
        self.num_reserved += reserved
        if known is not None:
            self.num_reused_blocks += shared
            self.num_missed_blocks += len(known.digests) - shared

    def missing_blocks(self, request_id: int, num_tokens: int) -> int:
        """Blocks beyond its table and reservation that a sequence needs to hold `num_tokens` tokens."""
        table = self._tables[request_id]
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids) - table.reserved)

    def blocks_freed_by(self, request_id: int) -> int:
        """Blocks that become unreserved when this sequence alone is released."""
        table = self._tables[request_id]
        return table.reserved + sum(self.pool.is_held_once(block_id) for block_id in table.block_ids)

    def extend(self, request_id: int, num_tokens: int) -> tuple[int, ...]:
        """Grow a table until it holds `num_tokens` tokens; returns the blocks appended.

        The blocks must be there: within the reservation, or `missing_blocks` <= `num_unreserved`.
        """
        table = self._tables[request_id]
        count = self.blocks_for(num_tokens) - len(table.block_ids)
        if count <= 0:
            return ()
        from_reserved = min(count, table.reserved)
        assert count - from_reserved <= self.num_unreserved, f"request {request_id} outgrew the free blocks"
        table.reserved -= from_reserved
        self.num_reserved -= from_reserved
        taken = self.pool.take(count)
        table.block_ids.extend(taken)
        return taken

    def publish(self, request_id: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the blocks that `num_computed_tokens` computed tokens fill findable for others."""
        if not self._enable_reuse:
            return
        table, size = self._tables[request_id], self.tokens_per_block
        while (table.num_published + 1) * size <= num_computed_tokens:
            start = table.num_published * size
            table.parent = block_digest(table.parent, token_ids[start : start + size])
            self.pool.publish(table.block_ids[table.num_published], table.parent)
            table.num_published += 1

    def release(self, request_id: int) -> None:
        """Close a sequence's table, if it has one, and forget what was computed while it waited."""
        self._prompts.pop(request_id, None)
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.num_reserved -= table.reserved
            # Later blocks are of no use without the earlier ones: they are to be evicted first.
            self.pool.release(reversed(table.block_ids))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every reference is some table's and the reservations add up."""
        self.pool.check_integrity()
        named = {block_id for table in self._tables.values() for block_id in table.block_ids}
        assert len(named) == self.pool.num_held, (
            f"tables name {len(named)} blocks, {self.pool.num_held} are held"
        )
        reserved = sum(table.reserved for table in self._tables.values())
        assert reserved == self.num_reserved, f"reservations add up to {reserved}, not {self.num_reserved}"
        assert self.num_unreserved >= 0, f"{-self.num_unreserved} blocks are reserved twice"
