"""Program of every rank of a test: `python -m tests.ranks.torch_collectives_program TP PP DEVICE`, by mpirun.

`tests.ranks.mpi_program` does the same on its ranks. Every rank prints one line of JSON. Rank r's tensors are
`mine(r, …)`, so that the test can compute those of all ranks.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from inflight.engine.collectives import TorchCollectives, TorchStageLink
from inflight.ranks.mpi import MpiStageLink, MpiWorld
from inflight.ranks.rendezvous import gather_hosts, meet
from inflight.ranks.topology import Mapping, Placement

DTYPES = ("float32", "bfloat16", "float16")
NUM_HIDDENS = 7
FAILED = 4
"""Number of the hidden state that is not sent."""


def mine(rank: int, dtype: str, *shape: int) -> Tensor:
    """Return integers [*shape], not contiguous, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-8, 8, shape[::-1], generator=generator)
    return values.to(getattr(torch, dtype)).permute(*reversed(range(len(shape))))


def hidden(tp_rank: int, index: int) -> Tensor:
    """Return the first stage's hidden state of a number; shapes differ."""
    return mine(100 * index + tp_rank, "float32", 3 + index, 16)


def pass_on(mapping: Mapping, link, device: torch.device) -> list[list[list[float]] | None]:
    """Pass hidden states from stage to stage, adding one in each.

    Return those that this stage sent or has.
    """
    seen = []
    for index in range(NUM_HIDDENS):
        if mapping.is_first_stage:
            state = None if index == FAILED else hidden(mapping.tp_rank, index).to(device)
        else:
            state = link.receive(3 + index)
            state = None if state is None else state + 1
        if not mapping.is_last_stage:
            link.send(state)
        seen.append(None if state is None else state.tolist())
    return seen


def exchange(world: MpiWorld, tp_size: int, pp_size: int, on: str) -> None:
    """Exchange tensors on all ranks of the world, and print what this rank got.

    Args:
        world: The ranks, `tp_size` times `pp_size`.
        tp_size: Ranks per stage.
        pp_size: Stages.
        on: "cpu" or "cuda".
    """
    mapping = world.mapping(tp_size, pp_size)
    hosts = gather_hosts(world)
    placement = Placement.of(world.rank, hosts)
    device = torch.device(placement.device(torch.cuda.device_count()) if on == "cuda" else "cpu")
    peers = meet(world, hosts)
    collectives = TorchCollectives(world, mapping, [peer.leader_address for peer in peers], device)
    link = TorchStageLink(mapping, MpiStageLink(mapping), torch.empty(16, device=device))
    said: dict[str, object] = {"rank": world.rank, "size": collectives.size}
    with torch.inference_mode():  # as in a forward pass
        for dtype in DTYPES:
            summed = collectives.all_reduce(mine(world.rank, dtype, 5, 4).to(device))
            gathered = collectives.all_gather(mine(world.rank, dtype, 2, 3, 4).to(device))
            assert summed.dtype == gathered.dtype == getattr(torch, dtype)
            said[dtype] = [summed.tolist(), gathered.tolist()]
        said["passed on"] = pass_on(mapping, link, device) if pp_size > 1 else []
    print(json.dumps(said), flush=True)
    world.all_gather(b"")
    collectives.leave()


def main() -> None:
    torch.set_num_threads(1)
    world = MpiWorld()
    exchange(world, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    world.leave()


if __name__ == "__main__":
    main()
