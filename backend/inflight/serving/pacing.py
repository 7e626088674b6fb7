"""How many tokens a streamed response waits for: every response costs the processors that the model runs on.

Holds what is not to be sent yet, on the engine's loop thread, and hands the rest on. A sequence's first tokens and
its last ones never wait. Does not know who sends.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.core.request.response import Response


class Pacing:
    """Lets one response of a sequence through for every `interval` tokens between its first and its last.

    Args:
        interval: Tokens, at least 1.
        hand_on: Called with responses in order; those of a sequence that come together are to be joined.
    """

    def __init__(self, interval: int, hand_on: Callable[[Response], None]) -> None:
        self._interval = interval
        self._hand_on = hand_on
        # By request and sequence: responses held back since one was let through; empty once the first has been.
        self._held: dict[int, dict[int, list[Response]]] = {}

    def put(self, response: Response) -> None:
        """Hold one response back or hand it on; never waits."""
        if self._interval == 1:
            self._hand_on(response)
            return
        sequences = self._held.setdefault(response.request_id, {})
        is_first = response.sequence_index not in sequences
        held = sequences.setdefault(response.sequence_index, [])
        held.append(response)
        ends = response.result is None or response.result.is_sequence_final or response.is_final
        if response.is_final:
            del self._held[response.request_id]
            for index, others in sequences.items():
                if index != response.sequence_index:
                    self._let_go(others)
        if is_first or ends or _num_tokens(held) >= self._interval:
            self._let_go(held)

    def _let_go(self, held: list[Response]) -> None:
        for each in held:
            self._hand_on(each)
        held.clear()


def _num_tokens(held: list[Response]) -> int:
    """Tokens in these responses. A cumulative one repeats what came before it, so each counts as one token."""
    return sum(
        1 if each.result.is_cumulative else len(each.result.output_token_ids[0])
        for each in held
        if each.result is not None
    )
