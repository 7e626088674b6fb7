"""Measure how soon a real server detects cancelled streams, and how soon it frees their KV blocks.

Starts a tritonserver with a fake engine that records a trace, opens N gRPC streams and one more that is not
cancelled, waits until they generate, cancels the N streams at once, and reads the trace. The time of a stop
in the trace is when the cancellation was detected. The iteration that fetches the stops frees their slots
and blocks. Times are in milliseconds since the cancellation.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring.options import new_parser
from benchmarks.measuring.real_server import GrowingTrace, open_streams
from inflight.arguments import positive, whole
from inflight.batch_manager.recording import Begin
from inflight.server.launch import TritonServer
from inflight.testing.fake_server import serve_fake


def _stops(trace: GrowingTrace) -> Iterator[Begin]:
    """Yield the iterations since the last call that fetched stop signals."""
    for record in trace.new_records(containing=b'"stops":[{'):
        if isinstance(record, Begin):
            yield record


def measure(server: TritonServer, trace: GrowingTrace, num_streams: int) -> dict[str, float]:
    """Measure one round; return times in milliseconds."""
    staying, _ = open_streams(server.grpc, 1)
    leaving, responses = open_streams(server.grpc, num_streams)
    while len(responses) < 4 * num_streams:
        time.sleep(0.01)
    list(_stops(trace))
    cancelled_ns = time.monotonic_ns()
    leaving.stop_stream(cancel_requests=True)
    noticed: list[float] = []
    freed = 0.0
    while len(noticed) < num_streams:
        time.sleep(0.05)
        for iteration in _stops(trace):
            noticed += [1e-6 * (stop.requested_ns - cancelled_ns) for stop in iteration.inputs.stops]
            freed = 1e-6 * (iteration.inputs.now_ns - cancelled_ns)
        if time.monotonic_ns() - cancelled_ns > 20e9:
            sys.exit("the cancel was not noticed in 20 s")
    staying.stop_stream(cancel_requests=True)
    time.sleep(0.5)
    return {
        "noticed_median_ms": statistics.median(noticed),
        "noticed_last_ms": max(noticed),
        "all_free_ms": freed,
    }


def _rows(
    settings: dict[str, str], path: Path, streams: list[int], num_rounds: int
) -> list[dict[str, float]]:
    rows = []
    with serve_fake(settings=settings) as server:
        trace = GrowingTrace(path)
        for count in streams:
            rounds = [measure(server, trace, count) for _ in range(num_rounds)]
            row = {key: round(statistics.median(r[key] for r in rounds), 1) for key in rounds[0]}
            rows.append({"streams": count, **row})
            print(rows[-1])
    return rows


def main() -> None:
    parser = new_parser("cancel", __doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--step-us", type=whole, default=5000, help="time of the fake engine's iteration")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        settings = {
            "fake_engine": f"vocab=1000,step_us={arguments.step_us}",
            "max_tokens_in_paged_kv_cache": "1200000",
            "record_path": str(path),
        }
        rows = _rows(settings, path, arguments.streams, arguments.rounds)
    print(
        json.dumps(
            {"bench": "cancel", "step_us": arguments.step_us, "rounds": arguments.rounds, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
