"""Wrong uses of `python -m inflight.worker`."""

from __future__ import annotations

import os
import subprocess
import sys

from inflight.ranks.launch import find_mpirun

WORKER = (sys.executable, "-m", "inflight.worker")
IMPATIENT_WORKER = (
    sys.executable,
    "-c",
    "import sys; from inflight import worker; worker._ORDERS_TIMEOUT_S = 0.5; sys.exit(worker.main())",
)


def run(*command: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    mpi_less = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI"))}
    return subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=mpi_less | environment,
    )


def run_ranks(program: tuple[str, ...], text: str) -> subprocess.CompletedProcess[str]:
    return run(find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2", *program, text=text)


def test_the_workers_help_tells_how_to_start_it():
    shown = run(*WORKER, "--help")
    assert shown.returncode == 0 and "mpirun" in shown.stdout and "tritonserver" in shown.stdout


def test_a_worker_started_alone_prints_how_to_start_it():
    alone = run(*WORKER)
    assert alone.returncode == 2
    assert alone.stderr == "inflight.worker: mpirun or srun --mpi=pmix has to start it (see --help)\n"


def test_rank_0_without_a_job_prints_what_to_do_and_ends_all_ranks():
    ended = run_ranks(IMPATIENT_WORKER, "")
    assert ended.returncode == 2
    assert "rank 0: ERROR rank 0 has received no job on its standard input" in ended.stderr
    assert "python -m inflight.worker" in ended.stderr


def test_rank_0_reports_an_invalid_job():
    ended = run_ranks(WORKER, "hello\n")
    assert ended.returncode == 2
    assert "got no job on its standard input but b'hello\\n'" in ended.stderr


def test_waiting_for_a_missing_rank_is_limited():
    """Tests leader mode, in which mpirun continues without that rank."""
    waiting = (
        "import sys; from inflight import worker; from inflight.ranks import rank_context; "
        "rank_context._TOGETHER_S = 2.0; sys.exit(worker.main())"
    )
    ranks = ("-n", "1", sys.executable, "-c", waiting, ":", "-n", "1", "sh", "-c", "kill -KILL $$")
    ended = run(find_mpirun(), "--enable-recovery", "--allow-run-as-root", "--oversubscribe", *ranks)
    assert ended.returncode == 1
    assert "rank_context.py" in ended.stderr and "in join" in ended.stderr
