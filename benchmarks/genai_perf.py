"""Measure /v1 and `ensemble` with genai-perf, and `tensorrt_llm` for comparison, at 1, 16 and 64 streams.

genai-perf is installed into an environment of its own, `.venv-genai-perf`. It runs tritonclient's
perf_analyzer, because its own packages do not include this program. It sends texts to /v1/completions, and
by gRPC to `ensemble`. For comparison, the token ids of the same texts are sent to `tensorrt_llm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.load_testing import comparison
from benchmarks.load_testing.environment import require_program
from benchmarks.load_testing.exports import read_genai_perf
from benchmarks.measuring.report import Timeline
from benchmarks.measuring.workload import BenchRequest, draw
from inflight.arguments import positive
from inflight.errors import InflightError
from inflight.server.errors import ServeError
from inflight.server.launch import TritonServer
from inflight.text.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_SEED = 99
_WORDS = (
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "that",
        "it",
        "was",
        "for",
        "on",
        "are",
        "with",
        "as",
        "they",
        "be",
        "at",
    ),
    *(
        "one",
        "have",
        "this",
        "from",
        "had",
        "not",
        "but",
        "what",
        "some",
        "we",
        "can",
        "out",
        "other",
        "were",
        "all",
    ),
)
_ATTEMPTS = 3  # perf_analyzer's export is sometimes incomplete


class GenaiPerf:
    """One of genai-perf's endpoint types.

    Args:
        name: Name in the printed line.
        program: Path of genai-perf.
        tokenizer: Folder of the model's tokenizer.
        prompts: Texts of the requests.
    """

    def __init__(self, name: str, program: Path, tokenizer: Path, prompts: dict[BenchRequest, str]) -> None:
        self.name = name
        self._program = program
        self._tokenizer = tokenizer.resolve()
        self._prompts = prompts

    def run(self, server: TritonServer, requests: Sequence[BenchRequest], streams: int) -> list[Timeline]:
        """Send every request once, `streams` at a time, like `comparison.Way.run`."""
        if self.name == "triton":
            return self.send(server.grpc, "ensemble", requests, streams)
        assert server.openai is not None, "it was started with an OpenAI endpoint"
        return self.send(server.openai.partition("://")[2], self._tokenizer.name, requests, streams)

    def send(
        self, address: str, model: str, requests: Sequence[BenchRequest], streams: int
    ) -> list[Timeline]:
        """Send every request once to any endpoint, given HOST:PORT and the model's name."""
        error: ServeError | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._send(address, model, requests, streams)
            except ServeError as failed:
                error = failed
                if "no JSON" not in str(failed) and "JSONDecodeError" not in str(failed):
                    raise
        assert error is not None
        raise error

    def _send(
        self, address: str, model: str, requests: Sequence[BenchRequest], streams: int
    ) -> list[Timeline]:
        by_prompt = {self._prompts[request]: request for request in requests}
        with tempfile.TemporaryDirectory(prefix="inflight-genai-perf-") as name, _environment() as variables:
            folder = Path(name)
            lines = (json.dumps({"text": prompt}) + "\n" for prompt in by_prompt)
            (folder / "prompts.jsonl").write_text("".join(lines))
            num_tokens = requests[0].num_output_tokens
            comparison.run_tool(
                self._command(address, model, len(requests), num_tokens, streams), variables, folder
            )
            (export,) = (folder / "artifacts").glob("*/profile_export.json")
            return read_genai_perf(export.read_text("utf-8", "replace"), by_prompt)

    def _command(
        self, address: str, model: str, num_requests: int, num_tokens: int, streams: int
    ) -> list[str]:
        return [
            *(str(self._program), "profile", "-m", model, "-u", address, "--streaming"),
            *(_ENDPOINT_OPTIONS[self.name]),
            *("--input-file", "prompts.jsonl", "--tokenizer", str(self._tokenizer)),
            *("--output-tokens-mean", str(num_tokens), "--output-tokens-stddev", "0"),
            *("--concurrency", str(min(streams, num_requests)), "--request-count", str(num_requests)),
            *("--artifact-dir", "artifacts"),
        ]


_ENDPOINT_OPTIONS = {
    "v1": (
        *("--endpoint-type", "completions", "--extra-inputs"),
        # Usage is not requested, because genai-perf 0.0.16 cannot handle an event without choices.
        json.dumps({"ignore_eos": True, "temperature": 0}),
    ),
    # "deterministic" also sets the minimum number of tokens.
    "triton": (
        *("--endpoint-type", "kserve", "--backend", "tensorrtllm"),
        "--output-tokens-mean-deterministic",
    ),
}


@contextlib.contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Yield environment variables with which genai-perf runs this environment's `perf_analyzer`."""
    with tempfile.TemporaryDirectory(prefix="inflight-genai-perf-") as name:
        program = Path(name) / "perf_analyzer"
        path = f"{_ROOT / 'backend'}{os.pathsep}{_ROOT}"
        program.write_text(
            f"#!/bin/sh\nPYTHONPATH={shlex.quote(path)} exec {shlex.quote(sys.executable)} "
            '-m benchmarks.measuring.perf_analyzer "$@"\n'
        )
        program.chmod(0o755)
        yield {**os.environ, "PATH": f"{name}{os.pathsep}{os.environ['PATH']}"}


def make_prompts(tokenizer: Tokenizer, count: int, num_output_tokens: int) -> dict[BenchRequest, str]:
    """Return texts of common words, each about as many tokens long as a prompt of `scripts/bench serve`.

    The keys are requests with the texts' token ids.
    """
    numbers = random.Random(_SEED)
    prompts: dict[BenchRequest, str] = {}
    for drawn in draw("w", 1000, count):
        words = numbers.choices(_WORDS, k=len(drawn.prompt))
        # A small vocabulary has several tokens for a word, so fewer words make up the length.
        num_tokens = len(tokenizer.encode(" ".join(words)))
        text = " ".join(words[: max(1, len(words) * len(drawn.prompt) // num_tokens)])
        prompts[BenchRequest(tuple(tokenizer.encode(text)), num_output_tokens)] = text
    return prompts


def main() -> None:
    parser = comparison.parser("genai-perf", __doc__)
    parser.add_argument("--output-tokens", type=positive, default=64, help="output tokens of each request")
    given = parser.parse_args()
    try:
        tokenizer = Tokenizer.from_dir(given.model)
        count = comparison.num_requests(given.requests, max(given.streams))
        prompts = make_prompts(tokenizer, count, given.output_tokens)
        program = require_program("genai-perf")
        ways = [GenaiPerf(name, program, given.model, prompts) for name in _ENDPOINT_OPTIONS]
        print(json.dumps(comparison.compare("genai-perf", given, list(prompts), ways)))
    except (InflightError, ServeError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
