"""The models as Triton calls them (initialize, execute, finalize) with a fake engine and real endpoint."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inflight.endpoint import client as endpoint_client
from inflight.errors import ConfigError
from inflight.tensors.word_lists import read_word_list
from inflight.testing import fake_server
from inflight.triton.models import engine
from inflight.triton.models.remote import Ensemble, Infer
from inflight.triton.models.text_models import Postprocessing, Preprocessing, TextModel
from tests.tensors.factories import text_inputs, token_inputs
from tests.triton.factories import make_model_config, make_triton_request, response_of
from tests.triton.fake_pb_utils import FakePbUtils, InferenceRequest, InferenceResponse, TritonError
from tests.triton.letters import letter_tokenizer, save_letter_tokenizer
from tests.triton.logging_restored import logging_restored


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePbUtils]:
    fake = FakePbUtils()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)
    with logging_restored():
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_letter_tokenizer(tmp_path)
    return tmp_path


def make_args(decoupled: bool = True, **parameters: str) -> dict[str, str]:
    config = make_model_config(decoupled=decoupled, **parameters)
    return {
        "model_name": "a_model",
        "model_version": "1",
        "model_repository": "",
        "model_config": json.dumps(config),
    }


@pytest.fixture
def engine_model(pb_utils: FakePbUtils, folder: Path) -> Iterator[engine.TritonPythonModel]:
    model = fake_server.TritonPythonModel()
    model.initialize(
        make_args(
            fake_engine="vocab=26,step_us=0",
            tokenizer_dir=str(folder),
            engine_endpoint=str(folder / "engine.sock"),
        )
    )
    yield model
    model.finalize()


def only_arrays(request: InferenceRequest) -> dict[str, np.ndarray]:
    (sent,) = request.sender.wait_final()
    assert sent.response is not None and not sent.response.has_error(), (
        sent.response and sent.response.error()
    )
    return sent.response.arrays()


def test_the_engine_model_serves_ids(engine_model: engine.TritonPythonModel) -> None:
    request = make_triton_request()
    assert engine_model.execute([request]) is None
    arrays = only_arrays(request)
    assert arrays["output_ids"].shape == (1, 1, 7) and len(arrays["text_output"].item()) == 7


def test_the_front_ends_return_the_engine_models_responses(
    engine_model: engine.TritonPythonModel, folder: Path
) -> None:
    by_ids = make_triton_request(token_inputs(input_ids=[letter_tokenizer().encode("hello")]))
    engine_model.execute([by_ids])
    expected = only_arrays(by_ids)["text_output"].item()

    args = {"tokenizer_dir": str(folder), "engine_endpoint": str(folder / "engine.sock")}
    for model_class, inputs in (
        (Infer, token_inputs(input_ids=None, text_input=b"hello")),
        (Ensemble, text_inputs(text_input=b"hello")),
    ):
        model = model_class()
        model.initialize(make_args(decoupled=model_class is Ensemble, **args))
        request = make_triton_request(inputs)
        model.execute([request])
        assert only_arrays(request)["text_output"].item() == expected
        model.finalize()


def test_a_front_end_loads_without_an_engine_and_answers_unavailable(
    pb_utils: FakePbUtils, tmp_path: Path
) -> None:
    model = Ensemble()
    model.initialize(make_args(engine_endpoint=str(tmp_path / "nobody.sock")))
    request = make_triton_request(text_inputs())
    model.execute([request])
    (sent,) = request.sender.wait_final()
    assert sent.response is not None
    error = sent.response.error()
    assert error is not None and error.code() == TritonError.UNAVAILABLE
    model.finalize()


@pytest.mark.parametrize(
    "model_class", [engine.TritonPythonModel, Infer, Ensemble, Preprocessing, Postprocessing]
)
def test_a_bad_parameter_fails_the_load(pb_utils: FakePbUtils, model_class: type) -> None:
    with pytest.raises(ConfigError, match="nonsense: got 'x'"):
        model_class().initialize(make_args(nonsense="x"))


def test_max_beam_width_bounds_requests(pb_utils: FakePbUtils, folder: Path) -> None:
    parameters = {"fake_engine": "vocab=26,step_us=0", "engine_endpoint": str(folder / "engine.sock")}
    model = fake_server.TritonPythonModel()
    model.initialize(make_args(max_beam_width="2", **parameters))
    refused, fine = (make_triton_request(token_inputs(beam_width=width)) for width in (3, 2))
    model.execute([refused, fine])
    (sent,) = refused.sender.wait_final()
    assert sent.response is not None and sent.response.error() is not None
    assert "beam_width must be at most 2" in sent.response.error().message()
    assert only_arrays(fine)["output_ids"].shape == (1, 2, 7)
    model.finalize()


def test_more_beams_than_slots_fail_the_load_with_the_reason(pb_utils: FakePbUtils, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_beam_width is 9; it can be at most max_batch_size \(8\)"):
        fake_server.TritonPythonModel().initialize(
            make_args(max_beam_width="9", fake_engine="vocab=26", engine_endpoint=str(folder / "e.sock"))
        )


def test_a_load_that_fails_leaves_no_thread(
    pb_utils: FakePbUtils, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: [started.append(thread), start(thread)])
    args = make_args(
        fake_engine="vocab=100",
        engine_endpoint=str(folder / "socket"),
        record_path=str(folder / "no" / "trace"),
    )
    with pytest.raises(ConfigError, match="record_path: cannot write"):
        fake_server.TritonPythonModel().initialize(args)
    assert not [thread for thread in started if thread.is_alive()]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"max_num_tokens": "4"}, "max_num_tokens is 4"), ({"max_beam_width": "9"}, "max_beam_width is 9")],
)
def test_a_load_with_contradicting_parameters_does_not_end_the_last_engine(
    engine_model: engine.TritonPythonModel, folder: Path, monkeypatch: pytest.MonkeyPatch, parameters, words
) -> None:
    monkeypatch.setattr(endpoint_client, "peer_has_this_parent", lambda connected: True)
    given = {"fake_engine": "vocab=26", "engine_endpoint": str(folder / "engine.sock")} | parameters
    with pytest.raises(ConfigError, match=words):
        fake_server.TritonPythonModel().initialize(make_args(**given))
    request = make_triton_request()
    engine_model.execute([request])
    assert only_arrays(request)["output_ids"].shape == (1, 1, 7)


def make_text_model(model_class: type[TextModel], folder: Path | None) -> TextModel:
    model = model_class()
    model.initialize(make_args(decoupled=False, **({"tokenizer_dir": str(folder)} if folder else {})))
    return model


def answer(model: TextModel, **inputs: np.ndarray) -> InferenceResponse:
    names = [spec.name for spec in model.outputs.specs]
    response = response_of(model, InferenceRequest(inputs, names))
    model.finalize()
    return response


def words(*texts: bytes) -> np.ndarray:
    return np.array([texts], dtype=np.object_)


def test_preprocessing_returns_ids_lengths_and_word_lists(pb_utils: FakePbUtils, folder: Path) -> None:
    arrays = answer(
        make_text_model(Preprocessing, folder),
        QUERY=words(b"abc"),
        REQUEST_OUTPUT_LEN=np.array([[9]], np.int32),
        STOP_WORDS_DICT=words(b"xy", b"", b"z"),
        END_ID=np.array([[5]], np.int32),
    ).arrays()
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "INPUT_ID": [[0, 1, 2]],
        "REQUEST_INPUT_LEN": [[3]],
        "DECODER_INPUT_ID": [[-1]],
        "REQUEST_DECODER_INPUT_LEN": [[1]],
        "EMBEDDING_BIAS": [[]],
        "REQUEST_OUTPUT_LEN": [[9]],
        "BAD_WORDS_IDS": [[[0], [-1]]],
        "STOP_WORDS_IDS": [[[23, 24, 25], [2, 3, -1]]],
        "OUT_END_ID": [[5]],
        "OUT_PAD_ID": [[-1]],
    }
    types = {name: array.dtype for name, array in arrays.items()}
    assert types.pop("EMBEDDING_BIAS") == np.float32
    assert set(types.values()) == {np.dtype(np.int32)}


def test_preprocessing_turns_words_into_a_bias(pb_utils: FakePbUtils, folder: Path) -> None:
    """A token counts as often as the words have it; there are as many values as the model has logits."""
    asked = {
        "QUERY": words(b"abc"),
        "EMBEDDING_BIAS_WORDS": words(b"bcb", b"", b"c"),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[2.0, 9.0, -0.5]], np.float32),
        "PAD_ID": np.array([[7]], np.int32),
        "PROMPT_TABLE_EXTRA_ID": np.array([[5]], np.uint64),
    }
    arrays = answer(make_text_model(Preprocessing, folder), **asked).arrays()
    (bias,) = arrays["EMBEDDING_BIAS"]
    assert {index: value for index, value in enumerate(bias) if value} == {1: 4.0, 2: 1.5}
    assert len(bias) == 27  # the tokenizer's size
    assert arrays["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, 0, 0]]
    assert arrays["DECODER_INPUT_ID"].tolist() == arrays["OUT_PAD_ID"].tolist() == [[7]]
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32}))
    arrays = answer(make_text_model(Preprocessing, folder), **asked).arrays()
    assert arrays["EMBEDDING_BIAS"].shape == (1, 32)


def test_preprocessing_puts_virtual_tokens_of_the_prompt_table_first(
    pb_utils: FakePbUtils, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32}))
    arrays = answer(
        make_text_model(Preprocessing, folder),
        QUERY=np.array([[b"abc"], [b"b"]], dtype=np.object_),
        PAD_ID=np.array([[7], [7]], np.int32),
        PROMPT_VOCAB_SIZE=np.array([[2], [1]], np.int32),
        PROMPT_TABLE_EXTRA_ID=np.array([[5], [2**64 - 1]], np.uint64),
    ).arrays()
    assert arrays["INPUT_ID"].tolist() == [[32, 33, 0, 1, 2], [32, 1, 7, 7, 7]]
    assert arrays["REQUEST_INPUT_LEN"].tolist() == [[5], [2]]
    assert arrays["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[5, 5, 0, 0, 0], [2**64 - 1, 0, 0, 0, 0]]


def test_preprocessing_of_a_table_needs_the_vocabulary_size(pb_utils: FakePbUtils, folder: Path) -> None:
    for rows, words_of_error in ((2, "config.json"), (-1, "got -1")):
        asked = {"QUERY": words(b"abc"), "PROMPT_VOCAB_SIZE": np.array([[rows]], np.int32)}
        error = answer(make_text_model(Preprocessing, folder), **asked).error()
        assert "PROMPT_VOCAB_SIZE" in str(error) and words_of_error in str(error)


def test_preprocessing_returns_the_tokenizers_end_and_pad_tokens(pb_utils: FakePbUtils, folder: Path) -> None:
    """tensorrtllm_backend does the same, so that a client that passes the ids on gets responses that end."""
    for settings, end_and_pad in (({}, [-1, -1]), ({"eos_token": "z"}, [25, 25])):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        arrays = answer(make_text_model(Preprocessing, folder), QUERY=words(b"abc")).arrays()
        assert [arrays[name].item() for name in ("OUT_END_ID", "OUT_PAD_ID")] == end_and_pad
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "z", "pad_token": "y"}))
    arrays = answer(make_text_model(Preprocessing, folder), QUERY=words(b"abc")).arrays()
    assert arrays["OUT_PAD_ID"].item() == 24


def test_postprocessing_returns_the_text_of_each_beam(pb_utils: FakePbUtils, folder: Path) -> None:
    arrays = answer(
        make_text_model(Postprocessing, folder),
        TOKENS_BATCH=np.array([[[0, 1, 2], [3, 4, 5]]], np.int32),
        SEQUENCE_LENGTH=np.array([[3, 1]], np.int32),
    ).arrays()
    assert arrays["OUTPUT"].tolist() == [b"abc", b"d"]


def test_postprocessing_takes_all_tokens_by_default(pb_utils: FakePbUtils, folder: Path) -> None:
    response = answer(make_text_model(Postprocessing, folder), TOKENS_BATCH=np.array([[[0, 1]]], np.int32))
    assert response.arrays()["OUTPUT"].tolist() == [b"ab"]


def test_postprocessing_answers_every_row_of_a_batch(pb_utils: FakePbUtils, folder: Path) -> None:
    ids = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    lengths = np.array([[2, 1], [0, 2], [2, 2]], np.int32)
    model = make_text_model(Postprocessing, folder)
    arrays = answer(model, TOKENS_BATCH=ids, SEQUENCE_LENGTH=lengths).arrays()
    assert arrays["OUTPUT"].tolist() == [b"ab", b"c", b"", b"gh", b"ij", b"kl"]
    whole = answer(make_text_model(Postprocessing, folder), TOKENS_BATCH=ids).arrays()
    assert whole["OUTPUT"].tolist() == [b"ab", b"cd", b"ef", b"gh", b"ij", b"kl"]


def test_preprocessing_answers_every_row_of_a_batch(pb_utils: FakePbUtils, folder: Path) -> None:
    arrays = answer(
        make_text_model(Preprocessing, folder),
        QUERY=np.array([[b"abc"], [b"d"]], np.object_),
        REQUEST_OUTPUT_LEN=np.array([[9], [8]], np.int32),
        STOP_WORDS_DICT=np.array([[b"xy", b"z"], [b"a", b""]], np.object_),
        PAD_ID=np.array([[4], [7]], np.int32),
    ).arrays()
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "INPUT_ID": [[0, 1, 2], [3, 7, 7]],
        "REQUEST_INPUT_LEN": [[3], [1]],
        "DECODER_INPUT_ID": [[4], [7]],
        "REQUEST_DECODER_INPUT_LEN": [[1], [1]],
        "EMBEDDING_BIAS": [[], []],
        "REQUEST_OUTPUT_LEN": [[9], [8]],
        "BAD_WORDS_IDS": [[[0], [-1]], [[0], [-1]]],
        "STOP_WORDS_IDS": [[[23, 24, 25], [2, 3, -1]], [[0, 0, 0], [1, -1, -1]]],
        "OUT_END_ID": [[-1], [-1]],
        "OUT_PAD_ID": [[4], [7]],
    }
    lists = arrays["STOP_WORDS_IDS"]
    assert [read_word_list(row, "stop_words_list") for row in lists] == [((23, 24), (25,)), ((0,),)]


BAD_TEXT_REQUESTS = [
    (Preprocessing, {}, "a value is required for QUERY"),
    (Preprocessing, {"QUERY": words(b"\xff")}, "QUERY must be UTF-8"),
    (
        Preprocessing,
        {"QUERY": np.array([[b"a"], [b"\xff"]], np.object_)},
        "row 1 of the batch: QUERY must be",
    ),
    (
        Preprocessing,
        {"QUERY": words(b"a"), "EMBEDDING_BIAS_WORDS": words(b"a", b"b")},
        "EMBEDDING_BIAS_WORDS has 2 texts and EMBEDDING_BIAS_WEIGHTS 0 weights",
    ),
    (
        Preprocessing,
        {"QUERY": words(b"a"), "DECODER_QUERY": words(b"b")},
        "DECODER_QUERY is not available in this version, because no model here has an encoder: got 'b', "
        'expected it left out or ""',
    ),
    (
        Preprocessing,
        {"QUERY": words(b"a"), "VIDEO_BYTES": np.zeros([1, 1, 2, 2, 3], np.uint8)},
        "VIDEO_BYTES is not available",
    ),
    (
        Preprocessing,
        {"QUERY": words(b"a"), "IMAGE_BYTES": np.zeros([1, 1, 2, 2, 3], np.uint8)},
        "IMAGE_BYTES needs the model's vocabulary size, which is unknown",
    ),
    (Postprocessing, {}, "a value is required for TOKENS_BATCH"),
    (
        Postprocessing,
        {"TOKENS_BATCH": np.zeros([1, 1, 2], np.int32), "SEQUENCE_LENGTH": np.array([[3]], np.int32)},
        "SEQUENCE_LENGTH must have one length from 0 to 2 for each of 1 beams",
    ),
    (
        Postprocessing,
        {
            "TOKENS_BATCH": np.zeros([2, 1, 2], np.int32),
            "SEQUENCE_LENGTH": np.array([[2], [3]], np.int32),
        },
        "row 1 of the batch: SEQUENCE_LENGTH must have one length from 0 to 2 for each of 1 beams",
    ),
    (
        Postprocessing,
        {"TOKENS_BATCH": np.zeros([2, 1, 2], np.int32), "SEQUENCE_LENGTH": np.array([[2]], np.int32)},
        "SEQUENCE_LENGTH has 1 rows and TOKENS_BATCH has 2",
    ),
]


@pytest.mark.parametrize(
    ("model_class", "inputs", "message"), BAD_TEXT_REQUESTS, ids=lambda part: str(part)[:30]
)
def test_a_bad_request_to_a_text_model_affects_no_other(
    pb_utils: FakePbUtils,
    folder: Path,
    model_class: type[TextModel],
    inputs: dict[str, np.ndarray],
    message: str,
) -> None:
    error = answer(make_text_model(model_class, folder), **inputs).error()
    assert error is not None and message in error.message()
    assert error.code() in (TritonError.INVALID_ARG, TritonError.UNSUPPORTED)


def test_text_models_without_a_tokenizer_load_and_refuse_requests(pb_utils: FakePbUtils) -> None:
    error = answer(make_text_model(Preprocessing, None), QUERY=words(b"abc")).error()
    assert error is not None and error.code() == TritonError.UNSUPPORTED
    assert "tokenizer_dir" in error.message()


def test_front_ends_import_no_torch() -> None:
    """Only the engine's process imports torch."""
    modules = "remote, text_models"
    code = f"from inflight.triton.models import {modules}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_model_py_is_one_import() -> None:
    for path in (Path(__file__).parents[2] / "model_repository").glob("*/1/model.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
        assert [alias.asname or alias.name for node in imports for alias in node.names] == [
            "TritonPythonModel"
        ]
