"""The block tables: which KV blocks each running sequence holds, shares with others or has reserved.

Blocks are shared by content (`block_keys.py`): only full ones, and never a sequence's last known token: its logits
are needed, so it is computed. Of a block that only begins as a sequence goes on, the beginning is copied.

The beams of a search share the block that they are filling too, as long as they agree: a beam that writes into a
block that others hold gets a copy of its own.

What a running sequence is about to publish is promised, so that another with the same prefix may wait for it and
not compute it as well. A sequence reserves blocks at admission; growth within the reservation cannot fail. Only
the loop thread calls this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from inflight.core.kv.block_keys import CacheRules
from inflight.core.kv.block_pool import BlockPool
from inflight.core.kv.kv_events import KvEventLog, StoredBlock, block_hash
from inflight.core.kv.retention import Retention
from inflight.core.kv.state_snapshots import StateSnapshots


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached blocks that hold the beginning of a sequence.

    Attributes:
        block_ids: Full blocks, in order from the first token on.
        num_held: How many of them some running sequence holds; the others count as free until shared.
        is_promised: Whether a running sequence is computing the first block that was not found.
        source: A block that begins with the same tokens as the first block that was not found.
        num_copied_tokens: How many tokens of `source` are the sequence's; 0: there is no such block.
        num_found: Full blocks found in the cache. With recurrent state, only those up to a snapshot are in
            `block_ids`.
    """

    block_ids: tuple[int, ...] = ()
    num_held: int = 0
    is_promised: bool = False
    source: int = 0
    num_copied_tokens: int = 0
    num_found: int = 0


class BlockCounts(NamedTuple):
    """Blocks of the tokens that were known of a sequence when it was admitted.

    Attributes:
        new: Blocks not found as a whole, to be taken from the free ones.
        reused: Blocks found in the cache, the last one perhaps in part: its beginning is copied to a new block.
        missed: Full blocks that were looked for and not found.
    """

    new: int
    reused: int
    missed: int


@dataclass(slots=True)
class BeamGrowth:
    """The changes to block tables that gave every beam room for a token.

    Attributes:
        copies: (source, target) blocks whose content is to be copied.
        replaced: (beam, index in its table, block id of the copy).
        appended: (beam, block id at the end of its table).
    """

    copies: list[tuple[int, int]]
    replaced: list[tuple[int, int, int]]
    appended: list[tuple[int, int]]


@dataclass(slots=True)
class _Table:
    block_ids: list[int]  # with beams, those that all of them begin with
    reserved: int  # blocks this sequence may still take without asking
    num_published: int
    rules: CacheRules
    digests: list[bytes]  # of the full blocks known at admission; those not published yet are promised
    parent: bytes | None  # digest of the last published block; None: nothing is shared
    num_reused: int
    num_missed: int
    num_new: int
    copy: tuple[int, int] | None  # (source, target) of the block that was found in part
    # Per beam, what follows. Never empty, so that what is written next is always here. Kept apart from the common
    # beginning, so that a step costs what the beams differ in and not what they have in common.
    tails: list[list[int]]
    snapshot: int = -1  # of the recurrent state that it begins with

    @property
    def promised(self) -> list[bytes]:
        return self.digests[self.num_published :]

    def num_distinct(self) -> int:
        return len(self.block_ids) + len(set(chain.from_iterable(self.tails)))


@dataclass(slots=True)
class _Prompt:
    """Digests of a waiting sequence's full blocks, computed once and not at every look."""

    num_tokens: int
    digests: list[bytes]


