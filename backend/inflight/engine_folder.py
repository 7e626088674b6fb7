"""Facts about folders of TensorRT plans that `scripts/build` wrote, for front ends.

Such a folder also has copies of the checkpoint's configuration and tokenizer, so that it can be served
without the checkpoint. `engine.tensorrt.sidecar` reads the full descriptions of the plans. Imports only the
standard library; any thread.
"""

from __future__ import annotations

import json
from pathlib import Path

from inflight.file_names import native

_FIRST = "rank0.json"


def is_engine_folder(folder: str | Path) -> bool:
    """Return whether a folder contains TensorRT plans."""
    return (Path(native(folder)) / _FIRST).is_file()


def num_slots(folder: str | Path) -> int | None:
    """Return the number of slots of a folder's plans.

    Returns None if it cannot be read; loading the plans then reports the error.
    """
    try:
        description = json.loads((Path(native(folder)) / _FIRST).read_bytes())
        found = description["settings"]["max_batch_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if type(found) is int else None
