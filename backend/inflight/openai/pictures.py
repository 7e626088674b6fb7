"""Pictures of chats: read from their URLs, and encoded by another process. Runs on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inflight.errors import InvalidArgument, Unavailable, Unreachable
from inflight.openai.errors import in_fields
from inflight.openai.options import OpenAiOptions
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.pictures.sources import PictureReader, SourceRules
from inflight.serving.chat.messages import PictureUrl


class PicturesEncoder(Protocol):
    """The process that encodes pictures, or a fake of it in tests."""

    async def encode(self, text: str, pictures: Sequence[bytes], vocab_size: int) -> EncodedPrompt:
        """Return the prompt with a picture at each of the text's placeholders (`PicturesClient.encode`)."""
        ...

    async def stats(self) -> PictureStats:
        """Return the process's counts since its start; raises Unreachable."""
        ...


class ChatPictures:
    """Reads and encodes the pictures of chats.

    Args:
        encoder: The process that encodes pictures.
        options: Options of the endpoint, with the rules for URLs.
    """

    def __init__(self, encoder: PicturesEncoder, options: OpenAiOptions) -> None:
        self._encoder = encoder
        rules = SourceRules(options.allowed_media_domains, options.allowed_local_media_path)
        self._reader = PictureReader(rules)

    async def encode(self, text: str, urls: Sequence[PictureUrl], vocab_size: int) -> EncodedPrompt:
        """Read a chat's pictures from their URLs, and return its prompt with the encoded pictures.

        Args:
            text: The rendered chat, with a placeholder for each picture.
            urls: The pictures, in order.
            vocab_size: The engine's vocabulary size.

        Raises:
            ApiError, InvalidArgument: A picture cannot be read or is invalid; the error names its URL's field.
            Unavailable: The process cannot be reached, or has too much to do.
        """
        names = [url.name for url in urls]
        pictures = await self._reader.read_all([url.url for url in urls], names)
        fields = {f"pictures[{at}]": name for at, name in enumerate(names)}
        try:
            return await self._encoder.encode(text, pictures, vocab_size)
        except InvalidArgument as error:
            named = in_fields(error, fields)
            named.param = "messages"
            raise named from None
        except Unreachable:
            raise Unavailable("pictures cannot be encoded now; a later attempt may succeed") from None

    async def stats(self) -> PictureStats | None:
        """Return the counts of the process that encodes pictures; None if it cannot be reached."""
        try:
            return await self._encoder.stats()
        except Unreachable:
            return None
