"""The responses that the server keeps for later requests, in memory and within limits.

Runs on the event loop. Everything kept is JSON, so that its size is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """One response with the conversation that led to it.

    Attributes:
        response: The response object.
        items: The items of the conversation: the previous responses' inputs and outputs, then the own input.
        output: The items of the own output.
        cancel: Ends a response in progress; None if it has ended.
    """

    response: bytes
    items: Sequence[bytes]
    output: Sequence[bytes] = ()
    cancel: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes, with items that are shared with other responses."""
        return len(self.response) + sum(map(len, self.items)) + sum(map(len, self.output))


class KeptResponses:
    """Responses by the API key that has made them and their id. The oldest are dropped to keep the limits.

    Args:
        max_number: Largest number of responses.
        max_bytes: Largest size of all responses in bytes.
    """

    def __init__(self, max_number: int, max_bytes: int) -> None:
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Key, KeptResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, owner: bytes, response_id: str, kept: KeptResponse) -> None:
        """Keep a new response. One that exceeds the limits alone is not kept."""
        self._put((owner, response_id), kept)

    def end(self, owner: bytes, response_id: str, response: bytes, output: Sequence[bytes]) -> None:
        """Replace a response in progress by its end. Nothing happens if it has been dropped or deleted."""
        old = self.delete(owner, response_id)
        if old is not None:
            ended = replace(old, response=response, output=tuple(output), cancel=None)
            self._put((owner, response_id), ended)

    def get(self, owner: bytes, response_id: str) -> KeptResponse | None:
        """Return a response; None if this owner has none of this id."""
        return self._kept.get((owner, response_id))

    def delete(self, owner: bytes, response_id: str) -> KeptResponse | None:
        """Remove a response and return it; None if this owner has none of this id."""
        old = self._kept.pop((owner, response_id), None)
        if old is not None:
            self.num_bytes -= old.num_bytes
        return old

    def _put(self, key: _Key, kept: KeptResponse) -> None:
        self.delete(*key)
        self._kept[key] = kept
        self.num_bytes += kept.num_bytes
        while len(self._kept) > self._max_number or self.num_bytes > self._max_bytes:
            self.delete(*next(iter(self._kept)))
