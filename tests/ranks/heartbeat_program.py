"""A rank that has only a heartbeat: `python -m tests.ranks.heartbeat_program PEER PORT TIMEOUT_S`.

Prints "woken" each time rank PEER at PORT wakes it, and the reason of its end.
"""

from __future__ import annotations

import socket
import sys

from inflight.errors import Unavailable
from inflight.ranks.heartbeat import Heartbeat
from tests.ranks.peers import make_peer


def main() -> None:
    peer, port, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    connection = socket.create_connection(("127.0.0.1", port))
    heartbeat = Heartbeat([make_peer(peer, connection)], 3, timeout_s, lambda error: None)
    print("waiting", flush=True)
    try:
        while True:
            heartbeat.wait()
            print("woken", flush=True)
    except Unavailable as error:
        print(error, flush=True)
    heartbeat.close()


if __name__ == "__main__":
    main()
