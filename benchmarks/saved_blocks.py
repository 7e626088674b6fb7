"""Measure the time to first token of prompts whose KV blocks are in files (`--kv-cache-dir`).

Runs the engine and its loop in this process, without a server, and prints

- a restart: the first token of one prompt, computed, found in files by a new engine, and found in the cache;
- conversations that take turns, more than the cache has room for: the first token of each turn after the first
  one, and the share of the prompts' tokens that were not computed, without files, with files, and with a cache for
  all;
- with --disk-mb-s: prompts after a restart whose files are read at these rates, which shows where computing is
  chosen instead.

Files are in this machine's page cache, unless it has too little memory. Slower disks are imitated by a pause after
each file that is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.long_context import random_tokens
from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.block_store.files import BlockFiles
from inflight.build import RunningEngine, start_engine
from inflight.config import Parameters
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import Response
from inflight.testing.make_model import make_model

_TIMEOUT_S = 600.0
_DISK_PROMPTS = 12


@dataclass
class Asker:
    """Sends one request at a time to an engine.

    Attributes:
        first_tokens_s: Seconds to the first token of each request.
        num_tokens, num_reused: Tokens of all prompts, and those of them that were not computed.
    """

    engine: RunningEngine
    tokens_per_block: int
    first_tokens_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    num_reused: int = 0

    def ask(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Return prompt and answer; raises the request's error."""
        responses: list[Response] = []
        has_first, has_ended = threading.Event(), threading.Event()

        def on_response(response: Response) -> None:
            responses.append(response)
            has_first.set()
            if response.is_final:
                has_ended.set()

        output = OutputOptions(return_perf_metrics=True)
        begun = time.perf_counter()
        self.engine.client.submit(Request(0, prompt, num_tokens, streaming=True, output=output), on_response)
        assert has_first.wait(_TIMEOUT_S)
        self.first_tokens_s.append(time.perf_counter() - begun)
        assert has_ended.wait(_TIMEOUT_S)
        if responses[-1].error is not None:
            raise responses[-1].error
        results = [response.result for response in responses if response.result is not None]
        metrics = results[-1].perf_metrics
        assert metrics is not None
        self.num_tokens += len(prompt)
        self.num_reused += metrics.num_reused_blocks * self.tokens_per_block
        answer = [
            token
            for result in results
            for token in result.output_token_ids[0][-result.num_output_tokens[0] :]
        ]
        return (*prompt, *answer)


@contextmanager
def engine(options: argparse.Namespace, model: str, folder: str | None, room: int) -> Iterator[Asker]:
    """Run an engine whose cache has `room` tokens and whose blocks are saved in `folder`."""
    parameters = (
        Parameters() if folder is None else Parameters(kv_cache_dir=folder, kv_cache_disk_bytes=1 << 40)
    )
    size = parameters.engine.tokens_per_block
    parameters = replace(
        parameters,
        engine=replace(
            parameters.engine,
            gpt_model_path=model,
            dtype=options.dtype,
            device=options.device,
            engine_threads=options.threads,
            max_num_sequences=2,
            max_tokens_in_paged_kv_cache=room + 2 * size,
        ),
        scheduler=replace(parameters.scheduler, enable_chunked_context=True),
    )
    running = start_engine(parameters, "")
    try:
        yield Asker(running, size)
    finally:
        running.close()


def restart(options: argparse.Namespace, model: str) -> dict[str, float]:
    """Return the median seconds to the first token of a prompt, by where its blocks are."""
    found: dict[str, list[float]] = {"computed": [], "in files": [], "in the cache": []}
    room = 2 * options.prompt + 1024
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
            for where in ("computed", "in files"):
                with engine(options, model, folder, room) as asker:
                    vocab_size = asker.engine.client.describe().limits.vocab_size
                    asker.ask(random_tokens(10_000 + number, options.prompt, vocab_size), 2)  # warms up
                    prompt = random_tokens(number, options.prompt, vocab_size)
                    asker.ask(prompt, 2)
                    found[where].append(asker.first_tokens_s[-1])
                    asker.ask(prompt, 2)
            found["in the cache"].append(asker.first_tokens_s[-1])
    return {where: statistics.median(seconds) for where, seconds in found.items()}


