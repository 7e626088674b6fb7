"""An endpoint's socket under load, and without any."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from inflight.core.request.response import Response
from inflight.endpoint.client import SocketEngineClient
from tests.endpoint.factories import PATIENCE_S, Inbox, make_request


def test_a_front_end_that_does_not_read_delays_no_other(front_end, batcher, path) -> None:
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


def test_idle_threads_sleep() -> None:
    """A process of its own has only the context switches of an endpoint and a front end."""
    program = [sys.executable, "-m", "tests.endpoint.idle_program"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    num_threads, num_switches = map(int, done.stdout.split())
    assert num_threads >= 4, "accept, read, write; the front end's reader"
    assert num_switches == 0


def test_responses_of_many_streams_share_frames(front_end, batcher) -> None:
    inboxes = [Inbox() for _ in range(64)]
    for inbox in inboxes:
        front_end.submit(make_request(), inbox)
    requests = [batcher.take() for _ in inboxes]
    for token in range(160):
        for request in requests:
            batcher.answer(request, token, final=token == 159)
    for inbox in inboxes:
        inbox.final()
    assert all(inbox.tokens == list(range(160)) for inbox in inboxes)
    assert sum(len(inbox.responses) for inbox in inboxes) < 64 * 160
