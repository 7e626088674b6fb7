"""Send the same requests to one server with several load generators and endpoints (`Way`), with N streams each.

The last Way is always perf_analyzer over Triton's own gRPC, as in `scripts/bench serve`; it is the reference
for the other Ways. It also warms up the server for every number of streams, which is not counted. Runs on
the main thread; the load generators are processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.analyzer import TIMEOUT_S, analyze
from benchmarks.measuring.options import Options, engine_settings, new_parser
from benchmarks.measuring.report import Percentiles, Timeline, medians
from benchmarks.measuring.setup import Setup
from benchmarks.measuring.workload import BenchRequest
from inflight.arguments import positive
from inflight.models import read_model_description
from inflight.processors import Processors
from inflight.server.client_apis import ClientApis
from inflight.server.errors import ServeError
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports

_STREAMS = (1, 16, 64)
_MIN_REQUESTS, _REQUESTS_OF_STREAM = 16, 4
_ERROR_CHARACTERS = 2000


class Way(Protocol):
    """A load generator and the endpoint that it sends to.

    Attributes:
        name: Name in the printed line.
    """

    name: str

    def run(self, server: TritonServer, requests: Sequence[BenchRequest], streams: int) -> list[Timeline]:
        """Send every request once, `streams` at a time. Raises ServeError if one fails."""
        ...


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of one `Way` at one number of streams.

    Attributes:
        requests: Number of requests sent.
        output_tokens_per_s: Output tokens per second, from the first request sent to the last response.
        tokens_per_response: Mean number of tokens per response; more than 1 if responses were merged.
        ttft_ms: Time to first token in milliseconds.
        itl_ms: Milliseconds between the responses of a request; 0 between events that arrived together.
        tpot_ms: Milliseconds per output token: for each request, the time after the first response divided
            by the number of further tokens.
    """

    requests: int
    output_tokens_per_s: float
    tokens_per_response: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> LoadFigures:
        """Compute the figures of a run from the timelines of all its requests."""
        last_ns = max(timeline.responses_ns[-1] for timeline in timelines)
        seconds = 1e-9 * (last_ns - min(timeline.sent_ns for timeline in timelines))
        num_tokens = sum(timeline.num_output_tokens for timeline in timelines)
        return cls(
            requests=len(timelines),
            output_tokens_per_s=num_tokens / seconds,
            tokens_per_response=num_tokens / sum(len(timeline.responses_ns) for timeline in timelines),
            ttft_ms=Percentiles.of([timeline.ttft_ms for timeline in timelines]),
            itl_ms=Percentiles.of([gap for timeline in timelines for gap in timeline.gaps_ms]),
            tpot_ms=Percentiles.of(
                [
                    sum(each.gaps_ms) / (each.num_output_tokens - 1)
                    for each in timelines
                    if each.num_output_tokens > 1
                ]
            ),
        )


class TritonGrpc:
    """Token ids by gRPC streams to `tensorrt_llm`."""

    name = "triton_grpc"

    def run(self, server: TritonServer, requests: Sequence[BenchRequest], streams: int) -> list[Timeline]:
        """Send every request once, `streams` at a time."""
        return [answer.timeline for answer in analyze(server, requests, streams)]


def parser(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """Make the parser with the options of both programs."""
    made = new_parser(name, docstring)
    add = made.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="checkpoint folder, with a tokenizer")
    add(
        "--streams",
        type=positive,
        nargs="+",
        default=list(_STREAMS),
        help="numbers of streams, measured one after another",
    )
    add("--requests", type=positive, help="requests of each run; default: 4 per stream, at least 16")
    add("--dtype", help="default: the checkpoint's")
    add("--threads", type=positive, help="threads of the forward pass; default: the number of cores")
    add("--max-num-tokens", type=positive, default=2048, help="maximum tokens per iteration")
    add(
        "--rounds",
        type=positive,
        default=1,
        help="rounds, each of which measures every way once; figures are their medians",
    )
    return made


def options(given: argparse.Namespace) -> Options:
    """Build the options for the largest number of streams from the parsed command line."""
    streams = max(given.streams)
    return Options(
        model=given.model,
        workload="w",
        num_requests=num_requests(given.requests, streams),
        concurrency=streams,
        dtype=given.dtype,
        kernels=None,
        num_threads=given.threads or Processors.here().num_threads,
        max_num_tokens=given.max_num_tokens,
        num_rounds=given.rounds,
    )


def num_requests(asked: int | None, streams: int) -> int:
    """Return the number of requests of a run with this number of streams."""
    return asked or max(_MIN_REQUESTS, _REQUESTS_OF_STREAM * streams)


def compare(
    bench: str, given: argparse.Namespace, requests: Sequence[BenchRequest], ways: Sequence[Way]
) -> dict[str, Any]:
    """Start a server, measure every way, and return the values to print: medians of the rounds.

    Args:
        bench: Name of the program.
        given: Result of `parser`.
        requests: The requests of the largest run. Smaller runs use the first of them.
        ways: All Ways except the last, which is perf_analyzer over Triton's own gRPC.
    """
    wanted = options(given)
    measured: dict[str, dict[str, Any]] = {}
    with start(wanted, requests) as server:
        for streams in given.streams:
            own = requests[: num_requests(given.requests, streams)]
            TritonGrpc().run(server, own, streams)
            all_ways = (*ways, TritonGrpc())
            rounds = [
                [LoadFigures.of(way.run(server, own, streams)) for way in all_ways]
                for _ in range(given.rounds)
            ]
            measured[str(streams)] = {
                way.name: asdict(medians(figures)) for way, figures in zip(all_ways, zip(*rounds))
            }
            print(
                f"{bench}: {streams} streams: {json.dumps(rounded(measured[str(streams)]))}", file=sys.stderr
            )
    config = read_model_description(wanted.model).decoder
    setup = Setup.of(replace(wanted, num_requests=len(requests)), config, list(requests))
    return rounded({"bench": bench, "streams": measured, "setup": asdict(setup)})


def start(wanted: Options, requests: Sequence[BenchRequest]) -> AbstractContextManager[TritonServer]:
    """Start a server with an OpenAI endpoint and slots for all streams."""
    return serve(
        settings=engine_settings(wanted, requests),
        ready_timeout=TIMEOUT_S,
        options=ServerOptions(ports=Ports(openai=0), client_apis=ClientApis(model_config=True)),
        model=wanted.model.resolve(),
    )


def run_tool(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float = TIMEOUT_S
) -> None:
    """Run a load generator in `folder` until it ends. Raises ServeError with its output if it fails or hangs.

    All of the load generator's processes are killed at the end, even if this program is interrupted.
    """
    name = Path(command[0]).name
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            told = said[-_ERROR_CHARACTERS:]
            raise ServeError(f"{name} was not done after {timeout_s:.0f} s and was ended:\n{told}") from None
        raise
    if process.returncode:
        raise ServeError(f"{name} ended with {process.returncode}:\n{said[-_ERROR_CHARACTERS:]}")


def rounded(value: Any) -> Any:
    """Round numbers to three decimals, at any depth."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value
