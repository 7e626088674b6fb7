"""Prompts with pictures, compared with transformers' processor and whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.core.request.adapter import Matrix
from inflight.pictures.decode import read_picture
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.pictures.encoder import PictureEncoder
from tests.pictures.small_models import CASES, picture, placeholder, save_model

VOCAB_SIZE = 1000
WIDE, TALL = picture(30, 18), picture(13, 27, seed=1)


@dataclass(frozen=True)
class Case:
    name: str
    folder: Path
    whole: Any
    encoder: PictureEncoder

    @property
    def text(self) -> str:
        place = placeholder(self.name)
        return f"<s>Compare {place} with {place}, please."


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    if request.param == "lfm2-vl":
        pytest.importorskip("torchvision", exc_type=ImportError)
    folder = tmp_path_factory.mktemp(request.param)
    whole = save_model(folder, request.param)
    yield Case(request.param, folder, whole, PictureEncoder(str(folder)))


def as_tensor(matrix: Matrix) -> torch.Tensor:
    assert matrix.dtype == "float32"
    return torch.from_numpy(np.frombuffer(matrix.buffer.data, np.float32).copy()).reshape(matrix.shape)


def test_prompt_equals_the_whole_models(case: Case) -> None:
    pictures = [WIDE, TALL]
    made = case.encoder.encode(case.text, pictures, VOCAB_SIZE)
    processor = case.encoder._processor
    inputs = processor(
        text=[case.text],
        images=[read_picture(each, 0) for each in pictures],
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
    torch.testing.assert_close(as_tensor(made.table.rows), expected)
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
