"""Token ids to `tensorrt_llm`: streamed if it is decoupled, and by unary requests if it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from inflight.server.launch import TritonServer, serve
from tests.e2e.clients import infer, wait_until

from . import batcher_client
from .batcher_client import Flags, run

LENGTH = 16
VOCABULARY = 3072
LONG = 30_000
STOP_AFTER_MS = 100
REQUESTED = [
    ("output_ids", "sequence_length"),
    ("output_ids", "sequence_length", "cum_log_probs", "output_log_probs"),
    ("output_ids", "sequence_length", "generation_logits"),
    ("output_ids", "sequence_length", "context_logits"),
]


@pytest.fixture(scope="module")
def long_server(elsewhere: Path, long_model: Path) -> Iterator[TritonServer]:
    """The demo model on streams, with room for `LONG` tokens, so that requests are in flight when stopped."""
    with serve(model=long_model, settings={"max_tokens_in_paged_kv_cache": "65536"}) as server:
        yield server


@pytest.fixture(scope="module")
def expected(demo_server: TritonServer, prompt: list[int]) -> list[int]:
    """Return the greedy continuation, requested from another model of the repository."""
    answer = infer(demo_server.http, input_ids=prompt, request_output_len=LENGTH, end_id=0)
    return answer.as_numpy("output_ids").reshape(-1).tolist()[len(prompt) :]


def asking_for(names: tuple[str, ...]) -> dict[str, bool]:
    """Return the flags that request these outputs."""
    asked = {
        "return_log_probs": "output_log_probs",
        "return_context_logits": "context_logits",
        "return_generation_logits": "generation_logits",
    }
    return {flag: True for flag, output in asked.items() if output in names}


def check_optional(outcome: batcher_client.Outcome, prompt: list[int], flags: Flags, last: int) -> None:
    """Check the optional outputs of each sequence's last response; `last` is the number of tokens in it."""
    for outputs in outcome.outputs:
        if flags.return_log_probs:
            assert (
                outputs["output_log_probs"].shape[-1] == last and np.isfinite(outputs["cum_log_probs"]).all()
            )
        if flags.return_context_logits:
            assert outputs["context_logits"].shape == (len(prompt), VOCABULARY)
        if flags.return_generation_logits:
            assert outputs["generation_logits"].shape[-2:] == (last, VOCABULARY)
        if flags.return_num_input_tokens:
            assert outputs["num_input_tokens"].tolist() == [len(prompt)]
        if flags.return_perf_metrics:
            assert outputs["arrival_time_ns"][0] > 0 and outputs["acceptance_rate"][0] == 0


@pytest.mark.parametrize("excluded", [False, True], ids=["echoed", "excluded"])
def test_streamed_ids_have_the_prompt_and_its_continuation(demo_server, prompt, expected, excluded):
    flags = Flags(streaming=True, exclude_input_in_output=excluded)

    def is_streamed() -> bool:
        outcome = run(demo_server, prompt, flags)
        assert outcome.sequences == [expected if excluded else prompt + expected]
        return outcome.num_responses > 1

    wait_until(is_streamed)  # a slow sender may merge all responses into one


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_sequences_are_distinguished_by_their_index(demo_server, prompt, expected, streaming):
    flags = Flags(streaming=streaming, num_return_sequences=3, return_log_probs=True)
    outcome = run(demo_server, prompt, flags)
    assert outcome.generated == [expected] * 3
    assert all("cum_log_probs" in outputs for outputs in outcome.outputs)


@pytest.mark.parametrize("more", [(), ("sequence_index",)], ids=["without the index", "with the index"])
def test_outputs_of_sequences_are_the_requested_ones(demo_server, prompt, more):
    flags = Flags(num_return_sequences=2, requested_outputs=("output_ids", "sequence_length", *more))
    assert run(demo_server, prompt, flags).num_responses == 2


def test_sampled_sequences_differ(demo_server, prompt):
    flags = Flags(num_return_sequences=3, top_k=50, temperature=1.5)
    first, *others = run(demo_server, prompt, flags).generated
    assert all(other != first for other in others)


ASKED = [
    {"return_log_probs": True},
    {"return_context_logits": True},
    {"return_generation_logits": True},
    {"return_perf_metrics": True},
    {"return_num_input_tokens": True, "return_num_output_tokens": True},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "+".join(asked))
