"""Request parameters beside the declared inputs: known ones are applied, unknown ones are refused."""

from __future__ import annotations

import json
import urllib.error

import numpy as np
import pytest

from .clients import ask, generate, infer, unary

TEXT = {"text_input": "import os\n", "max_tokens": 4}
IDS = {"input_ids": [10, 11, 12], "request_output_len": 4}


def refusal(server, model: str = "ensemble", **body) -> str:
    with pytest.raises(urllib.error.HTTPError) as raised:
        generate(server.http, model, **body)
    assert raised.value.code == 400
    return json.load(raised.value)["error"]


@pytest.mark.parametrize(
    ("model", "body", "name", "said"),
    [
        ("ensemble", {"temprature": 0.5}, "temprature", "did you mean temperature?"),
        ("ensemble", {"image_url_input": "http://x/y.png"}, "image_url_input", "cannot be encoded"),
        ("ensemble", {"decoder_text_input": "x"}, "decoder_text_input", "not available"),
        ("ensemble", {"num_draft_tokens": 3}, "num_draft_tokens", "tensorrt_llm_draft_model_name"),
        ("ensemble", {"sampling_param_best_of": 2}, "sampling_param_best_of", "left out or 0 or 1"),
        ("ensemble", {"return_stop_reason": True}, "return_stop_reason", "not available"),
        ("ensemble", {"parameters": {"xyzzy": 1}}, "xyzzy", "it would be ignored"),
        ("ensemble", {"triton_trtllm_request_type": "context_only"}, "triton_trtllm_request_type", "not av"),
        ("preprocessing", {"QUERY": "a", "SUFFIX": "b"}, "SUFFIX", "it would be ignored"),
        ("preprocessing", {"QUERY": "a", "IMAGE_URL": "b"}, "IMAGE_URL", "cannot be encoded"),
    ],
)
def test_unknown_parameters_are_refused_by_name(demo_server, model, body, name, said) -> None:
    message = refusal(demo_server, model, **({} if model == "preprocessing" else TEXT), **body)
    assert name in message and said in message


@pytest.mark.parametrize(
    "body",
    [
        {"model": "ensemble", "id": "7"},
        {"parameters": {"temperature": 0.5, "priority": 0.75}},
        {"timeout": 60_000_000, "binary_data_output": False},
        {"sequence_id": 0, "sequence_start": False, "sequence_end": False},
        {"triton_enable_empty_final_response": True},
        {"Streaming": True},
        {"image_url_input": "", "decoder_text_input": "", "num_draft_tokens": 0},
    ],
)
def test_known_parameters_of_clients_are_accepted(demo_server, body) -> None:
    try:
        answer = generate(demo_server.http, **TEXT, **body)
    except urllib.error.HTTPError as error:
        pytest.fail(error.read().decode())
    assert answer["text_output"].startswith("import os\n")


def test_infer_with_tritons_own_parameters_is_accepted(demo_server) -> None:
    for call, url in ((infer, demo_server.http), (unary, demo_server.grpc)):
        beside = {"priority": 1, "timeout": 60_000_000, "sequence_id": 5, "sequence_start": True}
        result = call(url, beside={**beside, "parameters": {"Streaming": False}}, **IDS)
        assert result.as_numpy("output_ids").shape == (1, 1, 7)


NOT_NEUTRAL = [
    ("encoder_input_features", np.ones([1, 2, 2], np.float16)),
    ("encoder_output_lengths", np.array([[3]], np.int32)),
    ("decoder_input_ids", np.array([[1, 2]], np.int32)),
    ("decoder_input_lengths", np.array([[2]], np.int32)),
    ("cross_attention_mask", np.ones([1, 2, 2], np.bool_)),
    ("skip_cross_attn_blocks", np.array([[True]])),
    ("context_phase_params", np.ones([1, 4], np.uint8)),
]


@pytest.mark.parametrize(
    ("name", "value"), NOT_NEUTRAL, ids=lambda part: part if isinstance(part, str) else ""
)
def test_upstreams_inputs_of_other_models_are_declared_and_refused(demo_server, name, value) -> None:
    (answer,) = ask(demo_server.grpc, **IDS, **{name: value})
    reason = "no model here has an encoder"
    if name == "context_phase_params":
        reason = "this server computes both phases"
    assert f"{name} is not available in this version, because {reason}: got" in str(answer.error)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "tensorrt_llm_infer"])
def test_llmapis_names_set_the_same_controls(demo_server, model) -> None:
    usual = generate(demo_server.http, **TEXT, temperature=0.7, top_k=9, seed=3, exclude_input_in_output=True)
    named = {"temperature": 0.7, "top_k": 9, "seed": 3, "exclude_input_from_output": True, "max_tokens": 4}
    body = {f"sampling_param_{name}": value for name, value in named.items()}
    llmapi = generate(demo_server.http, model, text_input=TEXT["text_input"], streaming=False, **body)
    assert llmapi["text_output"] == usual["text_output"]
    short = generate(demo_server.http, model, text_input=TEXT["text_input"], max_tokens=4)
    assert short["text_output"].startswith(TEXT["text_input"])


@pytest.mark.covers(
    "return_cumulative_logprob", "cumulative_logprob", "return_finish_reason", "finish_reason"
)
def test_outputs_can_be_requested_by_llmapis_flags(demo_server) -> None:
    flags = {"return_cumulative_logprob": True, "return_log_probs": True}
    (answer,) = ask(demo_server.grpc, "ensemble", **TEXT, **flags)
    assert answer.outputs["cumulative_logprob"] == answer.outputs["cum_log_probs"] < 0
    assert "finish_reason" in answer.outputs
    (answer,) = ask(demo_server.grpc, "ensemble", **TEXT, return_finish_reason=False)
    assert "finish_reason" not in answer.outputs


def test_the_bias_of_preprocessing_equals_that_of_the_serving_models(demo_server) -> None:
    """The steps of upstream's ensemble run one after another, with words that change the output."""
    words = np.array([[b"print", b" return"]], np.object_)
    weights = np.array([[9.0, -9.0]], np.float32)
    steps = infer(
        demo_server.http,
        "preprocessing",
        QUERY=np.array([[b"def f(x):\n"]], np.object_),
        REQUEST_OUTPUT_LEN=np.array([[12]], np.int32),
        EMBEDDING_BIAS_WORDS=words,
        EMBEDDING_BIAS_WEIGHTS=weights,
    )
    handed_on = {
        "input_ids": "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
        "stop_words_list": "STOP_WORDS_IDS",
        "bad_words_list": "BAD_WORDS_IDS",
        "embedding_bias": "EMBEDDING_BIAS",
    }
    by_ids = infer(demo_server.http, **{name: steps.as_numpy(output) for name, output in handed_on.items()})
    by_text = infer(
        demo_server.http,
        text_input="def f(x):\n",
        request_output_len=12,
        embedding_bias_words=words,
        embedding_bias_weights=weights,
    )
    plain = infer(demo_server.http, text_input="def f(x):\n", request_output_len=12)
    ids = [result.as_numpy("output_ids").tolist() for result in (by_ids, by_text, plain)]
    assert ids[0] == ids[1] != ids[2]
