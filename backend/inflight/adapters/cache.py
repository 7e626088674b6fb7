"""Adapters on the host: `inflight.core.ports.AdapterCache`, with a limit in bytes.

Owns which adapters are stored, who uses them, and which are read. What is read, checked and hashed is so on a
thread of its own, so that the loop never waits for it; the loop thread calls `submit`, `update` and `forget`. Any
thread lists, loads and unloads. Knows neither files nor models: it is given a function that loads an adapter.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

from inflight.adapters.lora_rows import CheckedAdapter
from inflight.adapters.waiting_weights import WaitingWeights
from inflight.core.request.adapter import AdapterEvent, AdapterUpdate, LoraRequest, StoredAdapter
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

_log = logging.getLogger(__name__)

_MOST_PROBLEMS = 4096
"""Of how many adapters it is remembered why they cannot be used."""

_State = Literal["loading", "idle", "in use", "unloading"]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that the cache has, or reads.

    Attributes:
        task_id: The id it is stored under; None for one with a name or a path.
        name: Its name; "": none.
        path: As requests give it, below `lora_dir`; "": none.
        state: loading: it is being read. idle: may be evicted. in use: by requests. unloading: unloaded, and still
            in use by requests that were there before.
        rank: Its largest rank; 0 while it is being read.
        num_bytes: What it takes on the host.
        users: Requests that use it, or wait for it.
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
    """A stored adapter."""

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


@dataclass(eq=False, slots=True)
class _Load:
    """An adapter that is being read, or is to be: who waits for it, with the weights that they have brought."""

    waiting: dict[int, LoraRequest] = field(default_factory=dict[int, LoraRequest])
    is_ordered: bool = False  # by `load`
    done: Future[AdapterInfo] = field(default_factory=lambda: Future[AdapterInfo]())


class HostAdapterCache:
    """Stores adapters, evicts the least recently used, and says whose requests may begin.

    An adapter is known by what requests call it: a task id, a name or a path. Of requests that bring weights for
    the same id at the same time, one's are stored; if those are wrong, its request fails, and another's are tried.
    What comes for an id that is stored is not looked at. `update` tells of an adapter when it is first used.

    Args:
        load: Reads and checks what a request without weights names, or what one with weights has brought. Called
            on this object's thread, and by `prefetch`. An error that it raises ends the requests that wait.
        max_bytes: What all adapters may take together (lora_cache_host_memory_bytes); as much again may wait.
        notify: Called when there is an update; on any thread.

    Attributes:
        waiting_weights: What requests have brought that is not stored yet; whoever takes requests adds it.
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
        self._used: dict[int, _HeldAdapter] = {}  # by the ids of requests that have not ended
        self._loads: dict[LoraRequest, _Load] = {}
        self._waiting: dict[int, LoraRequest] = {}  # by request id: what it waits for
        self._num_bytes = 0
        self._idle_bytes = 0
        self._next_handle = 0
        self._stored: list[StoredAdapter] = []
        self._events: dict[int, AdapterEvent] = {}  # by request id
        self._dropped: list[int] = []
        self._problems: dict[
            str, str
        ] = {}  # by name: why the folder could not be read when that was last tried
        self._is_closed = False
        self._jobs: queue.SimpleQueue[LoraRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adapter-cache", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the loop thread

    def submit(self, request_id: int, lora: LoraRequest) -> None:
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
                self._load_for(key).waiting[request_id] = lora
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
        """The adapters that are stored and those that are being loaded."""
        with self._lock:
            stored = [entry.info for entry in (*self._entries.values(), *self._unloading)]
            loading = [
                AdapterInfo(key.task_id, key.name, key.path, "loading", users=len(load.waiting))
                for key, load in self._loads.items()
            ]
        return (*stored, *loading)

    def problems(self) -> dict[str, str]:
        """By name, why those adapters cannot be used whose folders were tried and refused."""
        with self._lock:
            return dict(self._problems)

    def load(self, name: str) -> Future[AdapterInfo]:
        """Store a named adapter before a request wants it.

        One that is stored already is as if it had just been used. Its folder is read again after `unload` only.

        Returns:
            What becomes of it; the error is the one that requests would get.

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
            load.is_ordered = True
        return load.done

    def unload(self, adapter: str | int) -> None:
        """Forget an adapter: who asks for it from now on, by this name or id, has it read again, or misses it.

        Requests that use it go on with it; what it takes is free when the last of them has ended.

        Args:
            adapter: A name, a path, or a task id.

        Raises:
            NotFound: It is not stored.
        """
        if isinstance(adapter, str):
            keys = LoraRequest(name=adapter), LoraRequest(path=adapter)
        else:
            keys = (LoraRequest(task_id=adapter),)
        with self._lock:
            entry = next((self._entries[key] for key in keys if key in self._entries), None)
            if entry is None:
                raise NotFound(f"LoRA adapter {adapter} is not loaded")
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
        """Store adapters as long as there is room, and wait until that is done; one that is wrong is warned of."""
        for task_id in task_ids:
            key = LoraRequest(task_id=task_id)
            found = self._try_to_read(key)
            if isinstance(found, RequestError):
                _log.warning("lora_prefetch_dir: task %d is skipped: %s", task_id, found)
                continue
            with self._lock:
                if self._num_bytes + len(found.weights.weights.buffer) > self._max_bytes:
                    _log.warning(
                        "lora_prefetch_dir: there is no room for task %d and those behind it, which are read when "
                        "requests want them",
                        task_id,
                    )
                    return
                if key not in self._entries:
                    self._store(key, found)

    def close(self) -> None:
        """End the thread; what it reads is read to its end. Idempotent."""
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
            except Exception as error:  # a bug: who waits has to hear of it, and others' adapters are read on
                _log.exception("the adapter cache failed with the LoRA adapter %s", key.label)
                with self._lock:
                    self._give_up(
                        key,
                        StepFailed(without_places(f"LoRA adapter {key.label} could not be kept: {error!r}")),
                    )
                self._notify()

    def _attempt(self, key: LoraRequest) -> bool:
        """Try to store an adapter; whether there is another try to be made.

        Weights that requests have brought come first, one request's after the other's; the folder comes last.
        """
        with self._lock:
            load = self._loads[key]
            if not load.waiting and not load.is_ordered:
                del self._loads[key]
                return False
            with_weights = (each for each in load.waiting.items() if each[1].weights is not None)
            request_id, lora = next(with_weights, (None, key))
        found = self._try_to_read(lora)
        with self._lock:
            is_done = self._settle(key, load, request_id, found)
        self._notify()
        return not is_done

    def _try_to_read(self, lora: LoraRequest) -> CheckedAdapter | RequestError:
        try:
            return self._read(lora)
        except RequestError as error:
            return error
        except InflightError as error:
            return BadAdapter(f"LoRA adapter {lora.label}: ", *error.args)
        except Exception as error:  # whatever a reader of files raises, it is these requests' error alone
            _log.warning("the LoRA adapter %s could not be loaded", lora.label, exc_info=True)
            return StepFailed(without_places(f"LoRA adapter {lora.label} could not be loaded: {error!r}"))

    # ---------------------------------------------------------------- under the lock

    def _load_for(self, key: LoraRequest) -> _Load:
        """The load of an adapter that is not stored; starts one if none is under way."""
        if key not in self._loads:
            self._loads[key] = _Load()
            self._jobs.put(key)
        return self._loads[key]

    def _settle(
        self, key: LoraRequest, load: _Load, request_id: int | None, found: CheckedAdapter | RequestError
    ) -> bool:
        """Tell who waits for an adapter what came of a try; whether nobody waits for another one."""
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
            failed = [each for each, lora in load.waiting.items() if lora.weights is None]
        for each in failed:
            del load.waiting[each], self._waiting[each]
            self._fail(each, found)
        if not load.waiting and (request_id is None or not load.is_ordered):
            del self._loads[key]
            load.done.set_exception(found)
            return True
        return False

    def _note_problem(self, name: str, error: RequestError) -> None:
        """Remember why a folder cannot be used, until it is read again; not if it is gone, or memory is short."""
        was = self._problems.pop(name, "")
        if isinstance(error, NotFound | Unavailable):
            return
        if was != str(error):
            _log.warning("the LoRA adapter %s is refused: %s", name, error)
        self._problems[name] = str(error)
        if len(self._problems) > _MOST_PROBLEMS:
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
        """Evict what has not been used for longest until there is room. Raises if what is in use leaves none."""
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
        """Keep an adapter that there is room for; nobody uses it yet."""
        adapter = StoredAdapter(self._next_handle, checked.digest, key.task_id, checked.rank, checked.weights)
        self._next_handle += 1
        entry = _HeldAdapter(key, adapter)
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        self._retire(entry)
        return entry

    def _use(self, request_id: int, entry: _HeldAdapter) -> None:
        """A request has its adapter, which stays until the request is forgotten."""
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
        """Nobody uses an adapter any more: it may be evicted, and goes at once if it was unloaded."""
        if entry.is_unloaded:
            self._unloading.remove(entry)
            self._drop(entry)
        else:
            self._idle[entry.key] = entry
            self._idle_bytes += entry.num_bytes

    def _drop(self, entry: _HeldAdapter) -> None:
        """An adapter that nobody can ask for any more gives its memory back."""
        self._num_bytes -= entry.num_bytes
        if entry.is_announced:
            self._dropped.append(entry.adapter.handle)

    def _fail(self, request_id: int, error: RequestError) -> None:
        self.waiting_weights.remove(request_id)
        self._events[request_id] = AdapterEvent(request_id, error_kind=error.kind, error=error.marked)
