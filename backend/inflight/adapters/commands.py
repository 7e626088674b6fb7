"""Clients' adapter commands: implements `inflight.core.ports.Adapters` with cache and folders. Any thread."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from inflight.adapters.cache import AdapterInfo, HostAdapterCache
from inflight.adapters.sources import AdapterFolders
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.adapter_command import AdapterState
from inflight.errors import InvalidArgument, NotFound, Unavailable


class AdapterCommands:
    """Lists, loads and unloads adapters, and counts waiting weights.

    Args:
        cache: Cache of adapters.
        folders: Folders of named adapters; `load` with a path adds one.

    Attributes:
        cache: The argument of the same name; the owner of the engine closes it.
    """

    def __init__(self, cache: HostAdapterCache, folders: AdapterFolders) -> None:
        self.cache = cache
        self._folders = folders
        self._given: set[str] = set()  # names that `load` has added

    def expect_weights(self, request_id: int, num_bytes: int) -> None:
        self.cache.waiting_weights.add(request_id, num_bytes)

    def give_up_weights(self, request_id: int) -> None:
        self.cache.waiting_weights.remove(request_id)

    def list_adapters(self) -> list[AdapterState]:
        folders = {name: str(folder) for name, folder in self._folders.named().items()}
        kept = [
            AdapterState(
                each.name,
                each.task_id,
                each.path or folders.pop(each.name, ""),
                each.state != "loading",
                each.rank,
                each.num_bytes,
            )
            for each in self.cache.list_adapters()
            if each.state != "unloading"  # later requests cannot use it
        ]
        problems = self.cache.problems()
        return kept + [
            AdapterState(name, None, folder, is_loaded=False, problem=problems.get(name, ""))
            for name, folder in folders.items()
        ]

    def load(self, name: str, path: str, timeout_s: float, replaces: bool = False) -> None:
        if path:
            loading = self._load_as(name, path, replaces)
        else:
            loading = self._load_again(name) if replaces else self.cache.load(name)
        if not wait([loading], timeout_s).done:
            raise Unavailable(f"the adapter {name} is still being read after {timeout_s:g} s")
        loading.result()

    def unload(self, name: str, task_id: int | None) -> None:
        is_given = task_id is None and name in self._given
        if is_given:
            self._given.discard(name)
            self._folders.names.pop(name, None)
        try:
            self.cache.unload(name if task_id is None else task_id)
        except NotFound:  # the cache may have dropped it
            if not is_given:
                raise

    def _load_as(self, name: str, path: str, replaces: bool) -> Future[AdapterInfo]:
        """Load a folder under a name. If the folder cannot be read, the name keeps the folder that it had."""
        folder, known = self._folders.find(LoraRequest(path=path)), self._folders.named().get(name)
        if known not in (None, folder) and not (replaces and name in self._given):
            raise InvalidArgument(f"adapter {name} already has a folder other than {path!r}")
        self._folders.names[name] = folder
        if known is None:
            self._given.add(name)
        loading = self._load_again(name) if replaces else self.cache.load(name)
        return loading if known == folder else self._or_take_back(loading, name, known)

    def _load_again(self, name: str) -> Future[AdapterInfo]:
        with suppress(NotFound):
            self.cache.unload(name)
        return self.cache.load(name)

    def _or_take_back(
        self, loading: Future[AdapterInfo], name: str, known: Path | None
    ) -> Future[AdapterInfo]:
        """Return a future like `loading` that fails only after the name has its old folder again.

        Args:
            loading: A load of the name's new folder.
            name: The name.
            known: The old folder; None: it had none, and is removed.
        """
        outcome: Future[AdapterInfo] = Future()

        def finish(done: Future[AdapterInfo]) -> None:
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
                return
            if known is None:
                self._given.discard(name)
                self._folders.names.pop(name, None)
            else:
                self._folders.names[name] = known
            outcome.set_exception(error)

        loading.add_done_callback(finish)
        return outcome
