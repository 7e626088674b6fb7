"""Simulated Unix sockets: streams with a bounded buffer, whose bytes arrive late and in pieces.

The order of the bytes of a stream is kept; different streams delay each other in no way. A killed process cuts its
messages where they are, and `Network.cut` cuts a connection.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import stat
import struct
from collections import deque
from itertools import count
from types import SimpleNamespace

from .scheduler import Machine, Process, Waiters
from .threads import SimulatedModule

_CREDENTIALS = struct.Struct("iII")
_TIMEOUT = struct.Struct("ll")
_LONGEST_DELAY_S = 0.002
_SLOWEST_DELAY_S = 2.0  # of few pieces
_BUFFERS = (200, 4_000, 200_000)


class Stream:
    """One direction of a connection: bytes on their way, and bytes that have arrived.

    Attributes:
        arrived: Bytes that can be read.
        is_ended: Whether the writing side has closed it; bytes on their way still arrive.
        is_refused: Whether the reading side takes no more: writing raises BrokenPipeError.
        is_reset: Whether it is broken: bytes on their way are lost, and writing raises ConnectionResetError.
        is_reset_unread: Whether the next call that reads raises ConnectionResetError; only that one does.
    """

    def __init__(self, machine: Machine) -> None:
        self.arrived = bytearray()
        self.is_ended = self.is_refused = self.is_reset = self.is_reset_unread = False
        self.readers, self.writers = Waiters(machine), Waiters(machine)
        self.selectors: list[Waiters] = []  # of the reading side
        self.writing_selectors: list[Waiters] = []
        self._machine = machine
        self._capacity = machine.rng.choice(_BUFFERS)
        self._on_their_way: deque[bytes] = deque()
        self._num_on_their_way = 0

    @property
    def room(self) -> int:
        """How many bytes can be written now."""
        return max(0, self._capacity - len(self.arrived) - self._num_on_their_way)

    @property
    def is_over(self) -> bool:
        """Whether no more bytes will arrive."""
        return self.is_reset or (self.is_ended and not self._on_their_way)

    def write(self, data: bytes) -> None:
        """Send bytes, for which there is room, in up to three pieces."""
        rng = self._machine.rng
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 0, 1, 2])))
        delay_s = 0.0
        for begin, end in zip([0, *cuts], [*cuts, len(data)]):
            if begin < end:
                self._on_their_way.append(data[begin:end])
                self._num_on_their_way += end - begin
                longest_s = _SLOWEST_DELAY_S if rng.random() < 0.005 else _LONGEST_DELAY_S
                delay_s += rng.random() * longest_s
                self._machine.call_later(delay_s, self._arrive)

    def _wake_readers(self) -> None:
        for waiters in (self.readers, *self.selectors):
            waiters.wake()

    def _wake_writers(self) -> None:
        for waiters in (self.writers, *self.writing_selectors):
            waiters.wake()

    def _arrive(self) -> None:
        if self._on_their_way and not self.is_reset:
            piece = self._on_their_way.popleft()
            self._num_on_their_way -= len(piece)
            self.arrived += piece
        self._wake_readers()

    def read(self, count: int) -> bytes:
        """Take at most `count` bytes that have arrived."""
        taken = bytes(self.arrived[:count])
        del self.arrived[:count]
        self._wake_writers()
        return taken

    def end(self) -> None:
        """Close the writing side: the reader gets the bytes on their way, and then the end."""
        self.is_ended = True
        self._wake_readers()
        self._wake_writers()

    def refuse(self) -> None:
        """Close the reading side: writing raises BrokenPipeError from now on."""
        self.is_refused = True
        self._wake_readers()
        self._wake_writers()

    def reset(self) -> None:
        """Break the stream: bytes on their way are lost."""
        self.is_reset = self.is_reset_unread = True
        self._on_their_way.clear()
        self.end()


class Network:
    """The sockets of a machine: listeners by path, and all connections."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.files: dict[str, Socket | None] = {}  # the socket that listens at a path; None: it is dead
        self.connections: list[tuple[Stream, Stream]] = []  # to listeners
        self.by_number: dict[int, Socket] = {}
        self.numbers = count(3)

    def cut(self, connection: tuple[Stream, Stream]) -> None:
        """Break a connection: both sides lose the bytes on their way, perhaps inside a message."""
        for stream in connection:
            stream.reset()

    def pair(self, one: Process, other: Process) -> tuple[Socket, Socket]:
        """Return two connected sockets of two processes."""
        ends = Socket(self, one), Socket(self, other)
        ends[0].join(ends[1])
        return ends

    def sockets(self) -> SimulatedModule:
        """Return the machine's module `socket`."""
        network = self

        class MachineSocket(Socket):
            def __init__(self, family: int = socket.AF_UNIX) -> None:
                super().__init__(network)

        def socketpair() -> tuple[Socket, Socket]:
            return self.pair(self.machine.process, self.machine.process)

        return SimulatedModule(socket, {"socket": MachineSocket, "socketpair": socketpair})

    def files_of_sockets(self) -> SimulatedModule:
        """Return the machine's module `os`, as far as it is about sockets' files."""

        def lstat(path: str) -> SimpleNamespace:
            if path not in self.files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return SimpleNamespace(st_mode=stat.S_IFSOCK)

        def unlink(path: str) -> None:
            lstat(path)
            del self.files[path]

        def chmod(path: str, mode: int) -> None:
            lstat(path)

        return SimulatedModule(
            os,
            {
                "lstat": lstat,
                "unlink": unlink,
                "chmod": chmod,
                "getpid": lambda: self.machine.process.pid,
                "getppid": lambda: 1,
            },
        )


