"""Servers behind llm-d's router: the pool selects them, and the metrics page has what the router reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import yaml

from inflight.parameter_spec import KV_EVENTS
from tests.commands import eventually
from tests.openai_endpoint.serving import fake_engine, served

from .chart import by_kind, documents, needs_helm, pod_templates, render

FOLDER = Path(__file__).parents[2] / "deploy" / "llm-d"
VALUES = yaml.safe_load((FOLDER / "values.yaml").read_text())
POOL = yaml.safe_load((FOLDER / "inference-pool.yaml").read_text())
SPECS = {
    "queued requests": "nv_trt_llm_request_metrics{request_type=waiting}",
    "running requests": "nv_trt_llm_request_metrics{request_type=scheduled}",
    "KV cache utilization": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
    "block size": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
    "number of blocks": "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
}
"""The metrics that llm-d's router reads of pods with the label `triton-tensorrt-llm`."""


def read(page: str, spec: str) -> float:
    """Return the value of a metric by the router's rules: the first series of the family that has all labels."""
    found = re.fullmatch(r"(\w+)\{(\w+)=(\w+)\}", spec)
    assert found is not None
    name, label, value = found.groups()
    assert f"# TYPE {name} gauge" in page
    for line in page.splitlines():
        series, _, number = line.rpartition(" ")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
        if series.startswith(f"{name}{{") and labels.get(label) == value:
            return float(number)
    raise AssertionError(f"no series for {spec}")


def test_the_router_reads_the_metrics_page() -> None:
    with fake_engine() as engine, served(engine) as url:
        body = {"model": "demo", "prompt": [5] * 40, "max_tokens": 3}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

        def values() -> dict[str, float]:
            page = httpx.get(f"{url}/metrics").text
            return {name: read(page, spec) for name, spec in SPECS.items()}

        # The counts are those of an iteration, and the answer is sent before the next one.
        assert eventually(lambda: values()["running requests"] == 0)
        found = values()
    assert found["queued requests"] == 0
    assert 0 <= found["KV cache utilization"] <= 1
    assert found["block size"] > 0 and found["number of blocks"] > 0


@needs_helm
def test_the_pool_selects_the_pods_and_the_routers_ports_are_open() -> None:
    manifests = documents(render("-f", FOLDER / "values.yaml"))
    (template,) = pod_templates(manifests)
    labels = template["metadata"]["labels"]
    assert POOL["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "triton-tensorrt-llm"
    (container,) = template["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    assert {port["number"] for port in POOL["spec"]["targetPorts"]} <= ports
    policy = by_kind(manifests)["NetworkPolicy"]
    allowed = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert {"openai", 5557, 5558} <= set(allowed)


def test_the_values_turn_on_kv_events_at_the_open_ports() -> None:
    flag, text = VALUES["flags"]
    config = KV_EVENTS.parse(text)
    assert flag == "--kv-events-config"
    assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    assert json.loads(text).keys() == {"endpoint", "replay_endpoint"}
