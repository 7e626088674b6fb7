"""Adapters in host memory: `inflight.core.ports.AdapterCache`, with a limit in bytes.

Owns the record of which adapters are stored, in use, and being read. Reading, checking and hashing run on a
thread of the cache, so that the loop never waits for them; the loop thread calls `submit`, `update` and
`forget`. Any thread may list, load and unload adapters. Independent of files and models: a function that loads
an adapter is an argument.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from inflight.adapters.lora_rows import CheckedAdapter
from inflight.adapters.waiting_weights import WaitingWeights
from inflight.core.request.adapter import AdapterEvent, AdapterUpdate, LoraRequest, StoredAdapter
from inflight.core.request.request import Origin
from inflight.errors import (
    BadAdapter,
    InflightError,
    InvalidArgument,
    NotFound,
    RequestError,
    StepFailed,
    Unavailable,
    without_places,
)
from inflight.log_lines import REQUEST_ID
from inflight.near_words import did_you_mean, listed

_log = logging.getLogger(__name__)

_MAX_PROBLEMS = 4096
"""Maximum number of adapters whose errors are kept."""

_State = Literal["loading", "idle", "in use", "unloading"]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A stored adapter, or one that is being read.

    Attributes:
        task_id: The adapter's task id; None for an adapter with a name or a path.
        name: The adapter's name; "": it has none.
        path: The adapter's path below `lora_dir`, as in requests; "": it has none.
        state: loading: the adapter is being read. idle: it may be evicted. in use: requests use it.
            unloading: it was unloaded, and earlier requests still use it.
        rank: The largest low-rank dimension; 0 while the adapter is being read.
        num_bytes: The size in host memory, in bytes.
        users: Number of requests that use the adapter or wait for it.
    """

    task_id: int | None
    name: str
    path: str
    state: _State
    rank: int = 0
    num_bytes: int = 0
    users: int = 0


@dataclass(eq=False, slots=True)
class _HeldAdapter:
    """An adapter in host memory, and how many requests use it."""

    key: LoraRequest
    adapter: StoredAdapter
    users: int = 0
    is_announced: bool = False
    is_unloaded: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.adapter.weights.weights.buffer)

    @property
    def info(self) -> AdapterInfo:
        state: _State = "unloading" if self.is_unloaded else "in use" if self.users else "idle"
        key = self.key
        return AdapterInfo(
            key.task_id, key.name, key.path, state, self.adapter.rank, self.num_bytes, self.users
        )


class _WaitingRequest(NamedTuple):
    """A request that waits for its adapter: what it names or contains, and its origin for log lines."""

    lora: LoraRequest
    origin: Origin | None


@dataclass(eq=False, slots=True)
class _PendingAdapter:
    """An adapter to read, and the requests that wait for it, some of which contain its weights."""

    waiting: dict[int, _WaitingRequest] = field(default_factory=dict[int, _WaitingRequest])
    is_ordered: bool = False  # requested by `HostAdapterCache.load`
    ordered_by: str = ""  # id of the client's request that called it; "": none
    done: Future[AdapterInfo] = field(default_factory=lambda: Future[AdapterInfo]())


