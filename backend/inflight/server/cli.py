"""The command line of `scripts/serve`: parses options, runs the server, and prints a READY line.

`supervisor.py` keeps the server running. This module runs on the main thread; a thread of `log.ServerLog`
copies the server's log to stderr.
"""

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO, cast

from inflight.arguments import command_of, why_not_writable
from inflight.checkpoint_config import checkpoint_name
from inflight.engine_folder import is_engine_folder
from inflight.log_lines import ACCESS_LOG_VARIABLE, asks_for_json, open_log
from inflight.openai.options import API_KEYS_VARIABLE, OpenAiOptions, read_arguments
from inflight.parameter_reader import mode_of_head
from inflight.parameter_spec import Speculation
from inflight.processes import raise_descriptor_limit
from inflight.progress import BAR_VARIABLE, ProgressEcho
from inflight.server import descriptors
from inflight.server.checkpoint import find_checkpoint
from inflight.server.client_apis import CONTROL_KEY_VARIABLE, ClientApis
from inflight.server.errors import OptionError, ServeError
from inflight.server.launch import ServerOptions, TritonServer, lay_out
from inflight.server.option_parser import make_parser
from inflight.server.option_types import choose_model, find_model_behind
from inflight.server.other_servers import given_as, translate
from inflight.server.ports import Ports
from inflight.server.repository import Wanted
from inflight.server.supervisor import Signals, Supervisor

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_UNUSABLE_PATH = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


class Judge(Protocol):
    """A function that returns why a checkpoint cannot be served, judged by its config.json; None if it may be."""

    def __call__(self, folder: Path, implementation: str | None) -> str | None:
        """Judge the config.json in `folder`, for the parameter `engine`."""
        ...


def main(
    arguments: list[str] | None = None,
    run: Callable[[ServerOptions], int] | None = None,
    judge: Judge | None = None,
) -> int:
    """Serve until a signal ends it; return the exit status.

    Args:
        arguments: The command line; None: this process's.
        run: Function that serves with the parsed options; None: `serve`.
        judge: Asked before a checkpoint is downloaded; None: every checkpoint is downloaded.
    """
    raise_descriptor_limit()
    is_json = asks_for_json(sys.argv[1:] if arguments is None else arguments)
    errors = open_log("json" if is_json else "text", "error")
    try:
        options = parse(arguments, judge)
        if run is None and not options.triton:
            raise OptionError("--no-triton: `inflight serve` has this option")
        for variable in (API_KEYS_VARIABLE, CONTROL_KEY_VARIABLE):
            os.environ.pop(variable, None)  # the models' processes must not get these secrets
        if options.log_format == "text" and sys.stderr.isatty():
            os.environ[BAR_VARIABLE] = "1"  # for the models' processes
        if not options.access_log:
            os.environ[ACCESS_LOG_VARIABLE] = "0"  # for the models' processes and that of /v1
        return (run or serve)(options)
    except ServeError as error:
        print(f"serve: {error}", file=errors)
        return error.exit_code
    except OSError as error:
        if (why := _explain(error)) is None:
            raise
        print(f"serve: {why}", file=errors)
        return (OptionError if error.errno in _UNUSABLE_PATH else ServeError).exit_code


def _explain(error: OSError) -> str | None:
    """Return a line for an error that the machine or a path of the command line causes; None for any other."""
    if error.errno == errno.EMFILE:
        return descriptors.explanation()
    if error.errno in _NO_ROOM:
        return f"{error}; TMPDIR may lead elsewhere"
    if error.errno in _UNUSABLE_PATH and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return None


def parse(arguments: list[str] | None, judge: Judge | None = None) -> ServerOptions:
    """Parse a command line. Raises OptionError, or exits the program for wrong usage."""
    written = sys.argv[1:] if arguments is None else arguments
    given = make_parser(given_as(written)).parse_args(translate(written))
    find_model_behind(given, "served_model_name", "api_key")
    choose_model(given)
    _check_engine(given)
    _check_drafts(given)
    return ServerOptions(
        model_repository=given.model_repository,
        wanted=_wanted(given, judge),
        host=given.host,
        ports=Ports(
            given.http_port,
            given.grpc_port,
            given.metrics_port,
            None if given.no_openai else given.openai_port,
        ),
        openai=_openai_options(given),
        tritonserver=given.tritonserver,
        log_verbose=given.log_verbose,
        log_format=given.log_format,
        access_log=not given.no_access_log,
        exit_timeout_s=given.exit_timeout,
        ready_timeout_s=given.ready_timeout,
        restarts=given.restarts,
        request_checks=not given.no_request_checks,
        model_control=given.model_control,
        client_apis=ClientApis(
            shared_memory=given.allow_shared_memory,
            logging=given.allow_logging,
            trace=given.allow_trace,
            model_config=given.allow_model_config,
            key=os.environ.get(CONTROL_KEY_VARIABLE) or None,
        ),
        tp=given.tp,
        pp=given.pp,
        ep=given.ep,
        mode=given.mode,
        mpirun_arguments=given.mpirun_arguments,
        write_repository=given.write_repository,
        triton=not given.no_triton,
        vision=not given.no_vision,
    )


