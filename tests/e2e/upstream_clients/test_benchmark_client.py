"""Many concurrent requests for token ids, with ids that were used a moment before."""

from __future__ import annotations

import pytest

from inflight.text.tokenizer import Tokenizer

from .benchmark_client import Load, run_decoupled, run_plain


@pytest.fixture(scope="module")
def load(tokenizer: Tokenizer) -> Load:
    """Return twelve prompts of different lengths, whose outputs do not end early."""
    prompts = [tokenizer.encode(f"value_{number} = {number}\n" * (1 + number % 3)) for number in range(12)]
    return Load(prompts, [5 + 3 * number for number in range(12)], end_id=-1)


def wanted(load: Load) -> dict[str, int]:
    return {str(number): length for number, length in enumerate(load.output_lens)}


def test_a_stream_answers_each_id_once_after_a_warm_up_with_the_same_ids(demo_server, load):
    assert run_decoupled(demo_server, load) == wanted(load)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_first_output_of_unary_responses_is_ids_of_three_dimensions(unary_server, load, protocol):
    assert run_plain(unary_server, load, protocol) == wanted(load)
