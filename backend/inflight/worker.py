"""`python -m inflight.worker`: one rank of an engine, started by mpirun or srun together with the others.

    leader mode         rank 0 is Triton's process of the model; all other ranks run this program
    orchestrator mode   Triton's process of the model starts all ranks, which run this program; it writes the job
                        as one line to rank 0's standard input, reads from one line of its standard output whether
                        it serves, and supervises it through the engine endpoint

The main thread loads the model and then waits until the engine ends. If one rank is lost, all others end at
once.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import select
import signal
import sys
from collections.abc import Callable

from inflight.access_log import write_access_lines
from inflight.build import RunningEngine, build_engine, start_following
from inflight.endpoint.supervision import Supervision
from inflight.errors import ConfigError, Unavailable
from inflight.load_model import LoadModel, load_model
from inflight.log_lines import RankFormatter
from inflight.processes import exempt_from_collection
from inflight.ranks.job import Orders, Report, decode_orders, encode_line
from inflight.ranks.launch import SHARED_MEMORY
from inflight.ranks.mpi import MpiWorld
from inflight.ranks.rank_context import attend, join, lead, refuse
from inflight.serving.memory import measure_memory

_log = logging.getLogger("inflight.worker")

_PR_SET_PDEATHSIG = 1
_ORDERS_TIMEOUT_S = 30.0
_WRONG_USE = 2
_NO_ORDERS = (
    "rank 0 has received no job on its standard input in {:g} s. In orchestrator mode the model starts this; "
    "in leader mode: mpirun --enable-recovery -n 1 tritonserver ... : -n N-1 python -m inflight.worker"
)


def main(load: LoadModel = load_model) -> int:
    """Run one rank; return 0 if it ends in order, 1 if the model cannot be loaded, 2 for wrong usage.

    `load` loads this rank's part of the model.
    """
    _parser().parse_args()
    if not _is_started_with_others():
        print("inflight.worker: mpirun or srun --mpi=pmix has to start it (see --help)", file=sys.stderr)  # noqa: T201
        return _WRONG_USE
    os.umask(0o077)  # a rank on another host does not inherit it
    _end_with_parent()
    report = _take_stdout()
    # The value of the variable comes from the host that started the ranks; the folder may be missing on this
    # host.
    if folder := os.environ.get(SHARED_MEMORY):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    world = join()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RankFormatter(world.rank))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    write_access_lines(sys.stderr)
    return _lead(world, report, load) if world.rank == 0 else _follow(world, load)


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m inflight.worker",
        description="One rank of an engine. Beside tritonserver in leader mode: mpirun --enable-recovery -n 1 "
        "tritonserver ARGUMENTS : -n N-1 python -m inflight.worker. In orchestrator mode the model starts it.",
        epilog="It takes no arguments: rank 0 receives the job and sends it to the other ranks.",
    )


def _is_started_with_others() -> bool:
    return "PMIX_RANK" in os.environ or "PMI_RANK" in os.environ


def _end_with_parent() -> None:
    """Ask the kernel to kill this rank when its parent process ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _take_stdout() -> int:
    """Return a descriptor of standard output for the report, and redirect all other output to standard error."""
    report = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return report


def _end_at_once() -> None:
    """Kill this process by a signal, so that the other ranks notice the loss by the broken connections.

    If a rank exited with a status other than 0 instead, mpirun would end rank 0 before it has answered its
    clients, even with --enable-recovery.
    """
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- rank 0


def _lead(world: MpiWorld, report: int, load: LoadModel) -> int:
    try:
        orders = _read_orders()
    except ConfigError as error:
        _log.error("%s", error)
        refuse(world, str(error))
        return _WRONG_USE
    engines: list[RunningEngine] = []

    def on_loss(error: Unavailable) -> None:
        for engine in engines:
            engine.fail(error)
        _end_at_once()

    parameters = orders.job.parameters
    supervision = Supervision(
        orders.server,
        orders.job.digest(),
        orders.awaits_successor,
        orders.processes,
        parameters.rank_timeout_ms / 1000,
        measure_memory,
    )
    try:
        engines.append(_build(world, orders, supervision, on_loss, load))
    except ConfigError as error:
        os.write(report, encode_line(Report(str(error))))
        return 1
    exempt_from_collection()
    os.write(report, encode_line(Report()))
    os.close(report)
    notice_s = supervision.wait_for_end()
    if notice_s is None:
        engines[0].fail(Unavailable("the model lost its engine; a later attempt may succeed"))
    if not engines[0].close(notice_s or 0.0):
        _end_at_once()  # the loop hangs in the device
    return 0


def _read_orders() -> Orders:
    ready, _, _ = select.select([sys.stdin], [], [], _ORDERS_TIMEOUT_S)
    line = sys.stdin.buffer.readline() if ready else b""
    if not line:
        raise ConfigError(_NO_ORDERS.format(_ORDERS_TIMEOUT_S))
    return decode_orders(line)


def _build(
    world: MpiWorld,
    orders: Orders,
    supervision: Supervision,
    on_loss: Callable[[Unavailable], None],
    load: LoadModel,
) -> RunningEngine:
    job = orders.job
    rank_context = lead(world, job, on_loss)
    try:
        return build_engine(
            job.parameters,
            job.version_dir,
            job.endpoint_path,
            supervision.put,
            rank_context,
            supervision,
            load,
            on_loss,
        )
    except ConfigError:
        rank_context.leave()
        raise


# ---------------------------------------------------------------------- the other ranks


def _follow(world: MpiWorld, load: LoadModel) -> int:
    """Run a rank other than 0; always return 0, because after any other exit status mpirun would end rank 0.

    If the model cannot be loaded, rank 0 reports it.
    """
    try:
        job, rank_context = attend(world, lambda error: _end_at_once())
    except ConfigError as error:
        _log.error("%s", error)
        return 0
    try:
        rank = start_following(job.parameters, job.version_dir, rank_context, load)
    except ConfigError as error:
        _log.error("%s", error)
        rank_context.leave()
        return 0
    exempt_from_collection()
    if not rank.wait():
        _end_at_once()
    return 0


if __name__ == "__main__":
    sys.exit(main())
