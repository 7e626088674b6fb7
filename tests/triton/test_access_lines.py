"""Triton's front end tells the engine where a request came from, and logs those that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from inflight.errors import Unavailable
from tests.access_lines import AccessLines, access_lines
from tests.triton.factories import make_triton_request, token_inputs
from tests.triton.test_front_end import Build, build  # noqa: F401  a fixture


@pytest.fixture
def lines() -> Iterator[AccessLines]:
    with access_lines() as found:
        yield found


def test_a_request_has_the_clients_id_or_a_random_one(build: Build, lines: AccessLines) -> None:  # noqa: F811
    stage = build()
    stage.take(make_triton_request(request_id="mine"))
    stage.take(make_triton_request(token_inputs(client_id=7)))
    stage.take(make_triton_request(request_id="x" * 10_000))
    first, second, third = (request.origin for request in stage.client.submitted.values())
    assert first is not None and second is not None and third is not None
    assert (first.front, first.request_id, first.client) == ("triton", "mine", "")
    assert re.fullmatch(r"[0-9a-f]{32}", second.request_id) and second.client == "7"
    assert len(third.request_id) == 256
    assert first.model and 0 < first.received_ns <= second.received_ns


def test_a_refused_request_has_a_line_without_its_message(build: Build, lines: AccessLines) -> None:  # noqa: F811
    stage = build()
    stage.take(make_triton_request(token_inputs(request_output_len=0), "a"))
    assert lines.one()["code"] == "INVALID_ARG"
    stage.client.refusal = Unavailable("no engine")
    stage.take(make_triton_request(request_id="b"))
    second = lines.wait(2)[1]
    assert (second["request_id"], second["code"], second["finish_reason"]) == ("b", "UNAVAILABLE", "ERROR")
