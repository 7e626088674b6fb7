"""The model `preprocessing` with pictures beside the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import numpy as np
import pytest

from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.errors import Cancelled, InvalidArgument, Name
from inflight.log_lines import REQUEST_ID
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.pictures import BlockingEncoder
from inflight.triton.models.text_models import Preprocessing
from inflight.triton.pictures import ServerPictures
from tests.triton.factories import make_parameters, make_triton_request, response_of
from tests.triton.fake_pb_utils import FakePbUtils, InferenceRequest, InferenceResponse
from tests.triton.letters import save_letter_tokenizer

ROWS = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
URL = b"data:image/png;base64,YQ=="
WAIT_S = 30
IDS = {b"abc": (0, 32, 33, 1, 2), b"d": (3, 32, 33), b"bad": ()}


class FakeEncoder:
    """Returns the ids of IDS and the rows ROWS for a picture; rotary positions if it `has_rotary`."""

    def __init__(self, has_rotary: bool) -> None:
        self.has_rotary = has_rotary
        self.given: list[list[str | bytes]] = []

    def encode(
        self, text: str, pictures: list[str], vocab_size: int, special_tokens: object
    ) -> EncodedPrompt:
        ids = IDS[text.encode()]
        if not ids:
            raise InvalidArgument(Name("pictures[0]"), " is broken")
        self.given.append(list(pictures))
        assert vocab_size == 32
        extra_ids = tuple(token_id + 70 if token_id >= 32 else 0 for token_id in ids)
        angles = np.arange(2 * len(ids), dtype=np.float32)
        rotary = RotaryTable.of(Matrix((len(ids), 2), "float32", RawBuffer(angles.tobytes())), -len(ids))
        table = PromptTable.of(Matrix(ROWS.shape, "float32", RawBuffer(ROWS.tobytes())), is_identified=True)
        return EncodedPrompt(ids, extra_ids, table, rotary if self.has_rotary else None, (2,))


def make_model(folder: Path, encoder: BlockingEncoder | None = None) -> Preprocessing:
    save_letter_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32}))
    model = Preprocessing()
    model._pb_utils, model.parameters = FakePbUtils(), make_parameters(model.role, tokenizer_dir=str(folder))
    model.tokenizers = TokenizerFinder(str(folder))
    model.pictures = encoder or model.pictures
    return model


def make_request(**inputs: np.ndarray) -> InferenceRequest:
    wanted = frozenset(spec.name for spec in Preprocessing.outputs.specs)
    return make_triton_request(inputs, outputs=wanted)


def ask(folder: Path, encoder: FakeEncoder, **inputs: np.ndarray) -> InferenceResponse:
    return response_of(make_model(folder, encoder), make_request(**inputs))


def column(*texts: bytes) -> np.ndarray:
    return np.array([[text] for text in texts], np.object_)


def test_the_outputs_are_a_prompt_for_the_engine(tmp_path: Path) -> None:
    encoder = FakeEncoder(has_rotary=True)
    arrays = ask(
        tmp_path, encoder, QUERY=column(b"abc"), IMAGE_URL=np.array([[URL, URL]], np.object_)
    ).arrays()
    assert encoder.given == [[URL.decode()] * 2]
    assert arrays["INPUT_ID"].tolist() == [[0, 32, 33, 1, 2]]
    assert arrays["REQUEST_INPUT_LEN"].tolist() == [[5]]
    assert arrays["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, 102, 103, 0, 0]]
    np.testing.assert_array_equal(arrays["OUT_PROMPT_EMBEDDING_TABLE"], ROWS[None])
    assert arrays["OUT_PROMPT_VOCAB_SIZE"].tolist() == [[2]]
    assert arrays["MROPE_ROTARY_COS_SIN"].tolist() == [list(range(10))]
    assert arrays["MROPE_POSITION_DELTAS"].tolist() == [[-5]]


def test_pictures_are_encoded_for_the_id_of_their_request(tmp_path: Path) -> None:
    encoder, ids = FakeEncoder(has_rotary=False), list[str]()
    encode = encoder.encode
    encoder.encode = lambda *given: ids.append(REQUEST_ID.get()) or encode(*given)
    model = make_model(tmp_path, encoder)
    for request_id in ("a", ""):
        inputs = {"QUERY": column(b"abc"), "IMAGE_URL": column(URL)}
        response_of(model, make_triton_request(inputs, outputs=("INPUT_ID",), request_id=request_id))
    assert ids == ["a", ""] and REQUEST_ID.get() == ""


def test_files_are_pictures(tmp_path: Path) -> None:
    encoder = FakeEncoder(has_rotary=False)
    arrays = ask(
        tmp_path, encoder, QUERY=column(b"abc"), IMAGES=np.array([[b"PNG\xff", b""]], np.object_)
    ).arrays()
    assert encoder.given == [[b"PNG\xff"]] and arrays["INPUT_ID"].tolist() == [[0, 32, 33, 1, 2]]


def test_rows_of_a_batch_are_filled_up_and_may_have_an_extra_id(tmp_path: Path) -> None:
    inputs = {
        "QUERY": column(b"abc", b"d"),
        "IMAGE_URL": column(URL, URL),
        "PAD_ID": np.array([[9], [9]], np.int32),
    }
    arrays = ask(tmp_path, FakeEncoder(has_rotary=True), **inputs).arrays()
    assert arrays["INPUT_ID"].tolist() == [[0, 32, 33, 1, 2], [3, 32, 33, 9, 9]]
    assert arrays["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, 102, 103, 0, 0], [0, 102, 103, 0, 0]]
    assert arrays["MROPE_ROTARY_COS_SIN"].tolist() == [list(range(10)), [*range(6), 0, 0, 0, 0]]
    inputs["PROMPT_TABLE_EXTRA_ID"] = np.array([[5], [6]], np.uint64)
    arrays = ask(tmp_path, FakeEncoder(has_rotary=False), **inputs).arrays()
    assert arrays["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, 5, 5, 0, 0], [0, 6, 6, 0, 0]]
    assert not [name for name in arrays if name.startswith("MROPE")]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"IMAGE_URL": column(URL), "PROMPT_VOCAB_SIZE": np.array([[2]], np.int32)},
            "got both IMAGE_URL and PROMPT_VOCAB_SIZE: send one of them",
        ),
        ({"QUERY": column(b"bad"), "IMAGE_URL": column(URL)}, "IMAGE_URL[0] is broken"),
        ({"QUERY": column(b"bad"), "IMAGES": column(b"a")}, "IMAGES[0] is broken"),
        ({"IMAGES": column(b"a"), "IMAGE_URL": column(URL)}, "got both IMAGE_URL and IMAGES"),
        ({"IMAGE_SIZES": np.array([[[4, 5]]], np.int64)}, "IMAGE_SIZES needs IMAGE_BYTES, which is missing"),
        (
            {"QUERY": column(b"abc", b"d"), "IMAGE_URL": column(URL, b"")},
            "row 1 of the batch: this prompt has no pictures, but others of the batch have",
        ),
    ],
)
def test_invalid_requests_are_refused(tmp_path: Path, inputs: dict[str, np.ndarray], message: str) -> None:
    error = ask(tmp_path, FakeEncoder(has_rotary=False), **({"QUERY": column(b"abc")} | inputs)).error()
    assert error is not None and message in error.message()


def test_texts_do_not_wait_for_pictures(tmp_path: Path) -> None:
    go_on = Event()

    class WaitingEncoder(FakeEncoder):
        def encode(self, *prompt: Any) -> EncodedPrompt:
            assert go_on.wait(WAIT_S)
            return super().encode(*prompt)

    model = make_model(tmp_path, WaitingEncoder(has_rotary=False))
    url = column(URL)
    with_picture, text = (
        make_request(QUERY=column(b"abc"), IMAGE_URL=url),
        make_request(QUERY=column(b"abc")),
    )
    first, second = model.execute([with_picture, text])
    assert first is None and second.arrays()["INPUT_ID"].tolist() == [[0, 1, 2]]
    assert not with_picture.sender.sent
    url[:] = b"overwritten"  # Triton frees a request's tensors when execute returns
    go_on.set()
    (sent,) = with_picture.sender.wait_final()
    assert sent.response.arrays()["INPUT_ID"].tolist() == [[0, 32, 33, 1, 2]]


def test_a_model_that_ends_answers_the_requests_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Event()

    def encode(self: ServerPictures, *_: object) -> EncodedPrompt:
        begun.set()
        while not self._is_ended():
            sleep(0.01)
        raise Cancelled("ended")

    monkeypatch.setattr(ServerPictures, "encode", encode)
    model = make_model(tmp_path)
    model._guard = None
    request = make_request(QUERY=column(b"abc"), IMAGE_URL=column(URL))
    assert model.execute([request]) == [None] and begun.wait(WAIT_S)
    model.finalize()
    (sent,) = request.sender.sent
    assert "the model was unloaded before the request was done" in sent.response.error().message()
