"""Every output in the responses of a stream and in a single response matches the table of tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inflight.core.request.request import FloatTensor, OutputOptions
from inflight.core.request.response import PerfMetrics, Response, SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason
from inflight.serving.response_size import response_size
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import InStream, TensorSpec
from tests.tensors.factories import make_description, make_limits, make_request, make_result, token_inputs
from tests.triton.factories import make_triton_request
from tests.triton.letters import letter_tokenizer
from tests.triton.stage import Stage

STREAMED_OUTPUTS = [spec for spec in OUTPUTS.specs if spec.in_stream and not spec.text_only]
VOCABULARY = 3


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.front_end.close()


PART = '{"software": {}, "model": {"name": "", "files": {}}, "engine": {"dtype": "", "kernels": "", "device": ""}}'
"""The engine's part of a receipt."""


def engine_result(ids: str, is_first: bool, is_last: bool) -> SequenceResult:
    """Make the engine's result for some tokens, with every detail."""
    count = len(ids)
    result = make_result(
        letter_tokenizer().encode(ids),
        FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED,
        log_probs=(tuple(-1.0 for _ in ids),),
        cum_log_probs=(-1.0 * ord(ids[-1]),),
        top_log_probs=(tuple(TopLogProbs((7,), (-0.5,)) for _ in ids),),
        generation_logits=(FloatTensor((count, VOCABULARY), bytes(4 * VOCABULARY * count)),),
        perf_metrics=PerfMetrics(*[ord(ids[-1])] * 7, 100 + ord(ids[-1]), ord(ids[-1])),
        receipt=PART if is_last else None,
    )
    if not is_first:
        return result
    logits = FloatTensor((3, VOCABULARY), bytes(4 * VOCABULARY * 3))
    return replace(result, prompt_log_probs=(0.0, -1.0, -2.0), context_logits=logits)


def every_output(stage: Stage, streaming: bool, *parts: str) -> list[dict[str, np.ndarray]]:
    """Return the arrays of all responses to a request whose engine returns `parts`."""
    stage.client.description = make_description(
        tokenizer_dir="letters", limits=make_limits(vocab_size=VOCABULARY)
    )
    flags = {spec.asked_by: 1 for spec in STREAMED_OUTPUTS if spec.asked_by}
    inputs = token_inputs(input_ids=[[0, 1, 2]], streaming=streaming, exclude_input_in_output=True, **flags)
    sender = stage.take(
        make_triton_request(inputs, outputs=frozenset(spec.name for spec in STREAMED_OUTPUTS))
    )
    for number, ids in enumerate(parts):
        result = engine_result(ids, number == 0, number == len(parts) - 1)
        stage.client.respond(Response(stage.client.last_id, result, is_final=result.is_sequence_final))
        while streaming and len(sender.sent) <= number:  # otherwise waiting responses would be merged
            time.sleep(0.001)
    return [sent.response.arrays() for sent in sender.wait_final() if sent.response is not None]


@pytest.mark.parametrize("spec", STREAMED_OUTPUTS, ids=lambda spec: spec.name)
def test_every_output_of_a_stream_matches_the_table(stage: Stage, spec: TensorSpec) -> None:
    (whole,) = every_output(stage, False, "cde")
    first, second = every_output(stage, True, "c", "de")
    assert spec.name in whole and spec.name in second
    assert (spec.name in first) == (spec.in_stream is not InStream.LAST)
    assert whole[spec.name].ndim == len(spec.dims) + spec.is_batched
    if spec.in_stream is InStream.LAST:
        assert _said(second[spec.name]) == _said(whole[spec.name])
        return
    one, two, three = (_said(arrays[spec.name]) for arrays in (first, second, whole))
    if spec.in_stream is InStream.SAME:
        assert one == two == three
    elif spec.in_stream is InStream.SO_FAR:
        assert one != two == three
    else:
        assert one != two != three
        assert _joined(spec.name, first, second) == three


def _said(array: np.ndarray) -> tuple:
    return (array.shape, array.tobytes() if array.dtype != np.object_ else tuple(array.ravel()))


def _joined(name: str, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> tuple:
    """Join two responses: counts of new tokens add up, and other outputs continue along their tokens."""
    one, two = first[name], second[name]
    if name in ("sequence_length", "num_output_tokens"):
        return _said(one + two)
    if name == "text_output":
        return _said(one + two)
    return _said(np.concatenate([one, two], axis=2))


def test_no_response_is_larger_than_its_reservation(stage: Stage) -> None:
    """Outputs that a stream repeats count in the size of every response."""
    request = replace(
        make_request(),
        max_new_tokens=3,
        output=OutputOptions(
            return_log_probs=True,
            num_top_log_probs=1,
            return_prompt_log_probs=True,
            return_context_logits=True,
            return_generation_logits=True,
        ),
    )
    reserved = dict(response_size(request, VOCABULARY, streaming=True, in_one=False).outputs)
    for arrays in every_output(stage, True, "c", "de"):
        for name in ("output_log_probs", "prompt_log_probs", "context_logits", "generation_logits"):
            assert 0 < arrays[name].nbytes <= reserved[name], name
