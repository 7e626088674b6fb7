"""`scripts/doctor`, or `python -m inflight.doctor`: run checks, print findings, exit with 1 if any is red."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from inflight.arguments import Parser, port, program_name
from inflight.doctor import disks, machine, network, output, programs
from inflight.doctor.checkpoint import check_checkpoint
from inflight.doctor.finding import Finding, Level, examine, worst
from inflight.server.errors import OptionError
from inflight.server.option_types import add_checkpoint, choose_model, setting

_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 9000}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and write the findings to stdout; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        choose_model(given)
    except OptionError as error:
        parser.error(str(error))
    findings: list[Finding] = []
    for name, check in _checks(given):
        findings += examine(name, check)
    (output.write_json if given.json else output.write_text)(findings, sys.stdout)
    return 1 if worst(findings) is Level.RED else 0


def _checks(given: argparse.Namespace) -> list[tuple[str, Callable[[], Iterable[Finding]]]]:
    has_gpu = machine.has_gpu()
    # `os.path.isdir` is False for a folder that this user may not see; `Path.is_dir` would raise an error.
    model = Path(given.model) if given.model and os.path.isdir(given.model) else None
    ports = {service: getattr(given, f"{service}_port") for service in _PORTS}
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("Python", machine.check_python),
        ("packages", machine.check_packages),
        ("processors", machine.check_processors),
        ("memory", machine.check_memory),
        ("environment", machine.check_environment),
        ("GPU", machine.check_driver),
        ("torch", partial(programs.check_torch, has_gpu)),
        ("CPU layers", partial(machine.check_layers, has_gpu)),
        ("/dev/shm", machine.check_shared_memory),
        ("temporary folder", disks.check_temporary_folder),
        ("inflight's cache", disks.check_own_cache),
        ("hub's cache", disks.check_hub_cache),
        ("ports", partial(machine.check_ports, given.host, ports)),
        ("tritonserver", partial(programs.check_tritonserver, given.tritonserver)),
        ("MPI", programs.check_mpi),
    ]
    if model is None:  # or a GGUF file, which is not asked for by a name either
        checks.append(("hub", network.check_hub))
    if has_gpu:
        of_cache = dict(given.set).get("kv_cache_dtype", "auto")
        checks.append(("attention", partial(programs.check_attention, model, given.dtype, of_cache)))
    if given.model or given.set:
        examined = given.model or str(_demo_model())
        checks.append(
            ("checkpoint", partial(check_checkpoint, examined, given.revision, given.dtype, dict(given.set)))
        )
    return checks


def _demo_model() -> Path:
    """Return the model that is served if --model names none."""
    from inflight.server.repository import default_repository

    return default_repository() / "tensorrt_llm" / "1" / "demo_model"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        checks_environment=False,  # it is one of the checks
        prog=program_name("scripts/doctor"),
        description="Check whether this machine can serve: green, yellow or red, with fixes. Starts nothing.",
    )
    add = parser.add_argument
    add_checkpoint(
        parser, "checkpoint or GGUF file; the doctor checks whether it can be loaded and fits into memory"
    )
    add("--set", metavar="KEY=VALUE", type=setting, action="append", default=[], help="as for scripts/serve")
    add("--host", default="127.0.0.1", help="as for scripts/serve")
    for service, default in _PORTS.items():
        flags = ("--port", "--openai-port") if service == "openai" else (f"--{service}-port",)
        add(
            *flags,
            dest=f"{service}_port",
            type=port,
            default=default,
            metavar="PORT",
            help="default: %(default)s",
        )
    add("--tritonserver", type=Path, metavar="PATH", help="as for scripts/serve")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
