"""Convert KV cache events and debug tensors from the engine's classes to the Executor API's classes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from inflight.core.kv.kv_events import KvEvent
from inflight.core.report.reports import ReportKind, Reports
from inflight.errors import Unavailable
from inflight.executor.debug_tensors import DebugTensorsPerIteration
from inflight.executor.errors import ExecutorError
from inflight.executor.kv_cache import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiffInt,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)

if TYPE_CHECKING:
    from inflight.engine.debug_tensors import IterationTensors

ReadReports = Callable[[ReportKind, float | None], Reports]


class KVCacheEventManager:
    """Source of the KV cache's events.

    Args:
        read: Function that returns reports like `EngineClient.reports`.
        window_size: Attention window of the layers, in tokens.
    """

    def __init__(self, read: ReadReports, window_size: int) -> None:
        self._read = read
        self._window_size = window_size

    def get_latest_events(self, timeout_ms: timedelta | float | None = None) -> list[KVCacheEvent]:
        """Wait until there are events, and return all of them, oldest first.

        Args:
            timeout_ms: Time to wait, as a timedelta or milliseconds; None: no limit.

        Returns:
            The events; none after the timeout, or after the shutdown of an executor in this process.

        Raises:
            ExecutorError: The engine is in other processes, which cannot be reached.
        """
        timeout_s = timeout_ms.total_seconds() if isinstance(timeout_ms, timedelta) else timeout_ms
        if timeout_s is not None and not isinstance(timeout_ms, timedelta):
            timeout_s /= 1000
        try:
            events = self._read(ReportKind.KV_EVENTS, timeout_s).kv_events
        except Unavailable as error:
            raise ExecutorError(str(error)) from error
        return [KVCacheEvent(each.event_id, _event_data(each), self._window_size) for each in events]


def _event_data(event: KvEvent) -> KVCacheEventData:
    if event.num_blocks is not None:
        return KVCacheCreatedData([event.num_blocks, 0])  # the size of level 1 is in bytes
    if event.updated is not None:
        if event.levels[0] != event.levels[1]:
            return KVCacheUpdatedData(event.updated, KVCacheEventDiffInt(*event.levels), None)
        return KVCacheUpdatedData(event.updated, None, KVCacheEventDiffInt(*event.priorities))
    if event.stored:
        return KVCacheStoredData(
            event.parent_hash,
            [
                KVCacheStoredBlockData(
                    block.block_hash,
                    [UniqueToken(*pair) for pair in zip(block.token_ids, block.extra_ids, strict=True)],
                    block.lora_task_id,
                    0,
                    block.priority,
                )
                for block in event.stored
            ],
        )
    return KVCacheRemovedData(list(event.removed))


def debug_tensors(written: IterationTensors) -> DebugTensorsPerIteration:
    """Convert the debug tensors of an iteration."""
    import torch

    tensors = {
        name: torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]  torch declares no array types
        for name, array in written.debug_tensors.items()
    }
    return DebugTensorsPerIteration(written.iter, tensors)
