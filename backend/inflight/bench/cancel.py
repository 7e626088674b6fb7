"""How soon a real server notices that clients are gone, and how soon their blocks are free.

Starts a tritonserver with a fake engine, opens N gRPC streams and one more that stays, lets tokens flow, cancels
the N at once and reads the server's log: when the cancellation watch noticed each client, and when the statistics
first say that only the other stream is left. Times are from the moment of the cancel, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from inflight.bench.endless_streams import log_since, open_streams
from inflight.server.launch import ServerOptions, TritonServer, serve


def measure(server: TritonServer, num_streams: int) -> dict[str, float]:
    """One round; milliseconds."""
    staying, _ = open_streams(server.grpc, 1)
    leaving, responses = open_streams(server.grpc, num_streams)
    while len(responses) < 4 * num_streams:
        time.sleep(0.01)
    cancelled = time.time()
    leaving.stop_stream(cancel_requests=True)
    freed = noticed = None
    while freed is None:
        time.sleep(0.05)
        lines = log_since(server, cancelled)
        noticed = [when for when, text in lines if "its client is gone" in text]
        freed = next((when for when, text in lines if '"Active Request Count": 1,' in text), None)
        if time.time() - cancelled > 20:
            sys.exit("the cancel was not noticed in 20 s")
    staying.stop_stream(cancel_requests=True)
    time.sleep(0.5)
    return {
        "noticed_median_ms": 1e3 * statistics.median(noticed),
        "noticed_last_ms": 1e3 * max(noticed),
        "all_free_ms": 1e3 * freed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench cancel", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-us", type=int, default=5000, help="time of the fake engine's iteration")
    arguments = parser.parse_args()
    settings = {
        "fake_engine": f"vocab=1000,step_us={arguments.step_us}",
        "stats_check_period_ms": "1",
        "max_tokens_in_paged_kv_cache": "1200000",
    }
    rows = []
    with serve(settings=settings, options=ServerOptions(log_verbose=True)) as server:
        for count in arguments.streams:
            rounds = [measure(server, count) for _ in range(arguments.rounds)]
            row = {key: round(statistics.median(r[key] for r in rounds), 1) for key in rounds[0]}
            rows.append({"streams": count, **row})
            print(rows[-1])
    print(
        json.dumps(
            {"bench": "cancel", "step_us": arguments.step_us, "rounds": arguments.rounds, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
