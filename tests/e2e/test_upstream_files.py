"""A repository made by tensorrtllm_backend's README: templates copied, filled in and served."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from inflight.server.launch import TritonServer, serve
from inflight.triton.config_pbtxt import TEMPLATES
from tests.triton.upstream_files import (
    ENSEMBLE_OUTPUTS,
    QUICK_START,
    engine_config,
    ensemble_config,
    fill_template,
)

from .clients import generate, infer, unary
from .conftest import DEMO_MODEL

# Further settings, which the README leaves to the user.
MORE = {"tensorrt_llm": ",normalize_log_probs:True,decoding_mode:auto,lora_cache_max_adapter_size:64"}
PROMPT = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def filled_server(elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("upstream") / "triton_model_repo"
    shutil.copytree(Path(__file__).parents[2] / TEMPLATES, repository)
    for name, arguments in QUICK_START:
        path = repository / name / "config.pbtxt"
        arguments = arguments.replace("/models/x", str(DEMO_MODEL)).replace("TYPE_FP32", "TYPE_FP16")
        text = fill_template(path.read_text(encoding="utf-8"), arguments + MORE.get(name, ""))
        path.write_text(text, encoding="utf-8")
    with serve(model_repository=repository) as server:
        yield server


def test_the_filled_in_repository_serves_text_and_logs_parameters_without_effect(
    filled_server: TritonServer,
) -> None:
    answer = generate(filled_server.http, text_input="import os\n", max_tokens=8, bad_words="", stop_words="")
    assert answer["text_output"].startswith("import os\n")
    log = filled_server.log_text()
    assert "parameter decoding_mode is 'auto' and has no effect: the mode follows from each request's " in log
    assert (
        "parameter triton_backend is 'tensorrtllm' and has no effect: there is only one implementation" in log
    )


def test_tritons_configuration_has_the_filled_in_values(filled_server: TritonServer) -> None:
    client = http.InferenceServerClient(filled_server.http)
    for name, _ in QUICK_START:
        assert client.get_model_config(name)["max_batch_size"] == 4
    assert not client.get_model_config("tensorrt_llm")["model_transaction_policy"]["decoupled"]
    client.close()


def test_normalized_log_probs_of_greedy_tokens_are_zero_and_cum_log_probs_are_not_normalized(
    filled_server: TritonServer,
) -> None:
    asked = {"input_ids": PROMPT, "request_output_len": 6, "return_log_probs": True}
    greedy = infer(filled_server.http, "tensorrt_llm", **asked)
    assert greedy.as_numpy("output_log_probs").tolist() == [[[0.0] * 6]]
    assert greedy.as_numpy("cum_log_probs").item() < 0
    sampled = infer(filled_server.http, "tensorrt_llm", **asked, runtime_top_k=3, random_seed=5)
    (log_probs,) = sampled.as_numpy("output_log_probs")[0]
    assert (log_probs <= 0).all() and (log_probs < 0).any()
    assert sampled.as_numpy("cum_log_probs").item() < log_probs.sum()


def test_logits_have_the_filled_in_type(filled_server: TritonServer) -> None:
    answer = infer(
        filled_server.http, "tensorrt_llm", input_ids=PROMPT, request_output_len=2, return_context_logits=True
    )
    logits = answer.as_numpy("context_logits")
    assert logits.dtype == np.float16 and np.isfinite(logits).all()


@pytest.fixture(scope="module")
def server_of_upstreams_files(
    elsewhere: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Three of this project's models with tensorrtllm_backend's own config.pbtxt of `tensorrt_llm`, and its own
    `ensemble`, which Triton runs."""
    repository = tmp_path_factory.mktemp("upstream") / "theirs"
    for name, arguments in QUICK_START:
        if name in ("preprocessing", "tensorrt_llm", "postprocessing"):
            shutil.copytree(Path(__file__).parents[2] / TEMPLATES / name, repository / name)
            path = repository / name / "config.pbtxt"
            arguments = arguments.replace("/models/x", str(DEMO_MODEL))
            path.write_text(fill_template(path.read_text(encoding="utf-8"), arguments), encoding="utf-8")
    parameters = {"gpt_model_path": str(DEMO_MODEL), "gpt_model_type": "inflight_fused_batching"}
    text = engine_config(parameters, logits_type="TYPE_FP32")
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(text, encoding="utf-8")
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text(ensemble_config(), encoding="utf-8")
    with serve(model_repository=repository) as server:
        yield server


@pytest.mark.parametrize("flags", [{}, {"return_context_logits": False, "return_generation_logits": False}])
def test_an_ensemble_that_names_every_output_gets_the_flagged_ones(
    server_of_upstreams_files: TritonServer, flags: dict[str, bool]
) -> None:
    text = {"text_input": "import os\n", "max_tokens": 4, **flags}
    for ask in (infer, unary):
        url = server_of_upstreams_files.http if ask is infer else server_of_upstreams_files.grpc
        plain = ask(url, "ensemble", **text)
        assert plain.as_numpy("text_output").item().startswith(b"import os\n")
        full = {"text_output", "batch_index", "sequence_index"}
        for name in [name for name, _, _ in ENSEMBLE_OUTPUTS if name not in (*full, *_INSIDE)]:
            assert plain.as_numpy(name).size == 0, name
        asked = ask(url, "ensemble", **{**text, "return_context_logits": True})
        (num_prompt, vocabulary_size) = asked.as_numpy("context_logits").shape[1:]
        assert num_prompt and vocabulary_size and not asked.as_numpy("generation_logits").size


_INSIDE = ("output_ids", "sequence_length")

LENGTHS = {"input_lengths": len(PROMPT), "request_output_len": 4}


@pytest.mark.parametrize("value", [True, False])
def test_early_stopping_may_be_a_bool(server_of_upstreams_files: TritonServer, value: bool) -> None:
    answer = infer(
        server_of_upstreams_files.http,
        "tensorrt_llm",
        input_ids=PROMPT,
        beam_width=2,
        early_stopping=np.array([[value]]),
        **LENGTHS,
    )
    assert answer.as_numpy("output_ids").shape == (1, 2, 8)


def test_only_requested_outputs_declared_in_upstreams_file_are_sent(
    server_of_upstreams_files: TritonServer,
) -> None:
    answer = infer(server_of_upstreams_files.http, "tensorrt_llm", input_ids=PROMPT, **LENGTHS)
    assert {output["name"] for output in answer.get_response()["outputs"]} == {
        "output_ids",
        "sequence_length",
    }


def test_tensors_of_upstreams_file_that_the_model_lacks_are_refused(
    server_of_upstreams_files: TritonServer,
) -> None:
    for name, value in (("decoder_input_ids", [[1, 2]]), ("context_phase_params", [[1, 2]])):
        dtype = np.uint8 if name == "context_phase_params" else np.int32
        with pytest.raises(InferenceServerException, match=f"{name} is not available in this version"):
            infer(
                server_of_upstreams_files.http,
                "tensorrt_llm",
                input_ids=PROMPT,
                **LENGTHS,
                **{name: np.array(value, dtype)},
            )
