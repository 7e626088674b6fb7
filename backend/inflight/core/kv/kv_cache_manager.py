"""The block tables: which KV blocks each running sequence holds, shares with others or has reserved.

Blocks are shared by content (`block_keys.py`): only full blocks, and never the block with a sequence's last known
token, which must be computed for its logits. If only the beginning of a cached block matches, that part is copied.
The beams of a search also share the block that they are filling, as long as their tokens are equal. A beam that
writes into a block that other beams hold gets a copy.

Blocks that a running sequence is about to publish, or that are being loaded from a block store (`block_store.py`),
are promised, so that another sequence with the same prefix can wait for them instead of computing them too. A
sequence reserves blocks at admission; growth within the reservation cannot fail. Used on the loop thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import NamedTuple

from inflight.core.kv.block_keys import CacheRules
from inflight.core.kv.block_loader import BlockLoader
from inflight.core.kv.block_pool import BlockPool
from inflight.core.kv.block_store import SavedBlocks, SavedPiece, state_key
from inflight.core.kv.kv_events import KvEventLog, stored_block
from inflight.core.kv.promises import Promises
from inflight.core.kv.retention import Retention
from inflight.core.kv.state_snapshots import StateSnapshots


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached blocks with the beginning of a sequence.

    Attributes:
        block_ids: Full blocks, in order from the first token on.
        num_held: How many of `block_ids` running sequences hold; the others count as free until they are shared.
        is_promised: Whether a running sequence is computing the first block that was not found.
        source: A cached block with the same first tokens as the first block that was not found.
        num_copied_tokens: Number of tokens of `source` that match; 0: there is no such block.
        num_found: For a model with recurrent state, the number of full blocks found in the cache; `block_ids` has
            only the blocks up to the last snapshot.
        num_saved: Number of blocks after those found in the cache that can be loaded from the block store.
        state_at: Number of blocks before the boundary whose snapshot of recurrent state is to be loaded from the
            block store; 0: none, or the device has it.
    """

    block_ids: tuple[int, ...] = ()
    num_held: int = 0
    is_promised: bool = False
    source: int = 0
    num_copied_tokens: int = 0
    num_found: int = 0
    num_saved: int = 0
    state_at: int = 0

    @property
    def is_saved(self) -> bool:
        """Whether blocks or a snapshot can be loaded from the block store."""
        return bool(self.num_saved or self.state_at)


class BlockCounts(NamedTuple):
    """Counts of the blocks for the tokens that a sequence had when it was admitted.

    Attributes:
        new: Blocks not found as a whole, taken from free blocks.
        reused: Blocks found in the cache, including one that was found in part and copied.
        missed: Full blocks looked up and not found.
    """

    new: int
    reused: int
    missed: int


@dataclass(slots=True)
class BeamGrowth:
    """Changes to block tables that give every beam a block for one more token.

    Attributes:
        copies: (source, target) blocks to copy.
        replaced: (beam, index in its table, block id of the copy).
        appended: (beam, block id at the end of its table).
    """

    copies: list[tuple[int, int]]
    replaced: list[tuple[int, int, int]]
    appended: list[tuple[int, int]]


@dataclass(slots=True)
class _Table:
    block_ids: list[int]  # of a beam search, the common beginning of all beams
    reserved: int  # number of blocks that this sequence may still take
    num_published: int
    rules: CacheRules
    digests: list[bytes]  # of the full blocks known at admission; unpublished ones are promised
    parent: bytes | None  # digest of the last published block; None: nothing is shared
    num_reused: int
    num_missed: int
    num_new: int
    copy: tuple[int, int] | None  # (source, target) of the block found in part
    # The blocks of each beam after the common beginning; never empty, as they include the block being written.
    # Separate from the common beginning, so that the time of a step depends only on how much the beams differ.
    tails: list[list[int]]
    snapshot: int = -1  # of the recurrent state that the sequence starts from

    @property
    def promised(self) -> list[bytes]:
        return self.digests[self.num_published :]

    def num_distinct(self) -> int:
        return len(self.block_ids) + len(set(chain.from_iterable(self.tails)))


