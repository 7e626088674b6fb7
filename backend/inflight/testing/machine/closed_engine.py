"""A fake engine that fails as a device does, and the check that a closed engine holds nothing."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from inflight.adapters.cache import HostAdapterCache
from inflight.build import RunningEngine
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.testing.fake_engine import FakeEngine, FakeLogits
from inflight.testing.simulation.integrity import check_integrity

from .disk import EngineBlocks


class _LoopDies(BaseException):
    """An error that the loop does not survive."""


class FailingDevice(FakeEngine):
    """A fake engine that sometimes raises, as a device does.

    Args:
        limits, seconds_per_step: As for FakeEngine.
        failure: Returns the error that the device raises in an iteration; None: it raises none.

    Attributes:
        must_die: Whether the next batch ends the loop; `has_died`: whether it has.
        batches: Iterations of the batches so far.
        outputs: Digests of their outputs.
    """

    def __init__(
        self, limits: EngineLimits, seconds_per_step: float, failure: Callable[[int], Exception | None]
    ) -> None:
        super().__init__(limits, seconds_per_step)
        self._failure = failure
        self.must_die = self.has_died = False
        self.batches: list[int] = []  # iterations
        self.outputs: list[int] = []

    def forward(self, batch: ScheduledBatch) -> FakeLogits:
        """Compute a batch, or raise."""
        self.batches.append(batch.iteration)
        if (failure := self._failure(batch.iteration)) is not None:
            raise failure
        if self.must_die:
            self.has_died = True
            raise _LoopDies
        return super().forward(batch)

    def decode(self, batch: ScheduledBatch, logits: FakeLogits) -> ModelOutput:
        """Choose tokens, and record them."""
        output = super().decode(batch, logits)
        self.outputs.append(crc32(repr((output.token_ids, output.beams)).encode()))
        return output


def check_closed(engine: RunningEngine, memories: Sequence[EngineBlocks]) -> None:
    """Check that an engine that was closed in order holds nothing.

    Args:
        engine: The engine.
        memories: The blocks of all engines so far.
    """
    scheduler, client = engine._manager._scheduler, engine.client
    check_integrity(scheduler)
    assert not scheduler.num_active, f"{scheduler.num_active} requests are still active"
    saved, num_held = scheduler.kv_cache.saved, scheduler.kv_cache.pool.num_held
    assert not num_held or (saved and saved.loads), "blocks leaked"
    stats = scheduler.stats(None)
    assert stats.num_free_blocks + num_held == stats.max_num_blocks, "blocks are not counted"
    left = (client._targets, client._queue, client._stopped_in_queue, client._stop_signals)
    assert not any(left), f"the client still has requests: {left}"
    assert not any(each.was_used_late for each in memories), "a block was written to a closed engine"
    device = engine._manager._engine
    if engine._adapters is not None and isinstance(device, FailingDevice) and not device.has_died:
        _check_adapters(engine._adapters.cache)


def _check_adapters(cache: HostAdapterCache) -> None:
    held = (cache._used, cache._waiting, cache._loads, cache._unloading, cache.waiting_weights._sizes)
    assert not any(held), f"the adapter cache still has requests: {held}"
    stored = sum(entry.num_bytes for entry in cache._entries.values())
    assert cache._num_bytes == cache._idle_bytes == stored, "bytes of adapters are lost"
    assert stored <= cache._max_bytes, f"{stored} bytes of adapters, at most {cache._max_bytes}"
