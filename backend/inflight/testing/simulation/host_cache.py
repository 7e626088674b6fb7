"""A fake of rank 0's adapter cache. Adapters arrive after a delay or never; idle ones are dropped at random.

Whether a request gets its adapter depends only on the seed and the request's id, so it is the same in all runs.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from inflight.core.request.adapter import AdapterEvent, AdapterUpdate, LoraRequest, StoredAdapter
from inflight.core.request.request import IterationInput, Origin
from inflight.errors import InvalidArgument, StepFailed
from inflight.testing.small_inputs import make_adapter

NUM_TASKS = 5
MAX_RANKS = 8
"""Largest rank of an adapter that fits."""
TOO_LARGE = 200


@dataclass(frozen=True)
class Fate:
    """Drawn outcome of a request's adapter.

    Attributes:
        delay: Iterations until the result is known.
        error: Reason of the failure; "" without one.
        is_too_large: Whether it fits no device.
    """

    delay: int
    error: str
    is_too_large: bool

    @property
    def code(self) -> str:
        """Return the code of the error with which its request ends."""
        return InvalidArgument.code if self.is_too_large else self.error


def fate_of(seed: int, request_id: int) -> Fate:
    """Draw the result for a request's adapter."""
    rng = random.Random(f"{seed} {request_id}")
    delay = rng.choice([0, 0, 0, 1, 4])
    error = rng.choice([InvalidArgument.code, StepFailed.code]) if rng.random() < 0.04 else ""
    return Fate(delay, error, not error and rng.random() < 0.03)


def content(lora: LoraRequest, version: int) -> int:
    """Return a number for an adapter's content after it was stored again `version` times.

    Two task ids have the same content at first.
    """
    task = lora.task_id or 0
    return version * NUM_TASKS + (1 if task == 2 and version == 0 else task)


def digest_of(lora: LoraRequest, version: int = 0) -> bytes:
    """Return the digest of an adapter's content after it was stored again `version` times."""
    return make_adapter(version=content(lora, version)).digest[8:]


class HostCache:
    """Implements `inflight.core.ports.AdapterCache`. Each call of `update` is one step of its time.

    Attributes:
        given: By request id, the digest of its adapter.
        failed: By request id, the time at which its adapter failed, and the code of its error.
        num_drops: Number of dropped adapters.
    """

    def __init__(self, seed: int) -> None:
        self.given: dict[int, bytes] = {}
        self.failed: dict[int, tuple[int, str]] = {}
        self.num_drops = 0
        self._seed = seed
        self._rng = random.Random(f"adapters {seed}")
        self._now = 0
        self._next_handle = 1
        self._due: dict[int, tuple[int, LoraRequest]] = {}  # (time, adapter) by request id
        self._stored: dict[LoraRequest, StoredAdapter] = {}
        self._versions: dict[LoraRequest, int] = {}
        self._users: dict[int, LoraRequest] = {}  # by request id

    def submit(self, request_id: int, lora: LoraRequest, origin: Origin | None = None) -> None:
        """Look up or store a request's adapter."""
        self._due[request_id] = self._now + fate_of(self._seed, request_id).delay, lora

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended: it no longer waits for its adapter or uses it."""
        self._due.pop(request_id, None)
        self._users.pop(request_id, None)

    def update(self) -> AdapterUpdate:
        """Return the adapters and events that have become due."""
        stored: list[StoredAdapter] = []
        events: list[AdapterEvent] = []
        for request_id, (at, lora) in list(self._due.items()):
            if at <= self._now:
                del self._due[request_id]
                events.append(self._answer(request_id, lora, stored))
        self._now += 1
        return AdapterUpdate(tuple(stored), tuple(events), self._drop())

    def _answer(self, request_id: int, lora: LoraRequest, stored: list[StoredAdapter]) -> AdapterEvent:
        fate = fate_of(self._seed, request_id)
        if fate.code:
            self.failed[request_id] = self._now, fate.code
        if fate.error:
            return AdapterEvent(request_id, error_kind=fate.error, error="no such adapter")
        if fate.is_too_large:
            stored.append(self._make(lora, 0, TOO_LARGE))
            return AdapterEvent(request_id, stored[-1].handle)
        if lora not in self._stored:
            version = self._versions.setdefault(lora, 0)
            rank = random.Random(f"rank {self._seed} {content(lora, version)}").randint(1, MAX_RANKS)
            self._stored[lora] = self._make(lora, version, rank)
            stored.append(self._stored[lora])
        self._users[request_id] = lora
        self.given[request_id] = self._stored[lora].digest
        return AdapterEvent(request_id, self._stored[lora].handle)

    def _make(self, lora: LoraRequest, version: int, rank: int) -> StoredAdapter:
        self._next_handle += 1
        adapter = make_adapter(self._next_handle - 1, rank)
        return replace(adapter, digest=digest_of(lora, version), task_id=lora.task_id)

    def _drop(self) -> tuple[int, ...]:
        used = set(self._users.values())
        idle = [lora for lora in self._stored if lora not in used]
        if not idle or self._rng.random() < 0.5:
            return ()
        lora = self._rng.choice(idle)
        self._versions[lora] += self._rng.randint(0, 1)
        self.num_drops += 1
        return (self._stored.pop(lora).handle,)


def with_adapters(
    cache: HostCache, inputs: IterationInput, is_active: Callable[[int], bool]
) -> IterationInput:
    """Add the updates of the adapter cache to an iteration's input, as `OwnInputs` does on a real engine."""
    for request_id in [i for i in (*cache._due, *cache._users) if not is_active(i)]:
        cache.forget(request_id)
    for request in inputs.new_requests:
        if request.lora is not None and not is_active(request.request_id):
            cache.submit(request.request_id, request.lora)
    return replace(inputs, adapters=cache.update())
