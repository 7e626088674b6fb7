"""The model that gives clients the rows of embeddings of their pictures."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable
from inflight.errors import InvalidArgument, Name
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.triton.models.multimodal_encoders import MultimodalEncoders
from tests.triton.factories import make_parameters, make_triton_request, response_of
from tests.triton.fake_pb_utils import FakePbUtils, InferenceResponse

NUMBERS = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
URLS = np.array([[b"data:image/png;base64,YQ==", b"data:image/png;base64,Yg=="]], np.object_)

BROKEN = "data:image/png;base64,Yw=="


class FakeEncoder:
    """Returns NUMBERS as rows of a type; the rows of the second of URLS alone are fewer."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def encode(
        self, text: str, pictures: list[str], vocab_size: int, special_tokens: object
    ) -> EncodedPrompt:
        if pictures == [BROKEN]:
            raise InvalidArgument(Name("pictures[0]"), " is broken")
        numbers = NUMBERS[:1] if pictures == ["data:image/png;base64,Yg=="] else NUMBERS
        bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        array = bits if self.dtype == "bfloat16" else numbers.astype(self.dtype)
        table = PromptTable.of(Matrix(numbers.shape, self.dtype, RawBuffer(array.tobytes())))
        return EncodedPrompt((), (), table, None, ())


def ask(dtype: str = "float32", **inputs: np.ndarray) -> InferenceResponse:
    model = MultimodalEncoders()
    model._pb_utils, model.parameters = FakePbUtils(), make_parameters(model.role)
    model.pictures = FakeEncoder(dtype)
    wanted = frozenset(spec.name for spec in model.outputs.specs)
    return response_of(model, make_triton_request(inputs, outputs=wanted))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_of_every_type_are_returned(dtype: str) -> None:
    arrays = ask(dtype, IMAGE_URL=URLS).arrays()
    np.testing.assert_array_equal(arrays["OUT_PROMPT_EMBEDDING_TABLE"], NUMBERS[None])
    assert arrays["OUT_PROMPT_VOCAB_SIZE"].tolist() == [[2]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "a value is required for IMAGE_BYTES, IMAGE_URL or IMAGES: all are missing or empty"),
        ({"IMAGE_URL": URLS.reshape(2, 1)}, "have different numbers of rows of embeddings"),
        (
            {"IMAGE_URL": np.array([[BROKEN.encode()]], np.object_)},
            "IMAGE_URL[0] is broken",
        ),
        (
            {"IMAGE_BYTES": np.ones([1, 1, 2, 2, 4], np.uint8)},
            "must have shape [1, pictures, height, width, 3]",
        ),
    ],
)
def test_invalid_requests_are_refused(inputs: dict[str, np.ndarray], message: str) -> None:
    error = ask(**inputs).error()
    assert error is not None and message in error.message()