def conversations(
    options: argparse.Namespace, model: str, folder: str | None, cached: int
) -> dict[str, float]:
    """Return median first token and share of reused tokens of turns after the first, with room for `cached`."""
    longest = options.system + options.turns * (options.message + options.answer)
    with engine(options, model, folder, cached * longest) as asker:
        vocab_size = asker.engine.client.describe().limits.vocab_size
        histories = [
            random_tokens(number, options.system, vocab_size) for number in range(options.conversations)
        ]
        for turn in range(options.turns):
            if turn == 1:
                asker.first_tokens_s.clear()
                asker.num_tokens = asker.num_reused = 0
            for number, history in enumerate(histories):
                message = random_tokens(1000 * (turn + 1) + number, options.message, vocab_size)
                histories[number] = asker.ask((*history, *message), options.answer)
        return {
            "first_token_s": statistics.median(asker.first_tokens_s),
            "reused": asker.num_reused / asker.num_tokens,
        }


@contextmanager
def slow_disk(bytes_per_s: float) -> Iterator[None]:
    """Let files of blocks be read at this rate in this context."""
    read_fast = BlockFiles.read

    def read(self: BlockFiles, key: bytes, content: NDArray[np.uint8]) -> bool:
        end = time.perf_counter() + content.nbytes / bytes_per_s
        is_read = read_fast(self, key, content)
        time.sleep(max(0.0, end - time.perf_counter()))
        return is_read

    with patch.object(BlockFiles, "read", read):
        yield


def disks(options: argparse.Namespace, model: str) -> Iterator[dict[str, float]]:
    """Yield seconds to the first token of prompts whose blocks are in files, for each rate.

    `first_s` is of the first prompt, and `later_s` the median of the others. `reused` is the share of the others'
    tokens that were read.
    """
    room = (_DISK_PROMPTS + 1) * options.prompt
    for rate in options.disk_mb_s:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
            for bytes_per_s in (float("inf"), rate * 1e6):
                with slow_disk(bytes_per_s), engine(options, model, folder, room) as asker:
                    vocab_size = asker.engine.client.describe().limits.vocab_size
                    for number in range(_DISK_PROMPTS):
                        if number == 1:
                            asker.num_tokens = asker.num_reused = 0
                        asker.ask(random_tokens(number, options.prompt, vocab_size), 2)
            first_s, *later_s = asker.first_tokens_s
            yield {
                "disk_mb_s": rate,
                "first_s": first_s,
                "later_s": statistics.median(later_s),
                "reused": asker.num_reused / asker.num_tokens,
            }


def main() -> None:
    parser = new_parser("saved_blocks", __doc__)
    parser.add_argument("--model", help="checkpoint folder; default: random weights of --shape")
    parser.add_argument("--shape", default="135m", help="sizes of the random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=positive, default=None, help="threads of the forward pass")
    parser.add_argument("--rounds", type=positive, default=5, help="restarts")
    parser.add_argument("--prompt", type=positive, default=2000, help="tokens of the prompt before a restart")
    parser.add_argument("--conversations", type=positive, default=50)
    parser.add_argument(
        "--cached", type=positive, default=5, help="conversations that the cache has room for"
    )
    parser.add_argument("--turns", type=positive, default=4)
    parser.add_argument("--system", type=positive, default=256, help="tokens before the first message")
    parser.add_argument("--message", type=positive, default=64, help="tokens of each message")
    parser.add_argument("--answer", type=positive, default=32, help="tokens of each answer")
    parser.add_argument(
        "--disk-mb-s", type=positive, nargs="+", default=[], help="rates at which files are read, in MB/s"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as temporary:
        model = options.model or str(make_model(Path(temporary, "model"), shape=options.shape))
        first = restart(options, model)
        for where, seconds in first.items():
            print(f"first token of {options.prompt} tokens, {where:12}   {seconds * 1e3:9.1f} ms", flush=True)
        turns: dict[str, dict[str, float]] = {}
        for name, folder, cached in (
            ("no files", None, options.cached),
            ("files", str(Path(temporary, "kv")), options.cached),
            ("a cache for all", None, options.conversations),
        ):
            turns[name] = conversations(options, model, folder, cached)
            first_ms, reused = turns[name]["first_token_s"] * 1e3, turns[name]["reused"]
            what = f"{options.conversations} conversations, {name:15}"
            print(f"{what}   first token {first_ms:9.1f} ms   reused {reused:.3f}", flush=True)
        rates = []
        for found in disks(options, model):
            rates.append(found)
            first_ms, later_ms = found["first_s"] * 1e3, found["later_s"] * 1e3
            what = f"{options.prompt} tokens in files, {found['disk_mb_s']:6.0f} MB/s"
            print(
                f"{what}   first prompt {first_ms:9.1f} ms   later {later_ms:9.1f} ms   read {found['reused']:.3f}"
            )
    print(
        json.dumps({"bench": "saved_blocks", "first_token_s": first, "conversations": turns, "disks": rates})
    )


if __name__ == "__main__":
    main()
