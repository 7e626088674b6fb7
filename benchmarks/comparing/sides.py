"""The processes that `compare` starts: one in this package's environment, and one in each peer's environment.

Defines their command lines and environment variables. The last JSON object that a process prints has its
figures. A peer is never imported here. Runs on the main thread, which waits for each process. A process that
hangs or is abandoned is killed with all of its children.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PEER_NAMES = ("vllm", "openvino", "transformers", "llama_cpp")
CONVERTED = ("openvino", "llama_cpp")
"""Peers that load a converted model, not the checkpoint."""
OURS = "ours"

_PROGRAMS = Path(__file__).parent / "peers"
_ROOT = Path(__file__).resolve().parents[2]
_TCMALLOC = "tcmalloc_minimal"
_LINES_OF_A_FAILURE = 12
_VLLM_KV_CACHE_GIB = 1  # only vLLM's default: the program sets the size of the KV cache
_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
_OURS = ("PYTHONPATH", "GOMP_SPINCOUNT")  # variables of this process that must not reach a peer


@dataclass(frozen=True)
class Side:
    """This package or another system.

    Attributes:
        name: OURS or one of PEER_NAMES.
        python: Interpreter of the system's environment.
        model: The converted model, if the system needs one.
    """

    name: str
    python: Path
    model: Path | None = None


@dataclass(frozen=True)
class Work:
    """The work of every side.

    Attributes:
        model: Checkpoint folder.
        requests_file: JSON file of all workloads.
        dtype: Data type of the weights.
        threads: Threads of the forward pass.
        kv_cache_tokens: Size of the KV cache in tokens.
        timeout_s: Seconds after which a process is killed.
    """

    model: Path
    requests_file: Path
    dtype: str
    threads: int
    kv_cache_tokens: int
    timeout_s: float


@dataclass(frozen=True)
class Printed:
    """Output of a program: its line of JSON or the reason why there is none, and all other output.

    `has_hung` is whether the program was killed because it took too long.
    """

    figures: Mapping[str, object] | None
    failure: str = ""
    warnings: str = ""
    has_hung: bool = False


def ours() -> Side:
    """Return this package's side, in this environment."""
    return Side(OURS, Path(sys.executable))


def run(side: Side, work: Work) -> Printed:
    """Run the side's program in its environment, and wait until it ends."""
    return _run(command(side, work), environment(side, work.threads), work.timeout_s)


def command(side: Side, work: Work) -> list[str]:
    """Return interpreter, program and options."""
    options = ["--model", side.model or work.model, "--requests", work.requests_file, "--dtype", work.dtype]
    options += ["--threads", work.threads, "--kv-cache-tokens", work.kv_cache_tokens]
    return [str(side.python), str(_PROGRAMS / f"run_{side.name}.py"), *map(str, options)]


def environment(side: Side, threads: int) -> dict[str, str]:
    """Return the side's environment variables.

    A peer gets the settings that its guide recommends, and no paths of this project.
    """
    if side.name == OURS:
        return os.environ | _ON_CPU | {"PYTHONPATH": str(_ROOT)}  # because the benchmarks are not installed
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    inherited |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | _ON_CPU
    return inherited | (_vllm_variables(side.python, threads) if side.name == "vllm" else {})


def _vllm_variables(python: Path, threads: int) -> dict[str, str]:
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "LD_PRELOAD": ":".join(_found(_vllm_libraries(python))),
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _vllm_libraries(python: Path) -> dict[str, str | None]:
    """Return the libraries that vLLM's guide recommends to preload: a faster malloc, and Intel's OpenMP."""
    # The interpreter is a link to a file outside of its environment, so the link must not be resolved.
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    return {
        f"lib{_TCMALLOC}": ctypes.util.find_library(_TCMALLOC),
        str(openmp): str(openmp) if openmp.exists() else None,
    }


def missing_libraries(side: Side) -> list[str]:
    """Return the missing libraries that would make the peer faster."""
    if side.name != "vllm":
        return []
    return [name for name, found in _vllm_libraries(side.python).items() if found is None]


def _found(libraries: Mapping[str, str | None]) -> list[str]:
    return [found for found in libraries.values() if found is not None]


def _run(command: list[str], variables: Mapping[str, str], timeout_s: float) -> Printed:
    try:
        with _group(command, variables) as process:
            out, err = process.communicate(timeout=timeout_s)
    except OSError as error:
        return Printed(None, str(error))
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        return Printed(None, _failure(f"ended after {timeout_s:g} s (--timeout)", said), has_hung=True)
    figures = last_json_line(out)
    if process.returncode == 0 and figures is not None:
        return Printed(figures, warnings=err)
    return Printed(None, _failure(f"exit status {process.returncode}", err.strip() or out))


@contextlib.contextmanager
def _group(command: list[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process as the leader of a group; end the whole group on exit."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _failure(what: str, said: str) -> str:
    return "\n".join([what, *said.strip().splitlines()[-_LINES_OF_A_FAILURE:]])


def last_json_line(text: str) -> dict | None:
    """Return the last line that is a JSON object. Libraries print other lines before and after it."""
    return next(filter(None, map(_json_object, reversed(text.splitlines()))), None)


def _json_object(line: str) -> dict | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
