"""HTTP/1 for the endpoint: uvicorn's protocol on httptools, with the limits that a public port needs.

Enforces time limits for sending and reading and the size limit of headers (`bodies` limits the size of
bodies), ignores upgrade offers, and serves streams to clients of HTTP/1.0. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

import httptools
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inflight.access_log import random_id
from inflight.openai.errors import error_body, refusal
from inflight.openai.request_ids import HEADER, id_for

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 15.0
"""Time limit in seconds for the first request's headers on a new connection, and for the rest of started
headers."""
BODY_TIMEOUT_S = 30.0
MIN_BODY_BYTES_PER_S = 16 << 10
"""For each such number of received bytes, a body's time limit (`BODY_TIMEOUT_S`) grows by one second."""
MAX_UNUSED_BYTES = 64 << 20
"""How many bytes of a refused body are read: many clients read the answer only after they have sent the body."""
SEND_TIMEOUT_S = 60.0
"""Seconds after which a connection is closed if its client has read nothing of the waiting response."""
MAX_HEAD_BYTES = 64 << 10
"""Largest size in bytes of a request's line and headers, and of any other data around bodies."""
_TLS_HANDSHAKE = b"\x16\x03"
"""The first two bytes that a client of https:// sends: a handshake, and the protocol's major version."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is closed if its client is idle, sends too slowly, or does not read its response."""

    head_timeout_s = HEAD_TIMEOUT_S
    body_timeout_s = BODY_TIMEOUT_S
    send_timeout_s = SEND_TIMEOUT_S
    parser: Any

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._receive_timer: asyncio.TimerHandle | None = None  # runs while headers or a body are awaited
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_idle_bytes = 0  # bytes since the last whole headers or part of a body
        self._num_body_bytes = 0
        self._body_begun_s = 0.0
        self._has_refused = False
        self._running: RequestResponseCycle | None = None  # the request answered now or last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the connection, and wait for a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and notify all of its requests, not only the last one."""
        self._receive_timer = _cancelled(self._receive_timer)
        self._send_timer = _cancelled(self._send_timer)
        self._unset_keepalive_if_required()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Answer 400 if they are invalid, 431 if the headers are too large.

        A client of https:// cannot read the answer 400, so the log has a warning, too.
        """
        if self._has_refused:
            return
        self._unset_keepalive_if_required()
        if not self.flow.write_paused:
            self._send_timer = _cancelled(self._send_timer)
        if self._receive_timer is None and not self._is_answering:
            self._expect_head()
        self._num_idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            is_first = not self.cycle and self._num_idle_bytes == len(data)
            self._refuse_bytes(is_tls=is_first and data.startswith(_TLS_HANDSHAKE))
        else:
            if self._num_idle_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Start a request, unless it offers an upgrade: then `_feed` parses it again."""
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._num_idle_bytes = self._num_body_bytes = 0
        self._expect_body()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ignore headers that follow a chunked body."""
        if not self.cycle or self.cycle.scope is not self.scope:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Store a part of a body."""
        self._num_idle_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)
        if self.cycle.response_complete and self._num_body_bytes > MAX_UNUSED_BYTES:
            self.transport.close()

    def on_message_complete(self) -> None:
        """End the reading of a request."""
        if self.parser.should_upgrade():
            return
        self._receive_timer = _cancelled(self._receive_timer)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, and watch whether the client reads the rest of this response."""
        super().on_response_complete()
        if self._send_timer is None:
            self._watch_sending()

    def pause_writing(self) -> None:
        """Pause writing until the client reads more."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """Resume writing: the client has read most of the buffer."""
        self._send_timer = _cancelled(self._send_timer)
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def _feed(self, data: bytes) -> None:
        """Parse bytes, ignoring an offer to upgrade, as RFC 9110 allows.

        The parser treats the bytes after headers with such an offer as another protocol. It is therefore
        given the headers again, without the offer.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                method = self.parser.get_method()
                if method == b"CONNECT":  # asks for a tunnel, with or without an Upgrade header
                    raise httptools.HttpParserError("a tunnel") from None
                version = self.parser.get_http_version().encode()
                kept = [each for each in self.headers if each[0] != b"upgrade"]
                lines = [b"%b %b HTTP/%b" % (method, self.url, version), *map(b": ".join, kept)]
                data = b"\r\n".join([*lines, b"", data[offer.args[0] :]])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._receive_timer = self.loop.call_later(self.head_timeout_s, self._give_up_head)

    def _give_up_head(self) -> None:
        if self._num_idle_bytes:
            self._refuse(408, f"no whole request was received in {self.head_timeout_s:g} s")
        else:
            self.transport.close()

    def _expect_body(self) -> None:
        _cancelled(self._receive_timer)
        self._body_begun_s = self.loop.time()
        self._receive_timer = self.loop.call_later(self.body_timeout_s, self._check_body)

    def _check_body(self) -> None:
        if self.pipeline:  # the body of a pipelined request is read when its turn comes
            self._num_body_bytes = 0
            self._expect_body()
            return
        allowed_s = self.body_timeout_s + self._num_body_bytes / MIN_BODY_BYTES_PER_S
        left_s = self._body_begun_s + allowed_s - self.loop.time()
        if left_s > 0:
            self._receive_timer = self.loop.call_later(left_s, self._check_body)
        elif self.cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(408, f"{self._num_body_bytes} bytes of the body were received in {allowed_s:.0f} s")

    def _watch_sending(self) -> None:
        """Abort the connection if the client reads nothing of the waiting bytes in time."""
        num_waiting = self.transport.get_write_buffer_size()

        def look() -> None:
            self._send_timer = None
            if self.transport.get_write_buffer_size() < num_waiting:
                self._watch_sending()
            else:
                self.transport.abort()

        _cancelled(self._send_timer)
        self._send_timer = self.loop.call_later(self.send_timeout_s, look) if num_waiting else None

    def _refuse_bytes(self, is_tls: bool) -> None:
        """Answer bytes that are not an HTTP request; `is_tls`: they are the beginning of https://."""
        if not is_tls:
            self._refuse(400, "this is not an HTTP request")
            return
        mend = "take http:// in the client's URL, or start the server with --ssl-certfile and --ssl-keyfile"
        # The client's port is left out, so that repeated lines are equal and are collapsed.
        _log.warning(
            "%s sent TLS (https://) to a port of plain HTTP; %s", (self.client or ("a client",))[0], mend
        )
        self._refuse(400, f"got TLS (https://), expected plain HTTP; {mend}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer the last received request with an error, after earlier answers, and close the connection."""
        self._has_refused = True
        self._receive_timer = _cancelled(self._receive_timer)
        is_in_body = self._is_answering and self.cycle.more_body
        request_id = id_for(cast(Any, self.cycle.scope)) if is_in_body else random_id()
        headers = {"connection": "close", HEADER: request_id}
        path = cast(Any, self.cycle.scope)["path"] if is_in_body else ""
        response = refusal(path, status, error_body(status, message), headers)
        if not self._is_answering:
            self._write_at_once(response)
        elif not self.cycle.more_body:  # the invalid bytes come after whole requests
            self.cycle.keep_alive = False
        elif self.pipeline:
            self.pipeline[0] = (self.cycle, cast(Any, response))
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
            else:
                self._write_at_once(response)

    def _write_at_once(self, response: JSONResponse) -> None:
        head = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
        self._watch_sending()


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap `app` for a client of HTTP/1.0: without chunked encoding, a stream ends when the connection closes."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return plain


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
