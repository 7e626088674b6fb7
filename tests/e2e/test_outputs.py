"""Outputs of the real server: exactly the requested ones, with transformers' values for the demo model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from inflight.receipts.document import canonical, digest_of
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import Vocabulary
from inflight.text.tokenizer import Tokenizer

from .clients import Answer, ask, completion, infer, unary

# More than one KV block, so that a request finds the blocks of the one before.
PROMPT = (
    "import os\nimport sys\n\n\ndef walk(top):\n    for name in os.listdir(top):\n        yield name\n\n" * 3
)
NUM_TOKENS = 12
VOCABULARY = 3072
TOP = 5
PLAIN = [5, 6, 7, 8, 9]

LOG_PROBS = ("cum_log_probs", "output_log_probs")
TOP_LOG_PROBS = ("top_log_prob_ids", "top_log_probs")
METRICS = [spec.name for spec in OUTPUTS.specs if spec.asked_by == "return_perf_metrics"]
_OF_STATE_AND_ADAPTER_REQUESTS = {"state", "adapters"}
OF_GENERATION = [
    spec.name for spec in OUTPUTS.specs if spec.built and spec.name not in _OF_STATE_AND_ADAPTER_REQUESTS
]
SENT_BY_DEFAULT = {"output_ids", "sequence_length", "text_output", "finish_reason"}


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(PROMPT)
    assert len(ids) > 2 * 32
    return ids


def joined(answers: list[Answer], name: str) -> np.ndarray:
    """Return the deltas of a stream, concatenated."""
    return np.concatenate([answer.outputs[name] for answer in answers], axis=2)


def model_log_probs(oracle, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return log probs [tokens, vocab_size] at the position of each of `tokens`."""
    return oracle.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)


SAMPLED = {"runtime_top_p": 0.9, "temperature": 1.5, "repetition_penalty": 1.2, "random_seed": 3}


@pytest.mark.covers("return_log_probs", "num_top_log_probs", *LOG_PROBS, *TOP_LOG_PROBS)
@pytest.mark.parametrize("controls", [{}, SAMPLED], ids=["greedy", "sampled, penalized"])
@pytest.mark.parametrize("streaming", [True, False])
def test_log_probs_equal_those_of_the_model_and_add_up(exact_server, oracle, prompt, controls, streaming):
    """Log probs are taken before temperature, penalties and top_p; cum_log_probs in a stream is the sum so
    far."""
    answers = ask(
        exact_server.grpc,
        input_ids=prompt,
        request_output_len=NUM_TOKENS,
        streaming=streaming,
        exclude_input_in_output=True,
        return_log_probs=True,
        num_top_log_probs=TOP,
        **controls,
    )
    tokens = [token for answer in answers for token in answer.ids]
    exact = model_log_probs(oracle, prompt, tokens)
    log_probs = answers[-1].outputs["output_log_probs"]
    assert log_probs.shape == (1, 1, NUM_TOKENS)
    chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(log_probs[0, 0], chosen, atol=1e-4)
    count = 0
    for answer in answers:
        count += len(answer.ids)
        so_far = answer.outputs["output_log_probs"]
        assert so_far.tolist() == log_probs[..., :count].tolist()
        np.testing.assert_allclose(answer.outputs["cum_log_probs"], [[so_far.sum()]], rtol=1e-5)
    likeliest = exact.topk(TOP)
    assert joined(answers, "top_log_prob_ids")[0, 0].tolist() == likeliest.indices.tolist()
    np.testing.assert_allclose(joined(answers, "top_log_probs")[0, 0], likeliest.values, atol=1e-4)


