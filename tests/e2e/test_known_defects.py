"""Verified defects of tensorrtllm_backend's models, and the tests that show that this server does not have them.

"here" means this file. Names of tests are given without `test_`, and may be shortened.

Defects of the Python model                       tested by
  1  one id used twice at once hangs the server     here; test_tensors: an_id_in_flight_is_refused
  2  batch_index on requests that are not a batch   here; triton/test_front_end_batches:
                                                    two_requests_of_one_call_are_not_a_batch
  3  `stop` in a batch fails the whole call         here; test_batches: a_stop_ends_the_whole_batch
  4  token counts of a batch: never answered        here
  5  a bad request fails the others of its call     here; test_tensors: a_refusal_names_the_tensor
  6  every error is INTERNAL                        test_tensors: a_refusal_names_the_tensor,
                                                    http_returns_the_status; triton/test_front_end:
                                                    a_clients_disconnection_is_detected
  7  cancellation is polled every 100 ms            triton/test_cancellation; the time it takes:
                                                    test_metrics: a_stop_is_counted_and_timed
  8  metrics: padding counted as output, seconds    here; test_metrics: the_page_equals_the_log_line,
     for microseconds, no `reused`; a log line a    lengths_are_counted_in_their_buckets,
     request                                        every_metric_family_is_on_the_page
  9  lora_prefetch_dir ignored                      test_adapters: prefetched_adapters_need_no_weights
     unknown kinds of guides ignored                here
 10  unsupported options ignored                    here; no_repeat_ngram_size: test_controls; priority,
                                                    client_id, allotted_time_ms: test_queueing;
                                                    parameters: tensors/test_request_parameters

Defects of the C++ backend
     runtime_top_p_min under another name           test_controls: runtime_top_p_min_bounds_it
     early_stopping declared BOOL, read as INT32    test_beams: beams_equal_those_of_transformers
     an output of `ensemble` listed twice           here
     `ensemble` fills outputs without a request     here
     one exception fails all active requests        here; core/test_recovery
     a queued request is cancelled when it starts   test_endings: a_stop_ends_a_waiting_request
     ids of cancelled unknown requests are kept     here
     token 0 cannot be banned                       test_controls: token_zero_can_be_banned
     another beam width blocks the queue            here; test_beams: beams_and_streams_do_not_affect_each_other
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from safetensors.torch import load_file, save_file
from tritonclient.utils import InferenceServerException

from inflight.core.request.sampling_config import SamplingConfig
from inflight.server.errors import ServeError
from inflight.server.launch import TritonServer, serve
from inflight.testing.fake_model import expected_tokens
from inflight.testing.fake_server import make_fake_repository, serve_fake

from .clients import Stream, ask, completion, infer, make_inputs, unary, wait_until
from .conftest import DEMO_MODEL, FAKE_VOCABULARY
from .test_metrics import grown, page_of, wait_idle

PROMPT = [3, 1, 4, 1, 5]
LONG = 1500


def alone(prompt: list[int], count: int, index: int = 0, **sampling: object) -> list[int]:
    return expected_tokens(
        prompt, count, FAKE_VOCABULARY, SamplingConfig(**sampling), attend_to_all=False, sequence_index=index
    )


def column(*values: object, dtype: type = np.int32) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1)


@pytest.fixture(scope="module")
def together_server(elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A fake engine behind Triton's dynamic batcher, which passes requests of 0.5 s on in one call."""
    repository = tmp_path_factory.mktemp("together") / "model_repository"
    make_fake_repository(repository)
    with (repository / "tensorrt_llm" / "config.pbtxt").open("a") as config:
        config.write(
            "dynamic_batching { preferred_batch_size: [ 64 ] max_queue_delay_microseconds: 500000 }\n"
        )
    settings = {"fake_engine": f"vocab={FAKE_VOCABULARY},step_us=1000", "max_sequence_length": "2048"}
    with serve(model_repository=repository, settings=settings) as server:
        yield server


@contextmanager
def handed_over_together(server: TritonServer, num_requests: int) -> Iterator[None]:
    """Check that the requests sent in the `with` block reach the model in fewer calls."""

    def counts() -> tuple[float, float]:
        """Return the numbers of a decoupled model's released or refused requests, and of its calls."""
        page = page_of(server)
        names = ("nv_inference_request_success", "nv_inference_exec_count")
        return tuple(page.value(name, model="tensorrt_llm") for name in names)

    requests, calls = counts()
    yield
    wait_until(lambda: counts()[0] - requests == num_requests)
    assert counts()[1] - calls < num_requests


