"""The format of log lines: text in the form of Triton's own log, or JSON with the same values.

    I1127 11:49:05.678794 8790 host.py:175] KV cache: 4096 blocks of 32 tokens request_id=7f3a

A line may end with fields, `name=value`; a value with spaces or quotes is written as a JSON string. Every
process of a server writes text. `JsonLog` converts the lines of all of them where they are passed on. Times
are UTC. Imports only the standard library, because every process imports it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from itertools import pairwise
from typing import TextIO, TypeAlias, cast

FORMATS = ("text", "json")
"""Values of --log-format."""

ACCESS_LOG_VARIABLE = "INFLIGHT_ACCESS_LOG"
"""Environment variable that switches the access log off with the value 0; --no-access-log sets it."""

ACCESS = "access"
"""The name that access lines have in place of a source file and line; their text consists of fields only."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the client's request that the current code works for; "": none."""

Value: TypeAlias = str | int | float

_RECORD = re.compile(
    r"(?P<level>[IWEF])(?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<fraction>\d+) (?P<pid>\d+) "
    r"(?P<source>[^\s\]]+)\] ?(?P<message>.*)",
    re.DOTALL,
)
_RANK = re.compile(r"rank (?P<rank>\d+): (?P<level>[A-Z]+) (?P<message>.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?P<name>serve|openai|pictures): (?P<message>.*)", re.DOTALL)
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
_FIELD = r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)'
_FIELDS = re.compile(_FIELD)
_REQUEST_ID = re.compile(r' request_id=("(?:[^"\\]|\\.)*"|[^\s"]+)$')
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BARE = re.compile(r"[!#-<>-~]+")  # printable ASCII without quotes and the equals sign


def format_fields(fields: Mapping[str, Value]) -> str:
    """Return fields as text for a log line: `name=value name=value …`."""
    return " ".join(f"{name}={_format_value(value)}" for name, value in fields.items())


def parse_fields(text: str) -> dict[str, Value]:
    """Return the fields of a text made by `format_fields`."""
    return {name: _parse_value(value) for name, value in _FIELDS.findall(text)}


def _format_value(value: Value) -> str:
    if not isinstance(value, str):
        return str(value)
    return value if _BARE.fullmatch(value) and not _NUMBER.fullmatch(value) else json.dumps(value)


def _parse_value(text: str) -> Value:
    if text.startswith('"'):
        return json.loads(text)
    if not _NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)


class LineFormatter(logging.Formatter):
    """Formats records like Triton's log, with `request_id` if the record belongs to a request.

    The id is the record's attribute `request_id` (`extra=`), else that of the context. The lines of a
    traceback follow unchanged.

    Args:
        source: The text before `]`: the process or the kind of line.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        seconds, fraction = divmod(record.created, 1)
        when = time.strftime("%m%d %H:%M:%S", time.gmtime(seconds))
        level = "I" if record.levelno < logging.WARNING else "W" if record.levelno < logging.ERROR else "E"
        head = f"{level}{when}.{int(fraction * 1e6):06} {record.process} {self._source}] "
        first, newline, rest = super().format(record).partition("\n")
        return f"{head}{first}{request_id_field(record)}{newline}{rest}"


class RankFormatter(logging.Formatter):
    """Formats the records of a rank: `rank 1: WARNING message request_id=…`.

    Args:
        rank: The number of the rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank}: %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        first, newline, rest = super().format(record).partition("\n")
        return f"{first}{request_id_field(record)}{newline}{rest}"


def request_id_field(record: logging.LogRecord) -> str:
    """Return ` request_id=…` for the end of a record's line; "" if the record belongs to no request."""
    request_id = str(getattr(record, "request_id", "") or REQUEST_ID.get())
    return f" request_id={_format_value(request_id)}" if request_id else ""


class _LineState(threading.local):
    """The state of one writing thread: the unfinished line, and level, source and request of the last record."""

    def __init__(self) -> None:
        self.part = ""
        self.last: dict[str, Value] = {}


