"""The adapter commands of clients: list the adapters, load one, unload one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AdapterAction(Enum):
    """The action of an adapter command."""

    LIST = "list"
    LOAD = "load"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class AdapterCommand:
    """A command about adapters; its answer lists all adapters after the command.

    Attributes:
        action: LIST changes nothing. LOAD reads a folder into host memory before the first request needs it.
            UNLOAD frees an adapter once no request uses it, and drops its name if a client's LOAD gave it.
        name: The adapter to load or unload.
        task_id: The adapter to unload, instead of a name.
        path: The adapter's folder below the server's `lora_dir`, to load it under a new name; "": the
            folder that the name already has.
        replaces: Whether LOAD reads the folder again if the adapter is loaded, and may assign another folder to a
            name that a client gave. Requests that use the adapter continue with its old weights.
    """

    action: AdapterAction
    name: str = ""
    task_id: int | None = None
    path: str = ""
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that requests can use, or could use if it loaded without error.

    Attributes:
        name: The adapter's `lora_name` in requests; "" for an adapter sent by a client.
        task_id: The adapter's `lora_task_id` in requests; None for a named adapter.
        path: The adapter's folder; "" for an adapter sent by a client.
        is_loaded: Whether the adapter is in host memory; if not, the next request that uses it loads it.
        rank: The adapter's largest rank; 0 while it is not loaded.
        num_bytes: The adapter's size in host memory, in bytes.
        problem: The reason why the last attempt to load the folder failed; "": no attempt, or the last one
            succeeded.
    """

    name: str = ""
    task_id: int | None = None
    path: str = ""
    is_loaded: bool = True
    rank: int = 0
    num_bytes: int = 0
    problem: str = ""
