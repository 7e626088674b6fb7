"""Program of both ranks of `test_dead_loop`, with a fake engine: a callback kills rank 0's loop."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from inflight.build import build_engine, start_following
from inflight.config import Role
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.errors import Unavailable
from inflight.parameter_reader import read_parameters
from inflight.ranks.job import Job
from inflight.ranks.mpi import MpiWorld
from inflight.ranks.rank_context import attend, lead
from inflight.testing.fake_server import load_fake

PATIENCE_S = 60.0
PARAMETERS = {
    "gpt_model_path": "vocab=64,step_us=5000",
    "tensor_parallel_size": "2",
    "gpt_model_type": "inflight_batching",
    "stats_check_period_ms": "1",
}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_leader(world: MpiWorld, folder: Path, dies_idle: bool) -> None:
    answers: list[Response] = []
    has_begun, is_answered, is_lost = (threading.Event() for _ in range(3))

    def on_response(response: Response) -> None:
        answers.append(response)
        has_begun.set()
        if response.is_final:
            is_answered.set()

    def on_loss(error: Unavailable) -> None:
        say(f"rank 0: {error}")
        is_lost.set()

    def return_metrics(*told: object) -> None:
        if (is_answered if dies_idle else has_begun).is_set():
            raise RuntimeError("planted")

    words = {key: {"string_value": value} for key, value in PARAMETERS.items()}
    parameters = read_parameters({"max_batch_size": 4, "parameters": words}, Role.ENGINE)
    job = Job.of(parameters, str(folder), str(folder / "endpoint"))
    rank_context = lead(world, job, on_loss)
    engine = build_engine(
        parameters, job.version_dir, job.endpoint_path, return_metrics, rank_context, load=load_fake
    )
    engine.client.submit(Request(0, (1, 2, 3), 40, streaming=True), on_response)
    assert is_answered.wait(PATIENCE_S) and is_lost.wait(PATIENCE_S)
    say(f"answered {answers[-1].error.code if answers[-1].error else 'well'}")


def main() -> None:
    world = MpiWorld()
    if world.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            run_leader(world, Path(folder), sys.argv[1] == "idle")
        threading.Event().wait(PATIENCE_S)  # mpirun ends it
    else:

        def on_loss(error: Unavailable) -> None:
            say(f"rank 1: {error}")
            os.kill(os.getpid(), signal.SIGKILL)

        job, rank_context = attend(world, on_loss)
        start_following(job.parameters, job.version_dir, rank_context, load_fake).wait()
        threading.Event().wait(PATIENCE_S)  # `on_loss` ends it


if __name__ == "__main__":
    main()
