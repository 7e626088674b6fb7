"""Traces: everything needed to rerun a schedule, as JSON lines in a file.

    header   once, first: format, version, SchedulingConfig, EngineLimits
    begin    for every iteration, before it runs: its IterationInput and its batch
    end      for every batch, in order: its ModelOutput or error, and the time of this result

This module owns the format, for writing and reading, and the file while it is written. A record is in the file
when the call that makes it returns, so the last batch of a process that hangs or is killed is in the trace. A
request is written once, in the iteration in which it arrives, and an adapter in the iteration in which it is
stored; a batch's starts and loads refer to them by id. NaN and infinities, which JSON lacks, are written as
text. Of adapters' weights and prompt tables only the size is written, as the schedule does not depend on their
content.

A trace contains prompts, so only its owner may read it. The loop thread writes it; if writing fails, the recording
ends, and serving continues.
"""

from __future__ import annotations

import logging
import math
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, cast

import msgspec

from inflight.config import SchedulingConfig
from inflight.core.request.adapter import RawBuffer
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import IterationInput
from inflight.core.schedule.batch import (
    ContextDetails,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.errors import ConfigError, InflightError, error_from_plain, error_to_plain
from inflight.file_names import native

FORMAT = "inflight-trace"
VERSION = 4
"""The version of the records and their dataclasses; traces of other versions cannot be read."""

_NOT_RECORDED = "it is not a file that record_path wrote"

_log = logging.getLogger(__name__)


class BadTrace(InflightError):
    """The error for a file that is not a trace, or that is a trace of another version."""


class Start(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `SlotStart` without its request, which is in the record of the iteration in which it arrived."""

    slot: int
    request_id: int
    sequence_index: int = 0
    token_ids: tuple[int, ...] = ()
    adapter: int = -1


class Load(msgspec.Struct, frozen=True):
    """An `AdapterLoad` without its adapter, which an earlier record has under this handle."""

    handle: int
    pages: tuple[int, ...]


class Header(msgspec.Struct, frozen=True, tag_field="record", tag="header"):
    """The first record of a recording: the configuration that a replay needs.

    Attributes:
        config, limits: The scheduler's configuration.
        has_logits: Whether outputs contain logits; otherwise they contain the logits' size in bytes.
    """

    config: SchedulingConfig
    limits: EngineLimits
    format: str = FORMAT
    version: int = VERSION
    has_logits: bool = False


class Begin(msgspec.Struct, frozen=True, tag_field="record", tag="begin", omit_defaults=True):
    """The record of an iteration: its inputs and its batch.

    Attributes:
        inputs: The scheduler's input.
        batch: The batch, without its starts and adapter loads; None if nothing was scheduled.
        starts, loads: The batch's starts and adapter loads, which refer to requests and adapters earlier in the
            trace.
    """

    inputs: IterationInput
    batch: ScheduledBatch | None = None
    starts: tuple[Start, ...] = ()
    loads: tuple[Load, ...] = ()


class End(msgspec.Struct, frozen=True, tag_field="record", tag="end", omit_defaults=True):
    """The record of a batch's result.

    Attributes:
        iteration: Number of the batch's iteration.
        now_ns: When the result was known, by the clock of `IterationInput.now_ns`.
        output: The device's output; None if the batch failed.
        error_kind, error: If the batch failed, the error's kind, which decides what happens to the batch's
            requests, and its message, in which names are marked.
    """

    iteration: int
    now_ns: int
    output: ModelOutput | None = None
    error_kind: str = ""
    error: str = ""


Record = Header | Begin | End


class _Format(msgspec.Struct):
    format: str = ""
    version: int = 0


def _to_plain(value: object) -> object:
    return len(value) if isinstance(value, RawBuffer) else error_to_plain(value)


def _from_plain(kind: type, value: Any) -> object:
    if kind is not RawBuffer:
        return error_from_plain(kind, value)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a number of bytes, got {value!r}")
    return RawBuffer(bytes(value))


_ENCODER = msgspec.json.Encoder(enc_hook=_to_plain)
# Not strict, because some numbers are written as text.
_DECODER = msgspec.json.Decoder(Header | Begin | End, strict=False, dec_hook=_from_plain)
_FORMAT_DECODER = msgspec.json.Decoder(_Format)


# ---------------------------------------------------------------------- records and lines


def make_begin(inputs: IterationInput, batch: ScheduledBatch | None) -> Begin:
    """Return the record of an iteration."""
    if batch is None or not batch.starts:
        return Begin(inputs, batch)
    loads = tuple(Load(load.adapter.handle, load.pages) for load in batch.adapter_loads)
    starts = tuple(map(_make_start, batch.starts))
    return Begin(inputs, replace(batch, starts=(), adapter_loads=()), starts, loads)


def _make_start(start: SlotStart) -> Start:
    request_id = start.request.request_id
    return Start(start.slot, request_id, start.sequence_index, start.token_ids, start.adapter)


def encode(record: Record) -> bytes:
    """Return a record's line, including the newline."""
    line = _ENCODER.encode(record)
    # msgspec writes null for None, but also for NaN and infinities, which must be written as text.
    if b"null" in line:
        line = _ENCODER.encode(_spell(msgspec.to_builtins(record, enc_hook=_to_plain)))
    return line + b"\n"


def _spell(plain: Any) -> Any:
    """Replace floats that JSON cannot express by text. A sequence that starts with an integer has no
    floats."""
    if isinstance(plain, float) and not math.isfinite(plain):
        return repr(plain)
    # The casts state the element types, which isinstance cannot.
    if isinstance(plain, dict):
        return {key: _spell(value) for key, value in cast(dict[Any, Any], plain).items()}
    if isinstance(plain, list | tuple):
        values = cast(Sequence[Any], plain)
        return values if values and isinstance(values[0], int) else [_spell(value) for value in values]
    return plain


def decode(line: bytes) -> Record:
    """Parse a line; raises BadTrace if it is not a record."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadTrace(f"not a record of a trace: {error}") from error


# ---------------------------------------------------------------------- writing


class JsonRecorder:
    """Writes a trace. An existing file is renamed to `path`.previous. Loop thread.

    Iterations before, during and after which no request was active need not be recorded. All other iterations
    must be, even without a batch, as requests may have timed out in them.

    Args:
        path: The file to write, with mode 0600.
        config, limits: The recorded scheduler's configuration.
        keep_logits: Whether to write the logits of outputs too. The schedule does not depend on them; without
            them, a replay's responses have zeros as logits.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(
        self, path: str, config: SchedulingConfig, limits: EngineLimits, keep_logits: bool = False
    ) -> None:
        self._path = path
        self._keep_logits = keep_logits
        self._in_flight: deque[int] = deque()  # iterations whose batches have no result yet
        self._file: int | None = None
        try:
            self._file = _create(native(path))
            _write_all(self._file, encode(Header(config, limits, has_logits=keep_logits)))
        except OSError as error:
            self.close()
            raise ConfigError(f"record_path: cannot write {path!r}: {error.strerror or error}") from error

    def begin(self, inputs: IterationInput, batch: ScheduledBatch | None) -> None:
        """Write an iteration's inputs and batch."""
        if batch is not None:
            self._in_flight.append(batch.iteration)
        self._write(lambda: make_begin(inputs, batch))

    def end(self, outcome: ModelOutput | InflightError, now_ns: int) -> None:
        """Write the result of the oldest batch without one, and its time."""
        iteration = self._in_flight.popleft()
        if isinstance(outcome, InflightError):
            self._write(lambda: End(iteration, now_ns, None, outcome.kind, outcome.marked))
        else:
            self._write(
                lambda: End(iteration, now_ns, outcome if self._keep_logits else leave_out_logits(outcome))
            )

    def close(self) -> None:
        """Close the trace's file; later records are left out. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _write(self, make_record: Callable[[], Record]) -> None:
        if self._file is None:
            return
        try:
            _write_all(self._file, encode(make_record()))
        except Exception:  # a full disk, for example, must not fail requests
            _log.exception("the recording ends, because %s cannot be written", self._path)
            self.close()


def _create(path: str) -> int:
    """Create a file that only this user may read; an existing file is renamed."""
    if os.path.lexists(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FileExistsError(0, "it exists and is not a regular file")
        os.replace(path, path + ".previous")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_all(file: int, data: bytes) -> None:
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, memoryview(data)[written:])


# ---------------------------------------------------------------------- reading


class Trace:
    """Reads a trace: `header` is its first record, and iterating yields the others.

    Attributes:
        header: The first record.
        line_number: Line of the record read last, from 1.
        is_cut_short: Whether the last line is unfinished, as left by a killed process; set after the last record.

    Raises:
        BadTrace: The file is not a trace of this version.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.line_number = 1
        self.is_cut_short = False
        line = file.readline()
        if not line.endswith(b"\n"):
            raise BadTrace(f"{_NOT_RECORDED}, or it ends within its first line")
        _check_version(line)
        record = decode(line)
        if not isinstance(record, Header):
            raise BadTrace(f"{_NOT_RECORDED}: its first line is not a header")
        self.header = record

    def __iter__(self) -> Iterator[Begin | End]:
        for line in self._file:
            if not line.endswith(b"\n"):
                self.is_cut_short = True
                return
            self.line_number += 1
            try:
                record = decode(line)
            except BadTrace as error:
                raise BadTrace(f"line {self.line_number}: {error}") from error
            if isinstance(record, Header):
                raise BadTrace(f"line {self.line_number}: a second header")
            if isinstance(record, End) and record.output is not None and not self.header.has_logits:
                record = msgspec.structs.replace(record, output=zero_logits(record.output))
            yield record


def _check_version(line: bytes) -> None:
    try:
        found = _FORMAT_DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        found = _Format()
    if found.format != FORMAT:
        raise BadTrace(f"{_NOT_RECORDED}: its first line is not the header of a trace")
    if found.version != VERSION:
        raise BadTrace(f"it is a trace of version {found.version}, and this program reads version {VERSION}")


# ---------------------------------------------------------------------- logits


def leave_out_logits(output: ModelOutput) -> ModelOutput:
    """Replace every piece of logits and additional outputs by its size in bytes, in decimal digits."""
    return _map_logits(output, lambda logits: b"%d" % len(logits))


def zero_logits(output: ModelOutput) -> ModelOutput:
    """Replace the sizes written by `leave_out_logits` by as many zero bytes."""
    try:
        return _map_logits(output, lambda logits: bytes(int(logits)))
    except ValueError as error:
        raise BadTrace(f"logits that were left out have no length: {error}") from None


def _map_logits(output: ModelOutput, change: Callable[[bytes], bytes]) -> ModelOutput:
    if not (output.beams or output.details or output.context):
        return output

    def of_beams(each: BeamCandidates) -> BeamCandidates:
        return replace(each, logits=tuple(map(change, each.logits))) if each.logits else each

    def of_tokens(each: TokenDetails) -> TokenDetails:
        rows = tuple(tuple(map(change, row)) for row in each.additional_outputs)
        return replace(each, logits=tuple(map(change, each.logits)), additional_outputs=rows)

    def of_context(each: ContextDetails) -> ContextDetails:
        logits = change(each.logits) if each.logits else b""
        return replace(each, logits=logits, additional_outputs=tuple(map(change, each.additional_outputs)))

    return replace(
        output,
        beams=[of_beams(each) for each in output.beams],
        details={slot: of_tokens(each) for slot, each in output.details.items()},
        context={slot: of_context(each) for slot, each in output.context.items()},
    )
