"""HTTP generate and generate_stream with bodies from documentation and load generators."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.clients import wait_for_several

from .conftest import PROMPT, WORD
from .wire import connect, flag, integer, real, requested, tensors, texts


def post(server, path: str, body: dict) -> tuple[int, str]:
    """Return HTTP status and body, like curl."""
    command = ["curl", "-sN", "-X", "POST", "-w", "\n%{http_code}", f"{server.http}/v2/models/{path}", "-d"]
    done = subprocess.run(
        [*command, json.dumps(body)], capture_output=True, text=True, check=True, timeout=60
    )
    text, status = done.stdout.rsplit("\n", 1)
    return int(status), text


def generate(server, body: dict) -> dict:
    status, text = post(server, "ensemble/generate", body)
    assert status == 200, text
    return json.loads(text)


def generate_stream(server, body: dict) -> list[dict]:
    status, text = post(server, "ensemble/generate_stream", body)
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def joined(events: list[dict]) -> str:
    return "".join(event["text_output"] for event in events)


@pytest.fixture(scope="module")
def plain(demo_server) -> str:
    """Return up to twenty tokens after the prompt."""
    body = {"text_input": PROMPT, "max_tokens": 20, "exclude_input_in_output": True}
    return generate(demo_server, body)["text_output"]


def test_an_empty_string_may_stand_for_no_words(demo_server, plain):
    """The body of tensorrtllm_backend's quick start has empty strings in place of lists."""
    answer = generate(
        demo_server, {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
    )
    assert answer["text_output"] == PROMPT + plain
    assert (answer["model_name"], answer["model_version"]) == ("ensemble", "1")


def test_words_may_be_lists_or_a_string(demo_server, plain):
    assert WORD in plain
    body = {"text_input": PROMPT, "max_tokens": 20, "pad_id": 2, "end_id": 2, "exclude_input_in_output": True}
    for words in ([WORD, "class"], WORD):
        without = generate(demo_server, {**body, "bad_words": words, "stop_words": ""})
        assert WORD not in without["text_output"]
        stopped = generate(demo_server, {**body, "bad_words": "", "stop_words": words})
        assert plain.startswith(stopped["text_output"]) and len(stopped["text_output"]) < len(plain)


def test_twenty_concurrent_requests_get_the_same_text(demo_server):
    body = {
        "text_input": PROMPT,
        "max_tokens": 20,
        "bad_words": "",
        "stop_words": "",
        "pad_id": 2,
        "end_id": 2,
    }
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: generate(demo_server, body)["text_output"], range(20)))
    assert len(set(answers)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_inputs_may_be_given_under_parameters(demo_server, plain, stream):
    """Bodies for multimodal models have the inputs under `parameters`, and an id."""
    parameters = {
        "max_tokens": 20,
        "beam_width": 1,
        "end_id": 0,
        "pad_id": 2,
        "top_k": 1,
        "top_p": 0,
        "stream": stream,
        "temperature": 0,
        "exclude_input_in_output": True,
    }

    def events() -> list[dict]:
        found = generate_stream(demo_server, {"id": "42", "text_input": PROMPT, "parameters": parameters})
        assert joined(found) == plain
        assert {event["id"] for event in found} == {"42"}
        return found

    if stream:
        wait_for_several(events)
    else:
        assert len(events()) == 1


def test_values_may_be_lists_of_one(demo_server, plain):
    """genai-perf sends lists of one value to this backend."""
    body = {
        "text_input": [PROMPT],
        "max_tokens": [20],
        "stream": [True],
        "exclude_input_in_output": [True],
        "min_length": [20],
    }
    wait_for_several(lambda: generate_stream(demo_server, body))
    del body["min_length"]
    assert joined(generate_stream(demo_server, body)) == plain


def test_the_text_may_be_a_list_of_one(demo_server, plain):
    """genai-perf sends the text as a list to generate_stream."""
    body = {"text_input": [PROMPT], "stream": True, "max_tokens": 20, "exclude_input_in_output": True}
    assert joined(generate_stream(demo_server, body)) == plain
    assert joined(generate_stream(demo_server, {**body, "text_input": PROMPT})) == plain


def stream_infer(server, model: str, arrays: dict[str, np.ndarray], names: tuple[str, ...] = ()) -> list:
    """Return all responses on a gRPC stream; the first error is raised."""
    received = []
    with connect(server, "grpc") as client:
        client.start_stream(callback=lambda result, error: received.append(error or result))
        client.async_stream_infer(model, tensors(grpc, arrays), outputs=requested(grpc, names))
        client.stop_stream()
    for result in received:
        if isinstance(result, Exception):
            raise result
    return received


def test_load_drivers_stream_text_over_grpc(demo_server, plain):
    """perf_analyzer makes these tensors from genai-perf's file."""
    arrays = {
        "text_input": texts(PROMPT),
        "max_tokens": integer(20),
        "stream": flag(True),
        "exclude_input_in_output": flag(True),
    }
    responses = stream_infer(demo_server, "ensemble", arrays)
    assert "".join(one.as_numpy("text_output")[0].decode() for one in responses) == plain
    assert all(one.as_numpy("text_output").shape == (1,) for one in responses)


def test_load_drivers_stream_ids_over_grpc(demo_server, prompt):
    """perf_analyzer makes these tensors from genai-perf's file for the engine."""
    arrays = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": integer(len(prompt)),
        "request_output_len": integer(20),
        "streaming": flag(True),
        "min_length": integer(20),
        "end_id": integer(0),
    }
    responses = stream_infer(demo_server, "tensorrt_llm", arrays)
    assert sum(one.as_numpy("sequence_length").item() for one in responses) == 20


