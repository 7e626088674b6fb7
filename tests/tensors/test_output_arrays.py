"""Every output as an array: the table's shapes, padding of ragged rows, batches and beams."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.core.request.request import FloatTensor, OutputOptions
from inflight.core.request.response import PerfMetrics, SequenceResult, TopLogProbs
from inflight.prompt import Output
from inflight.tensors.output_arrays import make_array
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.spec import TensorSpec
from tests.tensors.factories import make_beams, make_prompt, make_result

VOCABULARY = 5
METRICS = PerfMetrics(
    arrival_time_ns=1 << 40,
    first_scheduled_time_ns=11,
    first_token_time_ns=12,
    last_token_time_ns=13,
    num_new_blocks=4,
    num_reused_blocks=3,
    num_missed_blocks=2,
    num_draft_tokens=8,
    num_accepted_draft_tokens=6,
)


def tensor(rows: int, start: float = 0.0) -> FloatTensor:
    values = start + np.arange(rows * VOCABULARY, dtype=np.float32)
    return FloatTensor((rows, VOCABULARY), values.tobytes())


def top(*ids: int) -> TopLogProbs:
    return TopLogProbs(ids, tuple(-0.5 * rank for rank in range(len(ids))))


FULL = make_result(
    (8, 9),
    log_probs=((-1.0, -2.0),),
    cum_log_probs=(-3.0,),
    top_log_probs=((top(8, 1), top(2, 9)),),
    prompt_log_probs=(0.0, -0.5, -0.25),
    context_logits=tensor(3),
    generation_logits=(tensor(2),),
    perf_metrics=METRICS,
    receipt="{}",
    sequence_index=2,
)


def make_output(
    result: SequenceResult = FULL, texts: tuple[str, ...] | None = ("t",), **changes: object
) -> Output:
    batch_index = changes.pop("batch_index", 0)
    request = {"output": OutputOptions(num_top_log_probs=2)} | changes
    return Output(make_prompt(options={"vocab_size": VOCABULARY}, **request), result, texts, batch_index)


def values(name: str, *outputs: Output) -> list:
    array = make_array(name, outputs)
    assert array is not None
    return array.tolist()


# All outputs except those of requests without an engine's result, and those that are never returned.
SPECS = [spec for spec in OUTPUTS.specs if spec.name not in ("state", "adapters") and spec.built]

# The values of FULL, by name.
VALUES_OF_FULL = {
    "output_ids": [[[8, 9]]],
    "sequence_length": [[2]],
    "text_output": [b"t"],
    "finish_reason": [[b"NOT_FINISHED"]],
    "batch_index": [[0]],
    "sequence_index": [[2]],
    "num_input_tokens": [[3]],
    "num_output_tokens": [[2]],
    "cum_log_probs": [[-3.0]],
    "cumulative_logprob": [[-3.0]],
    "output_log_probs": [[[-1.0, -2.0]]],
    "top_log_prob_ids": [[[[8, 1], [2, 9]]]],
    "top_log_probs": [[[[0.0, -0.5], [0.0, -0.5]]]],
    "prompt_log_probs": [[0.0, -0.5, -0.25]],
    "context_logits": np.arange(15.0).reshape(1, 3, VOCABULARY).tolist(),
    "generation_logits": np.arange(10.0).reshape(1, 1, 2, VOCABULARY).tolist(),
    "kv_cache_alloc_new_blocks": [[4]],
    "kv_cache_reused_blocks": [[3]],
    "kv_cache_missed_blocks": [[2]],
    "kv_cache_alloc_total_blocks": [[4]],
    "arrival_time_ns": [[1 << 40]],
    "first_scheduled_time_ns": [[11]],
    "first_token_time_ns": [[12]],
    "last_token_time_ns": [[13]],
    "acceptance_rate": [[0.75]],
    "total_accepted_draft_tokens": [[6]],
    "total_draft_tokens": [[8]],
    "receipt": [[b"{}"]],
}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_output_has_the_rank_in_the_table(spec: TensorSpec) -> None:
    array = make_array(spec.name, [make_output()])
    assert array is not None
    assert array.tolist() == VALUES_OF_FULL[spec.name]
    assert array.ndim == len(spec.dims) + spec.is_batched
    assert array.astype(NUMPY_TYPES[spec.dtype]).tolist() == VALUES_OF_FULL[spec.name]


LEFT_OUT = {
    "text_output",
    "cum_log_probs",
    "cumulative_logprob",
    "context_phase_params",
    "output_log_probs",
    "top_log_prob_ids",
    "top_log_probs",
    "prompt_log_probs",
    "context_logits",
    "generation_logits",
    "receipt",
    "state",
    "adapters",
} | {spec.name for spec in OUTPUTS.specs if spec.asked_by == "return_perf_metrics"}


@pytest.mark.parametrize("spec", OUTPUTS.specs, ids=lambda spec: spec.name)
def test_outputs_without_a_value_are_left_out(spec: TensorSpec) -> None:
    array = make_array(spec.name, [make_output(make_result(), texts=None)])
    assert (array is None) == (spec.name in LEFT_OUT)


def test_ragged_beams_are_padded() -> None:
    beams = make_beams(
        (8, 9, 7),
        (6,),
        log_probs=((-1.0, -2.0, -3.0), (-4.0,)),
        top_log_probs=((top(1, 2),) * 3, (top(3, 4),)),
        generation_logits=(tensor(3), tensor(1, 100.0)),
    )
    output = make_output(beams, ("a", "b"), pad_id=50)
    assert values("output_ids", output) == [[[8, 9, 7], [6, 50, 50]]]
    assert values("sequence_length", output) == [[3, 1]]
    assert values("output_log_probs", output) == [[[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]]
    assert values("top_log_prob_ids", output)[0][1] == [[3, 4], [50, 50], [50, 50]]
    assert values("top_log_probs", output)[0][1] == [[0.0, -0.5], [0.0, 0.0], [0.0, 0.0]]
    logits = np.array(values("generation_logits", output))
    assert logits.shape == (1, 2, 3, VOCABULARY)
    assert logits[0, 1, 0].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0] and not logits[0, 1, 1:].any()
    assert values("text_output", output) == [b"a", b"b"]
    assert values("num_output_tokens", output) == [[3]]


def test_without_a_pad_id_ids_are_padded_with_minus_one() -> None:
    assert values("output_ids", make_output(make_beams((8, 9), (7,)))) == [[[8, 9], [7, -1]]]


def test_outputs_of_a_batch_are_padded_to_the_largest_shape() -> None:
    beams = make_beams((8, 9), (7,), cum_log_probs=(-1.0, -2.0), num_input_tokens=4)
    outputs = [
        make_output(beams, ("a", "b"), pad_id=50),
        make_output(
            make_result((1, 2, 3), cum_log_probs=(-5.0,), prompt_log_probs=(0.0, -1.0)),
            ("c",),
            batch_index=1,
        ),
    ]
    assert values("output_ids", *outputs) == [[[8, 9, 50], [7, 50, 50]], [[1, 2, 3], [-1, -1, -1]]]
    assert values("sequence_length", *outputs) == [[2, 1], [3, 0]]
    assert values("text_output", *outputs) == [b"a", b"b", b"c", b""], "as many as sequence_length has values"
    assert values("finish_reason", *outputs) == [[b"LENGTH", b"LENGTH"], [b"NOT_FINISHED", b""]]
    assert values("cum_log_probs", *outputs) == [[-1.0, -2.0], [-5.0, 0.0]]
    assert values("prompt_log_probs", *outputs) == [[0.0, 0.0], [0.0, -1.0]]
    assert values("batch_index", *outputs) == [[0], [1]]
    assert values("num_input_tokens", *outputs) == [[4], [3]]


def test_prompts_of_a_batch_may_ask_for_different_numbers_of_top_log_probs() -> None:
    outputs = [
        make_output(
            make_result((8,), top_log_probs=((top(*ids),),)),
            output=OutputOptions(num_top_log_probs=len(ids)),
            pad_id=50,
        )
        for ids in ((8,), (9, 8, 7))
    ]
    assert values("top_log_prob_ids", *outputs) == [[[[8, 50, 50]]], [[[9, 8, 7]]]]
    assert values("top_log_probs", *outputs) == [[[[0.0, 0.0, 0.0]]], [[[0.0, -0.5, -1.0]]]]


def test_logits_of_a_batch_are_padded_with_zeros() -> None:
    outputs = [make_output(make_result(context_logits=tensor(3, 1.0))), make_output(make_result())]
    array = make_array("context_logits", outputs)
    assert array is not None and array.shape == (2, 3, VOCABULARY)
    assert array[0].all() and not array[1].any()


def test_one_tensor_of_logits_is_not_copied() -> None:
    logits = tensor(2)
    array = make_array("generation_logits", [make_output(make_result(generation_logits=(logits,)))])
    assert np.shares_memory(array, np.frombuffer(logits.data, np.float32))


def test_top_log_probs_of_no_tokens_keep_the_number_of_candidates() -> None:
    """An empty array keeps its last dimension, so that a client can concatenate the arrays of a stream."""
    result = make_result((), top_log_probs=((),), log_probs=((),))
    array = make_array("top_log_probs", [make_output(result)])
    assert array is not None and array.shape == (1, 1, 0, 2)


@pytest.mark.parametrize("name", ["generation_logits", "context_logits"])
def test_logits_without_rows_keep_the_vocabulary_size(name: str) -> None:
    nothing = FloatTensor((0, 0), b"")
    result = make_result((), generation_logits=(nothing,), context_logits=nothing)
    array = make_array(name, [make_output(result)])
    assert array is not None and array.shape[-2:] == (0, VOCABULARY)


def test_the_acceptance_rate_without_drafts_is_zero() -> None:
    assert values("acceptance_rate", make_output(make_result(perf_metrics=PerfMetrics()))) == [[0.0]]
