"""Servers with several ranks on one host, and engines in one server, do not affect each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
import tritonclient.grpc as grpc

from inflight.server.config_text import set_parameters
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.testing.make_model import make_model
from tests.models.zoo import ZooModel
from tests.tiers import with_all

from .clients import CONTROL, CONTROLLED, ask, completion, infer, wait_until
from .conftest import REPOSITORY
from .footprint import folder_of, left_of

SMALL_CACHE = {"max_tokens_in_paged_kv_cache": "4096"}
REQUEST = {"input_ids": [3, 1, 4, 1, 5], "request_output_len": 16, "end_id": -1}
SECOND = "second_model"


def tokens(server: TritonServer, model: str = "tensorrt_llm") -> list[int]:
    (answer,) = ask(server.grpc, model, exclude_input_in_output=True, **REQUEST)
    assert answer.error is None, answer.error
    return answer.ids


MODES = [ServerOptions(pp=2), ServerOptions(tp=2, mode="leader")]
"""An orchestrator with two stages, and a leader with two tensor-parallel ranks."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stays", "ends"),
    [
        pytest.param(*MODES, id="the leader ends first"),
        pytest.param(*reversed(MODES), id="the orchestrator ends first"),
    ],
)
def test_a_server_continues_when_a_server_of_the_other_mode_ends(exact_server, stays, ends):
    expected = completion(exact_server.grpc, **REQUEST).ids
    with serve(dtype="float32", settings=SMALL_CACHE, options=stays) as staying:
        with serve(dtype="float32", settings=SMALL_CACHE, options=ends) as ending:
            assert tokens(ending) == tokens(staying) == expected
            assert ending.shut_down() is True
        assert left_of(folder_of(ending)) == []
        assert tokens(staying) == expected
    assert left_of(folder_of(staying)) == []


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with the demo model, another model with two ranks, and a front end for each."""
    folder = tmp_path_factory.mktemp("two engines")
    checkpoint = make_model(folder / "checkpoint", "llama", "tiny", dtype="float32", seed=5)
    for model in ("tensorrt_llm", "tensorrt_llm_infer"):
        shutil.copytree(REPOSITORY / model, folder / "models" / model, symlinks=True)
    copy(folder / "models", "tensorrt_llm", SECOND, gpt_model_path=str(checkpoint), tensor_parallel_size="2")
    copy(folder / "models", "tensorrt_llm_infer", f"{SECOND}_infer", tensorrt_llm_model_name=SECOND)
    return folder / "models"


def copy(repository: Path, model: str, name: str, **parameters: str) -> None:
    shutil.copytree(
        repository / model, repository / name, ignore=shutil.ignore_patterns("demo_model", "__pycache__")
    )
    config = repository / name / "config.pbtxt"
    text = config.read_text().replace(f'name: "{model}"', f'name: "{name}"', 1)
    config.write_text(set_parameters(text, parameters))


@pytest.mark.parametrize("loads_again", with_all([False, True], [False]))
def test_two_engines_in_one_server_do_not_affect_each_other(exact_server, two_engines, loads_again):
    (checkpoint,) = two_engines.parent.glob("checkpoint")
    alone = ZooModel(checkpoint, transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval())
    expected = {
        "tensorrt_llm": completion(exact_server.grpc, **REQUEST).ids,
        SECOND: alone.greedy(tuple(REQUEST["input_ids"]), REQUEST["request_output_len"]),
    }
    assert expected["tensorrt_llm"] != expected[SECOND]
    options = ServerOptions(two_engines, mode="orchestrator", client_apis=CONTROLLED)
    with serve(two_engines, dtype="float32", settings=SMALL_CACHE, options=options) as server:
        for model, ids in expected.items():
            assert tokens(server, model) == ids
            by_front_end = infer(server.http, f"{model}_infer", exclude_input_in_output=True, **REQUEST)
            assert by_front_end.as_numpy("output_ids").reshape(-1).tolist() == ids
        with grpc.InferenceServerClient(server.grpc) as client:
            client.unload_model(SECOND, headers=CONTROL)
            wait_until(lambda: not client.is_model_ready(SECOND))
            assert tokens(server) == expected["tensorrt_llm"]
            if loads_again:
                client.load_model(SECOND, headers=CONTROL)
                assert tokens(server, SECOND) == expected[SECOND]
    assert left_of(folder_of(server)) == []
