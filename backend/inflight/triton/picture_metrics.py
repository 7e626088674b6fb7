"""Publish the counts of the process that encodes pictures on tritonserver's metrics page, when it is read.

Owns nothing; `MetricsOnDemand` calls it on its thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inflight.pictures.encoded_prompt import PictureStats
from inflight.serving.metric_table import PICTURE_FAMILIES, PictureFamily
from inflight.triton.metric_families import FamilyMaker

_log = logging.getLogger(__name__)
_FIRST_TIMEOUT_S = 1.0
_NOTHING = PictureStats(0, 0, 0.0, 0)


class PictureMetrics:
    """The metric families about pictures, which show what was counted since this object was made.

    Args:
        pb_utils: The module `triton_python_backend_utils`.
        model_name, model_version: Labels of every metric.
        read_stats: Returns the process's counts, in at most the given number of seconds; None if it cannot.
    """

    def __init__(
        self,
        pb_utils: Any,
        model_name: str,
        model_version: str,
        read_stats: Callable[[float], PictureStats | None],
    ) -> None:
        self._read_stats = read_stats
        self._updates: list[Callable[[PictureStats], None]] = []
        # If the process started before this model, its earlier counts are on the page already.
        before = read_stats(_FIRST_TIMEOUT_S) or _NOTHING
        if (family_class := getattr(pb_utils, "MetricFamily", None)) is None:
            return
        maker = FamilyMaker(family_class, {"model": model_name, "version": model_version})
        for spec in PICTURE_FAMILIES:
            try:
                self._updates.append(_made(spec, maker, before))
            except Exception as error:  # tritonserver may raise anything; other families are still published
                _log.warning("metric %s is not published: %s", spec.name, error)

    def update(self, timeout_s: float) -> None:
        """Bring the page up to date; it stays as it is if the process does not answer in time."""
        if (stats := self._read_stats(timeout_s)) is not None:
            for update in self._updates:
                update(stats)


def _made(spec: PictureFamily, maker: FamilyMaker, before: PictureStats) -> Callable[[PictureStats], None]:
    family = maker.family(spec.name, spec.help, spec.kind.upper())
    metrics = {
        value: maker.metric(family, {spec.label: value} if spec.label else {}) for value in spec.values
    }
    last = before

    def update(stats: PictureStats) -> None:
        nonlocal last
        counted = spec.read(last if stats.started_ns == last.started_ns else _NOTHING)
        for value, number in spec.read(stats).items():
            if spec.kind == "gauge":
                metrics[value].set(float(number))
            elif number > counted[value]:
                metrics[value].increment(number - counted[value])
        last = stats

    return update
