"""The Runner over plans: torch's, with a cache whose rows have to hold what a batch reads. Loop thread."""

from __future__ import annotations

from torch import Tensor

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.engine import RowOutputs
from inflight.engine.runner import TorchRunner
from inflight.engine.tensorrt.row_cache import RowCache


class TensorRtRunner(TorchRunner):
    """A model of plans, and everything that it remembers between iterations."""

    cache: RowCache

    def run(self, batch: ScheduledBatch, hidden: Tensor | None) -> RowOutputs:
        """As `Runner.run`."""
        try:
            return super().run(batch, hidden)
        except BaseException:  # whatever it is, nobody knows what is in the rows
            self.cache.forget(batch)
            raise

    def _prepare_blocks(self, batch: ScheduledBatch, fresh_blocks: list[int]) -> None:
        super()._prepare_blocks(batch, fresh_blocks)
        self.cache.prepare(batch, self.slots.num_tokens)