# ---------------------------------------------------------------- the Python model


def test_later_requests_are_answered_after_one_id_is_used_many_times_at_once(fake_server):
    """In tensorrtllm_backend the second use replaces the first, whose end then kills the thread that answers."""
    with Stream(fake_server.grpc) as first, Stream(fake_server.grpc) as second:
        for stream in (first, second):
            for _ in range(4):
                stream.send("tensorrt_llm", "same", input_ids=PROMPT, request_output_len=40)
        answers = [stream.receive()[1] for stream in (first, second) for _ in range(4)]
        assert all(answer.final for answer in answers)
        refused = [str(answer.error) for answer in answers if answer.error is not None]
        assert refused and all("requestId same is already in progress" in message for message in refused)
        assert [a.ids for a in answers if a.error is None] == [PROMPT + alone(PROMPT, 40)] * (
            8 - len(refused)
        )
    for name in ("same", "another", ""):
        result = unary(fake_server.grpc, request_id=name, input_ids=PROMPT, request_output_len=5)
        assert result.as_numpy("output_ids").ravel().tolist() == PROMPT + alone(PROMPT, 5)


def test_requests_that_arrive_together_are_not_a_batch(together_server):
    """In tensorrtllm_backend all requests of one call count as one batch, and get a batch_index."""
    with handed_over_together(together_server, 32), Stream(together_server.grpc) as stream:
        for number in range(32):
            stream.send("tensorrt_llm", str(number), input_ids=[number + 1, 2], request_output_len=3)
        answers = dict(stream.receive() for _ in range(32))
    assert {name: answer.ids for name, answer in answers.items()} == {
        str(number): [number + 1, 2, *alone([number + 1, 2], 3)] for number in range(32)
    }
    assert not any("batch_index" in answer.outputs for answer in answers.values())


def test_a_batch_may_have_stop_false_in_every_row(together_server):
    """In tensorrtllm_backend `stop` must be a scalar, or all requests of the call fail."""
    prompts = np.array([[5, 6, 7], [8, 9, 10]], np.int32)
    with handed_over_together(together_server, 2), Stream(together_server.grpc) as stream:
        stream.send("tensorrt_llm", "beside", input_ids=PROMPT[:3], request_output_len=6, stop=False)
        stream.send(
            "tensorrt_llm",
            "batch",
            input_ids=prompts,
            request_output_len=column(4, 4),
            stop=column(False, False, dtype=np.bool_),
        )
        answers = [stream.receive() for _ in range(3)]
    assert [answer.error for _, answer in answers] == [None] * 3
    found = {answer.outputs["batch_index"].item(): answer.ids for name, answer in answers if name == "batch"}
    assert found == {row: [*ids, *alone(ids, 4)] for row, ids in enumerate(prompts.tolist())}
    assert dict(answers)["beside"].ids == PROMPT[:3] + alone(PROMPT[:3], 6)


@pytest.mark.covers("num_input_tokens", "num_output_tokens")
def test_a_batch_gets_its_token_counts(fake_server):
    """In tensorrtllm_backend the flags must be scalars; otherwise the requests run, and are never answered."""
    flags = column(True, True, dtype=np.bool_)
    answers = ask(
        fake_server.grpc,
        input_ids=np.array([[5, 6, 7], [8, 9, 0]], np.int32),
        input_lengths=column(3, 2),
        request_output_len=column(4, 6),
        return_num_input_tokens=flags,
        return_num_output_tokens=flags,
    )
    names = ("batch_index", "num_input_tokens", "num_output_tokens")
    found = [tuple(answer.outputs[name].item() for name in names) for answer in answers]
    assert sorted(found) == [(0, 3, 4), (1, 2, 6)]


def test_only_bad_requests_of_a_burst_are_refused(together_server):
    """In tensorrtllm_backend requests of one call are queued together: a refused one fails all of them."""
    with handed_over_together(together_server, 30), Stream(together_server.grpc) as stream:
        for number in range(30):
            token = FAKE_VOCABULARY if number % 3 == 1 else number + 1
            stream.send("tensorrt_llm", str(number), input_ids=[token], request_output_len=4)
        answers = [stream.receive() for _ in range(30)]
    refused = [str(answer.error) for _, answer in answers if answer.error is not None]
    assert len(refused) == 10 and all(f"got {FAKE_VOCABULARY}" in message for message in refused)
    found = {int(name): answer.ids for name, answer in answers if answer.error is None}
    assert found == {n: [n + 1, *alone([n + 1], 4)] for n in range(30) if n % 3 != 1}


