"""Real tritonservers, one of each kind for the whole run, started from another directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.testing.fake_server import serve_fake
from inflight.text.tokenizer import Tokenizer
from tests.models.zoo import ZooModel

from .clients import TRAFFIC

REPOSITORY = Path(__file__).parents[2] / "model_repository"
DEMO_MODEL = REPOSITORY / "tensorrt_llm" / "1" / "demo_model"
POST_PROCESSORS = Path(__file__).with_name("post_processors.py")
FAKE_VOCABULARY = 1000
NARROW_STEP_MS, NARROW_QUEUE = 5, 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(*names): tensors that the test sends or gets back")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(autouse=True)
def what_is_said_to_be_covered_was_sent(request: pytest.FixtureRequest) -> Iterator[None]:
    """So that nobody has to believe the marks."""
    TRAFFIC.clear()
    yield
    claimed = {name for mark in request.node.iter_markers("covers") for name in mark.args}
    assert claimed <= TRAFFIC.names, claimed - TRAFFIC.names


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Another current directory: nothing may depend on this one."""
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("some where else")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="session")
def demo_server(elsewhere: Path) -> Iterator[TritonServer]:
    """What `scripts/serve` starts."""
    with serve() as server:
        yield server


@pytest.fixture(scope="session")
def exact_server(elsewhere: Path) -> Iterator[TritonServer]:
    """The demo model in float32, in which its tokens can be compared with those of transformers.

    Requests may name the logits post-processors of `post_processors.py`.
    """
    settings = {
        "max_tokens_in_paged_kv_cache": "16384",
        "stats_check_period_ms": "1000",
        "logits_post_processor_module": str(POST_PROCESSORS),
    }
    with serve(dtype="float32", settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def oracle() -> ZooModel:
    """The demo model as transformers runs it."""
    torch.set_num_threads(1)  # the servers compute too
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return ZooModel(DEMO_MODEL, model.eval())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo model's."""
    return Tokenizer.from_dir(DEMO_MODEL)


@pytest.fixture(scope="session")
def narrow_server(elsewhere: Path) -> Iterator[TritonServer]:
    """A fake engine that runs one request at a time, 5 ms a step, lets four wait, and says what it is doing."""
    settings = {
        "fake_engine": f"vocab={FAKE_VOCABULARY},step_us={NARROW_STEP_MS * 1000}",
        "max_batch_size": "1",
        "max_queue_size": str(NARROW_QUEUE),
        "enable_state_requests": "true",
        "max_sequence_length": "2048",
        "max_tokens_in_paged_kv_cache": "8192",
        "tokenizer_dir": str(DEMO_MODEL),
    }
    with serve_fake(settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def fake_server(elsewhere: Path) -> Iterator[TritonServer]:
    """A fake engine, 2 ms a step, with a KV cache that four long requests fill; the demo model's tokenizer."""
    settings = {
        "fake_engine": f"vocab={FAKE_VOCABULARY},step_us=2000",
        "max_sequence_length": "2048",
        "max_tokens_in_paged_kv_cache": "8192",
        "tokenizer_dir": str(DEMO_MODEL),
        "stats_check_period_ms": "1",
    }
    with serve_fake(settings=settings, options=ServerOptions(log_verbose=True)) as server:
        yield server
