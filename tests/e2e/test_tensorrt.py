"""A real tritonserver with plans, which a stand-in for TensorRT runs in the model's process."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports
from inflight.server.repository import Wanted
from tests.engine.tensorrt import engines
from tests.engine.tensorrt.runtime_stand_in import NAME

from .clients import Stream, completion, generate
from .conftest import DEMO_MODEL, REPOSITORY

ENGINE = "tensorrt_llm"
NUM_TOKENS = 20
SETTINGS = {"max_tokens_in_paged_kv_cache": "1024", "enable_chunked_context": "true"}
TENSORRT = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.engine.tensorrt.runtime_stand_in import install

install()
"""
MODEL = f"""{TENSORRT}
from inflight.triton.models.engine import TritonPythonModel
"""


@pytest.fixture(scope="module")
def server(elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> TritonServer:
    """A server of plans only: tokenizer and template are beside them, wherever the checkpoint is."""
    folder = tmp_path_factory.mktemp("plans")
    checkpoint = shutil.copytree(DEMO_MODEL, folder / "checkpoint")
    engines.build(checkpoint, folder / "built", max_num_tokens=64, max_seq_len=128)
    shutil.rmtree(checkpoint)
    plans = shutil.move(folder / "built", folder / "moved")
    ignored = shutil.ignore_patterns("demo_model", "__pycache__")
    repository = shutil.copytree(REPOSITORY, folder / "models", ignore=ignored)
    (repository / ENGINE / "1" / "model.py").write_text(MODEL)
    wanted = Wanted(engine_dir=plans, settings=SETTINGS)
    options = ServerOptions(model_repository=repository, wanted=wanted, ports=Ports(openai=0))
    with serve(options=options) as running:
        yield running


def test_streams_in_flight_equal_transformers(server: TritonServer, oracle, tokenizer) -> None:
    texts = [
        "def area(self):\n    return",
        "import os",
        "class Shape:\n    def area(self):\n        return 2",
    ]
    prompts = {str(number): tuple(tokenizer.encode(text)) for number, text in enumerate(texts * 3)}
    with Stream(server.grpc) as stream:
        for name, prompt in prompts.items():
            stream.send(ENGINE, name, input_ids=prompt, request_output_len=NUM_TOKENS, end_id=-1)
        answers = dict(stream.receive() for _ in prompts)
    for name, prompt in prompts.items():
        assert answers[name].ids == [*prompt, *oracle.greedy(prompt, NUM_TOKENS)]


def test_beams_and_texts_equal_transformers(server: TritonServer, oracle, tokenizer) -> None:
    text = "def area(self):\n    return"
    prompt = tuple(tokenizer.encode(text))
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS, "end_id": -1}
    beams = completion(server.grpc, beam_width=3, **request).beams
    expected = oracle.beams(prompt, NUM_TOKENS, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    assert beams == [tokens for tokens, _ in expected]
    body = generate(server.http, text_input=text, max_tokens=NUM_TOKENS, end_id=-1)
    assert body["text_output"] == text + tokenizer.decode(oracle.greedy(prompt, NUM_TOKENS))
    asked = {"model": "moved", "prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{server.openai}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
    ) as answer:
        (choice,) = json.load(answer)["choices"]
    assert choice["text"] == tokenizer.decode(oracle.greedy(prompt, NUM_TOKENS))


def test_the_log_names_the_plans_in_use(server: TritonServer) -> None:
    log = server.log_text()
    assert "nothing but a stand-in for TensorRT has run it" in log
    assert "rows of the KV cache: 6 slots of 128 tokens" in log


@pytest.mark.exhaustive
def test_two_ranks_started_by_the_model_give_the_same_tokens(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle, tokenizer
) -> None:
    """Each rank is a process with its own plans, and imports the stand-in by TensorRT's name."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / f"{NAME}.py").write_text(TENSORRT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    plans = engines.build(DEMO_MODEL, tmp_path / "plans", max_num_tokens=64, tensor_parallel_size=2)
    wanted = Wanted(engine_dir=plans, settings=SETTINGS)
    options = ServerOptions(wanted=wanted, ports=Ports(openai=0), tp=2, mode="orchestrator")
    prompt = tuple(tokenizer.encode("def area(self):\n    return"))
    with serve(options=options) as running:
        answer = completion(running.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, end_id=-1)
    assert answer.beams == [oracle.greedy(prompt, NUM_TOKENS)]
