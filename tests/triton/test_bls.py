"""`tensorrt_llm_bls` as Triton calls it, with two fake engines behind real endpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.testing import fake_server
from inflight.triton.models.remote import Bls, Ensemble
from tests.tensors.factories import text_inputs
from tests.triton.factories import make_triton_request
from tests.triton.fake_pb_utils import FakePbUtils, InferenceRequest, Sent, TritonError
from tests.triton.letters import save_letter_tokenizer
from tests.triton.logging_restored import logging_restored
from tests.triton.stage import error_of, value_of
from tests.triton.test_models import make_args

ENGINES = ("tensorrt_llm", "tensorrt_llm_draft")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Folder of the engines' sockets and the tokenizer."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils())
    save_letter_tokenizer(tmp_path)
    with logging_restored():
        yield tmp_path


@pytest.fixture
def engines(folder: Path) -> Iterator[None]:
    """A target and an equally good draft model."""
    models = [fake_server.TritonPythonModel() for _ in ENGINES]
    for name, model in zip(ENGINES, models):
        # There are more tokens than letters: text has only letters, ids may be any token.
        args = {"fake_engine": "vocab=26,step_us=0", "tokenizer_dir": str(folder)}
        model.initialize(make_args(**args, engine_endpoint=str(folder / f"{name}.sock")))
    yield
    for model in models:
        model.finalize()


def make_bls(folder: Path, model_class: type = Bls, decoupled: bool = True, **parameters: str) -> Bls:
    model = model_class()
    paths = {"engine_endpoint": str(folder / "tensorrt_llm.sock"), "tokenizer_dir": str(folder)}
    model.initialize(make_args(decoupled, **paths, **parameters))
    return model


@pytest.fixture
def bls(engines: None, folder: Path) -> Iterator[Bls]:
    model = make_bls(folder, **with_draft(folder))
    yield model
    model.finalize()


def with_draft(folder: Path) -> dict[str, str]:
    draft = str(folder / "tensorrt_llm_draft.sock")
    return {"tensorrt_llm_draft_model_name": "tensorrt_llm_draft", "draft_engine_endpoint": draft}


def ask(model: Ensemble, **tensors: object) -> list[Sent]:
    request = make_triton_request(text_inputs(**{"max_tokens": 12} | tensors))
    model.execute([request])
    return list(request.sender.wait_final())


def texts(answers: list[Sent]) -> list[bytes]:
    return [value_of(answer, "text_output")[0] for answer in answers if answer.response is not None]


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("excluded", [False, True])
def test_drafted_text_equals_that_of_the_target_model_alone(bls: Bls, weighs: bool, excluded: bool) -> None:
    (plain,) = ask(bls, exclude_input_in_output=excluded)
    (drafted,) = ask(bls, num_draft_tokens=4, use_draft_logits=weighs, exclude_input_in_output=excluded)
    for name in ("text_output", "finish_reason"):
        assert value_of(drafted, name) == value_of(plain, name)
    assert value_of(plain, "text_output")[0].startswith(b"hello") is not excluded


def test_drafted_and_accepted_tokens_are_counted(bls: Bls) -> None:
    (answer,) = ask(bls, num_draft_tokens=5, return_perf_metrics=True, return_num_output_tokens=True)
    counts = [value_of(answer, f"total_{name}draft_tokens")[0] for name in ("", "accepted_")]
    assert counts == [10, 10] and value_of(answer, "acceptance_rate") == [1.0]
    assert value_of(answer, "num_output_tokens") == [12]


def test_a_stream_has_one_response_per_drafting_round_unless_merged(bls: Bls) -> None:
    (whole,) = texts(ask(bls, exclude_input_in_output=True))
    streamed = texts(ask(bls, num_draft_tokens=3, stream=True))
    assert len(streamed) <= 3 and b"".join(streamed) == whole


def test_a_stop_string_ends_a_drafted_stream_between_rounds(bls: Bls) -> None:
    (whole,) = texts(ask(bls, exclude_input_in_output=True))
    stop = whole[5:7]
    (stopped,) = ask(bls, num_draft_tokens=3, exclude_input_in_output=True, stop_words=[[stop]])
    assert value_of(stopped, "text_output") == [whole[: whole.index(stop)]]
    assert value_of(stopped, "finish_reason") == [b"STOP_WORDS"]


@pytest.mark.parametrize("num_draft_tokens", [None, 3])
def test_accumulated_texts_continue_each_other_and_end_with_the_whole(
    engines: None, folder: Path, num_draft_tokens: int | None
) -> None:
    model = make_bls(folder, accumulate_tokens="true", **with_draft(folder))
    (whole,) = texts(ask(model, exclude_input_in_output=True))
    streamed = texts(ask(model, stream=True, num_draft_tokens=num_draft_tokens))
    assert streamed[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in pairwise(streamed))
    # With a stop string, too, the last response has the whole text.
    stop = whole[5:7]
    streamed = texts(ask(model, stream=True, stop_words=[[stop]], num_draft_tokens=num_draft_tokens))
    assert streamed[-1] == whole[: whole.index(stop)]
    model.finalize()


def test_a_model_that_is_not_decoupled_sends_one_response(engines: None, folder: Path) -> None:
    model = make_bls(folder, decoupled=False, **with_draft(folder))
    (plain,), (drafted,) = ask(model), ask(model, num_draft_tokens=4)
    assert value_of(drafted, "text_output") == value_of(plain, "text_output")
    model.finalize()


def test_prompts_of_a_batch_are_drafted_separately(bls: Bls) -> None:
    answers = ask(
        bls,
        text_input=[[b"hello"], [b"world"]],
        max_tokens=[[8], [8]],
        num_draft_tokens=[[3], [0]],
        exclude_input_in_output=[[True], [True]],
    )
    by_prompt = {value_of(each, "batch_index")[0]: value_of(each, "text_output")[0] for each in answers}
    for index, prompt in enumerate((b"hello", b"world")):
        assert texts(ask(bls, text_input=prompt, max_tokens=8, exclude_input_in_output=True)) == [
            by_prompt[index]
        ]


def test_options_unsupported_with_drafts_are_refused_by_the_clients_names(bls: Bls) -> None:
    for tensors, said in (
        ({"num_draft_tokens": 3, "beam_width": 2}, "num_draft_tokens is 3: leave beam_width out then"),
        ({"num_draft_tokens": 3, "top_p": 0.5, "top_p_decay": 0.5}, "leave top_p_decay out then"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be in [0, "),
        ({"use_draft_logits": True}, "use_draft_logits is true, but num_draft_tokens is missing or 0"),
    ):
        (refused,) = ask(bls, **tensors)
        code, message = error_of(refused)
        assert code == TritonError.INVALID_ARG and said in message, message


@pytest.mark.parametrize("model_class", [Bls, Ensemble])
def test_drafting_without_a_draft_model_is_refused_with_the_parameters_name(
    engines: None, folder: Path, model_class: type
) -> None:
    model = make_bls(folder, model_class)
    (refused,) = ask(model, num_draft_tokens=3)
    code, message = error_of(refused)
    assert code == TritonError.UNSUPPORTED and "tensorrt_llm_draft_model_name" in message
    assert len(ask(model, num_draft_tokens=0, use_draft_logits=False)) == 1
    model.finalize()


def test_a_draft_model_that_is_not_there_is_unavailable_and_the_target_serves(
    engines: None, folder: Path
) -> None:
    nobody = {**with_draft(folder), "draft_engine_endpoint": str(folder / "nobody.sock")}
    model = make_bls(folder, **nobody)
    (refused,) = ask(model, num_draft_tokens=3)
    code, message = error_of(refused)
    assert code == TritonError.UNAVAILABLE and "num_draft_tokens needs the draft model" in message
    assert b"hello" in texts(ask(model))[0]
    model.finalize()


def test_a_cancelled_request_ends_with_an_error(bls: Bls) -> None:
    request = make_triton_request(text_inputs(max_tokens=3000, num_draft_tokens=1, stream=True))
    bls.execute([request])
    request.sender.cancelled = True
    last = request.sender.wait_final()[-1]
    assert error_of(last)[0] == TritonError.CANCELLED


def test_many_requests_are_in_flight_at_once(bls: Bls) -> None:
    (alone,) = texts(ask(bls))
    requests: list[InferenceRequest] = [
        make_triton_request(text_inputs(max_tokens=12, num_draft_tokens=number % 4)) for number in range(12)
    ]
    bls.execute(requests)
    for request in requests:
        assert texts(list(request.sender.wait_final())) == [alone]


def test_an_endpoint_without_a_models_name_fails_the_load(folder: Path) -> None:
    with pytest.raises(ConfigError, match="draft_engine_endpoint is set without tensorrt_llm_draft_model"):
        make_bls(folder, draft_engine_endpoint="/nowhere.sock")
