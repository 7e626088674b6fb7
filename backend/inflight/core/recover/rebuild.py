"""After `schedule` raised half-way: slots, block tables and the queue are made anew from the requests themselves.

Nobody knows which of the scheduler's books were changed before it raised, nor whether they agree. What tokens the
requests have, and what was said to them, is not among these, and everything else follows from that: every sequence
gives up slots and blocks, and waits to be computed again from its known tokens. The price is that no prefix is in
the cache afterwards. Called by the scheduler, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.schedule.running import Running
from inflight.core.schedule.waiting_queue import WaitingQueue


def rebuild(
    groups: Iterable[RequestGroup],
    running: Running,
    waiting: WaitingQueue,
    in_front: Collection[LlmRequest],
) -> list[LlmRequest]:
    """Let nothing run and every sequence that has not ended wait, those of `in_front` before all others.

    Returns:
        Sequences that had ended and were waiting for their batches in flight: nothing keeps them any more.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    ended = [s for s in sequences if s.state is RequestState.FINISHED and s.slots]
    running.clear()
    for sequence in sequences:
        sequence.num_scheduled_tokens = 0
        sequence.slots = ()
        if sequence.state is RequestState.RUNNING:
            sequence.restart()
    unfinished = [sequence for sequence in sequences if sequence.state is not RequestState.FINISHED]
    waiting.rebuild(unfinished + ended, in_front)
    return ended
