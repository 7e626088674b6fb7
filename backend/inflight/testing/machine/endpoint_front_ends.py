"""Front ends that are only clients of the engine's endpoint; their users submit, stop and abandon requests."""

from __future__ import annotations

import json

from inflight.core.request.adapter_command import AdapterAction, AdapterCommand
from inflight.core.request.handle import RequestHandle
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import InflightError, NotFound, Unavailable
from inflight.testing.simulation.host_cache import NUM_TASKS

from .answers import Ticket
from .front_ends import FrontEnds
from .run import PATH
from .scheduler import Process

_QUERY_TIMEOUT_S = 20.0


class EndpointFrontEnds(FrontEnds):
    """Front ends with the endpoint's client and nothing else."""

    name = "endpoint"

    def start(self, process: Process) -> None:
        num_users = self.draw_users(process)

        def connect() -> None:
            client = SocketEngineClient(PATH)
            for _ in range(num_users):
                self.machine.spawn(process, lambda: self._use(client, process), "user")

        self.machine.spawn(process, connect, "main")

    def _use(self, client: SocketEngineClient, process: Process) -> None:
        """Submit some requests, one after the other or several at once, and wait for all answers."""
        mine: list[Ticket] = []
        for _ in range(self.rng.randint(1, 5)):
            self.machine.sleep(self.rng.random() * self.rng.choice([0.01, 1.0, 5.0]))
            if self.rng.random() < 0.1:
                self._ask_for_state(client)
            if self.server.has_adapters and self.rng.random() < 0.2:
                self._unload_an_adapter(client)
            mine.append(self._submit(client))
            while self.rng.random() < 0.6 and not mine[-1].is_answered:
                self.machine.sleep(0.05)
        while not all(ticket.is_answered for ticket in mine):
            self.machine.sleep(0.2)
        self.server.users_left[process] -= 1

    def _submit(self, client: SocketEngineClient) -> Ticket:
        ticket = Ticket(self.server.draw_request(), self.machine.now_ns)
        self.note(ticket)

        def take(response: Response) -> None:
            ticket.responses.append(response)
            if response.is_final:
                ticket.answered_ns = self.machine.now_ns
            if self.server.has_slow_readers and self.rng.random() < 0.2:
                self.machine.sleep(self.rng.random())

        try:
            handle = client.submit(ticket.request, take)
        except InflightError as error:
            ticket.refusal, ticket.answered_ns = error, self.machine.now_ns
            return ticket
        if self.rng.random() < 0.25:
            self.machine.sleep(self.rng.random() * self.rng.choice([0.0, 0.1, 3.0]))
            self._stop(ticket, handle)
        return ticket

    def _stop(self, ticket: Ticket, handle: RequestHandle) -> None:
        sampling = ticket.request.sampling
        reasons = [StopReason.CANCELLED, StopReason.TIMED_OUT]
        if not sampling.uses_beams:
            reasons.append(StopReason.STOP_WORDS)
        reason = self.rng.choice(reasons)
        index = self.rng.choice([None, self.rng.randrange(sampling.num_sequences)])
        ticket.stops.append((reason, index))
        handle.stop(reason, index)

    def _ask_for_state(self, client: SocketEngineClient) -> None:
        begun_ns = self.machine.now_ns
        try:
            state = json.loads(client.state(_QUERY_TIMEOUT_S))
        except Unavailable:
            assert self._may_be_unanswered(begun_ns), "no answer to a query"
            return
        assert state["unanswered_requests"] >= state["queued_requests"] >= 0

    def _unload_an_adapter(self, client: SocketEngineClient) -> None:
        command = AdapterCommand(AdapterAction.UNLOAD, task_id=self.rng.randrange(NUM_TASKS))
        begun_ns = self.machine.now_ns
        try:
            client.adapters(command, _QUERY_TIMEOUT_S)
        except NotFound:
            pass
        except Unavailable:
            assert self._may_be_unanswered(begun_ns), "no answer to a command"

    def _may_be_unanswered(self, begun_ns: int) -> bool:
        server = self.server
        return server.has_slow_readers or server.was_disturbed(begun_ns, self.machine.now_ns)
