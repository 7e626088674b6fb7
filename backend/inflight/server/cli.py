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
from pathlib import Path
from typing import TextIO, cast, get_args

from inflight.arguments import Parser, program_name
from inflight.engine_folder import is_engine_folder
from inflight.openai.options import API_KEYS_VARIABLE, OpenAiOptions, add_arguments, read_arguments
from inflight.processes import raise_descriptor_limit
from inflight.progress import ProgressEcho
from inflight.server import descriptors
from inflight.server.checkpoint import find_checkpoint
from inflight.server.client_apis import CONTROL_KEY_HEADER, CONTROL_KEY_VARIABLE, ClientApis
from inflight.server.errors import OptionError, ServeError
from inflight.server.launch import ServerOptions, TritonServer, lay_out
from inflight.server.option_types import count, named_folder, port, seconds, setting, whole
from inflight.server.other_servers import translate
from inflight.server.ports import Ports
from inflight.server.ranks import Mode
from inflight.server.repository import Wanted, default_repository
from inflight.server.supervisor import Signals, Supervisor

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def main(arguments: list[str] | None = None, run: Callable[[ServerOptions], int] | None = None) -> int:
    """Serve until a signal ends it; return the exit status.

    Args:
        arguments: The command line; None: this process's.
        run: Function that serves with the parsed options; None: `serve`.
    """
    raise_descriptor_limit()
    try:
        options = parse(arguments)
        for variable in (API_KEYS_VARIABLE, CONTROL_KEY_VARIABLE):
            os.environ.pop(variable, None)  # the models' processes must not get these secrets
        return (run or serve)(options)
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.EMFILE, *_NO_ROOM):
            raise
        why = (
            descriptors.explanation()
            if error.errno == errno.EMFILE
            else f"{error}; TMPDIR may lead elsewhere"
        )
        print(f"serve: {why}", file=sys.stderr)
        return ServeError.exit_code


def parse(arguments: list[str] | None) -> ServerOptions:
    """Parse a command line. Raises OptionError, or exits the program for wrong usage."""
    given = _parser().parse_args(translate(sys.argv[1:] if arguments is None else arguments))
    _choose_model(given)
    _check_engine(given)
    return ServerOptions(
        model_repository=given.model_repository,
        wanted=Wanted(
            model=_checkpoint(given),
            dtype=given.dtype,
            engine=given.engine,
            engine_dir=given.engine_dir,
            weights=given.weights,
            settings=dict(given.set),
            adapters=tuple(given.lora),
        ),
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
    )


def _choose_model(given: argparse.Namespace) -> None:
    """Take the model from its place on the command line if --model does not name it."""
    if given.positional_model is None:
        return
    if given.model is not None:
        raise OptionError(f"--model {given.model} and {given.positional_model} name a model: use only one")
    given.model = given.positional_model


def _checkpoint(given: argparse.Namespace) -> Path | None:
    if given.model is not None:
        return find_checkpoint(given.model, given.revision)
    if given.revision is not None:
        raise OptionError("--revision is for a --model that is fetched from the Hugging Face hub")
    return None


def _openai_options(given: argparse.Namespace) -> OpenAiOptions:
    try:
        return read_arguments(given, given.host, given.openai_port)
    except (OSError, ValueError) as error:
        raise OptionError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program_name("scripts/serve"),
        description="Start tritonserver in the foreground, and print READY when every model is ready.",
        epilog="--no-venv, an option of the script itself, uses the active Python environment instead of .venv. "
        "model_repository/tensorrt_llm/config.pbtxt lists the parameters for --set; "
        "--set max_batch_size=N is the number of sequences that run at a time; with "
        "--set decoupled_mode=false, tensorrt_llm and ensemble give one response per request.",
    )
    _add_model_options(parser)
    _add_address_options(parser)
    _add_running_options(parser)
    _add_api_options(parser)
    _add_program_options(parser)
    _add_rank_options(parser)
    add_arguments(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("positional_model", nargs="?", metavar="DIR_OR_HF_ID", help="the same as --model")
    add(
        "--model",
        metavar="DIR_OR_HF_ID",
        help="Hugging Face checkpoint or GGUF file to serve (default: the demo model)",
    )
    add(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit of a --model that is fetched from the Hugging Face hub (default: main)",
    )
    add("--dtype", choices=_DTYPES, help="data type of the weights (default: the checkpoint's)")
    add(
        "--weights",
        choices=("memory", "mmap"),
        help="mmap: on a CPU, map the weights from a file in ~/.cache/inflight, which the first start writes "
        "(default: memory)",
    )
    add(
        "--lora",
        metavar="NAME=PEFT_FOLDER",
        type=named_folder,
        action="append",
        default=[],
        help="a LoRA adapter that requests may name; may be repeated",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a parameter of config.pbtxt; may be repeated",
    )


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for service, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002), ("openai", 9000)):
        explanation = "default: %(default)s; 0: any free one"
        flags = ("--openai-port", "--port") if service == "openai" else (f"--{service}-port",)
        add(*flags, type=port, default=default, metavar="PORT", help=explanation)
    add("--no-openai", action="store_true", help="serve Triton's endpoints only, without /v1")
    add(
        "--no-triton",
        action="store_true",
        help="serve /v1 only, with the engine in this process: needs no tritonserver, and is not restarted",
    )


