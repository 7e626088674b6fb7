"""Measure the time of an iteration on a real server, with one stream and with many streams.

Starts a tritonserver with a fake engine whose forward pass takes a fixed time, opens N gRPC streams, and
reads the number of iterations and seconds from the statistics in the log. The time of an iteration beyond
the forward pass is the loop's own work, and the time during which the loop waits for the sender,
cancellation and Triton threads.
"""

from __future__ import annotations

import json
import re
import statistics
import time

from benchmarks.measuring.options import duration, new_parser
from benchmarks.measuring.real_server import log_since, open_streams
from inflight.arguments import positive, whole
from inflight.server.launch import ServerOptions, TritonServer
from inflight.testing.fake_server import serve_fake

_COUNTER = re.compile(r'"Iteration Counter": (\d+),')


def measure(server: TritonServer, num_streams: int, seconds: float) -> float:
    """Return the milliseconds per iteration while `num_streams` streams run."""
    client, responses = open_streams(server.grpc, num_streams)
    while len(responses) < 2 * num_streams:
        time.sleep(0.01)
    started = time.time()
    time.sleep(seconds)
    counts = [
        (when, int(found[1]))
        for when, text in log_since(server, started)
        if when < seconds and (found := _COUNTER.search(text))
    ]
    client.stop_stream(cancel_requests=True)
    time.sleep(0.5)
    (first, before), (last, after) = counts[0], counts[-1]
    return 1e3 * (last - first) / (after - before)


def main() -> None:
    parser = new_parser("iteration", __doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=duration, default=2.0, help="length of a round")
    parser.add_argument("--step-us", type=whole, default=10000, help="time of the forward pass")
    arguments = parser.parse_args()
    settings = {
        "fake_engine": f"vocab=1000,step_us={arguments.step_us}",
        "max_tokens_in_paged_kv_cache": "600000",
    }
    rows = []
    with serve_fake(settings=settings, options=ServerOptions(log_verbose=True)) as server:
        for count in arguments.streams:
            times = [measure(server, count, arguments.seconds) for _ in range(arguments.rounds)]
            rows.append({"streams": count, "iteration_ms_median": round(statistics.median(times), 2)})
            print(rows[-1])
    print(json.dumps({"bench": "iteration", "step_us": arguments.step_us, "rows": rows}))


if __name__ == "__main__":
    main()
