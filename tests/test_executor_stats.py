"""Conversion of the engine's counters to the Executor's statistics, and to JSON with its keys."""

from __future__ import annotations

import json
from dataclasses import replace

from inflight.core.kv.block_pool import BlockPeaks
from inflight.core.kv.store_stats import DISK, HOST, StoreStats, TierStats
from inflight.core.report.stats import (
    IterationCounts,
    KeptIteration,
    MemoryUsage,
    RequestCounts,
    RequestCountsOfIteration,
    RequestStage,
    kv_changes,
)
from inflight.executor_stats import iteration_stats, request_stats
from tests.core.test_stats import MEMORY, NOON, STATIC, STATS


def as_json(stats: IterationCounts, memory: MemoryUsage | None = None) -> dict:
    return json.loads(iteration_stats(KeptIteration(stats, NOON), memory or MemoryUsage()).to_json_str())


def test_statistics_have_the_executors_json_keys():
    fields = as_json(STATS, MEMORY)
    assert fields == {
        "timestamp": "05-20-2024 12:30:05.250000", "iter": 17, "iterLatencyMS": 4.5,
        "newActiveRequestsQueueLatencyMS": 6.0, "numNewActiveRequests": 3, "numActiveRequests": 9,
        "numQueuedRequests": 4, "numCompletedRequests": 2, "maxNumActiveRequests": 8, "maxBatchSizeStatic": 8,
        "maxBatchSizeTunerRecommended": 0, "maxBatchSizeRuntime": 8, "maxNumTokensStatic": 4096,
        "maxNumTokensTunerRecommended": 0, "maxNumTokensRuntime": 4096, "gpuMemUsage": 2000, "cpuMemUsage": 1000,
        "pinnedMemUsage": 300,
        "kvCacheStats": {
            "maxNumBlocks": 300, "freeNumBlocks": 200, "usedNumBlocks": 100, "tokensPerBlock": 16,
            "allocTotalBlocks": 90, "allocNewBlocks": 90, "reusedBlocks": 30, "missedBlocks": 10,
            "cacheHitRate": 0.75,
        },
        "crossKvCacheStats": None,
        "staticBatchingStats": None,
        "inflightBatchingStats": {
            "numScheduledRequests": 6, "numContextRequests": 2, "numGenRequests": 4, "numPausedRequests": 1,
            "numCtxTokens": 70, "microBatchId": 1, "avgNumDecodedTokensPerIter": 1.5,
        },
        "specDecodingStats": {
            "numDraftTokens": 5, "numAcceptedTokens": 3, "numRequestsWithDraftTokens": 2, "acceptanceLength": 2.5,
            "iterLatencyMS": 0.0, "draftOverhead": 0.0,
        },
        "kvCacheIterationStats": None,
        "kvCacheTierStats": None,
    }  # fmt: skip


def test_absent_kinds_of_statistics_are_null():
    fields = as_json(replace(STATIC, num_drafted_requests=0))
    assert fields["inflightBatchingStats"] is None and fields["specDecodingStats"] is None
    assert fields["staticBatchingStats"] == {
        "numScheduledRequests": 7, "numContextRequests": 2, "numCtxTokens": 500, "numGenTokens": 60,
        "emptyGenSlots": 11,
    }  # fmt: skip
    assert fields["cpuMemUsage"] == 0
    rejected = as_json(replace(STATS, num_accepted_draft_tokens=0))
    assert rejected["specDecodingStats"]["acceptanceLength"] == 1.0


def test_averages_of_an_idle_iteration_are_zero():
    empty = replace(STATS, num_reused_blocks=0, num_missed_blocks=0, num_advanced_sequences=0)
    fields = as_json(empty)
    assert fields["inflightBatchingStats"]["avgNumDecodedTokensPerIter"] == 0.0
    assert fields["kvCacheStats"]["cacheHitRate"] == 0.0


STORE = StoreStats(
    100, 7, 700, 4, 400,
    (TierStats(HOST, 950, 6, 600, 7, 700, 3, 300, 1, 100, 450, 800),
     TierStats(DISK, 5000, 9, 1044, 7, 812, 1, 116, 2, 232)),
)  # fmt: skip
BEFORE = replace(
    STATS, num_taken_blocks=80, num_reused_blocks=24, num_missed_blocks=8, num_generation_blocks=40,
    num_partly_reused_blocks=3, num_copied_blocks=6,
    block_store=StoreStats(100, 5, 500, 3, 300, (TierStats(HOST, 950, 5, 500, 5, 500, 3, 300),)),
)  # fmt: skip
SAVING = replace(
    STATS, max_sequence_length=4096, num_cached_blocks=50, block_store=STORE, num_generation_blocks=44,
    num_partly_reused_blocks=4, num_copied_blocks=9, block_peaks=BlockPeaks(free=220, held=130, cached=70),
)  # fmt: skip


