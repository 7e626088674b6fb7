"""The logits post-processors of the servers here: those of docs/logits-post-processors.md, and others.

A server loads this file by its path, from the parameter `logits_post_processor_module`.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "logits-post-processors.md"
_example = re.findall(r"^```python\n(# rules.py\n.*?)^```", PAGE.read_text(), re.S | re.M)[0]
_documented: dict = {}
exec(compile(_example, str(PAGE), "exec"), _documented)


def raise_later(req_id, logits, ids, stream_ptr, client_id):
    if len(ids[0]) >= 10:
        raise ValueError(f"client {client_id} has {len(ids[0])} tokens")


def ban_all(req_id, logits, ids, stream_ptr):
    logits.fill_(float("-inf"))


PROCESSORS = {**_documented["PROCESSORS"], "raise_later": raise_later, "ban_all": ban_all}
BATCHED = _documented["BATCHED"]
