"""What every rank of a test runs: `python -m tests.distributed.rank_program FOLDER TP` under mpirun.

Each rank has a scheduler and its shard of the model, and sees the same requests. Every rank prints one JSON line:
what it would have answered.
"""

from __future__ import annotations

import json
import sys

import torch

from inflight.distributed.mpi import MpiCollectives, world_mapping
from inflight.engine.torch import TorchEngine, TorchEngineConfig
from inflight.models.sharding import Shard
from tests.distributed.requests import CONFIG, ENGINE, answers, make_requests
from tests.engine.serving import serve


def main() -> None:
    folder, tp_size = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    mapping = world_mapping(tp_size, 1)
    collectives = MpiCollectives(mapping)
    shard = Shard(mapping.tp_size, mapping.tp_rank)
    engine = TorchEngine.load(TorchEngineConfig(folder, **ENGINE), shard, collectives)
    served = serve(engine, CONFIG, make_requests())
    print(json.dumps({"rank": mapping.rank, "answers": answers(served)}), flush=True)


if __name__ == "__main__":
    main()
