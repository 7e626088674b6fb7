"""Lockstep: rank 0 shares inputs in one broadcast each, the others follow; only sleeping ranks are woken."""

from __future__ import annotations

import math
import queue
import random
import threading
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from inflight.core.request.adapter import (
    AdapterEvent,
    AdapterUpdate,
    LoraWeights,
    Matrix,
    RawBuffer,
    StoredAdapter,
)
from inflight.core.request.request import ExternalDraft, FloatTensor, IterationInput, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import StopReason, StopSignal
from inflight.errors import Unavailable
from inflight.ranks.lockstep import Lockstep
from inflight.raw_buffers import BufferedEncoder
from tests.ranks.thread_world import PATIENCE_S, make_worlds, on_all
from tests.tiers import examples


class Wakes:
    """A fake heartbeat of rank 0 and another rank, which counts the wakes of Lockstep."""

    def __init__(self) -> None:
        self.num_wakes = 0
        self.num_waits = 0
        self.iteration = 0
        self.lost: Unavailable | None = None
        self._semaphore = threading.Semaphore(0)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def wake(self) -> None:
        self.num_wakes += 1
        self._semaphore.release()

    def wait(self) -> None:
        self.num_waits += 1
        assert self._semaphore.acquire(timeout=PATIENCE_S)


INPUTS = [
    IterationInput(0, 10),
    IterationInput(
        1,
        2**63,
        (
            Request(2**64 - 1, tuple(range(1000)), 9),
            Request(
                5,
                (1, 2),
                3,
                True,
                (7,),
                sampling=SamplingConfig(temperature=math.inf, random_seed=2**64 - 1),
                output=OutputOptions(return_log_probs=True),
                stop_words=((1, 2), (3,)),
                embedding_bias=FloatTensor((3,), bytes(range(12))),
                draft=ExternalDraft((4,), FloatTensor((1, 2), b"\xff" * 8), 0.25),
            ),
        ),
        (StopSignal(4, StopReason.STOP_WORDS, 2, 99), StopSignal(5)),
    ),
    IterationInput(2, 30, stops=(StopSignal(1),)),
]


def test_followers_get_the_shared_inputs_with_one_broadcast_each():
    worlds, wakes = make_worlds(2), Wakes()

    def work(rank: int) -> list[IterationInput | None]:
        ranks = Lockstep(worlds[rank], wakes)
        assert ranks.is_leader == (rank == 0)
        if rank:
            return [ranks.follow(is_asleep=index == 0) for index in range(len(INPUTS) + 1)]
        for index, inputs in enumerate(INPUTS):
            ranks.share(inputs, are_asleep=index == 0)
        ranks.end(are_asleep=False)
        return []

    assert on_all(2, work)[1] == [*INPUTS, None]
    assert [world.num_broadcasts for world in worlds] == [len(INPUTS) + 1] * 2
    assert (wakes.num_wakes, wakes.num_waits) == (1, 1)


