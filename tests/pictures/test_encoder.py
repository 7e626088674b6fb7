"""Prompts with pictures, compared with transformers' processor and whole model."""

from __future__ import annotations

import ast
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from inflight.config import SpecialTokens
from inflight.core.request.adapter import Matrix
from inflight.errors import ConfigError, InvalidArgument
from inflight.pictures import decode
from inflight.pictures.decode import read_pictures
from inflight.pictures.encoded_prompt import MAX_PICTURE_BYTES, EncodedPrompt
from inflight.pictures.encoder import PictureEncoder
from inflight.text.tokenizer import Tokenizer
from tests.pictures.small_models import CASES, SmallModel, picture, placeholder, save_model
from tests.tiers import with_all

VOCAB_SIZE = 1000
WIDE, TALL = picture(30, 18), picture(13, 27, seed=1)


class Case(SmallModel):
    @property
    def text(self) -> str:
        return f"<s>Compare {self.place} with {self.place}, please."


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    whole = save_model(folder, request.param)
    yield Case(request.param, folder, whole, PictureEncoder(str(folder)))


def as_tensor(matrix: Matrix) -> torch.Tensor:
    assert matrix.dtype == "float32"
    return torch.from_numpy(np.frombuffer(matrix.buffer.data, np.float32).copy()).reshape(matrix.shape)


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_prompt_equals_the_whole_models(case: Case) -> None:
    pictures = [WIDE, TALL]
    made = case.encoder.encode(case.text, pictures, VOCAB_SIZE)
    processor = case.encoder._processor
    inputs = processor(
        text=[case.text],
        images=list(read_pictures(dict(enumerate(pictures))).values()),
        add_special_tokens=False,
        return_tensors="pt",
    )
    ids = inputs.pop("input_ids")[0]
    check_tokens(made, ids.tolist(), case.whole.config.image_token_id)
    mask = inputs.pop("mm_token_type_ids", None)
    del inputs["attention_mask"]
    with torch.inference_mode():
        features = case.whole.get_image_features(**inputs, return_dict=True)
    levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    expected = torch.cat([torch.cat([part.flatten(0, -2) for part in level]) for level in levels], -1)
    scale = getattr(case.whole.get_input_embeddings(), "embed_scale", 1.0)  # the engine multiplies by it
    torch.testing.assert_close(as_tensor(made.table.rows) * scale, expected)
    assert (made.rotary is not None) == case.name.startswith("qwen")
    if made.rotary is not None:
        check_rotary(made, case.whole, ids, mask, inputs["image_grid_thw"])


def check_tokens(made: EncodedPrompt, ids: list[int], image_token_id: int) -> None:
    virtual = [at for at, token_id in enumerate(ids) if token_id == image_token_id]
    expected = list(ids)
    for row, at in enumerate(virtual):
        expected[at] = VOCAB_SIZE + row
    assert list(made.token_ids) == expected
    assert [at for at, extra_id in enumerate(made.extra_ids) if extra_id] == virtual
    assert sum(made.num_picture_tokens) == made.table.num_rows == len(virtual)
    assert len(set(made.extra_ids)) == len(virtual) + 1


def check_rotary(
    made: EncodedPrompt, whole: Any, ids: torch.Tensor, mask: torch.Tensor, grids: torch.Tensor
) -> None:
    positions, delta = whole.model.get_rope_index(ids[None], mask, grids)
    cos, sin = whole.model.language_model.rotary_emb(torch.zeros(1), positions)
    assert made.rotary is not None
    assert made.rotary.delta == int(delta) < 0
    table = as_tensor(made.rotary.cos_sin)
    num_angles = table.shape[1] // 2
    torch.testing.assert_close(torch.cat([table[:, 0::2]] * 2, -1), cos[0])
    torch.testing.assert_close(table[:, 1::2], sin[0, :, :num_angles])


