"""A kind of front ends of a simulated server: their starts and ends, their clients, and what the clients get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from .answers import Ticket

if TYPE_CHECKING:
    from .scheduler import Process
    from .whole_server import WholeServer


class FrontEnds(ABC):
    """All front ends of one kind in a run, with their clients.

    Args:
        server: The server to which they belong.

    Attributes:
        name: Name of the kind.
        ended: Share of the front ends to be killed that are ended in order before.
        tickets: The requests that they submitted to the engine.
    """

    name: ClassVar[str]
    ended: ClassVar[float] = 0.0

    def __init__(self, server: WholeServer) -> None:
        self.server = server
        self.machine, self.network, self.rng = server.machine, server.network, server.rng
        self.tickets: list[Ticket] = []

    @contextmanager
    def replaced(self) -> Generator[None]:
        """Replace what the machine does not have, while the server runs."""
        yield

    @abstractmethod
    def start(self, process: Process) -> None:
        """Start a front end in a new process, with as many clients as `draw_users` returns."""

    def is_up(self, process: Process) -> bool:
        """Return whether a front end serves, so that it can be ended in order."""
        return False

    def end(self, process: Process) -> None:  # noqa: B027 - not every kind has something to do
        """End a front end that is up in order, and wait until it has ended."""

    def hold_something(self) -> bool:
        """Return whether front ends that run hold something of requests that have ended."""
        return False

    def check_answers(self) -> None:  # noqa: B027 - not every kind has something to do
        """Check what the clients got, once all have their answers."""

    def check_end(self) -> None:  # noqa: B027 - not every kind has something to do
        """Check what is only known when the machine has ended."""

    @property
    def num_served(self) -> int:
        """How many of their requests were answered with tokens."""
        return sum(each.is_answered and each.error is None for each in self.tickets)

    def draw_users(self, process: Process) -> int:
        """Draw how many clients a front end has, and note that these have requests."""
        num_users = self.server.users_left[process] = self.rng.randint(1, 4)
        return num_users

    def note(self, ticket: Ticket) -> None:
        """Note a request before it is submitted to the engine."""
        self.tickets.append(ticket)
        self.server.tickets.append(ticket)
