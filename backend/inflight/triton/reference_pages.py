"""Write the tables in docs/tensors.md, metrics.md, openai.md and settings.md from the declarations in the code.

`scripts/write_configs` runs it, and tests check that the pages equal its output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from inflight.core.report.metrics import ServiceMetrics
from inflight.core.request.sampling_config import CONTROLS
from inflight.serving.metric_table import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LENGTHS,
    LEVELS,
    PICTURE_FAMILIES,
    PICTURES_MODEL,
    CounterFamily,
    PictureFamily,
)
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import ADDITIONAL_OUTPUTS, OUTPUTS
from inflight.tensors.spec import TensorSpec, Vocabulary
from inflight.triton.settings_page import settings_reference

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def fill_in(page: str, tables: str) -> str:
    """Return the page with its text between the markers replaced by `tables`."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"


# ---------------------------------------------------------------------- docs/tensors.md


def tensor_tables() -> str:
    """Return the tables of inputs and outputs in Markdown.

    Inputs that are not implemented are in a table of their own.
    """
    parts = ["## Inputs", "", *_inputs(spec for spec in INPUTS.specs if spec.built), ""]
    parts += ["Inputs that are declared but not implemented yet:", ""]
    parts += [*_inputs((spec for spec in INPUTS.specs if not spec.built), neutral=True), ""]
    parts += ["## Outputs", "", *_outputs(OUTPUTS.specs + ADDITIONAL_OUTPUTS)]
    return "\n".join(parts)


def _inputs(specs: Iterable[TensorSpec], neutral: bool = False) -> Iterator[str]:
    extra = (" accepted values |", "---|") if neutral else ("", "")
    yield "| name | in `ensemble` | type | shape | meaning |" + extra[0]
    yield "|---|---|---|---|---|" + extra[1]
    for spec in specs:
        yield _row(spec) + (f" {spec.asks_for_nothing} |" if neutral else "")


def _outputs(specs: Iterable[TensorSpec]) -> Iterator[str]:
    head = "| name | in `ensemble` | type | shape | meaning | requested by |"
    yield f"{head} in each response of a stream |"
    yield "|---|---|---|---|---|---|---|"
    for spec in specs:
        asked_by = f"`{spec.asked_by}`" if spec.asked_by else "–"
        yield f"{_row(spec)} {asked_by} | {spec.in_stream.value if spec.in_stream else '–'} |"


def _row(spec: TensorSpec) -> str:
    names = " ".join(f"`{name}`" for name in spec.names(Vocabulary.TOKENS)) or "–"
    text_names = " ".join(f"`{name}`" for name in spec.names(Vocabulary.TEXT)) or "–"
    return f"| {names} | {text_names} | {spec.dtype} | {spec.wire_shape} | {spec.meaning} |"


# ---------------------------------------------------------------------- docs/openai.md


def body_table() -> str:
    """Return a table in Markdown of the numeric sampling controls among the fields of OpenAI's request bodies."""
    return "\n".join(["| field | default | meaning |", "| --- | --- | --- |", *_body_rows()])


def _body_rows() -> Iterator[str]:
    for control in CONTROLS.values():
        if (field := control.body) is not None and field.is_number:
            meaning = field.meaning or control.meaning
            yield f"| `{field.name}` | {field.default:g} | {meaning[0].upper()}{meaning[1:]} |"


# ---------------------------------------------------------------------- docs/metrics.md


def metric_tables() -> str:
    """Return the tables of gauges, histograms and counters, in Markdown."""
    parts = [
        "## Gauges",
        "",
        *_gauges(),
        "",
        "The following gauges are not in the log line:",
        "",
        *_counters(LEVELS),
        "",
    ]
    parts += ["## Histograms", "", *_histograms(), ""]
    parts += ["Upper bounds of the buckets, in addition to +Inf:", "", *_bounds(), ""]
    parts += ["## Counters", "", *_counters(COUNTERS), ""]
    parts += [
        "## Pictures",
        "",
        "Servers that encode [pictures](pictures.md) have additional metrics, with the label "
        f'`model="{PICTURES_MODEL}"`:',
        "",
        *_counters(PICTURE_FAMILIES),
    ]
    return "\n".join(parts)


def _gauges() -> Iterator[str]:
    yield "| metric | unit | meaning | in the log line |"
    yield "|---|---|---|---|"
    for family in GAUGES:
        only = f" (only with {family.batching.value})" if family.batching else ""
        yield f"| **`{family.name}`** | | {family.help}{only} | |"
        for gauge in family.gauges:
            label = f'`{family.label}="{gauge.value}"`'
            yield f"| {label} | {gauge.unit or '–'} | {gauge.meaning} | `{gauge.log_key}` |"


def _histograms() -> Iterator[str]:
    yield "| metric | unit | meaning | label |"
    yield "|---|---|---|---|"
    for histogram in HISTOGRAMS:
        yield f"| `{histogram.name}` | {histogram.unit} | {histogram.help} | – |"
    for lengths in LENGTHS:
        label = f'`{lengths.label}="{lengths.value}"`'
        yield f"| `{lengths.name}` | {lengths.unit} | {lengths.help} | {label} |"


def _bounds() -> Iterator[str]:
    nothing = ServiceMetrics().snapshot()
    by_bounds: dict[tuple[float, ...], list[str]] = {}
    for histogram in HISTOGRAMS:
        by_bounds.setdefault(histogram.read(nothing).bounds, []).append(histogram.name)
    for lengths in LENGTHS:
        by_bounds.setdefault(lengths.bounds, []).append(lengths.name)
    for bounds, names in by_bounds.items():
        numbers = ", ".join(format(bound, ".16g") for bound in bounds)
        yield f"- {', '.join(f'`{name}`' for name in names)}: {numbers}"


def _counters(families: Iterable[CounterFamily | PictureFamily]) -> Iterator[str]:
    yield "| metric | unit | meaning | label |"
    yield "|---|---|---|---|"
    for family in families:
        values = f": {', '.join(family.values)}" if family.values else ""
        label = f"`{family.label}`{values}" if family.label else "–"
        yield f"| `{family.name}` | {family.unit} | {family.help} | {label} |"


def main(docs: Path) -> None:
    """Rewrite the pages in the folder `docs`."""
    pages = {
        "tensors.md": tensor_tables(),
        "metrics.md": metric_tables(),
        "openai.md": body_table(),
        "settings.md": settings_reference(),
    }
    for name, tables in pages.items():
        page = docs / name
        page.write_text(fill_in(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
