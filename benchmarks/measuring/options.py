"""Options of `offline` and `serve`, and the parameters of config.pbtxt with which both load the engine.

Both use the same parameters, so that they differ only in the use of Triton. Prefix reuse is off, because
every round sends the same prompts again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.workload import BenchRequest, WorkloadName
from inflight.arguments import Parser, positive, program_name, whole
from inflight.processors import Processors
from inflight.server.option_types import setting

_DEFAULT_REQUESTS: Mapping[WorkloadName, int] = {"w": 64, "lone": 4}
_MAX_SEQUENCE_LENGTH = 1024
_TOKENS_PER_BLOCK = 32
# Largest block of the systems in `compare`, so that all get KV caches of equal size and no request waits.
_LARGEST_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Options:
    """A complete command line of a benchmark.

    Attributes:
        model: Checkpoint folder.
        workload: Name of the workload.
        num_requests: Number of requests.
        concurrency: Largest number of requests in flight. When one has ended, the next is sent.
        dtype: Value of the parameter in config.pbtxt; None: the checkpoint's dtype.
        kernels: Value of the parameter in config.pbtxt; None: the engine's choice.
        num_threads: Threads of the forward pass.
        max_num_tokens: Largest number of tokens of an iteration.
        num_rounds: Number of rounds, in each of which everything is measured once.
        more: Values of other parameters of config.pbtxt.
    """

    model: Path
    workload: WorkloadName
    num_requests: int
    concurrency: int
    dtype: str | None
    kernels: str | None
    num_threads: int
    max_num_tokens: int
    num_rounds: int
    more: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Build the options from arguments that `add_options` has declared."""
        num_requests = arguments.requests or _DEFAULT_REQUESTS[arguments.workload]
        concurrency = 1 if arguments.workload == "lone" else arguments.concurrency or num_requests
        return cls(
            model=arguments.model,
            workload=arguments.workload,
            num_requests=num_requests,
            concurrency=min(concurrency, num_requests),
            dtype=arguments.dtype,
            kernels=arguments.kernels,
            num_threads=arguments.threads or Processors.here().num_threads,
            max_num_tokens=arguments.max_num_tokens,
            num_rounds=arguments.rounds,
            more=tuple(arguments.set),
        )


def new_parser(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """Make the parser of `scripts/bench NAME`, described by the first line of the program's docstring."""
    description = (docstring or "").partition("\n")[0]
    return Parser(prog=f"{program_name('scripts/bench')} {name}", description=description)


def duration(text: str) -> float:
    """Parse a number above 0. A type of options."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def add_options(parser: argparse.ArgumentParser, concurrency: int) -> None:
    """Add the options that `Options.of` reads; `concurrency` is the default."""
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument(
        "--workload",
        choices=("w", "lone"),
        default="w",
        help="w: prompts of 32 to 512 tokens; lone: one request at a time",
    )
    parser.add_argument("--requests", type=positive, help="number of requests; default: 64, for lone 4")
    parser.add_argument(
        "--concurrency",
        type=whole,
        default=concurrency,
        help="maximum number of requests in flight; 0: all at once; the workload lone always has 1",
    )
    parser.add_argument("--dtype", help="default: the checkpoint's")
    parser.add_argument("--kernels", choices=("native", "torch"), help="default: the engine's choice")
    parser.add_argument(
        "--threads", type=positive, help="threads of the forward pass; default: the number of cores"
    )
    parser.add_argument("--max-num-tokens", type=positive, default=2048, help="maximum tokens per iteration")
    parser.add_argument("--rounds", type=positive, default=1, help="rounds; figures are their medians")
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another parameter of config.pbtxt, for instance kv_cache_dtype=int8",
    )


def kv_cache_tokens(requests: Sequence[BenchRequest], concurrency: int) -> int:
    """Return the KV cache size in tokens for any `concurrency` of the requests, in whole blocks of 128."""
    needed = sorted((-(-request.num_tokens // _LARGEST_BLOCK) for request in requests), reverse=True)
    return sum(needed[:concurrency]) * _LARGEST_BLOCK


def engine_settings(options: Options, requests: Sequence[BenchRequest]) -> dict[str, str]:
    """Return parameters of config.pbtxt, and Triton's max_batch_size."""
    settings = {
        "gpt_model_path": str(options.model.resolve()),
        "max_batch_size": str(options.concurrency),
        "max_num_tokens": str(options.max_num_tokens),
        "max_sequence_length": str(_MAX_SEQUENCE_LENGTH),
        "tokens_per_block": str(_TOKENS_PER_BLOCK),
        "max_tokens_in_paged_kv_cache": str(kv_cache_tokens(requests, options.concurrency)),
        "enable_chunked_context": "true",
        "enable_kv_cache_reuse": "false",
        "engine_threads": str(options.num_threads),
    }
    chosen = {"dtype": options.dtype, "kernels": options.kernels}
    return settings | {key: value for key, value in chosen.items() if value is not None} | dict(options.more)