def test_an_adapter_is_sent_after_its_iterations_message():
    data = bytes(range(256)) * 4096
    weights = LoraWeights(Matrix((2, len(data) // 4), "float16", RawBuffer(data)), ((1, 0, 8), (1, 1, 8)))
    stored = StoredAdapter(7, b"digest", 3, 8, weights)
    inputs = IterationInput(0, 1, adapters=AdapterUpdate((stored,), (AdapterEvent(1, 7),), (5, 6)))
    worlds = make_worlds(2)

    def work(rank: int) -> IterationInput | None:
        ranks = Lockstep(worlds[rank], Wakes())
        if rank:
            return ranks.follow(is_asleep=False)
        ranks.share(inputs, are_asleep=False)
        return None

    followed = on_all(2, work)[1]
    assert followed == inputs
    message, (buffer,) = BufferedEncoder().encode(inputs)
    assert len(message) < 300 and buffer == data


def test_the_heartbeat_gets_the_loops_progress():
    """A loop that begins an iteration, shared or not, has ended the earlier ones."""
    worlds, wakes = make_worlds(2), [Wakes(), Wakes()]

    def work(rank: int) -> list[int]:
        ranks, seen = Lockstep(worlds[rank], wakes[rank]), []
        for inputs in INPUTS[1:]:
            if rank:
                ranks.follow(is_asleep=False)
            else:
                ranks.advance()
                seen.append(wakes[rank].iteration)
                ranks.share(inputs, are_asleep=False)
            seen.append(wakes[rank].iteration)
        ranks.advance()
        return [*seen, wakes[rank].iteration]

    assert on_all(2, work) == [[0, 1, 2, 2, 3], [1, 2, 3]]


def drawn(kind: Any, rng: random.Random) -> Any:
    """Draw a value of an annotation's type."""
    if get_origin(kind) is UnionType:
        return drawn(rng.choice(get_args(kind)), rng)
    if get_origin(kind) is tuple:
        return tuple(drawn(get_args(kind)[0], rng) for _ in range(rng.randrange(3)))
    if kind is FloatTensor:
        return FloatTensor((2, 3), rng.randbytes(24))
    if kind is Matrix:
        return Matrix((2, 3), "bfloat16", RawBuffer(rng.randbytes(12)))
    if is_dataclass(kind):
        return kind(**{name: drawn(field, rng) for name, field in get_type_hints(kind).items()})
    if issubclass(kind, Enum):
        return rng.choice(list(kind))
    choices = {
        NoneType: [None],
        bool: [False, True],
        int: [0, 1, -1, rng.randrange(1000), 2**63 - 1, 2**64 - 1],
        float: [0.0, 0.1, rng.random(), 1e-300, -math.inf],
        bytes: [b"", rng.randbytes(16)],
        str: ["", "a guide", "\u00e9\n\U0001f600"],
    }
    return rng.choice(choices[kind])


def test_followers_get_every_field_of_an_input():
    rng = random.Random(0)
    shared = [drawn(IterationInput, rng) for _ in range(examples(100, all=500))]
    worlds = make_worlds(2)

    def work(rank: int) -> list[IterationInput | None]:
        ranks = Lockstep(worlds[rank], Wakes())
        if rank:
            return [ranks.follow(is_asleep=False) for _ in shared]
        for inputs in shared:
            ranks.share(inputs, are_asleep=False)
        return []

    followed = on_all(2, work)[1]
    assert followed == shared
    assert repr(followed) == repr(shared), "types too"


def test_sleeping_ranks_join_no_broadcast_until_they_are_woken():
    worlds, wakes = make_worlds(2), Wakes()
    followed: queue.Queue[IterationInput | None] = queue.Queue()
    follower = Lockstep(worlds[1], wakes)

    def follow() -> None:
        for _ in range(2):
            followed.put(follower.follow(is_asleep=True))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    leader = Lockstep(worlds[0], wakes)
    assert worlds[1].num_broadcasts == 0
    leader.share(INPUTS[1], are_asleep=True)
    assert followed.get(timeout=PATIENCE_S) == INPUTS[1]
    assert worlds[1].num_broadcasts == 1
    leader.end(are_asleep=True)
    assert followed.get(timeout=PATIENCE_S) is None
    thread.join(PATIENCE_S)
    assert wakes.num_wakes == wakes.num_waits == worlds[1].num_broadcasts == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_asleep", [False, True])
def test_after_a_loss_no_rank_enters_a_broadcast(rank: int, is_asleep: bool):
    world, wakes = make_worlds(2)[rank], Wakes()
    wakes.lost = Unavailable("rank 1 of 2 is lost")
    ranks = Lockstep(world, wakes)
    calls = (
        [lambda: ranks.follow(is_asleep)]
        if rank
        else [lambda: ranks.share(INPUTS[0], is_asleep), lambda: ranks.end(is_asleep)]
    )
    for call in calls:
        with pytest.raises(Unavailable, match="is lost"):
            call()
    assert world.num_broadcasts == 0
