"""Values of the server's metrics page under vLLM's names, types and labels."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from inflight.core.kv.store_stats import StoreStats, TierStats
from inflight.core.report.metrics import MetricsSnapshot, ServiceMetrics
from inflight.core.report.stats import AdapterStats
from inflight.core.request.stop import FinishReason
from inflight.openai.metric_aliases import vllm_aliases
from inflight.pictures.encoded_prompt import PictureStats
from inflight.serving.metrics_page import pictures_page
from tests.openai_endpoint.serving import fake_engine, served
from tests.prometheus import parse
from tests.triton.test_metrics import NOW, STATS, stage

COUNTERS = {
    "vllm:num_preemptions_total": 2, "vllm:prompt_tokens_total": 40, "vllm:generation_tokens_total": 55,
    "vllm:prefix_cache_queries_total": 128, "vllm:prefix_cache_hits_total": 96,
    "vllm:kv_offload_load_bytes_total": 364, "vllm:kv_offload_store_bytes_total": 700,
    "vllm:spec_decode_num_draft_tokens_total": 20, "vllm:spec_decode_num_accepted_tokens_total": 11,
}  # fmt: skip
GAUGES = {
    "vllm:num_requests_running": 6, "vllm:num_requests_waiting": 4, "vllm:kv_cache_usage_perc": 0.333333,
    "vllm:gpu_cache_usage_perc": 0.333333,
}  # fmt: skip
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "time_to_first_token",
    "vllm:inter_token_latency_seconds": "inter_token_latency",
    "vllm:time_per_output_token_seconds": "inter_token_latency",
    "vllm:e2e_request_latency_seconds": "end_to_end",
    "vllm:request_queue_time_seconds": "queue_time",
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "output_tokens",
}
OF_ADAPTERS = {"max_lora": "8", "running_lora_adapters": "terse,tidy", "waiting_lora_adapters": "late"}


SAVED = StoreStats(
    100, 7, 700, 3, 300,
    (
        TierStats("host", 950, 6, 600, 7, 700, 2, 200, 1, 100),
        TierStats("disk", 5000, 6, 984, 6, 984, 1, 164, 0, 0),
    ),
)  # fmt: skip


@pytest.fixture
def triton_page() -> Iterator[tuple[str, str]]:
    """Yield a page, and the URL at which a fake Triton serves it."""
    text = page_of(observed().snapshot())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield text, f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
        thread.join()


def observed() -> ServiceMetrics:
    metrics = ServiceMetrics(
        adapters=AdapterStats(3, 2, 8, 4, 5, 1),
        num_preemptions=2, num_hit_tokens=96, num_missed_tokens=32, num_prompt_tokens=40,
        num_generated_tokens=55, num_draft_tokens=20, num_accepted_draft_tokens=11,
        block_store=SAVED,
    )  # fmt: skip
    metrics.running_by_adapter, metrics.waiting_by_adapter = Counter(terse=1, tidy=2), Counter(late=1)
    for number, reason in enumerate(set(FinishReason) - {FinishReason.NOT_FINISHED}, start=1):
        metrics.finished[reason] = number
    for number, name in enumerate(sorted(set(HISTOGRAMS.values())), start=1):
        for value in (0.002, 0.3, 700.0):
            getattr(metrics, name).observe(value, number)
    return metrics


def page_of(metrics: MetricsSnapshot) -> str:
    with stage() as on:
        on.publish(STATS, metrics)
        return on.pb_utils.metrics.page()


def test_counters_and_gauges_have_the_values_types_and_labels():
    page = parse(vllm_aliases(page_of(observed().snapshot())))
    for kind, wanted in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, value in wanted.items():
            assert page.kinds[name] == kind
            assert page.value(name, model_name="tensorrt_llm", engine="0") == pytest.approx(value)
    assert page.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="300") == 1


def test_bytes_are_those_of_files_if_no_block_is_saved_in_host_memory():
    metrics = ServiceMetrics(block_store=replace(SAVED, tiers=SAVED.tiers[1:]))
    page = parse(vllm_aliases(page_of(metrics.snapshot())))
    assert page.value("vllm:kv_offload_store_bytes_total") == 984
    assert page.value("vllm:kv_offload_load_bytes_total") == 164


def test_finish_reasons_have_the_names_of_vllm():
    metrics = observed()
    reasons = parse(vllm_aliases(page_of(metrics.snapshot()))).series(
        "vllm:request_success_total", "finished_reason"
    )
    ended = metrics.finished
    assert reasons == {
        "stop": ended[FinishReason.END_ID] + ended[FinishReason.STOP_WORDS],
        "length": ended[FinishReason.LENGTH],
        "abort": ended[FinishReason.CANCELLED] + ended[FinishReason.TIMED_OUT],
    }


@pytest.mark.parametrize(("name", "field"), HISTOGRAMS.items())
def test_a_histogram_has_this_servers_observations(name, field):
    metrics = observed().snapshot()
    page = parse(vllm_aliases(page_of(metrics)))
    ours = getattr(metrics, field)
    assert page.kinds[name] == "histogram"
    cumulative = [sum(ours.counts[: place + 1]) for place in range(len(ours.counts))]
    assert page.cumulative(name) == cumulative
    assert page.value(f"{name}_count", engine="0") == ours.num_observations == cumulative[-1]
    assert page.value(f"{name}_sum", engine="0") == pytest.approx(ours.total)


def test_adapters_are_listed_with_a_timestamp():
    page = parse(vllm_aliases(page_of(observed().snapshot())))
    assert page.value("vllm:lora_requests_info", **OF_ADAPTERS) == pytest.approx(NOW)


def test_without_adapters_there_is_no_adapter_metric():
    page = parse(vllm_aliases(page_of(ServiceMetrics().snapshot())))
    assert not page.has("vllm:lora_requests_info") and page.has("vllm:prompt_tokens_total")


def test_the_model_name_may_be_given():
    page = parse(vllm_aliases(page_of(ServiceMetrics().snapshot()), "llama"))
    assert {dict(labels)["model_name"] for _, labels in page.values} == {"llama"}
    assert 'model_name="a\\"b\\\\c"' in vllm_aliases(page_of(ServiceMetrics().snapshot()), 'a"b\\c')


def test_metrics_of_pictures_belong_to_no_engine():
    page = page_of(observed().snapshot())
    assert vllm_aliases(page + pictures_page(PictureStats(1, 2, 3.0, 4))) == vllm_aliases(page)
    drafts = page.replace('model="tensorrt_llm"', 'model="tensorrt_llm_draft"')
    aliases = vllm_aliases(page + drafts + pictures_page(PictureStats(1, 2, 3.0, 4)))
    assert aliases == vllm_aliases(page + drafts)


def test_two_models_have_two_engine_labels():
    text = page_of(observed().snapshot())
    page = parse(vllm_aliases(text + text.replace('version="1"', 'version="2"')))
    assert page.series("vllm:generation_tokens_total", "engine") == {"0": 55, "1": 55}


@pytest.mark.parametrize("draft", ["a_draft", "tensorrt_llm_draft"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_draft_engine_does_not_get_the_served_models_name(draft: str, is_first: bool):
    served = page_of(observed().snapshot())
    other = page_of(ServiceMetrics().snapshot()).replace('model="tensorrt_llm"', f'model="{draft}"')
    page = parse(vllm_aliases(other + served if is_first else served + other, "llama"))
    tokens = "vllm:generation_tokens_total"
    assert page.series(tokens, "model_name") == {"llama": 55, draft: 0}
    assert page.series(tokens, "engine") == {"0": 55, "1": 0}


def test_the_endpoint_returns_tritons_page_and_the_aliases(triton_page):
    """The endpoint returns Triton's page unchanged, then vLLM's metric names with the model name of /v1."""
    text, triton_url = triton_page
    with fake_engine() as client, served(client, metrics_url=triton_url) as url:
        answer = httpx.get(f"{url}/metrics", timeout=30)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text.startswith(text)
    page = parse(answer.text)
    assert page.value("vllm:generation_tokens_total", model_name="demo") == 55
    assert page.value("inflight_generated_tokens_total", model="tensorrt_llm") == 55


def test_aliases_of_absent_metrics_are_left_out():
    assert vllm_aliases("") == ""
    assert vllm_aliases('nv_inference_count{model="resnet",version="1"} 3\n') == ""
    page = parse(vllm_aliases('inflight_generated_tokens_total{model="m",version="1"} 7\n'))
    assert [name for name, _ in page.values] == ["vllm:generation_tokens_total"]
