"""Checks of the machine: Python, processors, memory, shared memory, ports, a GPU and its driver.

Imports only the standard library, so that it runs before anything is installed. One thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inflight import environment
from inflight.doctor.finding import INSTALL, Finding, green, red, yellow
from inflight.errors import ConfigError
from inflight.processors import Processors

_OLDEST, _NEWEST = (3, 10), (3, 12)
_LITTLE_MEMORY, _TOO_LITTLE_MEMORY = 4 << 30, 1 << 30
# Number of models times the shared memory of each at the start (launch.py).
_MODELS, _SHARED_BYTES_OF_MODEL = 7, 4 << 20
_LITTLE_SHARED_MEMORY = 256 << 20
_ROOT = Path("/")
_KINDS = (("bfloat16", False), ("float32", False), ("bfloat16", True))


def check_python(version: Sequence[int] = sys.version_info[:3]) -> Iterator[Finding]:
    """Report whether torch and the server's Python backend support this Python version."""
    text = ".".join(map(str, version[:3]))
    if _OLDEST <= tuple(version[:2]) <= _NEWEST:
        yield green("Python", f"{text}, {sys.prefix}")
        return
    yield red(
        "Python",
        f"{text}, expected 3.10, 3.11 or 3.12: for these the embedded tritonserver has a Python backend",
        "apt-get install python3.11 python3.11-venv, then scripts/serve",
    )


