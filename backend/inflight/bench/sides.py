"""The processes that `compare` starts: this package's own program, and a program in each peer's environment.

Knows command lines and environment variables, and takes the last JSON object that a process prints as its figures.
A peer is never imported here. Called from the main thread, which waits for each process.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.bench.workload import WorkloadName

PEER_NAMES = ("vllm", "openvino", "transformers", "llama_cpp")
CONVERTED = ("openvino", "llama_cpp")
"""Peers that do not load a checkpoint as it is."""
OURS = "ours"

_PROGRAMS = Path(__file__).parent / "peers"
_TCMALLOC = "tcmalloc_minimal"
_LINES_OF_A_FAILURE = 12
_VLLM_KV_CACHE_GIB = 2
_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
_OURS = ("PYTHONPATH", "GOMP_SPINCOUNT")  # variables of this process that are nothing to a peer


@dataclass(frozen=True)
class Peer:
    """Another system: the interpreter of its environment, and its form of the model if it needs one of its own."""

    name: str
    python: Path
    model: Path | None = None


@dataclass(frozen=True)
class Work:
    """What every side is asked to do. `requests_file`: JSON, for the peers' programs."""

    model: Path
    workload: WorkloadName
    num_requests: int
    requests_file: Path
    dtype: str
    threads: int


@dataclass(frozen=True)
class Printed:
    """What a program printed: its line of JSON, or why there is none; and what else it had to say."""

    figures: Mapping[str, object] | None
    failure: str = ""
    warnings: str = ""


def run_ours(work: Work) -> Printed:
    """`scripts/bench offline` with the same requests."""
    options = ["--model", work.model, "--workload", work.workload, "--requests", work.num_requests]
    options += ["--dtype", work.dtype, "--threads", work.threads]
    printed = _run([sys.executable, "-m", "inflight.bench.offline", *map(str, options)], os.environ | _ON_CPU)
    print(printed.warnings, end="", file=sys.stderr)  # of what cannot run on compiled code, say
    return printed


def run_peer(peer: Peer, work: Work) -> Printed:
    """The peer's program, in the peer's environment."""
    return _run(peer_command(peer, work), peer_environment(peer, work.threads))


def peer_command(peer: Peer, work: Work) -> list[str]:
    options = ["--model", peer.model or work.model, "--requests", work.requests_file, "--mode", work.workload]
    options += ["--dtype", work.dtype, "--threads", work.threads]
    return [str(peer.python), str(_PROGRAMS / f"run_{peer.name}.py"), *map(str, options)]


def peer_environment(peer: Peer, threads: int) -> dict[str, str]:
    """This process's variables, less the path to its own packages, with what the peer's guide says to set."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    inherited |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | _ON_CPU
    return inherited | (_vllm_variables(peer.python, threads) if peer.name == "vllm" else {})


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
    """What vLLM's guide says to load before everything else, by name: a faster malloc, and Intel's OpenMP."""
    # The interpreter is a link out of its environment, so it is not followed.
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    return {
        f"lib{_TCMALLOC}": ctypes.util.find_library(_TCMALLOC),
        str(openmp): str(openmp) if openmp.exists() else None,
    }


def missing_libraries(peer: Peer) -> list[str]:
    """Libraries that the peer would be faster with and that are not on this machine."""
    if peer.name != "vllm":
        return []
    return [name for name, found in _vllm_libraries(peer.python).items() if found is None]


def _found(libraries: Mapping[str, str | None]) -> list[str]:
    return [found for found in libraries.values() if found is not None]


def _run(command: list[str], environment: Mapping[str, str]) -> Printed:
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Printed(None, str(error))
    figures = last_json_line(done.stdout)
    if done.returncode == 0 and figures is not None:
        return Printed(figures, warnings=done.stderr)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-_LINES_OF_A_FAILURE:]
    return Printed(None, "\n".join([f"exit status {done.returncode}", *said]))


def last_json_line(text: str) -> dict | None:
    """The last line that is a JSON object: libraries print what they like before and after."""
    return next(filter(None, map(_json_object, reversed(text.splitlines()))), None)


def _json_object(line: str) -> dict | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
