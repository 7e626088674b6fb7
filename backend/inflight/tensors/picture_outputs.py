"""The outputs that give clients the rows and the rotary positions of encoded pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.arrays import to_float32
from inflight.core.request.adapter import Matrix
from inflight.errors import Unsupported
from inflight.pictures.encoded_prompt import EncodedPrompt

_TYPES: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def table_outputs(prompts: Sequence[EncodedPrompt]) -> dict[str, list[NDArray[Any]]]:
    """Return an array for each prompt of a batch: all rows of its pictures, and their number.

    Raises Unsupported if the prompts have different numbers of rows.
    """
    tables = [_to_array(prompt.table.rows) for prompt in prompts]
    if len({table.shape for table in tables}) > 1:
        raise Unsupported(
            "the pictures of this batch have different numbers of rows of embeddings: send separate requests"
        )
    sizes: list[NDArray[Any]] = [np.array([len(table)]) for table in tables]
    return {"OUT_PROMPT_EMBEDDING_TABLE": [*tables], "OUT_PROMPT_VOCAB_SIZE": sizes}


def rotary_outputs(prompts: Sequence[EncodedPrompt]) -> dict[str, list[NDArray[Any]]]:
    """Return the rotary positions of each prompt of a batch; nothing if the model has no mRoPE.

    Those of shorter prompts are filled up with zeros, which the engine does not use.
    """
    rotaries = [prompt.rotary for prompt in prompts if prompt.rotary is not None]
    if not rotaries:
        return {}
    tables = [_to_array(each.cos_sin).ravel() for each in rotaries]
    length = max(map(len, tables))
    return {
        "MROPE_ROTARY_COS_SIN": [np.pad(table, (0, length - len(table))) for table in tables],
        "MROPE_POSITION_DELTAS": [np.array([each.delta]) for each in rotaries],
    }


def _to_array(rows: Matrix) -> NDArray[np.float32]:
    return to_float32(np.frombuffer(rows.buffer.data, _TYPES[rows.dtype]).reshape(rows.shape))
