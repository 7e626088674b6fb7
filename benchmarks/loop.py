"""Measure an iteration's time on the engine's thread while another thread sends responses slowly.

Runs a fake engine without a forward pass, N streaming requests, and one sender thread that takes as long per
response as the Python stub of a real tritonserver. Prints the median time of an iteration for each N, and
the number of tokens per response: responses for a sender that falls behind are merged, and the loop does not
wait for it.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Sequence

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.batch_manager import GptManager
from inflight.config import SchedulingConfig
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.endpoint.delivery import Delivery
from inflight.endpoint.local import LocalEngineClient
from inflight.testing.fake_engine import FakeEngine


class SlowSender:
    """Takes responses from a delivery and spends `seconds` on each, with the GIL released."""

    def __init__(self, seconds: float) -> None:
        self.delivery: Delivery[Response] = Delivery(limit=1)
        self.num_responses = 0
        self.num_tokens = 0
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.delivery.run(self._send)

    def _send(self, responses: Sequence[Response]) -> None:
        for response in responses:
            if self._seconds:
                time.sleep(self._seconds)
            self.num_responses += 1
            self.num_tokens += response.result.num_output_tokens[0] if response.result else 0

    def close(self) -> None:
        self.delivery.close()
        self._thread.join()


def measure(num_streams: int, num_tokens: int, send_us: float) -> dict[str, float]:
    """Run `num_streams` streams of `num_tokens` tokens; return the times in microseconds."""
    limits = EngineLimits(1000, 8192, max(64, num_streams), num_streams * 300, 32)
    scheduler = Scheduler(SchedulingConfig(), limits)
    sender = SlowSender(send_us * 1e-6)
    client = LocalEngineClient(EngineDescription(scheduler.limits), lambda: None)
    manager = GptManager(
        FakeEngine(limits, attend_to_all=False),
        scheduler,
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        start=False,
    )
    for number in range(num_streams):
        request = Request(0, tuple(range(number, number + 16)), num_tokens, streaming=True)
        client.submit(request, sender.delivery.put)
    times = []
    while not times or scheduler.num_active:
        started = time.perf_counter()
        manager.step()
        times.append(time.perf_counter() - started)
    sender.close()
    return {
        "streams": num_streams,
        "iteration_us_median": round(statistics.median(times[1:]) * 1e6, 1),
        "iteration_us_p99": round(sorted(times[1:])[int(0.99 * len(times[1:]))] * 1e6, 1),
        "tokens": sender.num_tokens,
        "responses": sender.num_responses,
        "tokens_per_response": round(sender.num_tokens / sender.num_responses, 1),
    }


def main() -> None:
    parser = new_parser("loop", __doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=positive, default=2000, help="tokens per stream")
    parser.add_argument("--send-us", type=float, default=165.0, help="time of one send")
    arguments = parser.parse_args()
    rows = [
        measure(count, arguments.tokens, send_us)
        for send_us in (0.0, arguments.send_us)
        for count in arguments.streams
    ]
    for row in rows:
        print(row)
    print(json.dumps({"bench": "loop", "send_us": arguments.send_us, "rows": rows}))


if __name__ == "__main__":
    main()
