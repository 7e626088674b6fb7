"""More requests than the queue takes: some are refused with the reason, and the others are answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inflight.server.launch import TritonServer
from tests.e2e.clients import Stream, wait_until
from tests.e2e.test_metrics import page_of
from tests.prometheus import shown

from . import queue_client
from .conftest import NUM_SLOTS, QUEUE_SIZE

COUNT = 30
LENGTH = 60
LONG = 15_000  # they run until they are cancelled
MESSAGES = ("Maximum queue size of", "Exceeds maximum queue size")


def is_refusal(outcome) -> bool:
    return isinstance(outcome, Exception) and any(message in str(outcome) for message in MESSAGES)


def num_running(server: TritonServer) -> int:
    return shown(page_of(server))["Scheduled Requests"]


def num_refused(server: TritonServer) -> float:
    return page_of(server).series("inflight_failed_requests_total", "code").get("UNAVAILABLE", 0)


def send_while_all_slots_are_taken(
    run: Callable[[TritonServer, list[int], int, int], list], server: TritonServer, prompt: list[int]
) -> tuple[list, list]:
    """Send all requests while none can start; return the refusals, and the outcomes of the others.

    Long requests run in all slots until the server has refused those that the queue does not take.
    """
    before = num_refused(server)
    with Stream(server.grpc) as stream, ThreadPoolExecutor(1) as pool:
        for number in range(NUM_SLOTS):
            stream.send(
                "tensorrt_llm",
                f"runs {number}",
                input_ids=prompt,
                request_output_len=LONG,
                end_id=-1,
                pad_id=0,
            )
        try:
            wait_until(lambda: num_running(server) == NUM_SLOTS)
            running = pool.submit(run, server, prompt, LENGTH, COUNT)
            wait_until(lambda: num_refused(server) - before == COUNT - QUEUE_SIZE or running.done())
        finally:
            stream.cancel()
        outcomes = running.result()
    refused = [outcome for outcome in outcomes if is_refusal(outcome)]
    return refused, [outcome for outcome in outcomes if not is_refusal(outcome)]


def test_a_full_queue_is_reported_over_http(unary_server, prompt):
    refused, answers = send_while_all_slots_are_taken(queue_client.run_http, unary_server, prompt)
    assert len(refused) == COUNT - QUEUE_SIZE
    lengths = [answer.as_numpy("sequence_length").tolist() for answer in answers]
    assert lengths == [[[len(prompt) + LENGTH]]] * QUEUE_SIZE


def test_a_full_queue_is_reported_on_a_stream(short_queue_server, prompt):
    refused, responses = send_while_all_slots_are_taken(queue_client.run_grpc, short_queue_server, prompt)
    assert len(refused) == COUNT - QUEUE_SIZE
    num_tokens = sum(response.as_numpy("sequence_length").item() for response in responses)
    assert num_tokens == QUEUE_SIZE * LENGTH
