"""`multimodal_encoders`: pictures to rows of embeddings, for clients that build prompts of ids themselves.

A client of the server's process that encodes pictures, whose counts it publishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from inflight.config import Role, SpecialTokens
from inflight.errors import InvalidArgument
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.tensors.picture_outputs import table_outputs
from inflight.tensors.pictures import OF_TEXT_MODELS, read_pictures
from inflight.tensors.reader import TensorReader, each_row
from inflight.tensors.text_model_tables import ENCODERS_INPUTS, ENCODERS_OUTPUTS
from inflight.triton.metrics_on_demand import MetricsOnDemand
from inflight.triton.models.text_models import TextModel
from inflight.triton.picture_metrics import PictureMetrics
from inflight.triton.pictures import ServerPictures


class MultimodalEncoders(TextModel):
    """Encodes IMAGE_BYTES, IMAGE_URL or IMAGES to the rows OUT_PROMPT_EMBEDDING_TABLE, of all pictures in order.

    The prompts of a batch must have equal numbers of rows of embeddings.
    """

    role = Role.ENCODERS
    inputs = ENCODERS_INPUTS
    outputs = ENCODERS_OUTPUTS

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer, and publish the metrics about pictures (`TextModel.initialize`)."""
        super().initialize(args)
        name = args["model_name"]
        metrics = PictureMetrics(self._pb_utils, name, args["model_version"], ServerPictures().stats)
        self._on_demand = MetricsOnDemand(metrics.update, name)

    def finalize(self) -> None:
        """Stop publishing; otherwise as `TextModel.finalize`."""
        self._on_demand.close()
        super().finalize()

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[NDArray[Any]]]:
        """Return the outputs, see TextModel.convert."""
        return table_outputs(each_row([partial(self._encode, row) for row in rows]))

    def _encode(self, reader: TensorReader) -> EncodedPrompt:
        sent = read_pictures(reader, OF_TEXT_MODELS)
        if sent is None:
            raise InvalidArgument(
                "a value is required for IMAGE_BYTES, IMAGE_URL or IMAGES: all are missing or empty"
            )
        # Virtual ids are not needed, so that they may begin anywhere.
        return sent.encode(self.pictures, "", 0, SpecialTokens.LEFT_OUT)
