"""A repository with two engines, whose models /v1 serves by name; Triton unloads and loads one of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import openai
import pytest
import tritonclient.grpc as grpc

from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports

from .clients import CONTROL, CONTROLLED, wait_until
from .conftest import DEMO_MODEL, REPOSITORY
from .test_side_by_side import SMALL_CACHE, copy

SECOND = "second_model"
"""The name of the engine in the repository; its model's folder is `second`."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several models")
    checkpoint = shutil.copytree(DEMO_MODEL, folder / "second")
    shutil.copytree(REPOSITORY / "tensorrt_llm", folder / "models" / "tensorrt_llm", symlinks=True)
    copy(folder / "models", "tensorrt_llm", SECOND, gpt_model_path=str(checkpoint))
    return folder / "models"


def text(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt="def area(", max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def names(client: openai.OpenAI) -> list[str]:
    return [model.id for model in client.models.list().data]


def test_models_are_served_unloaded_and_loaded_by_name(repository: Path) -> None:
    options = ServerOptions(
        repository, ports=Ports(openai=0), model_control="explicit", client_apis=CONTROLLED
    )
    with (
        serve(repository, settings=SMALL_CACHE, options=options) as server,
        openai.OpenAI(base_url=f"{server.openai}/v1", api_key="none", max_retries=0) as client,
    ):
        _check(client, server)


def _check(client: openai.OpenAI, server: TritonServer) -> None:
    wait_until(lambda: len(names(client)) == 2)
    first, second = names(client)
    assert (first, second) == ("demo_model", "second")
    expected = text(client, first)
    assert text(client, second) == expected  # the checkpoints are equal
    stream = client.completions.create(
        model=second, prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    with grpc.InferenceServerClient(server.grpc) as triton:
        triton.unload_model(SECOND, headers=CONTROL)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        wait_until(lambda: names(client) == [first])
        assert text(client, first) == expected
        with pytest.raises(openai.InternalServerError) as away:
            text(client, second)
        assert away.value.status_code == 503
        triton.load_model(SECOND, headers=CONTROL)
        wait_until(lambda: names(client) == [first, second])
        assert text(client, second) == expected
