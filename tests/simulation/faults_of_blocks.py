"""Faults to plant: in the keys of KV blocks, and in their owners."""

from __future__ import annotations

import dataclasses

import pytest

import inflight.core.kv.block_keys as block_keys
from inflight.core.endings import Endings
from inflight.core.kv.block_keys import ROOT_SCOPE, PrefixIdentity
from inflight.core.kv.block_pool import BlockHeap, BlockPool
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.schedule.running import Running

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- keys of blocks


def unchained_block_hash(patch: Patch) -> None:
    chained = block_keys.block_digest
    patch.setattr(block_keys, "block_digest", lambda parent, *ids: chained(ROOT_SCOPE, *ids))


def colliding_digests(patch: Patch) -> None:
    digest = block_keys.block_digest
    patch.setattr(block_keys, "block_digest", lambda *args: bytes([digest(*args)[0] & 7]) * 16)


def identity_ignored(patch: Patch) -> None:
    patch.setattr(PrefixIdentity, "scope", lambda identity, root, adapter=b"", table=b"": root)


def table_ignored(patch: Patch) -> None:
    scope = PrefixIdentity.scope
    patch.setattr(
        PrefixIdentity, "scope", lambda identity, root, adapter=b"", table=b"": scope(identity, root, adapter)
    )


def extra_ids_ignored(patch: Patch) -> None:
    digest = block_keys.block_digest
    patch.setattr(block_keys, "block_digest", lambda parent, tokens, extra_ids=(): digest(parent, tokens))


def prefix_not_waited_for(patch: Patch) -> None:
    match_prefix = KvCacheManager.match_prefix

    def promise_nothing(*args):
        return dataclasses.replace(match_prefix(*args), is_promised=False)

    patch.setattr(KvCacheManager, "match_prefix", promise_nothing)


# ---------------------------------------------------------------------- owners of blocks


def missing_reference_count(patch: Patch) -> None:
    share = BlockPool.share

    def share_without_counting(pool: BlockPool, block_ids) -> None:
        share(pool, [block_id for block_id in block_ids if not pool.is_held(block_id)])

    patch.setattr(BlockPool, "share", share_without_counting)


def held_block_evicted(patch: Patch) -> None:
    share = BlockPool.share

    def share_and_leave_in_the_queue(pool: BlockPool, block_ids) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockHeap, "discard", lambda *_: None)
            share(pool, block_ids)

    patch.setattr(BlockPool, "share", share_and_leave_in_the_queue)


def parents_evicted_before_children(patch: Patch) -> None:
    def as_if_all_were_leaves(pool: BlockPool, content) -> tuple[int, ...]:
        return (0, content.retention.priority, content.age)

    patch.setattr(BlockPool, "_eviction_key", as_if_all_were_leaves)


def wrong_block_boundary(patch: Patch) -> None:
    publish = KvCacheManager.publish

    def publish_one_token_early(kv_cache, key, token_ids, num_computed_tokens) -> None:
        publish(kv_cache, key, token_ids, min(num_computed_tokens + 1, len(token_ids)))

    patch.setattr(KvCacheManager, "publish", publish_one_token_early)


def pause_without_free(patch: Patch) -> None:
    leave = Running.leave

    def leave_and_keep_blocks(running: Running, llm_request: LlmRequest) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if llm_request.state is RequestState.RUNNING:
                inner.setattr(KvCacheManager, "release", lambda *_: None)
            leave(running, llm_request)

    patch.setattr(Running, "leave", leave_and_keep_blocks)


def freed_while_in_flight(patch: Patch) -> None:
    drain = Endings.drain

    def drain_at_once(endings: Endings, llm_request: LlmRequest, now_ns: int):
        llm_request.num_scheduled_tokens = 0
        return drain(endings, llm_request, now_ns)

    patch.setattr(Endings, "drain", drain_at_once)


def missing_copy_on_write(patch: Patch) -> None:
    grow_beams = KvCacheManager.grow_beams

    def write_into_shared_blocks(kv_cache: KvCacheManager, key: int, num_tokens: int):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "is_held_once", lambda pool, block_id: True)
            return grow_beams(kv_cache, key, num_tokens)

    patch.setattr(KvCacheManager, "grow_beams", write_into_shared_blocks)