def test_merged_patches_are_those_that_transformers_merges(tmp_path: Path) -> None:
    """transformers' processor of Gemma 4 12B needs torchvision to be imported, but its functions do not."""
    save_model(tmp_path, "gemma4-unified")
    place = Path(transformers.__file__).parent / "models/gemma4_unified/image_processing_gemma4_unified.py"
    functions: dict[str, Any] = {"torch": torch, "math": math}
    for node in ast.parse(place.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            exec(compile(ast.Module([node], []), str(place), "exec"), functions)
    encoder = PictureEncoder(str(tmp_path))
    image = read_pictures({0: WIDE})[0]
    made = encoder._processor(text=[encoder.placeholder], images=[image], return_tensors="pt")
    height, width = functions["get_aspect_ratio_preserving_size"](18, 30, 4, 70 * 4, 2)
    pixels = np.array(image.resize((width, height), Image.Resampling.BICUBIC))
    patches = functions["convert_image_to_patches"](torch.from_numpy(pixels).permute(2, 0, 1) / 255, 4)
    grid = torch.meshgrid(torch.arange(width // 4), torch.arange(height // 4), indexing="xy")
    positions = torch.stack(grid, -1).reshape(-1, 2)
    merged, places = functions["patches_merge"](patches, positions, len(patches) // 4)
    merged, places = functions["pad_along_first_dim"](merged, places, 70)
    torch.testing.assert_close(made["pixel_values"][0], merged)
    assert made["image_position_ids"][0].tolist() == places.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-vl")
    save_model(folder, "qwen3-vl")
    return folder


@pytest.fixture
def encoder(folder: Path) -> PictureEncoder:
    return PictureEncoder(str(folder))


PLACE = placeholder("qwen3-vl")


def counts(encoder: PictureEncoder) -> tuple[int, int]:
    stats = encoder.stats()
    return stats.num_encoded, stats.num_cache_hits


def extra_ids(made: EncodedPrompt) -> list[int]:
    return [extra_id for extra_id in made.extra_ids if extra_id]


def test_language_model_is_not_loaded(folder: Path, encoder: PictureEncoder) -> None:
    names = [name for name, _ in encoder._tower._model.named_parameters() if "visual" not in name]
    parameters = dict(encoder._tower._model.named_parameters())
    assert (
        sum(parameters[name].numel() for name in names) <= 3 * 64
    )  # embedding, norm and output of one token


def test_a_tied_output_projection_may_be_stored(tmp_path: Path, folder: Path) -> None:
    """Some files of models with tied embeddings have both tensors."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    encoders = [PictureEncoder(str(each)) for each in (folder, copy)]
    rows = [encoder.encode(f"a {PLACE}", [WIDE], VOCAB_SIZE).table.rows for encoder in encoders]
    assert rows[0] == rows[1]


def test_a_picture_is_encoded_once(encoder: PictureEncoder) -> None:
    first = encoder.encode(PLACE, [WIDE], VOCAB_SIZE)
    assert encoder.encode(PLACE, [WIDE], VOCAB_SIZE) == first
    assert counts(encoder) == (1, 1)
    both = encoder.encode(f"{PLACE} and {PLACE} and {PLACE}", [TALL, WIDE, TALL], VOCAB_SIZE)
    assert counts(encoder) == (2, 3)
    num_tall, num_wide, _ = both.num_picture_tokens
    assert extra_ids(both)[num_tall : num_tall + num_wide] == extra_ids(first)
    assert extra_ids(both)[:num_tall] == extra_ids(both)[num_tall + num_wide :]
    rows = as_tensor(both.table.rows)
    assert rows[num_tall : num_tall + num_wide].equal(as_tensor(first.table.rows))


def test_the_tower_gets_the_new_pictures_of_a_prompt_as_one_batch(
    encoder: PictureEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    rows = encoder._tower.rows

    def record(inputs: Mapping[str, Any]) -> torch.Tensor:
        batches.append(inputs["image_grid_thw"].tolist())
        return rows(inputs)

    monkeypatch.setattr(encoder._tower, "rows", record)
    for file in (WIDE, TALL):
        encoder.encode(PLACE, [file], VOCAB_SIZE)
    others = [picture(30, 18, seed=4), picture(13, 27, seed=5)]
    encoder.encode(f"{PLACE} {PLACE} {PLACE}", [others[0], WIDE, others[1]], VOCAB_SIZE)
    assert batches[2:] == [batches[0] + batches[1]]


def test_least_recently_used_pictures_leave_the_cache(folder: Path) -> None:
    size = PictureEncoder(str(folder))
    size.encode(PLACE, [WIDE], VOCAB_SIZE)
    num_bytes = size.stats().cached_bytes
    encoder = PictureEncoder(str(folder), cache_bytes=2 * num_bytes)
    others = [picture(30, 18, seed) for seed in (2, 3)]
    for files in ([WIDE], others[:1], [WIDE], others[1:]):
        encoder.encode(PLACE, files, VOCAB_SIZE)
    assert encoder.stats().cached_bytes == 2 * num_bytes
    encoder.encode(PLACE, [WIDE], VOCAB_SIZE)
    assert counts(encoder) == (3, 2)
    encoder.encode(PLACE, others[:1], VOCAB_SIZE)
    assert counts(encoder) == (4, 2)


def test_ids_are_of_the_picture_and_its_processing(
    tmp_path: Path, folder: Path, encoder: PictureEncoder
) -> None:
    made = encoder.encode(PLACE, [WIDE], VOCAB_SIZE)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    again = PictureEncoder(str(tmp_path)).encode(PLACE, [WIDE], VOCAB_SIZE)
    assert extra_ids(again) == extra_ids(made)
    assert made.table.key == made.rotary.key == b""  # type: ignore[union-attr]
    other = encoder.encode(PLACE, [picture(30, 18, seed=2)], VOCAB_SIZE)
    rounded = PictureEncoder(str(folder), dtype="bfloat16").encode(PLACE, [WIDE], VOCAB_SIZE)
    for ids in (extra_ids(other), extra_ids(rounded)):
        assert len(ids) == len(extra_ids(made)) and not set(ids) & set(extra_ids(made))
    assert rounded.table.rows.dtype == "bfloat16"


def test_text_is_tokenized_by_the_own_tokenizer(folder: Path, encoder: PictureEncoder) -> None:
    text = f"<s>Größe: {PLACE}</s>"
    made = encoder.encode(text, [WIDE], VOCAB_SIZE)
    places = PLACE * made.num_picture_tokens[0]
    expected = Tokenizer.from_dir(folder).encode(text.replace(PLACE, places), add_special_tokens=False)
    texts = [token_id for token_id in made.token_ids if token_id < VOCAB_SIZE]
    assert texts == [token_id for token_id in expected if token_id != encoder._image_token_id]


def test_numbers_of_places_and_pictures_must_agree(encoder: PictureEncoder) -> None:
    for text, files in ((PLACE, []), ("text", [WIDE]), (f"{PLACE} " * 3, [WIDE, TALL]), ("text", [])):
        with pytest.raises(InvalidArgument) as error:
            encoder.encode(text, files, VOCAB_SIZE)
        assert f"has {text.count(PLACE)} places for pictures" in str(error.value)
        assert f"but {len(files)} pictures" in str(error.value)


def test_pictures_with_nothing_between_them_are_refused(encoder: PictureEncoder) -> None:
    with pytest.raises(InvalidArgument, match="two pictures without a token between them"):
        encoder.encode(PLACE * 2, [WIDE, TALL], VOCAB_SIZE)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "is not a picture of a known format"),
        (b"no picture", "is not a picture of a known format"),
        (WIDE[:200], "cannot be decoded: "),
        (b"\0" * (MAX_PICTURE_BYTES + 1), "bytes; at most"),
        (picture(4000, 2), "cannot be processed: absolute aspect ratio must be smaller than 200"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "is not a picture of a known format"),
    ],
)
def test_errors_name_the_picture(encoder: PictureEncoder, file: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"pictures\[1\] .*{reason}") as error:
        encoder.encode(f"{PLACE} {PLACE}", [WIDE, file], VOCAB_SIZE)
    assert error.value.names == ("pictures[1]",)


def test_a_text_may_not_have_the_token_of_a_row(tmp_path: Path) -> None:
    """Gemma 3's placeholder is another token; with the others' the number of places would be wrong."""
    save_model(tmp_path, "gemma3-vision")
    text = f"{placeholder('gemma3-vision')} and <image_soft_token>"
    with pytest.raises(InvalidArgument, match="the prompt has <image_soft_token>, which stands for a row"):
        PictureEncoder(str(tmp_path)).encode(text, [WIDE], VOCAB_SIZE)


@pytest.mark.parametrize("case", with_all(["qwen3-vl", "mistral3", "pixtral"], ["mistral3"]), indirect=True)
def test_a_picture_may_have_a_single_row(case: Case) -> None:
    place, tiny = placeholder(case.name), picture(1, 1)
    both = PictureEncoder(str(case.folder)).encode(f"{place} {place}", [tiny, WIDE], VOCAB_SIZE)
    alone = case.encoder.encode(place, [tiny], VOCAB_SIZE)
    assert alone.num_picture_tokens == (1,) == both.num_picture_tokens[:1]
    torch.testing.assert_close(as_tensor(alone.table.rows), as_tensor(both.table.rows)[:1])


@pytest.mark.parametrize("factor", [1.5, 3])
def test_pictures_with_too_many_pixels_are_refused(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(30 * 18 / factor))
    with pytest.raises(InvalidArgument, match=r"pictures\[4\] has too many pixels"):
        read_pictures({4: WIDE})


def test_all_pixels_of_a_prompt_have_a_limit(
    encoder: PictureEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that occurs twice, or whose rows are known, is not decoded."""
    most = 30 * 18 + 13 * 27
    monkeypatch.setattr(decode, "MAX_PIXELS", most - 1)
    encoder.encode(f"{PLACE} {PLACE}", [WIDE, WIDE], VOCAB_SIZE)
    encoder.encode(f"{PLACE} {PLACE}", [WIDE, TALL], VOCAB_SIZE)
    message = f"pictures: {most} pixels in the pictures of one prompt together; at most {most - 1} are taken"
    with pytest.raises(InvalidArgument, match=message):
        read_pictures({0: WIDE, 1: TALL})


def test_too_many_pixels_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 2 * 30 * 18 - 1)
    monkeypatch.setattr(decode, "_decode", lambda image: pytest.fail("a picture was decoded"))
    with pytest.raises(InvalidArgument, match="1080 pixels"):
        read_pictures({0: WIDE, 1: picture(30, 18, seed=2)})


def test_pictures_are_turned_as_their_camera_was() -> None:
    file = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (30, 18)).save(file, "JPEG", exif=exif)
    assert read_pictures({0: file.getvalue()})[0].size == (18, 30)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("lfm2_vl", "transformers processes them by torchvision"),
        ("llama", "expected one of qwen2_vl, "),
    ],
)
def test_other_models_are_refused(tmp_path: Path, model_type: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"pictures of {model_type} are not served.*{reason}"):
        PictureEncoder(str(tmp_path))


def test_checkpoint_without_its_tower_is_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "merger" not in name}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks \d+ weights of the vision tower: model.visual"):
        PictureEncoder(str(tmp_path))


def test_pictures_precede_a_clients_text_without_placeholders(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3-vl")
    encoder = PictureEncoder(str(tmp_path), "float32")
    alone = f"<|vision_start|>{encoder.placeholder}<|vision_end|>"
    expected = encoder.encode(f"{alone}{alone}Which?", [WIDE, TALL], VOCAB_SIZE)
    assert encoder.encode("Which?", [WIDE, TALL], VOCAB_SIZE, SpecialTokens.LEFT_OUT) == expected
