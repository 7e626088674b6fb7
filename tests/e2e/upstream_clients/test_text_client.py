"""Text to `ensemble` on a gRPC stream: the first beam's text is `text_output[0]`, streamed or not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.clients import generate, wait_for_several

from .conftest import PROMPT, WORD
from .text_client import Flags, run

PROMPTS = [PROMPT, "class Reader:\n", "import os\n"]
LENGTH = 20


@pytest.fixture(scope="module")
def completions(demo_server) -> list[str]:
    """Return the texts of HTTP generate, without the prompts."""
    return [
        generate(demo_server.http, text_input=prompt, max_tokens=LENGTH, exclude_input_in_output=True)[
            "text_output"
        ]
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("batch_inputs", [False, True], ids=["apart", "batch"])
def test_texts_equal_those_of_generate(demo_server, completions, streaming, batch_inputs):
    flags = Flags(
        output_len=LENGTH, streaming=streaming, batch_inputs=batch_inputs, exclude_input_in_output=True
    )
    assert run(demo_server, PROMPTS, flags).texts == completions


@pytest.mark.parametrize(("streaming", "echoed"), [(False, True), (True, False)], ids=["whole", "streamed"])
def test_only_a_response_that_is_not_streamed_repeats_the_prompt(demo_server, completions, streaming, echoed):
    (text,) = run(demo_server, PROMPTS[:1], Flags(output_len=LENGTH, streaming=streaming)).texts
    assert text == (PROMPT if echoed else "") + completions[0]


def test_sequences_have_an_index_each(demo_server, completions):
    flags = Flags(output_len=LENGTH, num_return_sequences=2, exclude_input_in_output=True)
    answers = run(demo_server, PROMPTS[:1], flags)
    assert answers.texts == [completions[0]] * 2
    assert sorted(outputs["sequence_index"].tolist() for outputs in answers.outputs) == [[[0]], [[1]]]


def test_the_sequence_index_is_not_requested_for_one_sequence(demo_server, completions):
    flags = Flags(output_len=LENGTH, num_return_sequences=1, exclude_input_in_output=True)
    answers = run(demo_server, PROMPTS[:1], flags)
    assert answers.texts == completions[:1] and set(answers.outputs[0]) == set()


def test_the_best_beam_is_the_first_text(demo_server):
    flags = Flags(output_len=LENGTH, beam_width=3, return_log_probs=True, end_id=-1)
    answers = run(demo_server, PROMPTS[:1], flags)
    assert answers.texts[0].startswith(PROMPT)
    (outputs,) = answers.outputs
    assert outputs["cum_log_probs"].shape == (1, 3)
    assert outputs["output_log_probs"].shape == (1, 3, LENGTH)


def test_bad_biased_and_stop_words_have_their_effect(demo_server, completions):
    assert WORD in completions[0]
    common = {"output_len": LENGTH, "exclude_input_in_output": True}
    assert WORD not in run(demo_server, PROMPTS[:1], Flags(bad_words=(WORD,), **common)).texts[0]
    stopped = run(demo_server, PROMPTS[:1], Flags(stop_words=(WORD,), **common)).texts[0]
    assert len(stopped) < len(completions[0]) and completions[0].startswith(stopped)
    biased = Flags(embedding_bias_words=("class",), embedding_bias_weights=(100.0,), **common)
    assert "class" in run(demo_server, PROMPTS[:1], biased).texts[0]


def test_empty_arrays_of_biased_words_are_accepted(demo_server, completions):
    """The program that compares speculative decoding sends arrays of [1, 0]."""
    flags = Flags(
        output_len=LENGTH,
        embedding_bias_words=(),
        embedding_bias_weights=(),
        exclude_input_in_output=True,
    )
    assert run(demo_server, PROMPTS[:1], flags).texts == completions[:1]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_every_response_has_metrics_and_log_probs(demo_server, streaming):
    flags = Flags(output_len=LENGTH, streaming=streaming, return_perf_metrics=True, return_log_probs=True)
    if streaming:
        wait_for_several(lambda: run(demo_server, PROMPTS[:1], flags).outputs)
    answers = run(demo_server, PROMPTS[:1], flags)
    assert streaming or len(answers.outputs) == 1
    wanted = {"cum_log_probs", "output_log_probs", "last_token_time_ns", "kv_cache_reused_blocks"}
    assert all(wanted <= outputs.keys() for outputs in answers.outputs)
    assert np.isfinite(answers.outputs[-1]["cum_log_probs"]).all()
