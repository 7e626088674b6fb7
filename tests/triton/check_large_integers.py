"""Integers from clients, however large, never become a size beyond the model's limits.

Run by test_large_integers.py, in a process of its own, as its memory is limited.
"""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from inflight.errors import InvalidArgument, RequestError
from inflight.tensors.input_table import INPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.requests import convert
from inflight.tensors.spec import TensorSpec, Vocabulary
from inflight.tensors.text_model_tables import POSTPROCESSING_INPUTS, PREPROCESSING_INPUTS
from inflight.tensors.wanted_outputs import Naming
from inflight.triton.models.text_models import Postprocessing, Preprocessing
from tests.tensors.factories import (
    ALL_OUTPUTS,
    make_context,
    make_description,
    make_limits,
    make_rows,
    text_inputs,
    token_inputs,
)
from tests.tensors.test_requests import Codes
from tests.triton.fake_pb_utils import FakePbUtils
from tests.triton.letters import save_letter_tokenizer
from tests.triton.test_models import answer, make_text_model, pb_utils, words  # noqa: F401 - a fixture

_INTEGERS = ("INT32", "INT64", "UINT8", "UINT64")
_ROOM_BYTES = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def little_memory() -> None:
    """Limit memory to a gigabyte more than is used, so that two billion elements raise MemoryError."""
    (kilobytes,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (int(kilobytes) * 1024 + _ROOM_BYTES, most))


def extremes(spec: TensorSpec) -> list[np.ndarray]:
    """Return a tensor with the largest number, and one with the smallest."""
    limits = np.iinfo(NUMPY_TYPES[spec.dtype])
    shape = [1, *(1 if length == -1 else length for length in spec.dims)]
    return [np.full(shape, value, NUMPY_TYPES[spec.dtype]) for value in (limits.max, limits.min)]


@pytest.mark.parametrize("vocabulary", Vocabulary, ids=lambda vocabulary: vocabulary.value)
def test_a_request_with_any_integer_is_read_or_refused(vocabulary: Vocabulary) -> None:
    inputs = token_inputs() if vocabulary is Vocabulary.TOKENS else text_inputs()
    context = make_context(naming=Naming(ALL_OUTPUTS, named=False), encoder=Codes())
    num_tried = 0
    for name, spec in INPUTS.declared(vocabulary):
        for value in extremes(spec) if spec.dtype in _INTEGERS else ():
            num_tried += 1
            try:
                (prompt,) = convert(make_rows({**inputs, name: value}, vocabulary), context)
            except RequestError as error:
                assert str(error)
            else:
                limits = context.description.limits
                assert prompt.request.max_sequence_length <= limits.max_sequence_length
                assert prompt.request.sampling.num_sequences <= limits.max_sequences_per_request
    assert num_tried > 40


def test_preprocessing_and_postprocessing_take_any_integer(pb_utils: FakePbUtils, tmp_path: Path) -> None:  # noqa: F811
    save_letter_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32, "max_position_embeddings": 64}))
    needed = {
        Preprocessing: {"QUERY": words(b"abc")},
        Postprocessing: {"TOKENS_BATCH": np.array([[[0, 1, 2]]], np.int32)},
    }
    for model, table in ((Preprocessing, PREPROCESSING_INPUTS), (Postprocessing, POSTPROCESSING_INPUTS)):
        for name, spec in table.declared(Vocabulary.TOKENS):
            for value in extremes(spec) if spec.dtype in _INTEGERS else ():
                response = answer(make_text_model(model, tmp_path), **{**needed[model], name: value})
                error = response.error()
                if error is None:
                    assert all(array.size <= 1024 for array in response.arrays().values())
                else:
                    assert name in str(error)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 16}, 16),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 256),
        ({}, 1 << 22),
    ],
)
def test_a_table_has_no_more_rows_than_a_prompt_has_tokens(
    pb_utils: FakePbUtils,  # noqa: F811
    tmp_path: Path,
    config: dict[str, object],
    most: int,
) -> None:
    save_letter_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32, **config}))
    for num_rows in (most + 1, 2**31 - 1):
        asked = {"QUERY": words(b"abc"), "PROMPT_VOCAB_SIZE": np.array([[num_rows]], np.int32)}
        error = answer(make_text_model(Preprocessing, tmp_path), **asked).error()
        assert f"PROMPT_VOCAB_SIZE must be in [0, {most}]" in str(error) and str(num_rows) in str(error)
    if most <= 256:
        asked["PROMPT_VOCAB_SIZE"] = np.array([[most]], np.int32)
        arrays = answer(make_text_model(Preprocessing, tmp_path), **asked).arrays()
        assert arrays["INPUT_ID"].shape == (1, most + 3)


def test_the_number_of_sequences_of_a_batch_is_bounded() -> None:
    description = make_description(limits=make_limits(max_sequences_per_request=8))
    context = make_context(description=description)
    ids = {"input_ids": [[5, 6], [7, 8]], "request_output_len": [[4], [4]]}
    fits = token_inputs(**ids, num_return_sequences=[[4], [4]])
    assert len(convert(make_rows(fits), context)) == 2
    wide = token_inputs(**ids, num_return_sequences=[[4], [5]])
    with pytest.raises(
        InvalidArgument, match=r"num_return_sequences: 2 prompts asked for 9 .* at most 8 \(max_"
    ):
        convert(make_rows(wide), context)
    alone = token_inputs(num_return_sequences=9)
    with pytest.raises(InvalidArgument, match=r"num_return_sequences: 1 prompt asked for 9 sequences"):
        convert(make_rows(alone), context)
