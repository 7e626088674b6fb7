"""Parse a metrics page like a Prometheus server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inflight.serving.metric_table import GAUGES, TRANSFERS

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Page:
    """Values by name and labels, and kinds by family."""

    values: dict[tuple[str, Labels], float]
    kinds: dict[str, str]

    def value(self, name: str, **labels: str) -> float:
        """Return the one series of this name that has these labels; KeyError unless there is exactly one."""
        found = [value for (n, ls), value in self.values.items() if n == name and ls >= set(labels.items())]
        if len(found) != 1:
            raise KeyError(f"{len(found)} series are {name} {labels}")
        return found[0]

    def series(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a name by one of its labels."""
        return {dict(ls)[label]: value for (n, ls), value in self.values.items() if n == name}

    def cumulative(self, name: str) -> list[float]:
        """Return a histogram's buckets from the narrowest to +Inf."""
        buckets = self.series(f"{name}_bucket", "le")
        return [buckets[le] for le in sorted(buckets, key=float)]

    def has(self, name: str) -> bool:
        """Return whether there is a series of this name."""
        return any(n == name for n, _ in self.values)


def parse(text: str) -> Page:
    """Parse a page; AssertionError for an invalid line or a repeated series."""
    values: dict[tuple[str, Labels], float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:4]
            kinds[name] = kind
        if line.startswith("#") or not line:
            continue
        match = _LINE.fullmatch(line)
        assert match, line
        key = match["name"], frozenset(_LABEL.findall(match["labels"] or ""))
        assert key not in values, line
        values[key] = float(match["value"])
    return Page(values, kinds)


def shown(page: Page) -> dict[str, float]:
    """Return all values that the log line has too, by its keys."""
    gauges = {
        gauge.log_key: page.value(family.name, **{family.label: gauge.value})
        for family in GAUGES
        if page.has(family.name)
        for gauge in family.gauges
    }
    name, label = "nv_trt_llm_disaggregated_serving_metrics", "disaggregated_serving_type"
    return gauges | {key: page.value(name, **{label: value}) for value, key in TRANSFERS.items()}