def test_padding_is_not_counted_as_output_in_the_metrics(fake_server):
    """In tensorrtllm_backend every element of a ragged output's array counts, with its padding of -1."""
    options = {"runtime_top_k": 50, "random_seed": 7}
    sampled = {"top_k": 50, "random_seed": 7}
    whole = [alone(PROMPT, 30, index, **sampled) for index in range(2)]
    end_id = next(token for token in whole[0][2:20] if token not in (*whole[0][:2], *whole[1]))
    before = wait_idle(fake_server)
    result = infer(
        fake_server.http,
        input_ids=PROMPT,
        request_output_len=30,
        end_id=end_id,
        num_return_sequences=2,
        exclude_input_in_output=True,
        **options,
    )
    lengths = [whole[0].index(end_id), 30]
    assert result.as_numpy("sequence_length").ravel().tolist() == lengths
    assert result.as_numpy("output_ids").size == 2 * 30 and -1 in result.as_numpy("output_ids")
    after = wait_idle(fake_server, before, 2)
    assert grown(before, after, "inflight_output_tokens_sum") == sum(lengths)
    assert grown(before, after, "nv_llm_output_token_len_sum") == sum(lengths)


def test_requests_log_only_their_access_lines(narrow_server):
    """In tensorrtllm_backend each one logs another line when it is deleted."""
    ask(narrow_server.grpc, input_ids=PROMPT, request_output_len=2)
    wait_until(lambda: "Started Metrics Service" in narrow_server.log_text())  # the last line of a start
    before = len(narrow_server.log_text())
    for number in range(5):
        ask(narrow_server.grpc, input_ids=[number + 1], request_output_len=2)
    wait_until(lambda: narrow_server.log_text()[before:].count(" access] ") >= 5)
    lines = narrow_server.log_text()[before:].splitlines()
    assert [line for line in lines if not re.search(r"Timestamp| access\] ", line)] == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [("json_schema", "UNIMPLEMENTED"), ("regex", "UNIMPLEMENTED"), ("no such kind", "INVALID_ARGUMENT")],
)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_an_unsupported_guide_is_refused_and_not_ignored(fake_server, model, kind, status):
    """In tensorrtllm_backend an unknown kind gives an unguided response. This server has no tokenizer."""
    request = {"input_ids": PROMPT, "request_output_len": 4}
    if model == "ensemble":
        request = {"text_input": "def f", "max_tokens": 4}
    guide = {"guided_decoding_guide_type": kind, "guided_decoding_guide": "[ab]+"}
    (answer,) = ask(fake_server.grpc, model, **request, **guide)
    assert "guided_decoding_guide_type" in str(answer.error)
    assert ("tokenizer" if status == "UNIMPLEMENTED" else kind) in str(answer.error)
    with pytest.raises(InferenceServerException) as caught:
        unary(fake_server.grpc, input_ids=PROMPT, request_output_len=4, **guide)
    assert caught.value.status() == f"StatusCode.{status}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("key", "value"),
    [("encoder_model_path", "/some/encoder"), ("xgrammar_tokenizer_info_path", "/some/file")],
)
def test_a_parameter_of_an_unsupported_feature_fails_the_load(elsewhere, key, value):
    """By default, test_config tests the error, and server/test_server_launch that it ends the command."""
    with (
        pytest.raises(ServeError, match=f"{key}: got '{value}', which is not available"),
        serve_fake(settings={"fake_engine": "vocab=100,step_us=0", key: value}),
    ):
        pass


@pytest.mark.parametrize(
    "name",
    [
        "encoder_input_features",
        "decoder_input_ids",
        "context_phase_params",
        "logits_post_processor_name",
    ],
)
def test_inputs_of_unsupported_features_are_refused(fake_server, name):
    """Encoder and decoder, disaggregated serving, custom code in the loop: nothing here could use them."""
    unknown = grpc.InferInput(name, [1, 2], "INT32")
    unknown.set_data_from_numpy(np.zeros((1, 2), np.int32))
    client = grpc.InferenceServerClient(fake_server.grpc)
    inputs = make_inputs(grpc, input_ids=PROMPT, request_output_len=2)
    with pytest.raises(InferenceServerException, match=name):
        client.infer("tensorrt_llm_infer", [*inputs, unknown])
    client.close()


