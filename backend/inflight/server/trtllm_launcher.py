"""tensorrtllm_backend's launch_triton_server.py, implemented by `scripts/serve`, with the same flags and defaults.

Converts each flag to options of `scripts/serve`. Imports only the standard library, because the calling
script may run before anything is installed.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.arguments import Parser, output_file, port, positive, seconds, whole
from inflight.parameter_reader import is_filled
from inflight.server import ranks
from inflight.server.config_text import read_parameters
from inflight.server.errors import OptionError

_TRITONSERVER = "/opt/tritonserver/bin/tritonserver"
_CONFIG = "config.pbtxt"


@dataclass(frozen=True)
class Translation:
    """The launcher's flags, converted to options of `scripts/serve`.

    Attributes:
        arguments: Arguments for `scripts/serve`.
        log_file: File for the log; None for the terminal.
        notes: A line for each given flag that has no effect.
    """

    arguments: tuple[str, ...]
    log_file: Path | None
    notes: tuple[str, ...]


def main(serve: Path, arguments: Sequence[str] | None = None) -> int:
    """Start the server with the program `serve`; return the exit status without waiting until it is ready.

    As with the original launcher, clients check the server's readiness.
    """
    given = parser(serve.parents[1] / "model_repository").parse_args(arguments)
    try:
        translation = translate(given)
        _check_alone(given.force)
    except OptionError as error:
        print(f"launch_triton_server: {error}", file=sys.stderr)
        return error.exit_code
    for note in translation.notes:
        print(f"launch_triton_server: {note}", file=sys.stderr)
    process = _start([str(serve), *translation.arguments], translation.log_file)
    print(f"launch_triton_server: started; `kill {process.pid}` ends it in order", file=sys.stderr)
    return 0


def parser(model_repository: Path) -> argparse.ArgumentParser:
    """Return a parser with the original launcher's flags."""
    made = Parser(
        prog="launch_triton_server.py",
        description="scripts/serve, with the flags of tensorrtllm_backend's launcher.",
    )
    add = made.add_argument
    add("--world_size", type=positive, default=1, help="ranks of the engine")
    add(
        "--tritonserver",
        default=_TRITONSERVER,
        help="the tritonserver to start (default: %(default)s, or if that is missing the Python environment's)",
    )
    add("--grpc_port", type=port, default=8001)
    add("--http_port", type=port, default=8000)
    add("--metrics_port", type=port, default=8002)
    add("--force", "-f", action="store_true", help="start even if another tritonserver runs")
    add("--log", action="store_true", help="write the verbose log into --log-file")
    add("--log-file", type=Path, default="triton_log.txt")
    add("--no-mpi", action="store_true", help="one rank, in the model's own process")
    add("--model_repo", type=Path, default=model_repository)
    add(
        "--tensorrt_llm_model_name",
        default="tensorrt_llm",
        help="models that hold engines, separated by commas",
    )
    add("--multi-model", action="store_true", help="start several engines, in orchestrator mode")
    add("--disable-spawn-processes", action="store_true", help="accepted without effect")
    add("--multimodal_gpu0_cuda_mem_pool_bytes", type=whole, default=0, help="accepted without effect")
    add("--oversubscribe", action="store_true", help="allow more ranks than cores")
    add("--trtllm_llmapi_launch", action="store_true", help="accepted without effect")
    add("--exit_timeout", type=seconds, help="seconds that requests in flight get to finish")
    return made


def translate(given: argparse.Namespace) -> Translation:
    """Convert the flags. Raises OptionError if they contradict each other or the repository."""
    tritonserver = given.tritonserver if Path(given.tritonserver).exists() else None
    if tritonserver is None and given.tritonserver != _TRITONSERVER:
        raise OptionError(f"--tritonserver {given.tritonserver}: there is no such program")
    # The original opens no further port. A further port could keep a second server from starting.
    arguments = ["--model-repository", str(given.model_repo), "--host", "0.0.0.0", "--no-openai"]
    for service in ("grpc", "http", "metrics"):
        arguments += [f"--{service}-port", str(getattr(given, f"{service}_port"))]
    if tritonserver:
        arguments += ["--tritonserver", tritonserver]
    if given.log:
        arguments += ["--log-verbose"]
    if given.exit_timeout is not None:
        arguments += ["--exit-timeout", str(given.exit_timeout)]
    arguments += _rank_arguments(given, _engines(given))
    return Translation(tuple(arguments), _log_file(given.log_file) if given.log else None, _notes(given))


