"""The tritonserver program to run, and the files that it needs in a virtual environment.

Finds the server in the nvidia-pytriton wheel, and lays out its Python backend for the running Python
version. Does not start anything.
"""

import ctypes.util
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from inflight.server.errors import OptionError, ServeError


@dataclass(frozen=True)
class Installation:
    """A tritonserver program with its arguments and libraries.

    Attributes:
        program: Path of tritonserver.
        interpreter: Folder of the `python3` that the Python backend imports packages with.
        arguments: First arguments of the program.
        library_path: Folders in which the dynamic loader searches libraries.
        preloaded: Libraries that the dynamic loader loads first.
    """

    program: Path
    interpreter: Path
    arguments: tuple[str, ...] = ()
    library_path: tuple[Path, ...] = ()
    preloaded: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment to start the program in."""
        return dict(os.environ) | self.variables()

    def variables(self) -> dict[str, str]:
        """Return the environment variables to change. PATH begins with the `python3` that the Python stub runs."""
        paths = {
            "PATH": [self.interpreter],
            "LD_LIBRARY_PATH": list(self.library_path),
            "LD_PRELOAD": list(self.preloaded),
        }
        return {name: _prepended(name, before) for name, before in paths.items() if before}


def external(program: Path, folder: Path) -> Installation:
    """Return the installation of a tritonserver with its own backends; lay out files under `folder`."""
    if not os.access(program, os.X_OK) or program.is_dir():
        raise OptionError(f"--tritonserver {program}: not a program that can be run")
    program = program.resolve()
    backends = program.parent.parent / "backends"
    arguments = ("--backend-directory", str(backends)) if (backends / "python").is_dir() else ()
    return Installation(program, _interpreter(folder), arguments)


def embedded(folder: Path) -> Installation:
    """Return the wheel's tritonserver; lay out its Python backend under `folder`, a path without spaces."""
    package = _package_folder()
    server = package / "tritonserver"
    backends = folder / "backends"
    backend, libraries = backends / "python", folder / "lib"
    backend.mkdir(parents=True)
    libraries.mkdir()
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).symlink_to(server / "backends" / "python" / name)
    (backend / "triton_python_backend_stub").symlink_to(_stub(server))
    # Only libpython is linked: its folder may have other libraries, which must not replace those of the
    # environment.
    if libpython := _libpython():
        (libraries / libpython.name).symlink_to(libpython)
    return Installation(
        program=server / "bin" / "tritonserver",
        interpreter=_interpreter(folder),
        arguments=("--backend-directory", str(backends)),
        library_path=(wheel_libraries(package), libraries),
    )


def _interpreter(folder: Path) -> Path:
    """Return the folder of this environment's `python3`, by a path that the stub's Python can encode.

    Packages such as torch encode the path that they are imported from, which fails if Python's file system
    encoding is ASCII and the path has other letters (see `file_names`). In this case, a link to the
    environment is created under `folder`.
    """
    programs, environment = Path(sys.executable).parent, Path(sys.prefix)
    if str(environment).isascii():
        return programs
    link = folder / "environment"
    link.symlink_to(environment)
    return link / programs.relative_to(environment)


def wheel_libraries(package: Path | None = None) -> Path:
    """Return the folder of the wheel's shared libraries."""
    return (package or _package_folder()).parent / "nvidia_pytriton.libs"


def _package_folder() -> Path:
    spec = importlib.util.find_spec("pytriton")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise OptionError(
            "no tritonserver in this Python environment: install the one in nvidia-pytriton "
            "(pip install --no-deps nvidia-pytriton), name yours with --tritonserver PATH, or serve /v1 alone "
            "with --no-triton"
        )
    return Path(locations[0])


def _stub(server: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise ServeError(f"the embedded tritonserver has no Python backend for Python {version}")
    return stub


def _libpython() -> Path | None:
    """Return the path of the interpreter's shared library; None if the loader finds it by itself."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"libpython{version}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        if folder and (candidate := Path(folder) / name).exists():
            return candidate
    if ctypes.util.find_library(f"python{version}"):
        return None
    raise ServeError(
        f"{sys.base_prefix} has no {name}, which the Python backend needs: install it "
        f"(Debian and Ubuntu: apt-get install libpython{version}) or use a Python built with --enable-shared"
    )


def _prepended(name: str, paths: list[Path]) -> str:
    after = [os.environ[name]] if os.environ.get(name) else []
    return os.pathsep.join([str(path) for path in paths] + after)
