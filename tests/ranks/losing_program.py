"""Program of both ranks of `test_lost_rank`, on two parts of the demo model: rank 1 is killed or stopped.

`python -m tests.ranks.losing_program PLACE SIGNAL` under mpirun. Rank 0 prints the responses.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from inflight.build import build_engine, start_following
from inflight.config import Role
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.errors import Unavailable
from inflight.parameter_reader import read_parameters
from inflight.ranks import mpi
from inflight.ranks.job import Job
from inflight.ranks.rank_context import attend, lead

VERSION_DIR = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"
NUM_REQUESTS = 3
PATIENCE_S = 60.0
PARAMETERS = {
    "tensor_parallel_size": "2",
    "gpt_model_type": "inflight_batching",
    "max_tokens_in_paged_kv_cache": "4096",
    "rank_timeout_ms": "3000",
}
_CALL = 9  # number of the victim's broadcast or sum, at which requests are running
_LATE_S = 0.5


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_leader(world: mpi.MpiWorld, folder: Path) -> None:
    answers: dict[int, list[Response]] = {number: [] for number in range(NUM_REQUESTS)}
    is_lost = threading.Event()
    engines = []

    def on_loss(error: Unavailable) -> None:
        say(f"lost: {error}")
        if engines:
            engines[0].fail(error)
        is_lost.set()

    words = {key: {"string_value": value} for key, value in PARAMETERS.items()}
    parameters = read_parameters({"max_batch_size": 4, "parameters": words}, Role.ENGINE)
    job = Job.of(parameters, str(VERSION_DIR), str(folder / "endpoint"))
    rank_context = lead(world, job, on_loss)
    engine = build_engine(parameters, job.version_dir, job.endpoint_path, None, rank_context)
    engines.append(engine)
    if sys.argv[1] != "asleep":
        for number, given in answers.items():
            engine.client.submit(Request(0, (5, 6, 7 + number), 400, streaming=True), given.append)
    assert is_lost.wait(PATIENCE_S)
    if sys.argv[1] == "asleep":
        say(f"asleep {_refusal(engine)}")
        return
    for given in answers.values():
        finals = [response for response in given if response.is_final]
        say(f"finals {len(finals)} {finals[0].error.code if finals[0].error else 'none'}")


def _refusal(engine) -> str:
    try:
        engine.client.submit(Request(0, (5, 6, 7), 4), lambda response: None)
    except Unavailable as error:
        return error.code
    return "accepted"


def plant() -> None:
    """Make rank 1 end at its `_CALL`-th broadcast or sum; rank 0 enters that broadcast late."""
    place, number = sys.argv[1], signal.Signals[sys.argv[2]]
    owner, name = {
        "broadcast": (mpi.MpiWorld, "broadcast"),
        "collective": (mpi.MpiStage, "all_reduce"),
    }[place]
    original, calls = getattr(owner, name), [0]

    def call(self, *arguments):
        calls[0] += 1
        if calls[0] == _CALL:
            if int(os.environ["PMIX_RANK"]) == 0:
                time.sleep(_LATE_S if place == "broadcast" else 0.0)
            else:
                delay = _LATE_S / 2 if place == "broadcast" else 0.0
                threading.Timer(delay, os.kill, (os.getpid(), number)).start()
                time.sleep(0.0 if place == "broadcast" else _LATE_S)
        return original(self, *arguments)

    setattr(owner, name, call)


def main() -> None:
    if sys.argv[1] != "asleep":
        plant()
    world = mpi.MpiWorld()
    if world.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            run_leader(world, Path(folder))
    else:
        say(f"pid {os.getpid()}")
        job, rank_context = attend(world, lambda error: os.kill(os.getpid(), signal.SIGKILL))
        if sys.argv[1] == "asleep":
            has_loaded, number = rank_context.has_loaded, signal.Signals[sys.argv[2]]

            def end_later() -> None:
                has_loaded()
                threading.Timer(3.0, os.kill, (os.getpid(), number)).start()

            rank_context.has_loaded = end_later
        start_following(job.parameters, job.version_dir, rank_context).wait()
    os.kill(os.getpid(), signal.SIGKILL)  # its loop is inside MPI


if __name__ == "__main__":
    main()