@pytest.mark.covers(
    "return_prompt_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "prompt_log_probs",
    "context_logits",
    "generation_logits",
)
@pytest.mark.parametrize("streaming", [True, False])
def test_logits_equal_those_of_the_model(exact_server, oracle, prompt, streaming):
    answers = ask(
        exact_server.grpc,
        input_ids=prompt,
        request_output_len=NUM_TOKENS,
        streaming=streaming,
        exclude_input_in_output=True,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        repetition_penalty=1.5,
    )
    tokens = [token for answer in answers for token in answer.ids]
    exact = oracle.logits([*prompt, *tokens]).numpy()
    context = answers[0].outputs["context_logits"]
    assert context.shape == (1, len(prompt), VOCABULARY)
    np.testing.assert_allclose(context[0], exact[: len(prompt)], atol=1e-3)
    with_tokens = [answer for answer in answers if answer.ids]
    generation = joined(with_tokens, "generation_logits")
    assert generation.shape == (1, 1, NUM_TOKENS, VOCABULARY)
    np.testing.assert_allclose(generation[0, 0], exact[len(prompt) - 1 : -1], atol=1e-3)
    prompt_log_probs = answers[0].outputs["prompt_log_probs"]
    following = (
        torch.tensor(exact[: len(prompt) - 1]).log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])
    )
    np.testing.assert_allclose(prompt_log_probs, [[0.0, *following[:, 0].tolist()]], atol=1e-4)
    for name in ("context_logits", "prompt_log_probs"):
        assert all((answer.outputs[name] == answers[0].outputs[name]).all() for answer in answers)


def test_context_logits_that_are_too_large_to_repeat_are_in_a_streams_first_response(exact_server):
    """700 rows of 3,072 values are more than 8 MiB."""
    first, *others = ask(
        exact_server.grpc,
        outputs=["output_ids", "context_logits"],
        input_ids=[7] * 700,
        request_output_len=300,  # more than arrive while the first response is being sent
        streaming=True,
        return_context_logits=True,
    )
    assert first.outputs["context_logits"].shape == (1, 700, VOCABULARY)
    assert others and not any("context_logits" in answer.outputs for answer in others)


@pytest.mark.covers("return_receipt", "receipt")
def test_a_receipt_has_the_request_and_its_tokens(exact_server):
    answer = completion(
        exact_server.grpc,
        input_ids=PLAIN,
        request_output_len=4,
        end_id=-1,
        return_receipt=True,
    )
    receipt = json.loads(answer.outputs["receipt"].item())
    assert receipt["request"]["input_ids"] == PLAIN
    assert receipt["outputs"] == [{"token_ids": answer.ids, "finish_reason": "LENGTH"}]
    assert receipt["digest"] == digest_of(canonical(receipt))


@pytest.mark.covers(*METRICS[:4], "return_kv_cache_reuse_stats")
def test_blocks_of_a_repeated_prompt_are_reused(exact_server):
    """128 prompt tokens fill four blocks; in the second run, one token of the last is computed again."""
    request = {
        "input_ids": list(range(200, 329)),
        "request_output_len": 4,
        "return_kv_cache_reuse_stats": True,
    }
    first, second = (completion(exact_server.grpc, **request) for _ in range(2))
    counts = [
        tuple(
            answer.outputs[f"kv_cache_{name}_blocks"].item()
            for name in ("alloc_new", "reused", "missed", "alloc_total")
        )
        for answer in (first, second)
    ]
    assert counts == [(5, 0, 4, 5), (1, 4, 0, 1)]


def test_block_counts_equal_upstreams_test_and_tokens_those_of_transformers(exact_server, oracle):
    """Upstream's prompt has 109 tokens: three blocks of 32, and a part of one that the response filled."""
    prompt = [*range(400, 509)]
    other = [*prompt[:105], 77, 78, 79]
    counts, answers = [], []
    for ids in (prompt, prompt, other):
        answer = completion(
            exact_server.grpc, input_ids=ids, request_output_len=50, end_id=-1, return_perf_metrics=True
        )
        names = ("alloc_new", "alloc_total", "reused")
        counts.append([answer.outputs[f"kv_cache_{name}_blocks"].item() for name in names])
        answers.append(answer.ids)
    assert counts == [[4, 4, 0], [1, 1, 4], [1, 1, 4]]
    assert answers[0] == answers[1]
    for ids, tokens in ((prompt, answers[1]), (other, answers[2])):
        likeliest = oracle.logits([*ids, *tokens])[len(ids) - 1 : -1].topk(2)
        clear = (likeliest.values[:, 0] - likeliest.values[:, 1] > 1e-3).tolist()
        assert all(
            token == ids_[0] for token, ids_, ok in zip(tokens, likeliest.indices.tolist(), clear) if ok
        )


