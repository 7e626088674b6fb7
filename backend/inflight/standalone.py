"""`inflight serve --no-triton`: /v1 and the engine endpoint without a tritonserver.

The engine runs in this process, and listens at the engine endpoint, a Unix socket. The
OpenAI endpoint is a process of its own, as it is with a tritonserver, and connects to this socket. The main thread
waits for signals. Nothing restarts the engine: if it is lost, this process ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from inflight.access_log import write_access_lines
from inflight.endpoint.path import endpoint_path
from inflight.errors import ConfigError, InflightError
from inflight.interrupts import INTERRUPTED, note_interrupts
from inflight.log_lines import LineFormatter, open_log
from inflight.processes import exempt_from_collection
from inflight.server import runtime_directory
from inflight.server.errors import OptionError, ServeError
from inflight.server.keeper import Keeper
from inflight.server.launch import ServerOptions, cannot_encode, lay_out, make_pictures
from inflight.server.log import CollapsingHandler
from inflight.server.openai_process import OpenAiProcess
from inflight.server.pictures_process import PicturesProcess
from inflight.server.ports import Ports, reserve_ports, resolve_host
from inflight.server.repository import RuntimeRepository, read_engine_parameters
from inflight.server.supervisor import Signals

if TYPE_CHECKING:
    from inflight.build import RunningEngine
    from inflight.config import Parameters
    from inflight.engine_parts import OnHang

_ENGINE = "tensorrt_llm"
_CHECK_S = 0.1


def serve(options: ServerOptions) -> int:
    """Serve until a signal ends this process; return the exit status. Raises ServeError if it cannot start."""
    _check(options)
    with reserve_ports(resolve_host(options.host), Ports(openai=options.ports.openai)) as ports:
        return _serve_at(ports, options)


def _serve_at(ports: Ports, options: ServerOptions) -> int:
    log = open_log(options.log_format)
    _log_to(log, options.log_verbose)
    folder = runtime_directory.make()
    keeper = Keeper(folder)
    try:
        return _serve(options, folder, ports, log)
    except KeyboardInterrupt:  # while the model is loaded
        return INTERRUPTED
    finally:
        runtime_directory.end_processes(folder)
        runtime_directory.remove(folder)
        keeper.dismiss()


def _log_to(stream: TextIO, is_verbose: bool) -> None:
    handler = CollapsingHandler(stream, collapses=not is_verbose)
    handler.setFormatter(LineFormatter("engine"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("inflight").setLevel(logging.DEBUG if is_verbose else logging.INFO)
    write_access_lines(stream)


def _check(options: ServerOptions) -> None:
    """Raise OptionError for options that need a tritonserver."""
    if options.ports.openai is None:
        raise OptionError("--no-triton and --no-openai leave nothing to serve: use only one of them")
    if options.write_repository is not None:
        raise OptionError("--write-repository is for a tritonserver: leave out --no-triton")
    if options.mode not in (None, "in_process") or max(options.tp or 1, options.pp or 1) > 1:
        raise OptionError("--no-triton serves with one rank: --tp, --pp and --mode need a tritonserver")


def _serve(options: ServerOptions, folder: Path, ports: Ports, log: TextIO) -> int:
    assert ports.openai is not None, "checked"
    repository = lay_out(options, folder / "models")
    parameters = _read_parameters(repository)
    socket = Path(parameters.engine_endpoint or endpoint_path(os.getpid(), _ENGINE, str(folder)))
    pictures = make_pictures(options, repository, folder, log)
    wanted = replace(
        options.openai,
        host=options.host,
        port=ports.openai,
        metrics_url="",
        pictures=pictures and pictures.socket,
    )
    openai = OpenAiProcess(wanted, lambda: (socket,), folder, max(1, options.exit_timeout_s), log)
    for process in (openai, pictures):
        if process:
            process.start()
    interrupts = note_interrupts()
    try:
        running = _start_engine(parameters, repository, socket, partial(_end, log))
        try:
            if interrupts:
                return INTERRUPTED
            with Signals() as signals:
                ready = f"READY openai={openai.url} model={repository.checkpoint}"
                return _run(options, openai, pictures, signals, ready, running.prepare_guides)
        finally:
            running.close(0.0)
    finally:
        for process in (openai, pictures):
            if process:
                process.kill()


def _read_parameters(repository: RuntimeRepository) -> Parameters:
    """Return the engine's parameters. Raises ServeError if they are invalid, or need several ranks."""
    try:
        parameters = read_engine_parameters(repository.path, _ENGINE)
    except ConfigError as error:
        raise ServeError(str(error)) from None
    if parameters.tensor_parallel_size * parameters.pipeline_parallel_size > 1:
        raise OptionError("--no-triton serves with one rank: several ranks need a tritonserver")
    return parameters


def _start_engine(
    parameters: Parameters, repository: RuntimeRepository, socket: Path, on_hang: OnHang
) -> RunningEngine:
    """Load the model and serve it at the socket. Raises ServeError if the model cannot be loaded."""
    from inflight.build import build_engine, check_parameters
    from inflight.load_model import import_for_good

    try:
        check_parameters(parameters)
        import_for_good()
        version = repository.path / _ENGINE / "1"
        running = build_engine(parameters, str(version), str(socket), on_hang=on_hang)
    except ConfigError as error:
        raise ServeError(str(error)) from None
    exempt_from_collection()
    return running


def _end(log: TextIO, error: InflightError) -> None:
    """End this process because the engine hangs. The keeper ends the OpenAI endpoint."""
    print(f"serve: the server ends: {error}", file=log, flush=True)
    os._exit(ServeError.exit_code)


def _run(
    options: ServerOptions,
    openai: OpenAiProcess,
    pictures: PicturesProcess | None,
    signals: Signals,
    ready: str,
    after_ready: Callable[[], None],
) -> int:
    """Print READY when /v1 listens, wait for a signal, and let requests in flight finish."""

    def are_up() -> bool:
        return openai.is_up() and (pictures is None or pictures.is_up())

    while not are_up() and not signals.any():
        if openai.failure:
            raise ServeError(f"the OpenAI endpoint does not start: {openai.failure}")
        if pictures is not None and pictures.failure:
            raise ServeError(cannot_encode(pictures.failure))
        signals.wait(are_up, _CHECK_S)
    is_ready = not signals.any()
    if is_ready:
        print(ready, flush=True)
        after_ready()
    signals.wait(lambda: False)
    openai.end(signals.several, max(1.0, options.exit_timeout_s))
    return signals.exit_status(has_served=is_ready)
