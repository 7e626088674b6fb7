"""Program of every rank of a test: `python -m tests.ranks.rank_program FOLDER TP PP` under mpirun.

Each rank has a GptManager and its part of the model; rank 0 has the requests. Every rank prints one line of
JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence

import torch

from inflight.batch_manager import GptManager
from inflight.config import EngineConfig
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopSignal
from inflight.core.scheduler import Scheduler
from inflight.engine.collectives import MpiCollectives, make_stage_link
from inflight.engine.load import load_stage
from inflight.ranks.heartbeat import Heartbeat
from inflight.ranks.lockstep import Lockstep
from inflight.ranks.mpi import MpiOutcomes, MpiStage, MpiStageLink, MpiWorld
from inflight.ranks.rank_engine import RankEngine
from inflight.ranks.rendezvous import gather_hosts, meet
from tests.engine.failing import spoil
from tests.engine.serving import Served
from tests.ranks import requests

TIMEOUT_S = 120


class Clients:
    """Clients that send their requests two at a time; one stops its own."""

    def __init__(self, waiting: Sequence[Request]) -> None:
        self.served = Served()
        self.errors: dict[int, list[str]] = {}
        self.have_all = threading.Event()
        self._waiting = list(waiting)
        self._open = {request.request_id for request in waiting}

    def get(self, room: int) -> list[Request]:
        arriving, self._waiting = self._waiting[:2], self._waiting[2:]
        return arriving

    def send(self, response: Response) -> None:
        if response.error is None:
            key = (response.request_id, response.sequence_index)
            self.served.responses.setdefault(key, []).append(response)
        else:
            self.errors[response.request_id] = [response.error.code, str(response.error)]
        if response.is_final:
            self._open.remove(response.request_id)
        if not self._open:
            self.have_all.set()

    def streamed(self, request_id: int) -> list[int]:
        """Return the tokens of all responses."""
        responses = self.served.responses.get((request_id, 0), ())
        return [token for response in responses for token in response.result.output_token_ids[0]]

    def poll(self) -> list[StopSignal]:
        has_tokens = len(self.served.responses.get((requests.STOPPED, 0), ())) > 4
        return [StopSignal(requests.STOPPED)] if has_tokens else []


def main() -> None:
    folder, (tp_size, pp_size, moe_ep_size) = sys.argv[1], map(int, sys.argv[2:])
    torch.set_num_threads(1)
    world = MpiWorld()
    mapping = world.mapping(tp_size, pp_size, moe_ep_size)
    # The other ranks have room for more blocks than the last rank.
    blocks = requests.NUM_BLOCKS + world.size - 1 - world.rank
    config = EngineConfig(folder, **requests.ENGINE, max_tokens_in_paged_kv_cache=8 * blocks)

    def least(number: int) -> int:
        return min(int(said) for said in world.all_gather(str(number).encode()))

    stage_ranks = MpiStage(mapping)
    stage = load_stage(config, mapping, MpiCollectives(stage_ranks), least)
    if mapping.is_sampler:
        spoil(stage, requests.GUILTY, num_tokens=25)
    guesses = MpiStageLink(mapping)
    link = make_stage_link(mapping, guesses, torch.empty(stage.decoder_config.stage_width))
    engine = RankEngine(stage, mapping, link, guesses, MpiOutcomes(mapping.sampler), stage_ranks)
    heartbeat = Heartbeat(meet(world, gather_hosts(world)), world.size, 30.0, sys.exit)
    scheduler = Scheduler(requests.CONFIG, engine.limits)
    clients = Clients([*requests.make_requests(), *requests.make_doomed()])
    manager = GptManager(
        engine, scheduler, clients.get, clients.send, clients.poll, ranks=Lockstep(world, heartbeat)
    )
    if mapping.rank == 0:
        assert clients.have_all.wait(TIMEOUT_S)
    else:
        assert manager.join(TIMEOUT_S)
    assert manager.shutdown(TIMEOUT_S)
    metrics = scheduler.metrics()
    world.leave()
    heartbeat.close()
    said = {
        "rank": mapping.rank,
        "num_blocks": engine.limits.num_blocks,
        "answers": requests.answers(clients.served),
        "streamed": clients.streamed(requests.STOPPED),
        "errors": clients.errors,
        "finished": {reason.name: count for reason, count in metrics.finished.items()},
        "failed": metrics.failed,
        "counts": [metrics.num_preemptions, metrics.output_tokens.total, metrics.num_missed_tokens],
        "left": [scheduler.num_active, engine.limits.num_blocks - scheduler.kv_cache.num_unreserved],
    }
    sys.stdout.write(json.dumps(said) + "\n")  # in one piece, among the others'
    sys.stdout.flush()


if __name__ == "__main__":
    main()