def test_tiers_of_the_kv_cache_have_tensorrt_llms_names():
    """The names are those of `kvCacheIterationStats` in TensorRT-LLM (pyexecutor/kv_cache_stats.py)."""
    entry = KeptIteration(SAVING, NOON, kv_changes(SAVING, BEFORE, block_bytes=100))
    found = json.loads(iteration_stats(entry, MEMORY).to_json_str())
    assert found["kvCacheIterationStats"] == {
        "4096": {
            "primaryMaxNumBlocks": 300, "primaryFreeNumBlocks": 200, "primaryUsedNumBlocks": 100,
            "primaryEvictableNumBlocks": 50, "secondaryMaxNumBlocks": 9, "secondaryFreeNumBlocks": 3,
            "secondaryUsedNumBlocks": 6, "secondaryEvictableNumBlocks": 6, "iterAllocTotalBlocks": 10,
            "primaryPeakFreeNumBlocks": 220, "primaryPeakUsedNumBlocks": 130, "primaryPeakEvictableNumBlocks": 70,
            "secondaryPeakFreeNumBlocks": 5, "secondaryPeakUsedNumBlocks": 8, "secondaryPeakEvictableNumBlocks": 8,
            "iterAllocNewBlocks": 10, "iterGenAllocBlocks": 4, "iterReusedBlocks": 6, "iterFullReusedBlocks": 5,
            "iterPartialReusedBlocks": 1, "iterMissedBlocks": 2, "iterCacheHitRate": 0.75,
            "iterOnboardBlocks": 1, "iterOnboardBytes": 100, "iterOffloadBlocks": 2, "iterOffloadBytes": 200,
            "iterHostDroppedBlocks": 1, "iterHostDroppedBytes": 100, "iterIntraDeviceCopyBlocks": 3,
            "iterIntraDeviceCopyBytes": 300,
        }
    }  # fmt: skip
    host, disk = found["kvCacheTierStats"]
    assert host == {
        "medium": "host", "maxBytes": 950, "usedNumBlocks": 6, "usedBytes": 600, "offloadBlocks": 7,
        "offloadBytes": 700, "onboardBlocks": 3, "onboardBytes": 300, "droppedBlocks": 1, "droppedBytes": 100,
    }  # fmt: skip
    assert (disk["medium"], disk["usedNumBlocks"], disk["onboardBlocks"]) == ("disk", 9, 1)


def test_without_a_block_store_there_is_no_secondary_memory():
    entry = KeptIteration(STATS, NOON, kv_changes(STATS, None))
    (found,) = json.loads(iteration_stats(entry, MEMORY).to_json_str())["kvCacheIterationStats"].values()
    assert not any(value for key, value in found.items() if key.startswith("secondary"))
    assert (found["iterReusedBlocks"], found["iterOnboardBlocks"]) == (STATS.num_reused_blocks, 0)


def test_request_statistics_have_the_executors_json_keys():
    running = RequestCounts(5, 0, RequestStage.GENERATION_IN_PROGRESS, 12, 9, 6, True, False, 4, 1, 3)
    paused = RequestCounts(5, 1, RequestStage.QUEUED, 0, 0, 0, False, True, 0, 0, 0)
    fields = json.loads(request_stats(RequestCountsOfIteration(17, (running, paused))).to_json_str())
    assert fields["iter"] == 17
    first, second = fields["requestStats"]
    assert first == {
        "id": 5, "stage": "GENERATION_IN_PROGRESS", "contextPrefillPosition": 12, "numGeneratedTokens": 9,
        "avgNumDecodedTokensPerIter": 1.5, "scheduled": True, "paused": False, "disServingStats": None,
        "allocTotalBlocksPerRequest": 4, "allocNewBlocksPerRequest": 4, "reusedBlocksPerRequest": 1,
        "missedBlocksPerRequest": 3, "kvCacheHitRatePerRequest": 0.25,
    }  # fmt: skip
    assert (second["id"], second["stage"], second["paused"]) == (5, "QUEUED", True)
    assert (second["avgNumDecodedTokensPerIter"], second["kvCacheHitRatePerRequest"]) == (0.0, 0.0)
