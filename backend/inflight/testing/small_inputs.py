"""Adapters and prompt tables without content, for schedulers that run without a device."""

from __future__ import annotations

from inflight.core.request.adapter import LoraWeights, Matrix, RawBuffer, StoredAdapter
from inflight.core.request.prompt_table import PromptTable


def make_adapter(
    handle: int = 1, rank: int = 8, task_id: int | None = None, version: int = 0
) -> StoredAdapter:
    """A stored adapter without weights; its digest differs for every handle and version."""
    digest = handle.to_bytes(8, "big") + version.to_bytes(8, "big")
    weights = LoraWeights(Matrix((0, 0), "float32", RawBuffer(b"")), ())
    return StoredAdapter(handle, digest, handle if task_id is None else task_id, rank, weights)


def make_table(digest: bytes = b"a table", num_rows: int = 1) -> PromptTable:
    """A prompt table for models of hidden size 1."""
    return PromptTable(Matrix((num_rows, 1), "float32", RawBuffer(bytes(4 * num_rows))), digest)
