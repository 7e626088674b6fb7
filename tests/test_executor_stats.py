"""Conversion of the engine's counters to the Executor's statistics, and to JSON with its keys."""

from __future__ import annotations

import json
from dataclasses import replace

from inflight.core.report.stats import (
    IterationCounts,
    KeptIteration,
    MemoryUsage,
    RequestCounts,
    RequestCountsOfIteration,
    RequestStage,
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
