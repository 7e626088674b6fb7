"""What a batcher is doing right now, for people: the answer to a `state` request. Frozen values only.

Made by the scheduler between two iterations, on the loop thread; turned into JSON elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingState:
    """A sequence that waits, in the order in which they will start.

    Attributes:
        request_id: The engine's id of the request.
        sequence_index: Which of its sequences.
        state: "WAITING", or "PAUSED" if it ran before.
        why: What it waits for, such as "needs 12 blocks, 7 free".
        prompt_tokens: Length of its prompt.
        generated_tokens: What it generated before it was paused.
        max_new_tokens: Most tokens it may generate.
        priority, client_id: As it was sent.
        waited_ms: Since its arrival.
        deadline_ms: Until it times out; None without a deadline.
    """

    request_id: int
    sequence_index: int
    state: str
    why: str
    prompt_tokens: int
    generated_tokens: int
    max_new_tokens: int
    priority: float
    client_id: int
    waited_ms: float
    deadline_ms: float | None


@dataclass(frozen=True, slots=True)
class RunningState:
    """A sequence that has slots, oldest first.

    Attributes:
        request_id, sequence_index: Which.
        slots: Its slots; a beam search has several.
        phase: "context", "generation" or "ending": its batch is in flight and nothing follows.
        computed_tokens: Tokens whose keys and values are there.
        scheduled_tokens: Tokens in flight.
        context_tokens: Tokens this run has to compute as context.
        generated_tokens: So far.
        max_new_tokens: Most tokens it may generate.
        blocks: KV blocks it holds.
        reserved_blocks: KV blocks set aside for it beyond these.
        running_ms: Since its first iteration.
        deadline_ms: Until it times out; None without a deadline.
    """

    request_id: int
    sequence_index: int
    slots: tuple[int, ...]
    phase: str
    computed_tokens: int
    scheduled_tokens: int
    context_tokens: int
    generated_tokens: int
    max_new_tokens: int
    blocks: int
    reserved_blocks: int
    running_ms: float
    deadline_ms: float | None


@dataclass(frozen=True, slots=True)
class BlockMapState:
    """Where the KV blocks are.

    Attributes:
        total: All there are.
        held: In block tables of running sequences.
        cached: In nobody's, but found by content; evicted when they are needed.
        empty: In nobody's, and worthless.
        reserved: Of cached and empty ones, those that running sequences count on.
        shared: Held ones that more than one block table names.
        tokens_per_block: Tokens in each.
    """

    total: int
    held: int
    cached: int
    empty: int
    reserved: int
    shared: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything.

    Attributes:
        iteration: Count of iterations.
        policy: Who may hold KV blocks.
        slots: Of the device.
        free_slots: Of those.
        suspects: Requests that are being tried again apart, because an iteration with them failed.
        waiting, running, blocks: Who, who, and where.
    """

    iteration: int
    policy: str
    slots: int
    free_slots: int
    suspects: tuple[int, ...]
    waiting: tuple[WaitingState, ...]
    running: tuple[RunningState, ...]
    blocks: BlockMapState
