"""More requests than the queue takes: some are refused with the reason, and the others are answered."""

from __future__ import annotations

from . import queue_client

COUNT = 30
LENGTH = 60  # long enough that the first twenty are not done before the others arrive
MESSAGES = ("Maximum queue size of", "Exceeds maximum queue size")


def is_refusal(outcome) -> bool:
    return isinstance(outcome, Exception) and any(message in str(outcome) for message in MESSAGES)


def test_a_full_queue_is_reported_over_http(unary_server, prompt):
    outcomes = queue_client.run_http(unary_server, prompt, LENGTH, COUNT)
    refused = [outcome for outcome in outcomes if is_refusal(outcome)]
    answers = [outcome for outcome in outcomes if not is_refusal(outcome)]
    assert refused and answers
    assert all(answer.as_numpy("sequence_length").tolist() == [[len(prompt) + LENGTH]] for answer in answers)


def test_a_full_queue_is_reported_on_a_stream(short_queue_server, prompt):
    outcomes = queue_client.run_grpc(short_queue_server, prompt, LENGTH, COUNT)
    refused = [outcome for outcome in outcomes if is_refusal(outcome)]
    responses = [outcome for outcome in outcomes if not is_refusal(outcome)]
    assert refused and responses
    num_tokens = sum(response.as_numpy("sequence_length").item() for response in responses)
    assert num_tokens == (COUNT - len(refused)) * LENGTH
