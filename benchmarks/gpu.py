"""Measure a GPU's speed (iterations, prompts, long contexts, load, a server) against the hardware's limits.

Makes checkpoints of random weights, one after the other. Each is measured in this process, then through
tritonserver, then in vLLM in an environment of its own (`--vllm-python`). The limit of a figure is the time
that the device needs at least: to read the weights, keys and values at the bandwidth of a large copy, or to
compute the operations at the speed of a large bfloat16 product (float32 for float32). Bandwidth and speed
are measured first. Parts for which no time remains are skipped and reported. Also runs on a CPU, with a
small shape.

With `--engine tensorrt`, plans are built for each checkpoint, and measured in addition to torch's layers. A
plan's slots have PLAN_TOKENS tokens, so longer prompts are measured with torch only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.device import (
    CONTEXT_TOKENS,
    DEVICE_SHAPES,
    Workload,
    batches,
    bytes_read,
    copy_bytes_per_s,
    iteration_seconds,
    time_of,
)
from benchmarks.measuring.options import kv_cache_tokens, new_parser
from benchmarks.measuring.report import Percentiles, Timeline
from benchmarks.measuring.workload import BenchRequest
from benchmarks.offline import InProcess
from benchmarks.serve import ServedEngine
from inflight.arguments import positive, whole
from inflight.config import EngineConfig
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import block_bytes
from inflight.engine.load import load_engine
from inflight.engine.tensorrt.build import BuildOptions, Serialize, build_engine, serialize
from inflight.engine_folder import is_engine_folder
from inflight.errors import InflightError
from inflight.models import DecoderConfig, read_model_description
from inflight.server.errors import ServeError
from inflight.testing.make_model import make_model

_VLLM = Path(__file__).parent / "comparing/peers/vllm_on_gpu.py"
_REQUESTS_SEED = 5
_LOAD_PROMPTS, _LOAD_OUTPUTS = (32, 512), (64, 256)
_LONGEST_LOAD = _LOAD_PROMPTS[1] + _LOAD_OUTPUTS[1]
_VLLM_TIMEOUT_S = 300
PLAN_TOKENS = 1024
"""Number of tokens per slot of plans. Every slot always has memory for them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of a device.

    Attributes:
        bytes_per_s: Bytes per second read and written by a large copy.
        flop_per_s: FLOP per second of a large matrix product.
    """

    bytes_per_s: float
    flop_per_s: float

    def seconds(self, num_bytes: float, flop: float) -> tuple[float, str]:
        """Return the least time in seconds for reading and computing, and the name of the slower of the two."""
        times = {"bandwidth": num_bytes / self.bytes_per_s, "FLOP": flop / self.flop_per_s}
        bound = max(times, key=times.__getitem__)
        return times[bound], bound


@dataclass(frozen=True, slots=True)
class Line:
    """A figure in ms or tokens/s, and its limit; None if the limit is not known."""

    model: str
    what: str
    unit: str
    value: float
    limit: float | None = None
    bound: str = ""
    vllm: float | None = None

    @property
    def share(self) -> float | None:
        """Return the fraction of the limit that was reached, 0 to 1."""
        if self.limit is None or not self.value:
            return None
        return self.limit / self.value if self.unit == "ms" else self.value / self.limit


@dataclass(frozen=True, slots=True)
class Plan:
    """Workload, model and device of the measurements."""

    device: torch.device
    dtype: str
    rows: tuple[int, ...]
    context: int
    iterations: int
    prompts: tuple[int, ...]
    long_context: int
    num_requests: int
    streams: tuple[int, ...]
    tokens_per_block: int


class Model:
    """A checkpoint, and the limits of its computations."""

    def __init__(self, folder: Path, plan: Plan, limits: Limits, name: str | None = None) -> None:
        self.name, self.folder, self.plan, self._limits = name or folder.name, folder, plan, limits
        self.decoder: DecoderConfig = read_model_description(folder).decoder
        computed = "bfloat16" if plan.dtype in ("int8", "fp8") else plan.dtype
        self._dtype: torch.dtype = getattr(torch, computed)
        self._num_weights = bytes_read(self.decoder, torch.int8, 0, 0)
        self._weight_bytes = self._num_weights * (
            1 if plan.dtype in ("int8", "fp8") else self._dtype.itemsize
        )
        self._token_bytes = block_bytes(self.decoder, 1, self._dtype)

    def limit(self, num_rows: int, cached_tokens: float, products: float = 1.0) -> tuple[float, str]:
        """Return the least seconds for `num_rows` rows in iterations that read the weights `products` times."""
        attention = 4 * self.decoder.num_layers * self.decoder.query_size * cached_tokens
        read = products * self._weight_bytes + cached_tokens * self._token_bytes
        return self._limits.seconds(read, 2 * self._num_weights * num_rows + attention)

    def prompt_limit(self, length: int) -> tuple[float, str]:
        """Return the least seconds of a prompt, and the name of the limit.

        A token attends to half of the prompt on average. Weights and the prompt's KV cache are read once.
        """
        attention = 4 * self.decoder.num_layers * self.decoder.query_size * length * length / 2
        flop = 2 * self._num_weights * length + attention
        return self._limits.seconds(self._weight_bytes + length * self._token_bytes, flop)

    def load_limit(self, requests: Sequence[BenchRequest], slots: int) -> tuple[float, str]:
        """Return the largest possible output tokens/s of a load with `slots` sequences at a time."""
        outputs = sum(request.num_output_tokens for request in requests)
        rows = sum(request.num_tokens for request in requests)
        cached = sum(
            request.num_output_tokens * (len(request.prompt) + request.num_output_tokens / 2)
            for request in requests
        )
        iterations = max(outputs / slots, max(request.num_output_tokens for request in requests))
        seconds, bound = self.limit(rows, cached, iterations)
        return outputs / seconds, bound


def flop_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of the product of two square matrices, the best of several runs."""
    matrix = torch.ones((size, size), dtype=dtype, device=device)
    return 2 * size**3 / min(time_of(lambda: matrix @ matrix, device) for _ in range(5))


