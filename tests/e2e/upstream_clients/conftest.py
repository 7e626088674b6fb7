"""Servers set up like those of tensorrtllm_backend's documentation and tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.server.client_apis import ClientApis
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.text.tokenizer import Tokenizer
from tests.e2e.conftest import DEMO_MODEL

from . import templates

# The demo model's continuation contains the word.
PROMPT, WORD = "def read_lines(path):\n", "return"
NUM_SLOTS, QUEUE_SIZE = 4, 16


@pytest.fixture(scope="session")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


@pytest.fixture(scope="session")
def unary_server(elsewhere: Path, long_model: Path) -> Iterator[TritonServer]:
    """The demo model with exactly one response per request; four run at a time, and sixteen may wait.

    In float32, rounding does not depend on whether tokens are verified as drafts or generated one by one.
    """
    settings = {
        "decoupled_mode": "false",
        "dtype": "float32",
        "max_batch_size": str(NUM_SLOTS),
        "max_queue_size": str(QUEUE_SIZE),
        "max_tokens_in_paged_kv_cache": "65536",
    }
    with serve(model=long_model, settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def short_queue_server(elsewhere: Path, long_model: Path) -> Iterator[TritonServer]:
    """The demo model on streams; four run at a time, sixteen may wait, and clients may set the log."""
    settings = {
        "max_batch_size": str(NUM_SLOTS),
        "max_queue_size": str(QUEUE_SIZE),
        "max_tokens_in_paged_kv_cache": "65536",
    }
    with serve(
        model=long_model,
        settings=settings,
        options=ServerOptions(client_apis=ClientApis(logging=True, model_config=True)),
    ) as server:
        yield server


def _serve_filled(folder: Path, command_lines: dict[str, str]) -> Iterator[TritonServer]:
    repository = folder / "filled in"
    absent = templates.fill_repository(repository, command_lines, DEMO_MODEL)
    assert absent == {}, absent
    with serve(model_repository=repository) as server:
        yield server


@pytest.fixture(scope="module")
def quick_start_server(elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of the templates filled in by the quick start's command lines."""
    yield from _serve_filled(tmp_path_factory.mktemp("quick start"), templates.QUICK_START)


@pytest.fixture(scope="module")
def perf_metrics_server(elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server of the templates filled in by the command lines of the tests of per-request metrics."""
    yield from _serve_filled(tmp_path_factory.mktemp("perf metrics"), templates.PERF_METRICS)
