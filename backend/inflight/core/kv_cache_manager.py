"""Owns the block tables: which KV blocks each running sequence holds, shares with others or has set aside.

A block's key is the blake2b digest of its parent's key and its tokens, so that equal keys mean equal prefixes.
Python's `hash()` would not do: it is salted, collides for -1 and -2, and collisions can be made on purpose,
which here would mean reading another user's cache. A chain of digests starts from a scope: sequences of one scope
share blocks, a sequence without a scope shares none.

Only full blocks are shared, and never a sequence's last known token: its logits are needed, so it is computed. The
beams of a search share the block that they are filling too, as long as they agree: whoever writes into a block
that others hold gets a copy of its own.

A sequence reserves blocks at admission; growth within the reservation cannot fail. Called by the loop thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain

from inflight.core.block_pool import BlockPool

ROOT_SCOPE = b"\x00" * 16


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block that follows the block with key `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def private_scope(key: int) -> bytes:
    """A scope that no other request has."""
    return blake2b(key.to_bytes(16, "big"), digest_size=16).digest()


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
class BeamGrowth:
    """What it took to give every beam room for a token.

    Attributes:
        copies: (source, target) blocks whose content is to be copied.
        replaced: (beam, index, block id): the copy's place in the beam's table.
        appended: (beam, block id).
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    appended: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Table:
    block_ids: list[int]  # with beams, those that all of them begin with
    reserved: int  # blocks this sequence may still take without asking
    num_published: int
    parent: bytes | None  # digest of the last published block; None: nothing is shared
    num_reused: int
    num_taken: int = 0
    # Per beam, what follows. Never empty, so that what is written next is always here. Kept apart from the common
    # beginning, so that a step costs what the beams differ in and not what they have in common.
    tails: list[list[int]] = field(default_factory=list)

    def num_distinct(self) -> int:
        return len(self.block_ids) + len(set(chain.from_iterable(self.tails)))


@dataclass(slots=True)
class _Prompt:
    """Digests of a waiting sequence's full blocks, computed once and not at every look."""

    num_tokens: int
    digests: list[bytes] = field(default_factory=list)


