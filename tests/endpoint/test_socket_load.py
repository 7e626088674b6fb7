"""An endpoint's socket under load, and without any."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from inflight.core.request.response import Response
from inflight.endpoint.client import SocketEngineClient
from tests.endpoint.factories import PATIENCE_S, Inbox, make_request


def test_a_front_end_that_does_not_read_delays_nobody(front_end, batcher, path) -> None:
    deaf_inbox, inbox = Inbox(), Inbox()
    gate = threading.Event()

    def deaf(response: Response) -> None:
        assert gate.wait(PATIENCE_S)
        deaf_inbox(response)

    other = SocketEngineClient(path)
    other.submit(make_request(), deaf)
    deaf_request = batcher.take()
    front_end.submit(make_request(), inbox)
    request = batcher.take()
    for token in range(20_000):
        batcher.answer(deaf_request, token, final=False)
    batcher.answer(request, 5)
    assert inbox.final().error is None
    batcher.answer(deaf_request, 20_000)
    gate.set()
    deaf_inbox.final()
    assert deaf_inbox.tokens == list(range(20_001))
    assert len(deaf_inbox.responses) < 20_000
    other.close()


def test_idle_costs_no_cpu(front_end, batcher) -> None:
    front_end.submit(make_request(), Inbox())
    batcher.take()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("endpoint-")]
    assert len(threads) >= 4  # accept, read, write; the front end's reader

    def switches() -> int:
        texts = [Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads]
        return sum(int(line.split()[1]) for t in texts for line in t.splitlines() if "voluntary" in line)

    settled = threading.Event()
    before = -1
    while before != (before := switches()):
        settled.wait(0.05)
    settled.wait(0.3)
    assert switches() == before


def test_throughput(front_end, batcher, capsys) -> None:
    inboxes = [Inbox() for _ in range(64)]
    for inbox in inboxes:
        front_end.submit(make_request(), inbox)
    requests = [batcher.take() for _ in inboxes]
    begin = time.perf_counter()
    for token in range(160):
        for request in requests:
            batcher.answer(request, token, final=token == 159)
    sent = time.perf_counter()
    for inbox in inboxes:
        inbox.final()
    end = time.perf_counter()
    received = sum(len(inbox.responses) for inbox in inboxes)
    assert all(inbox.tokens == list(range(160)) for inbox in inboxes)
    with capsys.disabled():
        print(
            f"\n10,240 responses of 64 streams: {10240 / (sent - begin):,.0f}/s taken from the loop, "
            f"{10240 / (end - begin):,.0f}/s delivered (in {received} frames)"
        )
