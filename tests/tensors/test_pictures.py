"""Pictures of text prompts: how they are read, encoded and put into requests."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from inflight.config import SpecialTokens
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.errors import InvalidArgument, Name, RequestError, Unsupported
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.tensors.pictures import to_bmp
from inflight.tensors.requests import convert, must_encode_pictures
from inflight.tensors.spec import Vocabulary
from tests.tensors.factories import (
    make_context,
    make_description,
    make_limits,
    make_rows,
    text_inputs,
    token_inputs,
)

URL = b"data:image/png;base64,YQ=="
PIXELS = np.random.default_rng(0).integers(0, 256, (1, 2, 4, 5, 3), dtype=np.uint8)
TABLE = PromptTable.of(Matrix((2, 8), "float32", RawBuffer(bytes(64))), is_identified=True)
ROTARY = RotaryTable.of(Matrix((3, 4), "float32", RawBuffer(bytes(48))), -1, is_identified=True)
MADE = EncodedPrompt((5, 1000, 1001), (0, 7, 8), TABLE, ROTARY, (2,))


class FakeEncoder:
    """Records what it is given, and returns the same prompt or raises an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: list[tuple[str, list[bytes | str], int, SpecialTokens]] = []

    def encode(
        self, text: str, pictures: Sequence[bytes | str], vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        self.given.append((text, list(pictures), vocab_size, special_tokens))
        if self.error is not None:
            raise self.error
        return MADE


def context_of(encoder: FakeEncoder | None, hidden_size: int = 8):
    limits = make_limits(hidden_size=hidden_size, rotary_dim=4)
    return make_context(description=make_description(limits=limits), pictures=encoder)


@pytest.mark.parametrize("name", ["image_url", "image_url_input"])
@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_urls_are_encoded_with_the_text(name: str, vocabulary: Vocabulary) -> None:
    encoder, url = FakeEncoder(), [[URL, b"", b"http://x/y.png"]]
    own = {"input_ids": None, "text_input": b"hi"}
    given = (
        text_inputs(**{name: url}) if vocabulary is Vocabulary.TEXT else token_inputs(**own, **{name: url})
    )
    rows = make_rows(given, vocabulary)
    assert must_encode_pictures(rows)
    (prompt,) = convert(rows, context_of(encoder))
    text = "hello" if vocabulary is Vocabulary.TEXT else "hi"
    sent = [URL.decode(), "http://x/y.png"]
    assert encoder.given == [(text, sent, 1000, SpecialTokens.ADDED)]
    request = prompt.request
    assert (request.input_token_ids, request.identity.extra_ids) == (MADE.token_ids, MADE.extra_ids)
    assert (request.prompt_table, request.rotary_table) == (TABLE, ROTARY)
    assert prompt.options.prompt_text == text


def test_pixels_become_files_of_the_same_pixels() -> None:
    encoder = FakeEncoder()
    convert(make_rows(text_inputs(image_bytes_input=PIXELS), Vocabulary.TEXT), context_of(encoder))
    ((_, files, _, _),) = encoder.given
    read = [np.asarray(Image.open(BytesIO(file), formats=["BMP"])) for file in files]
    np.testing.assert_array_equal(read, PIXELS[0])
    assert files[0] == to_bmp(PIXELS[0, 0])


def extra_ids_of(**tensors: object) -> tuple[int, ...]:
    rows = make_rows(text_inputs(image_url=[[URL]], **tensors), Vocabulary.TEXT)
    (prompt,) = convert(rows, context_of(FakeEncoder()))
    return prompt.request.identity.extra_ids


def test_a_clients_own_id_of_all_rows_divides_the_cache() -> None:
    assert extra_ids_of() == extra_ids_of(prompt_table_extra_id=0) == MADE.extra_ids
    made = [extra_ids_of(prompt_table_extra_id=each) for each in (7, 7, (1 << 64) - 1)]
    assert made[0] == made[1] and all(ids[0] == 0 for ids in made)
    assert len({*MADE.extra_ids[1:], *made[0][1:], *made[2][1:]}) == 6


def encoded_pixels(**tensors: np.ndarray) -> list[np.ndarray]:
    """Return the pixels [height, width, 3] of the files that the encoder gets for a request."""
    encoder = FakeEncoder()
    convert(make_rows(text_inputs(**tensors), Vocabulary.TEXT), context_of(encoder))
    ((_, files, _, _),) = encoder.given
    return [np.asarray(Image.open(BytesIO(file), formats=["BMP"])) for file in files]


def test_the_colours_of_pixels_may_come_first() -> None:
    np.testing.assert_array_equal(
        encoded_pixels(image_bytes_input=PIXELS.transpose(0, 1, 4, 2, 3)), PIXELS[0]
    )


def test_pixels_beyond_a_pictures_size_are_padding() -> None:
    sizes = np.array([[[4, 2], [3, 5]]], np.int64)
    first, second = encoded_pixels(image_bytes_input=PIXELS, image_sizes_input=sizes)
    np.testing.assert_array_equal(first, PIXELS[0, 0, :, :2])
    np.testing.assert_array_equal(second, PIXELS[0, 1, :3])


@pytest.mark.parametrize("url", [b"", [[b"", b""]]])
def test_an_empty_url_is_no_picture(url: object) -> None:
    assert not must_encode_pictures(make_rows(text_inputs(image_url_input=url), Vocabulary.TEXT))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"image_bytes_input": PIXELS[..., :1]},
            r"shape \[1, pictures, height, width, 3\] or \[1, pictures, 3, height, width\], "
            r"got \[1, 2, 4, 5, 1\]",
        ),
        (
            {"image_bytes_input": np.zeros((1, 1, 4096, 2731, 3), np.uint8)},
            "image_bytes_input has pictures of 33558528 bytes; at most 33554432 are taken",
        ),
        ({"image_bytes_input": PIXELS[0, 0]}, r"image_bytes_input must have shape \[1, n, n, n, n\], got"),
        (
            {"image_bytes_input": PIXELS, "image_url_input": URL},
            "got both image_bytes_input and image_url_input: send the pictures in one of them",
        ),
        (
            {"image_bytes_input": PIXELS, "image_sizes_input": np.array([[[4, 5], [4, 6]]], np.int64)},
            "image_sizes_input must have the height, from 1 to 4, and the width, from 1 to 5, of each of the 2 "
            r"pictures in image_bytes_input, got \[\[4, 5\], \[4, 6\]\]",
        ),
        (
            {"image_bytes_input": PIXELS, "image_sizes_input": np.array([[[4, 0], [4, 5]]], np.int64)},
            r"image_sizes_input must .*, got \[\[4, 0\], \[4, 5\]\]",
        ),
        (
            {"image_bytes_input": PIXELS, "image_sizes_input": np.array([[[4, 5]]], np.int64)},
            r"of each of the 2 pictures in image_bytes_input, got \[\[4, 5\]\]",
        ),
        (
            {"image_url_input": URL, "image_sizes_input": np.array([[[4, 5]]], np.int64)},
            "image_sizes_input needs image_bytes_input, which is missing",
        ),
        (
            {"image_url_input": URL, "prompt_embedding_table": np.ones([1, 2, 8], np.float16)},
            "got both image_url_input and prompt_embedding_table",
        ),
        ({"image_url_input": URL, "prompt_vocab_size": 2}, "got both image_url_input and prompt_vocab_size"),
    ],
)
def test_invalid_pictures_are_refused(tensors: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert(make_rows(text_inputs(**tensors), Vocabulary.TEXT), context_of(FakeEncoder()))


def test_pictures_need_a_text_and_an_encoder() -> None:
    with pytest.raises(InvalidArgument, match="image_url needs text_input, which is missing"):
        convert(make_rows(token_inputs(image_url=[[URL]])), context_of(FakeEncoder()))
    with pytest.raises(Unsupported, match="image_url is not available: nothing encodes pictures here"):
        convert(make_rows(text_inputs(image_url=[[URL]]), Vocabulary.TEXT), context_of(None))


@pytest.mark.parametrize("error", [InvalidArgument, Unsupported])
def test_errors_of_the_encoder_name_the_tensor(error: type[RequestError]) -> None:
    encoder = FakeEncoder(error(Name("pictures[1]"), " is wrong"))
    with pytest.raises(error, match=r"^image_url\[1\] is wrong"):
        convert(make_rows(text_inputs(image_url=[[URL]]), Vocabulary.TEXT), context_of(encoder))


def test_rows_of_another_width_name_the_tensor() -> None:
    rows = make_rows(text_inputs(image_url=[[URL]]), Vocabulary.TEXT)
    with pytest.raises(InvalidArgument, match=r"^image_url must have shape"):
        convert(rows, context_of(FakeEncoder(), hidden_size=6))