def check_packages() -> Iterator[Finding]:
    """Report whether all of inflight's dependencies are installed in this Python environment."""
    from importlib import metadata

    try:
        needed = [line for line in metadata.requires("inflight") or () if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        yield red("packages", f"inflight is not installed in {sys.prefix}", INSTALL)
        return
    names = [re.match(r"[\w.-]+", line) for line in needed]
    missing = [match[0] for match in names if match is not None and not _is_installed(match[0])]
    if missing:
        yield red("packages", f"not installed in {sys.prefix}: {', '.join(missing)}", INSTALL)
    else:
        yield green("packages", f"all {len(needed)} are installed")


def check_processors(root: Path = _ROOT) -> Iterator[Finding]:
    """Report the processors that affinity, cores and control groups allow, and the engine's number of threads."""
    processors = Processors.here(root)
    if processors.num_threads == 1:
        yield yellow(
            "processors",
            f"{processors}: the server's other processes take them from the engine's one thread",
            "give it 2 or more cores (docker run --cpus)",
        )
    else:
        yield green("processors", f"{processors}: the engine has {processors.num_threads} threads")


def check_memory(root: Path = _ROOT) -> Iterator[Finding]:
    """Report the memory that the engine can use for weights and KV cache."""
    from inflight.engine.memory import available_cpu_memory

    free = available_cpu_memory(root)
    says = f"{free / 2**30:.1f} GiB available, limits of control groups considered"
    if free < _TOO_LITTLE_MEMORY:
        yield red(
            "memory",
            f"{says}; the server alone takes about 1 GiB",
            "end what takes memory, or raise the limit",
        )
    elif free < _LITTLE_MEMORY:
        yield yellow(
            "memory", f"{says}; little is left for weights", "end what takes memory, or raise the limit"
        )
    else:
        yield green("memory", says)


def check_environment(variables: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report environment variables of this package that have invalid values or unknown names."""
    for fault in environment.faults(variables):
        yield red("environment", fault, "docs/settings.md lists the environment variables")
    for warning in environment.unused(variables):
        yield yellow("environment", warning, "unset it if it was meant for this server")


def check_layers(has_gpu: bool) -> Iterator[Finding]:
    """Report the source of the compiled layers for each kind of weights, or why torch's operators are used."""
    from inflight.engine.cpu.library import CannotBuild, describe_target, foresee

    if has_gpu:
        yield green("CPU layers", "not used: there is a GPU")
        return
    for dtype, int8 in _KINDS:
        name = f"CPU layers, {'int8' if int8 else dtype}"
        try:
            target = describe_target(dtype, int8)
            says = f"compiled layers ({target}), {foresee(dtype, int8)}"
            if target.startswith("generic: "):
                yield yellow(
                    name, says, "a processor with AVX2, FMA and F16C (Haswell, Zen or later) is faster"
                )
            else:
                yield green(name, says)
        except CannotBuild as reason:
            yield yellow(name, f"torch's operators, which are slower: {reason}", _mend_layers(str(reason)))
        except ConfigError as error:
            yield red(name, str(error), _mend_layers(str(error)))


def _mend_layers(reason: str) -> str:
    if "INFLIGHT_CPU_BUILD" in reason:
        return "unset INFLIGHT_CPU_BUILD"
    if "compiler" in reason:
        return "apt-get install g++"
    if "INFLIGHT_CPU_TARGET" in reason:
        return "unset INFLIGHT_CPU_TARGET"
    return "c++ --version (does the compiler work?)"


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Report whether /dev/shm is large enough for the models' responses. Each model takes 4 MiB at its start."""
    needed = _MODELS * _SHARED_BYTES_OF_MODEL
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield red(str(folder), "is not a writable folder", "mount -t tmpfs -o size=1g tmpfs /dev/shm")
        return
    usage = shutil.disk_usage(folder)
    says = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    mend = "docker run --shm-size=1g"
    if leftovers := sorted(path.name for path in folder.glob("inflight-server-*")):
        says += f", {len(leftovers)} files of servers that run, or were killed"
        mend = f"ls {folder}/inflight-server-* (remove the files of servers that have ended), or {mend}"
    if usage.free < needed:
        yield red(str(folder), f"{says}; the models need {needed >> 20} MiB to start", mend)
    elif usage.free < _LITTLE_SHARED_MEMORY:
        yield yellow(str(folder), f"{says}; responses with logits need more", mend)
    else:
        yield green(str(folder), says)


def check_ports(host: str, ports: Mapping[str, int]) -> Iterator[Finding]:
    """Report whether `scripts/serve` can listen on each port, and if not, which processes listen there."""
    from inflight.server.errors import OptionError
    from inflight.server.ports import Ports, resolve_host, resolve_ports

    try:
        address = resolve_host(host)
    except OptionError as error:
        yield red("ports", str(error), "--host 127.0.0.1, or 0.0.0.0 for all of this machine's addresses")
        return
    claimed: dict[int, str] = {}
    for service, port in ports.items():
        name = f"port {port}"
        if port and (other := claimed.setdefault(port, service)) != service:
            yield red(
                name, f"{service}: given to {other} too", f"scripts/serve {_flag(service)} 0 (any free one)"
            )
            continue
        try:
            resolve_ports(address, Ports(**{service: port}))
        except OptionError as error:
            reason = str(error).partition(":")[0]
            yield red(
                name,
                f"{service}: {reason}{_described_owner(port)}",
                f"scripts/serve {_flag(service)} 0 (any free one)",
            )
        else:
            yield green(name, f"free, for {service}")


def _flag(service: str) -> str:
    """Return the flag of a service's port."""
    return "--port" if service == "openai" else f"--{service}-port"


def _described_owner(port: int) -> str:
    owners = [f"{name} (process {pid})" for pid, name in _listeners(port)]
    return f"; {', '.join(owners)} listens there" if owners else ""


def _listeners(port: int, root: Path = _ROOT) -> list[tuple[int, str]]:
    """Return (process id, name) of the processes of this user that listen on a TCP port."""
    inodes = set(_listening_sockets(port, root))
    found: list[tuple[int, str]] = []
    for folder in (root / "proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if inodes & set(_links(folder / "fd")):
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
    return sorted(found)


def _links(folder: Path) -> Iterator[str]:
    for link in folder.iterdir():
        with contextlib.suppress(OSError):  # the file was closed meanwhile
            yield os.readlink(link)


def _listening_sockets(port: int, root: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def has_gpu(root: Path = _ROOT) -> bool:
    """Return whether the kernel has an NVIDIA device; the same test as at a start."""
    return (root / "dev/nvidiactl").exists()


def check_driver(root: Path = _ROOT) -> Iterator[Finding]:
    """Report whether there is an NVIDIA GPU, and its driver's version."""
    if not has_gpu(root):
        if shutil.which("nvidia-smi") is None:
            yield green("GPU", "no NVIDIA GPU: the layers run on the processors")
        else:
            yield yellow(
                "GPU",
                "there is nvidia-smi, but no /dev/nvidiactl: the layers run on the processors",
                "nvidia-smi (does it see the GPU?); docker run --gpus all",
            )
        return
    try:
        line = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        yield yellow("driver", "its version cannot be read", "nvidia-smi")
        return
    version = re.search(r"\d+\.\d[\d.]*", line)
    yield green("driver", version[0] if version else line)


def _is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
