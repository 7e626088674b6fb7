"""The process that encodes pictures, for Triton's models of the same server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from inflight.config import SpecialTokens
from inflight.errors import Cancelled, Name, Unavailable, Unreachable, Unsupported
from inflight.pictures.client import PicturesClient
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.server.runtime_directory import FOLDER_VARIABLE, PICTURES_SOCKET
from inflight.tensors.pictures import Pictures

PICTURE_THREADS = 16
"""Number of a model's requests at a time that wait for the process that encodes pictures."""

_PERIOD_S = 0.1
"""Seconds between two looks whether a request has been ended."""


class ServerPictures:
    """Asks the process that `serve` starts beside tritonserver. Any thread without an event loop.

    Args:
        is_ended: Whether the request was ended meanwhile, by its client or because the model is unloaded.
    """

    def __init__(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        self._is_ended = is_ended

    def encode(
        self, text: str, pictures: Pictures, vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        """Return the encoded prompt. Blocks, for seconds if the pictures are large.

        Raises:
            InvalidArgument: As `PicturesClient.encode`.
            Cancelled: The request was ended. If its pictures still wait, they are not encoded.
            Unsupported: The server has no such process.
            Unavailable: The process cannot be reached, or has too much to do.
        """
        socket = _socket()
        if not socket.is_socket():
            raise Unsupported(
                Name("pictures"),
                " cannot be encoded: this server has no process for it, as its model has no vision tower that is "
                "served or it runs with --no-vision",
            )
        try:
            client = PicturesClient(str(socket))
            encoding = client.encode(text, pictures, vocab_size, special_tokens)
            return asyncio.run(self._unless_ended(encoding))
        except Unreachable:
            raise Unavailable(
                Name("pictures"), " cannot be encoded now; a later attempt may succeed"
            ) from None

    async def _unless_ended(self, encoding: Coroutine[Any, Any, EncodedPrompt]) -> EncodedPrompt:
        task = asyncio.ensure_future(encoding)
        while not (await asyncio.wait({task}, timeout=_PERIOD_S))[0]:
            if self._is_ended():
                raise Cancelled("the request was cancelled")  # asyncio.run cancels the task
        return task.result()

    def stats(self, timeout_s: float) -> PictureStats | None:
        """Return the process's counts since its start; None if it does not run or does not answer in time."""
        if not (socket := _socket()).is_socket():
            return None
        try:
            return asyncio.run(asyncio.wait_for(PicturesClient(str(socket)).stats(), timeout_s))
        except (Unreachable, asyncio.TimeoutError):
            return None


def _socket() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE, ""), PICTURES_SOCKET)
