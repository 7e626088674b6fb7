"""Generator of docs/executor-fields.md from the table of fields. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from inflight.executor.fields import FIELDS, FieldNote, Treatment

_HEAD = """# Fields of the Executor API

What each field of `inflight.executor` does here. What is **refused** raises `NotSupported` with this reason,
when an `Executor` is made or a request enqueued. What is *ignored* changes nothing but time and memory, and is
logged once. The default never is either.

`scripts/write_configs` writes this page.
"""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for owner, notes in groupby(FIELDS, key=lambda note: note.owner.__name__):
        parts += [f"## {owner}\n", *_rows(notes), ""]
    return "\n".join(parts)


def _rows(notes: Iterator[FieldNote]) -> Iterator[str]:
    yield "| field | here |"
    yield "|---|---|"
    for note in notes:
        yield f"| `{note.name}` | {_prefix(note)}{note.text} |"


def _prefix(note: FieldNote) -> str:
    accepted = ", ".join(str(value) or '""' for value in note.neutral)
    beside = f" (but for {accepted})" if accepted else ""
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
