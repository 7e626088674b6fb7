"""The package's log lines appear in Triton's log once, at the corresponding level."""

from __future__ import annotations

import logging

from inflight.log_lines import REQUEST_ID
from inflight.triton.host import log_to_triton
from tests.triton.fake_pb_utils import FakePbUtils
from tests.triton.logging_restored import logging_restored


def test_log_lines_appear_once_at_tritons_levels() -> None:
    fake = FakePbUtils()
    with logging_restored() as logger:
        log_to_triton(fake)
        log_to_triton(fake)
        logger.setLevel(logging.DEBUG)
        part = logger.getChild("part")
        part.debug("a")
        part.info("b %d", 1)
        part.warning("c")
        part.error("d")
        part.error("e\n  f")
    lines = fake.Logger.lines
    assert lines[4:] == [("error", "e"), ("error", "  f")], "a stack can be read"
    assert lines[:4] == [("verbose", "a"), ("info", "b 1"), ("warn", "c"), ("error", "d")]


def test_every_line_about_a_request_has_its_id() -> None:
    fake = FakePbUtils()
    with logging_restored() as logger:
        log_to_triton(fake)
        logger.setLevel(logging.DEBUG)
        logger.error("e\n  f", extra={"request_id": "a b"})
        token = REQUEST_ID.set("c")
        logger.warning("g")
        REQUEST_ID.reset(token)
    texts = [text for _, text in fake.Logger.lines]
    assert texts == ['e request_id="a b"', '  f request_id="a b"', "g request_id=c"]