def draw_load(vocab_size: int, count: int) -> list[BenchRequest]:
    """Draw load L: prompts of 32 to 512 tokens and outputs of 64 to 256, both uniform."""
    numbers = random.Random(_REQUESTS_SEED)
    return [
        BenchRequest(
            tuple(numbers.randrange(10, vocab_size) for _ in range(numbers.randint(*_LOAD_PROMPTS))),
            numbers.randint(*_LOAD_OUTPUTS),
        )
        for _ in range(count)
    ]


def measure_iterations(model: Model) -> Iterator[Line]:
    """Measure iterations by number of rows, time to first token by prompt length, and a long context."""
    plan = model.plan
    longest = max(plan.long_context, *plan.prompts, plan.context) + plan.iterations + 16
    needed = max(max(plan.rows) * (plan.context + plan.iterations + plan.tokens_per_block), longest)
    size = plan.tokens_per_block
    config = EngineConfig(
        str(model.folder),
        plan.dtype,
        implementation="tensorrt" if is_engine_folder(model.folder) else None,
        device=str(plan.device),
        max_num_sequences=max(plan.rows),
        max_num_tokens=max(CONTEXT_TOKENS, longest, *plan.rows),
        max_sequence_length=longest,
        tokens_per_block=size,
        max_tokens_in_paged_kv_cache=(needed // size + max(plan.rows) + 1) * size,
    )
    engine = load_engine(config)
    try:
        for rows in plan.rows:
            yield _generation(engine, model, rows, plan.context, f"iteration, {rows} rows of {plan.context}")
        for length in plan.prompts:
            seconds = min(_first_token(engine, plan, length) for _ in range(3))
            limit, bound = model.prompt_limit(length)
            yield Line(model.name, f"first token of {length}", "ms", 1e3 * seconds, 1e3 * limit, bound)
        if plan.long_context:
            seconds = _first_token(engine, plan, plan.long_context)
            limit, bound = model.prompt_limit(plan.long_context)
            what = f"first token of {plan.long_context}"
            yield Line(model.name, what, "ms", 1e3 * seconds, 1e3 * limit, bound)
            yield _generation(engine, model, 1, plan.long_context, f"iteration, 1 row of {plan.long_context}")
    finally:
        engine.close()


def with_plans(model: Model, folder: Path, limits: Limits, serialize: Serialize = serialize) -> Model:
    """Build plans of the model; return a Model of the plans, with the measurements that fit into their slots."""
    plan, longest = model.plan, PLAN_TOKENS - model.plan.iterations - 16
    options = BuildOptions(
        dtype=plan.dtype,
        max_batch_size=max(plan.rows + plan.streams),
        max_seq_len=PLAN_TOKENS,
        max_num_tokens=max(CONTEXT_TOKENS, *plan.rows, *plan.streams),
    )
    build_engine(model.folder, folder, options, serialize)
    prompts = tuple(length for length in plan.prompts if length <= longest)
    plan = replace(plan, context=min(plan.context, longest), prompts=prompts, long_context=0)
    return Model(folder, plan, limits, f"{model.name}, tensorrt")


def _generation(engine: ModelEngine, model: Model, rows: int, context: int, what: str) -> Line:
    plan = model.plan
    seconds = sorted(iteration_seconds(engine, _workload(plan, context), rows))
    limit, bound = model.limit(rows, rows * (context + plan.iterations / 2))
    return Line(model.name, what, "ms", 1e3 * seconds[len(seconds) // 2], 1e3 * limit, bound)


def _first_token(engine: ModelEngine, plan: Plan, length: int) -> float:
    batch = next(batches(_workload(plan, length), 1, engine.limits.vocab_size))
    return time_of(lambda: engine.decode(batch, engine.forward(batch)), plan.device)


def _workload(plan: Plan, context: int) -> Workload:
    return Workload(plan.rows, context, plan.iterations, plan.tokens_per_block, 0)


def _settings(model: Model, slots: int, requests: Sequence[BenchRequest]) -> dict[str, str]:
    plan = model.plan
    return {
        "gpt_model_path": str(model.folder.resolve()),
        "dtype": plan.dtype,
        "max_batch_size": str(slots),
        "max_sequence_length": str(_LONGEST_LOAD),
        "tokens_per_block": str(plan.tokens_per_block),
        "max_tokens_in_paged_kv_cache": str(kv_cache_tokens(requests, slots) + slots * plan.tokens_per_block),
        "enable_kv_cache_reuse": "false",
    }


def measure_load(model: Model) -> Iterator[Line]:
    """Measure load L in this process: all requests at once."""
    slots = max(model.plan.rows)
    requests = draw_load(model.decoder.vocab_size, model.plan.num_requests)
    with InProcess(_settings(model, slots, requests)) as engine:
        engine.run(requests[:slots], slots)
        timelines = engine.run(requests, len(requests))
    limit, bound = model.load_limit(requests, slots)
    what = f"load L, {len(requests)} requests"
    yield Line(model.name, what, "tokens/s", _tokens_per_s(timelines), limit, bound)


def measure_server(model: Model) -> Iterator[Line]:
    """Measure load L through tritonserver for each number of streams."""
    most = max(model.plan.streams)
    requests = draw_load(model.decoder.vocab_size, most)
    with ServedEngine(_settings(model, most, requests)) as server:
        server.run(requests[: min(4, most)], min(4, most))
        for streams in model.plan.streams:
            some = requests[:streams]
            timelines = server.run(some, streams)
            limit, bound = model.load_limit(some, streams)
            name = f"tritonserver, {streams} streams"
            yield Line(model.name, name, "tokens/s", _tokens_per_s(timelines), limit, bound)
            ttft = Percentiles.of([timeline.ttft_ms for timeline in timelines]).p50
            yield Line(model.name, f"{name}: first token", "ms", ttft)


def _tokens_per_s(timelines: Sequence[Timeline]) -> float:
    begun = min(timeline.sent_ns for timeline in timelines)
    ended = max(timeline.responses_ns[-1] for timeline in timelines)
    return 1e9 * sum(timeline.num_output_tokens for timeline in timelines) / (ended - begun)


def measure_vllm(python: Path, model: Model) -> dict[str, float]:
    """Run vLLM in its environment; return its figures by `Line.what`. Raises RuntimeError if it fails."""
    plan = model.plan
    requests = draw_load(model.decoder.vocab_size, plan.num_requests)
    asked = {
        "model": str(model.folder.resolve()),
        "dtype": plan.dtype,
        "rows": plan.rows,
        "context": plan.context,
        "iterations": plan.iterations,
        "load": [{"prompt": request.prompt, "max_tokens": request.num_output_tokens} for request in requests],
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(_VLLM)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=_VLLM_TIMEOUT_S,
        env=inherited | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a Markdown table."""
    rows = ["| model | what | unit | here | limit | of the limit | vLLM |", "|---|---|---|---|---|---|---|"]
    for line in lines:
        limit = "" if line.limit is None else f"{line.limit:.4g} ({line.bound})"
        share = "" if line.share is None else f"{line.share:.2f}"
        vllm = "" if line.vllm is None else f"{line.vllm:.4g}"
        rows.append(
            f"| {line.model} | {line.what} | {line.unit} | {line.value:.4g} | {limit} | {share} | {vllm} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    parser = _parser()
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu: torch finds no GPU here; on a CPU, --device cpu --shapes tiny tries the program")
    if given.engine == "tensorrt" and device.type != "cuda":
        parser.error("--engine tensorrt needs an NVIDIA GPU and TensorRT, and the device is " + given.device)
    until = time.monotonic() + given.seconds
    plan = Plan(
        device, given.dtype, tuple(given.rows), given.context, given.iterations, tuple(given.prompts),
        given.long_context, given.requests, tuple(given.streams), given.tokens_per_block,
    )  # fmt: skip
    limits = Limits(
        copy_bytes_per_s(device, given.copy_mib << 20),
        flop_per_s(device, given.matrix, torch.float32 if plan.dtype == "float32" else torch.bfloat16),
    )
    left_out: list[str] = []
    lines: list[Line] = []

    def take(what: str, part: Callable[[], Iterator[Line]]) -> None:
        if time.monotonic() > until:
            left_out.append(f"{what}: {given.seconds} s are over")
            return
        begun = time.monotonic()
        try:
            for line in part():
                lines.append(line)
        except (InflightError, ServeError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            left_out.append(f"{what}: {error}")
        print(f"{what}: {time.monotonic() - begun:.0f} s", file=sys.stderr)

    for name in given.shapes:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
            longest = (
                max(given.long_context, *plan.prompts, plan.context, _LONGEST_LOAD) + plan.iterations + 64
            )
            shape = DEVICE_SHAPES[name]
            shape = replace(shape, positions=max(shape.positions, longest))
            model = Model(make_model(Path(folder) / name, shape=shape, dtype="bfloat16"), plan, limits)
            models = [model]
            if given.engine == "tensorrt":
                take(f"{name}: plans", lambda models=models, folder=folder: _build(models, folder, limits))
            for each in models:
                take(f"{each.name} in this process", lambda model=each: measure_iterations(model))
                take(f"{each.name}, load L", lambda model=each: measure_load(model))
                if plan.streams:
                    take(f"{each.name} through tritonserver", lambda model=each: measure_server(model))
            if given.vllm_python is not None:
                take(f"{name} on vLLM", lambda model=model: _beside(given.vllm_python, model, lines))
    print(table(lines))
    for each in left_out:
        print(f"left out: {each}")
    told = {"bench": "gpu", "limits": asdict(limits), "left_out": left_out, "torch": torch.__version__}
    with contextlib.suppress(AssertionError, RuntimeError):
        told["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(json.dumps(told | {"lines": [asdict(line) for line in lines]}))
    return lines


def _build(models: list[Model], folder: str, limits: Limits) -> Iterator[Line]:
    """Append the first model's plans to `models`; yield a line with the time to build them."""
    begun = time.monotonic()
    models.append(with_plans(models[0], Path(folder) / "plans", limits))
    yield Line(models[-1].name, "building plans", "ms", 1e3 * (time.monotonic() - begun))


def _beside(python: Path, model: Model, lines: list[Line]) -> Iterator[Line]:
    """Add vLLM's figures to `lines`. Yields no lines."""
    found = measure_vllm(python, model)
    for index, line in enumerate(lines):
        if line.model == model.name and line.what in found:
            lines[index] = replace(line, vllm=found[line.what])
    return iter(())


def _parser():
    parser = new_parser("gpu", __doc__)
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        choices=DEVICE_SHAPES,
        default=["1b", "8b"],
        help="shapes of the checkpoints of random weights",
    )
    add("--device", default="cuda")
    add(
        "--engine",
        choices=("torch", "tensorrt"),
        default="torch",
        help="tensorrt: measure plans and torch",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16", "int8", "fp8"), default="bfloat16")
    add("--rows", type=positive, nargs="+", default=[1, 8, 32, 128, 256])
    add("--context", type=positive, default=512, help="tokens of each row before the first iteration")
    add("--iterations", type=positive, default=32)
    add("--prompts", type=positive, nargs="+", default=[32, 512, 2048, 8192], help="lengths of prompts")
    add("--long-context", type=whole, default=32_768, help="tokens of the long context; 0: none")
    add("--requests", type=positive, default=512, help="requests of load L")
    add(
        "--streams",
        type=positive,
        nargs="*",
        default=[1, 16, 64, 256],
        help="numbers of streams through tritonserver; without a value: none",
    )
    add("--vllm-python", type=Path, metavar="PATH", help="interpreter of an environment that has vLLM")
    add("--seconds", type=positive, default=480, help="time after which no other part begins")
    add("--tokens-per-block", type=positive, default=32)
    add("--copy-mib", type=positive, default=1024, help="size of the copy that measures the bandwidth")
    add(
        "--matrix", type=positive, default=8192, help="rows of the matrices whose product measures the FLOP/s"
    )
    return parser


if __name__ == "__main__":
    main()
