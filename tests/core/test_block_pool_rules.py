"""The pool compared with a slow model of its rules, over random calls."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.core.kv.block_pool import BlockPool
from inflight.core.kv.retention import DEFAULT_PRIORITY, Retention
from inflight.testing.simulation.integrity import check_integrity
from tests.tiers import examples

MS = 1_000_000


@dataclass
class _Published:
    digest: bytes
    parent: bytes
    priority: int
    duration_ns: int | None
    end_ns: int | None = None


class SlowPool:
    """A model of the pool's rules with lists and linear scans."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.empty = list(range(num_blocks))  # the first is taken first
        self.released: list[int] = []  # cached blocks, the least recently released first
        self.published: dict[int, _Published] = {}
        self.now_ns = 0

    def find(self, digest: bytes) -> int | None:
        return next((b for b, content in self.published.items() if content.digest == digest), None)

    def is_leaf(self, block_id: int) -> bool:
        digest = self.published[block_id].digest
        return not any(content.parent == digest for content in self.published.values())

    def take(self) -> int:
        if self.empty:
            block_id = self.empty.pop(0)
        else:
            leaves = [block_id for block_id in self.released if self.is_leaf(block_id)]
            # min() gives the first of several, and they are in the order of their release.
            block_id = min(leaves or self.released[:1], key=lambda b: self.published[b].priority)
            self.released.remove(block_id)
            del self.published[block_id]
        self.references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        if self.references[block_id] == 0:
            self.released.remove(block_id)
            self.published[block_id].end_ns = None
        self.references[block_id] += 1

    def release(self, block_id: int) -> None:
        self.references[block_id] -= 1
        if self.references[block_id]:
            return
        if block_id not in self.published:
            self.empty.insert(0, block_id)
            return
        self.released.append(block_id)
        self.start_clock(block_id)

    def start_clock(self, block_id: int) -> None:
        content = self.published[block_id]
        content.end_ns = None if content.duration_ns is None else self.now_ns + content.duration_ns

    def publish(self, block_id: int, digest: bytes, parent: bytes, retention: Retention | None) -> None:
        first = self.find(digest)
        if first is None:
            self.published[block_id] = _Published(digest, parent, DEFAULT_PRIORITY, None)
        self.retain(block_id if first is None else first, retention)

    def retain(self, block_id: int, retention: Retention | None) -> None:
        if retention is None:
            return
        content, duration_ms = self.published[block_id], retention.duration_ms
        content.priority = retention.priority
        content.duration_ns = None if duration_ms is None else duration_ms * MS
        if self.references[block_id] == 0:
            self.start_clock(block_id)

    def expire(self, now_ns: int) -> None:
        self.now_ns = now_ns
        for content in self.published.values():
            if content.end_ns is not None and content.end_ns <= now_ns:
                content.priority, content.duration_ns, content.end_ns = DEFAULT_PRIORITY, None, None


NUM_BLOCKS = 7
PATHS = [first + second + third for first in "ab" for second in ("", "a", "b") for third in ("", "a", "b")]
DIGESTS = sorted({path.encode() for path in PATHS})
RETENTIONS = st.none() | st.builds(
    Retention, st.sampled_from((0, DEFAULT_PRIORITY, 50, 100)), st.none() | st.integers(1, 4)
)
ANY = st.integers(0, 10_000)


class PoolAgainstSlowPool(RuleBasedStateMachine):
    """Random calls to the pool and to its slow model. A digest's parent is the digest without its last
    letter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.slow = BlockPool(NUM_BLOCKS), SlowPool(NUM_BLOCKS)

    def held(self) -> list[int]:
        return [block_id for block_id, count in enumerate(self.slow.references) if count]

    def new(self) -> list[int]:
        return [block_id for block_id in self.held() if block_id not in self.slow.published]

    @rule(most=st.integers(1, 3))
    def take(self, most: int) -> None:
        count = min(most, self.pool.num_free)
        assert self.pool.take(count) == tuple(self.slow.take() for _ in range(count))

    @precondition(lambda self: self.slow.published)
    @rule(any_block=ANY)
    def share(self, any_block: int) -> None:
        block_id = sorted(self.slow.published)[any_block % len(self.slow.published)]
        self.pool.share((block_id,))
        self.slow.share(block_id)

    @precondition(lambda self: self.held())
    @rule(any_block=ANY)
    def release(self, any_block: int) -> None:
        self.release_one(self.held()[any_block % len(self.held())])

    @precondition(lambda self: self.new())
    @rule(any_block=ANY, digest=st.sampled_from(DIGESTS), retention=RETENTIONS)
    def publish(self, any_block: int, digest: bytes, retention: Retention | None) -> None:
        self.publish_one(self.new()[any_block % len(self.new())], digest, retention)

    @precondition(lambda self: self.held())
    @rule(any_block=ANY, any_digest=ANY, retention=RETENTIONS)
    def publish_and_release_all(self, any_block: int, any_digest: int, retention: Retention | None) -> None:
        """Publish and release every block, as at a sequence's end; otherwise few examples would evict."""
        for block_id in self.held():
            if block_id in self.new():
                self.publish_one(block_id, DIGESTS[(any_digest + block_id) % len(DIGESTS)], retention)
            while self.slow.references[block_id]:
                self.release_one(block_id)

    @precondition(lambda self: self.slow.published)
    @rule(any_block=ANY, retention=RETENTIONS)
    def retain(self, any_block: int, retention: Retention | None) -> None:
        block_id = sorted(self.slow.published)[any_block % len(self.slow.published)]
        self.pool.retain(block_id, retention)
        self.slow.retain(block_id, retention)

    @rule(passed_ms=st.integers(0, 3))
    def expire(self, passed_ms: int) -> None:
        now_ns = self.slow.now_ns + passed_ms * MS
        self.pool.expire(now_ns)
        self.slow.expire(now_ns)

    @invariant()
    def agree(self) -> None:
        pool, slow = self.pool, self.slow
        check_integrity(pool)
        assert [pool.find(digest) for digest in DIGESTS] == [slow.find(digest) for digest in DIGESTS]
        assert [pool.is_held(b) for b in range(NUM_BLOCKS)] == [count > 0 for count in slow.references]
        assert [pool.is_held_once(b) for b in range(NUM_BLOCKS)] == [count == 1 for count in slow.references]
        assert (pool.num_cached, pool.num_empty) == (len(slow.released), len(slow.empty))
        assert pool.num_shared == sum(count > 1 for count in slow.references)

    def teardown(self) -> None:
        """Check that both evict all remaining blocks in the same order."""
        for block_id in self.held():
            while self.slow.references[block_id]:
                self.release_one(block_id)
        assert self.pool.take(NUM_BLOCKS) == tuple(self.slow.take() for _ in range(NUM_BLOCKS))

    def publish_one(self, block_id: int, digest: bytes, retention: Retention | None) -> None:
        self.pool.publish(block_id, digest, digest[:-1], retention)
        self.slow.publish(block_id, digest, digest[:-1], retention)

    def release_one(self, block_id: int) -> None:
        self.pool.release((block_id,))
        self.slow.release(block_id)


PoolAgainstSlowPool.TestCase.settings = settings(
    max_examples=examples(fast=60, all=150), stateful_step_count=40, deadline=None
)
TestPoolAgainstSlowPool = PoolAgainstSlowPool.TestCase
