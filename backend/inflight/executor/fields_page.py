"""Generate docs/executor-fields.md from the table of fields."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from inflight.executor.fields import FIELDS, FieldNote, Treatment

_HEAD = """# Fields of the Executor API

This page says what each field of TensorRT-LLM's [Executor API](executor.md) does in `inflight.executor`. Some
fields are refused or ignored. Such a field may always have its default value, or a value that the table names
after "except". If it has any other value:

- A **refused** field raises `NotSupported` with the reason in the table. A field of a configuration raises it
  when the `Executor` is created. A field of a request raises it when the request is enqueued.
- An *ignored* field has no effect, and is logged once. Most ignored fields would change only speed or memory use.

`scripts/write_configs` writes this page.
"""


def page() -> str:
    """Return the text of docs/executor-fields.md: a table for each class of the Executor API."""
    parts = [_HEAD]
    for owner, notes in groupby(FIELDS, key=lambda note: note.owner.__name__):
        parts += [f"## {owner}\n", *_rows(notes), ""]
    return "\n".join(parts)


def _rows(notes: Iterator[FieldNote]) -> Iterator[str]:
    yield "| field | effect |"
    yield "|---|---|"
    for note in notes:
        yield f"| `{note.name}` | {_prefix(note)}{note.text} |"


def _prefix(note: FieldNote) -> str:
    accepted = ", ".join(str(value) or '""' for value in note.neutral)
    beside = f" (except {accepted})" if accepted else ""
    return {
        Treatment.WORKS: "",
        Treatment.IGNORED: f"*ignored*{beside}: ",
        Treatment.REFUSED: f"**refused**{beside}: ",
    }[note.treatment]


def main() -> None:
    """Write the page named on the command line."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
