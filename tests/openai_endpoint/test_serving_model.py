"""Caching of a checkpoint's tokenizer and settings, and the end of its validity."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from inflight.core.ports import EngineClient
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import Unavailable
from inflight.openai import serving_model
from inflight.openai.errors import ApiError
from inflight.openai.options import OpenAiOptions
from inflight.openai.serving_model import ServingModel
from inflight.testing.synthetic_tokenizer import make_tokenizer
from inflight.text.tokenizer import Tokenizer
from tests.endpoint.conftest import path  # noqa: F401 - a folder that is short enough for a socket
from tests.openai_endpoint.serving import DEMO, DEMO_VOCABULARY, PATIENCE_S, fake_engine, served

CHAT = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"messages": CHAT, "max_tokens": 5, "return_token_ids": True, "ignore_eos": True}


class Reloaded:
    """A client whose engine can be reloaded."""

    def __init__(self, description: EngineDescription) -> None:
        self.description = description

    def describe(self) -> EngineDescription:
        return self.description


def checkpoint(folder: Path, template: str) -> str:
    folder.mkdir(exist_ok=True)
    shutil.copy(DEMO / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return str(folder)


def test_a_reloaded_engine_is_served_with_its_own_files(tmp_path: Path) -> None:
    with fake_engine() as client:
        description = client.describe()
    old = checkpoint(tmp_path / "old", "old {{ messages[0].content }}")
    engine = Reloaded(replace(description, tokenizer_dir=old, model_path=old))
    model = ServingModel(cast(EngineClient, engine), OpenAiOptions())
    tokenizer = model.tokenizer()
    assert model.tokenizer() is tokenizer and model.token_bytes is model.token_bytes
    assert model.names == ("old",) and model.chat_template().render(CHAT) == "old hello"

    checkpoint(tmp_path / "old", "changed {{ messages[0].content }}")  # the same folder, reloaded
    engine.description = replace(engine.description)
    assert model.chat_template().render(CHAT) == "changed hello"

    new = checkpoint(tmp_path / "new", "new {{ messages[0].content }}")
    engine.description = replace(description, tokenizer_dir=new, model_path=new)
    assert model.names == ("new",) and model.chat_template().render(CHAT) == "new hello"
    assert model.tokenizer() is not tokenizer


@pytest.mark.parametrize("template", ["{% for message in messages %}\n{{ message }", 17])
def test_a_broken_template_is_logged_at_load_and_refuses_only_chats(
    template: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path / "broken", template)
    with (
        caplog.at_level(logging.ERROR),
        fake_engine(tokenizer_dir=folder) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        deadline = time.monotonic() + PATIENCE_S
        while not (lines := [record.getMessage() for record in caplog.records]):
            assert time.monotonic() < deadline, "nothing was logged, and nobody asks"
            time.sleep(0.01)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        answers = [client.post("/v1/chat/completions", json=ASKED) for _ in range(2)]
        error = answers[1].json()["error"]
        assert answers[0].json()["error"] == error
        assert (answers[1].status_code, error["code"]) == (500, "chat_template_error")
        assert "chats cannot be answered" in error["message"] and "--chat-template" in error["message"]
        assert folder not in error["message"] and folder in lines[0]  # clients get no paths, the log has them
        assert client.get("/playground/model").json() == {
            "has_chat_template": False,
            "reason": error["message"],
            "max_picture_bytes": 0,
        }
    assert len(lines) == 1 == len(caplog.records) and lines[0].startswith("chats will be refused: ")
    if isinstance(template, str):
        assert "line 2: unexpected '}'" in lines[0] and "line 2: unexpected '}'" in error["message"]


def test_a_template_broken_after_the_start_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }")
    with fake_engine() as engine:
        model = ServingModel(engine, OpenAiOptions(chat_template=file))
        model.load()
        with pytest.raises(ApiError, match="… is not a template, line 1"):
            model.chat_template()


def test_another_engines_template_and_tokenizer_are_used(
    path: str,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    """The engine behind a socket is replaced by one with another template and tokenizer."""
    old = checkpoint(tmp_path / "old", "old {{ messages[0].content }}")
    new = checkpoint(tmp_path / "new", "new words: {{ messages[0].content }}!")
    make_tokenizer(DEMO_VOCABULARY).save(str(tmp_path / "new" / "tokenizer.json"))
    far = SocketEngineClient(path)
    with served(far, served_model_names=("chatty",)) as url, httpx.Client(base_url=url) as client:
        for folder, rendered in ((old, "old hello"), (new, "new words: hello!")):
            tokenizer = Tokenizer.from_dir(folder)
            with fake_engine(tokenizer_dir=folder) as engine:
                assert isinstance(engine, LocalEngineClient)
                server = EndpointServer(engine, path)
                answer = client.post("/v1/chat/completions", json=ASKED).json()
                assert answer["prompt_token_ids"] == tokenizer.encode(rendered, add_special_tokens=False)
                (choice,) = answer["choices"]
                assert len(choice["token_ids"]) == 5
                assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"])
                counted = client.post("/tokenize", json={"messages": CHAT}).json()
                assert counted["tokens"] == answer["prompt_token_ids"]
                server.close()
            assert client.post("/v1/chat/completions", json=ASKED).status_code == 503
    far.close()


class Clock:
    """A replacement of `time` in the serving model."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Slow:
    """A slow engine client that counts its calls.

    Attributes:
        may_answer: Adapters are listed only after it is set.
        clock: Time at which it describes itself.
        takes_s: Seconds by which a description advances the clock.
        is_away: Whether descriptions raise Unavailable.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.clock = Clock()
        self.may_answer = threading.Event()
        self.num_lists = 0
        self.num_descriptions = 0
        self.takes_s = 0.0
        self.is_away = False
        self.names = ["sql"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def describe(self) -> EngineDescription:
        self.num_descriptions += 1
        self.clock.now_s += self.takes_s
        if self.is_away:
            raise Unavailable("no packet comes back")
        return self._engine.describe()

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        self.num_lists += 1
        assert self.may_answer.wait(PATIENCE_S)
        return tuple(AdapterState(name, None, "/a", True, 8, 100) for name in self.names)


def test_requests_waiting_for_the_engine_delay_no_others() -> None:
    with (
        fake_engine() as engine,
        ThreadPoolExecutor(12) as pool,
        served(cast(EngineClient, slow := Slow(engine))) as url,
    ):
        asked = {"model": "nobody", "prompt": "a"}
        waiting = [
            pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=PATIENCE_S)
            for _ in range(12)
        ]
        while not slow.num_lists:
            time.sleep(0.01)
        answer = httpx.post(f"{url}/v1/completions", json={**asked, "model": "demo"}, timeout=PATIENCE_S)
        assert answer.status_code == 200 and not any(each.done() for each in waiting)
        slow.may_answer.set()
        assert {each.result().status_code for each in waiting} == {404}


def test_adapters_are_not_listed_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine() as engine:
        slow = Slow(engine)
        slow.may_answer.set()
        monkeypatch.setattr(serving_model, "time", slow.clock)
        model = ServingModel(cast(EngineClient, slow), OpenAiOptions(served_model_names=("demo",)))
        assert [model.adapter_of("sql") for _ in range(50)] == ["sql"] * 50 and slow.num_lists == 1
        assert model.adapter_of("demo") == "" and slow.num_lists == 1
        slow.names.append("new")  # a newly loaded adapter is found at once
        assert model.adapter_of("new") == "new" and slow.num_lists == 2
        slow.names.clear()
        slow.clock.now_s += 1.1 * serving_model._ADAPTERS_FRESH_S
        with pytest.raises(ApiError, match="does not exist"):
            model.adapter_of("sql")


def test_an_unresponsive_engine_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine() as engine, ThreadPoolExecutor(8) as pool:
        slow = Slow(engine)
        monkeypatch.setattr(serving_model, "time", slow.clock)
        slow.is_away, slow.takes_s = True, 1.1 * serving_model._SLOW_S
        model = ServingModel(cast(EngineClient, slow), OpenAiOptions())

        def ask(_: int) -> str:
            with pytest.raises(Unavailable) as away:
                model.describe()
            return str(away.value)

        assert set(pool.map(ask, range(8))) == {"no packet comes back"} and slow.num_descriptions == 1
        slow.clock.now_s += 1.1 * serving_model._SLOW_S  # after this time the engine is asked again
        slow.is_away, slow.takes_s = False, 0.0
        assert model.describe() is engine.describe() and slow.num_descriptions == 2
        slow.is_away = True  # an immediate refusal delays no request
        for _ in range(3):
            ask(0)
        slow.is_away = False
        assert model.describe() is engine.describe() and slow.num_descriptions == 6
