"""/v1/load_lora_adapter and /v1/unload_lora_adapter, compared with the base model that PEFT has merged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
import transformers

from inflight.core.ports import EngineClient
from tests.openai_endpoint.serving import DEMO, PATIENCE_S, demo_engine, served

PROMPT = [97, 514, 40, 1021, 9]
ANSWER = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Path:
    """A lora_dir with two adapters and a folder without one, and an adapter outside of it."""
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(adapter, root / "inside" / "sql")
    torch.manual_seed(2)
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(root / "inside" / "chat")
    (root / "inside" / "empty").mkdir()
    shutil.copytree(adapter, root / "outside")
    return root


@pytest.fixture
def server(folders: Path) -> Iterator[tuple[EngineClient, str]]:
    with (
        demo_engine(
            lora_dir=str(folders / "inside"),
            lora_adapters=f"own={folders / 'outside'}",
            enable_adapter_commands="true",
        ) as engine,
        served(engine) as url,
    ):
        yield engine, url


@pytest.fixture
def url(server: tuple[EngineClient, str]) -> str:
    return server[1]


def post(url: str, action: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{action}_lora_adapter", json=body, timeout=PATIENCE_S)


def command(url: str, action: str, **body: Any) -> str:
    answer = post(url, action, **body)
    assert answer.status_code == 200, answer.text
    return answer.text


def names(url: str) -> set[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return {model.id for model in client.models.list().data}


def tokens(url: str, model: str) -> list[int]:
    body = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json={**body, "model": model}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def expected(folder: Path) -> list[int]:
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    ids = merged.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
    )
    return ids[0, len(PROMPT) :].tolist()


def test_a_loaded_adapter_is_a_model_until_it_is_unloaded(url: str, folders: Path) -> None:
    before = names(url)
    assert before == {"demo", "sql", "chat", "empty", "own"}
    told = command(url, "load", lora_name="new", lora_path=str(folders / "inside" / "sql"))
    assert told == "Success: LoRA adapter 'new' added successfully."
    assert names(url) == {*before, "new"}
    listed = httpx.get(f"{url}/v1/models/new").json()
    assert (listed["root"], listed["parent"]) == (str(folders / "inside" / "sql"), "demo")
    assert tokens(url, "new") == expected(folders / "inside" / "sql") != tokens(url, "demo")
    assert command(url, "unload", lora_name="new") == "Success: LoRA adapter 'new' removed successfully."
    assert names(url) == before
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "model": "new"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    command(url, "load", lora_name="new", lora_path="chat")
    assert tokens(url, "new") == expected(folders / "inside" / "chat")


def test_an_adapter_is_replaced_in_place(url: str, folders: Path) -> None:
    command(url, "load", lora_name="new", lora_path="sql")
    again = post(url, "load", lora_name="new", lora_path="chat")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert "load_inplace replaces it" in again.json()["error"]["message"]
    assert tokens(url, "new") == expected(folders / "inside" / "sql")
    command(url, "load", lora_name="new", lora_path="chat", load_inplace=True)
    assert tokens(url, "new") == expected(folders / "inside" / "chat")
    refused = post(url, "load", lora_name="new", lora_path="empty", load_inplace=True)
    assert refused.status_code == 400 and "neither adapter_config.json" in refused.json()["error"]["message"]
    assert tokens(url, "new") == expected(folders / "inside" / "chat"), "the old adapter still answers"


def test_an_operators_adapter_is_read_again(url: str, folders: Path) -> None:
    """Its folder is outside of lora_dir, so that a client may only name the folder that it has."""
    command(url, "load", lora_name="own", lora_path=str(folders / "outside"))
    command(url, "load", lora_name="own", lora_path=str(folders / "outside"), load_inplace=True)
    command(url, "unload", lora_name="own")
    assert "own" in names(url)
    assert tokens(url, "own") == expected(folders / "outside")
    other = post(url, "load", lora_name="own", lora_path="chat", load_inplace=True)
    assert other.status_code == 400 and "already has a folder" in other.json()["error"]["message"]


def test_requests_of_an_unloaded_adapter_finish(server: tuple[EngineClient, str]) -> None:
    _, url = server
    command(url, "load", lora_name="new", lora_path="sql")
    body = {
        "prompt": PROMPT,
        "max_tokens": 100,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    whole = httpx.post(f"{url}/v1/completions", json={**body, "model": "new"}, timeout=PATIENCE_S).json()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        extra = {"ignore_eos": True, "return_token_ids": True}
        streams = [
            client.completions.create(
                model="new", prompt=PROMPT, max_tokens=100, temperature=0, stream=True, extra_body=extra
            )
            for _ in range(3)
        ]
        firsts = [next(iter(stream)) for stream in streams]
        command(url, "unload", lora_name="new")
        assert "new" not in names(url)
        for first, stream in zip(firsts, streams, strict=True):
            chunks = [first, *stream]
            found = [each for chunk in chunks for each in getattr(chunk.choices[0], "token_ids", ())]
            assert found == whole["choices"][0]["token_ids"]
            assert chunks[-1].choices[0].finish_reason == "length"


def test_loads_of_one_name_at_once(url: str, folders: Path) -> None:
    """Whichever is first, the name has an adapter, and an answer of 400 says that it is loaded."""
    found: list[httpx.Response] = []

    def load() -> None:
        found.append(post(url, "load", lora_name="new", lora_path="sql"))

    threads = [threading.Thread(target=load) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {each.status_code for each in found} <= {200, 400}
    assert any(each.status_code == 200 for each in found)
    assert tokens(url, "new") == expected(folders / "inside" / "sql")


@pytest.mark.parametrize(
    ("action", "body", "status", "param", "words"),
    [
        ("load", {"lora_path": "sql"}, 400, "lora_name", "required"),
        ("load", {"lora_name": "new"}, 400, "lora_path", "required"),
        ("load", {"lora_name": "", "lora_path": "sql"}, 400, "lora_name", "at least 1"),
        (
            "load",
            {"lora_name": "new", "lora_path": "../outside"},
            400,
            "lora_path",
            "below the server's lora_dir",
        ),
        ("load", {"lora_name": "new", "lora_path": "/etc"}, 400, "lora_path", "below the server's lora_dir"),
        ("load", {"lora_name": "new", "lora_path": "nowhere"}, 404, None, "has no such folder"),
        ("load", {"lora_name": "new", "lora_path": "empty"}, 400, "lora_path", "adapter_config.json"),
        ("load", {"lora_name": "demo", "lora_path": "sql"}, 400, "lora_name", "the model itself"),
        (
            "load",
            {"lora_name": "new", "lora_path": "sql", "is_3d_lora_weight": True},
            400,
            "is_3d_lora_weight",
            "by itself",
        ),
        ("unload", {}, 400, "lora_name", "required"),
        ("unload", {"lora_name": "new"}, 404, None, "is not loaded"),
        ("unload", {"lora_name": "sql", "lora_int_id": 1}, 400, "lora_int_id", "leave it out"),
    ],
)
def test_what_is_refused(
    url: str, action: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = post(url, action, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert words in error["message"]
    assert names(url) == {"demo", "sql", "chat", "own", "empty"}


@pytest.mark.parametrize(
    ("action", "body"),
    [("load", {"lora_name": "new", "lora_path": "sql"}), ("unload", {"lora_name": "sql"})],
)
def test_without_the_setting_nothing_is_done(folders: Path, action: str, body: dict[str, str]) -> None:
    with demo_engine(lora_dir=str(folders / "inside")) as engine, served(engine) as url:
        answer = post(url, action, **body)
        assert "new" not in names(url)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (403, "permission_error")
    assert "--set enable_adapter_commands=true" in error["message"]


def test_a_server_without_a_folder_of_adapters(folders: Path) -> None:
    with demo_engine(enable_adapter_commands="true") as engine, served(engine) as url:
        answer = post(url, "load", lora_name="new", lora_path=str(folders / "inside" / "sql"))
    assert answer.status_code == 400
    assert "the server has no lora_dir" in answer.json()["error"]["message"]
