"""Facts about folders of plans that `scripts/build` wrote, for front ends. Standard library only, any thread.

Such a folder also has copies of the checkpoint's configuration and tokenizer, so it can be served and moved
alone. `engine.tensorrt.sidecar` reads the full descriptions of the plans.
"""

from __future__ import annotations

import json
from pathlib import Path

from inflight.file_names import native

_FIRST = "rank0.json"


def is_engine_folder(folder: str | Path) -> bool:
    """Return whether a folder contains plans."""
    return (Path(native(folder)) / _FIRST).is_file()


def num_slots(folder: str | Path) -> int | None:
    """Return the number of slots of a folder's plans; None if unreadable: loading the plans reports why."""
    try:
        description = json.loads((Path(native(folder)) / _FIRST).read_bytes())
        found = description["settings"]["max_batch_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if type(found) is int else None
