"""Print how many threads an endpoint and a front end have, and how often they wake in 0.3 s without work."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.server import EndpointServer
from tests.endpoint.factories import Batcher, Inbox, make_request


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="endpoint-") as folder:
        batcher, path = Batcher(), str(Path(folder, "engine.sock"))
        server, front_end = EndpointServer(batcher.client, path), SocketEngineClient(path)
        front_end.submit(make_request(), Inbox())
        batcher.take()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("endpoint-")]

        def num_switches() -> int:
            texts = [Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads]
            lines = [line for text in texts for line in text.splitlines()]
            return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

        for _ in range(20):  # the request's work may not have finished
            before = num_switches()
            time.sleep(0.3)
            if not (num_wakes := num_switches() - before):
                break
        print(len(threads), num_wakes)
        front_end.close()
        server.close()


if __name__ == "__main__":
    main()
