"""Every metric and label that deploy/ queries is on the page of a server that has answered requests."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from inflight.openai.metric_aliases import vllm_aliases
from inflight.serving.metric_table import LEVELS
from tests.prometheus import Page, parse

from .clients import ask, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
OF_PROMETHEUS = {"instance", "namespace", "pod"}
"""Labels that Prometheus adds to scraped metrics."""
BY_NAME = {family.name: family.label for family in LEVELS if not family.values}
"""Metrics that have no series before a request names an adapter; test_adapters.py tests those."""
NUM_TOKENS = 4 + 3 + 9
LANGUAGE = {
    "sum",
    "max",
    "by",
    "rate",
    "histogram_quantile",
    "label_values",
    "__rate_interval",
    "model",
    "le",
}


def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana" / "dashboards" / "inflight.json").read_text())


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for rule in yaml.safe_load((DEPLOY / "helm" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        yield rule["seriesQuery"]


def alerts() -> list[dict]:
    groups = yaml.safe_load((DEPLOY / "helm" / "inflight" / "files" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def matchers(text: str) -> list[tuple[str, str, str]]:
    found = MATCHER.findall(text)
    assert ",".join(f'{label}{how}"{value}"' for label, how, value in found) == text.replace(" ", "")
    return found


@pytest.fixture(scope="module")
def page(fake_server) -> Page:
    """Return the metrics page of a server that has answered requests of several kinds."""

    def text() -> str:
        with urllib.request.urlopen(f"http://{fake_server.metrics}/metrics", timeout=30) as response:
            return response.read().decode()

    ask(fake_server.grpc, input_ids=[3, 1, 4], request_output_len=4, end_id=-1)
    ask(fake_server.grpc, "ensemble", text_input="def f", max_tokens=3, end_id=-1)
    ask(
        fake_server.grpc, input_ids=[3, 1, 4] * 6, request_output_len=9, prompt_lookup_num_tokens=2, end_id=-1
    )
    wait_until(lambda: parse(text()).value("inflight_generated_tokens_total") >= NUM_TOKENS)
    wait_until(lambda: parse(text()).value("nv_trt_llm_request_metrics", request_type="active") == 0)
    last = text()
    return parse(last + vllm_aliases(last))


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_queried_series_are_on_the_metrics_page(page, expression):
    selectors = SELECTOR.findall(expression) or [(name, "") for name in re.findall(r"nv_\w+", expression)]
    assert selectors
    labels_of_all = set()
    for name, text in selectors:
        if name in BY_NAME:
            labels_of_all |= {BY_NAME[name]}
            continue
        found = [dict(labels) for series, labels in page.values if series == name]
        assert found, f"{name} is not on the page"
        wanted = {
            label: value for label, how, value in matchers(text) if how == "=" and not value.startswith("$")
        }
        named = {label for label, _, _ in matchers(text)}
        assert any(wanted.items() <= labels.items() for labels in found), f"{name} has no {wanted}"
        assert named <= {label for labels in found for label in labels} | OF_PROMETHEUS
        labels_of_all |= {label for labels in found for label in labels}
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
    assert grouped <= labels_of_all | OF_PROMETHEUS
    rest = re.sub(r"by \([^)]*\)", "", SELECTOR.sub("", expression))
    bare = set(re.findall(r"[a-zA-Z_]\w*", rest)) - LANGUAGE - OF_PROMETHEUS
    assert not bare or bare == {"nv_trt_llm_request_metrics"}, "a metric without the dashboard's variables"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_series_of_alerts_are_on_the_metrics_page(page, rule):
    for name, _, text in re.findall(r"\b((?:nv|inflight)_\w+)(\{([^}]*)\})?", rule["expr"]):
        wanted = {label: value for label, _, value in matchers(text)}
        assert any(
            series == name and wanted.items() <= dict(labels).items() for series, labels in page.values
        )


def test_every_panel_has_a_description_a_unit_and_its_own_place():
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"] and panel["targets"]
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids)) > 30


def test_legends_show_the_grouping_labels():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.search(r"by \(([^)]*)\) \((?:rate|inflight|nv)", target["expr"])
            assert shown == ({grouped[1]} - {"le"} if grouped else set()), target


def test_metrics_under_vllms_names_equal_the_page(page):
    for theirs, ours in {
        "vllm:generation_tokens_total": "inflight_generated_tokens_total",
        "vllm:prompt_tokens_total": "inflight_processed_prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count": "inflight_time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_sum": "inflight_end_to_end_seconds_sum",
    }.items():
        assert page.value(theirs, model_name="tensorrt_llm", engine="0") == pytest.approx(page.value(ours))
    assert page.value("vllm:generation_tokens_total") >= NUM_TOKENS
    assert page.kinds["vllm:time_to_first_token_seconds"] == "histogram"
