"""Custom metrics of the fake `triton_python_backend_utils`: families, metrics, and their page.

Refuses the same calls as the real server, and writes the page in the same format. As in the server, two
objects with the same name and labels are one series. Deleting such an object endangers the real server; here
`deleted` records it. Any thread.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

_NUMBERS = {"COUNTER": 0, "GAUGE": 1, "HISTOGRAM": 2}
_KINDS = {number: name.lower() for name, number in _NUMBERS.items()}


class MetricError(Exception):
    """Stand-in for the real module's `TritonModelException`."""


@dataclass(slots=True)
class Series:
    """One line of the page, or the lines of one histogram."""

    labels: dict[str, str]
    bounds: tuple[float, ...] = ()
    value: float = 0.0
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SeriesFamily:
    """All series of one name."""

    name: str
    kind: str
    description: str
    series: list[Series] = field(default_factory=list)


class FakeMetrics:
    """The server's side of the metrics.

    Attributes:
        family_class: The `MetricFamily` of a module; it lacks the kinds that are not given.
        failures: Errors that the next calls about a family raise, by its name.
        threads: Names of the calling threads.
        calls: "set name" and the like, in order.
        deleted: Names of families of which an object was deleted.
    """

    def __init__(self, kinds: Sequence[str] = ("COUNTER", "GAUGE", "HISTOGRAM")) -> None:
        self._families: dict[str, SeriesFamily] = {}
        self.failures: dict[str, Exception] = {}
        self.threads: set[str] = set()
        self.calls: list[str] = []
        self.deleted: list[str] = []
        members: dict[str, Any] = {"server": self, **{name: _NUMBERS[name] for name in kinds}}
        self.family_class: type[MetricFamily] = type("MetricFamily", (MetricFamily,), members)

    def said(self, name: str, call: str) -> None:
        """Record a call, or raise the error that a test has planned."""
        self.threads.add(threading.current_thread().name)
        self.calls.append(f"{call} {name}")
        if failure := self.failures.get(name):
            raise failure

    def family(self, name: str, kind: str, description: str) -> SeriesFamily:
        """Return the family of this name; make it if there is none."""
        found = self._families.setdefault(name, SeriesFamily(name, kind, description))
        if found.kind != kind:
            raise AssertionError(f"two kinds of {name}: the real server ends")
        return found

    def page(self) -> str:
        """Return the text of /metrics."""
        return "".join(line + "\n" for family in self._families.values() for line in _lines(family))


class MetricFamily:
    """A model's handle of a family."""

    server: ClassVar[FakeMetrics]
    _family: SeriesFamily | None = None

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.server.said(name, "new")
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name):
            raise MetricError("Invalid metric name")
        self._family = self.server.family(name, _KINDS[kind], description)

    def Metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> Metric:
        """Return a handle of a series, which is made if it is new."""
        assert self._family is not None
        self.server.said(self._family.name, "add")
        if any(not isinstance(part, str) for pair in labels.items() for part in pair):
            raise MetricError("labels are strings")
        if (self._family.kind == "histogram") != (buckets is not None):
            raise MetricError(
                "Failed to create metric. Missing required buckets, or buckets where none belong."
            )
        for series in self._family.series:
            if series.labels == labels:
                return Metric(self.server, self._family, series)
        bounds = tuple(buckets or ())
        self._family.series.append(Series(dict(labels), bounds, 0.0, [0] * (len(bounds) + 1)))
        return Metric(self.server, self._family, self._family.series[-1])

    def __del__(self) -> None:
        if self._family is not None:
            self.server.deleted.append(self._family.name)


class Metric:
    """A model's handle of a series."""

    def __init__(self, server: FakeMetrics, family: SeriesFamily, series: Series) -> None:
        self._server = server
        self._family = family
        self._series = series

    def increment(self, value: float) -> None:
        """Add `value` to the series."""
        self._asked("increment", "counter", "gauge")
        if value < 0 and self._family.kind == "counter":
            raise MetricError("can only be incremented monotonically by non-negative values.")
        self._series.value += float(value)

    def set(self, value: float) -> None:
        """Replace the series' value."""
        self._asked("set", "gauge")
        self._series.value = float(value)

    def observe(self, value: float) -> None:
        """Add an observation."""
        self._asked("observe", "histogram")
        self._series.counts[bisect_left(self._series.bounds, value)] += 1
        self._series.value += float(value)

    def value(self) -> float:
        """Return the current value."""
        self._asked("value", "counter", "gauge")
        return self._series.value

    def _asked(self, call: str, *kinds: str) -> None:
        self._server.said(self._family.name, call)
        if self._family.kind not in kinds:
            kind = f"TRITONSERVER_METRIC_KIND_{self._family.kind.upper()}"
            raise MetricError(f"{kind} does not support {call.capitalize()}")


def _lines(family: SeriesFamily) -> Iterator[str]:
    if family.series:
        yield f"# HELP {family.name} {family.description}"
        yield f"# TYPE {family.name} {family.kind}"
    for series in family.series:
        labels = ",".join(f'{key}="{value}"' for key, value in sorted(series.labels.items()))
        if family.kind != "histogram":
            yield f"{family.name}{{{labels}}} {series.value:.16g}"
            continue
        yield f"{family.name}_count{{{labels}}} {sum(series.counts)}"
        yield f"{family.name}_sum{{{labels}}} {series.value:.16g}"
        for index, bound in enumerate([*(f"{bound:.16g}" for bound in series.bounds), "+Inf"]):
            yield f'{family.name}_bucket{{{labels},le="{bound}"}} {sum(series.counts[: index + 1])}'
