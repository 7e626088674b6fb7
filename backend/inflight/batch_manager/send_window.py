"""Decides when responses are passed to the threads that send them, and how long the loop then waits.

A forward pass that computes on all processors of the host competes with the threads that send: sending a response
takes a processor from one of the model's threads, and the others wait for this thread at their next barrier. So
responses are kept for a few iterations, passed on together, and sent while the loop waits. This module owns the
kept responses and decides how long to keep them. It is independent of how they are sent. Used on the loop
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.core.ports import WaitUntilSent
from inflight.core.request.response import Response

_SHARE = 0.3
"""The maximum length of a window, as a fraction of the time since the last one."""
_LONGEST_NS = 200_000_000
"""Maximum time that a response is kept; a longer time since the last window counts as this much."""
_FIRST_COST_NS = 300_000
"""The time that sending one sequence's responses is assumed to take, until it has been measured."""
_GROWTH = 1.5
"""The factor by which the assumed cost grows if responses could not be sent in time."""


class SendWindow:
    """Keeps responses until sending them takes a small fraction of the time since the last window.

    With a few streams or a large model, responses are sent after every iteration; with many streams of a small
    model, after every second or third. A request's last response is passed on at once, with its other kept
    responses. The sending side merges the responses of a sequence.

    Args:
        hand_over: Passes responses, in order, to the threads that send them; never blocks.
        wait_until_sent: Waits until all responses have been sent, for at most the given number of seconds.
        clock_ns: Monotonic clock in nanoseconds.
    """

    def __init__(
        self,
        hand_over: Callable[[Sequence[Response]], None],
        wait_until_sent: WaitUntilSent,
        clock_ns: Callable[[], int],
    ) -> None:
        self._hand_over = hand_over
        self._wait_until_sent = wait_until_sent
        self._clock_ns = clock_ns
        self._kept: dict[int, list[Response]] = {}  # by request
        self._sequences: set[tuple[int, int]] = set()  # request id and sequence index of kept responses
        self._closed_at_ns = clock_ns()
        self._cost_ns: float = _FIRST_COST_NS  # per sequence

    def add(self, responses: Sequence[Response]) -> None:
        """Add an iteration's responses; called after every iteration with active requests."""
        for response in responses:
            self._kept.setdefault(response.request_id, []).append(response)
            self._sequences.add((response.request_id, response.sequence_index))
        if not self._kept:
            return
        now_ns = self._clock_ns()
        since_ns = min(now_ns - self._closed_at_ns, _LONGEST_NS)
        if len(self._sequences) * self._cost_ns <= _SHARE * since_ns or since_ns == _LONGEST_NS:
            self._open(now_ns, _SHARE * since_ns)
            return
        ended = [response.request_id for response in responses if response.is_final]
        for request_id in ended:
            self._hand_over(self._kept.pop(request_id))
        if ended:
            self._sequences = {key for key in self._sequences if key[0] in self._kept}
            self._wait_until_sent(1e-9 * min(len(ended) * self._cost_ns, _SHARE * since_ns))

    def flush(self) -> None:
        """Pass on the kept responses without waiting until they are sent."""
        responses_by_request, self._kept = self._kept, {}
        self._sequences.clear()
        for responses in responses_by_request.values():
            self._hand_over(responses)

    def _open(self, now_ns: int, room_ns: float) -> None:
        count = len(self._sequences)
        self.flush()
        are_sent = self._wait_until_sent(1e-9 * room_ns)
        self._closed_at_ns = self._clock_ns()
        if are_sent:
            self._cost_ns = (self._closed_at_ns - now_ns) / count
        else:  # sending was not finished in time, so the cost is unknown but larger
            self._cost_ns = min(self._cost_ns * _GROWTH, _SHARE * _LONGEST_NS / count)
