"""Statistics in the specification's JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from inflight.core.report.stats import IterationCounts, MemoryUsage, StaticBatchStats, timestamp

NOON = time.mktime((2024, 5, 20, 12, 30, 5, 0, 0, -1)) + 0.25
STATS = IterationCounts(
    iteration=17, duration_ns=4_500_000, num_active_requests=9, num_completed_requests=2, num_new_requests=3,
    new_requests_queue_ns=6_000_000, max_num_requests=8, max_num_tokens=4096, max_num_blocks=300,
    num_free_blocks=200, tokens_per_block=16, num_scheduled_requests=6, num_context_requests=2,
    num_generation_requests=4, num_context_tokens=70, num_generated_tokens=9, num_advanced_sequences=6,
    num_draft_tokens=5, num_accepted_draft_tokens=3, num_drafted_requests=2, micro_batch_id=1,
    num_waiting_requests=4, num_paused_requests=1, num_taken_blocks=90, num_reused_blocks=30, num_missed_blocks=10,
)  # fmt: skip
STATIC = replace(
    STATS,
    static_batch=StaticBatchStats(
        num_requests=7, num_slots=7, num_context_tokens=500, num_generation_tokens=60, num_empty_slots=11
    ),
)
MEMORY = MemoryUsage(cpu=1000, gpu=2000, pinned=300)

INFLIGHT_KEYS = [
    "Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count", "Max KV cache blocks",
    "Free KV cache blocks", "Used KV cache blocks", "Tokens per KV cache block", "Scheduled Requests",
    "Context Requests", "Generation Requests", "Total Context Tokens", "MicroBatch ID",
]  # fmt: skip
STATIC_KEYS = [
    *INFLIGHT_KEYS[:10], "Total Generation Tokens", "Total Context Tokens", "Empty Generation Slots",
]  # fmt: skip


def said(text: str) -> list:
    return list(json.loads(text).values())


def test_in_flight_batching_has_the_documented_keys():
    text = STATS.to_json(NOON)
    assert list(json.loads(text)) == INFLIGHT_KEYS
    assert said(text) == ["05-20-2024 12:30:05", 17, 9, 8, 300, 200, 100, 16, 6, 2, 4, 70, 1]


def test_static_batching_has_its_own_keys_with_sums_over_the_batch():
    text = STATIC.to_json(NOON)
    assert list(json.loads(text)) == STATIC_KEYS
    assert said(text) == ["05-20-2024 12:30:05", 17, 9, 8, 300, 200, 100, 16, 7, 2, 60, 500, 11]


def test_nothing_is_scheduled_between_two_static_batches():
    idle = replace(STATIC, num_active_requests=0, num_scheduled_requests=0, num_context_requests=0)
    fields = json.loads(idle.to_json(NOON))
    assert (fields["Scheduled Requests"], fields["Context Requests"]) == (0, 0)
    assert fields["Total Generation Tokens"] == 60, "what the last batch was"


def test_the_log_line_has_keys_beside_the_documented_ones():
    fields = json.loads(json.dumps(STATS.log_fields(NOON, MEMORY)))
    documented = json.loads(STATS.to_json(NOON))
    assert {key: fields[key] for key in INFLIGHT_KEYS[1:]} == {k: documented[k] for k in INFLIGHT_KEYS[1:]}
    assert {key: value for key, value in fields.items() if key not in documented} == {
        "Waiting Requests": 4,
        "Paused Requests": 1,
        "Reused KV cache blocks": 30,
        "Fraction used KV cache blocks": 0.333333,
        "Runtime CPU Memory Usage": 1000,
        "Runtime GPU Memory Usage": 2000,
        "Runtime Pinned Memory Usage": 300,
        "KV cache transfer time": 0,
        "Request count": 0,
    }
    assert fields["Timestamp"] == "05-20-2024 12:30:05.250000"


def test_the_log_line_of_static_batching_has_no_pauses():
    fields = STATIC.log_fields(NOON, MEMORY)
    assert set(fields) - set(STATIC_KEYS) == {
        "Waiting Requests", "Reused KV cache blocks", "Fraction used KV cache blocks", "Runtime CPU Memory Usage",
        "Runtime GPU Memory Usage", "Runtime Pinned Memory Usage", "KV cache transfer time", "Request count",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fraction_s", "text"), [(0.0, ".000000"), (0.000001, ".000001"), (0.9999999, None), (0.5, ".500000")]
)
def test_timestamps_round_to_microseconds(fraction_s, text):
    whole = float(int(NOON))
    expected = "05-20-2024 12:30:05" + text if text else "05-20-2024 12:30:06.000000"
    assert timestamp(whole + fraction_s) == expected


def test_fractions_of_an_empty_pool_are_zero():
    empty = replace(STATS, max_num_blocks=0, num_free_blocks=0, num_reused_blocks=0, num_missed_blocks=0,
                    num_advanced_sequences=0)  # fmt: skip
    assert (empty.used_fraction, empty.cache_hit_rate) == (0.0, 0.0)