@pytest.mark.parametrize("name", ["context_hidden_states", "generation_hidden_states", "encoder_output"])
def test_additional_outputs_are_refused(fake_server, name):
    """In tensorrtllm_backend they are returned empty."""
    with pytest.raises(InferenceServerException, match=name):
        unary(fake_server.grpc, outputs=["output_ids", name], input_ids=PROMPT, request_output_len=2)


# ---------------------------------------------------------------- the C++ backend


def test_ensemble_lists_no_output_twice(fake_server):
    """In tensorrtllm_backend kv_cache_alloc_total_blocks is in the list twice."""
    with Stream(fake_server.grpc) as stream:
        outputs = stream.client.get_model_metadata("ensemble", as_json=True)["outputs"]
        stream.send("ensemble", text_input="def f", max_tokens=3, return_perf_metrics=True)
        result, error = stream._answers.get(timeout=30)
    assert error is None
    declared = Counter(output["name"] for output in outputs)
    returned = Counter(output.name for output in result.get_response().outputs)
    assert set(declared.values()) == set(returned.values()) == {1}
    assert "kv_cache_alloc_total_blocks" in returned and returned.keys() <= declared.keys()


def test_ensemble_returns_only_requested_outputs(fake_server):
    """In tensorrtllm_backend all outputs of the engine are returned, and are zeros unless computed."""
    request = {"text_input": "def f", "max_tokens": 3}
    (plain,) = ask(fake_server.grpc, "ensemble", **request)
    assert set(plain.outputs) == {"text_output", "finish_reason"}
    (more,) = ask(fake_server.grpc, "ensemble", return_log_probs=True, **request)
    assert set(more.outputs) == {"text_output", "finish_reason", "cum_log_probs", "output_log_probs"}
    assert (more.outputs["output_log_probs"] < 0).all()


def test_a_stop_of_an_unknown_id_does_not_end_a_later_request(fake_server):
    """In tensorrtllm_backend the id is kept forever, and stops a later request."""
    with Stream(fake_server.grpc) as stream:
        for _ in range(3):
            stream.send("tensorrt_llm", "later", stop=True)
            list(stream.until_final())
        stream.send("tensorrt_llm", "later", input_ids=PROMPT, request_output_len=5)
        (answer,) = stream.until_final()
    assert (answer.ids, answer.finish_reason) == (PROMPT + alone(PROMPT, 5), "LENGTH")


def test_a_request_with_another_beam_width_does_not_wait_for_others(fake_server):
    """In tensorrtllm_backend a width waits until all requests of other widths end, and blocks the queue."""
    with Stream(fake_server.grpc) as stream:
        stream.send("tensorrt_llm", "long", input_ids=PROMPT, request_output_len=LONG, streaming=True)
        stream.receive()
        for name, width in (("three", 3), ("one", 1), ("two", 2)):
            stream.send("tensorrt_llm", name, input_ids=PROMPT, request_output_len=4, beam_width=width)
        ended = set()
        while len(ended) < 3:
            name, answer = stream.receive()
            assert answer.error is None and not (name == "long" and answer.final), "the stream ended first"
            ended |= {name} if answer.final else set()
        stream.cancel()
    assert ended == {"one", "two", "three"}


POISON = 3071
"""A token whose embedding is NaN in the checkpoint of `poisoned_server`."""


@pytest.fixture(scope="module")
def poisoned_server(elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The demo model with a token that makes all following values NaN."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with serve(model=folder, dtype="float32") as server:
        yield server


def test_an_iteration_that_raises_ends_only_the_faulty_request(poisoned_server, oracle, tokenizer):
    """In tensorrtllm_backend an exception in a forward pass ends all active requests."""
    prompts = [tokenizer.encode(text) for text in ("def f(x):\n", "import os\n", "class A:\n", "for i in ")]
    with Stream(poisoned_server.grpc) as stream:
        for number, prompt in enumerate(prompts):
            stream.send(
                "tensorrt_llm",
                str(number),
                input_ids=prompt,
                request_output_len=100,
                end_id=-1,
                streaming=True,
            )
        received: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        name, answer = stream.receive()
        received[name] += answer.ids
        (bad,) = ask(poisoned_server.grpc, input_ids=[*prompts[0], POISON, 5], request_output_len=4)
        for name, answer in stream.until_all_final():
            assert answer.error is None, answer.error
            received[name] += answer.ids
    assert "nan" in str(bad.error)
    expected = {str(number): oracle.greedy(tuple(prompt), 100) for number, prompt in enumerate(prompts)}
    assert received == expected
    after = completion(poisoned_server.grpc, input_ids=prompts[0], request_output_len=100, end_id=-1)
    assert after.ids == expected["0"]
