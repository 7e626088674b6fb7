"""The log's last line of statistics equals the metrics page, as tensorrtllm_backend's tests compare them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from datetime import datetime, timedelta

from inflight.server.launch import TritonServer
from tests.e2e.clients import wait_until

from . import batcher_client, benchmark_client, text_client

# The log's names of the page's labels.
STATISTICS = {
    "request_type=context": "Context Requests",
    "request_type=scheduled": "Scheduled Requests",
    "request_type=max": "Max Request Count",
    "request_type=active": "Active Request Count",
    "request_type=waiting": "Waiting Requests",
    "memory_type=pinned": "Runtime Pinned Memory Usage",
    "memory_type=gpu": "Runtime GPU Memory Usage",
    "memory_type=cpu": "Runtime CPU Memory Usage",
    "kv_cache_block_type=tokens_per": "Tokens per KV cache block",
    "kv_cache_block_type=used": "Used KV cache blocks",
    "kv_cache_block_type=free": "Free KV cache blocks",
    "kv_cache_block_type=max": "Max KV cache blocks",
    "kv_cache_block_type=reused": "Reused KV cache blocks",
    "kv_cache_block_type=fraction": "Fraction used KV cache blocks",
    "inflight_batcher_specific_metric=total_context_tokens": "Total Context Tokens",
    "inflight_batcher_specific_metric=micro_batch_id": "MicroBatch ID",
    "inflight_batcher_specific_metric=generation_requests": "Generation Requests",
    "inflight_batcher_specific_metric=paused_requests": "Paused Requests",
    "general_type=iteration_counter": "Iteration Counter",
    "general_type=timestamp": "Timestamp",
    "disaggregated_serving_type=kv_cache_transfer_ms": "KV cache transfer time",
    "disaggregated_serving_type=request_count": "Request count",
}
BUCKETS = ("10", "50", "100", "500", "1000", "+Inf")


def page_of(server: TritonServer) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as response:
        return response.read().decode()


def values_of(page: str) -> dict[str, str]:
    """Return values by the log's names; a line's first label other than model and version identifies it."""
    values = {}
    for line in page.splitlines():
        if line.startswith("#") or "nv_trt_llm" not in line:
            continue
        labels, value = re.sub(r"^.*?{", "{", line).split()
        names = labels.replace('"', "").strip("{}").split(",")
        values[STATISTICS[next(name for name in names if not name.startswith(("model", "version")))]] = value
    return values


def last_line(log: str) -> dict:
    line = next(line for line in reversed(log.splitlines()) if "Active Request Count" in line)
    return json.loads(re.search(r"({.*})", line).group(1).replace('\\"', '"'))


def begin_to_log(server: TritonServer) -> None:
    """Make the log verbose, so that it has the statistics; this is possible while the server runs."""
    body = json.dumps({"log_verbose_level": 1}).encode()
    with urllib.request.urlopen(f"http://{server.http}/v2/logging", body, timeout=30) as response:
        assert response.status == 200


def wait_until_still(server: TritonServer) -> None:
    """Wait until the page includes one more request, and equals the last line."""
    now_us = time.time() * 1e6
    batcher_client.run(server, [5], batcher_client.Flags(streaming=True, request_output_len=1))

    def is_still() -> bool:
        log, values = server.log_text(), values_of(page_of(server))
        is_whole = values.keys() == set(STATISTICS.values()) and "Active Request Count" in log
        if not is_whole or int(values["Timestamp"]) < now_us:
            return False
        line = last_line(log)
        same = int(values["Iteration Counter"]) == line["Iteration Counter"]
        return same and line["Active Request Count"] == 0

    wait_until(is_still)


def test_the_page_equals_the_logs_last_line(short_queue_server, prompt):
    begin_to_log(short_queue_server)
    benchmark_client.run_decoupled(short_queue_server, benchmark_client.Load([prompt] * 3, [10, 20, 30]))
    wait_until_still(short_queue_server)
    line, values = last_line(short_queue_server.log_text()), values_of(page_of(short_queue_server))
    assert line.keys() == values.keys() == set(STATISTICS.values())
    of_log = datetime.strptime(line.pop("Timestamp"), "%m-%d-%Y %H:%M:%S.%f")
    microseconds = values.pop("Timestamp")
    of_page = datetime.fromtimestamp(int(microseconds) // 1_000_000)
    of_page += timedelta(microseconds=int(microseconds[-6:]))
    assert abs(of_log - of_page) <= timedelta(seconds=1)
    assert {name: int(value) for name, value in line.items()} == {
        name: int(value) for name, value in values.items()
    }


def lengths(page: str, direction: str) -> list[int]:
    """Return the buckets of a histogram of lengths; the labels' order matters."""
    pattern = (
        rf"nv_llm_{direction}_token_len_bucket{{"
        rf'model="tensorrt_llm",response_metric_type="total_{direction}_tokens",version="1",le="%s"}}\s+(\d+)'
    )
    return [int(re.search(pattern % re.escape(bound), page).group(1)) for bound in BUCKETS]


def test_a_stream_counts_as_one_request_of_its_whole_length(short_queue_server):
    begin_to_log(short_queue_server)
    wait_until_still(short_queue_server)
    before = page_of(short_queue_server)
    flags = text_client.Flags(output_len=50, streaming=True, end_id=-1)
    text_client.run(short_queue_server, ["My name is"], flags)

    def new(direction: str) -> list[int]:
        after = lengths(page_of(short_queue_server), direction)
        return [b - a for a, b in zip(lengths(before, direction), after, strict=True)]

    wait_until(lambda: new("output")[-1] == 1)
    assert new("input") == [1, 1, 1, 1, 1, 1]
    assert new("output") == [0, 1, 1, 1, 1, 1]
