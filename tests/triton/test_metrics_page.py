"""docs/metrics.md matches what is published."""

from __future__ import annotations

import json
import re
from pathlib import Path

from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.serving.metric_table import FAMILIES, PICTURE_FAMILIES
from inflight.triton.reference_pages import fill_in, metric_tables

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_metrics_page_matches_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == fill_in(text, metric_tables()), "run scripts/write_configs"


def test_every_family_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{family.name}`" in text for family in (*FAMILIES, *PICTURE_FAMILIES)) and len(FAMILIES) > 15


def test_the_queries_use_existing_metrics() -> None:
    """Queries name a histogram by its _bucket, _sum and _count series."""
    text = PAGE.read_text(encoding="utf-8")
    asked = {
        name
        for language, query in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
        if not language
        for name in re.findall(r"inflight_\w+", query)
    }
    names = {family.name for family in (*FAMILIES, *PICTURE_FAMILIES)}
    assert len(asked) >= 6
    assert all(re.sub(r"_(bucket|sum|count)$", "", name) in names for name in asked), asked


def test_the_log_line_on_the_page_has_the_real_keys() -> None:
    (line,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    stats = IterationCounts(1, 0, 8, 300, 300, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert list(json.loads(line)) == list(stats.log_fields(0.0, MemoryUsage()))
