"""Endings of requests by stop, gRPC cancel and disconnect: freed at once, and each answered once."""

from __future__ import annotations

import json
import re
import socket

import numpy as np
import pytest

from inflight.testing.fake_model import expected_tokens

from .clients import Stream, ask, wait_until
from .conftest import FAKE_VOCABULARY
from .test_metrics import grown, wait_idle

PROMPT = [3, 1, 4]
LONG = 2000
MODELS = ["tensorrt_llm"]


def active_requests(server) -> int:
    """Read the number of active requests from the last statistics in the log, which escapes their quotes."""
    text = server.log_text().replace('\\"', '"')
    found = re.findall(r"\{\"Timestamp\".*?\}", text)
    return json.loads(found[-1])["Active Request Count"] if found else 0


def assert_all_blocks_are_free(server) -> None:
    """Check that the cache is free: requests that need all of it run at once only then."""
    (answer,) = ask(server.grpc, input_ids=[1] * 40, request_output_len=LONG, end_id=-1, pad_id=0)
    assert answer.finish_reason == "LENGTH"


DETAILS = {"return_log_probs": True, "num_top_log_probs": 2, "return_num_output_tokens": True}


@pytest.mark.parametrize("sampling", [{}, {"beam_width": 2}, {"runtime_top_k": 3, "num_return_sequences": 2}])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_ends_the_request_of_the_same_id_without_losing_tokens(fake_server, streaming, sampling):
    """A second stream runs beside the stopped request, to show when tokens are generated."""
    request = {"input_ids": PROMPT, "request_output_len": LONG}
    with Stream(fake_server.grpc) as stream:
        stream.send("tensorrt_llm", "to be stopped", **request, **DETAILS, **sampling, streaming=streaming)
        stream.send("tensorrt_llm", "beside", **request, streaming=True)
        answers, num_beside = [], 0
        while num_beside < 20:
            name, answer = stream.receive()
            num_beside += len(answer.ids) if name == "beside" else 0
            answers += [answer] if name == "to be stopped" else []
        stream.send("tensorrt_llm", "to be stopped", stop=True, input_ids=[0], request_output_len=0)
        while sum(answer.final for answer in answers) < 2:
            name, answer = stream.receive()
            answers += [answer] if name == "to be stopped" else []
        stream.send("tensorrt_llm", "beside", stop=True)
        while not (name == "beside" and answer.final):
            name, answer = stream.receive()
    assert all(answer.error is None for answer in answers)
    (_,) = [answer for answer in answers if not answer.outputs]  # the response to the stop request itself
    told = [answer for answer in answers if answer.outputs]
    for index in range(sampling.get("num_return_sequences", 1)):
        mine = [one for one in told if one.outputs.get("sequence_index", np.zeros(1)).item() == index]
        assert set(mine[-1].outputs["finish_reason"].ravel()) == {b"CANCELLED"}
        assert streaming or len(mine) == 1
        check_details(mine, streaming, sampling)


def check_details(answers: list, streaming: bool, sampling: dict) -> None:
    echoed = 0 if streaming else len(PROMPT)
    for answer in answers:
        outputs = answer.outputs
        assert outputs["sequence_length"].tolist() == [[len(ids) for ids in answer.beams]]
        assert outputs["num_output_tokens"].item() == len(answer.beams[0]) - echoed
        assert outputs["top_log_prob_ids"].shape[2] == len(answer.beams[0]) - echoed
    whole = answers[-1:] if "beam_width" in sampling else answers
    ids = [token for answer in whole for token in answer.beams[0]][echoed:]
    assert len(ids) >= 10
    log_probs = answers[-1].outputs["output_log_probs"][0]
    assert log_probs.shape[1] == len(ids)
    if not sampling:
        assert ids == expected_tokens(PROMPT, len(ids), FAKE_VOCABULARY, None, attend_to_all=False)
        np.testing.assert_allclose(log_probs.sum(), answers[-1].outputs["cum_log_probs"].item(), rtol=1e-4)


def test_a_stop_for_an_unknown_id_gets_one_empty_response(fake_server):
    with Stream(fake_server.grpc) as stream:
        stream.send("tensorrt_llm", "nobody", stop=True)
        (answer,) = stream.until_final()
    assert answer.error is None and answer.ids == []


def test_a_stop_ends_a_waiting_request(fake_server):
    """Four long requests fill the KV cache; the fifth waits in the queue."""
    with Stream(fake_server.grpc) as stream:
        for number in range(4):
            stream.send(
                "tensorrt_llm", f"long {number}", input_ids=PROMPT, request_output_len=LONG, streaming=True
            )
        stream.send("tensorrt_llm", "waiting", input_ids=PROMPT, request_output_len=LONG)
        for _ in range(4):
            stream.receive()
        stream.send("tensorrt_llm", "waiting", stop=True)
        ended = []
        while len(ended) < 2:
            name, answer = stream.receive()
            ended += [(name, answer.outputs.get("finish_reason"))] if answer.final else []
        assert {name for name, _ in ended} == {"waiting"}, "before anybody made room for it"
        assert [reason.item() for _, reason in ended if reason is not None] == [b"CANCELLED"]
        for number in range(4):
            stream.send("tensorrt_llm", f"long {number}", stop=True)
        assert {str(answer.error) for _, answer in stream.until_all_final()} == {"None"}


def test_a_grpc_cancel_frees_the_request(fake_server):
    with Stream(fake_server.grpc) as stream:
        for _ in range(4):
            stream.send("tensorrt_llm", input_ids=PROMPT, request_output_len=LONG, streaming=True)
        for _ in range(8):
            stream.receive()
        stream.cancel()
    assert_all_blocks_are_free(fake_server)


def test_an_http_disconnect_frees_the_request(fake_server):
    before = wait_idle(fake_server)
    host, port = fake_server.http.split(":")
    body = json.dumps({"text_input": "def f():", "max_tokens": LONG, "end_id": -1, "stream": True})
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert b"200" in connection.recv(64)
        wait_until(lambda: active_requests(fake_server) == 1)
    after = wait_idle(fake_server, before, 1)
    assert grown(before, after, "inflight_finished_sequences_total", finish_reason="CANCELLED") == 1


@pytest.mark.parametrize("round_", range(3))
def test_ids_can_be_reused_right_after_a_stream_is_closed(fake_server, round_):
    """Load generators reuse ids "0".."9" after closing a stream without reading it."""
    for _ in range(3):
        stream = Stream(fake_server.grpc)
        for number in range(10):
            stream.send("tensorrt_llm", str(number), input_ids=PROMPT, request_output_len=300)
        stream.cancel()
        stream.client.close()
    with Stream(fake_server.grpc) as stream:
        for number in range(10):
            stream.send("tensorrt_llm", str(number), input_ids=PROMPT, request_output_len=3)
        answers = [stream.receive()[1] for _ in range(10)]
    assert [answer.error for answer in answers] == [None] * 10
