"""The pages for adapters on the device: their owners, and the running sequences that use them.

When the first sequence with an adapter starts, the adapter takes as many pages as its rank needs; they need not be
adjacent. When its last sequence leaves, the adapter stays in its pages and is **idle**: when another adapter needs
pages, idle adapters are evicted, the longest idle first. An adapter in use is not evicted.

Sequences whose adapters find too few pages are overtaken by others. So that none waits for ever, the first such
sequence makes a **claim**: until its adapter has its pages, no sequence behind it takes pages, or starts to use a
claimed adapter. The claim covers the idle adapters, and as many of the oldest adapters in use as it needs; these
become idle in time, because every running sequence ends. The claim is computed anew at every admission, with the
same result, since the order of adapters in use does not change.

Deterministic, so that all ranks get the same result. Used on the loop thread. Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from inflight.core.request.adapter import StoredAdapter
from inflight.core.schedule.batch import AdapterLoad, EngineLimits
from inflight.errors import InvalidArgument


@dataclass(slots=True, eq=False)
class _Resident:
    """An adapter that has pages on the device."""

    handle: int
    pages: tuple[int, ...]
    num_users: int = 0
    is_void: bool = False  # its pages are freed as soon as no sequence uses it


class AdapterPages:
    """The device's pages for adapters. The next batch contains the loads (`collect_loads`).

    Attributes:
        num_loads: Number of times that an adapter was loaded to the device, since the start.
        num_evictions: Number of times that an adapter was evicted for another one, since the start.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.num_loads = 0
        self.num_evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forget all residents, even if the records are inconsistent; counts since the start stay."""
        self._free = list(range(self._limits.num_adapter_pages))  # a heap: the lowest are taken first
        self._residents: dict[int, _Resident] = {}  # by handle, oldest first
        self._idle: OrderedDict[int, _Resident] = OrderedDict()  # longest idle first
        self._num_idle_pages = 0
        self._used_by: dict[int, _Resident] = {}  # by sequence key
        self._loads: list[AdapterLoad] = []

    @property
    def count(self) -> int:
        """Number of adapter pages on the device."""
        return self._limits.num_adapter_pages

    @property
    def num_residents(self) -> int:
        """Number of adapters on the device."""
        return len(self._residents)

    @property
    def num_free(self) -> int:
        """Number of pages that are free or belong to idle adapters."""
        return len(self._free) + self._num_idle_pages

    def num_pages(self, adapter: StoredAdapter) -> int:
        """Return how many pages an adapter takes."""
        return self._limits.adapter_pages(adapter.rank)

    def check_fits(self, adapter: StoredAdapter) -> None:
        """Raise InvalidArgument if an adapter would not fit even if it were the only one."""
        limits = self._limits
        if adapter.rank > limits.max_adapter_rank or self.num_pages(adapter) > limits.num_adapter_pages:
            room = min(limits.max_adapter_rank, limits.num_adapter_pages * limits.adapter_page_rank)
            raise InvalidArgument(
                f"an adapter of rank {adapter.rank} does not fit: the device has room for rank {room} "
                "(lora_cache_max_adapter_size, lora_cache_gpu_memory_fraction)"
            )

    # ---------------------------------------------------------------- who may start

    def may_start(self, adapter: StoredAdapter, claimed: Collection[int] | None) -> bool:
        """Whether a sequence may start with this adapter now.

        Args:
            adapter: The sequence's adapter.
            claimed: The handles of `claim`, if an earlier sequence waits for pages; otherwise None.
        """
        if adapter.handle in self._residents:
            return claimed is None or adapter.handle not in claimed
        return claimed is None and self.num_pages(adapter) <= self.num_free

    def claim(self, adapter: StoredAdapter) -> frozenset[int]:
        """Return the handles of the adapters that no other sequence may start to use until `adapter` has its
        pages."""
        claimed = set(self._idle)
        lacking = self.num_pages(adapter) - self.num_free
        # The pages of void adapters, which become free too, are not counted, so one adapter more than needed may
        # be claimed.
        for handle, resident in self._residents.items():
            if lacking <= 0:
                break
            if resident.num_users:
                claimed.add(handle)
                lacking -= len(resident.pages)
        return frozenset(claimed)

    # ---------------------------------------------------------------- who uses what

    def acquire(self, key: int, adapter: StoredAdapter) -> None:
        """Start a sequence with an adapter, which is loaded if it is not on the device; `may_start` must be
        true."""
        assert key not in self._used_by, f"sequence {key} has an adapter already"
        resident = self._residents.get(adapter.handle)
        if resident is None:
            resident = self._load(adapter)
        self._wake(resident)
        resident.num_users += 1
        self._used_by[key] = resident

    def _load(self, adapter: StoredAdapter) -> _Resident:
        count = self.num_pages(adapter)
        while len(self._free) < count:
            assert self._idle, f"adapter {adapter.handle} does not fit on the device"
            self._drop(next(iter(self._idle.values())))
            self.num_evictions += 1
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        self._loads.append(AdapterLoad(adapter, pages))
        self.num_loads += 1
        resident = self._residents[adapter.handle] = _Resident(adapter.handle, pages)
        return resident

    def _wake(self, resident: _Resident) -> None:
        if self._idle.pop(resident.handle, None) is not None:
            self._num_idle_pages -= len(resident.pages)

    def release(self, key: int) -> None:
        """Release a sequence's adapter, if it has one."""
        resident = self._used_by.pop(key, None)
        if resident is None:
            return
        resident.num_users -= 1
        if resident.num_users:
            return
        if resident.is_void:
            self._free_pages(resident)
        else:
            self._idle[resident.handle] = resident
            self._num_idle_pages += len(resident.pages)

    def first_page(self, key: int) -> int:
        """Return the first page of a sequence's adapter, which identifies the adapter on the device; -1 without
        one."""
        resident = self._used_by.get(key)
        return -1 if resident is None else resident.pages[0]

    def collect_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the adapters that took pages since the last call."""
        loads, self._loads = tuple(self._loads), []
        return loads

    # ---------------------------------------------------------------- what is no longer there

    def forget(self, handles: Iterable[int]) -> None:
        """Let no sequence start with these adapters' pages: the adapters are no longer stored, or their pages may
        be incomplete. The pages are freed as soon as no sequence uses them.
        """
        for handle in handles:
            if (resident := self._residents.get(handle)) is not None:
                self._drop(resident)

    def _drop(self, resident: _Resident) -> None:
        del self._residents[resident.handle]
        self._wake(resident)
        resident.is_void = True
        if not resident.num_users:
            self._free_pages(resident)

    def _free_pages(self, resident: _Resident) -> None:
        for page in resident.pages:
            heapq.heappush(self._free, page)
