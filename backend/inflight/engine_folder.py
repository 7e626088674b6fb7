"""Folders of plans that `scripts/build` wrote, as whoever is given one sees them. Standard library, any thread.

Beside the plans lie copies of the checkpoint's configuration and tokenizer, so a folder is served and moved alone.
What the descriptions of plans say in full, `engine.tensorrt.sidecar` reads.
"""

from __future__ import annotations

import json
from pathlib import Path

from inflight.file_names import native

_FIRST = "rank0.json"


def is_engine_folder(folder: str | Path) -> bool:
    """Return whether plans lie in a folder."""
    return (Path(native(folder)) / _FIRST).is_file()


def num_slots(folder: str | Path) -> int | None:
    """How many sequences plans can run at once; None where that cannot be read, whoever loads them says why."""
    try:
        description = json.loads((Path(native(folder)) / _FIRST).read_bytes())
        found = description["settings"]["max_batch_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if type(found) is int else None
