"""Real tritonservers, one of each kind for the whole run, started from another directory."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from inflight.server.client_apis import ClientApis
from inflight.server.config_text import set_parameters
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports
from inflight.testing.fake_server import serve_fake
from inflight.text.tokenizer import Tokenizer
from tests.models.zoo import ZooModel

from .clients import TRAFFIC

REPOSITORY = Path(__file__).parents[2] / "model_repository"
DEMO_MODEL = REPOSITORY / "tensorrt_llm" / "1" / "demo_model"
POST_PROCESSORS = Path(__file__).with_name("post_processors.py")
FAKE_VOCABULARY = 1000
ADDITIONAL_OUTPUTS = "last_hidden_state:context, hidden_states_1:context, top_3_logits, top_3_logit_ids"
NARROW_STEP_MS, NARROW_QUEUE = 5, 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(*names): tensors that the test sends or gets back")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(autouse=True)
def tensors_of_covers_marks_are_sent(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that tests marked as covering a tensor have sent or received it."""
    TRAFFIC.clear()
    yield
    claimed = {name for mark in request.node.iter_markers("covers") for name in mark.args}
    assert claimed <= TRAFFIC.names, claimed - TRAFFIC.names


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change the current directory, on which nothing may depend."""
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("some where else")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for sequences of 32,768 tokens, whose requests stay in flight on a busy machine too."""
    folder = tmp_path_factory.mktemp("long") / "demo_model"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return folder


@pytest.fixture(scope="session")
def demo_server(elsewhere: Path) -> Iterator[TritonServer]:
    """The server that `scripts/serve` starts, with /v1."""
    with serve(
        options=ServerOptions(ports=Ports(openai=0), client_apis=ClientApis(model_config=True))
    ) as server:
        yield server


@pytest.fixture(scope="session")
def exact_server(elsewhere: Path) -> Iterator[TritonServer]:
    """The demo model in float32, so that its tokens can be compared with those of transformers.

    Requests may use the logits post-processors of `post_processors.py`.
    """
    settings = {
        "max_tokens_in_paged_kv_cache": "16384",
        "stats_check_period_ms": "1000",
        "logits_post_processor_module": str(POST_PROCESSORS),
        "additional_model_outputs": ADDITIONAL_OUTPUTS,
    }
    with serve(dtype="float32", settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def oracle() -> ZooModel:
    """The demo model run by transformers."""
    torch.set_num_threads(1)  # the servers compute too
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return ZooModel(DEMO_MODEL, model.eval())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer.from_dir(DEMO_MODEL)


@pytest.fixture(scope="session")
def pair_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in float32, in bfloat16 as a draft model, and front ends; BOS is put before texts."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoint = shutil.copytree(DEMO_MODEL, folder / "checkpoint", copy_function=os.symlink)
    content = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    around = TemplateProcessing(["<|endoftext|>", "$A"], special_tokens=[("<|endoftext|>", 0)])
    content["post_processor"] = json.loads(around.__getstate__())
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    own = {
        "tensorrt_llm": {"dtype": "float32", "gpt_model_path": str(checkpoint)},
        "tensorrt_llm_draft": {"dtype": "bfloat16", "gpt_model_path": str(checkpoint)},
        "ensemble": {},
        "tensorrt_llm_bls": {
            "tensorrt_llm_draft_model_name": "tensorrt_llm_draft",
            "accumulate_tokens": "true",
        },
    }
    for name, parameters in own.items():
        source = name.removesuffix("_draft")
        target = folder / "models" / name
        shutil.copytree(
            REPOSITORY / source, target, ignore=shutil.ignore_patterns("demo_model", "__pycache__")
        )
        config = target / "config.pbtxt"
        text = config.read_text().replace(f'name: "{source}"', f'name: "{name}"', 1)
        config.write_text(set_parameters(text, parameters))
    return folder


@pytest.fixture(scope="session")
def pair_server(elsewhere: Path, pair_repository: Path) -> Iterator[TritonServer]:
    """A target with its draft model, and the settings of docs/openai-server.md for Triton's front end."""
    page = (Path(__file__).parents[2] / "docs" / "openai-server.md").read_text()
    documented = dict(re.findall(r"--set (\S+?)=(\S+)", page.split("## Triton's own OpenAI front end")[1]))
    assert documented, "the page has lost its command"
    settings = {"max_tokens_in_paged_kv_cache": "8192", **documented}
    with serve(pair_repository / "models", settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def narrow_server(elsewhere: Path) -> Iterator[TritonServer]:
    """A fake engine with one slot, 5 ms per step, a queue of four, and state requests.

    A long request holds the slot for minutes.
    """
    settings = {
        "fake_engine": f"vocab={FAKE_VOCABULARY},step_us={NARROW_STEP_MS * 1000}",
        "max_batch_size": "1",
        "max_queue_size": str(NARROW_QUEUE),
        "enable_state_requests": "true",
        "max_sequence_length": "32768",
        "max_tokens_in_paged_kv_cache": "65536",
        "tokenizer_dir": str(DEMO_MODEL),
    }
    with serve_fake(settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def fuzzed_server(elsewhere: Path) -> Iterator[TritonServer]:
    """A fake engine without pauses, for requests that might end a server: its end fails no other tests."""
    settings = {
        "fake_engine": "vocab=3072,step_us=0",
        "max_sequence_length": "256",
        "tokenizer_dir": str(DEMO_MODEL),
    }
    with serve_fake(settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def fake_server(elsewhere: Path) -> Iterator[TritonServer]:
    """A fake engine, 2 ms per step, with the demo model's tokenizer; four long requests fill its KV cache."""
    settings = {
        "fake_engine": f"vocab={FAKE_VOCABULARY},step_us=2000",
        "max_sequence_length": "2048",
        "max_tokens_in_paged_kv_cache": "8192",
        "tokenizer_dir": str(DEMO_MODEL),
        "stats_check_period_ms": "1",
    }
    with serve_fake(
        settings=settings, options=ServerOptions(log_verbose=True, client_apis=ClientApis(model_config=True))
    ) as server:
        yield server
