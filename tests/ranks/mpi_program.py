"""Program of every rank of `test_mpi` under mpirun, tp 2 and pp 2: asserts that data arrives as it was sent.

At last every rank prints what it got by torch.distributed, for the test to compare.
"""

from __future__ import annotations

import socket
import sys

import torch

from inflight.engine.collectives import CpuStageLink, MpiCollectives
from inflight.errors import ConfigError
from inflight.ranks.mpi import MpiOutcomes, MpiStage, MpiStageLink, MpiWorld
from inflight.ranks.topology import Mapping
from tests.ranks.torch_collectives_program import exchange

# Around the end of a broadcast's first part, and far beyond it.
LENGTHS = (0, 1, 1015, 1016, 1017, 1024, 5_000_000, 3)


def message(length: int, seed: int = 0) -> bytes:
    period = bytes((seed + index) % 251 for index in range(251))
    return (period * (length // 251 + 1))[:length]


def check_world(world: MpiWorld) -> None:
    for length in LENGTHS:
        got = world.broadcast(message(length) if world.rank == 0 else b"")
        assert type(got) is bytes and got == message(length), length
    everybody = [message(10 * rank, rank) for rank in range(world.size)]
    assert world.all_gather(everybody[world.rank]) == everybody
    try:
        world.mapping(3, 2)
    except ConfigError as error:
        assert str(error) == (
            "tensor_parallel_size 3 times pipeline_parallel_size 2 needs 6 ranks, but 4 were started together"
        )
    else:
        raise AssertionError("a world of another size was taken")


def check_collectives(collectives: MpiCollectives, tp_rank: int) -> None:
    assert collectives.size == 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = torch.arange(6, dtype=dtype).view(2, 3) + tp_rank
        other = torch.arange(6, dtype=dtype).view(2, 3) + 1 - tp_rank
        both = [mine, other][:: -1 if tp_rank else 1]
        assert torch.equal(collectives.all_gather(mine), torch.cat(both, dim=-1))
        assert torch.equal(collectives.all_gather(mine[:0]), torch.empty(0, 6, dtype=dtype))
        transposed = mine.T.contiguous().T
        assert torch.equal(collectives.all_reduce(transposed), mine + other)


def check_link(link: MpiStageLink, is_first: bool, tp_rank: int) -> None:
    """Send several messages at a time, of either dtype, small and large, and between them a failed one."""
    sent = [
        torch.randn(5, 64),
        torch.randn(700, 1024),
        None,
        torch.randn(2, 8).T,
        torch.randn(3, 64).bfloat16(),
    ]
    for expected in sent:
        hiddens = CpuStageLink(link, torch.empty(4) if expected is None else expected)
        if is_first:
            hiddens.send(None if expected is None else expected + tp_rank)
            continue
        got = hiddens.receive(4 if expected is None else expected.shape[0])
        if expected is None:
            assert got is None
        else:
            assert got.dtype == expected.dtype and torch.equal(got, expected + tp_rank)


def check_guesses(link: MpiStageLink, is_last: bool, tp_rank: int) -> None:
    """Send guesses to the earlier stages, and an empty message for a batch that has failed."""
    for count in (3, 0, 1, 4000):
        expected = [*range(tp_rank, tp_rank + count)]
        if is_last:
            link.send_guesses(expected)
        else:
            assert link.receive_guesses(count or 5) == expected


def check_barrier(world: MpiWorld, stage: MpiStage, is_first: bool) -> None:
    """Meet in a barrier of one stage.

    The ranks of the other stage call theirs at other times and more often.
    """
    for _ in range(2 if is_first else 3):
        stage.barrier()
    world.broadcast()


def check_outcomes(outcomes: MpiOutcomes, tells: bool) -> None:
    """Send outcomes, large ones too, before the previous ones were received."""
    lengths = (100, 0, 3_000_000, 2_000_000, 7)
    if tells:
        outcomes.send_outcome(message(lengths[0]))
        for length in lengths[1:]:
            outcomes.send_outcome(message(length))
            outcomes.wait_sent()
        outcomes.wait_sent()
    else:
        for length in lengths:
            assert outcomes.receive_outcome() == message(length)


def check_that_a_settled_outcome_needs_nothing_more(
    world: MpiWorld, outcomes: MpiOutcomes, mapping: Mapping
) -> None:
    """Make no MPI call after sending until rank 0 has received, like an idle rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = world.all_gather(str(listener.getsockname()[1]).encode())
        if mapping.is_sampler:
            outcomes.send_outcome(message(3_000_000))
            outcomes.wait_sent()
            listener.settimeout(20)
            listener.accept()[0].close()
        else:
            assert outcomes.receive_outcome() == message(3_000_000)
            if world.rank == 0:
                socket.create_connection(("127.0.0.1", int(ports[mapping.sampler]))).close()


def main() -> None:
    torch.manual_seed(0)
    world = MpiWorld()
    check_world(world)
    mapping = world.mapping(2, 2)
    assert mapping.rank == world.rank
    stage = MpiStage(mapping)
    check_collectives(MpiCollectives(stage), mapping.tp_rank)
    link, outcomes = MpiStageLink(mapping), MpiOutcomes(mapping.sampler)
    check_barrier(world, stage, mapping.is_first_stage)
    for _ in range(2):
        check_link(link, mapping.is_first_stage, mapping.tp_rank)
        check_guesses(link, mapping.is_last_stage, mapping.tp_rank)
        check_outcomes(outcomes, mapping.is_sampler)
        check_that_a_settled_outcome_needs_nothing_more(world, outcomes, mapping)
    exchange(world, 2, 2, "cpu")
    world.leave()
    print(f"rank {world.rank} is content")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
