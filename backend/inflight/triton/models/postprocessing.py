"""`postprocessing`: token ids to text. It forgets everything between calls.

So the text of one streamed chunk alone may lack its leading space or end inside a character; for streaming,
ask a serving model for `text_output` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from inflight.config import Role
from inflight.errors import InvalidArgument
from inflight.triton.models.text_model import TextModel
from inflight.triton.tensor_reader import TensorReader, each_row
from inflight.triton.text_tensors import POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS


class TritonPythonModel(TextModel):
    """TOKENS_BATCH [batch, beams, n] to OUTPUT [batch × beams], flat as tensorrtllm_backend sends it."""

    role = Role.POSTPROCESSING
    inputs = POSTPROCESSING_INPUTS
    outputs = POSTPROCESSING_OUTPUTS

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[np.ndarray]]:
        """See TextModel.convert."""
        return {"OUTPUT": each_row([partial(self._texts, row) for row in rows])}

    def _texts(self, reader: TensorReader) -> np.ndarray:
        beams = reader.array("TOKENS_BATCH")
        if beams is None:
            raise InvalidArgument("a value is required for TOKENS_BATCH: it is missing or empty")
        lengths = reader.array("SEQUENCE_LENGTH")
        if lengths is None:
            lengths = np.full(len(beams), beams.shape[1])
        if lengths.shape != (len(beams),) or (lengths < 0).any() or (lengths > beams.shape[1]).any():
            raise InvalidArgument(
                f"SEQUENCE_LENGTH must have one length from 0 to {beams.shape[1]} for each of {len(beams)} beams, "
                f"got {lengths.tolist()}"
            )
        texts = [self._text(ids[:length].tolist()) for ids, length in zip(beams, lengths)]
        return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizers.require().decode(ids, skip_special_tokens=self.parameters.skip_special_tokens)
