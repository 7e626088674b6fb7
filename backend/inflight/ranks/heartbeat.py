"""Sockets between rank 0 and every other rank: heartbeats, wake-ups without a call to MPI, and ends of loads.

A `Heartbeat` owns the connections made by `rendezvous.meet`, and one thread, which reads all of them, sends a
heartbeat on each five times per timeout, and detects lost ranks: by a connection that ends without a goodbye, by
silence, or by a forward pass that failed on one rank alone, so that the others would wait for this rank in a
collective for ever. The thread never calls MPI, so its callback `on_loss` runs even while the loop thread hangs in
MPI. Messages are nine bytes: a kind and a number. A send never blocks: bytes that a peer's socket does not
accept are sent with the next heartbeat. Independent of requests and MPI.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from inflight.errors import Unavailable
from inflight.ranks.failure_detector import FailureDetector, Loss
from inflight.ranks.rendezvous import Peer

_log = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 5
_MESSAGE = struct.Struct("!BQ")
_READ_BYTES = 4096
_ENDED = "its process has ended"


class _Kind(IntEnum):
    BEAT = 1  # number: the first iteration that the sender has not finished
    WAKE = 2  # rank 0 → others: enter the next broadcast
    FAILED = 3  # number: the iteration in which the sender's forward pass raised, or NEVER
    GOODBYE = 4  # the connection is about to end normally
    LOADED = 5  # others → rank 0; number: a load of saved KV blocks and its result (`ranked_store.py`)


class Heartbeat:
    """This rank's side of the connections between rank 0 and the others.

    Args:
        peers: The result of `meet`; this object closes their connections.
        num_ranks: Number of ranks, for messages.
        timeout_s: Seconds of silence after which a rank is lost; the loss is detected at most timeout_s / 5 later.
        on_loss: Called once, on the heartbeat's thread, if a rank is lost. When it returns, the connections are
            closed without a goodbye, by which the other ranks detect the loss.
        loading_timeout_s: Used instead of `timeout_s` until `has_loaded` is called, as imports or the start of a
            driver may keep a rank's threads from running. None: `timeout_s` from the beginning.
        clock: Monotonic clock, in seconds.

    Attributes:
        iteration: The first iteration that this rank has not finished. The loop sets it, and heartbeats
            contain it.
        on_loaded: Rank 0: called on the heartbeat's thread with the number that another rank gave to
            `report_load`.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        num_ranks: int,
        timeout_s: float,
        on_loss: Callable[[Unavailable], None],
        loading_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.iteration = 0
        self.on_loaded: Callable[[int], None] = lambda number: None
        self._connections = {peer.rank: _PeerConnection(peer) for peer in peers}
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._period_s = timeout_s / _BEATS_PER_TIMEOUT
        self._on_loss = on_loss
        self._clock = clock
        self._failure_detector = FailureDetector(self._connections, timeout_s)
        self._has_loaded = loading_timeout_s is None
        if loading_timeout_s is not None:
            self._failure_detector.patience_s = loading_timeout_s
        self._changed = threading.Condition()
        self._wakes = 0  # this and the next three attributes are used under the condition's lock
        self._own_failures: list[int] = []
        self._left: set[int] = set()
        self._lost: Unavailable | None = None
        self._closing = False
        self._interrupting, self._interrupted = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- any thread

    def check(self) -> None:
        """Raise Unavailable if a rank is known to be lost."""
        if self._lost is not None:
            # A new object each time, as an exception that is raised again accumulates tracebacks.
            raise Unavailable(str(self._lost))

    def wake(self) -> None:
        """Rank 0: let every other rank's `wait` return once. Raises Unavailable if a rank is lost or has left."""
        with self._changed:
            self._require_all()
        for connection in self._connections.values():
            connection.send(_Kind.WAKE)

    def wait(self) -> None:
        """Other ranks: wait, without using CPU time, for the next `wake` of rank 0. Raises like `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._wakes or self._lost or self._left)
            if not self._wakes or self._lost:
                self._require_all()
            self._wakes -= 1

    def _require_all(self) -> None:
        self.check()
        if self._left:
            ranks = " and ".join(map(str, sorted(self._left)))
            raise Unavailable(f"rank {ranks} of {self._num_ranks} has left")

    def has_loaded(self) -> None:
        """Record that all ranks have loaded the model: from now on `timeout_s` applies."""
        self._has_loaded = True

    def report_failure(self, iteration: int) -> None:
        """Report a failed forward pass to rank 0, which finds out whether it failed on this rank only.

        The iteration NEVER means that this is known already: then this rank counts as lost.
        """
        if 0 in self._connections:
            self._connections[0].send(_Kind.FAILED, iteration)
            return
        with self._changed:
            self._own_failures.append(iteration)

    def report_load(self, number: int) -> None:
        """Other ranks: report to rank 0 that a load of saved KV blocks has ended."""
        self._connections[0].send(_Kind.LOADED, number)

    def close(self) -> None:
        """Send a goodbye, unless a rank is lost, and end the thread and the connections. Idempotent."""
        with self._changed:
            self._closing = True
        with contextlib.suppress(OSError):  # the thread has ended
            self._interrupting.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---------------------------------------------------------------- the heartbeat's thread

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._interrupted, selectors.EVENT_READ)
                for connection in self._connections.values():
                    selector.register(connection.socket, selectors.EVENT_READ, connection)
                self._beat_until_the_end(selector)
        except Exception as error:  # without a heartbeat this rank is lost, whatever the error
            _log.exception("the heartbeat failed")
            self._lose(
                Unavailable(f"the heartbeat between the ranks failed: {type(error).__name__}: {error}")
            )
        for connection in self._connections.values():
            connection.close(says_goodbye=self._lost is None)
        self._interrupted.close()
        self._interrupting.close()

    def _beat_until_the_end(self, selector: selectors.BaseSelector) -> None:
        beat_s = turn_s = self._clock()
        while not self._closing:
            if (now_s := self._clock()) >= beat_s:
                self._beat()
                beat_s = now_s + self._period_s
            events = selector.select(max(0.0, beat_s - now_s))
            now_s = self._clock()
            if now_s - turn_s > 2 * self._period_s:  # this process was suspended, or got no processor time
                self._failure_detector.forgive(now_s)
            if self._has_loaded and self._failure_detector.patience_s != self._timeout_s:
                self._failure_detector.patience_s = self._timeout_s
                self._failure_detector.forgive(now_s)
            turn_s = now_s
            losses = [self._read(selector, key.data, now_s) for key, _ in events if key.data]
            loss = next((one for one in losses if one is not None), None) or self._find_loss(now_s)
            if loss is not None:
                self._lose(self._describe(loss))
                return

    def _beat(self) -> None:
        for connection in self._connections.values():
            connection.send(_Kind.BEAT, self.iteration)

    def _read(
        self, selector: selectors.BaseSelector, connection: _PeerConnection, now_s: float
    ) -> Loss | None:
        """Handle received messages; if the connection has ended without a goodbye, return the peer's Loss."""
        messages, end = connection.receive()
        rank = connection.peer.rank
        for kind, number in messages:
            self._failure_detector.record_message(rank, now_s, number if kind == _Kind.BEAT else None)
            if kind == _Kind.WAKE:
                with self._changed:
                    self._wakes += 1
                    self._changed.notify_all()
            elif kind == _Kind.FAILED:
                self._failure_detector.failed(rank, number, now_s)
            elif kind == _Kind.GOODBYE:
                self._note_goodbye(rank)
            elif kind == _Kind.LOADED:
                self.on_loaded(number)
        if rank not in self._left:
            return None if end is None else Loss(rank, end)
        selector.unregister(connection.socket)
        return None

    def _note_goodbye(self, rank: int) -> None:
        self._failure_detector.left(rank)
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _find_loss(self, now_s: float) -> Loss | None:
        with self._changed:
            failures, self._own_failures = self._own_failures, []
        for iteration in failures:
            self._failure_detector.failed(0, iteration, now_s)
        return self._failure_detector.loss(now_s, self.iteration)

    def _describe(self, loss: Loss) -> Unavailable:
        of = f"of {self._num_ranks}"
        if loss.rank not in self._connections:
            return Unavailable(f"rank {loss.rank} {of} (this process) is lost: {loss.how}")
        host = self._connections[loss.rank].peer.host
        return Unavailable(f"rank {loss.rank} {of} ({host.name}, pid {host.pid}) is lost: {loss.how}")

    def _lose(self, error: Unavailable) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = error
            self._changed.notify_all()
        _log.error("%s", error)
        try:
            self._on_loss(error)
        except Exception:  # the connections must be closed, whatever the callback raises
            _log.exception("the handler of a lost rank failed")