class KvCacheManager:
    """The block tables of running sequences, by sequence key, over one block pool.

    Attributes:
        pool: The blocks.
        tokens_per_block: Tokens per block.
        num_reserved: Free blocks that running sequences count on.
        num_taken_blocks, num_reused_blocks, num_missed_blocks: Blocks taken from the free ones, found in the cache
            at admissions, and not found there, since the start.
        events: What happens to the content of blocks; None: nobody wants to know.
        states: Snapshots of recurrent state; None for a model without.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        events: KvEventLog | None = None,
        states: StateSnapshots | None = None,
    ) -> None:
        self.events = events
        if events is not None:
            events.created(num_blocks)
        self.states = states
        self.pool = BlockPool(num_blocks, events, states)
        self.tokens_per_block = tokens_per_block
        self.num_reserved = 0
        self.num_taken_blocks = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0
        self._tables: dict[int, _Table] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._promises: dict[bytes, int] = {}  # how many running sequences are computing it; without zeros

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

    def block_counts(self, key: int) -> BlockCounts:
        """The counts of blocks that a running sequence found in the cache, and missed, when it was admitted."""
        table = self._tables[key]
        return BlockCounts(table.num_new, table.num_reused, table.num_missed)

    def block_copy(self, key: int) -> tuple[int, int] | None:
        """(source, target) of the block that a sequence was admitted with a part of; None if there is none."""
        return self._tables[key].copy

    def snapshot(self, key: int) -> int:
        """The snapshot of recurrent state that a sequence was admitted with; -1: it begins without tokens."""
        return self._tables[key].snapshot

    def held(self, key: int) -> tuple[int, int]:
        """(distinct blocks held, blocks reserved beyond them) of a running sequence."""
        table = self._tables[key]
        return table.num_distinct(), table.reserved

    # ---------------------------------------------------------------- admission

    def match_prefix(self, key: int, token_ids: Sequence[int], rules: CacheRules) -> PrefixMatch:
        """The longest cached prefix of `token_ids` that leaves at least one token to compute.

        The prefix is full blocks, and then the beginning of another one.
        """
        if rules.scope is None:
            return PrefixMatch()
        digests = self._digests(key, token_ids, rules, rules.scope)
        block_ids: list[int] = []
        is_promised = False
        for digest in digests[: self._num_sought(len(token_ids))]:
            block_id = self.pool.find(digest)
            if block_id is None:
                is_promised = digest in self._promises
                break
            block_ids.append(block_id)
        if self.states is not None:
            return self._match_state(self.states, digests[: self._num_sought(len(token_ids))], block_ids)
        num_held = sum(map(self.pool.is_held, block_ids))
        place = len(block_ids)
        start, end = place * self.tokens_per_block, len(token_ids) - 1
        rest = rules.content(token_ids, start, min(start + self.tokens_per_block, end))
        beginning = self.pool.find_beginning(digests[place - 1] if place else rules.scope, rest)
        return PrefixMatch(tuple(block_ids), num_held, is_promised, *beginning, place)

    def _match_state(
        self, states: StateSnapshots, digests: Sequence[bytes], block_ids: Sequence[int]
    ) -> PrefixMatch:
        """The found blocks up to the last snapshot: the rest is computed for the state behind them.

        So no part of a block is copied, and what a sequence may wait for is a snapshot further on.
        """
        place = states.find(digests[: len(block_ids)])
        used = tuple(block_ids[:place])
        return PrefixMatch(
            used,
            num_held=sum(map(self.pool.is_held, used)),
            is_promised=states.is_promised(digests[place:]),
            num_found=len(block_ids),
        )

    def _num_sought(self, num_tokens: int) -> int:
        """Full blocks that leave at least one token to compute."""
        return (num_tokens - 1) // self.tokens_per_block

    def _digests(self, key: int, token_ids: Sequence[int], rules: CacheRules, scope: bytes) -> list[bytes]:
        """Digests of all full blocks, in order; the last block may be one that is computed in any case."""
        known = self._prompts.get(key)
        if known is None or known.num_tokens != len(token_ids):
            known = self._prompts[key] = _Prompt(len(token_ids), [])
            parent, size = scope, self.tokens_per_block
            for end in range(size, len(token_ids) + 1, size):
                parent = rules.digest(parent, token_ids, end - size, end)
                known.digests.append(parent)
        return known.digests

    def admit(
        self, key: int, match: PrefixMatch, num_blocks: int, rules: CacheRules, num_tokens: int = 0
    ) -> None:
        """Open a block table that begins with the matched blocks and reserves `num_blocks` blocks in all.

        That takes `num_blocks - match.num_held` free blocks. Where the match ends inside a block, the copy of that
        block is in the table too (`block_copy`). Full blocks of the tokens that `match_prefix` saw are promised
        until they are published.

        Args:
            key: The sequence, which has no table yet.
            match: What `match_prefix` found.
            num_blocks: Blocks to reserve, the matched ones included.
            rules: How the sequence shares its blocks.
            num_tokens: Tokens that are known of the sequence now, for `block_counts`.
        """
        assert key not in self._tables, f"sequence {key} holds blocks already"
        known = self._prompts.pop(key, None)
        digests = known.digests if known else []
        shared = len(match.block_ids)
        missed = self._num_sought(known.num_tokens) - shared if known else 0
        parent = digests[shared - 1] if shared else rules.scope
        reserved = max(0, num_blocks - shared)
        new = max(0, self.blocks_for(num_tokens) - shared)
        table = _Table(
            list(match.block_ids), reserved, shared, rules, digests, parent, shared, missed, new, None, []
        )
        self._tables[key] = table
        self.pool.share(match.block_ids)
        if match.num_copied_tokens:
            self._take_copy(table, match.source)
        for index, block_id in enumerate(match.block_ids):
            self.pool.retain(block_id, rules.retention_of(index * self.tokens_per_block))
        for digest in table.promised:
            self._promises[digest] = self._promises.get(digest, 0) + 1
        self.num_reserved += table.reserved
        self.num_reused_blocks += table.num_reused
        self.num_missed_blocks += missed
        if self.states is not None:
            boundaries = {match.num_found, self._num_sought(known.num_tokens)} if known else set[int]()
            planned = {
                count * self.tokens_per_block: digests[count - 1] for count in boundaries if count > shared
            }
            self.states.start(key, planned)
            if shared:
                table.snapshot = self.states.use(digests[shared - 1])

    def _take_copy(self, table: _Table, source: int) -> None:
        """Take the block that the found beginning is copied to. It may be the source itself, if that was free."""
        assert table.reserved > 0, "a sequence was admitted without a block for its last token"
        (target,) = self.pool.take(1)
        table.copy = (source, target)
        table.block_ids.append(target)
        table.reserved -= 1
        table.num_reused += 1
        self.num_taken_blocks += 1

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
        """Blocks that become unreserved when this sequence is released and no other."""
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
        self.num_taken_blocks += count
        return taken

    # ---------------------------------------------------------------- beams

    def reorder_beams(self, key: int, parents: Sequence[int]) -> None:
        """Let beam i continue what was beam `parents[i]`: it holds the same blocks.

        At the first call there is one beam, 0: the sequence itself, whose context is computed.
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
        # Blocks that no beam holds any more may be needed again: the reservation is for the worst case.
        self._reserve(table, table.reserved + distinct - table.num_distinct())

    def _join_beginnings(self, table: _Table) -> None:
        """Move the blocks that all tails begin with to the common beginning, but never a tail's last block."""
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
        growth = BeamGrowth([], [], [])
        for beam, tail in enumerate(table.tails):
            if place < len(tail) and self.pool.is_held_once(tail[place]):
                continue
            (block_id,) = self.pool.take(1)
            self.num_taken_blocks += 1
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
            index, start = table.num_published, table.num_published * size
            if index < len(table.digests):
                digest = table.digests[index]
                self._end_promise(digest)
            else:
                digest = table.rules.digest(table.parent, token_ids, start, start + size)
            retention = table.rules.retention_of(start)
            content = table.rules.content(token_ids, start, start + size)
            is_new = self.pool.publish(table.block_ids[index], digest, table.parent, retention, content)
            if self.events is not None and is_new:
                block = StoredBlock(
                    block_hash(digest),
                    tuple(token_ids[start : start + size]),
                    table.rules.extra_ids_of(start, start + size),
                    table.rules.lora_task_id,
                    (retention or Retention()).priority,
                )
                self.events.stored(table.parent if index else None, block)
            table.parent = digest
            table.num_published += 1
            if self.states is not None:
                self.states.computed(key, start + size, digest)

    def _end_promise(self, digest: bytes) -> None:
        """Withdraw one sequence's promise: it has published the block, or never will."""
        self._promises[digest] -= 1
        if self._promises[digest] == 0:
            del self._promises[digest]

    def unpublish(self, *keys: int) -> None:
        """Let nobody find the blocks that only these sequences hold: their content may make the device fail."""
        tables = [self._tables[key] for key in keys if key in self._tables]
        parts = chain.from_iterable((table.block_ids, *table.tails) for table in tables)
        held = Counter(chain.from_iterable(parts))
        self.pool.unpublish(
            block_id for block_id, count in held.items() if count == self.pool.num_references(block_id)
        )

    def release(self, key: int) -> None:
        """Release a sequence's blocks and reservation, if it has any, and the digests computed while it waited."""
        self._prompts.pop(key, None)
        table = self._tables.pop(key, None)
        if self.states is not None:
            self.states.release(key)
        if table is not None:
            self.num_reserved -= table.reserved
            for digest in table.promised:
                self._end_promise(digest)
            for block_ids in (*table.tails, table.block_ids):
                # Later blocks are of no use without the earlier ones: they are to be evicted first.
                self.pool.release(reversed(block_ids))

    def clear(self) -> None:
        """Release every sequence and forget the content of all blocks, even if the books do not agree.

        The counts since the start stay.
        """
        self.pool.forget_all()
        if self.states is not None:
            self.states.clear()
        self.pool = BlockPool(self.pool.num_blocks, self.events, self.states)
        self.num_reserved = 0
        self._tables.clear()
        self._prompts.clear()
        self._promises.clear()
