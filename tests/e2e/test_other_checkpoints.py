"""Other checkpoints on a real tritonserver: experts over ranks, transformers' own code, quantized ones.

tests/engine tests the engine of each of these. The fast tier has only the server with an explicitly chosen
engine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.request.request import Request
from inflight.engine.load import load_engine
from inflight.server.launch import ServerOptions, serve
from inflight.server.repository import Wanted
from inflight.testing.quantize import quantize_checkpoint
from tests.engine.serving import serve as serve_in_process
from tests.models.zoo import make_model

from .clients import Stream, ask, completion, generate
from .conftest import DEMO_MODEL, REPOSITORY

ENGINE = "tensorrt_llm"
SETTINGS = {"max_tokens_in_paged_kv_cache": "2048"}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def engine_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model repository without the models that need a tokenizer."""
    folder = tmp_path_factory.mktemp("engine alone")
    ignored = shutil.ignore_patterns("demo_model", "__pycache__")
    shutil.copytree(REPOSITORY / ENGINE, folder / ENGINE, ignore=ignored)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
def test_expert_parallel_ranks_give_the_same_tokens(elsewhere, engine_alone, tmp_path, mode):
    model = make_model(tmp_path / "mixtral", "mixtral-even")
    options = ServerOptions(tp=2, ep=2, mode=mode)
    prompts = {str(length): model.prompt(length) for length in (3, 40)}
    with (
        serve(engine_alone, model.folder, "float32", SETTINGS, options=options) as server,
        Stream(server.grpc) as stream,
    ):
        for name, prompt in prompts.items():
            stream.send(ENGINE, name, input_ids=prompt, request_output_len=NUM_TOKENS, end_id=-1)
        answers = dict(stream.receive() for _ in prompts)
    for name, prompt in prompts.items():
        assert answers[name].ids == [*prompt, *model.greedy(prompt, NUM_TOKENS)]


@pytest.mark.exhaustive
def test_an_unknown_family_is_served_by_transformers(elsewhere, engine_alone, tmp_path):
    """No option selects transformers; requests are streamed, and a beam search."""
    model = make_model(tmp_path / "nemotron", "nemotron")
    prompt = model.prompt(40)
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS, "end_id": -1}
    with serve(engine_alone, model.folder, "float32", SETTINGS) as server:
        streamed = ask(server.grpc, exclude_input_in_output=True, streaming=True, **request)
        beams = completion(server.grpc, beam_width=3, **request).beams
        assert (
            "NemotronForCausalLM is not implemented here: transformers' own code runs it" in server.log_text()
        )
    assert [token for answer in streamed for token in answer.ids] == model.greedy(prompt, NUM_TOKENS)
    expected = model.beams(prompt, NUM_TOKENS, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    assert beams == [tokens for tokens, _ in expected]


@pytest.mark.exhaustive
def test_a_known_family_can_be_served_by_transformers(elsewhere, oracle, tokenizer):
    text = "def area(self):\n    return"
    prompt = tuple(tokenizer.encode(text))
    options = ServerOptions(wanted=Wanted(DEMO_MODEL, "float32", SETTINGS, engine="transformers"))
    with serve(options=options) as server:
        answer = completion(server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, end_id=-1)
        body = generate(server.http, text_input=text, max_tokens=NUM_TOKENS, end_id=-1)
        assert "the layers are transformers' own code" in server.log_text()
    expected = oracle.greedy(prompt, NUM_TOKENS)
    assert answer.ids == expected
    assert body["text_output"] == text + tokenizer.decode(expected)


@pytest.mark.exhaustive
def test_a_4_bit_checkpoint_is_served_with_an_8_bit_kv_cache(elsewhere, engine_alone, tmp_path, tokenizer):
    """The tokens equal those of the engine in this process, which other tests compare with transformers."""
    folder = quantize_checkpoint(DEMO_MODEL, tmp_path / "gptq", "gptq")
    prompt = tuple(tokenizer.encode("def area(self):\n    return"))
    config = EngineConfig(str(folder), kv_cache_dtype="int8", max_tokens_in_paged_kv_cache=2048)
    request = Request(0, prompt, NUM_TOKENS)
    expected = serve_in_process(load_engine(config), SchedulingConfig(), [request]).tokens(request)
    with serve(engine_alone, folder, settings=SETTINGS | {"kv_cache_dtype": "int8"}) as server:
        answer = completion(server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, end_id=-1)
        log = server.log_text()
    assert answer.ids == expected
    assert "int8" in next(line for line in log.splitlines() if "KV cache:" in line)
