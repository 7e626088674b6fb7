"""The lines of OpenAI's batch files: requests to be read, and answers to be written.

A line of the input is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`, a line of the output
`{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": …}, "error": …}`. Files are
read line by line: only the custom_ids are kept in memory. Any thread.
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from inflight.errors import InflightError
from inflight.json_values import Json, is_object
from inflight.near_words import nearest

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)
"""Routes that a line of a batch may name; each takes the field `priority`."""
MAX_LINE_BYTES = 64 << 20
"""Longest line of an input in bytes, without its end: the memory that a request may take before it is sent."""
MAX_CUSTOM_ID = 512
"""Longest custom_id in characters. It is limited because all custom_ids of a batch are in memory."""
LOWEST_PRIORITY = (1 << 31) - 1
"""Value of the field `priority` with which all other requests start first."""
# Stored responses of a batch would displace those that clients keep.
_DEFAULTS: dict[str, Json] = {"/v1/responses": {"store": False}}
_FIELDS = ("custom_id", "method", "url", "body")
_TEMPORARY = (429, 502, 503, 504)
_BEGIN_OF_ANSWER = b'{"id":"batch_req_'
_SHOWN = 80
_JSON = msgspec.json.Encoder()


class BadBatchLine(InflightError):
    """A line that is not a request of a batch.

    Args:
        line: Number of the line, from 1; None: the file as a whole.
        field: Field of the line; None if no field is invalid.
        message: Description with the received and the expected value.
        error_code: OpenAI's error code.
    """

    def __init__(self, line: int | None, field: str | None, message: str, error_code: str) -> None:
        super().__init__(message if line is None else f"line {line}: {message}")
        self.line, self.field, self.error_code = line, field, error_code


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch.

    Attributes:
        custom_id: Name of the request, which no other request of the batch has.
        url: Path of the route, one of `URLS`.
        body: JSON body for the route, with the lowest priority unless the line's own body has a priority.
    """

    custom_id: str
    url: str
    body: Json

    def encoded_body(self) -> bytes:
        """Return the body as JSON."""
        return _JSON.encode(self.body)


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The server's answer to one request.

    Attributes:
        status: HTTP status; None: no answer came, for the reason in `body`.
        request_id: Id in the answer's header X-Request-Id; "": it has none.
        body: The answer's body, decoded from JSON.
    """

    status: int | None
    request_id: str
    body: Any

    @classmethod
    def read(cls, status: int, request_id: str, raw: bytes) -> BatchAnswer:
        """Return the answer with this status, id and body. A body that is not JSON becomes an error's message."""
        try:
            body = msgspec.json.decode(raw)
        except ValueError:  # a proxy's own page
            text = raw[:1000].decode("utf-8", "replace") or HTTPStatus(status).phrase
            body = {"error": {"message": text, "type": "server_error", "param": None, "code": None}}
        return cls(status, request_id, body)

    @classmethod
    def none(cls, reason: str) -> BatchAnswer:
        """Return the record of a request without an answer."""
        return cls(None, "", reason)

    @property
    def is_success(self) -> bool:
        """Return whether the request was answered as asked."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_temporary(self) -> bool:
        """Return whether a later attempt may succeed: no answer came, the queue is full, or the engine is away."""
        return self.status is None or self.status in _TEMPORARY

    @property
    def message(self) -> str:
        """Return the reason of a failure, with the status."""
        if self.status is None:
            return str(self.body)
        error = self.body.get("error") if is_object(self.body) else None
        return f"{self.status}: {error['message'] if is_object(error) and 'message' in error else self.body}"


def read_requests(file: BinaryIO, url: str | None = None) -> Iterator[BatchRequest]:
    """Yield the requests of a batch's input; raise BadBatchLine at the first line that is none.

    To check all lines before anything is sent, exhaust one iterator first. Empty lines are skipped.

    Args:
        file: The input, at its beginning.
        url: The only route that lines may name; None: any of `URLS`.
    """
    places: dict[str, int] = {}
    for number, raw in enumerate(_lines(file), 1):
        if not raw.strip():
            continue
        request = _request(number, raw, URLS if url is None else (url,))
        earlier = places.setdefault(request.custom_id, number)
        if earlier != number:
            shown = request.custom_id[:_SHOWN]
            message = f"custom_id {shown!r} is also in line {earlier}: expected one that no other line has"
            raise BadBatchLine(number, "custom_id", message, "duplicate_custom_id")
        yield request
    if not places:
        raise BadBatchLine(None, None, "the file has no requests", "empty_file")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; raise BadBatchLine at the first one that is too long, before its end is read."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            message = f"the line is longer than {MAX_LINE_BYTES} bytes, the most that is accepted"
            raise BadBatchLine(number, None, message, "line_too_long")
        yield raw


def _request(number: int, raw: bytes, urls: tuple[str, ...]) -> BatchRequest:
    def bad(field: str | None, message: str, code: str = "invalid_value") -> BadBatchLine:
        return BadBatchLine(number, field, message, code)

    try:
        line = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:  # includes text that is not UTF-8
        raise bad(None, f"not JSON: {error}", "invalid_json_line") from None
    if not is_object(line):
        raise bad(None, f"expected an object with {', '.join(_FIELDS)}, got {_shown(line)}")
    for field in _FIELDS:
        if field not in line:
            raise bad(field, f"{field} is missing", "missing")
    for field in line:
        if field not in _FIELDS:
            message = f"unknown field {field[:_SHOWN]}: expected {', '.join(_FIELDS)}"
            raise bad(field, message, "unknown_parameter")
    custom_id, method, url, body = (line[field] for field in _FIELDS)
    if not isinstance(custom_id, str) or not custom_id:
        raise bad("custom_id", f"custom_id is {_shown(custom_id)}, expected a text")
    if len(custom_id) > MAX_CUSTOM_ID:
        message = (
            f"custom_id is {_shown(custom_id)}, {len(custom_id)} characters, expected at most {MAX_CUSTOM_ID}"
        )
        raise bad("custom_id", message)
    if method != "POST":
        raise bad("method", f'method is {_shown(method)}, expected "POST"')
    if url not in urls:
        near = nearest(url, urls) if isinstance(url, str) else None
        hint = f"; did you mean {near}?" if near and len(urls) > 1 else ""
        raise bad("url", f"url is {_shown(url)}, expected {' or '.join(urls)}{hint}", "invalid_url")
    if not is_object(body):
        raise bad("body", f"body is {_shown(body)}, expected an object")
    if body.get("stream"):
        raise bad(
            "body.stream", f"body.stream is {_shown(body['stream'])}: answers of a batch are not streamed"
        )
    return BatchRequest(custom_id, url, {**_DEFAULTS.get(url, {}), "priority": LOWEST_PRIORITY, **body})


def _shown(value: object) -> str:
    text = _JSON.encode(value).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def answer_line(custom_id: str, answer: BatchAnswer) -> bytes:
    """Return the line of the output for an answer, or for a request that got none."""
    line: Json = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id}
    if answer.status is None:
        line |= {"response": None, "error": {"code": "server_unavailable", "message": str(answer.body)}}
    else:
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        line |= {"response": response, "error": None}
    return _JSON.encode(line) + b"\n"


def resume_output(path: Path) -> dict[str, bool]:
    """Return the custom_ids that have a line in an output, and for each whether the request succeeded.

    Removes the beginning of a last line that was not written to its end, because the process was killed.

    Raises:
        BadBatchLine: A line is not one of an output.
    """
    found: dict[str, bool] = {}
    end = 0
    with path.open("rb+") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and raw[: len(_BEGIN_OF_ANSWER)] == _BEGIN_OF_ANSWER[: len(raw)]:
                file.truncate(end)
                break
            try:
                line = msgspec.json.decode(raw)
                response = line["response"]
                found[line["custom_id"]] = response is not None and 200 <= response["status_code"] < 300
            except (ValueError, TypeError, KeyError):
                message = "expected an answer of a batch, with custom_id and response"
                raise BadBatchLine(number, None, message, "invalid_json_line") from None
            end += len(raw)
    return found
