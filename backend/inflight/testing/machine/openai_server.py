"""A whole server whose front ends are those of `/v1`: HTTP over simulated sockets, on the machine's event loop.

Each front end is a process with the real application and HTTP protocol of `inflight.openai`, uvicorn's server, and
the endpoint's client. What the front end submits is checked as in `whole_server`; what its clients get is compared
with the text and tokens of each prompt alone.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import gc
import json
import logging
import signal
import string
import tempfile
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from inflight import access_log
from inflight.config import Parameters
from inflight.core.request.stop import FinishReason
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import InvalidArgument, QueueFull, StepFailed
from inflight.openai import __main__ as program
from inflight.openai import bodies
from inflight.openai.http_metrics import HttpMetrics
from inflight.openai.options import OpenAiOptions
from inflight.testing.fake_model import Conditions
from inflight.testing.simulation.alone import sequence_alone

from .answers import Ticket
from .event_loop import MachineLoop
from .front_ends import FrontEnds
from .http_client import LEAVING, STALLING, Habit, HttpAsk, HttpClient
from .recording_client import RecordingClient
from .run import PATH, RunReport
from .scheduler import Process
from .sockets import Socket
from .whole_server import WholeServer

_MODEL = "model"
_MAX_BODY_BYTES = 4000
_LETTERS = string.ascii_lowercase
_UNLOADED_S = 60.0  # until a front end has ended, beyond its time for requests in flight
_NOTICED_NS = 4 * 10**9
_WRITTEN_NS = 3 * 10**9  # until the access line of a request that has ended is written
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class _Ordered(dict[Any, None]):
    """A set of uvicorn's in the order in which its members were added, so that each run has the same order."""

    def add(self, member: Any) -> None:
        self[member] = None

    def discard(self, member: Any) -> None:
        self.pop(member, None)


class _HttpFrontEnd:
    """A front end's process, with its parts as far as they exist.

    Attributes:
        process: The process.
        path: Path at which it listens.
        server: uvicorn's server; None before the start.
        client: The endpoint's client.
        exit_timeout_s: How long requests in flight may take when it ends.
        drained_ns: When it was asked to end; 0: it was not.
        ended_ns: When it had ended in order; 0: it has not.
    """

    def __init__(self, process: Process, exit_timeout_s: int) -> None:
        self.process = process
        self.path = f"/run/v1-{process.pid}.sock"
        self.server: program._Server | None = None
        self.client: SocketEngineClient | None = None
        self.exit_timeout_s = exit_timeout_s
        self.drained_ns = self.ended_ns = 0

    @property
    def state(self) -> Any:
        """The `state` of the FastAPI application, with contexts and limits of bodies."""
        assert self.server is not None
        return cast(Any, self.server.config.app).state


