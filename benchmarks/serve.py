"""Measure a real tritonserver with Triton's perf_analyzer: the same figures as `offline`, for gRPC streams.

Starts a server like `scripts/serve`, sends every request of the workload once with perf_analyzer, N at a
time, and reads the responses' times from its export. The first run warms up and is not counted. With
`--beside`, the same engine also runs in this process, alternately with the server, and the ratio is printed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.analyzer import TIMEOUT_S, analyze, engine_stub, process_ids
from benchmarks.measuring.bandwidth import Probe
from benchmarks.measuring.options import Options, add_options, engine_settings, new_parser
from benchmarks.measuring.report import Resources, Timeline, to_line, to_values
from benchmarks.measuring.rounds import BenchedEngine, run_rounds
from benchmarks.measuring.setup import Setup
from benchmarks.measuring.workload import BenchRequest, draw
from benchmarks.offline import InProcess, peak_rss_bytes
from inflight.arguments import positive
from inflight.errors import InflightError
from inflight.models import read_model_description
from inflight.server.errors import ServeError
from inflight.server.launch import serve


class ServedEngine:
    """A server on free ports, for the duration of a `with` block.

    Attributes:
        load_s: Seconds from the start of the server until every model is ready.
    """

    name = "serve"

    def __init__(self, settings: Mapping[str, str], model_repository: Path | None = None) -> None:
        self._closing = contextlib.ExitStack()
        begun = time.perf_counter()
        self._server = self._closing.enter_context(
            serve(model_repository, settings=settings, ready_timeout=TIMEOUT_S)
        )
        self.load_s = time.perf_counter() - begun

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Timeline]:
        """Run all requests, `concurrency` at a time."""
        return [answer.timeline for answer in analyze(self._server, requests, concurrency)]

    def resources(self) -> Resources:
        """Return the resources that all processes of the server have used so far."""
        pids = process_ids(self._server)
        return Resources(self.load_s, peak_rss_bytes(engine_stub(pids)), sum(map(peak_rss_bytes, pids)))

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def main() -> None:
    parser = new_parser("serve", __doc__)
    add_options(parser, concurrency=16)
    parser.add_argument(
        "--beside", action="store_true", help="also run in this process, in turn, and print the ratio"
    )
    parser.add_argument("--stream-interval", type=positive, default=1, help="the parameter stream_interval")
    arguments = parser.parse_args()
    try:
        _run(Options.of(arguments), arguments.stream_interval, arguments.beside)
    except (InflightError, ServeError) as error:
        sys.exit(f"{parser.prog}: {error}")


def _run(options: Options, stream_interval: int, is_beside: bool) -> None:
    config = read_model_description(options.model).decoder
    requests = draw(options.workload, config.vocab_size, options.num_requests)
    setup = Setup.of(options, config, requests)
    settings = engine_settings(options, requests)
    streaming = {"stream_interval": str(stream_interval)}
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(Probe(options.num_threads))
        engines: list[BenchedEngine] = [stack.enter_context(ServedEngine(settings | streaming))]
        if is_beside:
            engines.append(stack.enter_context(InProcess(settings)))
        served, *others = run_rounds(engines, requests, setup, probe)
    more: dict[str, Any] = {"stream_interval": stream_interval}
    if others:
        ratio = served.output_tokens_per_s / others[0].output_tokens_per_s
        more |= {"ratio_to_in_process": ratio, "in_process": to_values(others[0])}
    print(to_line(ServedEngine.name, served, setup, **more))


if __name__ == "__main__":
    main()
