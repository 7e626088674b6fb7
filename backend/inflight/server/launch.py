"""One tritonserver: start it on a private runtime repository, wait until it is ready, and end it completely.

`serve` is a context manager for tests and benchmarks. `TritonServer` is the class that it and the command
line use. A keeper process ends the server, its stubs and its ranks if the launcher is killed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO, TypeVar

from inflight.endpoint.path import endpoint_path, remove_stale
from inflight.errors import ConfigError
from inflight.openai.options import OpenAiOptions
from inflight.pictures.families import INSTALL_PICTURES, TOWER_DTYPES, has_vision_tower, missing_packages
from inflight.pictures.options import to_arguments
from inflight.server import descriptors, installation, ranks, request_checks, runtime_directory
from inflight.server.client_apis import ClientApis
from inflight.server.drain import EngineDrain, IdleWatch, stubs_processor_time
from inflight.server.errors import ServeError, Starved
from inflight.server.keeper import Keeper
from inflight.server.log import ServerLog, find_cause, was_starved
from inflight.server.openai_process import OpenAiProcess
from inflight.server.pictures_process import PicturesProcess
from inflight.server.ports import Ports, reserve_ports, resolve_host
from inflight.server.process import ServerProcess
from inflight.server.repository import RuntimeRepository, Wanted, assemble, default_repository
from inflight.server.runtime_directory import PID_FILE
from inflight.server.startup import Startup, is_ready, num_bytes

_T = TypeVar("_T")
_STARVED = "probably because one of its processes got no processor time for a second while a model was loaded"
_MAIN_ENGINE = "tensorrt_llm"
_POLL_INTERVAL_S = 0.1
_TRIES = 3  # attempts of `serve` if a start was starved
_UNREADY_GRACE_S = 5.0  # no requests can be in flight before the server is ready
# Seconds that a server without requests may take to end (`drain` explains why it may not end at all).
# Engines report when they have no requests; other models count as idle after this many seconds without
# processor time.
_DRAINED_GRACE_S = 2.0
_QUIET_S = 5.0
# Seconds before the exit timeout at which requests still in flight are answered with UNAVAILABLE.
_ANSWER_MARGIN_S = 4.0
# Fraction of these seconds in which the OpenAI endpoint sends these answers; the rest is tritonserver's.
_SENDING_SHARE = 0.25
# Seconds to kill all processes and wait until they have ended; for a short exit timeout, a fraction of it.
_KILL_S, _KILL_SHARE = 0.5, 0.25
# The stub loads the checkpoint, which may take long; tritonserver must not treat the stub as stuck
# meanwhile.
_STUB_TIMEOUT_S = 1200
_LAST_REQUESTS = 16  # number of requests before a loss that are logged
# Initial size in /dev/shm per instance; small enough for many models in a container's usual 64 MB.
_SHARED_MEMORY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server: its models, its addresses and how it runs.

    Attributes:
        ports: Port numbers; 0 means any free one.
        openai: Options of the OpenAI endpoint, if `ports` has a port for it. Their host, port and metrics
            URL are replaced by the server's.
        ready_timeout_s: Seconds without progress after which a start is given up; None: no limit.
        restarts: Number of failed starts in a row after which a supervisor gives up; 0: after the first.
        request_checks: Whether tritonserver loads a library that refuses requests that would end it.
        model_control: Triton's model control mode. With "explicit", requests can unload and load models, as
            an orchestrator itself does. In any mode all models of the repository are loaded at the start.
        log_format: The form in which the command line writes the log. Processes write text.
        access_log: Whether the processes that the command line starts log a line for each request.
        client_apis: Triton's APIs that clients may use, and the key for loading and unloading models.
        tp, pp, ep, mode, mpirun_arguments: Parameters of the engine (see `ranks`); None: the repository's
            values.
        write_repository: Folder in which to lay out the models for another program. If it is set, no server
            is started.
        triton: Whether a tritonserver serves the models; if not, only /v1 and the engine endpoint do.
        vision: Whether pictures are encoded, if the checkpoint has a vision tower.
    """

    model_repository: Path = field(default_factory=default_repository)
    wanted: Wanted = field(default_factory=Wanted)
    host: str = "127.0.0.1"
    ports: Ports = field(default_factory=Ports)
    openai: OpenAiOptions = field(default_factory=OpenAiOptions)
    tritonserver: Path | None = None
    log_verbose: bool = False
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    exit_timeout_s: int = 30
    ready_timeout_s: int | None = None
    restarts: int = 0
    request_checks: bool = True
    model_control: Literal["none", "explicit"] = "none"
    client_apis: ClientApis = field(default_factory=ClientApis)
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    mode: ranks.Mode | None = None
    mpirun_arguments: str | None = None
    write_repository: Path | None = None
    triton: bool = True
    vision: bool = True