def _log_file(path: Path) -> Path:
    try:
        return output_file(str(path))
    except argparse.ArgumentTypeError as error:
        raise OptionError(f"--log-file: {error}") from None


def _rank_arguments(given: argparse.Namespace, engines: Mapping[str, Mapping[str, str]]) -> list[str]:
    if given.no_mpi and given.world_size != 1:
        raise OptionError(f"--world_size {given.world_size}: must be 1 with --no-mpi")
    if given.multi_model:
        if given.world_size != 1 and not given.disable_spawn_processes:
            raise OptionError(
                f"--world_size {given.world_size}: must be 1 with --multi-model; each engine's ranks are its "
                f"{ranks.TENSOR_PARALLEL} times its {ranks.PIPELINE_PARALLEL} in {_CONFIG}"
            )
        arguments = ["--mode", "orchestrator"]
    else:
        arguments = _leader_arguments(given.world_size, engines)
    # By default `scripts/serve` gives mpirun these options itself. Passing them makes ranks share cores even if
    # other options would change this.
    return (
        [*arguments, "--mpirun-arguments=--oversubscribe --bind-to none"]
        if given.oversubscribe
        else arguments
    )


def _leader_arguments(world_size: int, engines: Mapping[str, Mapping[str, str]]) -> list[str]:
    launches = [ranks.launch_of(name, known, {}) for name, known in engines.items()]
    if len(engines) > 1 and (world_size > 1 or any(launch.num_ranks > 1 for launch in launches)):
        raise OptionError(f"{' and '.join(engines)}: several engines with several ranks need --multi-model")
    is_leader = ["--mode", "leader"] if world_size > 1 else []
    for launch in launches:
        if not _sets_ranks(engines[launch.model]):
            continue
        if launch.num_ranks != world_size:
            raise OptionError(
                f"--world_size {world_size}: {launch.model} has {launch.num_ranks} ranks, by "
                f"{ranks.TENSOR_PARALLEL} and {ranks.PIPELINE_PARALLEL} in its {_CONFIG}"
            )
        return is_leader
    return ["--tp", str(world_size), *is_leader] if world_size > 1 else []


def _sets_ranks(parameters: Mapping[str, str]) -> bool:
    return any(is_filled(parameters.get(key)) for key in (ranks.TENSOR_PARALLEL, ranks.PIPELINE_PARALLEL))


def _engines(given: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the parameters of the models that the flags name as engines."""
    engines: dict[str, dict[str, str]] = {}
    for name in given.tensorrt_llm_model_name.split(","):
        if not given.model_repo.is_dir():
            raise OptionError(f"--model_repo {given.model_repo}: there is no such folder")
        config = given.model_repo / name / _CONFIG
        if not config.is_file():
            raise OptionError(
                f"--tensorrt_llm_model_name {name}: {given.model_repo} has no such model, expected the file "
                f"{name}/{_CONFIG}"
            )
        engines[name] = read_parameters(config.read_text(encoding="utf-8"))
    return engines


def _notes(given: argparse.Namespace) -> tuple[str, ...]:
    notes: list[str] = []
    if given.disable_spawn_processes:
        notes.append("--disable-spawn-processes means nothing here: each engine starts its own ranks")
    if given.trtllm_llmapi_launch:
        notes.append("--trtllm_llmapi_launch means nothing here: there is one way to start ranks")
    if given.multimodal_gpu0_cuda_mem_pool_bytes:
        notes.append(
            "--multimodal_gpu0_cuda_mem_pool_bytes means nothing here: no model sends tensors on a GPU"
        )
    return tuple(notes)


def _check_alone(force: bool) -> None:
    others = " ".join(map(str, running_servers()))
    if not others:
        return
    message = f"tritonserver runs already, with process ids {others}; `kill {others}` ends it"
    if not force:
        raise OptionError(f"{message}, and --force starts another one beside it")
    print(f"launch_triton_server: {message}", file=sys.stderr)


def running_servers() -> list[int]:
    """Return the process ids of all tritonservers on this machine."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The file has the program's name in brackets, followed by its state.
            name, _, rest = (entry / "stat").read_text(errors="replace").partition(" (")[2].rpartition(") ")
        except OSError:  # the process has ended
            continue
        if name == "tritonserver" and not rest.startswith("Z"):
            found.append(int(entry.name))
    return sorted(found)


def _start(command: list[str], log_file: Path | None) -> "subprocess.Popen[bytes]":
    if log_file is None:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    with log_file.open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