def _wanted(given: argparse.Namespace, judge: Judge | None) -> Wanted:
    model = _checkpoint(given, judge)
    _check_adapter_names(given, model)
    return Wanted(
        model=model,
        dtype=given.dtype,
        engine=given.engine,
        engine_dir=given.engine_dir,
        weights=given.weights,
        speculate=given.speculate,
        draft_model=given.draft_model,
        kv_cache_dir=given.kv_cache_dir,
        kv_cache_disk_bytes=given.kv_cache_disk,
        kv_events_config=given.kv_events_config,
        otlp_traces_endpoint=given.otlp_traces_endpoint,
        convert=given.convert,
        settings=dict(given.set),
        adapters=tuple(given.lora),
    )


def _checkpoint(given: argparse.Namespace, judge: Judge | None) -> Path | None:
    if given.model is not None:
        engine = "tensorrt" if given.engine_dir else given.engine or dict(given.set).get("engine")
        judge_folder = None if judge is None else partial(judge, implementation=engine)
        return find_checkpoint(given.model, given.revision, judge_folder)
    if given.revision is not None:
        raise OptionError("--revision is for a --model that is fetched from the Hugging Face hub")
    return None


def _check_adapter_names(given: argparse.Namespace, model: Path | None) -> None:
    """Raise OptionError if an adapter has the model's name: requests to /v1 could not name the adapter."""
    names: list[str] = given.served_model_name
    if not names and model is not None:
        names = [checkpoint_name(model)]
    for name, folder in given.lora:
        if name in names and not given.no_openai:
            raise OptionError(f"--lora {name}={folder}: the model has this name, expected another one")


def _openai_options(given: argparse.Namespace) -> OpenAiOptions:
    try:
        return read_arguments(given, given.host, given.openai_port)
    except (OSError, ValueError) as error:
        raise OptionError(str(error)) from None


def _check_engine(given: argparse.Namespace) -> None:
    """Raise OptionError if --engine and --engine-dir contradict each other."""
    folder, build = given.engine_dir, command_of("scripts/build")
    if folder is not None and given.engine not in (None, "tensorrt"):
        raise OptionError(f"--engine-dir {folder} is for --engine tensorrt, not {given.engine}")
    if folder is not None and not is_engine_folder(folder):
        raise OptionError(f"--engine-dir {folder}: no plans in that folder; {build} writes them")
    if given.engine == "tensorrt" and folder is None and not (given.model and is_engine_folder(given.model)):
        raise OptionError(f"--engine tensorrt needs --engine-dir with a folder that {build} wrote")


def _check_drafts(given: argparse.Namespace) -> None:
    """Make --draft-model imply --speculate. Raises OptionError if they contradict each other."""
    folder = given.draft_model
    if folder is not None and given.speculate is None:
        given.speculate = mode_of_head(folder)
    speculation = None if given.speculate is None else Speculation.parse(given.speculate)
    method = None if speculation is None else speculation.method
    if folder is None and method == Speculation.EAGLE3:
        raise OptionError(
            f"--speculate {given.speculate} needs --draft-model with the folder of an EAGLE-3 head"
        )
    if folder is not None and method != (expected := mode_of_head(folder).partition(":")[0]):
        raise OptionError(f"--draft-model {folder} is for --speculate {expected}, not {given.speculate}")


def serve(options: ServerOptions) -> int:
    """Keep a tritonserver running until a signal ends this process; return the exit status."""
    if options.write_repository is not None:
        return _write(options, options.write_repository)
    with Signals() as signals, _echo(options.log_format) as echo:
        return Supervisor(options, signals, echo, lambda server: print(ready_line(server), flush=True)).run()


@contextlib.contextmanager
def _echo(log_format: str) -> Generator[TextIO, None, None]:
    """Yield the stream for the server's log: stderr, with progress as a bar if it is a terminal."""
    if log_format == "json" or not sys.stderr.isatty():
        yield open_log(log_format)
        return
    with contextlib.closing(ProgressEcho(sys.stderr)) as echo:
        yield cast(TextIO, echo)


def _write(options: ServerOptions, target: Path) -> int:
    if target.exists():
        raise OptionError(f"--write-repository {target}: it exists; name a folder that does not")
    if reason := why_not_writable(target):
        raise OptionError(f"--write-repository {target}: {reason}")
    models = ", ".join(lay_out(options, target).models)
    print(f"WRITTEN {target} with {models}", flush=True)
    return 0


def ready_line(server: TritonServer) -> str:
    """Return the READY line, with a server's addresses and model."""
    model = server.repository.checkpoint or "none"
    openai = f" openai={server.openai}" if server.openai else ""
    return f"READY http={server.http} grpc={server.grpc} metrics={server.metrics}{openai} model={model}"