def make_pictures(
    options: ServerOptions, repository: RuntimeRepository, folder: Path, echo: TextIO | None
) -> PicturesProcess | None:
    """Make the process that encodes pictures; None if the checkpoint has no vision tower, or it is not wanted."""
    checkpoint = Path(repository.checkpoint or "")
    if not options.vision or not has_vision_tower(checkpoint):
        return None
    if missing := missing_packages():
        why = f"pictures are refused, because {' and '.join(missing)} are not installed: {INSTALL_PICTURES}"
        print(f"serve: {why}", file=echo or sys.stderr, flush=True)
        return None
    dtype = options.wanted.dtype if options.wanted.dtype in TOWER_DTYPES else None
    given = options.openai
    flags = to_arguments(given.allowed_media_domains, given.allowed_local_media_path, given.max_pictures)
    return PicturesProcess(checkpoint, dtype, flags, folder, echo)


def cannot_encode(failure: str) -> str:
    """Return the message of a server whose process for pictures cannot start."""
    return f"pictures cannot be encoded, and --no-vision serves texts alone: {failure}"


def lay_out(options: ServerOptions, target: Path) -> RuntimeRepository:
    """Lay out the models for `options` in `target`, which must not exist yet; raises OptionError."""
    wanted = ranks.settings(options.tp, options.pp, options.mode, options.mpirun_arguments, options.ep)
    return assemble(options.model_repository, target, options.wanted, wanted, options.vision)


