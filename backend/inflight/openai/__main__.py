"""`python -m inflight.openai`: OpenAI's protocol for an engine on this machine, or for any tritonserver.

Owns the process: its listening port, its signals and its orderly shutdown. `scripts/serve` starts this
program beside its tritonserver; started alone, it serves a tritonserver on another host. One event loop runs
on the main thread; when idle, it wakes once a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

import uvicorn

from inflight.access_log import write_access_lines
from inflight.arguments import Parser, port, seconds
from inflight.core.ports import EngineClient
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import InflightError
from inflight.extras import how_to_install
from inflight.log_lines import FORMATS, LineFormatter, open_log
from inflight.openai.app import create_app
from inflight.openai.http_protocol import HttpProtocol
from inflight.openai.options import OpenAiOptions, add_arguments, read_arguments
from inflight.openai.pictures import PicturesEncoder
from inflight.pictures.client import PicturesClient
from inflight.processes import raise_descriptor_limit
from inflight.serving.memory import return_large_blocks

_TICK_S = 1.0
_BACKLOG = 2048
_DEFAULT_PORT = 9000


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal ends the process.

    Returns the exit status: 0 on a signal, 1 on failure, 2 for bad options.
    """
    raise_descriptor_limit()
    return_large_blocks()
    parser = _parser()
    given = parser.parse_args(arguments)
    errors = open_log(given.log_format, "error")
    _log_to(open_log(given.log_format))
    try:
        options = read_arguments(given, given.host, given.port, given.metrics_url, pictures=given.pictures)
        client, *others = _connect(given)
        encoder = None if options.pictures is None else PicturesClient(str(options.pictures))
        config = _config(client, others, options, encoder, given.exit_timeout)
    except (InflightError, ValueError, OSError) as error:
        print(f"openai: {error}", file=errors)
        return 2
    try:
        listener = _listen(options)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        print(f"openai: port {options.port} on {options.host} cannot be used ({reason})", file=errors)
        return 2
    with listener:
        print(f"LISTENING {address(options, listener)}", flush=True)
        server = _Server(config)
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again after its shutdown
            signal.signal(number, server.handle_exit)
        server.run(sockets=[listener])
    for each in (client, *others):
        each.close()
    return 0


def _log_to(stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("openai"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    write_access_lines(stream)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m inflight.openai",
        description="Serve OpenAI's protocol (/v1) for an engine. scripts/serve starts this itself; started "
        "alone, it serves an engine on another host.",
    )
    add = parser.add_argument
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument(
        "--triton", metavar="HOST:PORT", help="the gRPC port of a tritonserver with these models"
    )
    engine.add_argument(
        "--engine-endpoint",
        metavar="SOCKET",
        action="append",
        help="the engine's Unix socket on this machine; given several times, requests choose an engine by the "
        "name of its model's folder",
    )
    add(
        "--tokenizer",
        metavar="DIR",
        help="with --triton: the checkpoint's folder (its weights are not needed)",
    )
    add(
        "--triton-model",
        default="tensorrt_llm",
        metavar="NAME",
        help="the Triton model of the engine (%(default)s)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=port,
        default=_DEFAULT_PORT,
        help="port (default: %(default)s; 0: any free one)",
    )
    add("--metrics-url", default="", metavar="URL", help="Triton's metrics page, for /metrics")
    add("--pictures", type=Path, metavar="SOCKET", help="socket of the process that encodes pictures")
    add(
        "--exit-timeout",
        type=seconds,
        default=30,
        metavar="SECONDS",
        help="seconds that requests in flight get to finish (default: %(default)s)",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="json: every line of the log is a JSON object (default: %(default)s)",
    )
    add_arguments(parser)
    return parser


def _connect(given: argparse.Namespace) -> list[EngineClient]:
    if given.engine_endpoint is not None:
        if given.tokenizer is not None:
            raise ValueError(
                "--tokenizer needs --triton; with --engine-endpoint the engine states its tokenizer"
            )
        return [SocketEngineClient(path) for path in given.engine_endpoint]
    if given.pictures is not None:
        raise ValueError("--pictures needs --engine-endpoint: --triton passes no prompt tables on")
    if given.tokenizer is None:
        raise ValueError("--triton needs --tokenizer DIR, the checkpoint's folder on this machine")
    try:
        from inflight.openai.kserve_client import KServeEngineClient
    except ImportError as error:
        raise ValueError(f"--triton needs tritonclient ({how_to_install('kserve')}): {error}") from None
    return [KServeEngineClient(given.triton, given.tokenizer, given.triton_model)]


def _config(
    client: EngineClient,
    others: Sequence[EngineClient],
    options: OpenAiOptions,
    encoder: PicturesEncoder | None,
    exit_timeout_s: int,
) -> uvicorn.Config:
    key = options.tls_key
    config = uvicorn.Config(
        create_app(client, options, encoder, others),
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        log_config=None,  # uvicorn's lines go where this package's do
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=None if options.tls_certificate is None else str(options.tls_certificate),
        ssl_keyfile=None if key is None else str(key),
        timeout_graceful_shutdown=max(1, exit_timeout_s),
    )
    config.load()  # not in `run`, which would end the process if a certificate is invalid
    return config


def _listen(options: OpenAiOptions) -> socket.socket:
    """Listen on the first address of the host, an IPv4 address if it has one."""
    found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    family, _, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return socket.create_server(place, family=family, backlog=_BACKLOG)


def address(options: OpenAiOptions, listener: socket.socket) -> str:
    """Return the URL of the endpoint."""
    scheme = "http" if options.tls_certificate is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn's server, but it checks once a second and on signals whether to end, not ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = asyncio.Event()

    async def main_loop(self) -> None:
        """Run until the server is to end; refresh the date in response headers."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), _TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. After the first, requests in flight may finish; the second ends the server at once."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)


if __name__ == "__main__":
    sys.exit(main())
