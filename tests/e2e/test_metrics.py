"""The metrics page of the real server: it is complete and consistent, and equals the log."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from datetime import datetime

import pytest

from inflight.server.launch import ServerOptions, TritonServer
from inflight.serving.metric_table import COUNTERS, GAUGES, HISTOGRAMS, LENGTHS, TIMESTAMP, Batching
from inflight.testing.fake_server import serve_fake
from inflight.triton import metrics_on_demand
from tests.prometheus import Page, parse, shown

from .clients import Stream, ask, wait_until
from .conftest import FAKE_VOCABULARY

PROMPT = [3, 1, 4, 1, 5]
LONG = 2000


def page_of(server: TritonServer) -> Page:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as response:
        return parse(response.read().decode())


def log_lines(server: TritonServer) -> list[dict]:
    """Return every statistics line; the log escapes their quotes."""
    text = server.log_text().replace('\\"', '"')
    return [json.loads(line) for line in re.findall(r"\{\"Timestamp\".*?\}", text)]


def active(page: Page) -> float:
    return page.value("nv_trt_llm_request_metrics", request_type="active")


def ended(page: Page) -> float:
    """Return the number of ended sequences and failed requests."""
    counts = page.series("inflight_finished_sequences_total", "finish_reason")
    return sum(counts.values()) + sum(page.series("inflight_failed_requests_total", "code").values())


def wait_idle(server: TritonServer, before: Page | None = None, sequences: int = 0) -> Page:
    """Wait until nothing is active, `sequences` have ended since `before`, and page and log agree.

    Without `before`, everything ended so far is on the page: a further request is sent, and the page must
    include it.
    """
    oldest_us = time.time() * 1e6
    if before is None:
        complete(server, tokens=1)

    def is_idle() -> bool:
        page, lines = page_of(server), log_lines(server)
        of_page = page.series("nv_trt_llm_general_metrics", "general_type")
        is_last = bool(lines) and lines[-1]["Iteration Counter"] == of_page["iteration_counter"]
        is_complete = ended(page) - ended(before) == sequences if before else of_page["timestamp"] > oldest_us
        return is_last and active(page) == 0 and is_complete

    wait_until(is_idle)
    return page_of(server)


def complete(server: TritonServer, count: int = 1, tokens: int = 8, **tensors) -> None:
    """Send requests one after another, and wait until each is answered."""
    tensors = {"input_ids": PROMPT, "end_id": -1, "pad_id": 0} | tensors
    for _ in range(count):
        answers = ask(server.grpc, request_output_len=tokens, **tensors)
        assert all(answer.error is None for answer in answers)


def grown(before: Page, after: Page, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


def test_every_metric_family_is_on_the_page(fake_server):
    before = wait_idle(fake_server)
    complete(fake_server)
    page = wait_idle(fake_server, before, 1)
    for family in GAUGES:
        if family.batching is not Batching.STATIC:
            assert page.kinds[family.name] == "gauge"
            assert set(page.series(family.name, family.label)) == {gauge.value for gauge in family.gauges}
    for histogram in HISTOGRAMS:
        assert len(page.cumulative(histogram.name)) > 10
    for lengths in LENGTHS:
        assert page.kinds[lengths.name] == "histogram"
        assert set(page.series(f"{lengths.name}_bucket", "le")) == {*map(str, lengths.bounds), "+Inf"}
    for counter in COUNTERS:
        assert page.kinds[counter.name] == "counter" and page.has(counter.name)
    assert page.value("inflight_preemptions_total", model="tensorrt_llm", version="1") >= 0


def test_the_page_equals_the_log_line_and_gauges_fall_when_idle(fake_server):
    before = wait_idle(fake_server)
    complete(fake_server, 3)
    page = shown(wait_idle(fake_server, before, 3))
    line = log_lines(fake_server)[-1]
    seconds = datetime.strptime(line.pop(TIMESTAMP), "%m-%d-%Y %H:%M:%S.%f").timestamp()
    assert page.pop(TIMESTAMP) == round(seconds * 1e6)
    assert page == line
    idle = ("Active Request Count", "Scheduled Requests", "Waiting Requests", "Used KV cache blocks")
    assert [page[key] for key in idle] == [0, 0, 0, 0]
    assert page["Free KV cache blocks"] == page["Max KV cache blocks"] > 0
    assert page["Max KV cache blocks"] * page["Tokens per KV cache block"] == 8192
    assert page["Max Request Count"] > 0
    assert page["Runtime CPU Memory Usage"] > 10_000_000


def test_the_page_counts_answered_requests_at_once(fake_server):
    """No other request is in flight, so the page waits until the engine has published its metrics.

    It waits for a limited time: on a busy machine a page may lack requests, if its scrape took as long as that.
    """
    num_complete = 0
    for _ in range(20):
        before = wait_idle(fake_server)
        threads = [threading.Thread(target=complete, args=(fake_server,)) for _ in range(13)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        begun_s = time.monotonic()
        count = ended(page_of(fake_server)) - ended(before)
        assert count == 13 or time.monotonic() - begun_s >= metrics_on_demand._TIMEOUT_S
        num_complete += count == 13
        if num_complete == 3:
            return
    raise AssertionError(f"{num_complete} of 20 pages were complete at once")


def test_gauges_show_running_and_waiting_requests(fake_server):
    """Four long requests fill the KV cache; the fifth waits in the queue."""
    with Stream(fake_server.grpc) as stream:
        for number in range(5):
            stream.send(
                "tensorrt_llm", f"runs {number}", input_ids=[number + 1] * 40, request_output_len=LONG, end_id=-1,
                pad_id=0, streaming=True,
            )  # fmt: skip

        def is_full() -> bool:
            page = shown(page_of(fake_server))
            wanted = {"Active Request Count": 5, "Scheduled Requests": 4, "Waiting Requests": 1}
            return wanted.items() <= page.items() and 0 < page["Fraction used KV cache blocks"] <= 1

        wait_until(is_full)
        stream.cancel()
    page = shown(wait_idle(fake_server))
    assert (page["Active Request Count"], page["Used KV cache blocks"]) == (0, 0)


def test_histograms_count_every_request(fake_server):
    before = wait_idle(fake_server)
    complete(fake_server, 3, tokens=8)
    complete(fake_server, 2, tokens=60, input_ids=[7] * 20)
    after = wait_idle(fake_server, before, 5)
    assert grown(before, after, "inflight_finished_sequences_total", finish_reason="LENGTH") == 5
    for name in ("time_to_first_token_seconds", "queue_time_seconds", "end_to_end_seconds", "prompt_tokens",
                 "output_tokens"):  # fmt: skip
        assert grown(before, after, f"inflight_{name}_count") == 5, name
        assert grown(before, after, f"inflight_{name}_bucket", le="+Inf") == 5, name
    assert grown(before, after, "inflight_inter_token_latency_seconds_count") == 3 * 7 + 2 * 59
    assert grown(before, after, "inflight_prompt_tokens_sum") == 3 * 5 + 2 * 20
    assert grown(before, after, "inflight_output_tokens_sum") == 3 * 8 + 2 * 60
    # A step takes 2 ms.
    assert grown(before, after, "inflight_end_to_end_seconds_sum") > 0.002 * (3 * 8 + 2 * 60)
    assert grown(before, after, "inflight_inter_token_latency_seconds_bucket", le="0.001") == 0
    for histogram in HISTOGRAMS:
        buckets = after.cumulative(histogram.name)
        assert buckets == sorted(buckets) and buckets[-1] == after.value(f"{histogram.name}_count")


def test_lengths_are_counted_in_their_buckets(fake_server):
    before = wait_idle(fake_server)
    complete(fake_server, tokens=10, input_ids=[2] * 50)
    complete(fake_server, tokens=101, input_ids=[2] * 51)
    after = wait_idle(fake_server, before, 2)

    def new(name: str) -> list[float]:
        return [b - a for a, b in zip(before.cumulative(name), after.cumulative(name), strict=True)]

    assert new("nv_llm_input_token_len") == [0, 1, 2, 2, 2, 2]
    assert new("nv_llm_output_token_len") == [1, 1, 1, 2, 2, 2]
    assert (
        grown(before, after, "nv_llm_input_token_len_sum", response_metric_type="total_input_tokens") == 101
    )
    assert (
        grown(before, after, "nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") == 111
    )


def test_a_repeated_prompt_is_counted_as_reused(fake_server):
    prompt = [(17 * i * i + 5) % FAKE_VOCABULARY for i in range(4 * 64 + 1)]
    first = wait_idle(fake_server)
    complete(fake_server, input_ids=prompt)
    before = wait_idle(fake_server, first, 1)
    complete(fake_server, input_ids=prompt)
    after = wait_idle(fake_server, before, 1)
    assert grown(before, after, "inflight_kv_cache_hit_tokens_total") == 4 * 64
    assert grown(before, after, "inflight_kv_cache_missed_tokens_total") == 0


def test_a_stop_is_counted_and_timed(fake_server):
    before = wait_idle(fake_server)
    with Stream(fake_server.grpc) as stream:
        stream.send("tensorrt_llm", "stopped", input_ids=PROMPT, request_output_len=LONG, streaming=True)
        stream.receive()
        stream.send("tensorrt_llm", "stopped", stop=True, input_ids=[0], request_output_len=0)
        assert {str(answer.error) for _, answer in stream.until_all_final()} == {"None"}
    after = wait_idle(fake_server, before, 1)
    assert grown(before, after, "inflight_finished_sequences_total", finish_reason="CANCELLED") == 1
    assert grown(before, after, "inflight_cancel_to_free_seconds_count") == 1
    assert grown(before, after, "inflight_cancel_to_free_seconds_sum") > 0


@pytest.fixture(scope="module")
def static_server(elsewhere):
    """V1 batching on a fake engine."""
    settings = {
        "fake_engine": f"vocab={FAKE_VOCABULARY},step_us=0",
        "gpt_model_type": "V1",
        "max_sequence_length": "2048",
        "max_tokens_in_paged_kv_cache": "8192",
        "stats_check_period_ms": "1",
    }
    with serve_fake(settings=settings, options=ServerOptions(log_verbose=True)) as server:
        yield server


@pytest.mark.exhaustive
def test_static_batching_has_a_family_of_its_own(static_server):
    before = wait_idle(static_server)
    complete(static_server, tokens=8)
    page = wait_idle(static_server, before, 1)
    line = log_lines(static_server)[-1]
    del line[TIMESTAMP]
    values = shown(page)
    del values[TIMESTAMP]
    assert values == line
    assert not page.has("nv_trt_llm_inflight_batcher_metrics")
    assert page.series("nv_trt_llm_v1_metrics", "v1_specific_metric") == {
        "total_context_tokens": len(PROMPT),
        "total_generation_tokens": 8,
        "empty_generation_slots": 0,
    }


def test_triton_counts_requests_per_model_and_the_engine_counts_all(fake_server):
    def counts() -> dict[str, float]:
        page = page_of(fake_server)
        models = ("ensemble", "tensorrt_llm", "preprocessing", "postprocessing")
        found = {model: page.value("nv_inference_request_success", model=model) for model in models}
        return found | {"engine": page.value("inflight_finished_sequences_total", finish_reason="LENGTH")}

    before = counts()
    ask(fake_server.grpc, "ensemble", text_input="def f", max_tokens=3, end_id=-1)
    wait_until(lambda: counts()["engine"] == before["engine"] + 1)
    wait_until(lambda: counts()["ensemble"] == before["ensemble"] + 1)
    after = counts()
    unchanged = ("tensorrt_llm", "preprocessing", "postprocessing")
    assert [after[model] - before[model] for model in unchanged] == [0, 0, 0]


def test_tritons_compute_time_of_a_decoupled_model_excludes_generation(fake_server):
    name = "nv_inference_compute_infer_duration_us"
    before = page_of(fake_server).value(name, model="tensorrt_llm")
    ask(fake_server.grpc, input_ids=[3, 1, 4], request_output_len=200)
    after = page_of(fake_server).value(name, model="tensorrt_llm")
    assert after - before < 200_000, "200 tokens take 400 ms"
