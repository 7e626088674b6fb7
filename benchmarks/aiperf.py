"""Measure /v1 with AIPerf, and Triton's gRPC endpoint for comparison, at 1, 16 and 64 streams.

AIPerf is installed into an environment of its own, `.venv-aiperf`. It sends prepared bodies to
/v1/completions, which are answered as streams: the workload of `scripts/bench serve`, with the same token
ids and output lengths.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load_testing import comparison
from benchmarks.load_testing.environment import require_program
from benchmarks.load_testing.exports import read_aiperf
from benchmarks.measuring.report import Timeline
from benchmarks.measuring.workload import BenchRequest, draw
from inflight.errors import InflightError
from inflight.models import read_model_description
from inflight.server.errors import ServeError
from inflight.server.launch import TritonServer

_EXPORT = "profile_export.jsonl"


class AiperfOnV1:
    """/v1/completions, with AIPerf as the client.

    Args:
        program: Path of AIPerf.
        model: Checkpoint folder; its name is the model's name.
    """

    name = "v1"

    def __init__(self, program: Path, model: Path) -> None:
        self._program = program
        self._model = model.resolve()

    def run(self, server: TritonServer, requests: Sequence[BenchRequest], streams: int) -> list[Timeline]:
        """Send every request once, `streams` at a time, like `comparison.Way.run`."""
        assert server.openai is not None, "it was started with an OpenAI endpoint"
        return self.send(server.openai, requests, streams)

    def send(self, url: str, requests: Sequence[BenchRequest], streams: int) -> list[Timeline]:
        """Send every request once to any endpoint, given its URL without a path."""
        with tempfile.TemporaryDirectory(prefix="inflight-aiperf-") as name:
            folder = Path(name)
            (folder / "requests.json").write_text(json.dumps(make_input(self._model.name, requests)))
            comparison.run_tool(self._command(url, len(requests), streams), environment(), folder)
            with open(folder / "artifacts" / _EXPORT, encoding="utf-8") as lines:
                return read_aiperf(lines, requests)

    def _command(self, url: str, num_requests: int, streams: int) -> list[str]:
        return [
            *(str(self._program), "profile", "--model", self._model.name, "--url", url),
            *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
            *("--input-file", "requests.json", "--custom-dataset-type", "inputs_json"),
            *("--dataset-sampling-strategy", "sequential", "--tokenizer", str(self._model)),
            *("--concurrency", str(min(streams, num_requests)), "--request-count", str(num_requests)),
            # AIPerf's processes connect when they send their first request, so there is a warm-up. It takes
            # requests from the file in a circle, so that each request is still sent once afterwards.
            *("--warmup-request-count", str(min(streams, num_requests))),
            *("--artifact-dir", "artifacts", "--ui", "none"),
        ]


def make_input(model: str, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """Return AIPerf's inputs.json: one conversation for each request, named by its index, with one body."""
    return {
        "data": [
            {"session_id": str(index), "payloads": [_body(model, request)]}
            for index, request in enumerate(requests)
        ]
    }


def _body(model: str, request: BenchRequest) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def environment() -> dict[str, str]:
    """Return the environment without variables that disable the hub; with them, AIPerf reads no tokenizer."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }


def main() -> None:
    parser = comparison.parser("aiperf", __doc__)
    given = parser.parse_args()
    try:
        config = read_model_description(given.model).decoder
        requests = draw("w", config.vocab_size, comparison.num_requests(given.requests, max(given.streams)))
        way = AiperfOnV1(require_program("aiperf"), given.model)
        print(json.dumps(comparison.compare("aiperf", given, requests, [way])))
    except (InflightError, ServeError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
