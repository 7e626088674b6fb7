"""Replaces the modules of threads, clocks, queues and sockets by the machine's wherever the package uses them."""

from __future__ import annotations

import concurrent.futures._base
import contextlib
import importlib
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType
from typing import Any

from inflight.core.report.stats import MemoryUsage
from inflight.serving import memory

from .disk import Disk
from .kernel import Kernel
from .kernel_modules import names_for
from .scheduler import Machine
from .sockets import Network, Selector
from .thread_pool import ThreadPool
from .threads import (
    MachineEvent,
    SimpleQueue,
    SimulatedModule,
    on_machine,
    simulated_threading,
    simulated_time,
)

_LAZY = (
    "inflight.adapters.commands",
    "inflight.block_store",
    "inflight.build",
    "inflight.engine_parts",
    "inflight.batch_manager",
    "inflight.batch_manager.instruments",
    "inflight.batch_manager.kv_event_buffer",
    "inflight.batch_manager.recording",
    "inflight.batch_manager.statistics_rings",
    "inflight.batch_manager.watchdog",
    "inflight.core.request.drafted",
    "inflight.core.scheduler",
    "inflight.endpoint.client",
    "inflight.endpoint.local",
    "inflight.endpoint.server",
    "inflight.ranks.heartbeat",
    "inflight.ranks.rank_context",
    "inflight.receipts.engine_part",
    "inflight.serving.memory",
    "inflight.testing.fake_engine",
)
"""Modules of the engine's process, some of which are otherwise imported when they are first used."""
_OWN = __package__ or ""


@contextlib.contextmanager
def on(
    machine: Machine, network: Network, disk: Disk | None = None, kernel: Kernel | None = None
) -> Generator[None]:
    """Run the package's code on a machine in this context. Log lines are dropped.

    Args:
        machine, network: The machine, and its sockets.
        disk: The disk for saved KV blocks; None: they are not saved in files.
        kernel: The kernel for the server's processes; None: they start no others.
    """
    for name in _LAZY:
        importlib.import_module(name)
    simulated_queue = on_machine(machine, SimpleQueue)
    simulated: dict[Any, Any] = {
        threading: simulated_threading(machine),
        time: simulated_time(machine),
        socket: network.sockets(),
        queue: SimulatedModule(queue, {"SimpleQueue": simulated_queue}),
        queue.SimpleQueue: simulated_queue,
        ThreadPoolExecutor: on_machine(machine, ThreadPool),
        selectors: SimulatedModule(selectors, {"DefaultSelector": on_machine(machine, Selector)}),
    }
    defaults: dict[Any, Any] = {
        time.monotonic: simulated[time].monotonic,
        time.monotonic_ns: simulated[time].monotonic_ns,
        time.time: simulated[time].time,
        threading.Event.wait: MachineEvent.wait,
    }
    replaced: list[tuple[Any, str, object]] = []

    def replace(owner: Any, name: str, value: object) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    replace(memory, "measure_memory", MemoryUsage)  # which would differ from run to run
    for module in _modules():
        names = dict(simulated)
        if module.__name__ == "inflight.endpoint.path":
            names[os] = network.files_of_sockets()
        if kernel is not None:
            names |= names_for(kernel, module.__name__)
        if module.__name__ == "inflight.block_store.files" and disk is not None:
            names[os] = disk.functions()
        for name, value in list(vars(module).items()):
            if isinstance(value, (ModuleType, type)) and value in names:
                replace(module, name, names[value])
        for function in _functions(module):
            given = function.__defaults__ or ()
            if any(each in defaults for each in given if callable(each)):
                new = tuple(defaults.get(each, each) if callable(each) else each for each in given)
                replace(function, "__defaults__", new)
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        machine.end()
        logging.disable(disabled)
        for owner, name, value in replaced:
            setattr(owner, name, value)


def _modules() -> list[ModuleType]:
    """Return the modules to run on the machine: the package's, without the machine, and that of futures."""
    own = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("inflight.") and not name.startswith(_OWN)
    ]
    return [concurrent.futures._base, *own]  # pyright: ignore[reportPrivateUsage]


def _functions(module: ModuleType) -> list[FunctionType]:
    """Return the functions and methods that a module defines."""
    owned = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    members = [member for each in owned if isinstance(each, type) for member in vars(each).values()]
    return [each for each in (*owned, *members) if isinstance(each, FunctionType)]
