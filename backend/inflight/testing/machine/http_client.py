"""A client of the simulated `/v1`: it sends requests in pieces, reads slowly, stalls, and leaves at any point."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11

from .answers import Ticket
from .scheduler import Machine, Process
from .sockets import Network, Socket

_STALL_S = 100.0  # longer than each time limit of the server
_MOST_READ = 500  # bytes at a time


class Habit(enum.Enum):
    """A client's behaviour beside sending a request and reading its answer."""

    NONE = "nothing"
    STALLS_IN_HEAD = "sends a part of the headers, and nothing for a while"
    STALLS_IN_BODY = "sends a part of the body, and nothing for a while"
    STOPS_READING = "reads nothing of the answer for a while"
    READS_SLOWLY = "reads the answer with pauses"
    LEAVES_IN_BODY = "closes the connection within the body"
    LEAVES = "closes the connection some time after the request"


STALLING = (Habit.STALLS_IN_HEAD, Habit.STALLS_IN_BODY, Habit.STOPS_READING)
LEAVING = (Habit.LEAVES, Habit.LEAVES_IN_BODY)


@dataclass(eq=False)
class HttpAsk:
    """An HTTP request of a client, and what the client got.

    Attributes:
        name: Its X-Request-Id, unique in a run.
        process: The front end to which it is sent.
        method, path, body: The request.
        fields: The body's fields if it asks for text; None if not.
        expected_status: The status that the answer must have if nothing fails.
        habit: The client's behaviour.
        patience_s: After how many seconds a client that leaves does so.
        begun_ns: When the client began to send it.
        is_reused: Whether an earlier request was sent on the same connection, which the server may be closing.
        status: The status of the answer; 0: none came.
        content: The body of the answer, as far as it came.
        is_complete: Whether the whole answer came.
        left_ns: When the client closed the connection; 0: it did not.
        ended_ns: When the client had the whole answer, or the connection broke, or the client left; 0: not yet.
        tickets: The engine's requests for it.
    """

    name: str
    process: Process
    method: str
    path: str
    body: bytes = b""
    fields: dict[str, Any] | None = None
    expected_status: int = 200
    habit: Habit = Habit.NONE
    patience_s: float = 0.0
    begun_ns: int = 0
    is_reused: bool = False
    status: int = 0
    content: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    left_ns: int = 0
    ended_ns: int = 0
    tickets: list[Ticket] = field(default_factory=list[Ticket])

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events, unless it is an error."""
        return self.fields is not None and bool(self.fields.get("stream"))

    def answer(self) -> Any:
        """Return the answer's JSON."""
        try:
            return json.loads(bytes(self.content))
        except ValueError as error:
            raise AssertionError(f"the answer {self.status} is not JSON: {bytes(self.content)!r}") from error

    def events(self) -> list[Any]:
        """Return the events of a stream that have arrived whole, the last one "[DONE]" as a text."""
        parts = bytes(self.content).decode().split("\n\n")[:-1]
        assert all(part.startswith("data: ") for part in parts), parts
        told = [part.removeprefix("data: ") for part in parts]
        return [each if each == "[DONE]" else json.loads(each) for each in told]


class _Gone(Exception):
    """The client has closed the connection."""


class HttpClient:
    """A client with one connection at a time, which it uses again if the server keeps it open.

    Args:
        network: The machine's sockets.
        path: Path at which the server listens.
    """

    def __init__(self, network: Network, path: str) -> None:
        self._machine: Machine = network.machine
        self._network = network
        self._path = path
        self._socket: Socket | None = None
        self._http = h11.Connection(h11.CLIENT)

    def ask(self, ask: HttpAsk) -> None:
        """Send a request, and read its answer until it ends, the connection breaks, or the client leaves."""
        ask.is_reused = self._socket is not None
        ask.begun_ns = self._machine.now_ns
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            was_sent = self._send(ask, self._socket)
            self._receive(ask, self._socket)
            if not was_sent:
                self.close()
        except _Gone:
            ask.left_ns = self._machine.now_ns
            self.close()
        except OSError:
            self.close()
        ask.ended_ns = self._machine.now_ns
        if (
            self._socket is None
            or not ask.is_complete
            or self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
        ):
            self.close()
            return
        assert not self._http.trailing_data[0], "the server sends bytes after an answer"
        self._http.start_next_cycle()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        connecting = Socket(self._network)
        try:
            connecting.connect(self._path)
        except OSError:
            connecting.close()
            raise
        self._socket, self._http = connecting, h11.Connection(h11.CLIENT)

    def _send(self, ask: HttpAsk, to: Socket) -> bool:
        """Send the request; return whether it was sent before an answer came."""
        for piece, stall in self._pieces(ask):
            if to.is_readable:
                return False
            to.sendall(piece)
            if stall is not None and ask.habit is stall:
                self._machine.sleep(_STALL_S)
            elif self._machine.rng.random() < 0.1:
                self._machine.sleep(self._machine.rng.random() * 0.3)
        return True

    def _pieces(self, ask: HttpAsk) -> Iterator[tuple[bytes, Habit | None]]:
        """Yield the bytes of a request in pieces, each with the habit of stalling after it."""
        rng, http = self._machine.rng, self._http
        is_chunked = rng.random() < 0.2
        headers = [("Host", "server"), ("X-Request-Id", ask.name)]
        if ask.method == "POST":
            length = (
                ("Transfer-Encoding", "chunked") if is_chunked else ("Content-Length", str(len(ask.body)))
            )
            headers += [("Content-Type", "application/json"), length]
        head = http.send(h11.Request(method=ask.method, target=ask.path, headers=headers)) or b""
        cut = rng.randrange(1, len(head)) if rng.random() < 0.2 or ask.habit is Habit.STALLS_IN_HEAD else 0
        yield head[:cut], Habit.STALLS_IN_HEAD
        yield head[cut:], None
        cut = rng.randrange(len(ask.body)) if ask.body and rng.random() < 0.8 else 0
        for part in (ask.body[:cut], ask.body[cut:]):
            if ask.habit is Habit.LEAVES_IN_BODY and part is not ask.body[:cut]:
                raise _Gone
            yield (http.send(h11.Data(data=part)) or b"") if part else b"", Habit.STALLS_IN_BODY
        yield http.send(h11.EndOfMessage()) or b"", None

    def _receive(self, ask: HttpAsk, source: Socket) -> None:
        machine, rng = self._machine, self._machine.rng
        if ask.habit is Habit.STOPS_READING:
            machine.sleep(_STALL_S)
        leaves_ns = machine.now_ns + int(ask.patience_s * 1e9)
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                ask.status = event.status_code
            elif isinstance(event, h11.Data):
                ask.content += event.data
            elif isinstance(event, h11.EndOfMessage):
                ask.is_complete = True
                return
            elif event is h11.NEED_DATA:
                if ask.habit is Habit.READS_SLOWLY and rng.random() < 0.3:
                    machine.sleep(rng.random())
                if ask.habit is Habit.LEAVES:
                    source.settimeout(max(0.001, (leaves_ns - machine.now_ns) / 1e9))
                try:
                    received = source.recv(rng.randint(1, _MOST_READ))
                except TimeoutError:
                    raise _Gone from None
                if not received:
                    return
                self._http.receive_data(received)
