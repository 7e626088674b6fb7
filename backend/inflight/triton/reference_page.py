"""The tables of docs/tensors.md, written from the table of tensors so that they cannot disagree with it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from inflight.triton.tensor_spec import TensorSpec, Vocabulary
from inflight.triton.tensors import ADDITIONAL_OUTPUTS, INPUTS, OUTPUTS

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def fill_in(page: str) -> str:
    """The page with what stands between its markers written anew."""
    return between_markers(page, tables())


def between_markers(page: str, text: str) -> str:
    """The page with `text` in place of what stands between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def tables() -> str:
    """Inputs and outputs, those that work first."""
    parts = ["## Inputs", "", *_inputs(spec for spec in INPUTS.specs if spec.built), ""]
    parts += ["Inputs that are declared and not built yet:", ""]
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
    head = "| name | in `ensemble` | type | shape | meaning | asked for by its name or |"
    yield f"{head} in each response of a stream |"
    yield "|---|---|---|---|---|---|---|"
    for spec in specs:
        asked_by = f"`{spec.asked_by}`" if spec.asked_by else "–"
        yield f"{_row(spec)} {asked_by} | {spec.in_stream.value if spec.in_stream else '–'} |"


def _row(spec: TensorSpec) -> str:
    names = " ".join(f"`{name}`" for name in spec.names(Vocabulary.TOKENS)) or "–"
    text_names = " ".join(f"`{name}`" for name in spec.names(Vocabulary.TEXT)) or "–"
    return f"| {names} | {text_names} | {spec.dtype} | {spec.wire_shape} | {spec.meaning} |"


def main() -> None:
    """Rewrite the page named on the command line."""
    path = Path(sys.argv[1])
    path.write_text(fill_in(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
