"""The metrics of this server under vLLM's names, for dashboards and routers made for vLLM.

They are computed from the text of Triton's metrics page, and the OpenAI endpoint's `/metrics` appends them
to this page. Names, types, units and labels are those of vLLM's V1 engine; the buckets of histograms are
this server's. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from inflight.serving.metrics_page import escaped

_SERIES = re.compile(r"^((?:inflight|nv_trt_llm)_(?!picture)\w+)\{([^\n]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_THE_MODEL = ("model", "version")
_SERVED = "tensorrt_llm"

Labels: TypeAlias = tuple[tuple[str, str], ...]


class _EngineMetrics:
    """The metrics of one engine: values by metric name and labels, without the labels that name the model."""

    def __init__(self) -> None:
        self.series: dict[str, dict[Labels, str]] = {}

    def number(self, name: str, **labels: str) -> float:
        """Return the value of one series; raise KeyError if the page lacks it."""
        return float(self.series[name][tuple(sorted(labels.items()))])

    def by_label(self, name: str) -> dict[str, float]:
        """Return the values of a metric with one label, by label value; raise KeyError if the page lacks it."""
        return {labels[0][1]: float(value) for labels, value in self.series[name].items()}


Read = Callable[[_EngineMetrics], Mapping[Labels, float]]


@dataclass(frozen=True, slots=True)
class _VllmMetric:
    """How a metric that vLLM exports is computed from the metrics of this server.

    Attributes:
        name: Name without the prefix `vllm:`.
        kind, help: Type and help text on the page.
        read: Function that returns the values by labels, without the engine's labels. It raises KeyError if
            the page lacks a value.
    """

    name: str
    kind: str
    help: str
    read: Read


def _gauge(name: str, help: str, family: str, **labels: str) -> _VllmMetric:
    return _VllmMetric(name, "gauge", help, lambda engine: {(): engine.number(family, **labels)})


def _counter(name: str, help: str, *families: str) -> _VllmMetric:
    """Return an alias whose value is the sum of these counters of this server."""
    return _VllmMetric(
        name, "counter", help, lambda engine: {(): sum(engine.number(family) for family in families)}
    )


def _loaded_bytes(engine: _EngineMetrics) -> Mapping[Labels, float]:
    return {(): sum(engine.by_label("inflight_kv_cache_onboard_bytes_total").values())}


def _stored_bytes(engine: _EngineMetrics) -> Mapping[Labels, float]:
    """Return the bytes written to the fastest tier, as a block that is written to two is saved once."""
    written = engine.by_label("inflight_kv_cache_offload_bytes_total")
    return {(): written["host"] or written["disk"]}


def _finished(engine: _EngineMetrics) -> Mapping[Labels, float]:
    counts = {"stop": 0.0, "length": 0.0, "abort": 0.0}
    for reason, count in engine.by_label("inflight_finished_sequences_total").items():
        counts[_FINISHED_REASONS[reason]] += count
    return {(("finished_reason", reason),): count for reason, count in counts.items()}


def _lora_requests(engine: _EngineMetrics) -> Mapping[Labels, float]:
    """Return one series with the adapters in use as labels and the time in Unix seconds as value.

    Without adapters there is no series.
    """
    num_pages = engine.number("inflight_adapter_pages", use="all")
    if not num_pages:
        return {}

    def names(family: str) -> str:
        if family not in engine.series:  # no request has named an adapter yet
            return ""
        return ",".join(name for name, count in engine.by_label(family).items() if count)

    labels = (
        ("max_lora", f"{num_pages:.0f}"),
        ("running_lora_adapters", names("inflight_adapter_running_requests")),
        ("waiting_lora_adapters", names("inflight_adapter_waiting_requests")),
    )
    return {labels: engine.number("nv_trt_llm_general_metrics", general_type="timestamp") / 1e6}


def _cache_config(engine: _EngineMetrics) -> Mapping[Labels, float]:
    blocks = engine.by_label("nv_trt_llm_kv_cache_block_metrics")
    labels = (("block_size", f"{blocks['tokens_per']:.0f}"), ("num_gpu_blocks", f"{blocks['max']:.0f}"))
    return {labels: 1.0}


_FINISHED_REASONS = {
    "END_ID": "stop",
    "STOP_WORDS": "stop",
    "LENGTH": "length",
    "TIMED_OUT": "abort",
    "CANCELLED": "abort",
}
_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_HITS, _MISSES = "inflight_kv_cache_hit_tokens_total", "inflight_kv_cache_missed_tokens_total"

_ALIASES: tuple[_VllmMetric, ...] = (
    _gauge("num_requests_running", "Sequences in the last iteration", _REQUESTS, request_type="scheduled"),
    _gauge("num_requests_waiting", "Sequences that do not run", _REQUESTS, request_type="waiting"),
    _gauge("kv_cache_usage_perc", "Used KV blocks, 0 to 1", _BLOCKS, kv_cache_block_type="fraction"),
    _gauge(
        "gpu_cache_usage_perc", "Former name of kv_cache_usage_perc", _BLOCKS, kv_cache_block_type="fraction"
    ),
    _counter("num_preemptions_total", "Pauses", "inflight_preemptions_total"),
    _counter("prompt_tokens_total", "Prompt tokens processed", "inflight_processed_prompt_tokens_total"),
    _counter("generation_tokens_total", "Tokens generated", "inflight_generated_tokens_total"),
    _counter("prefix_cache_queries_total", "Tokens of full blocks looked for in the cache", _HITS, _MISSES),
    _counter("prefix_cache_hits_total", "Tokens of full blocks found there", _HITS),
    _counter("spec_decode_num_draft_tokens_total", "Draft tokens verified", "inflight_draft_tokens_total"),
    _counter(
        "spec_decode_num_accepted_tokens_total",
        "Draft tokens accepted",
        "inflight_accepted_draft_tokens_total",
    ),
    _VllmMetric("kv_offload_load_bytes_total", "counter", "Bytes of saved KV blocks loaded", _loaded_bytes),
    _VllmMetric("kv_offload_store_bytes_total", "counter", "Bytes of KV blocks saved", _stored_bytes),
    _VllmMetric("request_success_total", "counter", "Sequences that have ended, by reason", _finished),
    _VllmMetric("lora_requests_info", "gauge", "Adapters of running and waiting requests", _lora_requests),
    _VllmMetric("cache_config_info", "gauge", "The KV cache", _cache_config),
)
_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "time_to_first_token_seconds": (
        "inflight_time_to_first_token_seconds",
        "From arrival to the first token",
    ),
    "inter_token_latency_seconds": (
        "inflight_inter_token_latency_seconds",
        "Between tokens of a sequence",
    ),
    "time_per_output_token_seconds": (
        "inflight_inter_token_latency_seconds",
        "Former name of inter_token_latency_seconds",
    ),
    "e2e_request_latency_seconds": (
        "inflight_end_to_end_seconds",
        "From arrival to the final response",
    ),
    "request_queue_time_seconds": (
        "inflight_queue_time_seconds",
        "From arrival to the first iteration",
    ),
    "request_prompt_tokens": ("inflight_prompt_tokens", "Prompt tokens of requests that have ended"),
    "request_generation_tokens": ("inflight_output_tokens", "Tokens of sequences that have ended"),
}
"""vLLM's name without its prefix → this server's name, and the help text."""


def vllm_aliases(page: str, model_name: str | None = None) -> str:
    """Return vLLM's metrics in Prometheus' text format, computed from Triton's metrics page.

    Args:
        page: Text of Triton's `/metrics`. An alias is left out if the page lacks its metrics; "" gives "".
        model_name: Value of the label `model_name` for the model that `/v1` serves, which is tensorrt_llm,
            or if there is no such model, the first by name. Other engines, such as a draft model's, keep
            Triton's name. None: all engines keep it.
    """
    engines = _read(page)
    lines: list[str] = []
    for alias in _ALIASES:
        series = list(_of_engines(engines, alias.read, model_name))
        lines += _family(alias.name, alias.kind, alias.help, series)
    for name, (ours, help) in _HISTOGRAMS.items():
        lines += _histogram(engines, name, ours, help, model_name)
    return "".join(f"{line}\n" for line in lines)


def _read(page: str) -> dict[Labels, _EngineMetrics]:
    """Return the metrics of each engine on the page, by the labels that name its model.

    The served engine is first.
    """
    engines: dict[Labels, _EngineMetrics] = {}
    for name, text, value in _SERIES.findall(page):
        labels = dict(_LABEL.findall(text))
        model = tuple((key, labels.pop(key, "")) for key in _OF_THE_MODEL)
        series = engines.setdefault(model, _EngineMetrics()).series
        series.setdefault(name, {})[tuple(sorted(labels.items()))] = value
    return dict(sorted(engines.items(), key=lambda item: (dict(item[0])["model"] != _SERVED, item[0])))


def _own_labels(number: int, model: Labels, model_name: str | None) -> Labels:
    name = dict(model)["model"] if model_name is None or number else escaped(model_name)
    return (("engine", str(number)), ("model_name", name))


def _of_engines(
    engines: Mapping[Labels, _EngineMetrics], read: Read, model_name: str | None
) -> Iterator[tuple[str, Labels, float]]:
    for number, (model, engine) in enumerate(engines.items()):
        try:
            values = read(engine)
        except KeyError:
            continue
        for labels, value in values.items():
            yield "", (*_own_labels(number, model, model_name), *labels), value


def _histogram(
    engines: Mapping[Labels, _EngineMetrics], name: str, ours: str, help: str, model_name: str | None
) -> list[str]:
    series: list[tuple[str, Labels, float]] = []
    for number, (model, engine) in enumerate(engines.items()):
        if f"{ours}_bucket" not in engine.series:
            continue
        own = _own_labels(number, model, model_name)
        buckets = sorted(engine.by_label(f"{ours}_bucket").items(), key=lambda bucket: float(bucket[0]))
        series += [("_bucket", (*own, ("le", le)), count) for le, count in buckets]
        series += [(part, own, engine.number(f"{ours}{part}")) for part in ("_sum", "_count")]
    return _family(name, "histogram", help, series)


def _family(name: str, kind: str, help: str, series: list[tuple[str, Labels, float]]) -> list[str]:
    if not series:
        return []
    lines = [f"# HELP vllm:{name} {help}", f"# TYPE vllm:{name} {kind}"]
    for part, labels, value in series:
        text = ",".join(f'{key}="{label}"' for key, label in labels)
        lines.append(f"vllm:{name}{part}{{{text}}} {value:.16g}")
    return lines
