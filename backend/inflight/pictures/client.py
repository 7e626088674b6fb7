"""The client of the process that encodes pictures, for front ends with an event loop. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

import msgspec

from inflight.config import SpecialTokens
from inflight.core.request.adapter import RawBuffer
from inflight.endpoint.frames import BadFrame, encode_with_buffers
from inflight.endpoint.path import check_peer
from inflight.errors import Unreachable, error_from_kind
from inflight.file_names import native
from inflight.log_lines import REQUEST_ID
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.pictures.messages import (
    Encoded,
    EncodePictures,
    FromEncoder,
    ReadStats,
    Stats,
    read_message,
)
from inflight.raw_buffers import BufferedDecoder

_log = logging.getLogger(__name__)


class PicturesClient:
    """Asks the process that listens at a Unix socket. Each call has a connection of its own.

    A call that is cancelled takes its request back. The process's log lines about a call have the caller's
    REQUEST_ID.

    Args:
        path: The socket's path.
    """

    def __init__(self, path: str) -> None:
        self._path = native(path)

    async def encode(
        self,
        text: str,
        pictures: Sequence[bytes] | Sequence[str],
        vocab_size: int,
        special_tokens: SpecialTokens | None = None,
    ) -> EncodedPrompt:
        """Have the process encode a prompt with pictures; return its tokens and the rows of its pictures.

        Args:
            text, vocab_size, special_tokens: As of `PictureEncoder.encode`.
            pictures: The pictures' files, or URLs that the process reads.

        Raises:
            InvalidArgument: The numbers of placeholders and pictures differ, there are too many pictures, or a
                picture is invalid or may not be read.
            QueueFull: Too many prompts wait.
            Unreachable: The process does not run, or has ended meanwhile.
        """
        files = tuple(RawBuffer(picture) for picture in pictures if not isinstance(picture, str))
        urls = tuple(picture for picture in pictures if isinstance(picture, str))
        request_id = REQUEST_ID.get()
        answer = await self._ask(EncodePictures(text, files, vocab_size, special_tokens, urls, request_id))
        assert isinstance(answer, Encoded), f"got {type(answer).__name__}"
        if answer.prompt is None:
            raise error_from_kind(answer.error_kind, answer.error_message)
        return answer.prompt

    async def stats(self) -> PictureStats:
        """Return the process's counts since its start; raises Unreachable."""
        answer = await self._ask(ReadStats())
        assert isinstance(answer, Stats), f"got {type(answer).__name__}"
        return answer.stats

    async def _ask(self, message: msgspec.Struct) -> FromEncoder:
        try:
            reader, writer = await self._connect()
            try:
                writer.writelines(encode_with_buffers(message))
                await writer.drain()
                decoder: BufferedDecoder[FromEncoder] = BufferedDecoder(FromEncoder)
                answer = await read_message(reader, decoder)
            finally:
                writer.close()
        except (OSError, BadFrame) as error:
            _log.warning("the process that encodes pictures, at %s: %s", self._path, error)
            raise Unreachable("the process that encodes pictures cannot be reached") from error
        if answer is None:
            raise Unreachable("the process that encodes pictures has ended; a later attempt may succeed")
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, self._path)
            check_peer(connection)
            return await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            connection.close()
            raise