class HostAdapterCache:
    """Cache of adapters that evicts the least recently used ones, and reports which requests may start.

    The keys are the task ids, names or paths in requests. If several waiting requests contain weights for one
    id, the weights of the first are stored; if they are invalid, this request fails, and the next request's
    weights are tried. Weights for an id that is already stored are ignored. `update` reports an adapter when it
    is first used.

    Args:
        load: Reads and checks the adapter that a request names, or the weights in the request. Called on
            the cache's thread, and by `prefetch`. An error that it raises ends the requests that wait for the
            adapter.
        max_bytes: Maximum size of all adapters together in bytes (lora_cache_host_memory_bytes); waiting weights
            may take as many bytes in addition.
        notify: Called when there is an update; on any thread.

    Attributes:
        waiting_weights: Weights in requests that are not stored yet; added where requests are received.
    """

    def __init__(
        self, load: Callable[[LoraRequest], CheckedAdapter], max_bytes: int, notify: Callable[[], None]
    ) -> None:
        self._read = load
        self.waiting_weights = WaitingWeights(max_bytes)
        self._max_bytes = max_bytes
        self._notify = notify
        self._lock = threading.Lock()
        self._entries: dict[LoraRequest, _HeldAdapter] = {}
        self._idle: OrderedDict[LoraRequest, _HeldAdapter] = OrderedDict()  # least recently used first
        self._unloading: list[_HeldAdapter] = []
        self._used: dict[int, _HeldAdapter] = {}  # by the ids of unfinished requests
        self._loads: dict[LoraRequest, _PendingAdapter] = {}
        self._waiting: dict[int, LoraRequest] = {}  # by request id
        self._num_bytes = 0
        self._idle_bytes = 0
        self._next_handle = 0
        self._stored: list[StoredAdapter] = []
        self._events: dict[int, AdapterEvent] = {}  # by request id
        self._dropped: list[int] = []
        self._problems: dict[str, str] = {}  # by name: the error of the last attempt to read the folder
        self._is_closed = False
        self._jobs: queue.SimpleQueue[LoraRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adapter-cache", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the loop thread

    def submit(self, request_id: int, lora: LoraRequest, origin: Origin | None = None) -> None:
        key = replace(lora, weights=None)
        with self._lock:
            try:
                lora.check_names()
            except RequestError as error:
                self._fail(request_id, error)
                return
            entry = self._entries.get(key)
            if entry is not None:
                self._use(request_id, entry)
            else:
                self._load_for(key).waiting[request_id] = _WaitingRequest(lora, origin)
                self._waiting[request_id] = key

    def update(self) -> AdapterUpdate:
        if not (self._stored or self._events or self._dropped):
            return AdapterUpdate()
        with self._lock:
            update = AdapterUpdate(tuple(self._stored), tuple(self._events.values()), tuple(self._dropped))
            self._stored, self._events, self._dropped = [], {}, []
        return update

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._events.pop(request_id, None)
            self.waiting_weights.remove(request_id)
            key = self._waiting.pop(request_id, None)
            if key is not None:
                del self._loads[key].waiting[request_id]
            entry = self._used.pop(request_id, None)
            if entry is not None:
                entry.users -= 1
                if not entry.users:
                    self._retire(entry)

    # ---------------------------------------------------------------- any thread

    def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters that are stored or being loaded."""
        with self._lock:
            stored = [entry.info for entry in (*self._entries.values(), *self._unloading)]
            loading = [
                AdapterInfo(key.task_id, key.name, key.path, "loading", users=len(load.waiting))
                for key, load in self._loads.items()
            ]
        return (*stored, *loading)

    def problems(self) -> dict[str, str]:
        """Return by name the errors of adapters whose folders were read and refused."""
        with self._lock:
            return dict(self._problems)

    def load(self, name: str) -> Future[AdapterInfo]:
        """Store a named adapter before a request needs it.

        A stored adapter becomes the most recently used; its folder is read again only after `unload`.

        Returns:
            A future of the stored adapter; it fails with the error that requests would get.

        Raises:
            Unavailable: After `close`.
        """
        key = LoraRequest(name=name)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the server is ending")
            entry = self._entries.get(key)
            if entry is not None:
                if not entry.users:
                    self._idle.move_to_end(key)
                found: Future[AdapterInfo] = Future()
                found.set_result(entry.info)
                return found
            load = self._load_for(key)
            load.is_ordered, load.ordered_by = True, REQUEST_ID.get()
        return load.done

    def unload(self, adapter: str | int) -> None:
        """Unload an adapter: for later requests with this name it is read again; later requests with this id fail.

        Requests that use the adapter continue; its memory is freed when the last of them has ended.

        Args:
            adapter: A name, a path, or a task id.

        Raises:
            NotFound: The adapter is not stored.
        """
        if isinstance(adapter, str):
            keys = LoraRequest(name=adapter), LoraRequest(path=adapter)
        else:
            keys = (LoraRequest(task_id=adapter),)
        with self._lock:
            entry = next((self._entries[key] for key in keys if key in self._entries), None)
            if entry is None:
                loaded = [each.name or each.path or str(each.task_id) for each in self._entries]
                others = (
                    f"; loaded are {listed(loaded)}{did_you_mean(str(adapter), loaded)}" if loaded else ""
                )
                raise NotFound(f"LoRA adapter {adapter} is not loaded{others}")
            del self._entries[entry.key]
            entry.is_unloaded = True
            if entry.users:
                self._unloading.append(entry)
            else:
                self._idle.pop(entry.key)
                self._idle_bytes -= entry.num_bytes
                self._drop(entry)
        self._notify()

    def prefetch(self, task_ids: Iterable[int]) -> None:
        """Store adapters on the calling thread until the cache is full; log a warning for invalid ones."""
        for task_id in task_ids:
            key = LoraRequest(task_id=task_id)
            found = self._try_to_read(key)
            if isinstance(found, RequestError):
                _log.warning("lora_prefetch_dir: task %d is skipped: %s", task_id, found)
                continue
            with self._lock:
                if self._num_bytes + len(found.weights.weights.buffer) > self._max_bytes:
                    _log.warning(
                        "lora_prefetch_dir: the cache is full; adapters from task %d on are read when "
                        "requests use them",
                        task_id,
                    )
                    return
                if key not in self._entries:
                    self._store(key, found)

    def close(self) -> None:
        """End the cache's thread after the adapter that it is reading. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._jobs.put(None)
        self._thread.join()
        with self._lock:
            for load in self._loads.values():
                load.done.set_exception(Unavailable("the server is ending"))
            self._loads.clear()
            self._waiting.clear()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._is_closed and (key := self._jobs.get()) is not None:
            try:
                while self._attempt(key):
                    pass
            except Exception as error:  # a bug: end the waiting requests, and continue to read
                _log.exception("the adapter cache failed with the LoRA adapter %s", key.label)
                with self._lock:
                    self._give_up(
                        key,
                        StepFailed(without_places(f"LoRA adapter {key.label} could not be kept: {error!r}")),
                    )
                self._notify()

    def _attempt(self, key: LoraRequest) -> bool:
        """Try to store an adapter; return whether there is something else to try.

        Weights in requests are tried first, one request after the other; the folder is tried last. Log lines
        name the request whose weights are tried, and for the folder the request that has waited longest. If no
        request waits, they name the request with the command to load the adapter.
        """
        with self._lock:
            load = self._loads[key]
            if not load.waiting and not load.is_ordered:
                del self._loads[key]
                return False
            senders = (each for each, waiting in load.waiting.items() if waiting.lora.weights is not None)
            request_id = next(senders, None)
            lora = key if request_id is None else load.waiting[request_id].lora
            named = next(iter(load.waiting), None) if request_id is None else request_id
            origin = None if named is None else load.waiting[named].origin
            REQUEST_ID.set(load.ordered_by if origin is None else origin.request_id)
        found = self._try_to_read(lora)
        with self._lock:
            is_done = self._finish_attempt(key, load, request_id, found)
        self._notify()
        return not is_done

    def _try_to_read(self, lora: LoraRequest) -> CheckedAdapter | RequestError:
        try:
            return self._read(lora)
        except RequestError as error:
            return error
        except InflightError as error:
            return BadAdapter(f"LoRA adapter {lora.label}: ", *error.args)
        except Exception as error:  # of any class: only the requests for this adapter fail
            _log.warning("the LoRA adapter %s could not be loaded", lora.label, exc_info=True)
            return StepFailed(without_places(f"LoRA adapter {lora.label} could not be loaded: {error!r}"))

    # ---------------------------------------------------------------- under the lock

    def _load_for(self, key: LoraRequest) -> _PendingAdapter:
        """Return the load of an adapter that is not stored; start one if there is none."""
        if key not in self._loads:
            self._loads[key] = _PendingAdapter()
            self._jobs.put(key)
        return self._loads[key]

    def _finish_attempt(
        self,
        key: LoraRequest,
        load: _PendingAdapter,
        request_id: int | None,
        found: CheckedAdapter | RequestError,
    ) -> bool:
        """Report the result of an attempt to the requests concerned; return whether the load has ended."""
        if isinstance(found, CheckedAdapter):
            try:
                self._make_room(key, len(found.weights.weights.buffer))
            except RequestError as error:
                found = error
            else:
                entry = self._store(key, found)
                for each in load.waiting:
                    del self._waiting[each]
                    self._use(each, entry)
                del self._loads[key]
                self._problems.pop(key.name, None)
                load.done.set_result(entry.info)
                return True
        if key.name and request_id is None:
            self._note_problem(key.name, found)
        if request_id is not None:
            failed = [request_id] if request_id in load.waiting else []
        else:
            failed = [each for each, waiting in load.waiting.items() if waiting.lora.weights is None]
        for each in failed:
            del load.waiting[each], self._waiting[each]
            self._fail(each, found)
        if not load.waiting and (request_id is None or not load.is_ordered):
            del self._loads[key]
            load.done.set_exception(found)
            return True
        return False

    def _note_problem(self, name: str, error: RequestError) -> None:
        """Store the error of a refused folder, until it is read again; not if it is missing or memory is short."""
        was = self._problems.pop(name, "")
        if isinstance(error, NotFound | Unavailable):
            return
        if was != str(error):
            _log.warning("the LoRA adapter %s is refused: %s", name, error)
        self._problems[name] = str(error)
        if len(self._problems) > _MAX_PROBLEMS:
            del self._problems[next(iter(self._problems))]

    def _give_up(self, key: LoraRequest, error: RequestError) -> None:
        load = self._loads.pop(key, None)
        if load is None:
            return
        for each in load.waiting:
            self._waiting.pop(each, None)
            self._fail(each, error)
        if not load.done.done():
            load.done.set_exception(error)

    def _make_room(self, key: LoraRequest, size: int) -> None:
        """Evict least recently used adapters until `size` bytes fit; raise if the adapters in use leave too
        little."""
        full = f"PEFT Cache is full. Could not store taskId={key.label}: it takes {size} bytes"
        setting = f"lora_cache_host_memory_bytes, which is {self._max_bytes}"
        if size > self._max_bytes:
            raise InvalidArgument(f"{full}, expected at most {setting}")
        in_use = self._num_bytes - self._idle_bytes
        if in_use + size > self._max_bytes:
            raise Unavailable(f"{full}, and adapters that requests use have {in_use} of {setting}")
        while self._num_bytes + size > self._max_bytes:
            _, entry = self._idle.popitem(last=False)
            self._idle_bytes -= entry.num_bytes
            del self._entries[entry.key]
            self._drop(entry)

    def _store(self, key: LoraRequest, checked: CheckedAdapter) -> _HeldAdapter:
        """Store an adapter, which must fit, as idle."""
        adapter = StoredAdapter(self._next_handle, checked.digest, key.task_id, checked.rank, checked.weights)
        self._next_handle += 1
        entry = _HeldAdapter(key, adapter)
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        self._retire(entry)
        return entry

    def _use(self, request_id: int, entry: _HeldAdapter) -> None:
        """Assign an adapter to a request, until the request is forgotten."""
        self.waiting_weights.remove(request_id)
        if not entry.users:
            del self._idle[entry.key]
            self._idle_bytes -= entry.num_bytes
        if not entry.is_announced:
            entry.is_announced = True
            self._stored.append(entry.adapter)
        entry.users += 1
        self._used[request_id] = entry
        self._events[request_id] = AdapterEvent(request_id, entry.adapter.handle)

    def _retire(self, entry: _HeldAdapter) -> None:
        """Make an adapter idle after its last user has ended, or drop it if it was unloaded."""
        if entry.is_unloaded:
            self._unloading.remove(entry)
            self._drop(entry)
        else:
            self._idle[entry.key] = entry
            self._idle_bytes += entry.num_bytes

    def _drop(self, entry: _HeldAdapter) -> None:
        """Stop counting the memory of an adapter that was removed from all indexes, and report it as dropped."""
        self._num_bytes -= entry.num_bytes
        if entry.is_announced:
            self._dropped.append(entry.adapter.handle)

    def _fail(self, request_id: int, error: RequestError) -> None:
        self.waiting_weights.remove(request_id)
        self._events[request_id] = AdapterEvent(request_id, error_kind=error.kind, error=error.marked)