class OpenAiFrontEnds(FrontEnds):
    """Processes that run the real code of /v1, and the HTTP clients that send them requests.

    Attributes:
        asks: The requests of clients by name.
    """

    name = "/v1"
    ended = 0.6

    def __init__(self, server: WholeServer) -> None:
        super().__init__(server)
        self.asks: dict[str, HttpAsk] = {}
        self._of_process: dict[Process, _HttpFrontEnd] = {}
        self._lines: Counter[str] = Counter()

    @contextmanager
    def replaced(self) -> Generator[None]:
        recorder = logging.Logger("access", logging.INFO)
        recorder.manager = logging.Manager(logging.RootLogger(logging.WARNING))
        recorder.addHandler(_Counting(self._lines))
        was_enabled = gc.isenabled()
        gc.disable()  # what it finalizes could use the machine, at a time that is not the seed's
        try:
            with ExitStack() as stack:
                stack.enter_context(patch.object(access_log, "LOGGER", recorder))
                stack.enter_context(
                    patch.object(bodies, "_SMALL_BYTES", self.rng.choice([50, bodies._SMALL_BYTES]))
                )
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # of coroutines and transports of killed processes
                yield
        finally:
            gc.collect(1)  # what this run and the one before have made
            if was_enabled:
                gc.enable()

    def check_end(self) -> None:
        for ask in self.asks.values():
            self._check_lines(ask)
            self._check_abandoned(ask)
        for front_end in self._alive():  # a request is counted after its client has the whole answer
            self._check_counts(front_end)

    def hold_something(self) -> bool:
        return any(map(_holds_something, self._alive()))

    def _alive(self) -> list[_HttpFrontEnd]:
        return [each for each in self._of_process.values() if each.process.is_alive and each.server]

    # ---------------------------------------------------------------- front ends

    def start(self, process: Process) -> None:
        """Be a process of /v1 with up to four clients."""
        front_end = _HttpFrontEnd(process, self.rng.choice([1, 5, 30]))
        self._of_process[process] = front_end
        num_users = self.draw_users(process)
        self.machine.spawn(process, lambda: self._be_front_end(front_end), "main")
        for _ in range(num_users):
            client = self.machine.start_process("client")
            self.machine.spawn(client, lambda: self._ask_for_answers(front_end), "client")

    def _be_front_end(self, front_end: _HttpFrontEnd) -> None:
        """Run the application of `/v1` in the front end's process until it is asked to end."""
        client = front_end.client = SocketEngineClient(PATH)
        recording = RecordingClient(self.machine, client, self.note)
        options = OpenAiOptions(
            served_model_names=(_MODEL,),
            convert="none",
            max_body_bytes=_MAX_BODY_BYTES,
            max_stored_responses=0,
        )
        config = program._config(recording, (), options, None, front_end.exit_timeout_s)
        listener = Socket(self.network)
        listener.bind(front_end.path)
        listener.listen()
        server = program._Server(config)
        state: Any = server.server_state
        state.connections, state.tasks = _Ordered(), _Ordered()
        loop = MachineLoop(self.machine, self.network)
        front_end.server = server
        loop.run(uvicorn.Server._serve(server, [cast(Any, listener)]))
        client.close()
        front_end.ended_ns = self.machine.now_ns

    def note(self, ticket: Ticket) -> None:
        super().note(ticket)
        assert ticket.request.origin is not None
        self.asks[ticket.request.origin.request_id].tickets.append(ticket)

    def is_up(self, process: Process) -> bool:
        server = self._of_process[process].server
        return server is not None and server.started

    def end(self, process: Process) -> None:
        """Send a front end SIGTERM."""
        front_end = self._of_process[process]
        assert front_end.server is not None
        front_end.drained_ns = self.machine.now_ns
        front_end.server.handle_exit(signal.SIGTERM, None)
        longest_s = front_end.exit_timeout_s + _UNLOADED_S
        assert self.machine.wait_until(lambda: bool(front_end.ended_ns), longest_s), (
            "a front end does not end"
        )
        assert not _holds_something(front_end), (
            f"a front end that has ended holds {_holds_something(front_end)}"
        )
        self.machine.sleep(1.0)
        threads = [
            each
            for each in self.machine.fibers
            if each.process is process and not (each.has_ended or each is self.machine.current)
        ]
        assert not threads, f"threads go on after the end of a front end: {[each.name for each in threads]}"

    # ---------------------------------------------------------------- clients

    def _ask_for_answers(self, front_end: _HttpFrontEnd) -> None:
        """Send some requests one after the other, and read their answers."""
        client = HttpClient(self.network, front_end.path)
        for _ in range(self.rng.randint(1, 5)):
            self.machine.sleep(self.rng.random() * self.rng.choice([0.01, 1.0, 5.0]))
            while not self.network.files.get(front_end.path) and front_end.process.is_alive:
                self.machine.sleep(0.1)
            if front_end.drained_ns or not front_end.process.is_alive:
                break
            ask = self._make_ask(front_end.process)
            self.asks[ask.name] = ask
            client.ask(ask)
            if self.rng.random() < 0.3:
                client.close()
        client.close()
        if front_end.process in self.server.users_left:
            self.server.users_left[front_end.process] -= 1

    def _make_ask(self, process: Process) -> HttpAsk:
        rng, name = self.rng, f"request {next(self.server.numbers)}"
        kind = rng.choice(["text"] * 8 + ["get", "bad"])
        if kind == "get":
            return HttpAsk(name, process, "GET", rng.choice(["/v1/models", "/health"]))
        if kind == "bad":
            path, body, status = rng.choice(_BAD)
            ask = HttpAsk(name, process, "POST", path, body, expected_status=status)
        else:
            fields = self._make_fields()
            body = json.dumps(fields).encode()
            ask = HttpAsk(
                name, process, "POST", _CHATS if "messages" in fields else _COMPLETIONS, body, fields
            )
        ask.habit = rng.choice([Habit.NONE] * 12 + [*STALLING, *LEAVING, Habit.LEAVES, Habit.READS_SLOWLY])
        ask.patience_s = rng.random() * rng.choice([0.01, 0.3, 3.0])
        return ask

    def _make_fields(self) -> dict[str, Any]:
        rng, limits = self.rng, self.server.model_limits
        room = min(limits.max_sequence_length, limits.num_blocks * limits.tokens_per_block) - 1
        half = max(
            1, min(rng.choice([8, 8, 30]), room // 2, limits.max_input_length, limits.max_context_tokens)
        )
        vocabulary = limits.vocab_size
        prompts = [self.server.draw_prompt(half) for _ in range(rng.choice([1, 1, 2]))]
        asked: dict[str, Any] = {"prompt": prompts[0] if len(prompts) == 1 else prompts}
        if len(prompts) == 1 and rng.random() < 0.5:
            asked = {"messages": _make_messages(prompts[0], rng.randint(0, half))}
        fields: dict[str, Any] = {
            "model": _MODEL,
            **asked,
            "max_tokens": rng.randint(1, half),
            "seed": rng.randrange(100),
            "top_k": rng.randint(1, 4),
            "return_token_ids": True,
            "stream": rng.random() < 0.6,
        }
        if (guide := self.server.draw_guide()) is not None:
            fields["guided_regex"] = guide.text
        elif rng.random() < 0.3:
            fields["stop"] = ["".join(rng.choices(_LETTERS[:vocabulary], k=rng.randint(1, 2)))]
        if fields["stream"] and rng.random() < 0.6:
            fields["stream_options"] = {
                "include_usage": True,
                "continuous_usage_stats": rng.random() < 0.5,
            }
        return fields

    # ---------------------------------------------------------------- promises

    def check_answers(self) -> None:
        for ask in self.asks.values():
            if ask.ended_ns:
                self._check_ask(ask)
            else:
                assert not ask.process.is_alive, "a request is not answered"

    def _is_excused(self, ask: HttpAsk) -> bool:
        """Whether a fault overlaps a request."""
        return self.server.was_disturbed(ask.begun_ns, ask.ended_ns)

    def _check_ask(self, ask: HttpAsk) -> None:
        if ask.left_ns:
            return
        if not ask.is_complete:
            is_closing = ask.is_reused and not ask.status
            assert (
                is_closing or ask.habit in STALLING or ask.expected_status == 413 or self._is_excused(ask)
            ), "a connection breaks without a reason"
            assert not self._must_be_finished(ask), "a request is not finished before its front end ends"
            return
        is_late = ask.habit in (Habit.STALLS_IN_HEAD, Habit.STALLS_IN_BODY)
        assert not (is_late and ask.status == 200), "a request that came too late is answered"
        if ask.status != ask.expected_status:
            self._check_error_of(ask, ask.status, str(ask.answer()["error"]["message"]))
        elif ask.fields is not None and ask.is_streamed:
            self._check_stream(ask, ask.fields)
        elif ask.fields is not None:
            whole = ask.answer()
            self._check_choices(ask, ask.fields, [whole], whole["usage"])

    def _must_be_finished(self, ask: HttpAsk) -> bool:
        """Whether the front end ended in time, after it had got a request whose client only waits."""
        front_end = self._of_process[ask.process]
        in_time_ns = front_end.drained_ns + int(front_end.exit_timeout_s * 1e9)
        return (
            ask.habit is Habit.NONE
            and any(each.submitted_ns < front_end.drained_ns for each in ask.tickets)
            and 0 < front_end.ended_ns < in_time_ns
            and not self.server.was_disturbed(ask.begun_ns, front_end.drained_ns - 1)
        )

    def _check_abandoned(self, ask: HttpAsk) -> None:
        """Check that the requests of a client that has left are stopped soon."""
        for ticket in ask.tickets if ask.left_ns else ():
            ends_late = not ticket.answered_ns or ticket.answered_ns > ask.left_ns + _NOTICED_NS
            assert (
                not ends_late
                or ticket.stops
                or self.server.was_disturbed(ask.begun_ns, ask.left_ns + _NOTICED_NS)
            ), "the requests of a client that has left go on"

    def _check_error_of(self, ask: HttpAsk, status: int, message: str) -> None:
        """Check that there is a reason for an error."""
        errors = [each.error for each in ask.tickets if each.error is not None]
        if status == 503:
            is_known = any(each.code == "UNAVAILABLE" and not isinstance(each, QueueFull) for each in errors)
            assert self._is_excused(ask) or is_known, f"refused without a fault: {message}"
        elif status == 429:
            assert any(isinstance(error, QueueFull) for error in errors), message
        elif status == 408:
            assert ask.habit in STALLING or self._is_excused(ask), message
        elif status == 400:
            has_guide = ask.fields is not None and "guided_regex" in ask.fields
            assert has_guide and any(isinstance(error, InvalidArgument) for error in errors), message
        elif status == 500:
            assert any(isinstance(error, StepFailed) for error in errors), message
        else:
            raise AssertionError(f"an unexpected answer {status}: {message}")

    def _check_stream(self, ask: HttpAsk, fields: dict[str, Any]) -> None:
        events = ask.events()
        assert events.count("[DONE]") == 1 and events[-1] == "[DONE]", (
            f"a stream has no end, or several: {events}"
        )
        chunks = events[:-1]
        errors = [each for each in chunks if "error" in each]
        if errors:
            assert len(errors) == 1 and chunks[-1] is errors[0], "an error is not the last event"
            error = errors[0]["error"]
            status = _STATUS_OF_CODE.get(error["code"], 500)
            self._check_error_of(ask, status, str(error))
            self._check_choices(ask, fields, chunks[:-1], None)
            return
        usage = None
        if "stream_options" in fields:
            assert chunks and not chunks[-1]["choices"], "a stream has no usage"
            usage = chunks[-1]["usage"]
            chunks = chunks[:-1]
        self._check_choices(ask, fields, chunks, usage)
        assert all(each["choices"] for each in chunks), "a chunk has no choice"

    def _check_choices(
        self, ask: HttpAsk, fields: dict[str, Any], chunks: list[Any], usage: dict[str, Any] | None
    ) -> None:
        """Compare the choices of an answer with each prompt's tokens and text alone.

        Args:
            ask: The request.
            fields: Its body.
            chunks: The answer, or the chunks of it.
            usage: The answer's usage; None: it has none.
        """
        texts, ids, reasons = Counter[int](), dict[int, list[int]](), dict[int, str]()
        parts: dict[int, str] = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            index = choice["index"]
            assert index not in reasons, "a choice goes on after its end"
            texts[index] += 1
            parts[index] = parts.get(index, "") + _text_of(choice)
            ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
        if "messages" in fields:
            _check_chat(fields, chunks)
        is_whole = len(chunks) > 0 and (usage is not None or "stream_options" not in fields)
        prompts = _prompts_of(fields)
        tickets = {each.request.input_token_ids: each for each in ask.tickets}
        has_failed = usage is None and len(reasons) < len(prompts)
        for index, prompt in enumerate(prompts):
            text, tokens, reason = self._alone(tickets[tuple(prompt)], fields)
            got, got_ids = parts.get(index, ""), ids.get(index, [])
            if has_failed and index not in reasons:
                assert text.startswith(got) and tokens[: len(got_ids)] == got_ids
                continue
            assert (got, got_ids) == (text, tokens), f"{got!r} {got_ids}, alone {text!r} {tokens}"
            assert reasons[index] == reason, f"ended for {reasons[index]}, alone for {reason}"
        if usage is not None and is_whole:
            counted = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
            num_prompt, num_new = sum(map(len, prompts)), sum(map(len, ids.values()))
            assert counted == (num_prompt, num_new, num_prompt + num_new), f"{usage}: {num_prompt}, {num_new}"

    def _alone(self, ticket: Ticket, fields: dict[str, Any]) -> tuple[str, list[int], str]:
        """Return the text, the tokens and the finish reason that a prompt gets alone; with a guide, which the
        tokens must follow, those of the engine."""
        request = ticket.request
        if request.guide is not None:
            made, reason = ticket.made()
            name = "length" if reason is FinishReason.LENGTH else "stop"
            return "".join(_LETTERS[token] for token in made), list(made), name
        assert (
            request.max_new_tokens == fields["max_tokens"] and request.sampling.random_seed == fields["seed"]
        )
        alone = sequence_alone(request, 0, self.server.limits.vocab_size, Conditions.of(request, b""))
        text = "".join(_LETTERS[token] for token in alone.tokens)
        for stop in fields.get("stop", ()):
            if (at := text.find(stop)) >= 0:
                return text[:at], list(alone.tokens[: at + len(stop)]), "stop"
        is_cut = alone.reason is FinishReason.LENGTH
        return text, list(alone.tokens), "length" if is_cut else "stop"

    def _check_counts(self, front_end: _HttpFrontEnd) -> None:
        """Compare the counts of HTTP requests with the answers that clients got."""
        metrics: HttpMetrics = front_end.state.contexts[0].http_metrics
        counted = Counter[int]()
        for (_, _, status), number in metrics._requests.items():
            counted[status] += number
        mine = [each for each in self.asks.values() if each.process is front_end.process]
        mine = [each for each in mine if each.path != "/health"]
        got = Counter(each.status for each in mine if each.is_complete and each.status != 408)
        assert all(counted[status] >= number for status, number in got.items()), (
            f"{counted}, clients got {got}"
        )
        assert counted.total() <= len(mine), f"{counted.total()} requests are counted, {len(mine)} were sent"

    def _check_lines(self, ask: HttpAsk) -> None:
        """Check that a request has one access line, and further ones only if a process was lost meanwhile."""
        accepted = [each for each in ask.tickets if each.refusal is None]
        is_refused = ask.method == "POST" and not accepted and ask.status >= 400
        expected, found = len(accepted) + is_refused, self._lines[ask.name]
        ended_ns = max([ask.ended_ns, *(each.answered_ns for each in accepted)])
        is_fixed = ask.is_complete and ask.status != 408  # which may come before the whole request
        if is_fixed and not self.server.was_disturbed(ask.begun_ns, ended_ns + _WRITTEN_NS):
            assert found == expected, f"{found} access lines, expected {expected}"
        assert found <= max(2 * len(accepted), 1), f"{found} access lines of one request"


class _Counting(logging.Handler):
    """Counts access lines by request."""

    def __init__(self, lines: Counter[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = getattr(record, "fields", {})
        self._lines[str(fields.get("request_id"))] += 1


def _holds_something(front_end: _HttpFrontEnd) -> list[str]:
    """Return what a front end still holds of requests that have ended."""
    assert front_end.server is not None and front_end.client is not None
    connection = front_end.client._connection
    held = {
        "tasks": front_end.server.server_state.tasks,
        "requests": connection and connection._targets,
        "queries": connection and connection._queries,
        "bytes of bodies": front_end.state.bodies._num_waiting_bytes,
        "news": front_end.state.contexts[0].session._news,
    }
    return [name for name, what in held.items() if what]


_STATUS_OF_CODE = {"unavailable": 503, "invalid_value": 400}
"""The status of an error that ends a stream, by its code."""

_BAD: tuple[tuple[str, bytes, int], ...] = (
    (_COMPLETIONS, b'{"prompt": [1', 400),
    (_COMPLETIONS, b'{"prompt": [1], "max_tokens": -1}', 400),
    (_COMPLETIONS, b'{"prompt": [1], "model": "other"}', 404),
    (_COMPLETIONS, b'{"prompt": [' + b"1, " * 2000 + b"1]}", 413),
    ("/v1/nothing", b"{}", 404),
)
"""Requests that must be refused: the path, the body and the status."""


def _make_messages(prompt: Sequence[int], num_in_first: int) -> list[dict[str, str]]:
    """Return a chat of one or two messages whose text is the prompt's letters, as `_TEMPLATE` joins them."""
    text = "".join(_LETTERS[token] for token in prompt)
    first, last = text[:num_in_first], text[num_in_first:]
    parts = [("system", first), ("user", last)] if first and last else [("user", text)]
    return [{"role": role, "content": content} for role, content in parts]


def _prompts_of(fields: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of a request's prompts."""
    if "messages" in fields:
        return [[_LETTERS.index(letter) for each in fields["messages"] for letter in each["content"]]]
    prompt = fields["prompt"]
    return prompt if isinstance(prompt[0], list) else [prompt]


def _check_chat(fields: Mapping[str, Any], chunks: Sequence[Any]) -> None:
    """Check what only the first chunk of a chat has: the role, and the tokens of the prompt."""
    found = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert found == _prompts_of(fields)[: len(chunks)], f"the prompt's tokens are {found}"
    said = [choice.get("message") or choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert sum("role" in each for each in said) == min(1, len(said)), f"not one role in {said}"


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice: of a completion, a chat, or a chunk of them."""
    if "text" in choice:
        return choice["text"]
    return choice["message" if "message" in choice else "delta"].get("content") or ""


@cache
def _letters_folder() -> str:
    """Return a folder with a tokenizer that has one token per letter, and with a chat template."""
    vocabulary = {letter: index for index, letter in enumerate(_LETTERS)} | {"?": len(_LETTERS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    folder = tempfile.TemporaryDirectory(prefix="inflight-letters-")
    atexit.register(folder.cleanup)
    backend.save(f"{folder.name}/tokenizer.json")
    Path(folder.name, "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return folder.name


def with_letters(parameters: Parameters) -> Parameters:
    """Return an engine's parameters with a tokenizer for the texts of /v1."""
    return replace(parameters, tokenizer_dir=_letters_folder())


class ServerForOpenAi(WholeServer):
    """One run of a server with the front ends of /v1."""

    def _make_kinds(self) -> Sequence[FrontEnds]:
        return (OpenAiFrontEnds(self),)

    def _has_adapters(self) -> bool:
        return False

    def _parameters(self) -> Parameters:
        return with_letters(super()._parameters())


def run(seed: int) -> RunReport:
    """Run a server with the front ends of /v1; raises AssertionError if a promise was broken."""
    return ServerForOpenAi(seed).run()
