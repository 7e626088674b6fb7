"""The places of the tensors in a safetensors file, by its header. Standard library only."""

from __future__ import annotations

import json
import os
from typing import Any, cast


def tensor_ranges(file: int) -> list[tuple[int, int]] | None:
    """Return the positions of each tensor's first byte and of the byte after its last one, in order.

    Args:
        file: The descriptor of an open file.

    Returns:
        None if the file has no such header. The file may be shorter than the header says.
    """
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > os.fstat(file).st_size:
        return None
    try:
        header = cast(dict[str, Any], json.loads(os.pread(file, length, 8)))
        offsets = [each["data_offsets"] for name, each in header.items() if name != "__metadata__"]
        return sorted((8 + length + int(begin), 8 + length + int(end)) for begin, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
