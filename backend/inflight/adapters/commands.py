"""Clients' adapter commands: implements `inflight.core.ports.Adapters` with cache and folders. Any thread."""

from __future__ import annotations

from concurrent.futures import Future, wait

from inflight.adapters.cache import AdapterInfo, HostAdapterCache
from inflight.adapters.sources import AdapterFolders
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.adapter_command import AdapterState
from inflight.errors import InvalidArgument, Unavailable


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
        ]
        problems = self.cache.problems()
        return kept + [
            AdapterState(name, None, folder, is_loaded=False, problem=problems.get(name, ""))
            for name, folder in folders.items()
        ]

    def load(self, name: str, path: str, timeout_s: float) -> None:
        loading = self._load_as(name, path) if path else self.cache.load(name)
        if not wait([loading], timeout_s).done:
            raise Unavailable(f"the adapter {name} is still being read after {timeout_s:g} s")
        loading.result()

    def unload(self, name: str, task_id: int | None) -> None:
        self.cache.unload(name if task_id is None else task_id)

    def _load_as(self, name: str, path: str) -> Future[AdapterInfo]:
        """Load a folder under a new name; if the folder cannot be read, remove the name."""
        folder, known = self._folders.find(LoraRequest(path=path)), self._folders.named().get(name)
        if known not in (None, folder):
            raise InvalidArgument(f"adapter {name} already has a folder other than {path!r}")
        self._folders.names[name] = folder
        loading = self.cache.load(name)
        if known is None:
            loading.add_done_callback(lambda done: done.exception() and self._folders.names.pop(name, None))
        return loading