class TritonServer:
    """A tritonserver and its private folder. The constructor lays out the folder; `start` starts the server."""

    def __init__(self, options: ServerOptions, echo: TextIO | None = None) -> None:
        self._options = options
        self._echo = echo
        self._address = resolve_host(options.host)
        self._reserved = contextlib.ExitStack()
        self.ports = self._reserved.enter_context(reserve_ports(self._address, options.ports))
        self._folder = _make_folder()
        self._keeper: Keeper | None = None
        self._process: ServerProcess | None = None
        self._log: ServerLog | None = None
        self._ready = False
        try:
            self._installation = self._find_installation()
            self.repository = self._assemble()
            self._leader = self._find_leader()
            self._environment = self._make_environment()
            self._pictures = make_pictures(options, self.repository, self._folder, echo)
            self._openai = self._make_openai()
        except BaseException:  # also after Ctrl-C, the folder must be removed
            runtime_directory.remove(self._folder)
            raise

    @property
    def http(self) -> str:
        """Address of the HTTP port, as HOST:PORT."""
        return f"{self._options.host}:{self.ports.http}"

    @property
    def grpc(self) -> str:
        """Address of the gRPC port, as HOST:PORT."""
        return f"{self._options.host}:{self.ports.grpc}"

    @property
    def metrics(self) -> str:
        """Address of the metrics port, as HOST:PORT."""
        return f"{self._options.host}:{self.ports.metrics}"

    @property
    def openai(self) -> str | None:
        """URL of the OpenAI endpoint, without a path; None without an endpoint."""
        return self._openai.url if self._openai else None

    @property
    def pid(self) -> int:
        """Process id of the server, which is also the process group of the server and its stubs."""
        pid = self._started().pid
        if pid is None:
            raise ServeError("mpirun has not started the server yet")
        return pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the server, or in leader mode of mpirun; None while it runs."""
        return self._started().returncode

    def log_text(self) -> str:
        """Return the log of the server and its models so far."""
        return self._log.text() if self._log else ""

    def start(self) -> None:
        """Start the process without waiting for it."""
        command = self._command()
        if self._leader:
            variables, pid_file = self._installation.variables(), self._folder / PID_FILE
            command = ranks.leader_command(command, variables, pid_file, self._leader)
        try:
            self._keeper = Keeper(self._folder)
            self._process = ServerProcess(command, self._environment, self._folder, bool(self._leader))
        except OSError as error:
            raise ServeError(f"{command[0]} cannot be run: {error.strerror}") from None
        is_verbose = self._options.log_verbose
        has_gpu = _has_gpu() or is_verbose
        self._log = ServerLog(self._process.output, self._echo, has_gpu, is_verbose, is_starting=True)
        if self._pictures:
            self._pictures.start()
        if self._openai:
            self._openai.start()

    def wait_ready(
        self,
        timeout: float | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        report: Callable[[str], None] | None = None,
    ) -> bool:
        """Wait until every model is ready; return True, or False as soon as `interrupted` returns true.

        Raises ServeError with the cause if the server ends by itself, takes longer than `timeout` seconds,
        or makes no progress for `ready_timeout_s` seconds. `report` is called from time to time with a line
        about what is not ready yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        startup = self._make_startup(report)
        while not self._is_ready():
            self._started().wait(_POLL_INTERVAL_S)
            if interrupted():
                return False
            if self.returncode is not None:
                raise self.ended()
            if self._openai and self._openai.failure:
                raise ServeError(f"the OpenAI endpoint does not start: {self._openai.failure}")
            if self._pictures and self._pictures.failure:
                raise ServeError(cannot_encode(self._pictures.failure))
            if forgotten := startup.forgotten():
                raise Starved(f"{forgotten}, {_STARVED}")
            if stalled := startup.check():
                raise ServeError(f"{stalled}; {_where_log_is(self._echo)}\n{find_cause(self.log_text())}")
            if deadline is not None and time.monotonic() > deadline:
                raise ServeError(f"not ready after {timeout:g} s:\n{find_cause(self.log_text())}")
        self._ready = True
        if self._installation.preloaded and not request_checks.are_loaded(self._folder):
            self._warn_unchecked("tritonserver could not load their library, as its log says")
        if self._log:
            self._log.settle(quiet=0.05, timeout=0.5)
            self._log.end_start()
        return True

    def _is_ready(self) -> bool:
        ports, models = self.ports, self.repository.models
        are_up = all(process.is_up() for process in (self._openai, self._pictures) if process)
        return are_up and is_ready(self._address, ports.http, ports.metrics, models)

    def _make_startup(self, report: Callable[[str], None] | None) -> Startup:
        assert self._log is not None, "waiting for a server that was not started"

        def report_with_log(line: str) -> None:
            if report is not None:
                report(f"{line}; {_where_log_is(self._echo)}")

        return Startup(
            self.repository.models,
            self._log,
            lambda: num_bytes(runtime_directory.find_processes(self._folder)),
            self._options.ready_timeout_s,
            None if report is None else report_with_log,
            initialized=lambda: runtime_directory.initialized_models(self._folder),
        )

    @property
    def was_lost(self) -> bool:
        """Return whether a server that has ended failed or was ended by a guard, instead of by a signal."""
        return self.returncode != 0 or self.was_ended_by_guard

    @property
    def was_ended_by_guard(self) -> bool:
        """Return whether a guard has ended the server, because it lost the process of a model."""
        return runtime_directory.was_lost(self._folder)

    def ended(self) -> ServeError:
        """Return the error to raise for a server that has ended by itself."""
        if self._log:
            self._log.join(timeout=2)
        log = self.log_text()
        if not self._ready and was_starved(log, self.repository.endpoints):
            return Starved(
                f"tritonserver ended before it was ready (exit status {self.returncode}), {_STARVED}:\n"
                f"{find_cause(log)}"
            )
        when = "" if self._ready else " before it was ready"
        why = f": {descriptors.explanation()}" if descriptors.TOO_MANY in log else ":"
        return ServeError(f"tritonserver ended{when} (exit status {self.returncode}){why}\n{find_cause(log)}")

    def last_requests(self) -> list[str]:
        """Return the last HTTP and gRPC requests, one line each; [] if they were not recorded."""
        return request_checks.last_requests(self._folder, _LAST_REQUESTS)

    def shut_down(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new requests, let requests in flight finish, and end the server; at once if `hurry` returns true.

        The server is killed after the exit timeout if it has not ended, for example because a client still
        holds a stream. Without an engine that reports when all requests are answered, this takes some
        seconds longer.

        Returns whether the server ended in order, with every request in flight answered within the timeout.
        """
        timeout_s = max(1.0, self._options.exit_timeout_s)
        timeout_s = timeout_s if self._ready else min(timeout_s, _UNREADY_GRACE_S)
        timeout_s -= min(_KILL_S, _KILL_SHARE * timeout_s)
        begun_s = time.monotonic()
        watch: EngineDrain | IdleWatch | None = self._drain_engines()
        # When tritonserver ends, an engine waits only some seconds for requests that did not come through
        # Triton. The OpenAI endpoint's requests may take longer, so this endpoint is ended first.
        in_order = self._openai is None or self._openai.end(hurry, timeout_s)
        if not self._started().ask_to_end():
            self.kill()
            return False
        grace_s = min(_DRAINED_GRACE_S, timeout_s / 4)
        if watch is None:
            watch, grace_s = IdleWatch(lambda: stubs_processor_time(self.pid)), _QUIET_S
            timeout_s += _QUIET_S if self._ready else 0.0
        deadline = begun_s + timeout_s
        drained = False
        while self.returncode is None and not (drained or hurry()) and time.monotonic() < deadline:
            self._started().wait(_POLL_INTERVAL_S)
            drained = watch.seconds() > grace_s
        in_order &= self.returncode == 0 or (drained and self.returncode is None)
        self.kill()
        return in_order

    def _drain_engines(self) -> EngineDrain | None:
        """Notify the engines of the shutdown: this launcher's, or those that engine_endpoint names.

        None without engines.
        """
        sockets = list(self._folder.glob("*.sock"))
        if elsewhere := self._options.wanted.settings.get("engine_endpoint"):
            sockets.append(Path(elsewhere))
        return EngineDrain(sockets, self._drain_timeout_s()) if sockets else None

    def _drain_timeout_s(self) -> float:
        """Return for how many seconds requests in flight may continue when the server is shut down."""
        timeout_s = self._options.exit_timeout_s
        return max(timeout_s - _ANSWER_MARGIN_S, timeout_s / 2)

    def kill(self) -> None:
        """End the server, its stubs and its ranks at once."""
        for process in (self._openai, self._pictures):
            if process:
                process.kill()
        self._started().kill()
        if self._log:
            self._log.join(timeout=5)

    def close(self) -> None:
        """Shut down the server if it still runs, then end its remaining processes and remove its files."""
        try:
            if self._process and self.returncode is None:
                self.shut_down()
            elif self._process:
                self.kill()  # remaining stubs and ranks
        finally:
            self._reserved.close()
            self._remove_endpoints()
            runtime_directory.remove(self._folder)
            if self._keeper:
                self._keeper.dismiss()

    def _remove_endpoints(self) -> None:
        """Delete the socket files, at paths from `engine_endpoint`, of engines that were killed."""
        for path in filter(None, self.repository.endpoints.values()):
            with contextlib.suppress(ConfigError, OSError):  # another server listens there
                remove_stale(path)

    def _find_installation(self) -> installation.Installation:
        found = _find(self._options.tritonserver, self._folder)
        if not self._options.request_checks:
            return found
        try:
            library = request_checks.compile_checks(self._folder / "request_checks.so")
        except request_checks.CannotCompile as error:
            self._warn_unchecked(str(error))
            return found
        return replace(found, preloaded=(library,))

    def _warn_unchecked(self, why: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            print(
                f"serve: requests that crash tritonserver are not refused: {why} (docs/production.md)",
                file=self._echo or sys.stderr,
                flush=True,
            )

    def _assemble(self) -> RuntimeRepository:
        return lay_out(self._options, self._folder / "models")

    def _find_leader(self) -> ranks.Launch | None:
        """Return the engine whose ranks this launcher starts.

        Returns None if there is none, or mpirun started this launcher.
        """
        leader = ranks.find_leader(self.repository.launches)
        return leader if ranks.num_ranks_around() == 1 else None

    def _make_openai(self) -> OpenAiProcess | None:
        """Make the OpenAI endpoint for all engines that do not draft, `tensorrt_llm` first.

        Returns None without engines.
        """
        endpoints, options = self.repository.endpoints, self._options
        engines = [name for name in endpoints if name not in self.repository.drafts]
        engines.sort(key=lambda name: name != _MAIN_ENGINE)
        if self.ports.openai is None or not engines:
            return None
        wanted = replace(
            options.openai,
            host=options.host,
            port=self.ports.openai,
            metrics_url=f"http://{self._address}:{self.ports.metrics}/metrics",
            pictures=self._pictures and self._pictures.socket,
        )
        find_sockets = partial(self._engine_sockets, {name: endpoints[name] for name in engines})
        drain_s = self._drain_timeout_s()
        timeout_s = int(drain_s + _SENDING_SHARE * (options.exit_timeout_s - drain_s))
        return OpenAiProcess(wanted, find_sockets, self._folder, timeout_s, self._echo)

    def _engine_sockets(self, endpoints: Mapping[str, str]) -> list[Path] | None:
        """Return the paths of the engines' sockets; None until tritonserver's process id is known."""
        pid = runtime_directory.read_pid(self._folder)
        sockets: list[Path] = []
        for engine, endpoint in endpoints.items():
            if not endpoint:
                if pid is None:
                    return None
                endpoint = endpoint_path(pid, engine, str(self._folder))
            sockets.append(Path(endpoint))
        return sockets

    def _make_environment(self) -> dict[str, str]:
        """Return the environment of tritonserver; in leader mode, of mpirun and the workers."""
        environment = dict(os.environ) if self._leader else self._installation.environment()
        if all(launch.mode == "in_process" for launch in self.repository.launches):
            return environment
        shared_memory = runtime_directory.make_shared_memory_folder(self._folder)
        return environment | ranks.session_variables(self._folder, shared_memory)

    def _command(self) -> list[str]:
        gpu = () if _has_gpu() else ("--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0")
        has_orchestrator = any(launch.mode == "orchestrator" for launch in self.repository.launches)
        is_explicit = has_orchestrator or self._options.model_control == "explicit"
        control = ("--model-control-mode=explicit", "--load-model=*") if is_explicit else ()
        backend = "--backend-config=python,"
        return [
            str(self._installation.program),
            *self._installation.arguments,
            f"--model-repository={self.repository.path}",
            *(f"--{service}-address={self._address}" for service in self.ports.of_triton()),
            *(f"--{service}-port={port}" for service, port in self.ports.of_triton().items()),
            # Clients' trace contexts become request parameters.
            "--http-header-forward-pattern=traceparent",
            "--grpc-header-forward-pattern=traceparent",
            f"--exit-timeout-secs={self._options.exit_timeout_s}",
            f"--log-verbose={int(self._options.log_verbose)}",
            # With auto-completion, tritonserver would start every model's stub twice, first only to complete
            # config.pbtxt.
            "--disable-auto-complete-config",
            f"{backend}shm-region-prefix-name={runtime_directory.shared_memory_prefix(self._folder)}",
            f"{backend}shm-default-byte-size={_SHARED_MEMORY_BYTES}",
            f"{backend}shm-growth-byte-size={_SHARED_MEMORY_BYTES}",
            f"{backend}stub-timeout-seconds={_STUB_TIMEOUT_S}",
            *control,
            *self._options.client_apis.arguments(),
            *gpu,
        ]

    def _started(self) -> ServerProcess:
        if self._process is None:
            raise ServeError("the server has not been started")
        return self._process


@contextlib.contextmanager
def serve(
    model_repository: Path | None = None,
    model: Path | None = None,
    dtype: str | None = None,
    settings: Mapping[str, str] | None = None,
    ready_timeout: float = 120.0,
    options: ServerOptions | None = None,
) -> Generator[TritonServer, None, None]:
    """Run a server on free ports during a `with` block. The other arguments override `options`.

    Without `options`, clients may read the models' configurations, as perf_analyzer does.
    """
    given = options or ServerOptions(client_apis=ClientApis(model_config=True))
    wanted = replace(
        given.wanted,
        model=model or given.wanted.model,
        dtype=dtype or given.wanted.dtype,
        settings={**given.wanted.settings, **(settings or {})},
    )
    repository = model_repository or given.model_repository
    options = replace(given, model_repository=repository, wanted=wanted)
    server = start_with_tries(lambda: _start_once(options, ready_timeout), _TRIES)
    try:
        yield server
    finally:
        server.close()


def _start_once(options: ServerOptions, ready_timeout: float) -> TritonServer:
    server = TritonServer(options)
    try:
        server.start()
        server.wait_ready(ready_timeout)
    except BaseException:  # also after Ctrl-C, the server must not stay behind
        server.close()
        raise
    return server


def start_with_tries(
    start: Callable[[], _T],
    most_tries: int,
    after_any_failure: bool = False,
    before_next: Callable[[ServeError], None] = lambda error: None,
) -> _T:
    """Return the result of `start`; call it again if it raises Starved.

    Args:
        start: Function that starts a server, and raises ServeError if the start fails.
        most_tries: Number of failures after which the error is raised; 0 means 1.
        after_any_failure: Whether to repeat the start after any failure.
        before_next: Called with the failure before the next attempt.
    """
    num_failed = 0
    while True:
        try:
            return start()
        except ServeError as error:
            num_failed += 1
            if num_failed >= most_tries or not (after_any_failure or isinstance(error, Starved)):
                raise
            before_next(error)


def _make_folder() -> Path:
    try:
        return runtime_directory.make()
    except OSError as error:
        os.close(os.open("/", os.O_RDONLY))  # raises if no descriptors are left, unlike `error`
        raise ServeError(
            f"no folder for the server's files can be made ({error.strerror or error}): set TMPDIR to a folder "
            "that can be written to"
        ) from None


def _find(program: Path | None, folder: Path) -> installation.Installation:
    return installation.embedded(folder) if program is None else installation.external(program, folder)


def _where_log_is(echo: TextIO | None) -> str:
    """Return the words of an error message that say where the log is. `echo` is the stream it is copied to."""
    if echo is None:
        return "its log ends with"
    try:
        file = Path(os.readlink(f"/proc/self/fd/{echo.fileno()}"))
    except (OSError, ValueError):
        file = Path()
    return f"its log is in {file}" if file.is_file() else "its log is above"


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()
