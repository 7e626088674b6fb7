"""Statistics are writable, and become JSON with TensorRT-LLM's keys."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields

import pytest

import inflight.executor as trtllm

ITERATION_KEYS = {
    "timestamp": "timestamp",
    "iter": "iter",
    "iter_latency_ms": "iterLatencyMS",
    "new_active_requests_queue_latency_ms": "newActiveRequestsQueueLatencyMS",
    "num_new_active_requests": "numNewActiveRequests",
    "num_active_requests": "numActiveRequests",
    "num_queued_requests": "numQueuedRequests",
    "num_completed_requests": "numCompletedRequests",
    "max_num_active_requests": "maxNumActiveRequests",
    "gpu_mem_usage": "gpuMemUsage",
    "cpu_mem_usage": "cpuMemUsage",
    "pinned_mem_usage": "pinnedMemUsage",
    "kv_cache_stats": "kvCacheStats",
    "cross_kv_cache_stats": "crossKvCacheStats",
    "static_batching_stats": "staticBatchingStats",
    "inflight_batching_stats": "inflightBatchingStats",
    "specdec_stats": "specDecodingStats",
    "kv_cache_iteration_stats": "kvCacheIterationStats",
    "kv_cache_tier_stats": "kvCacheTierStats",
}


def test_statistics_of_an_iteration_have_tensorrt_llms_json_keys() -> None:
    stats = trtllm.IterationStats()
    stats.timestamp, stats.iter, stats.iter_latency_ms = "01:23:56", 1, 100.5
    stats.num_active_requests, stats.cpu_mem_usage = 2, 2048
    found = json.loads(stats.to_json_str())
    assert {key: found[key] for key in ITERATION_KEYS.values()} == {
        key: getattr(stats, name) for name, key in ITERATION_KEYS.items()
    }


def test_parts_of_an_iteration_are_null_or_objects() -> None:
    stats = trtllm.IterationStats()
    parts = (
        "kvCacheStats",
        "crossKvCacheStats",
        "staticBatchingStats",
        "inflightBatchingStats",
        "specDecodingStats",
    )
    assert [json.loads(stats.to_json_str())[key] for key in parts] == [None] * 5
    stats.kv_cache_stats = trtllm.KvCacheStats(max_num_blocks=8, cache_hit_rate=0.5)
    stats.inflight_batching_stats = trtllm.InflightBatchingStats(num_ctx_tokens=3)
    stats.static_batching_stats = trtllm.StaticBatchingStats(empty_gen_slots=2)
    stats.specdec_stats = trtllm.SpecDecodingStats(num_draft_tokens=4, iter_latency_ms=0.5)
    found = json.loads(stats.to_json_str())
    assert (found["kvCacheStats"]["maxNumBlocks"], found["kvCacheStats"]["cacheHitRate"]) == (8, 0.5)
    assert found["inflightBatchingStats"]["numCtxTokens"] == 3
    assert found["staticBatchingStats"]["emptyGenSlots"] == 2
    assert found["specDecodingStats"]["iterLatencyMS"] == 0.5


def test_statistics_of_a_request_have_tensorrt_llms_json_keys() -> None:
    stats = trtllm.RequestStats()
    stats.id, stats.stage = 1, trtllm.RequestStage.CONTEXT_IN_PROGRESS
    stats.context_prefill_position, stats.avg_num_decoded_tokens_per_iter = 2, 2.5
    stats.scheduled = True
    found = json.loads(stats.to_json_str())
    assert (found["id"], found["stage"], found["contextPrefillPosition"]) == (1, "CONTEXT_IN_PROGRESS", 2)
    assert (found["avgNumDecodedTokensPerIter"], found["scheduled"], found["paused"]) == (2.5, True, False)
    assert found["disServingStats"] is None
    stats.dis_serving_stats = trtllm.DisServingRequestStats(1.5, 7)
    assert json.loads(stats.to_json_str())["disServingStats"] == {"kvCacheTransferMS": 1.5, "kvCacheSize": 7}


def test_statistics_of_an_iterations_requests_are_a_json_list() -> None:
    stats = trtllm.RequestStatsPerIteration()
    stats.iter = 1
    stats.request_stats = [trtllm.RequestStats(id=4)]
    found = json.loads(stats.to_json_str())
    assert found["iter"] == 1 and [one["id"] for one in found["requestStats"]] == [4]


def test_debug_tensors_of_an_iteration_are_named() -> None:
    stats = trtllm.DebugTensorsPerIteration()
    stats.iter = 3
    stats.debug_tensors = {"sequence_length": object()}
    assert (stats.iter, list(stats.debug_tensors)) == (3, ["sequence_length"])


@pytest.mark.parametrize(
    "cls",
    [
        trtllm.IterationStats,
        trtllm.KvCacheStats,
        trtllm.KvCacheIterationStats,
        trtllm.KvCacheTierStats,
        trtllm.RequestStats,
        trtllm.RequestStatsPerIteration,
    ],
)
def test_statistics_begin_empty_and_can_be_pickled(cls: type) -> None:
    stats = cls()
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert not any(getattr(stats, each.name) for each in fields(cls) if each.name != "stage")
