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
    """A command about adapters; the answer lists all adapters afterwards.

    Attributes:
        action: LIST changes nothing. LOAD reads a folder into host memory before the first request needs it.
            UNLOAD frees an adapter once no request uses it.
        name: The adapter to load or unload.
        task_id: The adapter to unload, instead of a name.
        path: The folder of an adapter that has no name yet, below the server's `lora_dir`; "": the named adapter's
            folder.
    """

    action: AdapterAction
    name: str = ""
    task_id: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that requests can use, or could use if it loaded without error.

    Attributes:
        name: Its `lora_name` in requests; "" for an adapter sent by a client.
        task_id: Its `lora_task_id` in requests; None for a named adapter.
        path: Its folder; "" for an adapter sent by a client.
        is_loaded: Whether it is in host memory. If not, its first request loads it.
        rank: Its largest rank; 0 while it is not loaded.
        num_bytes: Its size in host memory, in bytes.
        problem: Message of the last attempt to load its folder, if that failed; otherwise "".
    """

    name: str = ""
    task_id: int | None = None
    path: str = ""
    is_loaded: bool = True
    rank: int = 0
    num_bytes: int = 0
    problem: str = ""
