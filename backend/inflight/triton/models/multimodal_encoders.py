"""`multimodal_encoders`: pictures to rows of embeddings, for clients that build prompts of ids themselves.

A client of the server's process that encodes pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.config import Role, SpecialTokens
from inflight.core.request.adapter import Matrix
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.tensors.pictures import BlockingEncoder, read_pictures
from inflight.tensors.reader import TensorReader, each_row
from inflight.tensors.text_model_tables import ENCODERS_INPUTS, ENCODERS_OUTPUTS
from inflight.triton.models.text_models import TextModel
from inflight.triton.pictures import ServerPictures

_PIXELS, _URLS = "IMAGE_BYTES", "IMAGE_URL"
_TYPES: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class MultimodalEncoders(TextModel):
    """Encodes IMAGE_BYTES or IMAGE_URL to the rows OUT_PROMPT_EMBEDDING_TABLE, of all pictures in order.

    The rows of a batch must have equal numbers of rows of embeddings.
    """

    role = Role.ENCODERS
    inputs = ENCODERS_INPUTS
    outputs = ENCODERS_OUTPUTS
    pictures: BlockingEncoder = ServerPictures()

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[NDArray[Any]]]:
        """Return the outputs, see TextModel.convert."""
        tables = each_row([partial(self._encode, row) for row in rows])
        if len({table.shape for table in tables}) > 1:
            raise Unsupported(
                "the pictures of this batch have different numbers of rows of embeddings: send separate requests"
            )
        sizes = [np.array([len(table)]) for table in tables]
        return {"OUT_PROMPT_EMBEDDING_TABLE": tables, "OUT_PROMPT_VOCAB_SIZE": sizes}

    def _encode(self, reader: TensorReader) -> NDArray[np.float32]:
        sent = read_pictures(reader, _PIXELS, (_URLS,))
        if sent is None:
            raise InvalidArgument(
                "a value is required for ", Name(_PIXELS), ", or ", Name(_URLS), ": it is missing or empty"
            )
        # Virtual ids are not needed, so that they may begin anywhere.
        prompt = sent.encode(self.pictures, "", 0, SpecialTokens.LEFT_OUT)
        return _to_array(prompt.table.rows)


def _to_array(rows: Matrix) -> NDArray[np.float32]:
    array = np.frombuffer(rows.buffer.data, _TYPES[rows.dtype]).reshape(rows.shape)
    if rows.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
