"""The server's log: copied to a stream while it is written, stored, and searched for the cause of a failure.

Owns one thread, which ends when the server's output ends.
"""

import collections
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import IO, TextIO

from inflight.log_lines import ACCESS
from inflight.server import descriptors

_KEPT_LINES = 20_000
_REPEATED_S = 10.0
_MAX_REPEATED = 20
"""Number of equal lines that are copied within `_REPEATED_S` seconds. Further equal lines are only counted."""
_MAX_KINDS = 1000
"""Number of different lines that are remembered within `_REPEATED_S` seconds."""
_RECORD = re.compile(r"(?P<level>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ")
_LIBEVENT = "[warn]"
_ACCESS = re.compile(rf"I\d{{4}} [\d:.]+ \d+ {ACCESS}\] ")
_TRITONS_OWN = re.compile(r"I\d{4} [\d:.]+ \d+ \w+\.(?:cc|h|cpp):\d+\]")
"""The information that tritonserver itself logs, unlike its models: a hundred lines at every start."""
_TABLE = re.compile(r"[+|]|\s*$")
"""The further lines of a record with a table."""
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_STACK = "\n\nAt:\n"  # the text that pybind11 puts before a stack
_NO_SIGN_OF_LIFE = re.compile(r"lock_exception|is not healthy|Failed to obtain the health mutex")
_PROCESS_ENDED = re.compile(r"guard\.py\] the process of the model (\S+) has ended")
# Lines that are logged at every start on a machine without a GPU, where they are harmless.
_WITHOUT_GPU = (
    "CudaDriverHelper has not been initialized",
    "Unable to allocate pinned system memory",
    "Failed to initialize NVML",
    "DCGM unable to start",
)


class ServerLog:
    """The log of one server, line by line.

    Args:
        stream: The server's output.
        echo: The stream to which lines are copied; None: they are only stored.
        has_gpu: Whether messages about a missing GPU are of interest.
        is_verbose: Whether to copy every line. If not, what tritonserver itself logs as information is only
            stored, and repeated lines are counted.
        is_starting: Whether several models are being loaded. Until `end_start` is called, a warning that each of
            them gives is copied only once.

    Attributes:
        num_lines: Number of lines that the server has written.
        loaded_models: Names of all models that the server has reported as loaded.
    """

    def __init__(
        self,
        stream: IO[bytes],
        echo: TextIO | None,
        has_gpu: bool,
        is_verbose: bool = False,
        is_starting: bool = False,
    ) -> None:
        self._stream = stream
        self._echo = echo
        self._unwanted = () if has_gpu else _WITHOUT_GPU
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.num_lines = 0
        self.loaded_models: set[str] = set()
        self._changed = threading.Condition()
        self._last_line_at = time.monotonic()
        self._has_explained = False  # whether the advice about descriptors was written
        self._repeats = Repeats(collapses=not is_verbose)
        self._quiet = None if is_verbose else Quiet(is_starting)
        self._thread = threading.Thread(target=self._copy, name="server-log", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the log so far. If it is very long, only its end is returned."""
        with self._changed:
            return "".join(self._lines)

    def end_start(self) -> None:
        """Copy repeated warnings from now on. Any thread."""
        if self._quiet is not None:
            self._quiet.is_starting = False

    def join(self, timeout: float) -> None:
        """Wait until the server's last line has been read."""
        self._thread.join(timeout)

    def settle(self, quiet: float, timeout: float) -> None:
        """Wait until no line was written for `quiet` seconds, so that a line of the caller comes last.

        Waits at most `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while (left := min(self._last_line_at + quiet, deadline) - time.monotonic()) > 0:
                self._changed.wait(left)

    def _copy(self) -> None:
        for raw in self._stream:
            line = raw.decode("utf-8", "replace")
            if any(phrase in line for phrase in self._unwanted):
                continue
            self._take(self._repeats.add(line))
        self._take(self._repeats.end())

    def _take(self, lines: Iterable[str]) -> None:
        for line in lines:
            with self._changed:
                self._lines.append(line)
                self.num_lines += 1
                self.loaded_models.update(_LOADED.findall(line))
                self._last_line_at = time.monotonic()
                self._changed.notify_all()
            if self._quiet is None or self._quiet.lets_pass(line):
                self._pass_on(line)
            if descriptors.TOO_MANY in line and not self._has_explained:
                self._has_explained = True
                self._pass_on(f"serve: {descriptors.explanation()}\n")

    def _pass_on(self, line: str) -> None:
        if self._echo is None:
            return
        try:
            self._echo.write(line)
            self._echo.flush()
        except (OSError, ValueError):  # the stream is closed, but the server's pipe must still be drained
            self._echo = None


class Quiet:
    """A filter of lines without new information: what tritonserver itself logs as information, and warnings
    that a model repeats while the server starts. All other lines pass.

    Args:
        is_starting: The attribute.

    Attributes:
        is_starting: Whether the server is starting. Each of its models reads the same checkpoint, and warns of it.
    """

    def __init__(self, is_starting: bool = False) -> None:
        self.is_starting = is_starting
        self._hides = False  # whether the last record was held back
        self._warnings: set[str] = set()

    def lets_pass(self, line: str) -> bool:
        """Return whether to show a line."""
        if record := _RECORD.match(line):
            is_repeated = record["level"] == "W" and self._is_repeated(line[record.end() :])
            self._hides = is_repeated or _TRITONS_OWN.match(line) is not None
            return not self._hides
        return not (self._hides and _TABLE.match(line))

    def _is_repeated(self, warning: str) -> bool:
        if not self.is_starting or warning in self._warnings:
            return self.is_starting
        self._warnings.add(warning)
        return False


class Repeats:
    """A filter of lines that repeat, for example while no more connections can be accepted.

    Only the first lines of log records and libevent's lines are counted. Further lines of a record, such as
    the stacks of threads, are always passed on, and so are access lines.

    Args:
        clock: Monotonic clock, in seconds.
        collapses: Whether to hold back repeated lines. If false, every line is passed on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, collapses: bool = True) -> None:
        self._clock = clock
        self._collapses = collapses
        self._counts: collections.Counter[str] = collections.Counter()
        self._begun_s = clock()

    def add(self, line: str) -> list[str]:
        """Add a line; return the lines to pass on."""
        told = self.end() if self._clock() - self._begun_s >= _REPEATED_S else []
        if (
            not self._collapses
            or _ACCESS.match(line)
            or not (_RECORD.match(line) or line.startswith(_LIBEVENT))
        ):
            return [*told, line]  # a further line of a record
        said = _RECORD.sub("", line, count=1)  # without the time
        if said in self._counts or len(self._counts) < _MAX_KINDS:
            self._counts[said] += 1
        if self._counts[said] <= _MAX_REPEATED:
            told.append(line)
        return told

    def end(self) -> list[str]:
        """Reset the counts, and return a line for each message that was held back."""
        seconds = self._clock() - self._begun_s
        told = [
            f"serve: {count - _MAX_REPEATED} times more in {seconds:.0f} s: {said}"
            for said, count in self._counts.items()
            if count > _MAX_REPEATED
        ]
        self._counts.clear()
        self._begun_s = self._clock()
        return told