@dataclass(slots=True)
class _PromptKeys:
    """Digests of a waiting sequence's full blocks, computed only once.

    `is_loaded`: the sequence has had a load of saved blocks.
    """

    num_tokens: int
    digests: list[bytes]
    is_loaded: bool = False


class KvCacheManager:
    """The block tables of running sequences, by sequence key, over one block pool.

    Attributes:
        pool: The block pool.
        tokens_per_block: Tokens per block.
        num_reserved: Free blocks reserved by running sequences.
        num_taken_blocks: Number of free blocks taken since the start.
        num_generation_blocks: Number of those that sequences in generation took.
        num_reused_blocks, num_missed_blocks: Numbers of blocks that admissions since the start found, and
            did not find, in the cache.
        num_partly_reused_blocks: Number of the reused blocks of which only the beginning was found.
        num_copied_blocks: Number of blocks since the start whose content was copied to another block.
        events: The log of changes to the content of blocks; None: no log.
        states: Snapshots of recurrent state; None for a model without recurrent state.
        saved: Blocks outside of the device's cache; None without a block store.
        loader: Loads the saved blocks; None without a block store.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        events: KvEventLog | None = None,
        states: StateSnapshots | None = None,
        saved: SavedBlocks | None = None,
    ) -> None:
        self.events = events
        if events is not None:
            events.created(num_blocks)
        self.states = states
        self.saved = saved
        self.pool = BlockPool(num_blocks, events, states)
        self.tokens_per_block = tokens_per_block
        self.num_reserved = 0
        self.num_taken_blocks = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0
        self.num_generation_blocks = 0
        self.num_partly_reused_blocks = 0
        self.num_copied_blocks = 0
        self._tables: dict[int, _Table] = {}
        self._prompts: dict[int, _PromptKeys] = {}
        self._promises = Promises()  # of blocks
        self.loader = (
            None
            if saved is None
            else BlockLoader(saved, self.pool, self._promises, tokens_per_block, events, states)
        )

    @property
    def num_unreserved(self) -> int:
        """Number of free blocks that no running sequence has reserved."""
        return self.pool.num_free - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for this many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def block_table(self, key: int) -> tuple[int, ...]:
        """Return the blocks of a running sequence, in order; for a beam search, the common beginning of its
        beams."""
        return tuple(self._tables[key].block_ids)

    def block_counts(self, key: int) -> BlockCounts:
        """Return how many blocks a running sequence found and missed in the cache when it was admitted."""
        table = self._tables[key]
        return BlockCounts(table.num_new, table.num_reused, table.num_missed)

    def block_copy(self, key: int) -> tuple[int, int] | None:
        """Return (source, target) of the block that a sequence reuses in part; None if there is none."""
        return self._tables[key].copy

    def snapshot(self, key: int) -> int:
        """Return the snapshot of recurrent state from which a sequence starts; -1: it starts from none."""
        return self._tables[key].snapshot

    def held(self, key: int) -> tuple[int, int]:
        """Return a running sequence's numbers of distinct blocks in its tables, and of further reserved blocks."""
        table = self._tables[key]
        return table.num_distinct(), table.reserved

    # ---------------------------------------------------------------- admission

    def match_prefix(self, key: int, token_ids: Sequence[int], rules: CacheRules) -> PrefixMatch:
        """Find the longest cached prefix of `token_ids` that leaves at least one token to compute.

        The prefix consists of full blocks, and possibly the beginning of one more.
        """
        if rules.scope is None:
            return PrefixMatch()
        digests = self._digests(key, token_ids, rules, rules.scope)
        sought = digests[: self._num_sought(len(token_ids))]
        block_ids: list[int] = []
        is_promised = False
        for digest in sought:
            block_id = self.pool.find(digest)
            if block_id is None:
                is_promised = digest in self._promises
                break
            block_ids.append(block_id)
        saved = None if self._prompts[key].is_loaded else self.saved
        num_saved = 0 if saved is None else self._num_saved(saved, sought[len(block_ids) :])
        if self.states is not None:
            return self._match_state(self.states, saved, sought, block_ids, num_saved)
        num_held = sum(map(self.pool.is_held, block_ids))
        place = len(block_ids)
        start, end = place * self.tokens_per_block, len(token_ids) - 1
        rest = rules.content(token_ids, start, min(start + self.tokens_per_block, end))
        beginning = self.pool.find_beginning(digests[place - 1] if place else rules.scope, rest)
        return PrefixMatch(tuple(block_ids), num_held, is_promised, *beginning, num_saved=num_saved)

    def num_cached_blocks(self, key: int, token_ids: Sequence[int], rules: CacheRules) -> int:
        """Return the number of full blocks that `match_prefix` would find.

        Takes O(log blocks) after the first call, because the blocks before a cached one are nearly always cached
        too. If some are not, the number may differ.
        """
        if rules.scope is None:
            return 0
        digests = self._digests(key, token_ids, rules, rules.scope)
        most = self._num_sought(len(token_ids))
        count = bisect_left(digests, True, hi=most, key=lambda digest: self.pool.find(digest) is None)
        return count if self.states is None else self.states.find(digests[:count])

    def _num_saved(self, saved: SavedBlocks, digests: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first one on, can be loaded.

        A load ends before a promised block, so that no block is loaded or computed twice.
        """
        return sum(1 for _ in takewhile(lambda each: each in saved and each not in self._promises, digests))

    def _match_state(
        self,
        states: StateSnapshots,
        saved: SavedBlocks | None,
        digests: Sequence[bytes],
        block_ids: Sequence[int],
        num_saved: int,
    ) -> PrefixMatch:
        """Return the match of a model with recurrent state: the found blocks up to the last snapshot.

        The tokens after the snapshot are computed again, even if their blocks are cached. No part of a block is
        copied. The match is promised if a running sequence will save a later snapshot. Blocks are loaded from the
        block store only up to a boundary with a snapshot, on the device or in the store.

        Args:
            states: The snapshots.
            saved: The saved blocks; None: the sequence loads none.
            digests: Digests of the blocks to look up.
            block_ids: The blocks of these that are in the cache, from the first one on.
            num_saved: Number of blocks after them that can be loaded.
        """
        place, num_found = states.find(digests[: len(block_ids)]), len(block_ids)
        used = tuple(block_ids[:place])
        match = PrefixMatch(
            used,
            num_held=sum(map(self.pool.is_held, used)),
            is_promised=states.is_promised(digests[place:]),
            num_found=num_found,
        )
        if saved is None or match.is_promised:
            return match
        for count in range(num_found + num_saved, place, -1):
            digest = digests[count - 1]
            if digest in states or state_key(digest) in saved:
                state_at = 0 if digest in states else count
                return replace(match, num_saved=max(0, count - num_found), state_at=state_at)
        return match

    def _num_sought(self, num_tokens: int) -> int:
        """Return the number of full blocks to look up, so that at least one token is left to compute."""
        return (num_tokens - 1) // self.tokens_per_block

    def _digests(self, key: int, token_ids: Sequence[int], rules: CacheRules, scope: bytes) -> list[bytes]:
        """Return the digests of all full blocks, in order, even of a last block that is computed in any case."""
        known = self._prompts.get(key)
        if known is None or known.num_tokens != len(token_ids):
            known = self._prompts[key] = _PromptKeys(len(token_ids), [])
            parent, size = scope, self.tokens_per_block
            for end in range(size, len(token_ids) + 1, size):
                parent = rules.digest(parent, token_ids, end - size, end)
                known.digests.append(parent)
        return known.digests

    def admit(
        self, key: int, match: PrefixMatch, num_blocks: int, rules: CacheRules, num_tokens: int = 0
    ) -> None:
        """Open a block table with the matched blocks, and reserve `num_blocks` blocks in total.

        This takes `num_blocks - match.num_held` free blocks. If the match ends inside a block, a copy of that
        block is in the table too (`block_copy`). Full blocks of the tokens that `match_prefix` saw are promised
        until they are published.

        Args:
            key: The sequence, which must have no table yet.
            match: The result of `match_prefix`.
            num_blocks: Blocks to reserve, the matched ones included.
            rules: How the sequence shares its blocks.
            num_tokens: Number of tokens known now, for `block_counts`.
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
        if self.saved is not None:
            self.saved.use(digests[:shared])
        if match.num_copied_tokens:
            self._take_copy(table, match.source)
        for index, block_id in enumerate(match.block_ids):
            self.pool.retain(block_id, rules.retention_of(index * self.tokens_per_block))
        self._promises.update(table.promised)
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
                table.snapshot = self.states.use(digests[shared - 1], key)
                if self.saved is not None:
                    self.saved.use((state_key(digests[shared - 1]),))
                if self.loader is not None:
                    self.loader.spare_snapshot(table.snapshot)

    def _take_copy(self, table: _Table, source: int) -> None:
        """Take a block as target of the copy of the matching beginning; it may be the source itself, if that is
        free."""
        assert table.reserved > 0, "a sequence was admitted without a block for its last token"
        (target,) = self.pool.take(1)
        table.copy = (source, target)
        if self.loader is not None:
            self.loader.spare_block(source)
        table.block_ids.append(target)
        table.reserved -= 1
        table.num_reused += 1
        self.num_taken_blocks += 1
        self.num_partly_reused_blocks += 1
        self.num_copied_blocks += source != target

    def load_saved(self, key: int, match: PrefixMatch, token_ids: Sequence[int], rules: CacheRules) -> None:
        """Begin to load the blocks and the snapshot that continue a waiting sequence's cached prefix.

        This takes `match.num_saved` free blocks, and promises them to all sequences. Each sequence has at most one
        load, after which `match_prefix` finds no saved blocks for it.

        Args:
            key: The sequence.
            match: The result of `match_prefix`.
            token_ids, rules: The arguments of `match_prefix`.
        """
        assert self.loader is not None
        prompt = self._prompts[key]
        first = len(match.block_ids) if self.states is None else match.num_found
        is_delayed = self.loader.start(
            first, match.num_saved, match.state_at, prompt.digests, token_ids, rules
        )
        prompt.is_loaded = not is_delayed

    def is_loading(self, key: int) -> bool:
        """Return whether a waiting sequence's blocks, or a snapshot at the end of one, are being loaded."""
        if self.saved is None or key not in self._prompts:
            return False
        digests = self._prompts[key].digests
        return any(map(self.saved.is_loading, chain(digests, map(state_key, digests))))

    # ---------------------------------------------------------------- growth

    def missing_blocks(self, key: int, num_tokens: int) -> int:
        """Return how many blocks beyond table and reservation a sequence needs for `num_tokens` tokens."""
        table = self._tables[key]
        return max(0, self.blocks_for(num_tokens) - len(table.block_ids) - table.reserved)

    def num_certain_tokens(self, key: int) -> int:
        """Return how many tokens fit into a sequence's table and reservation."""
        table = self._tables[key]
        return (len(table.block_ids) + table.reserved) * self.tokens_per_block

    def blocks_freed_by(self, key: int) -> int:
        """Return by how much `num_unreserved` grows if only this sequence is released."""
        table = self._tables[key]
        return table.reserved + sum(self.pool.is_held_once(block_id) for block_id in table.block_ids)

    def extend(self, key: int, num_tokens: int, in_generation: bool = False) -> tuple[int, ...]:
        """Grow a table to the blocks of `num_tokens` tokens, and return the appended blocks.

        The blocks must be available: within the reservation, or `missing_blocks` <= `num_unreserved`.
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
        if in_generation:
            self.num_generation_blocks += count
        return taken

    # ---------------------------------------------------------------- beams

    def reorder_beams(self, key: int, parents: Sequence[int]) -> None:
        """Let beam i continue beam `parents[i]`, with the same blocks.

        Before the first call there is only beam 0, with the sequence's context.
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
        # Blocks that beams have given up are reserved again, as the reservation is for the worst case.
        self._reserve(table, table.reserved + distinct - table.num_distinct())

    def _join_beginnings(self, table: _Table) -> None:
        """Move the blocks with which all tails start to the common beginning, except a tail's last block."""
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
        """Give every beam a block of its own for token `num_tokens - 1`, within the reservation."""
        table = self._tables[key]
        distinct, index = table.num_distinct(), (num_tokens - 1) // self.tokens_per_block
        place = index - len(table.block_ids)
        growth = BeamGrowth([], [], [])
        for beam, tail in enumerate(table.tails):
            if place < len(tail) and self.pool.is_held_once(tail[place]):
                continue
            (block_id,) = self.pool.take(1)
            self.num_taken_blocks += 1
            self.num_generation_blocks += 1
            if place == len(tail):
                tail.append(block_id)
                growth.appended.append((beam, block_id))
            else:
                growth.copies.append((tail[place], block_id))
                growth.replaced.append((beam, index, block_id))
                self.pool.release((tail[place],))
                tail[place] = block_id
        self.num_copied_blocks += len(growth.copies)
        self._reserve(table, table.reserved + distinct - table.num_distinct())
        return growth

    def _reserve(self, table: _Table, count: int) -> None:
        assert count >= 0, "beams outgrew their reservation"
        self.num_reserved += count - table.reserved
        table.reserved = count

    # ---------------------------------------------------------------- sharing and the end

    def publish(self, key: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Publish the blocks filled by `num_computed_tokens` computed tokens, so that other sequences find
        them."""
        table, size = self._tables[key], self.tokens_per_block
        if table.parent is None:
            return
        while (table.num_published + 1) * size <= num_computed_tokens:
            index, start = table.num_published, table.num_published * size
            if index < len(table.digests):
                digest = table.digests[index]
                self._promises.end(digest)
            else:
                digest = table.rules.digest(table.parent, token_ids, start, start + size)
            retention = table.rules.retention_of(start)
            content = table.rules.content(token_ids, start, start + size)
            is_new = self.pool.publish(table.block_ids[index], digest, table.parent, retention, content)
            if self.events is not None and is_new:
                block = stored_block(digest, token_ids, start, start + size, table.rules, retention)
                self.events.stored(table.parent if index else None, block)
            if self.saved is not None and is_new:
                self.saved.save(SavedPiece(digest, table.block_ids[index]), retention or Retention())
            table.parent = digest
            table.num_published += 1
            if self.states is not None:
                self._save_state(digest, self.states.computed(key, start + size, digest), retention)

    def _save_state(self, digest: bytes, snapshot: int | None, retention: Retention | None) -> None:
        """Save a snapshot at the end of a block in the block store, if there are both."""
        if self.saved is not None and snapshot is not None:
            self.saved.save(SavedPiece(state_key(digest), snapshot, is_state=True), retention or Retention())

    def unpublish(self, *keys: int) -> None:
        """Unpublish the blocks that no other sequences than these hold, as their content may make the device
        fail."""
        tables = [self._tables[key] for key in keys if key in self._tables]
        parts = chain.from_iterable((table.block_ids, *table.tails) for table in tables)
        held = Counter(chain.from_iterable(parts))
        own = [block_id for block_id, count in held.items() if count == self.pool.num_references(block_id)]
        digests = self.pool.unpublish(own)
        if self.loader is not None:
            self.loader.drop(digests)

    def release(self, key: int) -> None:
        """Release a sequence's blocks and reservation, if any, and the digests computed while it waited."""
        self._prompts.pop(key, None)
        table = self._tables.pop(key, None)
        if self.states is not None:
            last = self.states.last_generated(key)
            if last is not None and table is not None:
                self._save_state(*last, table.rules.retention.decode)
            self.states.release(key)
        if table is not None:
            self.num_reserved -= table.reserved
            for digest in table.promised:
                self._promises.end(digest)
            for block_ids in (*table.tails, table.block_ids):
                # Later blocks are useless without earlier ones, so later blocks are to be evicted first.
                self.pool.release(reversed(block_ids))

    def clear(self) -> None:
        """Release every sequence and forget the content of all blocks, even if the records are inconsistent.

        Loads go on, and so do saved blocks. Counts since the start stay.
        """
        if self.states is not None:
            self.states.clear()
        self.num_reserved = 0
        self._tables.clear()
        self._prompts.clear()
        if self.loader is not None:
            self.loader.clear_cache()
        else:
            self.pool.clear()
            self._promises.clear()
