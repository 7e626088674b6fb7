"""Rows of pictures and their rotary positions on a real server, by the tensors of TensorRT-LLM's clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inflight.server.launch import TritonServer, serve
from tests.engine.pictures import Picture, expected_tokens, make_prompt, rotary_table
from tests.models.zoo import ZooModel, make_model

from .clients import ask
from .conftest import REPOSITORY

ENGINE = "tensorrt_llm"
NUM_POSITIONS = 128
"""TensorRT-LLM's clients send a row for each position that the model has."""


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> ZooModel:
    return make_model(tmp_path_factory.mktemp("vision") / "checkpoint", "qwen3-vl")


@pytest.fixture(scope="module")
def vision_server(vision_model: ZooModel, elsewhere: Path) -> Iterator[TritonServer]:
    """Start a server without the models that need a tokenizer."""
    repository = vision_model.folder.parent / "repository"
    shutil.copytree(
        REPOSITORY / ENGINE, repository / ENGINE, ignore=shutil.ignore_patterns("demo_model", "__pycache__")
    )
    settings = {"max_tokens_in_paged_kv_cache": "2048", "prompt_embedding_table_data_type": "TYPE_FP32"}
    with serve(repository, vision_model.folder, "float32", settings) as server:
        yield server


@pytest.mark.covers(
    "mrope_rotary_cos_sin", "mrope_position_deltas", "prompt_embedding_table", "prompt_table_extra_ids"
)
def test_a_prompt_with_pictures_gives_transformers_tokens(vision_server, vision_model) -> None:
    prompt = make_prompt(vision_model, (5, Picture(3, 4, 1), 6, Picture(2, 5, 2), 4), 2)
    rotary = rotary_table(vision_model, prompt)
    numbers = np.frombuffer(rotary.cos_sin.buffer.data, np.float32).reshape(-1, rotary.cos_sin.shape[1])
    padded = np.pad(numbers, ((0, NUM_POSITIONS - len(numbers)), (0, 0)))
    tensors = {
        "input_ids": list(prompt.token_ids),
        "request_output_len": 16,
        "prompt_embedding_table": prompt.rows[None].numpy(),
        "prompt_table_extra_ids": list(prompt.extra_ids),
        "mrope_rotary_cos_sin": padded.reshape(1, -1),
        "mrope_position_deltas": np.array([[prompt.delta]], np.int64),
        "exclude_input_in_output": True,
        "end_id": -1,
    }
    for _ in range(2):  # the second time with the first one's blocks
        (answer,) = ask(vision_server.grpc, **tensors)
        assert answer.error is None and answer.ids == expected_tokens(vision_model, prompt, 16)
    (refused,) = ask(vision_server.grpc, **tensors | {"mrope_position_deltas": np.array([[500]], np.int64)})
    assert "mrope_position_deltas must be in [-37, " in str(refused.error)
