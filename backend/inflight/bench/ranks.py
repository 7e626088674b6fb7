"""What several ranks cost and bring on this machine: tokens/s, the time of a broadcast, and the bytes that cross.

Runs itself under mpirun: one rank with all threads, then tensor- and pipeline-parallel ranks that share the same
number of threads, in turn, several rounds. Streams of equal length that all start at once; greedy, without Triton.
Counts what every rank hands to its collectives and its neighbours, beside what the model in docs/scaling.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_SETUPS = ("tp=1,pp=1", "tp=2,pp=1", "tp=1,pp=2")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint folder; random weights of --shape without one")
    parser.add_argument("--shape", choices=("tiny", "135m", "1b"), default="1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate for each")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--setups", nargs="+", default=list(_SETUPS), metavar="tp=N,pp=M")
    parser.add_argument("--rank", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _run_rank(_Work(**json.loads(arguments.rank)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(arguments, str(arguments.model or _make_model(arguments.shape, Path(folder) / "model")))


@dataclass(frozen=True)
class _Work:
    model: str
    dtype: str
    streams: int
    prompt: int
    tokens: int
    threads: int
    tp: int
    pp: int


def _make_model(shape: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "inflight.testing.make_model", "--shape", shape, "--out", str(folder)],
        check=True,
        stdout=sys.stderr,
    )
    return folder


def _compare(arguments: argparse.Namespace, model: str) -> None:
    runs: dict[str, list[dict]] = {setup: [] for setup in arguments.setups}
    for _ in range(arguments.rounds):
        for setup in arguments.setups:
            sizes = dict(part.split("=") for part in setup.split(","))
            tp, pp = int(sizes["tp"]), int(sizes["pp"])
            threads = max(1, arguments.threads // (tp * pp))
            size = (arguments.streams, arguments.prompt, arguments.tokens)
            runs[setup].append(_start(_Work(model, arguments.dtype, *size, threads, tp, pp)))
            print(setup, runs[setup][-1], flush=True)
    rows = [{"setup": setup, **_medians(results)} for setup, results in runs.items()]
    print(json.dumps({"bench": "ranks", "shape": arguments.shape, "rounds": arguments.rounds, "rows": rows}))


def _medians(results: list[dict]) -> dict:
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def _start(work: _Work) -> dict:
    """Rank 0's figures."""
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        mpirun.append("--allow-run-as-root")
    program = [sys.executable, "-m", "inflight.bench.ranks", "--rank", json.dumps(vars(work))]
    done = subprocess.run(
        [*mpirun, "-n", str(work.tp * work.pp), *program],
        env={**os.environ, "OMP_NUM_THREADS": str(work.threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


# ---------------------------------------------------------------------- a rank


def _run_rank(work: _Work) -> None:
    import torch

    from inflight.batch_manager import GptManager
    from inflight.core.config import SchedulerConfig
    from inflight.core.request import Request
    from inflight.core.scheduler import Scheduler
    from inflight.distributed.hosts import gather_hosts
    from inflight.distributed.in_step import InStep
    from inflight.distributed.introductions import meet
    from inflight.distributed.mpi import MpiCollectives, MpiOutcomes, MpiStageLink, MpiStageMates, MpiWorld
    from inflight.distributed.pulse import Pulse
    from inflight.distributed.rank_engine import RankEngine
    from inflight.engine.torch import TorchEngine, TorchEngineConfig

    torch.set_num_threads(work.threads)
    world = MpiWorld()
    mapping = world.mapping(work.tp, work.pp)
    collectives, link = MpiCollectives(mapping), MpiStageLink(mapping)
    volume = _Volume(collectives, link)
    longest = work.prompt + work.tokens
    config = TorchEngineConfig(
        work.model,
        dtype=work.dtype,
        device="cpu",
        num_threads=work.threads,
        max_num_sequences=work.streams,
        max_num_tokens=work.streams * work.prompt,
        max_sequence_length=longest,
        max_tokens_in_paged_kv_cache=work.streams * (longest + 32),
        ranks_on_host=world.size,
    )
    stage = TorchEngine.load(
        config, mapping, collectives, lambda n: min(int(x) for x in world.all_gather(b"%d" % n))
    )
    is_alone = world.size == 1
    outcomes, mates = MpiOutcomes(mapping.sampler), MpiStageMates(mapping)
    engine = stage if is_alone else RankEngine(stage, mapping, link, outcomes, mates)
    pulse = Pulse(meet(world, gather_hosts(world)), world.size, 60, lambda error: os._exit(1), lambda: 0)
    ranks = InStep(world, pulse)
    rng = random.Random(1)
    vocab_size = engine.limits.vocab_size
    requests = [
        Request(number + 1, tuple(rng.randrange(10, vocab_size) for _ in range(work.prompt)), work.tokens)
        for number in range(work.streams)
    ]
    waiting = list(requests)

    def take(max_num: int) -> list[Request]:
        taken, waiting[:] = waiting[:], []
        return taken

    scheduler = Scheduler(SchedulerConfig(max_num_tokens=work.streams * work.prompt), engine.limits)
    manager = GptManager(
        engine, scheduler, take, lambda response: None, ranks=None if is_alone else ranks, start=False
    )
    started = time.perf_counter()
    steps = 0
    while manager.step() and (world.rank == 0 or scheduler.num_active):
        steps += 1
    seconds = time.perf_counter() - started
    broadcast_us = None if is_alone else _time_broadcasts(world, ranks)
    if world.rank == 0:
        num_tokens = work.streams * work.tokens
        num_rows = work.streams * (work.prompt + work.tokens - 1)
        result = {
            "tokens_per_s": num_tokens / seconds,
            "iterations": steps,
            "broadcast_us": broadcast_us or 0.0,
            **volume.per_row(num_rows, num_tokens),
        }
        print(json.dumps({key: round(value, 2) for key, value in result.items()}), flush=True)
    world.leave()
    pulse.close()
    engine.close()


class _Volume:
    """Counts the bytes that a rank puts into collectives and sends to the next stage."""

    def __init__(self, collectives, link) -> None:
        self.reduced = self.gathered = self.sent = 0
        all_reduce, all_gather, send = collectives.all_reduce, collectives.all_gather, link.send

        def count_reduce(tensor):
            self.reduced += tensor.numel() * 4  # MPI adds up in float32
            return all_reduce(tensor)

        def count_gather(tensor):
            self.gathered += tensor.nbytes
            return all_gather(tensor)

        def count_send(hidden):
            self.sent += 0 if hidden is None else hidden.nbytes
            return send(hidden)

        collectives.all_reduce, collectives.all_gather, link.send = count_reduce, count_gather, count_send

    def per_row(self, num_rows: int, num_tokens: int) -> dict[str, float]:
        """Of rank 0: a row is a token that is computed; logits are gathered for those that are chosen."""
        return {
            "reduced_bytes_per_row": self.reduced / num_rows,
            "gathered_bytes_per_token": self.gathered / num_tokens,
            "sent_bytes_per_row": self.sent / num_rows,
        }


def _time_broadcasts(world, ranks, count: int = 2000) -> float:
    """Microseconds of an iteration's broadcast when there is nothing new, median."""
    from inflight.core.request import IterationInput

    times = []
    for number in range(count):
        begun = time.perf_counter()
        if world.rank == 0:
            ranks.share(IterationInput(number, 1), are_asleep=False)
        else:
            ranks.follow(is_asleep=False)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
