"""A host cache with made-up adapters on a fake disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from inflight.adapters.cache import HostAdapterCache
from inflight.adapters.lora_rows import CheckedAdapter
from inflight.core.request.adapter import (
    AdapterEvent,
    AdapterUpdate,
    LoraRequest,
    LoraWeights,
    Matrix,
    RawBuffer,
)
from inflight.errors import InvalidArgument, NotFound, error_from_kind

UNIT = 4
"""Size of the smallest adapter in bytes; sizes below are in this unit."""
WAIT_S = 60


def make_weights(tag: int = 0, units: int = 1) -> LoraWeights:
    data = tag.to_bytes(UNIT, "little") * units
    return LoraWeights(Matrix((1, units), "float32", RawBuffer(data)), ((1, 0, 1, 0),))


def by_id(task_id: int, weights: LoraWeights | None = None) -> LoraRequest:
    return LoraRequest(task_id=task_id, weights=weights)


@dataclass
class Folders:
    """Folders of a fake disk: their contents, how often each was read, and a gate that pauses reads."""

    adapters: dict[LoraRequest, LoraWeights | BaseException] = field(default_factory=dict)
    reads: list[LoraRequest] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    started: queue.SimpleQueue[LoraRequest] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.gate.set()

    def __call__(self, lora: LoraRequest) -> CheckedAdapter:
        key = replace(lora, weights=None)
        self.reads.append(key)
        self.started.put(key)
        assert self.gate.wait(WAIT_S)
        found = lora.weights or self.adapters.get(key) or NotFound(f"{lora.label} is nowhere")
        if isinstance(found, BaseException):
            raise found
        tag = bytes(found.weights.buffer.data)
        if tag.startswith(b"\xff"):
            raise InvalidArgument("these weights are wrong")
        return CheckedAdapter(1, tag[:1] * 16, found)


def tag_of(weights: LoraWeights) -> int:
    return int.from_bytes(bytes(weights.weights.buffer.data)[:UNIT], "little")


WRONG = make_weights(0xFF)


class Caching:
    """A cache, its fake disk, and its past updates."""

    def __init__(self, max_units: int) -> None:
        self.folders = Folders()
        self.notified: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.cache = HostAdapterCache(self.folders, max_units * UNIT, lambda: self.notified.put(None))

    def submit(self, request_id: int, lora: LoraRequest) -> None:
        self.cache.submit(request_id, lora)

    def run(self, request_id: int, lora: LoraRequest) -> AdapterUpdate:
        """Submit a request alone and return its update."""
        self.submit(request_id, lora)
        return self.next()

    def next(self) -> AdapterUpdate:
        """Return the next update that is not empty."""
        while not (update := self.cache.update()):
            self.notified.get(timeout=WAIT_S)
        return update

    def settle(self) -> AdapterUpdate:
        """Return all updates, joined, until no adapter is being read."""
        while any(each.state == "loading" for each in self.cache.list_adapters()):
            self.notified.get(timeout=WAIT_S)
        return self.cache.update()

    @property
    def states(self) -> dict[int | str | None, str]:
        return {
            each.task_id if each.task_id is not None else each.name: each.state
            for each in self.cache.list_adapters()
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause all reads within the with block."""
        self.folders.gate.clear()
        try:
            yield
        finally:
            self.folders.gate.set()


Make = Callable[..., Caching]


def errors(update: AdapterUpdate) -> dict[int, str]:
    return {each.request_id: _said(each) for each in update.events if each.error_kind}


def _said(event: AdapterEvent) -> str:
    error = error_from_kind(event.error_kind, event.error)
    return f"{error.code}: {error}"


def ready(update: AdapterUpdate) -> dict[int, int]:
    return {each.request_id: each.handle for each in update.events if not each.error_kind}