class CollapsingHandler(logging.StreamHandler[TextIO]):
    """A handler of this process's own log records that counts repeated ones, as `Repeats` does.

    Args:
        stream: The stream to write to.
        collapses: Whether to hold back repeated records.
    """

    def __init__(self, stream: TextIO, collapses: bool = True) -> None:
        super().__init__(stream)
        self._repeats = Repeats(collapses=collapses)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless it has been repeated too often."""
        try:
            for text in self._repeats.add(f"{self.format(record)}\n"):
                self.stream.write(text)
            self.flush()
        except Exception:  # as in all of logging's handlers: a failed line must not end what it reports
            self.handleError(record)


def find_cause(text: str, most_lines: int = 40) -> str:
    """Return the errors in a log, each with all lines of its record; without errors, the end of the log."""
    errors = ["\n".join(record) for record in _records(text.splitlines()) if record[0][:1] in "EF"]
    # An error in loading a model is logged several times; this record has the model's name and the whole
    # reason.
    errors = [error for error in errors if "failed to load" in error] or errors
    errors = [_without_stack(error.replace("\\n", "\n")) for error in errors]
    lines = "\n".join(errors).splitlines() or text.splitlines()
    return "\n".join(line for line in lines[-most_lines:] if line.strip())


def was_starved(text: str, engines: Collection[str]) -> bool:
    """Return whether a start probably failed because a model's process got no processor time for too long.

    While a model loads, tritonserver 2.51 expects a heartbeat from the model's process every second. If one
    is late, which can happen on an overloaded machine, it abandons the process, but the process keeps using
    the memory that both share. Usually tritonserver then aborts on a lock in this memory, or the process
    crashes. If a model fails with an error of its own, the log has the same lines, but also the model's
    error.

    Args:
        text: The log.
        engines: Names of the models with an engine. Their processes may also be killed because they take too
            much memory, so their ends are not a sign of starvation.
    """

    def is_sign(error: str) -> bool:
        ended = _PROCESS_ENDED.search(error)
        return _NO_SIGN_OF_LIFE.search(error) is not None or (ended is not None and ended[1] not in engines)

    said = ["\n".join(record) for record in _records(text.splitlines()) if record[0][:1] in "EF"]
    errors = [error for error in said if "failed to load" in error] or said
    has_sign = _NO_SIGN_OF_LIFE.search(text) is not None or any(map(is_sign, said))
    return has_sign and all(map(is_sign, errors))


def _without_stack(error: str) -> str:
    """Return an error without its stack if it is a ConfigError, whose message says everything."""
    said, at, _ = error.partition(_STACK)
    return said + '"' if at and "ConfigError" in said else error


def _records(lines: Iterable[str]) -> list[list[str]]:
    """Return lines grouped by log record; lines before the first record are left out."""
    records: list[list[str]] = []
    for line in lines:
        if _RECORD.match(line):
            records.append([line])
        elif records:
            records[-1].append(line)
    return records
