"""Serves an encoder of pictures at a Unix socket. Imports no torch.

Owns an event loop's server, which also reads pictures by their URLs, and one thread, which encodes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Protocol

import msgspec

from inflight.config import SpecialTokens
from inflight.endpoint.frames import BadFrame, encode_with_buffers
from inflight.endpoint.path import listen, remove
from inflight.errors import InflightError, InvalidArgument, Name, QueueFull, unexpected
from inflight.file_names import native
from inflight.log_lines import REQUEST_ID
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.pictures.messages import (
    Encoded,
    EncodePictures,
    ReadStats,
    Stats,
    ToEncoder,
    read_message,
)
from inflight.pictures.options import MAX_PICTURES
from inflight.pictures.sources import PictureReader, SourceRules
from inflight.raw_buffers import BufferedDecoder

_log = logging.getLogger(__name__)

MAX_PROMPTS = 64
"""Maximum number of prompts that are encoded or wait at one time."""

DATA_URLS = SourceRules()
"""Rules that allow only data: URLs."""


class Encoder(Protocol):
    """The encoder that is served, a PictureEncoder."""

    def encode(
        self,
        text: str,
        pictures: Sequence[bytes | memoryview],
        vocab_size: int,
        special_tokens: SpecialTokens | None,
    ) -> EncodedPrompt:
        """Encode a prompt's pictures and tokenize its text (`PictureEncoder.encode`). Called on one thread."""
        ...

    def stats(self) -> PictureStats:
        """Return counts since the start. Called while another thread encodes."""
        ...


class PicturesServer:
    """Encodes the prompts of all connections one at a time, in the order of their arrival.

    A prompt whose front end has closed its connection is dropped, unless it is being encoded already.

    Args:
        encoder: The encoder.
        max_prompts: Maximum number of prompts that are encoded or wait at one time.
        rules: Rules for the URLs of pictures.
        max_pictures: Largest number of pictures in a prompt.
    """

    def __init__(
        self,
        encoder: Encoder,
        max_prompts: int = MAX_PROMPTS,
        rules: SourceRules = DATA_URLS,
        max_pictures: int = MAX_PICTURES,
    ) -> None:
        self._encoder = encoder
        self._max_prompts = max_prompts
        self._reader = PictureReader(rules)
        self._max_pictures = max_pictures
        self._num_prompts = 0
        self._executor = ThreadPoolExecutor(1, "encode-pictures")

    async def serve(self, path: str, stop: asyncio.Event, ready: Callable[[], object]) -> None:
        """Serve at `path` until `stop` is set.

        Args:
            path: The socket's path.
            stop: Ends serving; prompts that are not yet encoded get no answer.
            ready: Called when clients can connect.

        Raises:
            ConfigError: The path cannot be used, or a server already listens there.
        """
        path = native(path)
        server = await asyncio.start_unix_server(self._attend, sock=listen(path, "--socket"))
        try:
            ready()
            await stop.wait()
        finally:
            server.close()
            remove(path)
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of one connection."""
        try:
            decoder: BufferedDecoder[ToEncoder] = BufferedDecoder(ToEncoder)
            request = await read_message(reader, decoder)
            answer = None if request is None else await self._answer(request, reader)
            if answer is not None:
                writer.writelines(encode_with_buffers(answer))
                await writer.drain()
        except (OSError, BadFrame) as error:
            _log.warning("a connection broke: %s", error)
        finally:
            writer.close()

    async def _answer(self, request: ToEncoder, reader: asyncio.StreamReader) -> msgspec.Struct | None:
        """Return the answer to a request; None if its front end has closed the connection."""
        if isinstance(request, ReadStats):
            return Stats(self._encoder.stats())
        REQUEST_ID.set(request.request_id)  # each connection has a task, and so a context, of its own
        if self._num_prompts >= self._max_prompts:
            return _failed(
                QueueFull(f"{self._num_prompts} prompts with pictures wait already; try again later")
            )
        self._num_prompts += 1
        encoding = asyncio.ensure_future(self._read_and_encode(request))
        closing = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({encoding, closing}, return_when=asyncio.FIRST_COMPLETED)
            return encoding.result() if encoding.done() else None
        finally:
            self._num_prompts -= 1
            closing.cancel()
            encoding.cancel()  # no effect if it has ended

    async def _read_and_encode(self, request: EncodePictures) -> Encoded:
        """Read the pictures that have URLs, and encode the prompt after those that wait."""
        num_pictures = len(request.pictures) + len(request.urls)
        try:
            if num_pictures > self._max_pictures:
                raise InvalidArgument(
                    Name("pictures"),
                    f": {num_pictures} pictures; this server takes at most {self._max_pictures} in a prompt "
                    "(--limit-mm-per-prompt)",
                )
            names = [Name(f"pictures[{index}]") for index in range(len(request.urls))]
            read = await self._reader.read_all(request.urls, names)
        except InflightError as error:
            return _failed(error)
        except Exception as error:
            _log.exception("pictures could not be read")
            return _failed(unexpected("the pictures could not be read", error))
        pictures = [*(memoryview(picture.data) for picture in request.pictures), *read]
        loop = asyncio.get_running_loop()
        context = copy_context()  # so that the thread's log lines name the request
        encode = partial(self._encode, request, pictures)
        return await loop.run_in_executor(self._executor, lambda: context.run(encode))

    def _encode(self, request: EncodePictures, pictures: Sequence[bytes | memoryview]) -> Encoded:
        begun_s = time.monotonic()
        try:
            prompt = self._encoder.encode(request.text, pictures, request.vocab_size, request.special_tokens)
            _log.info(
                "a prompt with %d pictures: %d of its %d tokens are theirs, %.0f ms, %d prompts wait",
                len(pictures),
                sum(prompt.num_picture_tokens),
                len(prompt.token_ids),
                1000 * (time.monotonic() - begun_s),
                self._num_prompts - 1,
            )
            return Encoded(prompt)
        except InflightError as error:
            return _failed(error)
        except Exception as error:
            _log.exception("a prompt could not be encoded")
            return _failed(unexpected("the pictures could not be encoded", error))


def _failed(error: InflightError) -> Encoded:
    return Encoded(error_kind=error.kind, error_message=error.marked)
