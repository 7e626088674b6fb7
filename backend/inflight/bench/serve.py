"""How fast a real tritonserver is, by Triton's perf_analyzer: the figures of `offline`, through gRPC streams.

Starts a server as `scripts/serve` does, lets perf_analyzer send every request of the workload once, so many at a
time, and reads the responses' times from what it exports. A run before the others warms up and is not counted.
With `--beside`, the same engine also runs in this process, in turn with the server, and the ratio is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.bench.bandwidth import Probe
from inflight.bench.offline import InProcess, peak_rss_bytes
from inflight.bench.options import Options, add_options, engine_settings
from inflight.bench.report import Resources, Timeline, to_line, to_values
from inflight.bench.rounds import BenchedEngine, run_rounds
from inflight.bench.setup import Setup
from inflight.bench.workload import BenchRequest, draw
from inflight.errors import InflightError
from inflight.models import read_model_description
from inflight.server import belongings, perf_analyzer
from inflight.server.errors import ServeError
from inflight.server.launch import TritonServer, serve

_MODEL = "tensorrt_llm"
_ENGINE_STUB = b"/tensorrt_llm/1/model.py"
_TIMEOUT_S = 3600.0
_ERROR_LINES = 4  # its usage follows


def write_input(path: Path, requests: Sequence[BenchRequest]) -> None:
    """perf_analyzer's --input-data."""
    entries = [
        {
            "input_ids": {"content": list(request.prompt), "shape": [len(request.prompt)]},
            "request_output_len": [request.num_output_tokens],
            "end_id": [-1],
            "streaming": [True],
        }
        for request in requests
    ]
    path.write_text(json.dumps({"data": entries}))


def analyze(server: TritonServer, requests: Sequence[BenchRequest], concurrency: int) -> list[Timeline]:
    """Send every request once, so many at a time; the times of all. Raises ServeError with what went wrong."""
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        data, profile = Path(folder) / "requests.json", Path(folder) / "profile.json"
        write_input(data, requests)
        # One thread sends the requests in their order, the next one when any has ended; several would share them
        # out in advance.
        done = perf_analyzer.run(
            ["-m", _MODEL, "-i", "grpc", "-u", server.grpc, "--streaming", "--async", "--max-threads", "1"]
            + ["--input-data", str(data), "--concurrency-range", str(min(concurrency, len(requests)))]
            + ["--request-count", str(len(requests)), "--profile-export-file", str(profile)],
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            said = (done.stderr or done.stdout).splitlines()[:_ERROR_LINES]
            raise ServeError("\n".join([f"perf_analyzer ended with {done.returncode}:", *said]))
        return read_profile(profile.read_text("utf-8", "replace"), requests)


def read_profile(text: str, requests: Sequence[BenchRequest]) -> list[Timeline]:
    """The times of every request, from what perf_analyzer exports; ServeError unless each went once and ended."""
    # It writes text as it came, which need not be text when a response ends within a character.
    experiments = json.loads(text, strict=False)["experiments"]
    records = [record for experiment in experiments for record in experiment["requests"]]
    sent = Counter(map(_request_of, records))
    if sent != Counter(requests):
        raise ServeError(
            f"perf_analyzer was to send {len(requests)} requests once; it sent {sent.total()}, "
            f"{len(sent & Counter(requests))} of these"
        )
    return [_timeline(record) for record in records]


def _request_of(record: Mapping[str, Any]) -> BenchRequest:
    inputs = record["request_inputs"]
    return BenchRequest(tuple(inputs["input_ids"]), inputs["request_output_len"])


def _timeline(record: Mapping[str, Any]) -> Timeline:
    request = _request_of(record)
    counts = [outputs["sequence_length"] for outputs in record["response_outputs"]]
    if sum(counts) != request.num_output_tokens:
        raise ServeError(f"a request for {request.num_output_tokens} tokens was given {sum(counts)}")
    times_ns = tuple(itertools.compress(record["response_timestamps"], counts))
    return Timeline(len(request.prompt), request.num_output_tokens, record["timestamp"], times_ns)


class ServedEngine:
    """A server on free ports, for the length of a `with`.

    Attributes:
        load_s: From the start of the server until every model is ready, in seconds.
    """

    name = "serve"

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._closing = contextlib.ExitStack()
        begun = time.perf_counter()
        self._server = self._closing.enter_context(serve(settings=settings, ready_timeout=_TIMEOUT_S))
        self.load_s = time.perf_counter() - begun

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Timeline]:
        """All of them, so many at a time."""
        return analyze(self._server, requests, concurrency)

    def resources(self) -> Resources:
        """Of all processes of the server, so far."""
        pids = [process.pid for process in belongings.find(self._server.repository.path.parent)]
        engine = next(pid for pid in pids if _ENGINE_STUB in Path(f"/proc/{pid}/cmdline").read_bytes())
        return Resources(self.load_s, peak_rss_bytes(engine), sum(map(peak_rss_bytes, pids)))

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description=__doc__.splitlines()[0])
    add_options(parser, concurrency=16)
    parser.add_argument("--beside", action="store_true", help="in this process too, in turn; print the ratio")
    arguments = parser.parse_args()
    try:
        _run(Options.of(arguments), arguments.beside)
    except (InflightError, ServeError) as error:
        sys.exit(f"{parser.prog}: {error}")


def _run(options: Options, is_beside: bool) -> None:
    config = read_model_description(options.model).decoder
    requests = draw(options.workload, config.vocab_size, options.num_requests)
    setup = Setup.of(options, config, requests)
    settings = engine_settings(options, requests)
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(Probe(options.num_threads))
        engines: list[BenchedEngine] = [stack.enter_context(ServedEngine(settings))]
        if is_beside:
            engines.append(stack.enter_context(InProcess(settings)))
        served, *others = run_rounds(engines, requests, setup, probe)
    more = {}
    if others:
        ratio = served.output_tokens_per_s / others[0].output_tokens_per_s
        more = {"ratio_to_in_process": ratio, "in_process": to_values(others[0])}
    print(to_line(ServedEngine.name, served, setup, **more))


if __name__ == "__main__":
    main()