class Selector:
    """Waits until one of several sockets can be read, with the methods of `selectors.DefaultSelector`."""

    def __init__(self, machine: Machine) -> None:
        self._keys: dict[Socket, selectors.SelectorKey] = {}
        self._waiters = Waiters(machine)

    def __enter__(self) -> Selector:
        return self

    def __exit__(self, *_: object) -> None:
        for watched in list(self._keys):
            self.unregister(watched)

    def register(self, watched: Socket, events: int, data: object = None) -> None:
        self._keys[watched] = selectors.SelectorKey(watched, 0, events, data)  # pyright: ignore[reportArgumentType]
        watched.watch(self._waiters, True)

    def unregister(self, watched: Socket) -> None:
        del self._keys[watched]
        watched.watch(self._waiters, False)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = [watched for watched in self._keys if watched.is_readable]
        if not ready:
            self._waiters.wait(timeout)
            ready = [watched for watched in self._keys if watched.is_readable]
        return [(self._keys[watched], selectors.EVENT_READ) for watched in ready]


class Socket:
    """A Unix socket with the methods of `socket.socket`; it belongs to the process that makes it."""

    def __init__(self, network: Network, process: Process | None = None) -> None:
        self._network = network
        self._machine = network.machine
        self._process: Process = process or self._machine.process
        self._path: str | None = None
        self._backlog: deque[Socket] | None = None
        self._timeout_s: float | None = None
        self._send_timeout_s: float | None = None
        self._is_closed = self._is_shut = False
        self._accepting = Waiters(self._machine)
        self._peer: Process | None = None
        self._in: Stream | None = None
        self._out: Stream | None = None
        self._watchers: list[Waiters] = []  # of a listening socket
        self._number = next(network.numbers)
        network.by_number[self._number] = self
        self._process.resources[id(self)] = self

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- as asyncio knows it

    family, type = socket.AF_UNIX, socket.SOCK_STREAM

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    def getsockname(self) -> str:
        return self._path or ""

    def getpeername(self) -> str:
        self._stream(self._in)
        return ""

    # ---------------------------------------------------------------- listening

    def bind(self, path: str) -> None:
        if path in self._network.files:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._network.files[path] = None
        self._path = path

    def listen(self, backlog: int = 128) -> None:
        assert self._path is not None
        self._backlog = self._backlog or deque()
        self._network.files[self._path] = self

    def accept(self) -> tuple[Socket, str]:
        assert self._backlog is not None
        while not self._backlog:
            if self._is_shut or self._is_closed:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if self._timeout_s == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            self._accepting.wait()
        self._machine.pause()
        if self._machine.rng.random() < 0.02:  # no descriptors left; the connection stays in the backlog
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._backlog.popleft(), ""

    # ---------------------------------------------------------------- connecting

    def connect(self, path: str) -> None:
        self._machine.pause()
        if path not in self._network.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        listening = self._network.files[path]
        if listening is None or listening._backlog is None or listening._is_shut:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        accepted = Socket(self._network, listening._process)
        connection = self.join(accepted)
        self._network.connections.append(connection)
        listening._backlog.append(accepted)
        for waiters in (listening._accepting, *listening._watchers):
            waiters.wake()

    def join(self, other: Socket) -> tuple[Stream, Stream]:
        """Connect to another socket, and return the streams of the connection."""
        forth, back = Stream(self._machine), Stream(self._machine)
        self._in, self._out, self._peer = back, forth, other._process
        other._in, other._out, other._peer = forth, back, self._process
        return forth, back

    def getsockopt(self, level: int, option: int, length: int = 0) -> bytes:
        assert option == socket.SO_PEERCRED and self._peer is not None
        return _CREDENTIALS.pack(self._peer.pid, os.geteuid(), os.getegid())

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert option == socket.SO_SNDTIMEO
        seconds, microseconds = _TIMEOUT.unpack(value)
        self._send_timeout_s = seconds + microseconds / 1e6

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    # ---------------------------------------------------------------- bytes

    def sendall(self, data: bytes | memoryview) -> None:
        stream = self._stream(self._out)
        left = bytes(data)
        while True:
            self._machine.pause()
            self._check_writable(stream)
            now, left = left[: stream.room], left[stream.room :]
            if now:
                stream.write(now)
            if not left:
                return
            timeout_s = self._send_timeout_s if self._timeout_s is None else self._timeout_s
            if not stream.room and not stream.writers.wait(timeout_s):
                if self._timeout_s is not None:
                    raise TimeoutError("timed out")
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if self._in is not None and stream.is_refused:
                self._in.is_reset_unread = False  # a sender that waits takes the error from the reader

    def _check_writable(self, stream: Stream) -> None:
        if stream.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        if stream.is_refused or stream.is_ended or self._is_shut:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def recv(self, count: int, flags: int = 0) -> bytes:
        stream = self._stream(self._in)
        self._machine.pause()
        if flags & socket.MSG_WAITALL and self._machine.refuses_memory():
            raise MemoryError
        waits_for_all = bool(flags & socket.MSG_WAITALL) and self._machine.rng.random() < 0.9
        received = stream.read(count)
        while len(received) < (count if waits_for_all else 1) and not stream.is_over and not self._is_shut:
            if self._timeout_s == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if not stream.readers.wait(self._timeout_s):
                raise TimeoutError("timed out")
            received += stream.read(count - len(received))
        if stream.is_reset_unread and not received:
            stream.is_reset_unread = False
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return received

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def send(self, data: bytes | bytearray) -> int:
        """Send what there is room for, on a socket that does not block."""
        stream = self._stream(self._out)
        self._check_writable(stream)
        now = bytes(data[: stream.room])
        if not now and data:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        stream.write(now)
        return len(now)

    @property
    def is_readable(self) -> bool:
        """Whether `recv` or `accept` would return at once."""
        if self._backlog is not None:
            return bool(self._backlog)
        stream = self._stream(self._in)
        return bool(stream.arrived) or stream.is_over or self._is_shut

    @property
    def is_writable(self) -> bool:
        """Whether `send` would return at once."""
        stream = self._stream(self._out)
        return bool(stream.room) or stream.is_refused or stream.is_ended or stream.is_reset

    def watch(self, waiters: Waiters, is_watched: bool) -> None:
        """Begin or cease to wake the waiters of a selector when something arrives."""
        if self._backlog is not None:
            (self._watchers.append if is_watched else self._watchers.remove)(waiters)
        if self._in is not None:
            (self._in.selectors.append if is_watched else self._in.selectors.remove)(waiters)

    def watch_room(self, waiters: Waiters, is_watched: bool) -> None:
        """Begin or cease to wake the waiters of a selector when there is room for more bytes."""
        if self._out is not None:
            watching = self._out.writing_selectors
            (watching.append if is_watched else watching.remove)(waiters)

    def recv_into(self, buffer: memoryview) -> int:
        received = self.recv(len(buffer))
        buffer[: len(received)] = received
        return len(received)

    def _stream(self, stream: Stream | None) -> Stream:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if stream is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return stream

    # ---------------------------------------------------------------- the end

    def shutdown(self, how: int) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._is_shut = True
        self._leave()
        self._machine.pause()

    def _leave(self) -> None:
        self._accepting.wake()
        if self._in is not None and self._out is not None:
            self._in.refuse()
            self._out.end()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._process.resources.pop(id(self), None)
        self._network.by_number.pop(self._number, None)
        self._leave()
        if self._in is not None and self._out is not None and self._in.arrived:
            self._out.reset()  # the kernel tells the peer that bytes were not read
        if self._backlog is not None and self._path is not None:
            if self._network.files.get(self._path) is self:
                self._network.files[self._path] = None
            for waiting in self._backlog:
                waiting.close()

    def end_with_process(self) -> None:
        """Close the socket as the kernel does when its process is killed."""
        self.close()
