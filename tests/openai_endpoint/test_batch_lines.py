"""The lines of batch files: what is refused before anything is sent, and what an interrupted output keeps."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.openai.batches import lines
from inflight.openai.batches.lines import (
    LOWEST_PRIORITY,
    BadBatchLine,
    BatchAnswer,
    BatchRequest,
    answer_line,
    read_requests,
    resume_output,
)
from inflight.openai.batches.sending import send_all, send_until_final

LINE: dict[str, Any] = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x"},
}
GOOD = json.dumps({**LINE, "custom_id": "good"})


def read(*lines: object, url: str | None = None) -> list[BatchRequest]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return list(read_requests(io.BytesIO(text.encode()), url))


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in LINE.items() if name != field}


@pytest.mark.parametrize(
    ("line", "field", "said"),
    [
        ("{", None, "not JSON"),
        ('{"custom_id": "\\ud800"', None, "not JSON"),
        ([1], None, "expected an object with custom_id, method, url, body, got [1]"),
        (without("custom_id"), "custom_id", "custom_id is missing"),
        (without("body"), "body", "body is missing"),
        ({**LINE, "bodi": {}}, "bodi", "unknown field bodi"),
        ({**LINE, "custom_id": 7}, "custom_id", "custom_id is 7, expected a text"),
        ({**LINE, "custom_id": ""}, "custom_id", 'custom_id is "", expected a text'),
        ({**LINE, "custom_id": "x" * 513}, "custom_id", "xxx…, 513 characters, expected at most 512"),
        ({**LINE, "custom_id": "good"}, "custom_id", "custom_id 'good' is also in line 1"),
        ({**LINE, "method": "GET"}, "method", 'method is "GET", expected "POST"'),
        ({**LINE, "url": "/v1/completion"}, "url", "did you mean /v1/completions?"),
        ({**LINE, "url": "/v1/files"}, "url", 'url is "/v1/files", expected /v1/chat/completions or'),
        ({**LINE, "url": None}, "url", "url is null"),
        ({**LINE, "url": ["x"]}, "url", 'url is ["x"]'),
        ({**LINE, "body": "x"}, "body", 'body is "x", expected an object'),
        ({**LINE, "body": {"stream": True}}, "body.stream", "answers of a batch are not streamed"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(line: object, field: str | None, said: str) -> None:
    with pytest.raises(BadBatchLine) as found:
        read(GOOD, "", line)
    assert (found.value.line, found.value.field) == (3, field)
    assert str(found.value).startswith("line 3: ") and said in str(found.value)


def test_a_line_has_at_most_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is without the line's end; a longer line is not read to its end."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", len(GOOD))
    assert len(list(read_requests(io.BytesIO(GOOD.encode())))) == 1
    file = io.BytesIO(f"{GOOD}\n{GOOD} {'x' * 5 * len(GOOD)}\n".encode())
    with pytest.raises(BadBatchLine, match=f"line 2: the line is longer than {len(GOOD)} bytes") as found:
        list(read_requests(file))
    assert found.value.error_code == "line_too_long" and file.tell() == 2 * (len(GOOD) + 1)


def test_files_of_other_systems_are_read() -> None:
    """A byte order mark, line ends of Windows, empty lines, and no end of the last line."""
    line = json.dumps(LINE).encode()
    other = json.dumps({**LINE, "custom_id": "b"}).encode()
    raw = b"\xef\xbb\xbf" + line + b"\r\n\r\n  \r\n" + other
    assert [each.custom_id for each in read_requests(io.BytesIO(raw))] == [LINE["custom_id"], "b"]
    for odd in (b'{"custom_id": "\xff"}', b"[" * 200_000, b"\x00" * 10, line + b"\xef\xbb\xbf"):
        with pytest.raises(BadBatchLine, match="line 1: not JSON"):
            list(read_requests(io.BytesIO(odd)))


def test_a_custom_id_may_have_512_characters() -> None:
    (request,) = read({**LINE, "custom_id": "é" * 512})
    assert request.custom_id == "é" * 512


def test_a_file_without_requests_is_refused() -> None:
    with pytest.raises(BadBatchLine, match="no requests"):
        read("", "")


def test_lines_for_another_route_than_the_batchs_are_refused() -> None:
    with pytest.raises(BadBatchLine, match='line 1: url is "/v1/completions", expected /v1/embeddings'):
        read(LINE, url="/v1/embeddings")


def test_requests_have_the_lowest_priority_unless_they_have_one_of_their_own() -> None:
    chosen = {**LINE, "custom_id": "two", "body": {"prompt": "y", "priority": -3}}
    assert [each.body["priority"] for each in read(LINE, chosen)] == [LOWEST_PRIORITY, -3]


def test_responses_of_a_batch_are_not_kept_unless_asked_for() -> None:
    line = {**LINE, "url": "/v1/responses", "body": {"input": "x"}}
    kept = {**line, "custom_id": "two", "body": {"input": "x", "store": True}}
    assert [each.body["store"] for each in read(line, kept)] == [False, True]


def test_an_answer_has_openais_form() -> None:
    line = json.loads(answer_line("one", BatchAnswer.read(200, "req-1", b'{"id":\n "cmpl-1"}')))
    assert line.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"id": "cmpl-1"}}
    assert line == {"custom_id": "one", "response": response, "error": None}
    lost = json.loads(answer_line("one", BatchAnswer.none("it is gone")))
    assert lost["response"] is None and lost["error"]["message"] == "it is gone"


def test_the_page_of_a_proxy_becomes_an_error() -> None:
    answer = BatchAnswer.read(502, "", b"<html>Bad gateway</html>")
    assert answer.is_temporary and answer.message == "502: <html>Bad gateway</html>"
    assert BatchAnswer.read(504, "", b"").message == "504: Gateway Timeout"


OK = answer_line("done", BatchAnswer(200, "", {}))
FAILED = answer_line("failed", BatchAnswer(400, "", {}))
TORN = answer_line("torn", BatchAnswer(200, "", {}))


@pytest.mark.parametrize("size", range(len(TORN)))
def test_a_torn_last_line_is_dropped(tmp_path: Path, size: int) -> None:
    file = tmp_path / "output.jsonl"
    file.write_bytes(OK + FAILED + TORN[:size])
    assert resume_output(file) == {"done": True, "failed": False}
    assert file.read_bytes() == OK + FAILED


@pytest.mark.parametrize("text", [b"my notes", b"[1]\n", b"{}\n" + OK, OK + b"notes", GOOD.encode()])
def test_another_file_is_refused_and_not_changed(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(text)
    with pytest.raises(BadBatchLine, match="expected an answer of a batch"):
        resume_output(file)
    assert file.read_bytes() == text


class Sent:
    """A server that gives these answers in turn."""

    def __init__(self, *answers: BatchAnswer) -> None:
        self.answers = list(answers)

    async def send(self, request: BatchRequest) -> BatchAnswer:
        return self.answers.pop(0)


REQUEST = BatchRequest("one", "/v1/completions", {})
GOOD_ANSWER, BAD_ANSWER = BatchAnswer(200, "", {}), BatchAnswer(400, "", {})
TEMPORARY = [*(BatchAnswer(status, "", {}) for status in (429, 502, 503, 504)), BatchAnswer.none("refused")]


@pytest.mark.parametrize("last", [GOOD_ANSWER, BAD_ANSWER, BatchAnswer(500, "", {})])
def test_a_temporary_failure_is_tried_again_until_the_answer_is_final(last: BatchAnswer) -> None:
    sent = Sent(*TEMPORARY, last, GOOD_ANSWER)
    assert asyncio.run(send_until_final(REQUEST, sent.send, first_pause_s=0)) is last
    assert len(sent.answers) == 1


def test_attempts_are_limited_except_those_that_found_a_full_queue() -> None:
    full, away = TEMPORARY[0], TEMPORARY[2]
    sent = Sent(full, away, full, full, away, full, away, GOOD_ANSWER)
    told: list[BatchAnswer] = []
    asked = send_until_final(REQUEST, sent.send, retries=2, on_retry=told.append, first_pause_s=0)
    assert asyncio.run(asked) is away
    assert told == [full, away, full, full, away, full]


def test_requests_are_read_when_they_are_sent_and_a_given_number_is_in_flight() -> None:
    kept: list[str] = []
    num_read = num_sent = 0

    def requests() -> Iterator[BatchRequest]:
        nonlocal num_read
        for number in range(50):
            num_read += 1
            yield BatchRequest(str(number), "/v1/completions", {})

    async def run() -> None:
        may_end = asyncio.Event()

        async def send(request: BatchRequest) -> BatchAnswer:
            nonlocal num_sent
            num_sent += 1
            await may_end.wait()
            return GOOD_ANSWER

        running = asyncio.create_task(
            send_all(requests(), send, lambda request, _: kept.append(request.custom_id), 7)
        )
        while num_sent < 7:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert (num_read, num_sent, kept) == (7, 7, [])
        may_end.set()
        await running

    asyncio.run(run())
    assert sorted(map(int, kept)) == list(range(50)) and num_read == 50


def test_an_error_ends_all_requests() -> None:
    ended: list[str] = []

    async def send(request: BatchRequest) -> BatchAnswer:
        if request.custom_id == "2":
            raise ValueError("stop")
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(request.custom_id)
        return GOOD_ANSWER

    requests = iter([BatchRequest(str(number), "", {}) for number in range(9)])
    with pytest.raises(ValueError, match="stop"):
        asyncio.run(send_all(requests, send, lambda *_: None, 3))
    assert sorted(ended) == ["0", "1"]
