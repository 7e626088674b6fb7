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
    """A question or an order; answered with all adapters that there are then.

    Attributes:
        action: LIST asks; LOAD reads a folder into host memory now rather than with its first request; UNLOAD
            frees what no request uses any more.
        name: Of the adapter to load or unload.
        task_id: Of the adapter to unload, instead of a name.
        path: Of an adapter that has no name yet: a folder below the server's `lora_dir`. "": that of the name.
    """

    action: AdapterAction
    name: str = ""
    task_id: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that requests can use, or could if it were right.

    Attributes:
        name: What its requests say in `lora_name`; "" for one that clients have sent.
        task_id: What its requests say in `lora_task_id`; None for one with a name.
        path: Its folder; "" for one that clients have sent.
        is_loaded: Whether it is in host memory; one that is not is read with its first request.
        rank: Its largest rank; 0 while it is not loaded.
        num_bytes: Of host memory.
        problem: Why its folder could not be loaded when that was last tried; "": it could, or nobody has tried.
    """

    name: str = ""
    task_id: int | None = None
    path: str = ""
    is_loaded: bool = True
    rank: int = 0
    num_bytes: int = 0
    problem: str = ""