class JsonLog:
    """A wrapper of a stream that writes each log line as a JSON object. Any thread.

    Implements the methods of TextIO that `print`, `logging` and `ServerLog` use. Further lines of a warning or
    an error, such as those of a stack, become objects of their own with the record's level, source and request.
    It is assumed that each thread writes the lines of one process.

    Args:
        stream: The stream to write to.
        level: The level of lines that have none.
    """

    def __init__(self, stream: TextIO, level: str = "info") -> None:
        self._stream = stream
        self._level = level
        self._context = _LineState()
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write lines as JSON. An unfinished line is kept until its end is written.

        A message of `serve: ` or another program may have several lines, and is written as one object.
        """
        context = self._context
        whole = context.part + text
        if _PROGRAM.match(whole) and whole.endswith("\n"):
            *lines, context.part = whole.rstrip("\n"), ""
        elif _PROGRAM.match(whole):
            lines, context.part = [], whole
        else:
            *lines, context.part = whole.split("\n")
        objects = [self._object(line) for line in lines if line.strip()]
        written = "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in objects)
        if written:
            with self._lock:
                self._stream.write(written)
        return len(text)

    def flush(self) -> None:
        """Let readers of the stream see the lines written so far."""
        with self._lock:
            self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        return self._stream.fileno()

    def _object(self, line: str) -> dict[str, Value]:
        now = datetime.now(timezone.utc)
        if found := _RECORD.match(line):
            head: dict[str, Value] = {"level": _LEVELS[found["level"]], "source": found["source"]}
            text = _unquoted(found["message"])
            fields = parse_fields(text) if found["source"] == ACCESS else _message(text)
            return self._record(_time(found, now), {**head, "pid": int(found["pid"])}, fields)
        if found := _RANK.match(line):
            head = {"level": found["level"].lower(), "source": "rank", "rank": int(found["rank"])}
            return self._record(_text_of(now), head, _message(found["message"]))
        if found := _PROGRAM.match(line):
            head = {"level": self._level, "source": found["name"]}
            return {"time": _text_of(now), **head, "message": found["message"]}
        last = self._context.last
        head = last if last.get("level", "info") != "info" else {"level": self._level}
        return {"time": _text_of(now), **head, "message": line}

    def _record(self, time: str, head: dict[str, Value], fields: dict[str, Value]) -> dict[str, Value]:
        """Return the object of a record's first line, and remember what further lines have in common with it."""
        request = {"request_id": fields["request_id"]} if "request_id" in fields else {}
        self._context.last = head | request
        return {"time": time, **head, **fields}


def open_log(log_format: str, level: str = "info") -> TextIO:
    """Return stderr, or for the format json a wrapper that writes JSON; `level` is that of lines without one."""
    return cast(TextIO, JsonLog(sys.stderr, level)) if log_format == "json" else sys.stderr


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line has `--log-format json`, even if the rest of it is wrong."""
    words = [word.replace("_", "-") for word in arguments]
    return "--log-format=json" in words or ("--log-format", "json") in pairwise(words)


def error_line(program: str, message: str) -> str:
    """Return a program's error message as a line of the JSON log."""
    head = {"time": _text_of(datetime.now(timezone.utc)), "level": "error", "source": program}
    return json.dumps({**head, "message": message}, ensure_ascii=False) + "\n"


def _message(text: str) -> dict[str, Value]:
    """Return the message of a line, and its `request_id` if it has one."""
    found = _REQUEST_ID.search(text)
    if found is None:
        return {"message": text}
    return {"message": text[: found.start()], "request_id": str(_parse_value(found[1]))}


def _unquoted(message: str) -> str:
    """Return Triton's message without its quotes and escapes."""
    if message.startswith('"') and message.endswith('"'):
        try:
            return json.loads(message, strict=False)
        except ValueError:
            return message[1:-1]
    return message


def _time(found: re.Match[str], now: datetime) -> str:
    """Return a record's time, whose year is this one's, or for a record of last December the last one's."""
    month = int(found["month"])
    year = now.year - (month > now.month + 1)
    return f"{year}-{found['month']}-{found['day']}T{found['clock']}.{found['fraction']:.6}Z"


def _text_of(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
