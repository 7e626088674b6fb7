"""The command line of `scripts/serve`: options in, a READY line out.

Keeping the server up is `supervisor.py`'s affair. Runs on the main thread alone; the server's log is copied to
stderr by a thread of `log.ServerLog`.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

from inflight.server.checkpoint import find_checkpoint
from inflight.server.errors import OptionError, ServeError
from inflight.server.launch import ServerOptions, TritonServer
from inflight.server.option_types import count, port, seconds, setting, whole
from inflight.server.ports import Ports
from inflight.server.ranks import Mode
from inflight.server.repository import Wanted, default_repository
from inflight.server.supervisor import Signals, Supervisor

_DTYPES = ("float32", "bfloat16", "float16", "int8")


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal says to end; returns the exit status."""
    try:
        return _serve(parse(arguments))
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return error.exit_code


def parse(arguments: list[str] | None) -> ServerOptions:
    """The options a command line stands for; raises OptionError, or ends the program for wrong usage."""
    given = _parser().parse_args(arguments)
    _refuse_unavailable(given)
    return ServerOptions(
        model_repository=given.model_repository,
        wanted=Wanted(
            model=find_checkpoint(given.model) if given.model is not None else None,
            dtype=given.dtype,
            settings=dict(given.set),
        ),
        host=given.host,
        ports=Ports(given.http_port, given.grpc_port, given.metrics_port),
        tritonserver=given.tritonserver,
        log_verbose=given.log_verbose,
        exit_timeout_s=given.exit_timeout,
        ready_timeout_s=given.ready_timeout,
        restarts=given.restarts,
        model_control=given.model_control,
        tp=given.tp,
        pp=given.pp,
        mode=given.mode,
        mpirun_arguments=given.mpirun_arguments,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/serve",
        description="Start tritonserver in the foreground and say READY when every model is.",
        epilog="--no-venv, first seen by the script, uses the active Python environment instead of .venv. "
        "model_repository/tensorrt_llm/config.pbtxt says what can be --set; "
        "--set max_batch_size=N is how many sequences run at a time; --set decoupled_mode=false has tensorrt_llm "
        "and ensemble give one response to a request.",
        allow_abbrev=False,
    )
    _add_model_options(parser)
    _add_address_options(parser)
    _add_running_options(parser)
    _add_program_options(parser)
    _add_rank_options(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HF_ID", help="Hugging Face checkpoint to serve (default: the demo model)")
    add("--dtype", choices=_DTYPES, help="data type of the weights (default: the checkpoint's)")
    add(
        "--set",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a config.pbtxt parameter, as often as wanted",
    )


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for service, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        explanation = "default: %(default)s; 0: any free one"
        add(f"--{service}-port", type=port, default=default, metavar="PORT", help=explanation)


def _add_running_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--exit-timeout",
        type=seconds,
        default=30,
        metavar="SECONDS",
        help="for requests in flight at the end (default: %(default)s)",
    )
    add(
        "--ready-timeout",
        type=count,
        default=300,
        metavar="SECONDS",
        help="give up a server that is not ready and has made no progress for so long: no line in its log, no "
        "file read, no memory filled (default: %(default)s)",
    )
    add(
        "--restarts",
        type=whole,
        default=5,
        metavar="N",
        help="start a server that has ended by itself again, and give up after N starts in a row that came to "
        "nothing; 0: never start it again (default: %(default)s)",
    )
    add(
        "--model-control",
        choices=("none", "explicit"),
        default="none",
        help="explicit: models can be unloaded and loaded by request, as an orchestrator does itself "
        "(default: %(default)s)",
    )
    add("--log-verbose", action="store_true", help="tritonserver's verbose log, and nothing left out of it")


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-repository", type=Path, default=default_repository(), metavar="DIR", help="models to load")
    add("--tritonserver", type=Path, metavar="PATH", help="another tritonserver, with its own backends")
    add("--engine", choices=("torch", "tensorrt"), default="torch", help="only torch in this version")
    add("--engine-dir", metavar="DIR", help="not in this version")


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp", type=count, metavar="N", help="tensor-parallel ranks (default: the repository's, or 1)")
    add("--pp", type=count, metavar="M", help="pipeline-parallel ranks (default: the repository's, or 1)")
    add(
        "--mode",
        choices=get_args(Mode),
        help="who starts the ranks: leader, this command; orchestrator, the model itself, which starts them again "
        "if one is lost (default: in_process for one rank, orchestrator for several)",
    )
    add(
        "--mpirun-arguments",
        metavar="ARGUMENTS",
        help='further arguments for mpirun, as one word: --mpirun-arguments="--hostfile hosts"',
    )


def _refuse_unavailable(given: argparse.Namespace) -> None:
    if given.engine != "torch":
        raise OptionError(f"--engine {given.engine} is not available in this version, only torch is")
    if given.engine_dir is not None:
        raise OptionError("--engine-dir is not available in this version; --model names a checkpoint")


def _serve(options: ServerOptions) -> int:
    with Signals() as signals:
        return Supervisor(
            options, signals, sys.stderr, lambda server: print(ready_line(server), flush=True)
        ).run()


def ready_line(server: TritonServer) -> str:
    """The line that tells where a ready server listens and what it serves."""
    model = server.repository.checkpoint or "none"
    return f"READY http={server.http} grpc={server.grpc} metrics={server.metrics} model={model}"
