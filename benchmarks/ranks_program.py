"""The program of each rank of `ranks`: `python -m benchmarks.ranks_program WORK` under mpirun. WORK is JSON.

Each rank has a GptManager and its part of the model. Rank 0 makes the requests, and prints the figures on
one line.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ranks import Figures, Work
from inflight.batch_manager import GptManager
from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.ports import Engine
from inflight.core.request.request import IterationInput, Request
from inflight.core.scheduler import Scheduler
from inflight.engine.collectives import MpiCollectives, make_stage_link
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_stage
from inflight.ranks.heartbeat import Heartbeat
from inflight.ranks.lockstep import Lockstep
from inflight.ranks.mpi import MpiOutcomes, MpiStage, MpiStageLink, MpiWorld
from inflight.ranks.rank_engine import RankEngine
from inflight.ranks.rendezvous import gather_hosts, meet

_TIMEOUT_S = 60.0
_NUM_BROADCASTS = 2000


def main() -> None:
    work = Work(**json.loads(sys.argv[1]))
    torch.set_num_threads(work.threads)
    rank = _Rank(work)
    figures = rank.measure()
    if rank.world.rank == 0:
        print(json.dumps({name: round(value, 2) for name, value in asdict(figures).items()}), flush=True)
    rank.close()


class _Rank:
    """One rank, from MPI's start to its end."""

    def __init__(self, work: Work) -> None:
        self.world = MpiWorld()
        self._work = work
        self._is_alone = self.world.size == 1
        mapping = self.world.mapping(work.tp, work.pp)
        stage_ranks, link = MpiStage(mapping), MpiStageLink(mapping)
        collectives = MpiCollectives(stage_ranks)
        self._volume = _Volume(collectives, link)
        stage = load_stage(_config(work, self.world.size), mapping, collectives, self._least)
        hidden = torch.empty(stage.decoder_config.hidden_size, dtype=getattr(torch, stage.dtype))
        hidden_link, outcomes = make_stage_link(mapping, link, hidden), MpiOutcomes(mapping.sampler)
        self._engine: Engine = RankEngine(stage, mapping, hidden_link, link, outcomes, stage_ranks)
        if self._is_alone:
            assert isinstance(stage, ModelEngine), "a single rank samples tokens"
            self._engine = stage
        peers = meet(self.world, gather_hosts(self.world))
        self._heartbeat = Heartbeat(peers, self.world.size, _TIMEOUT_S, lambda error: os._exit(1))
        self._ranks = Lockstep(self.world, self._heartbeat)

    def measure(self) -> Figures:
        """Measure. Must be called on all ranks at the same time; only rank 0's result is used."""
        work = self._work
        num_iterations, seconds = self._serve()
        num_tokens = work.streams * work.tokens
        num_rows = work.streams * (work.prompt + work.tokens - 1)
        return Figures(
            num_tokens / seconds,
            num_iterations,
            0.0 if self._is_alone else self._time_broadcasts(),
            self._volume.reduced / num_rows,
            self._volume.gathered / num_tokens,
            self._volume.sent / num_rows,
        )

    def close(self) -> None:
        self.world.leave()
        self._heartbeat.close()
        self._engine.close()

    def _least(self, number: int) -> int:
        return min(int(said) for said in self.world.all_gather(b"%d" % number))

    def _serve(self) -> tuple[int, float]:
        """Return (number of iterations, seconds) until every request has ended."""
        work = self._work
        waiting = _make_requests(work, self._engine.limits.vocab_size)

        def take(room: int) -> list[Request]:
            taken, waiting[:] = waiting[:], []
            return taken

        scheduler = Scheduler(
            SchedulingConfig(max_num_tokens=work.streams * work.prompt), self._engine.limits
        )
        ranks = None if self._is_alone else self._ranks
        manager = GptManager(self._engine, scheduler, take, lambda response: None, ranks=ranks, start=False)
        num_iterations = 0
        started_s = time.perf_counter()
        while manager.step() and (self.world.rank == 0 or scheduler.num_active):
            num_iterations += 1
        return num_iterations, time.perf_counter() - started_s

    def _time_broadcasts(self) -> float:
        """Return the median microseconds of an iteration's broadcast without new inputs."""
        times_us = []
        for number in range(_NUM_BROADCASTS):
            started_s = time.perf_counter()
            if self.world.rank == 0:
                self._ranks.share(IterationInput(number, 1), are_asleep=False)
            else:
                self._ranks.follow(is_asleep=False)
            times_us.append((time.perf_counter() - started_s) * 1e6)
        return statistics.median(times_us)


def _config(work: Work, num_ranks: int) -> EngineConfig:
    longest = work.prompt + work.tokens
    return EngineConfig(
        work.model,
        dtype=work.dtype,
        device="cpu",
        engine_threads=work.threads,
        max_num_sequences=work.streams,
        max_num_tokens=work.streams * work.prompt,
        max_sequence_length=longest,
        max_tokens_in_paged_kv_cache=work.streams * (longest + 32),
        ranks_on_host=num_ranks,
    )


def _make_requests(work: Work, vocab_size: int) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(number + 1, tuple(rng.randrange(10, vocab_size) for _ in range(work.prompt)), work.tokens)
        for number in range(work.streams)
    ]


class _Volume:
    """Counts the bytes that a rank passes to its collectives and sends to the next stage."""

    def __init__(self, collectives: MpiCollectives, link: MpiStageLink) -> None:
        self.reduced = self.gathered = self.sent = 0
        all_reduce, all_gather, send = collectives.all_reduce, collectives.all_gather, link.send

        def count_reduce(tensor: torch.Tensor) -> torch.Tensor:
            self.reduced += tensor.numel() * 4  # MPI adds in float32
            return all_reduce(tensor)

        def count_gather(tensor: torch.Tensor) -> torch.Tensor:
            self.gathered += tensor.nbytes
            return all_gather(tensor)

        def count_send(message: NDArray[np.uint8] | None) -> None:
            self.sent += 0 if message is None else message.nbytes
            send(message)

        collectives.all_reduce, collectives.all_gather, link.send = count_reduce, count_gather, count_send


if __name__ == "__main__":
    main()
