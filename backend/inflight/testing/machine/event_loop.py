"""asyncio on the machine: the standard library's loop and transports, with the machine's clock and sockets.

The server itself uses uvloop, whose transports have the same interface.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, cast

import greenlet

from .scheduler import Machine, Waiters
from .sockets import Network, Socket
from .thread_pool import ThreadPool

_THREADS = 8  # of the loop's own pool
_WRITE_BUFFERS = (0, 300, None)  # bytes that may wait before a transport pauses its protocol; None: asyncio's
_RAN_OUT = "socket.accept() out of system resource"


class _LoopSelector:
    """Waits until sockets can be read or written, by their numbers, as `selectors.BaseSelector` does."""

    def __init__(self, machine: Machine, network: Network) -> None:
        self._machine = machine
        self._network = network
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._waiters = Waiters(machine)
        self._is_woken = False

    def register(self, number: int, events: int, data: object = None) -> None:
        watched = self._network.by_number[number]
        self._keys[number] = selectors.SelectorKey(cast(Any, watched), number, events, data)
        watched.watch(self._waiters, True)
        watched.watch_room(self._waiters, True)

    def unregister(self, number: int) -> None:
        watched = _socket_of(self._keys.pop(number))
        watched.watch(self._waiters, False)
        watched.watch_room(self._waiters, False)

    def modify(self, number: int, events: int, data: object = None) -> None:
        self._keys[number] = self._keys[number]._replace(events=events, data=data)

    def get_key(self, number: int) -> selectors.SelectorKey:
        return self._keys[number]

    def get_map(self) -> Mapping[int, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._machine.is_over:
            raise greenlet.GreenletExit
        self._machine.pause()
        ready = self._ready()
        if not (ready or self._is_woken) and (timeout is None or timeout > 0):
            self._waiters.wait(timeout)
            ready = self._ready()
        self._is_woken = False
        return ready

    def wake(self) -> None:
        """Let `select` return: another thread has given the loop something to do."""
        self._is_woken = True
        self._waiters.wake()

    def close(self) -> None:
        for number in list(self._keys):
            self.unregister(number)

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        found: list[tuple[selectors.SelectorKey, int]] = []
        for key in self._keys.values():
            watched, events = _socket_of(key), 0
            if key.events & selectors.EVENT_READ and watched.is_readable:
                events |= selectors.EVENT_READ
            if key.events & selectors.EVENT_WRITE and watched.is_writable:
                events |= selectors.EVENT_WRITE
            if events:
                found.append((key, events))
        return found


def _socket_of(key: selectors.SelectorKey) -> Socket:
    return cast(Socket, key.fileobj)


def _close(tasks: list[asyncio.Task[Any]]) -> None:
    """Close the coroutines of tasks whose machine has ended."""
    for task in tasks:
        with contextlib.suppress(BaseException):  # whatever they do then has no effect
            cast(Coroutine[Any, Any, Any], task.get_coro()).close()


class MachineLoop(asyncio.SelectorEventLoop):
    """An event loop for one thread of the machine. An error in a callback is a failure of the machine's run.

    Args:
        machine, network: The machine, and its sockets.
    """

    def __init__(self, machine: Machine, network: Network) -> None:
        self._machine = machine
        self._poll = _LoopSelector(machine, network)
        self._write_buffer = machine.rng.choice(_WRITE_BUFFERS)
        super().__init__(cast(Any, self._poll))
        self._default_executor: Any = ThreadPool(machine, _THREADS, "asyncio")
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        """Return the machine's clock in seconds."""
        return self._machine.now_ns / 1e9

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, then cancel what is left, as `asyncio.run` does, and close the loop."""
        try:
            self.run_until_complete(main)
        finally:
            left = sorted(asyncio.all_tasks(self), key=lambda task: int(task.get_name().rpartition("-")[2]))
            if self._machine.is_over:
                _close(left)
                raise greenlet.GreenletExit
            self.run_until_complete(self._end(left))
            self._default_executor.shutdown()
            self.close()

    async def _end(self, left: list[asyncio.Task[Any]]) -> None:
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.shutdown_asyncgens()

    def _check_closed(self) -> None:
        if not self._machine.is_over:  # coroutines that end with the run may still call the loop
            cast(Any, super())._check_closed()

    def _make_self_pipe(self) -> None:
        """Do nothing: `_write_to_self` needs no pipe."""

    def _close_self_pipe(self) -> None:
        """Do nothing: there is no pipe."""

    def _write_to_self(self) -> None:
        self._poll.wake()

    def _start_serving(self, protocol_factory: Any, sock: Socket, *args: Any, **more: Any) -> None:
        if sock.fileno() >= 0:  # asyncio calls this again some time after descriptors ran out
            cast(Any, super())._start_serving(protocol_factory, sock, *args, **more)

    def _make_socket_transport(self, *args: Any, **more: Any) -> Any:
        transport: Any = cast(Any, super())._make_socket_transport(*args, **more)
        transport.set_write_buffer_limits(high=self._write_buffer)
        return transport

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if (
            self._machine.is_over
            or isinstance(error, greenlet.GreenletExit)
            or context["message"] == _RAN_OUT
        ):
            return
        if self._machine.failure is None and self._machine.is_running_a_fiber:
            raised = error or RuntimeError(context["message"])
            self._machine.failure = self._machine.current, raised, f"{context}"