def _add_running_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--exit-timeout",
        type=seconds,
        default=30,
        metavar="SECONDS",
        help="seconds for requests in flight when the server shuts down (default: %(default)s)",
    )
    add(
        "--ready-timeout",
        type=count,
        default=300,
        metavar="SECONDS",
        help="seconds without progress after which a start is given up: no line in the log, no file "
        "read, no memory filled (default: %(default)s)",
    )
    add(
        "--restarts",
        type=whole,
        default=5,
        metavar="N",
        help="restart a server that has ended by itself, and give up after N failed starts in a row; 0: never "
        "restart it (default: %(default)s)",
    )
    add(
        "--no-request-checks",
        action="store_true",
        help="do not refuse requests that would crash tritonserver (empty batches, shapes that overflow, ...)",
    )
    add(
        "--model-control",
        choices=("none", "explicit"),
        default="none",
        help="explicit: models can be unloaded and loaded by requests with the key of "
        f"{CONTROL_KEY_VARIABLE} in the header {CONTROL_KEY_HEADER} (default: %(default)s)",
    )
    add("--log-verbose", action="store_true", help="write tritonserver's verbose log, with all of its lines")


def _add_api_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--allow-shared-memory",
        action="store_true",
        help="let every client register shared memory of this machine, as perf_analyzer --shared-memory does: it "
        "can then read and write what the server's processes have in /dev/shm",
    )
    add("--allow-logging", action="store_true", help="let every client change the settings of Triton's log")
    add("--allow-trace", action="store_true", help="let every client change the settings of Triton's traces")
    add(
        "--allow-model-config",
        action="store_true",
        help="let every client read the models' configurations, which name folders of this machine; "
        "perf_analyzer and /v1 on another host (--triton) need them",
    )


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-repository", type=Path, default=default_repository(), metavar="DIR", help="models to load")
    add(
        "--write-repository",
        type=Path,
        metavar="DIR",
        help="lay out the models in this new folder, for a tritonserver that another program starts",
    )
    add("--tritonserver", type=Path, metavar="PATH", help="use another tritonserver, with its own backends")
    add(
        "--engine",
        choices=("torch", "transformers", "tensorrt"),
        help="torch: this server's own layers; transformers: its modelling code, for any decoder whose attention "
        "can be replaced; tensorrt: plans that scripts/build wrote (default: torch for families that it has, "
        "transformers for others)",
    )
    add(
        "--engine-dir",
        metavar="DIR",
        type=Path,
        help="folder of plans that scripts/build wrote; without --model, the tokenizer is read from it too",
    )


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp", type=count, metavar="N", help="tensor-parallel ranks (default: the repository's, or 1)")
    add("--pp", type=count, metavar="M", help="pipeline-parallel ranks (default: the repository's, or 1)")
    add(
        "--ep",
        type=count,
        metavar="N",
        help="number of groups of tensor-parallel ranks, each of which has some of the experts (default: the "
        "repository's, or 1: every rank has a slice of every expert)",
    )
    add(
        "--mode",
        choices=get_args(Mode),
        help="what starts the ranks: leader, this command; orchestrator, the model, which restarts them if "
        "one is lost (default: in_process for one rank, orchestrator for several)",
    )
    add(
        "--mpirun-arguments",
        metavar="ARGUMENTS",
        help='further arguments for mpirun, in one argument: --mpirun-arguments="--hostfile hosts"',
    )


def _check_engine(given: argparse.Namespace) -> None:
    """Raise OptionError if --engine and --engine-dir contradict each other."""
    folder = given.engine_dir
    if folder is not None and given.engine not in (None, "tensorrt"):
        raise OptionError(f"--engine-dir {folder} is for --engine tensorrt, not {given.engine}")
    if folder is not None and not is_engine_folder(folder):
        raise OptionError(f"--engine-dir {folder}: no plans in that folder; scripts/build writes them")
    if given.engine == "tensorrt" and folder is None and not (given.model and is_engine_folder(given.model)):
        raise OptionError("--engine tensorrt needs --engine-dir with a folder that scripts/build wrote")


def serve(options: ServerOptions) -> int:
    """Keep a tritonserver running until a signal ends this process; return the exit status."""
    if options.write_repository is not None:
        return _write(options, options.write_repository)
    with Signals() as signals, _echo() as echo:
        return Supervisor(options, signals, echo, lambda server: print(ready_line(server), flush=True)).run()


@contextlib.contextmanager
def _echo() -> Generator[TextIO, None, None]:
    """Yield the stream for the server's log: stderr, with progress as a bar if it is a terminal."""
    if not sys.stderr.isatty():
        yield sys.stderr
        return
    with contextlib.closing(ProgressEcho(sys.stderr)) as echo:
        yield cast(TextIO, echo)


def _write(options: ServerOptions, target: Path) -> int:
    if target.exists():
        raise OptionError(f"--write-repository {target}: it exists; name a folder that does not")
    models = ", ".join(lay_out(options, target).models)
    print(f"WRITTEN {target} with {models}", flush=True)
    return 0


def ready_line(server: TritonServer) -> str:
    """Return the READY line, with a server's addresses and model."""
    model = server.repository.checkpoint or "none"
    openai = f" openai={server.openai}" if server.openai else ""
    return f"READY http={server.http} grpc={server.grpc} metrics={server.metrics}{openai} model={model}"
