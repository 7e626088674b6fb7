"""Faults to plant: in the adapters of rows, the content of pages, and the waiting for pages."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.recover.recovery import Recovery
from inflight.core.request.adapter import StoredAdapter
from inflight.core.request.llm_request import LlmRequest, RequestGroup
from inflight.core.schedule.adapter_pages import AdapterPages
from inflight.core.schedule.batch import AdapterLoad, ScheduledBatch
from tests.simulation.faults_of_batches import change_batches

Patch = pytest.MonkeyPatch


def blocks_shared_across_adapters(patch: Patch) -> None:
    scope = PrefixIdentity.scope
    patch.setattr(
        PrefixIdentity,
        "scope",
        lambda identity, root, adapter=b"", table=b"": scope(identity, root, b"", table),
    )


def adapter_of_another_row(patch: Patch) -> None:
    def swap(batch: ScheduledBatch) -> ScheduledBatch:
        if not batch.starts:
            return batch
        pages = [start.adapter for start in batch.starts]
        starts = zip(batch.starts, [*pages[1:], pages[0]])
        return dataclasses.replace(
            batch, starts=tuple(dataclasses.replace(start, adapter=page) for start, page in starts)
        )

    change_batches(patch, swap)


def page_overwritten_in_use(patch: Patch) -> None:
    """Plant a fault: an adapter's last page is also another adapter's."""
    load = AdapterPages._load

    def load_into_used(pages: AdapterPages, adapter: StoredAdapter):
        resident = load(pages, adapter)
        used = [each for each in pages._used_by.values() if each is not resident]
        if used:
            victim = min(used, key=lambda each: each.handle)
            last = pages._loads[-1]
            pages._loads[-1] = AdapterLoad(adapter, (*last.pages[:-1], victim.pages[-1]))
        return resident

    patch.setattr(AdapterPages, "_load", load_into_used)


def used_adapter_evicted(patch: Patch) -> None:
    """Plant a fault: an adapter counts as idle as soon as one of its users has left."""
    release = AdapterPages.release

    def release_for_all(pages: AdapterPages, key: int) -> None:
        resident = pages._used_by.get(key)
        if resident is not None and resident.num_users > 1:
            for other in [k for k, each in pages._used_by.items() if each is resident and k != key]:
                del pages._used_by[other]
            resident.num_users = 1
        release(pages, key)

    patch.setattr(AdapterPages, "release", release_for_all)


def failed_load_counted(patch: Patch) -> None:
    """Plant a fault: adapters that a failed batch was to load count as loaded."""
    patch.setattr(Recovery, "_users_of", lambda *_: [])


def users_of_failed_load_go_on(patch: Patch) -> None:
    """Plant a fault: after a failed load the adapter is loaded again, but its users are not computed again."""
    users_of = Recovery._users_of

    def nobody(recovery: Recovery, batch: ScheduledBatch) -> list[LlmRequest]:
        users_of(recovery, batch)
        return []

    patch.setattr(Recovery, "_users_of", nobody)


def pages_taken_before_their_turn(patch: Patch) -> None:
    """Plant a fault: no pages are kept for the first sequence that waits for them."""
    patch.setattr(AdapterPages, "claim", lambda *_: None)


def not_given_back(patch: Patch) -> None:
    patch.setattr(AdapterPages, "release", lambda *_: None)


def started_without_waiting_for_its_adapter(patch: Patch) -> None:
    patch.setattr(RequestGroup, "is_held", property(lambda group: group.awaits_guide))


FAULTS_OF_ADAPTERS = (
    blocks_shared_across_adapters,
    adapter_of_another_row,
    page_overwritten_in_use,
    used_adapter_evicted,
    failed_load_counted,
    pages_taken_before_their_turn,
    not_given_back,
    started_without_waiting_for_its_adapter,
)

FAULTS_OF_ADAPTERS_IN_PIPELINES = (failed_load_counted, users_of_failed_load_go_on)
