"""A whole server whose front ends are Triton's: requests and responses are tensors, as Triton's stub passes them.

Each front end is a process with the real `triton.front_end.FrontEnd`: sender, cancellation watcher and the
endpoint's client. Its response senders block, fail, and report clients that are gone, as Triton's do. What the
front end submits is checked as in `whole_server`; what its clients get is compared with that.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from inflight.config import Parameters
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import ConfigError
from inflight.serving import sender as sender_module
from inflight.serving.completion_text import TokenizerFinder
from inflight.testing.pb_utils import COMPLETE_FINAL, InferenceResponse, Tensor, TritonError
from inflight.text.tokenizer import Tokenizer
from inflight.triton import cancellation
from inflight.triton.front_end import FrontEnd
from inflight.triton.host import ModelArgs

from .answers import Ticket
from .front_ends import FrontEnds
from .recording_client import RecordingClient
from .run import PATH, RunReport
from .scheduler import Fiber, Machine, Process
from .threads import SimpleQueue
from .whole_server import WholeServer

_OUTPUTS = ("output_ids", "sequence_length", "finish_reason")
_UNLOADED_S = 60.0
_NOTICED_NS = 20 * 10**9


_PB_UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=COMPLETE_FINAL,
    Tensor=Tensor,
    TritonError=TritonError,
    InferenceResponse=InferenceResponse,
)
"""The part of `triton_python_backend_utils` that a front end uses."""


@dataclass(eq=False)
class Ask:
    """A request of Triton's client: Triton's request and its response sender in one object.

    Attributes:
        machine: The machine.
        name: The client's request id, unique in a run.
        tensors: The inputs.
        process: The front end.
        begun_ns: When the client sent it.
        is_slow: Whether sending sometimes takes long.
        failures: Probability that sending a response fails.
        gone_ns: When the client has cancelled; 0: it has not.
        was_taken: Whether the front end has been given it.
        sent: The responses, in order.
        num_failed: How many responses could not be sent.
        has_ended: Whether the final flag was sent.
        ended_ns: When the final flag was sent; 0: not yet.
        misuse: Description of what the front end did after the final flag, when Triton has freed the request; "":
            nothing.
        ticket: The request that the front end submitted for it, with the engine's responses; None: none.
    """

    machine: Machine
    name: str
    tensors: Mapping[str, NDArray[Any]]
    process: Process
    begun_ns: int
    is_slow: bool
    failures: float
    gone_ns: int = 0
    was_taken: bool = False
    sent: list[InferenceResponse] = field(default_factory=list[InferenceResponse])
    num_failed: int = 0
    has_ended: bool = False
    ended_ns: int = 0
    misuse: str = ""
    ticket: Ticket | None = None

    # ---------------------------------------------------------------- as Triton's request

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def request_id(self) -> str:
        return self.name

    def parameters(self) -> str:
        return "{}"

    def timeout(self) -> int:
        return 0

    def requested_output_names(self) -> tuple[str, ...]:
        return _OUTPUTS

    def get_response_sender(self) -> Ask:
        return self

    # ---------------------------------------------------------------- as its response sender

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.has_ended:
            self.misuse = "sent a response"
            return
        rng = self.machine.rng
        self.machine.pause()
        if self.is_slow and rng.random() < 0.3:
            self.machine.sleep(rng.random())
        if response is not None and rng.random() < self.failures:
            self.num_failed += 1
            raise RuntimeError("Triton has no memory for a response")
        if response is not None:
            self.sent.append(response)
        if flags & COMPLETE_FINAL:
            self.has_ended, self.ended_ns = True, self.machine.now_ns

    def is_cancelled(self) -> bool:
        if self.has_ended:
            self.misuse = "asked whether its client is gone"
        self.machine.pause()
        return bool(self.gone_ns)


class TritonFrontEnds(FrontEnds):
    """Processes of Triton's models that run the real front end, and the clients that send them requests.

    Attributes:
        asks: The requests of clients by name.
    """

    name = "Triton"
    ended = 0.5

    def __init__(self, server: WholeServer) -> None:
        super().__init__(server)
        self.asks: dict[str, Ask] = {}
        self._stubs: dict[Process, tuple[FrontEnd, SimpleQueue[list[Ask] | None], Fiber]] = {}
        self._send_failures = self.rng.choice([0.0, 0.0, 0.1])

    @contextmanager
    def replaced(self) -> Generator[None]:
        with ExitStack() as stack:
            for module in (sender_module, cancellation):
                stack.enter_context(patch.object(module, "lower_priority", lambda: None))
            yield

    def hold_something(self) -> bool:
        alive = [front_end for process, (front_end, *_) in self._stubs.items() if process.is_alive]
        return any(
            each._in_flight._entries or each._in_flight._by_client_request_id or each._budget._reserved
            for each in alive
        )

    # ---------------------------------------------------------------- front ends and their clients

    def start(self, process: Process) -> None:
        """Be a model's process with a front end and up to four clients."""
        num_users = self.draw_users(process)
        decoupled = self.rng.random() < 0.7
        asks = SimpleQueue[list[Ask] | None](self.machine)

        def be_model() -> None:
            client = RecordingClient(self.machine, SocketEngineClient(PATH), self.note)
            front_end = FrontEnd(
                _PB_UTILS,
                client,
                client.close,
                ModelArgs("model", Path("model", "1"), decoupled, Parameters(), {}),
                TokenizerFinder(None, _no_tokenizer),
            )
            self._stubs[process] = front_end, asks, self.machine.current
            for _ in range(num_users):
                self.machine.spawn(process, lambda: self._ask_for_answers(process, asks, decoupled), "client")
            while (batch := asks.get()) is not None:
                for ask in batch:
                    ask.was_taken = True
                front_end.execute(batch)
            front_end.close()
            self._check_closed_front_end(process, front_end)

        self.machine.spawn(process, be_model, "main")

    def note(self, ticket: Ticket) -> None:
        super().note(ticket)
        assert ticket.request.origin is not None
        self.asks[ticket.request.origin.request_id].ticket = ticket

    def _check_closed_front_end(self, process: Process, front_end: FrontEnd) -> None:
        mine = [ask for ask in self.asks.values() if ask.process is process and ask.was_taken]
        assert all(ask.has_ended for ask in mine), "a request is not answered after the end of its front end"
        assert not front_end._in_flight._by_engine_id or not any(ask.ticket for ask in mine)

    def _ask_for_answers(
        self, process: Process, asks: SimpleQueue[list[Ask] | None], decoupled: bool
    ) -> None:
        """Send some requests, some of them together, cancel or stop a few, and wait for all answers."""
        mine: list[Ask] = []
        for _ in range(self.rng.randint(1, 4)):
            self.machine.sleep(self.rng.random() * self.rng.choice([0.01, 1.0, 5.0]))
            batch = [self._make_ask(process, decoupled) for _ in range(self.rng.choice([1, 1, 3]))]
            mine += batch
            asks.put(batch)
            if self.rng.random() < 0.4:
                self.machine.sleep(self.rng.random() * self.rng.choice([0.0, 0.1, 3.0]))
                self._end_early(self.rng.choice(batch), asks)
        while not all(ask.has_ended for ask in mine):
            self.machine.sleep(0.2)
        self.server.users_left[process] -= 1

    def _make_ask(self, process: Process, decoupled: bool) -> Ask:
        limits, rng = self.server.limits, self.rng
        room = min(limits.max_sequence_length, limits.num_blocks * limits.tokens_per_block) - 1
        half = max(1, min(rng.choice([8, 8, 30]), room // 2))
        num_tokens, prompt = rng.randint(1, min(8, half)), self.server.draw_prompt(half)
        tensors: dict[str, NDArray[Any]] = {
            "input_ids": np.array([prompt], np.int32),
            "request_output_len": np.array([num_tokens], np.int32),
            "end_id": np.array([rng.randrange(limits.vocab_size)], np.int32),
            "random_seed": np.array([rng.randrange(100)], np.uint64),
            "runtime_top_k": np.array([rng.randint(1, 4)], np.int32),
            "exclude_input_in_output": np.array([True]),
            "streaming": np.array([decoupled and rng.random() < 0.7]),
        }
        if (guide := self.server.draw_guide()) is not None:
            del tensors["end_id"]
            tensors["guided_decoding_guide_type"] = np.array(["regex"], np.object_)
            tensors["guided_decoding_guide"] = np.array([guide.text], np.object_)
        if (adapter := self.server.draw_adapter()) is not None:
            tensors["lora_task_id"] = np.array([adapter.task_id], np.uint64)
        name = f"request {next(self.server.numbers)}"
        ask = self.asks[name] = Ask(
            self.machine,
            name,
            tensors,
            process,
            self.machine.now_ns,
            self.server.has_slow_readers,
            self._send_failures,
        )
        return ask

    def _end_early(self, ask: Ask, asks: SimpleQueue[list[Ask] | None]) -> None:
        """Cancel a request as its client, or send a stop request for it."""
        if self.rng.random() < 0.5:
            ask.gone_ns = self.machine.now_ns
            return
        stop = Ask(self.machine, ask.name, {"stop": np.array([True])}, ask.process, ask.begun_ns, False, 0.0)
        asks.put([stop])

    def is_up(self, process: Process) -> bool:
        return process in self._stubs

    def end(self, process: Process) -> None:
        """Unload a front end's model."""
        _, asks, main = self._stubs[process]
        asks.put(None)
        assert self.machine.wait_until(lambda: main.has_ended, _UNLOADED_S), "a front end does not end"

    # ---------------------------------------------------------------- promises

    def check_answers(self) -> None:
        for ask in self.asks.values():
            assert not ask.misuse, f"a front end {ask.misuse} after the final flag"
            if ask.has_ended:
                self._check_ask(ask)
            else:
                assert not ask.process.is_alive, "a request is not answered"

    def _check_ask(self, ask: Ask) -> None:
        if ask.gone_ns and ask.ended_ns > ask.gone_ns + _NOTICED_NS and ask.ticket is not None:
            is_noticed = ask.ticket.stops or self.server.has_slow_readers
            assert is_noticed or self.server.was_disturbed(ask.begun_ns, ask.ended_ns), (
                "a cancellation is not noticed"
            )
        errors = [error for each in ask.sent if (error := each.error()) is not None]
        if errors:
            assert len(errors) == 1 and ask.sent[-1].error() is errors[0], "an error is not the last response"
            self._check_error_of(ask, errors[0])
        elif ask.ticket is None or not ask.ticket.is_answered or ask.num_failed:
            assert ask.num_failed, "a request ended without a response of the engine"
            return
        if ask.ticket is None or ask.num_failed:
            return
        got = [token for each in ask.sent if not each.has_error() for token in _tokens_of(each)]
        made = list(ask.ticket.made()[0])
        assert got == made[: len(got)] and (errors or got == made), f"tokens {got}, the engine made {made}"

    def _check_error_of(self, ask: Ask, error: TritonError) -> None:
        ticket, code = ask.ticket, error.code()
        of_engine = None if ticket is None else ticket.error
        if code == TritonError.CANCELLED:
            assert ask.gone_ns, "a request ends as cancelled although nobody cancelled it"
        elif code == TritonError.UNAVAILABLE:
            is_unloaded = "unloaded" in str(error) and not ask.process.is_alive
            assert is_unloaded or of_engine or self.server.was_disturbed(ask.begun_ns, ask.ended_ns), error
        elif (
            ticket is None and code == TritonError.INVALID_ARG
        ):  # the front end itself knows the longest prompt
            assert f"input_ids has {ask.tensors['input_ids'].size} tokens; this server takes" in str(error), (
                error
            )
        else:
            assert ask.num_failed or (of_engine and getattr(TritonError, of_engine.code) == code), error


class ServerForTriton(WholeServer):
    """One run of a server with Triton's front ends."""

    def _make_kinds(self) -> Sequence[FrontEnds]:
        return (TritonFrontEnds(self),)

    def _has_adapters(self) -> bool:
        return False


def _no_tokenizer(folder: str) -> Tokenizer:
    raise ConfigError("there is no tokenizer on the machine")


def _tokens_of(response: InferenceResponse) -> list[int]:
    arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    (length,) = arrays["sequence_length"].ravel().tolist()
    return arrays["output_ids"].ravel().tolist()[:length]


def run(seed: int) -> RunReport:
    """Run a server with Triton's front ends; raises AssertionError if a promise was broken."""
    return ServerForTriton(seed).run()