@pytest.mark.covers("return_perf_metrics", *METRICS)
def test_times_are_in_the_order_of_events(fake_server):
    answers = ask(
        fake_server.grpc, input_ids=PLAIN, request_output_len=5, streaming=True, return_perf_metrics=True
    )
    assert all(set(METRICS) <= set(answer.outputs) for answer in answers)
    names = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [answers[-1].outputs[f"{name}_time_ns"].item() for name in names]
    assert times == sorted(times) and times[0] > 0 and len(set(times)) == 4
    assert times[3] - times[2] >= 4 * 2_000_000 - 1_000_000, "four more steps of 2 ms"
    assert [answer.outputs["last_token_time_ns"].item() for answer in answers[:-1]] == [0] * (
        len(answers) - 1
    )


@pytest.mark.covers("return_num_input_tokens", "return_num_output_tokens", "num_input_tokens")
@pytest.mark.covers("num_output_tokens")
def test_counts_of_a_stream_add_up(fake_server):
    answers = ask(
        fake_server.grpc,
        input_ids=PLAIN,
        request_output_len=7,
        streaming=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert {answer.outputs["num_input_tokens"].item() for answer in answers} == {5}
    assert sum(answer.outputs["num_output_tokens"].item() for answer in answers) == 7


@pytest.mark.covers(*SENT_BY_DEFAULT)
def test_four_outputs_are_sent_by_default(fake_server):
    answer = completion(fake_server.grpc, input_ids=PLAIN, request_output_len=3)
    assert set(answer.outputs) == SENT_BY_DEFAULT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.covers(name))
        for name in OF_GENERATION
        if OUTPUTS.sent_as(name, Vocabulary.TOKENS)
    ],
)
@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_infer"])
def test_a_named_output_is_sent_alone_and_is_empty_without_its_flag(fake_server, model, name):
    spec = OUTPUTS[name]
    for flag in {bool(spec.asked_by), False}:
        asked = {spec.asked_by: int(flag) if spec.asked_by == "num_top_log_probs" else flag} if flag else {}
        output = _named(fake_server, model, name, asked)
        assert output.ndim == len(spec.dims) + spec.is_batched
        assert bool(output.size) is (flag or not spec.asked_by)


def _named(fake_server, model, name, asked):
    request = {"input_ids": PLAIN, "request_output_len": 3, **asked}
    if model == "tensorrt_llm":
        (answer,) = ask(fake_server.grpc, outputs=[name], **request)
        assert answer.error is None
        outputs = answer.outputs
    else:
        result = unary(fake_server.grpc, outputs=[name], **request)
        outputs = {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}
    assert set(outputs) == {name}
    return outputs[name]


@pytest.mark.parametrize("name", [name for name in OF_GENERATION if OUTPUTS.sent_as(name, Vocabulary.TEXT)])
def test_ensemble_has_every_output(fake_server, name):
    (answer,) = ask(fake_server.grpc, "ensemble", outputs=[name], text_input="def f", max_tokens=3)
    assert answer.error is None and set(answer.outputs) == {name}


def test_a_flag_without_its_output_has_no_effect(fake_server):
    (answer,) = ask(
        fake_server.grpc,
        outputs=["output_ids"],
        input_ids=PLAIN,
        request_output_len=3,
        return_log_probs=True,
        return_perf_metrics=True,
    )
    assert set(answer.outputs) == {"output_ids"}


def test_outputs_over_http_equal_those_over_grpc(exact_server, prompt):
    request = {"input_ids": prompt, "request_output_len": 4, "return_generation_logits": True}
    request |= {"return_log_probs": True, "num_top_log_probs": 2}
    over_http, over_grpc = infer(exact_server.http, **request), unary(exact_server.grpc, **request)
    for name in ("output_ids", "generation_logits", "output_log_probs", "top_log_probs", "cum_log_probs"):
        assert np.array_equal(over_http.as_numpy(name), over_grpc.as_numpy(name)), name
    logits = torch.tensor(over_http.as_numpy("generation_logits"))[0, 0]
    ids = torch.tensor(over_http.as_numpy("output_ids"))[0, 0, -4:].long()
    chosen = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    np.testing.assert_allclose(over_http.as_numpy("output_log_probs")[0, 0], chosen, atol=1e-5)
