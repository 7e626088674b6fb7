"""The responses that the server keeps for later requests, in memory, within limits, and optionally in a file.

Runs on the event loop. Everything kept is JSON, so that its size is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inflight.openai.responses.file import ResponseFile

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
        file: File with the responses of earlier processes, to which ended responses are written; None: there is
            none.
    """

    def __init__(self, max_number: int, max_bytes: int, file: ResponseFile | None = None) -> None:
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._file = file
        self._kept: OrderedDict[_Key, KeptResponse] = OrderedDict()
        self.num_bytes = 0
        for owner, response_id, response, items, output in file.read() if file is not None else ():
            kept = self._kept[owner, response_id] = KeptResponse(response, items, output)
            self.num_bytes += kept.num_bytes
        self._drop_oldest()

    def close(self) -> None:
        """End writing to the file, if there is one, and release it. Idempotent."""
        if self._file is not None:
            self._file.close()

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
        """Return a response; None if no such id belongs to this owner."""
        return self._kept.get((owner, response_id))

    def delete(self, owner: bytes, response_id: str) -> KeptResponse | None:
        """Remove a response and return it; None if no such id belongs to this owner."""
        old = self._kept.pop((owner, response_id), None)
        if old is not None:
            self.num_bytes -= old.num_bytes
            if self._file is not None and old.cancel is None:
                self._file.delete(owner, response_id)
        return old

    def _put(self, key: _Key, kept: KeptResponse) -> None:
        self.delete(*key)
        self._kept[key] = kept
        self.num_bytes += kept.num_bytes
        if self._file is not None and kept.cancel is None:
            self._file.put(*key, kept.response, kept.items, kept.output)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._kept) > self._max_number or self.num_bytes > self._max_bytes:
            self.delete(*next(iter(self._kept)))
