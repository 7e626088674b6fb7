"""Program of every rank of a test: `python -m tests.ranks.recorded_ranks_program FOLDER DEVICE PROMPT…`.

All ranks share every layer of a model; sums over the ranks are recorded with the layers. Every rank has the whole
logits, and drives its part through the same iterations. Each prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from inflight.engine.attention.find import triton_attention
from inflight.engine.collectives import TorchCollectives
from inflight.engine.cuda.graph_capture import GraphCapture
from inflight.models import read_model_description
from inflight.models.sharding import Part
from inflight.ranks.mpi import MpiWorld
from inflight.ranks.rendezvous import gather_hosts, meet
from inflight.ranks.topology import Placement
from tests.engine.driver import Driver
from tests.engine.fixed_rows import FixedRowsAttention
from tests.engine.paging import load_paged
from tests.engine.tape import Tape


def main() -> None:
    folder, on, *texts = sys.argv[1:]
    prompts = [json.loads(text) for text in texts]
    torch.set_num_threads(1)
    world = MpiWorld()
    mapping = world.mapping(world.size, 1)
    hosts = gather_hosts(world)
    device = "cpu" if on == "cpu" else Placement.of(world.rank, hosts).device(torch.cuda.device_count())
    peers = meet(world, hosts)
    addresses = [peer.leader_address for peer in peers]
    collectives = TorchCollectives(world, mapping, addresses, torch.device(device))
    decoder = read_model_description(Path(folder)).decoder
    part = Part.from_mapping(mapping, decoder)
    tape = Tape()
    engine = load_paged(
        Path(folder),
        capture=tape if on == "cpu" else GraphCapture(torch.device(device)),
        attention=FixedRowsAttention() if on == "cpu" else triton_attention(part.held_config(decoder)),
        device=device,
        max_num_tokens=64,
        part=part,
        collectives=collectives,
    )
    driver = Driver(engine)
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step({rows[0]: len(prompts[0])})
    driver.step({row: len(row.tokens) for row in rows[1:]}, rows[:1])
    for count in (3, 2, 1, 3, 3):
        driver.step(generation=rows[:count])
    said = {"rank": world.rank, "tokens": [row.generated for row in rows], "replayed": len(tape.replayed)}
    print(json.dumps(said), flush=True)
    world.all_gather(b"")
    collectives.leave()
    world.leave()


if __name__ == "__main__":
    main()
