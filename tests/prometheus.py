"""Reads a metrics page: what a Prometheus server would see of it."""

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
        """The one series of that name with these labels among its own; KeyError if it is not one."""
        found = [value for (n, ls), value in self.values.items() if n == name and ls >= set(labels.items())]
        if len(found) != 1:
            raise KeyError(f"{len(found)} series are {name} {labels}")
        return found[0]

    def series(self, name: str, label: str) -> dict[str, float]:
        """Values of a name by one of its labels."""
        return {dict(ls)[label]: value for (n, ls), value in self.values.items() if n == name}

    def cumulative(self, name: str) -> list[float]:
        """A histogram's buckets from the narrowest to +Inf."""
        buckets = self.series(f"{name}_bucket", "le")
        return [buckets[le] for le in sorted(buckets, key=float)]

    def has(self, name: str) -> bool:
        """Whether there is a series of that name."""
        return any(n == name for n, _ in self.values)


def parse(text: str) -> Page:
    """AssertionError for a line that is no comment and no series, or a series that comes twice."""
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
    """Everything that is in the log line too, by its key there."""
    gauges = {
        gauge.log_key: page.value(family.name, **{family.label: gauge.value})
        for family in GAUGES
        if page.has(family.name)
        for gauge in family.gauges
    }
    name, label = "nv_trt_llm_disaggregated_serving_metrics", "disaggregated_serving_type"
    return gauges | {key: page.value(name, **{label: value}) for value, key in TRANSFERS.items()}
