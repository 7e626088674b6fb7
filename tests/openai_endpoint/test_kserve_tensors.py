"""Parts of a request that a remote Triton server cannot take are refused, not left out."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.request import Request
from inflight.errors import Unsupported
from inflight.openai.kserve_tensors import input_tensors

ROWS = Matrix((1, 2), "float32", RawBuffer(bytes(8)))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"prompt_table": PromptTable.of(ROWS)}, "a prompt table"),
        ({"rotary_table": RotaryTable.of(ROWS, 0)}, "a rotary table"),
        ({"identity": PrefixIdentity(extra_ids=(1,))}, "extra ids of a prompt"),
    ],
)
def test_parts_without_a_tensor_are_refused(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(Unsupported, match=f"/v1 cannot send {part} to a Triton server on another host"):
        input_tensors(Request(1, (1, 2), 3, **fields))
