"""Measure the engine in this process, without Triton: tokens/s, time to first token, gaps between tokens.

Runs the server's GptManager and engine, made by the same composition root from the same parameters, with
callbacks that supply requests and record the times of responses. The workload `w` has 64 requests, all at
once or N at a time; `lone` has one request after another. The first run warms up and is not counted.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.comparing.peers.peer_program import peak_rss_bytes, seconds_since_process_start
from benchmarks.measuring.bandwidth import Probe
from benchmarks.measuring.options import Options, add_options, engine_settings, new_parser
from benchmarks.measuring.report import Resources, Timeline, to_line
from benchmarks.measuring.rounds import run_rounds
from benchmarks.measuring.setup import Kernels, Setup
from benchmarks.measuring.workload import BenchRequest, draw
from inflight.batch_manager import GptManager
from inflight.build import check_parameters
from inflight.config import INT8, Parameters, Role
from inflight.core.ports import Engine
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.scheduler import Scheduler
from inflight.engine.cpu.library import find_target
from inflight.engine.engine import ModelEngine
from inflight.engine.load_decoder import kept_by_compiled_layers, kept_kinds, weight_bytes
from inflight.errors import InflightError
from inflight.hub import find_checkpoint
from inflight.load_model import LoadModel, load_model
from inflight.models import read_model_description
from inflight.models.registry import ModelDescription
from inflight.models.sharding import Part
from inflight.parameter_reader import read_parameters


class ClosedLoop:
    """A source of requests with a fixed number in flight, which records the times of their responses.

    `get` and `take` are callbacks of a GptManager and run on its thread; `wait` runs on another thread.
    """

    def __init__(self, requests: Sequence[BenchRequest], concurrency: int, first_id: int) -> None:
        self._requests = {first_id + number: request for number, request in enumerate(requests)}
        self._waiting = deque(self._requests.items())
        self._free_since_ns = deque([time.monotonic_ns()] * concurrency)
        self._sent_ns: dict[int, int] = {}
        self._responses_ns: dict[int, list[int]] = {request_id: [] for request_id in self._requests}
        self._num_tokens = dict.fromkeys(self._requests, 0)
        self._num_open = len(self._requests)
        self._ended = threading.Event()
        self._error: InflightError | None = None

    def get(self, max_num: int) -> list[Request]:
        """Return the requests to send now: at most `max_num`, or any number if `max_num` is negative."""
        requests: list[Request] = []
        while self._waiting and self._free_since_ns and len(requests) != max_num:
            request_id, request = self._waiting.popleft()
            # A client would have sent the request as soon as the previous one had ended.
            self._sent_ns[request_id] = self._free_since_ns.popleft()
            requests.append(Request(request_id, request.prompt, request.num_output_tokens, streaming=True))
        return requests

    def take(self, response: Response) -> None:
        """Record a response's time. A failed request ends the run."""
        now_ns = time.monotonic_ns()
        if response.error is not None:
            return self.fail(response.error)
        if response.result is not None and response.result.num_output_tokens[0]:
            self._responses_ns[response.request_id].append(now_ns)
            self._num_tokens[response.request_id] += response.result.num_output_tokens[0]
        if response.is_final:
            self._free_since_ns.append(now_ns)
            self._num_open -= 1
            if not self._num_open:
                self._ended.set()

    def fail(self, error: InflightError) -> None:
        """End the run because the loop has failed and will send no more responses."""
        self._error = self._error or error
        self._waiting.clear()
        self._ended.set()

    def wait(self) -> list[Timeline]:
        """Wait until all requests have ended; return their timelines in order.

        Raises the error of a failed request.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return [self._timeline(request_id, request) for request_id, request in self._requests.items()]

    def _timeline(self, request_id: int, request: BenchRequest) -> Timeline:
        num_tokens = self._num_tokens[request_id]
        assert num_tokens == request.num_output_tokens, f"{num_tokens} tokens of {request.num_output_tokens}"
        times_ns = tuple(self._responses_ns[request_id])
        return Timeline(len(request.prompt), num_tokens, self._sent_ns[request_id], times_ns)


class InProcess:
    """A loaded engine and its loop, for the duration of a `with` block.

    Attributes:
        load_s: Duration of loading, in seconds.
        start_s: Seconds from the start of the process until the first request can be accepted.
        kernels: Implementation of the layers.
    """

    name = "offline"

    def __init__(self, settings: Mapping[str, str], load: LoadModel = load_model) -> None:
        """Load the engine. Raises ConfigError, like a server with the same parameters."""
        parameters = to_parameters(settings)
        check_parameters(parameters)
        self._loop = ClosedLoop((), 0, 0)
        self._ids = itertools.count(1, 1_000_000)
        begun = time.perf_counter()
        engine = load(parameters, "", None).engine
        self.kernels = _kernels(parameters, engine)
        self._manager = GptManager(
            engine,
            Scheduler(parameters.scheduler, engine.limits),
            lambda max_num: self._loop.get(max_num),
            lambda response: self._loop.take(response),
            on_death=lambda error: self._loop.fail(error),
        )
        self.load_s, self.start_s = time.perf_counter() - begun, seconds_since_process_start()

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Timeline]:
        """Run all requests, `concurrency` at a time. Only one run may be active."""
        self._loop = ClosedLoop(requests, concurrency, next(self._ids))
        self._manager.notify()
        return self._loop.wait()

    def resources(self) -> Resources:
        """Return the resources that this process has used so far."""
        return Resources(self.load_s, peak_rss_bytes(), start_s=self.start_s)

    def close(self) -> None:
        """End the loop and the engine."""
        self._manager.shutdown()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_parameters(settings: Mapping[str, str]) -> Parameters:
    """Return the parameters of a config.pbtxt with these settings. They must include max_batch_size."""
    given = {key: {"string_value": value} for key, value in settings.items() if key != "max_batch_size"}
    return read_parameters(
        {"name": "tensorrt_llm", "max_batch_size": settings["max_batch_size"], "parameters": given},
        Role.ENGINE,
    )


def _kernels(parameters: Parameters, engine: Engine) -> Kernels:
    """Return the kernels that were requested, and those that the engine uses."""
    config = parameters.engine
    asked, is_int8 = config.kernels or "default", config.dtype == INT8
    if not isinstance(engine, ModelEngine):
        return Kernels(asked)
    if engine.kernels == "native" and not is_int8:
        model = read_model_description(str(config.gpt_model_path))
        is_int8 = bool(kept_by_compiled_layers(config, model, torch.device("cpu")))
    if engine.kernels == "torch":
        return Kernels(asked, "torch", int8_products=engine.dtype if is_int8 else None)
    target = find_target(engine.dtype, is_int8)
    sets = tuple(sorted(target.instruction_sets(engine.dtype, is_int8)))
    return Kernels(asked, "native", sets, target.int8_products if is_int8 else None)


def main() -> None:
    parser = new_parser("offline", __doc__)
    add_options(parser, concurrency=0)
    options = Options.of(parser.parse_args())
    try:
        _run(options)
    except InflightError as error:
        sys.exit(f"{parser.prog}: {error}")


def _with_kept_weights(setup: Setup, settings: Mapping[str, str], model: ModelDescription) -> Setup:
    """Return the setup; if quantized weights are kept, with their number of bytes."""
    config, device = to_parameters(settings).engine, torch.device("cpu")
    kept = kept_kinds(config, model, device)
    if not kept:
        return setup
    num_bytes = weight_bytes(config, model, device, Part.whole(model.decoder))
    return replace(setup, dtype=" and ".join(sorted(kind.value for kind in kept)), weight_bytes=num_bytes)


def _run(options: Options) -> None:
    options = replace(options, model=find_checkpoint(str(options.model), may_fetch=False))
    model = read_model_description(options.model)
    config = model.decoder
    requests = draw(options.workload, config.vocab_size, options.num_requests)
    settings = engine_settings(options, requests)
    with Probe(options.num_threads) as probe, InProcess(settings) as engine:
        setup = _with_kept_weights(Setup.of(options, config, requests, engine.kernels), settings, model)
        (figures,) = run_rounds([engine], requests, setup, probe)
    print(to_line(engine.name, figures, setup))


if __name__ == "__main__":
    main()
