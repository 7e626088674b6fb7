"""Shutdown: responses that clients still get, and resources that must be gone afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.server.launch import ServerOptions
from inflight.testing.fake_server import serve_fake
from tests.tiers import with_all

from .clients import Stream

SLOW = {"fake_engine": "vocab=1000,step_us=20000"}
PROMPT = [1, 2, 3]


def test_requests_in_flight_finish_and_longer_ones_are_answered_unavailable(elsewhere):
    with serve_fake(settings=SLOW, options=ServerOptions(exit_timeout_s=7)) as server:
        with Stream(server.grpc) as short, Stream(server.grpc) as long:
            short.send("tensorrt_llm", input_ids=PROMPT, request_output_len=60, streaming=True)
            long.send("tensorrt_llm", input_ids=PROMPT, request_output_len=4000, streaming=True)
            short.receive()
            long.receive()
            assert server.shut_down() is True, "in order, although the streams are still held"
            *_, finished = short.until_final()
            *_, cut = long.until_final()
        assert finished.finish_reason == "LENGTH"
        assert "shutting down" in str(cut.error)


@pytest.mark.parametrize("model", with_all(["tensorrt_llm", "ensemble"], ["ensemble"]))
def test_a_used_server_ends_in_spite_of_an_idle_stream_and_leaves_nothing_behind(elsewhere, model):
    with (
        serve_fake(settings=SLOW, options=ServerOptions(exit_timeout_s=30)) as server,
        Stream(server.grpc) as stream,
    ):
        folder = server.repository.path.parent
        request = {"input_ids": PROMPT, "request_output_len": 3}
        if model == "ensemble":
            request = {"text_input": "a", "max_tokens": 3}
        stream.send(model, **request)
        list(stream.until_final())
        assert list(Path("/dev/shm").glob(f"{folder.name}*"))
        assert server.shut_down() is True, "in order, and not because the exit timeout was over"
    assert not list(Path("/dev/shm").glob(f"{folder.name}*"))
    assert not folder.exists()
