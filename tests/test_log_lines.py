"""Log lines as text and as JSON: what is written can be read, whatever clients choose as ids."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.log_lines import (
    REQUEST_ID,
    JsonLog,
    LineFormatter,
    RankFormatter,
    format_fields,
    parse_fields,
)

from .tiers import examples

HEAD = "1127 11:49:05.678794 8790"
VALUES = st.one_of(
    st.text(max_size=20), st.integers(-(10**9), 10**9), st.integers(0, 10**6).map(lambda n: n / 10)
)


def as_json(*writes: str) -> list[dict[str, object]]:
    stream = io.StringIO()
    log = JsonLog(stream)
    for text in writes:
        log.write(text)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def record(text: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("inflight.x", logging.WARNING, "x.py", 1, text, (), None)
    made.__dict__.update(extra)
    return made


@settings(max_examples=examples(fast=100, all=2000), deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,10}", fullmatch=True), VALUES, max_size=5))
def test_fields_are_read_as_they_were_written(fields: dict[str, str | int | float]) -> None:
    text = format_fields(fields)
    assert parse_fields(text) == fields
    assert {name: type(value) for name, value in parse_fields(text).items()} == {
        name: type(value) for name, value in fields.items()
    }
    assert text.isascii() and not re.search(r"[\x00-\x1f]", text)


def test_a_line_of_tritons_log_becomes_an_object() -> None:
    (line,) = as_json(f'I{HEAD} host.py:175] "the file \\"a\\" is read"\n')
    assert line["time"].endswith("-11-27T11:49:05.678794Z")
    assert {key: line[key] for key in ("level", "pid", "source", "message")} == {
        "level": "info",
        "pid": 8790,
        "source": "host.py:175",
        "message": 'the file "a" is read',
    }


def test_an_access_line_has_its_fields_as_values() -> None:
    fields = {"request_id": "a b", "model": "m", "output_tokens": 12, "total_ms": 3.5, "client": "[::1]:80"}
    (line,) = as_json(f"I{HEAD} access] {format_fields(fields)}\n")
    assert fields.items() <= line.items() and "message" not in line


def test_further_lines_keep_level_and_source_of_their_record() -> None:
    lines = as_json(f"E{HEAD} server.cc:1] failed\n", "  at x\n", "\n", "  at y\n", "rank 1: ERROR no\n")
    assert [line["message"] for line in lines] == ["failed", "  at x", "  at y", "no"]
    assert [line["level"] for line in lines] == ["error"] * 4
    assert [line["source"] for line in lines] == ["server.cc:1"] * 3 + ["rank"]
    assert lines[3]["rank"] == 1


def test_a_message_of_the_command_is_one_object_however_it_is_written() -> None:
    whole = as_json("serve: no such model\nE1 the cause\n")
    parts = as_json("serve: no such model\nE1 the cause", "\n")
    assert [line["message"] for line in whole] == ["no such model\nE1 the cause"]
    assert [line["message"] for line in parts] == ["no such model\nE1 the cause"]
    assert whole[0]["source"] == "serve"


def test_threads_do_not_mix_their_lines() -> None:
    stream = io.StringIO()
    log = JsonLog(stream)
    log.write(f"E{HEAD} a.cc:1] begun")
    other = threading.Thread(target=lambda: log.write("from another process\n"))
    other.start()
    other.join(60)
    log.write(" and done\n")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["from another process", "begun and done"]
    assert [line["level"] for line in lines] == ["info", "error"]


def test_a_record_ends_with_the_id_of_its_request() -> None:
    formatter = LineFormatter("openai")
    assert formatter.format(record("no engine")).endswith(" openai] no engine")
    assert formatter.format(record("failed", request_id="a b")).endswith(' openai] failed request_id="a b"')
    token = REQUEST_ID.set("7")
    try:
        text = formatter.format(record("failed"))
    finally:
        REQUEST_ID.reset(token)
    (line,) = as_json(text + "\n")
    assert (line["level"], line["message"], line["request_id"]) == ("warning", "failed", "7")


def test_a_traceback_follows_its_record() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        failed = record("failed", request_id="7", exc_info=sys.exc_info())
    text = LineFormatter("openai").format(failed)
    first, *rest = text.splitlines()
    assert first.endswith('failed request_id="7"') and rest[-1] == "ValueError: no"
    lines = as_json(text + "\n", f"W{HEAD} x.py:1] other\n", "  more\n")
    assert [line.get("request_id") for line in lines] == ["7"] * (1 + len(rest)) + [None, None]


def test_a_ranks_line_keeps_its_form_and_has_the_id() -> None:
    text = RankFormatter(3).format(record("failed", request_id="a"))
    assert text == "rank 3: WARNING failed request_id=a"
    (line,) = as_json(text + "\n")
    assert (line["rank"], line["level"], line["message"], line["request_id"]) == (3, "warning", "failed", "a")
