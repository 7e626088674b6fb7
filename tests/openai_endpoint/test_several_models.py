"""Several engines behind one /v1: requests choose by the name of a model's folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inflight.build import RunningEngine, build_engine
from inflight.endpoint.client import SocketEngineClient
from inflight.load_model import load_model
from tests.openai_endpoint.serving import DEMO, PATIENCE_S, demo_engine, served
from tests.triton.factories import make_parameters

PROMPT = "def area("


def checkpoint(folder: Path) -> Path:
    """Make a second model: the demo model with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name] = weights[name] * torch.linspace(0.2, 2.0, len(weights[name]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "second")


def start(folder: Path, socket: Path, **parameters: str) -> RunningEngine:
    values = {"gpt_model_path": str(folder), "dtype": "float32", **parameters}
    return build_engine(make_parameters(**values), "", str(socket), load=load_model)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "second.sock"


@pytest.fixture
def url(socket: Path) -> Iterator[str]:
    """/v1 for the demo model and for the engine that listens at `socket`, if one does."""
    other = SocketEngineClient(str(socket))
    with demo_engine(enable_sleep_mode="true") as engine, served(engine, others=(other,)) as url:
        yield url
    other.close()


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def text(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def names(client: openai.OpenAI) -> list[str]:
    return [model.id for model in client.models.list().data]


def alone(folder: Path) -> str:
    """The model's answer on a server that has no other."""
    with demo_engine(gpt_model_path=str(folder)) as engine, served(engine) as url, connect(url) as client:
        return text(client, "demo")


def test_each_model_is_listed_and_answers(url: str, second: Path, socket: Path) -> None:
    running = start(second, socket)
    try:
        with connect(url) as client:
            assert names(client) == ["demo", "second"]
            assert client.models.retrieve("second").id == "second"
            answers = {name: text(client, name) for name in ("demo", "second")}
            assert answers == {"demo": alone(DEMO), "second": alone(second)}
            assert answers["demo"] != answers["second"]
            with pytest.raises(openai.NotFoundError, match="this server has demo, second"):
                text(client, "third")
            counted = httpx.post(f"{url}/tokenize", json={"model": "second", "prompt": PROMPT}).json()
            assert counted["count"] > 0
    finally:
        running.close(0.0)


TOLD: dict[str, Callable[[Any], Any]] = {
    "chat/completions": lambda told: (told["usage"], told["choices"][0]["message"]["content"]),
    "responses": lambda told: (told["usage"], told["output"][0]["content"][0]["text"]),
    "messages": lambda told: (told["usage"], told["content"][0]["text"]),
    "chat/completions/render": lambda told: told["token_ids"],
}
"""The parts of each route's answer that its prompt and text determine."""


@pytest.mark.parametrize("route", TOLD)
def test_chats_are_rendered_by_their_models_template(
    route: str, second: Path, socket: Path, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(second, folder)
    template = "{% for each in messages %}Q: {{ each.content }}\nA:{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "What is a lock?"}]
    asked: dict[str, Any] = {"max_tokens": 12, "messages": turns}
    if route == "responses":
        asked = {"max_output_tokens": 12, "input": turns}

    def answer(url: str) -> Any:
        body = {"model": "other", "temperature": 0, **asked}
        found = httpx.post(f"{url}/v1/{route}", json=body, timeout=PATIENCE_S)
        assert found.is_success, found.text
        return TOLD[route](found.json())

    running = start(folder, socket)
    try:
        with (
            demo_engine(gpt_model_path=str(folder)) as engine,
            served(engine, served_model_names=("other",)) as alone,
        ):
            assert answer(url) == answer(alone)
    finally:
        running.close(0.0)


def test_a_model_is_unloaded_and_loaded_by_itself(url: str, second: Path, socket: Path) -> None:
    """Requests in flight finish; meanwhile and afterwards the other model answers."""
    running = start(second, socket)
    with connect(url) as client:
        before = text(client, "second")
        stream = client.completions.create(
            model="second", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        assert running.close(PATIENCE_S)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert names(client) == ["demo"] and text(client, "demo")
        assert httpx.get(f"{url}/health").status_code == 200
        with pytest.raises(openai.InternalServerError) as away:
            text(client, "second")
        assert away.value.status_code == 503
        again = start(second, socket)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while "second" not in names(client):
                assert time.monotonic() < deadline
            assert text(client, "second") == before
        finally:
            again.close(0.0)


def test_one_model_sleeps_while_the_other_answers(url: str, second: Path, socket: Path) -> None:
    running = start(second, socket, enable_sleep_mode="true")
    try:
        with connect(url) as client:
            before = text(client, "second")
            assert httpx.post(f"{url}/sleep?model=second", timeout=PATIENCE_S).status_code == 200
            told: dict[str, Any] = httpx.get(f"{url}/is_sleeping?model=second").json()
            assert told == {"is_sleeping": True}
            assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": False}
            assert text(client, "demo")
            with pytest.raises(openai.InternalServerError, match="the engine sleeps"):
                text(client, "second")
            assert httpx.post(f"{url}/wake_up?model=second", timeout=PATIENCE_S).status_code == 200
            assert text(client, "second") == before
            assert httpx.post(f"{url}/sleep?model=third").status_code == 404
    finally:
        running.close(0.0)


def test_an_adapter_names_its_models_engine(
    second: Path, socket: Path, url: str, adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "adapters" / "sql")
    running = start(second, socket, lora_dir=str(tmp_path / "adapters"))
    try:
        with connect(url) as client:
            assert names(client) == ["demo", "second", "sql"]
            assert text(client, "sql") != text(client, "second")
    finally:
        running.close(0.0)


def test_adapters_of_each_model_are_loaded_and_unloaded(
    second: Path, socket: Path, adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "first" / "sql")
    shutil.copytree(adapter, tmp_path / "other" / "law")
    running = start(second, socket, lora_dir=str(tmp_path / "other"), enable_adapter_commands="true")
    other = SocketEngineClient(str(socket))

    def send(route: str, name: str, **body: Any) -> str:
        """Send a command; return the error, or "" if it succeeds."""
        body = {"lora_name": name, **body}
        answer = httpx.post(f"{url}/v1/{route}_lora_adapter", json=body, timeout=PATIENCE_S)
        return "" if answer.is_success else f"{answer.status_code} {answer.json()['error']['message']}"

    try:
        with (
            demo_engine(lora_dir=str(tmp_path / "first"), enable_adapter_commands="true") as engine,
            served(engine, others=(other,)) as url,
            connect(url) as client,
        ):
            of_second = text(client, "law")
            assert "which another model of this server has" in send(
                "load", "sql", lora_path="law", model="second"
            )
            assert not send("load", "new", lora_path="law", model="second")
            assert names(client) == ["demo", "sql", "second", "law", "new"]
            assert text(client, "new") == of_second != text(client, "second")
            assert "already loaded" in send("load", "new", lora_path="law")  # the model that has it is meant
            assert not send("load", "new", lora_path="law", load_inplace=True)
            assert "which is the model itself" in send("load", "second", lora_path="law")
            assert send("load", "more", lora_path="law", model="third").startswith("404 ")
            assert send("unload", "more").startswith("404 ")
            assert not send("unload", "new")
            assert names(client) == ["demo", "sql", "second", "law"]
            assert not send("load", "new", lora_path="sql")  # without a name the first model is meant
            assert names(client) == ["demo", "new", "sql", "second", "law"]
            assert text(client, "new") == text(client, "sql") != of_second
    finally:
        other.close()
        running.close(0.0)


def test_requests_of_a_batch_choose_their_models(second: Path, socket: Path, tmp_path: Path) -> None:
    running, other = start(second, socket), SocketEngineClient(str(socket))
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, "model": name}}
        for name in ("demo", "second", "third")
    ]
    try:
        with (
            demo_engine() as engine,
            served(engine, others=(other,), batch_dir=tmp_path / "batches") as url,
            connect(url) as client,
        ):
            content = "\n".join(map(json.dumps, lines)).encode()
            uploaded = client.files.create(file=("x.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h"
            )
            deadline = time.monotonic() + PATIENCE_S
            while batch.status != "completed":
                assert time.monotonic() < deadline and batch.status != "failed"
                batch = client.batches.retrieve(batch.id)
            assert batch.output_file_id is not None and batch.error_file_id is not None
            answers = [
                json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
            ]
            found = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
            assert found == {name: text(client, name) for name in ("demo", "second")}
            (failed,) = client.files.content(batch.error_file_id).text.splitlines()
            assert json.loads(failed)["response"]["status_code"] == 404
    finally:
        other.close()
        running.close(0.0)
