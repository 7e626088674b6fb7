"""Reruns a trace's schedule without the model, and compares every decision.

A new scheduler gets the recorded inputs of every iteration and the recorded results of the device. The core is
deterministic, so a different decision means that the program or the trace has been changed. The trace is read line
by line.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, TextIO, TypeGuard

import msgspec

from inflight.batch_manager.recording import BadTrace, Begin, End, Header, Trace, make_begin
from inflight.core.request.response import Response
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import error_from_kind

IDENTICAL, DIFFERENT, UNREADABLE = 0, 1, 2
"""Exit codes."""

_MAX_DIFFERENCES = 20
_PARTS = "batch", "starts", "loads"  # fields of `Begin` that follow from earlier records


class Replay:
    """A new scheduler that repeats a trace's iterations.

    Attributes:
        scheduler: The scheduler, in its state after the last record.
        iteration: Number of the last iteration that has begun; -1: none has.
        num_iterations: Number of iterations that have begun.
        num_requests: Number of requests that arrived.
        num_answered: Number of final responses.
        responses: The responses that resulted from the last record.

    Raises:
        ConfigError: The header is not a valid configuration of a scheduler.
    """

    def __init__(self, header: Header) -> None:
        self.scheduler = Scheduler(header.config, header.limits)
        self.iteration = -1
        self.num_iterations = 0
        self.num_requests = 0
        self.num_answered = 0
        self.responses: list[Response] = []
        self._in_flight: deque[ScheduledBatch] = deque()

    @property
    def running(self) -> str:
        """Return a line about the oldest batch without a result; empty if there is none."""
        if not self._in_flight:
            return ""
        batch = self._in_flight[0]
        owners = {slot: each.request_id for each in self.scheduler.running_sequences for slot in each.slots}
        return f"iteration {batch.iteration} was running: {describe_batch(batch, owners.get)}"

    def advance(self, record: Begin | End) -> list[str]:
        """Replay one record; return the differences between this scheduler's decision and the recorded one.

        Raises:
            BadTrace: The record is a result without a batch.
            Exception: Whatever the scheduler raises.
        """
        if isinstance(record, Begin):
            return self._begin(record)
        if not self._in_flight or self._in_flight[0].iteration != record.iteration:
            raise BadTrace(f"a result of iteration {record.iteration}, but an earlier iteration has none yet")
        batch = self._in_flight.popleft()
        if record.output is None:
            self.responses = self.scheduler.fail(batch, error_from_kind(record.error_kind, record.error))
        else:
            self.responses = self.scheduler.update(batch, record.output, record.now_ns)
        self._count_answers()
        return []

    def _begin(self, recorded: Begin) -> list[str]:
        self.iteration = recorded.inputs.iteration
        self.num_iterations += 1
        self.num_requests += len(recorded.inputs.new_requests)
        self.responses = self.scheduler.accept(recorded.inputs)
        self._count_answers()
        batch = self.scheduler.schedule()
        if batch is not None:
            self._in_flight.append(batch)
        replayed = make_begin(recorded.inputs, batch)
        if replayed == recorded:
            return []
        both = ((part, getattr(recorded, part), getattr(replayed, part)) for part in _PARTS)
        return list(islice((line for each in both for line in differences(*each)), _MAX_DIFFERENCES))

    def _count_answers(self) -> None:
        self.num_answered += sum(response.is_final for response in self.responses)


def describe_batch(batch: ScheduledBatch, request_of_slot: Callable[[int], int | None]) -> str:
    """Return a line about a batch: its rows, its tokens and the requests of its slots."""
    slots = [*(chunk.slot for chunk in batch.context), *batch.generation_slots]
    request_ids = dict.fromkeys(request_of_slot(slot) for slot in slots)
    named = ", ".join("?" if request_id is None else str(request_id) for request_id in request_ids)
    return (
        f"{batch.num_rows} rows ({len(batch.context)} context chunks of {batch.num_context_tokens} tokens, "
        f"{len(batch.generation_slots)} in generation), requests {named}"
    )


# ---------------------------------------------------------------------- what differs


def differences(path: str, recorded: Any, replayed: Any) -> Iterator[str]:
    """Yield one line per field that differs, with its path; two NaN count as equal."""
    if type(recorded) is not type(replayed):
        yield f"{path}: recorded {_short(recorded)}, replayed {_short(replayed)}"
    elif is_dataclass(recorded) or isinstance(recorded, msgspec.Struct):
        # Both dataclasses and msgspec structs have their fields' names as annotations.
        for name in type(recorded).__annotations__:
            yield from differences(f"{path}.{name}", getattr(recorded, name), getattr(replayed, name))
    elif _is_sequence(recorded) and len(recorded) == len(replayed):
        for index, (one, other) in enumerate(zip(recorded, replayed)):
            yield from differences(f"{path}[{index}]", one, other)
    elif recorded != replayed and (recorded == recorded or replayed == replayed):
        yield f"{path}: recorded {_short(recorded)}, replayed {_short(replayed)}"


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, tuple | list)


def _short(value: Any) -> str:
    if isinstance(value, ScheduledBatch):
        return f"a batch of {value.num_rows} rows, {value.num_tokens} tokens"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


# ---------------------------------------------------------------------- the whole trace


def run(
    trace: Trace,
    out: TextIO,
    report: TextIO,
    until: int | None = None,
    wants_state: bool = False,
    is_verbose: bool = False,
) -> int:
    """Replay a trace; return the exit code.

    Args:
        trace: The trace.
        out: Stream for the scheduler's state.
        report: Stream for everything else.
        until: Number of the last iteration to replay; None: all.
        wants_state: Whether to write the scheduler's state at the end, as JSON.
        is_verbose: Whether to report every iteration.

    Raises:
        InflightError: The trace cannot be replayed.
    """
    replay = Replay(trace.header)
    code = _replay(trace, replay, until, is_verbose, report)
    if wants_state:
        state = msgspec.json.encode(replay.scheduler.state())
        out.write(msgspec.json.format(state, indent=2).decode() + "\n")
    return code


def _replay(trace: Trace, replay: Replay, until: int | None, is_verbose: bool, report: TextIO) -> int:
    for record in trace:
        if isinstance(record, Begin):
            if until is not None and record.inputs.iteration > until:
                break
            if is_verbose:
                report.write(_describe(record) + "\n")
        try:
            found = replay.advance(record)
        except BadTrace as error:
            raise BadTrace(f"line {trace.line_number}: {error}") from error
        except Exception:  # a replay may be run to reproduce a crash of the scheduler
            report.write(
                f"line {trace.line_number}: the scheduler failed after iteration {replay.iteration} began\n"
            )
            report.write(traceback.format_exc())
            return DIFFERENT
        if is_verbose:
            report.writelines(f"  {_describe_end(each)}\n" for each in replay.responses if each.is_final)
        if found:
            report.write(
                f"iteration {replay.iteration} (line {trace.line_number}) differs, "
                f"after {replay.num_iterations - 1} identical ones:\n"
            )
            report.writelines(f"  {line}\n" for line in found)
            return DIFFERENT
    _summarize(trace, replay, report)
    if until is not None and replay.iteration < until:
        report.write(f"the trace ends before iteration {until}\n")
    return IDENTICAL


def _summarize(trace: Trace, replay: Replay, report: TextIO) -> None:
    report.write(f"{replay.num_iterations} iterations replayed, identical\n")
    report.write(f"{replay.num_requests} requests, {replay.num_answered} answered to the end\n")
    if replay.running:
        report.write(replay.running + "\n")
    if trace.is_cut_short:
        report.write("the last line is unfinished and was left out: the process ended while it wrote\n")


def _describe(record: Begin) -> str:
    inputs, batch = record.inputs, record.batch
    parts = [
        f"request {request.request_id} ({request.prompt_length} tokens)" for request in inputs.new_requests
    ]
    parts += [f"stop {stop.request_id} ({stop.reason.value})" for stop in inputs.stops]
    parts += [f"slot {start.slot} to request {start.request_id}" for start in record.starts]
    parts += [f"adapter {load.handle} to pages {', '.join(map(str, load.pages))}" for load in record.loads]
    if batch is None:
        parts.append("nothing to run")
    else:
        chunks, generating = len(batch.context), len(batch.generation_slots)
        parts.append(
            f"{chunks} context chunks ({batch.num_context_tokens} tokens), {generating} in generation"
        )
    return f"iteration {inputs.iteration}: " + "; ".join(parts)


def _describe_end(response: Response) -> str:
    reasons = response.result.finish_reasons if response.result else ()
    outcome = response.error or ", ".join(dict.fromkeys(reason.name for reason in reasons))
    return f"request {response.request_id} has ended: {outcome}"
