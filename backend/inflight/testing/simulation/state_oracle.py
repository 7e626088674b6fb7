"""Oracle of the cache of a model with recurrent state: a prefix is reused only up to a saved state.

The oracle keeps the set of prefixes whose states have been saved. A sequence may only reuse such a prefix. While
no snapshot has been evicted, it must reuse at least its longest prefix whose state was saved in a context.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from inflight.config import SchedulingConfig
from inflight.core.kv.kv_cache_manager import PrefixMatch
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler

from .cache_oracle import CacheOracle


class StateOracle(CacheOracle):
    """Records the saved states, and checks that sequences reuse saved prefixes.

    Attributes:
        num_from_snapshots: Number of starts from a snapshot.
        num_saves: Number of state saves in all scheduled batches.
        num_exact: Number of starts whose minimum reuse was checked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: SchedulingConfig,
        adapters: Mapping[int, bytes],
        num_snapshots: int,
    ) -> None:
        super().__init__(scheduler, config, adapters)
        self.num_from_snapshots = 0
        self.num_saves = 0
        self._num_snapshots = num_snapshots
        # By sequence key: boundaries where the context saves its state, as numbers of blocks.
        self._plans: dict[int, set[int]] = {}
        self._in_flight: dict[int, set[int]] = {}  # by sequence key: boundaries saved by batches in flight
        self._saved: set[int] = set()  # prefixes with a saved state
        # Saved prefixes whose snapshot is not replaced by a later save of the sequence.
        self._lasting: set[int] = set()

    @property
    def _is_exact(self) -> bool:
        """Whether certainly no snapshot and no block has been evicted."""
        is_roomy = self._kv_cache.num_taken_blocks <= self._kv_cache.pool.num_blocks
        return self.is_complete and is_roomy and self.num_saves < self._num_snapshots

    def _is_promised(self, llm_request: LlmRequest, match: PrefixMatch) -> bool:
        """Return whether a running sequence will save a state of this sequence after the matched prefix."""
        if not self._is_exact:
            return match.is_promised
        prefixes = self._prefixes(llm_request, len(llm_request.tokens) - 1)
        return any(
            max(len(match.block_ids), self._num_known[runner.key]) < place <= len(prefixes)
            and self._chains[runner.key][place - 1] == prefixes[place - 1]
            for runner in self._scheduler.running_sequences
            for place in self._plans.get(runner.key, ())
        )

    def admitted(self, llm_request: LlmRequest, num_tokens: int) -> None:
        """Record the start of a sequence, from a snapshot if it reuses tokens, and check its reuse."""
        self._plans[llm_request.key] = set()
        self._in_flight[llm_request.key] = set()
        self.num_from_snapshots += num_tokens > 0
        super().admitted(llm_request, num_tokens)

    def _check_found(self, llm_request: LlmRequest, num_full: int, num_begun: int, found: int) -> None:
        assert not num_begun, "a part of a block was copied, which has no state"
        prefixes = self._prefixes(llm_request, len(llm_request.tokens) - 1)
        self._plans[llm_request.key] = {place for place in (found, len(prefixes)) if place > num_full}
        assert not num_full or prefixes[num_full - 1] in self._saved, (
            "a snapshot was found that was not saved"
        )
        if self._is_exact:
            self.num_exact += 1
            least = max(
                (place for place, p in enumerate(prefixes[:found], 1) if p in self._lasting), default=0
            )
            assert num_full >= least, f"request {llm_request.request_id} did not find a saved prefix"

    def scheduled(self, batch: ScheduledBatch, starts: Iterable[LlmRequest]) -> None:
        """Record taken blocks and the states that a batch saves."""
        super().scheduled(batch, starts)
        owners = {slot: r for r in self._scheduler.running_sequences for slot in r.slots}
        for save in batch.state_saves:
            assert save.num_tokens % self._size == 0, "a state was saved inside a block"
            self._in_flight[owners[save.slot].key].add(save.num_tokens // self._size)
        self.num_saves += len(batch.state_saves)
        snapshots = [save.snapshot for save in batch.state_saves]
        assert len(set(snapshots)) == len(snapshots), "two states were saved in one snapshot"

    def updated(self, rows: Collection[LlmRequest]) -> None:
        """Record an update that has confirmed rows of these sequences, which had not ended before."""
        super().updated(rows)
        for llm_request in rows:
            key = llm_request.key
            for place in [p for p in self._in_flight.get(key, ()) if p <= self._num_known[key]]:
                self._in_flight[key].remove(place)
                prefix = self._chains[key][place - 1]
                self._saved.add(prefix)
                if place in self._plans[key]:
                    self._lasting.add(prefix)