class _PeerConnection:
    """The connection to one peer. Any thread sends, the heartbeat's thread receives."""

    def __init__(self, peer: Peer) -> None:
        peer.connection.setblocking(False)
        self.peer = peer
        self.socket = peer.connection
        self._received = bytearray()
        self._unsent = bytearray()
        self._lock = threading.Lock()

    def send(self, kind: _Kind, number: int = 0) -> None:
        """Send as much as the socket accepts; the rest is sent with the next message.

        A broken connection is detected by `receive`.
        """
        with self._lock, contextlib.suppress(OSError):  # including the error that sending would block
            if kind != _Kind.BEAT or not self._unsent:  # one beat is enough for a peer that is not reading
                self._unsent += _MESSAGE.pack(kind, number)
            del self._unsent[: self.socket.send(self._unsent)]

    def receive(self) -> tuple[list[tuple[int, int]], str | None]:
        """Return the received messages, as (kind, number), and a description of the connection's end, if it
        ended."""
        try:
            part = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return [], None
        except ConnectionResetError:  # the peer ended with unread messages
            return [], _ENDED
        except OSError as error:
            return [], f"its connection broke ({error.strerror})"
        self._received += part
        end = len(self._received) // _MESSAGE.size * _MESSAGE.size
        messages = list(_MESSAGE.iter_unpack(bytes(self._received[:end])))
        del self._received[:end]
        return messages, None if part else _ENDED

    def close(self, says_goodbye: bool) -> None:
        if says_goodbye:
            self.send(_Kind.GOODBYE)
            self.receive()  # unread bytes would reset the connection, perhaps before the goodbye arrives
        with self._lock:
            self.socket.close()