class KvCacheManager:
    """Block tables by sequence key, over one pool."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tokens_per_block = tokens_per_block
        self.num_reserved = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0
        self._tables: dict[int, _Table] = {}
        self._prompts: dict[int, _Prompt] = {}

    @property
    def num_unreserved(self) -> int:
        """Free blocks that no running sequence counts on."""
        return self.pool.num_free - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def block_table(self, key: int) -> tuple[int, ...]:
        """The blocks of a running sequence, in order; with beams, those that all of them begin with."""
        return tuple(self._tables[key].block_ids)

    def block_counts(self, key: int) -> tuple[int, int]:
        """(blocks taken, blocks found in the cache) since the sequence was admitted."""
        table = self._tables[key]
        return table.num_taken, table.num_reused

    # ---------------------------------------------------------------- admission

    def match_prefix(self, key: int, token_ids: Sequence[int], scope: bytes | None) -> PrefixMatch:
        """The longest cached prefix of `token_ids` in full blocks, leaving at least one token to compute."""
        if scope is None:
            return PrefixMatch()
        block_ids: list[int] = []
        for digest in self._digests(key, token_ids, scope):
            block_id = self.pool.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return PrefixMatch(tuple(block_ids), sum(map(self.pool.is_held, block_ids)))

    def _digests(self, key: int, token_ids: Sequence[int], scope: bytes) -> list[bytes]:
        known = self._prompts.get(key)
        if known is None or known.num_tokens != len(token_ids):
            known = self._prompts[key] = _Prompt(len(token_ids))
            parent, size = scope, self.tokens_per_block
            for start in range(0, (len(token_ids) - 1) // size * size, size):
                parent = block_digest(parent, token_ids[start : start + size])
                known.digests.append(parent)
        return known.digests

    def blocks_to_admit(self, match: PrefixMatch, num_blocks: int) -> int:
        """Free blocks it takes to set aside `num_blocks` blocks, of which the matched ones are there."""
        return num_blocks - match.num_held

    def admit(self, key: int, match: PrefixMatch, num_blocks: int, scope: bytes | None = None) -> None:
        """Open a block table that begins with the matched blocks and reserves `num_blocks` blocks in all.

        With a scope, full blocks become findable for others of that scope as they are published.
        """
        assert key not in self._tables, f"sequence {key} holds blocks already"
        known = self._prompts.pop(key, None)
        shared = len(match.block_ids)
        self.pool.share(match.block_ids)
        reserved = max(0, num_blocks - shared)
        parent = known.digests[shared - 1] if known and shared else scope
        self._tables[key] = _Table(list(match.block_ids), reserved, shared, parent, shared)
        self.num_reserved += reserved
        if known is not None:
            self.num_reused_blocks += shared
            self.num_missed_blocks += len(known.digests) - shared

    # ---------------------------------------------------------------- growth

    def missing_blocks(self, key: int, num_tokens: int) -> int:
        """Blocks beyond its table and reservation that a sequence needs to hold `num_tokens` tokens."""
        table = self._tables[key]
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids) - table.reserved)

    def num_certain_tokens(self, key: int) -> int:
        """Tokens that fit into a sequence's table and reservation."""
        table = self._tables[key]
        return (len(table.block_ids) + table.reserved) * self.tokens_per_block

    def blocks_freed_by(self, key: int) -> int:
        """Blocks that become unreserved when this sequence alone is released."""
        table = self._tables[key]
        return table.reserved + sum(self.pool.is_held_once(block_id) for block_id in table.block_ids)

    def extend(self, key: int, num_tokens: int) -> tuple[int, ...]:
        """Grow a table until it holds `num_tokens` tokens; returns the blocks appended.

        The blocks must be there: within the reservation, or `missing_blocks` <= `num_unreserved`.
        """
        table = self._tables[key]
        count = self.blocks_for(num_tokens) - len(table.block_ids)
        if count <= 0:
            return ()
        from_reserved = min(count, table.reserved)
        assert count - from_reserved <= self.num_unreserved, f"sequence {key} outgrew the free blocks"
        table.reserved -= from_reserved
        self.num_reserved -= from_reserved
        taken = self.pool.take(count)
        table.block_ids.extend(taken)
        table.num_taken += count
        return taken

    # ---------------------------------------------------------------- beams

    def reorder_beams(self, key: int, parents: Sequence[int]) -> None:
        """Let beam i go on from what was beam `parents[i]`: the same blocks, held once more.

        The first time there is one beam, 0: the sequence, whose context is computed.
        """
        table = self._tables[key]
        distinct = table.num_distinct()
        before = table.tails or [[table.block_ids.pop()]]
        table.tails = [list(before[parent]) for parent in parents]
        for block_ids in table.tails:
            self.pool.share(block_ids)
        for block_ids in before:
            self.pool.release(reversed(block_ids))
        self._join_beginnings(table)
        # What nobody needs any more may be needed again: the reservation is for the worst case.
        self._reserve(table, table.reserved + distinct - table.num_distinct())

    def _join_beginnings(self, table: _Table) -> None:
        """What all tails begin with belongs to the common beginning, but for a tail's last block."""
        count = 0
        for block_ids in zip(*(tail[:-1] for tail in table.tails)):
            if len(set(block_ids)) > 1:
                break
            table.block_ids.append(block_ids[0])
            self.pool.release(block_ids[1:])
            count += 1
        if count:
            table.tails = [tail[count:] for tail in table.tails]

    def grow_beams(self, key: int, num_tokens: int) -> BeamGrowth:
        """Give every beam a block of its own to write token `num_tokens - 1` into; the reservation covers it."""
        table = self._tables[key]
        distinct, index = table.num_distinct(), (num_tokens - 1) // self.tokens_per_block
        place = index - len(table.block_ids)
        growth = BeamGrowth()
        for beam, tail in enumerate(table.tails):
            if place < len(tail) and self.pool.is_held_once(tail[place]):
                continue
            (block_id,) = self.pool.take(1)
            table.num_taken += 1
            if place == len(tail):
                tail.append(block_id)
                growth.appended.append((beam, block_id))
            else:
                growth.copies.append((tail[place], block_id))
                growth.replaced.append((beam, index, block_id))
                self.pool.release((tail[place],))
                tail[place] = block_id
        self._reserve(table, table.reserved + distinct - table.num_distinct())
        return growth

    def _reserve(self, table: _Table, count: int) -> None:
        assert count >= 0, "beams outgrew their reservation"
        self.num_reserved += count - table.reserved
        table.reserved = count

    # ---------------------------------------------------------------- sharing and the end

    def publish(self, key: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the blocks that `num_computed_tokens` computed tokens fill findable for others."""
        table, size = self._tables[key], self.tokens_per_block
        if table.parent is None:
            return
        while (table.num_published + 1) * size <= num_computed_tokens:
            start = table.num_published * size
            table.parent = block_digest(table.parent, token_ids[start : start + size])
            self.pool.publish(table.block_ids[table.num_published], table.parent)
            table.num_published += 1

    def release(self, key: int) -> None:
        """Close a sequence's table, if it has one, and forget what was computed while it waited."""
        self._prompts.pop(key, None)
        table = self._tables.pop(key, None)
        if table is not None:
            self.num_reserved -= table.reserved
            for block_ids in (*table.tails, table.block_ids):
                # Later blocks are of no use without the earlier ones: they are to be evicted first.
                self.pool.release(reversed(block_ids))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every reference is some table's and the reservations add up."""
        self.pool.check_integrity()
        tables = [part for table in self._tables.values() for part in (table.block_ids, *table.tails)]
        self.pool.check_references(chain.from_iterable(tables))
        reserved = sum(table.reserved for table in self._tables.values())
        assert reserved == self.num_reserved, f"reservations add up to {reserved}, not {self.num_reserved}"
        assert self.num_unreserved >= 0, f"{-self.num_unreserved} blocks are reserved twice"