def test_every_streamed_response_has_the_requested_outputs(demo_server, prompt, expected, asked):
    """The original reads them from the last response with ids, and fails if any response lacks them."""
    flags = Flags(streaming=True, **asked)
    outcome = run(demo_server, prompt, flags)
    assert outcome.generated == [expected]
    (outputs,) = outcome.outputs
    last = outputs["output_log_probs"].shape[-1] if flags.return_log_probs else 0
    last = outputs["generation_logits"].shape[-2] if flags.return_generation_logits else last
    check_optional(outcome, prompt, flags, last)


@pytest.mark.parametrize("names", REQUESTED, ids=lambda names: names[-1])
def test_streamed_outputs_are_the_requested_ones(demo_server, prompt, expected, names):
    """Every single response has exactly the requested outputs, which `run` checks."""
    flags = Flags(streaming=True, requested_outputs=names, **asking_for(names))
    assert run(demo_server, prompt, flags).generated == [expected]


@pytest.mark.parametrize("request_id", ["1", "a name"])
def test_a_stop_ends_a_stream(long_server, prompt, request_id):
    flags = Flags(
        streaming=True,
        request_output_len=LONG,
        end_id=-1,
        stop_after_ms=STOP_AFTER_MS,
        request_id=request_id,
    )
    outcome = run(long_server, prompt, flags)
    assert not outcome.is_cancelled and outcome.num_responses


def test_a_cancellation_ends_a_stream(long_server, prompt):
    flags = Flags(
        streaming=True,
        request_output_len=LONG,
        end_id=-1,
        stop_after_ms=STOP_AFTER_MS,
        stop_via_request_cancel=True,
    )
    run(long_server, prompt, flags)


@pytest.mark.parametrize("num_right", [0, 3])
def test_streamed_drafts_do_not_change_tokens(demo_server, prompt, expected, num_right):
    draft = (*expected[:num_right], (expected[num_right] + 1) % VOCABULARY)
    flags = Flags(streaming=True, draft_tokens=draft, return_perf_metrics=True)
    outcome = run(demo_server, prompt, flags)
    assert outcome.generated == [expected]
    counts = [outcome.outputs[0][f"total_{name}"][0] for name in ("accepted_draft_tokens", "draft_tokens")]
    assert counts == [num_right, num_right + 1]


@pytest.mark.parametrize("excluded", [False, True], ids=["echoed", "excluded"])
def test_one_unary_response_has_the_prompt_and_its_continuation(unary_server, prompt, expected, excluded):
    outcome = run(unary_server, prompt, Flags(exclude_input_in_output=excluded))
    assert outcome.sequences == [expected if excluded else prompt + expected]


@pytest.mark.parametrize("beam_width", [1, 3])
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "+".join(asked))
def test_a_unary_response_has_the_requested_outputs(unary_server, prompt, beam_width, asked):
    flags = Flags(beam_width=beam_width, end_id=-1, **asked)
    outcome = run(unary_server, prompt, flags)
    assert [len(ids) for ids in outcome.sequences] == [len(prompt) + LENGTH] * beam_width
    if beam_width > 1:  # one response for all beams
        outcome.outputs[1:] = [outcome.outputs[0] | outputs for outputs in outcome.outputs[1:]]
    check_optional(outcome, prompt, flags, LENGTH)


@pytest.mark.parametrize("names", REQUESTED, ids=lambda names: names[-1])
def test_the_outputs_of_a_unary_response_are_exactly_the_requested_ones(
    unary_server, prompt, expected, names
):
    flags = Flags(requested_outputs=names, **asking_for(names))
    assert run(unary_server, prompt, flags).generated == [expected]


def test_a_stop_ends_a_unary_request_and_both_are_answered(unary_server, prompt):
    """The response to the stop has no ids; `run` waits for two responses."""
    flags = Flags(request_output_len=LONG, end_id=-1, stop_after_ms=STOP_AFTER_MS, request_id="1")
    outcome = run(unary_server, prompt, flags)
    assert outcome.num_responses == 2 and not outcome.is_cancelled


def test_a_cancellation_ends_a_unary_request(unary_server, prompt):
    flags = Flags(
        request_output_len=LONG, end_id=-1, stop_after_ms=STOP_AFTER_MS, stop_via_request_cancel=True
    )
    assert run(unary_server, prompt, flags).is_cancelled


def test_unary_drafts_do_not_change_tokens(unary_server, prompt, expected):
    outcome = run(unary_server, prompt, Flags(draft_tokens=tuple(expected[:4])))
    assert outcome.generated == [expected]


def test_a_model_that_is_not_decoupled_refuses_streaming(unary_server, prompt):
    with pytest.raises(InferenceServerException, match="streaming"):
        run(unary_server, prompt, Flags(streaming=True))
