"""The process that encodes pictures, for Triton's models of the same server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from inflight.config import SpecialTokens
from inflight.errors import Name, Unavailable, Unreachable, Unsupported
from inflight.pictures.client import PicturesClient
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.server.runtime_directory import FOLDER_VARIABLE, PICTURES_SOCKET


class ServerPictures:
    """Asks the process that `serve` starts beside tritonserver. Any thread without an event loop."""

    def encode(
        self, text: str, pictures: Sequence[bytes], vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        """Return the encoded prompt. Blocks, for seconds if the pictures are large.

        Raises:
            InvalidArgument: As `PicturesClient.encode`.
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
            return asyncio.run(PicturesClient(str(socket)).encode(text, pictures, vocab_size, special_tokens))
        except Unreachable:
            raise Unavailable(
                Name("pictures"), " cannot be encoded now; a later attempt may succeed"
            ) from None

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