LLMAPI = [
    ({"sampling_param_best_of": 1}, {}),
    ({"sampling_param_temperature": 0.7, "sampling_param_top_k": 20}, {"temperature": 0.7, "top_k": 20}),
    ({"sampling_param_top_p": 0.9, "sampling_param_seed": 3}, {"top_p": 0.9, "seed": 3}),
    ({"sampling_param_frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ({"sampling_param_presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"sampling_param_stop": ["return", "self"]}, {"stop_words": ["return", "self"]}),
]


@pytest.mark.parametrize(("given", "same_as"), LLMAPI, ids=lambda given: "+".join(given))
def test_sampling_params_set_the_ensembles_inputs(demo_server, given, same_as):
    body = {
        "text_input": PROMPT,
        "sampling_param_max_tokens": 20,
        "sampling_param_exclude_input_from_output": True,
    }
    same_body = {"text_input": PROMPT, "max_tokens": 20, "exclude_input_in_output": True}
    text = generate(demo_server, {**body, **given})["text_output"]
    assert text == generate(demo_server, {**same_body, **same_as})["text_output"]
    assert text and not text.startswith(PROMPT)


def test_sampling_params_can_request_metrics(demo_server):
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 5, "sampling_param_return_perf_metrics": True}
    answer = generate(demo_server, body)
    assert answer["arrival_time_ns"] > 0 and answer["text_output"].startswith(PROMPT)


def test_sampling_params_may_be_sent_as_tensors(demo_server):
    """llmapi_client.py sends two tensors; here they have this model's batch dimension."""
    arrays = {"text_input": texts(PROMPT), "sampling_param_max_tokens": integer(5)}
    arrays |= {"sampling_param_temperature": real(1.0), "sampling_param_top_k": integer(1)}
    (response,) = stream_infer(demo_server, "ensemble", arrays, ("text_output",))
    assert response.as_numpy("text_output")[0].decode().startswith(PROMPT)


UNKNOWN = {
    "image_url_input": "https://example.com/merlion.png",
    "decoder_text_input": "Once",
    "num_draft_tokens": 5,
    "max_token": 5,
    "stop_word": ["a"],
}


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_are_refused_by_name(demo_server, path, name):
    body = {"text_input": PROMPT, "max_tokens": 5, name: UNKNOWN[name]}
    status, text = post(demo_server, f"ensemble/{path}", body)
    assert status != 200 or path == "generate_stream"
    assert name in json.loads(text.strip().removeprefix("data: "))["error"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"image_url_input": texts("https://example.com/merlion.png")},
        {"decoder_text_input": texts("Once")},
        {"num_draft_tokens": integer(5)},
        {"use_draft_logits": flag(True)},
    ],
    ids=lambda arrays: next(iter(arrays)),
)
def test_unknown_tensors_are_refused_by_name(demo_server, arrays):
    request = {"text_input": texts(PROMPT), "max_tokens": integer(5), **arrays}
    with pytest.raises(InferenceServerException, match=next(iter(arrays))):
        stream_infer(demo_server, "ensemble", request)


def test_an_old_clients_extra_parameter_is_accepted(demo_server, prompt):
    """inflight_batcher_llm_client.py sends `Streaming` with every request that is not streamed."""
    received = []
    arrays = {"input_ids": np.array([prompt], np.int32), "request_output_len": integer(4)}
    with connect(demo_server, "grpc") as client:
        client.start_stream(callback=lambda result, error: received.append(error or result))
        client.async_stream_infer("tensorrt_llm", tensors(grpc, arrays), parameters={"Streaming": False})
        client.stop_stream()
    (answer,) = received
    assert answer.as_numpy("sequence_length").tolist() == [[len(prompt) + 4]]
