"""LoRA adapters through a real server: its tokens equal PEFT's, whichever way the adapter is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from inflight.openai.kserve_client import KServeEngineClient
from inflight.server.client_apis import ClientApis
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.repository import Wanted
from inflight_client import Client
from inflight_client.__main__ import main
from tests.openai_endpoint.serving import served
from tests.tiers import with_all

from .clients import Stream, ask, infer, unary, wait_until
from .conftest import DEMO_MODEL
from .lora_folders import as_tensors, greedy, make_adapter
from .test_metrics import page_of

PROMPT = [10, 11, 12, 13, 14]
NUM_TOKENS = 12
ADAPTERS = {"sql": 1, "chat": 2, "found": 3, "prefetched": 4}
"""Names of PEFT folders, and the seeds of their adapters."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    made = {name: root / name for name in ADAPTERS}
    made["found"] = root / "lora_dir" / "found"
    for name, seed in ADAPTERS.items():
        make_adapter(made[name], seed)
    prefetch = root / "prefetch" / "77"
    prefetch.mkdir(parents=True)
    weights, config = as_tensors(made["prefetched"])
    np.save(prefetch / "model.lora_weights.npy", weights)
    np.save(prefetch / "model.lora_config.npy", config)
    return made


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """Return the greedy tokens of each adapter, and without one, by transformers and PEFT."""
    found = {"": greedy(PROMPT, NUM_TOKENS)}
    found |= {name: greedy(PROMPT, NUM_TOKENS, folder) for name, folder in folders.items()}
    assert len({tuple(each) for each in found.values()}) == len(found), (
        "each adapter says something of its own"
    )
    return found


@pytest.fixture(scope="module")
def server(elsewhere: Path, folders: dict[str, Path]) -> Iterator[TritonServer]:
    root = folders["sql"].parent
    settings = {
        "max_tokens_in_paged_kv_cache": "16384",
        "lora_weights_data_type": "TYPE_FP32",
        "lora_dir": str(root / "lora_dir"),
        "lora_prefetch_dir": str(root / "prefetch"),
        "enable_adapter_commands": "true",
    }
    named = tuple((name, folders[name]) for name in ("sql", "chat"))
    options = ServerOptions(wanted=Wanted(adapters=named), client_apis=ClientApis(model_config=True))
    with serve(dtype="float32", settings=settings, options=options) as up:
        yield up


def tokens_of(server: TritonServer, model: str = "tensorrt_llm", **tensors: object) -> list[int]:
    (answer,) = ask(
        server.grpc, model, input_ids=PROMPT, request_output_len=NUM_TOKENS, end_id=-1,
        exclude_input_in_output=True, **tensors,
    )  # fmt: skip
    assert answer.error is None, answer.error
    return answer.ids


def test_after_the_first_request_with_weights_the_id_suffices(server, folders, expected):
    weights, config = as_tensors(folders["sql"])
    sent = {"lora_task_id": 5, "lora_weights": weights, "lora_config": config}
    assert tokens_of(server, **sent) == expected["sql"]
    assert tokens_of(server, lora_task_id=5) == expected["sql"]
    assert tokens_of(server) == expected[""]
    others = dict(zip(("lora_weights", "lora_config"), as_tensors(folders["chat"]), strict=True))
    assert tokens_of(server, lora_task_id=5, **others) == expected["sql"], "those of a known id are ignored"


def test_an_adapter_is_a_model_of_a_remote_openai_endpoint(server, expected):
    """The endpoint is in front of the tritonserver, which returns the names of its adapters."""
    remote = KServeEngineClient(server.grpc, str(DEMO_MODEL))
    asked = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with served(remote) as url, httpx.Client(base_url=url, timeout=60) as client:
        names = {model["id"] for model in client.get("/v1/models").json()["data"]}
        assert {"demo", "sql", "chat"} <= names
        for model, key in (("sql", "sql"), ("demo", ""), ("chat", "chat")):
            answer = client.post(
                "/v1/completions", json={**asked, "model": model, "return_token_ids": True}
            ).json()
            assert answer["model"] == model and answer["choices"][0]["token_ids"] == expected[key]
        refused = client.post("/v1/completions", json={**asked, "model": "nobody"})
        assert refused.status_code == 404 and "sql" in refused.json()["error"]["message"]
    remote.close()


def test_the_metrics_page_names_the_adapters_of_requests(server):
    with Stream(server.grpc) as stream:
        for number, name in enumerate(("sql", "chat")):
            stream.send(
                "tensorrt_llm", f"adapter {number}", input_ids=PROMPT, request_output_len=1000, end_id=-1,
                lora_name=name, streaming=True,
            )  # fmt: skip
        family = "inflight_adapter_running_requests"
        wait_until(lambda: {"sql", "chat"} <= set(page_of(server).series(family, "lora_name")))
        # The page is written metric by metric: other values of this iteration may appear a moment later.
        wait_until(lambda: page_of(server).series("inflight_adapters", "place")["on_device"] >= 2)
        wait_until(lambda: page_of(server).value("inflight_adapter_loads_total") >= 2)
        stream.cancel()
    wait_until(lambda: set(page_of(server).series(family, "lora_name").values()) == {0})


def test_an_unknown_id_is_refused(server):
    (refused,) = ask(server.grpc, "tensorrt_llm", input_ids=PROMPT, request_output_len=4, lora_task_id=6)
    assert "LoRA task 6 not found in cache" in str(refused.error)


def test_an_invalid_adapter_fails_only_its_request(server, folders, expected):
    weights, config = as_tensors(folders["sql"])
    config[0, 0, 1] = 4  # a layer that the model does not have
    (refused,) = ask(
        server.grpc, "tensorrt_llm", input_ids=PROMPT, request_output_len=4, lora_task_id=8,
        lora_weights=weights, lora_config=config,
    )  # fmt: skip
    assert refused.error is not None
    assert tokens_of(server, lora_name="chat") == expected["chat"]


@pytest.mark.parametrize("name", ["sql", "chat", "found"])
def test_adapters_can_be_requested_by_name(server, expected, name):
    """There are adapters named by --lora, and one in lora_dir."""
    assert tokens_of(server, lora_name=name) == expected[name]
    result = infer(
        server.http, "tensorrt_llm_infer", input_ids=PROMPT, request_output_len=NUM_TOKENS, end_id=-1,
        exclude_input_in_output=True, lora_name=name,
    )  # fmt: skip
    assert result.as_numpy("output_ids").ravel().tolist() == expected[name]


def test_an_unknown_name_is_refused(server):
    with pytest.raises(InferenceServerException) as refused:
        unary(server.grpc, input_ids=PROMPT, request_output_len=4, lora_name="nobody")
    assert refused.value.status() == "StatusCode.NOT_FOUND" and "nobody" in refused.value.message()


def test_text_requests_may_give_an_adapters_name_or_path(server):
    client = Client(server.grpc)
    bare = client.generate("def f(", 12, end_id=-1).text
    adapted = client.generate("def f(", 12, end_id=-1, lora="found").text
    assert adapted != bare
    (answer,) = ask(
        server.grpc, "ensemble", text_input="def f(", max_tokens=12, end_id=-1, exclude_input_in_output=True,
        lora_path="found", lora_name="anything", lora_id=9, lora_ckpt_source="hf",
    )  # fmt: skip
    assert answer.text == adapted


def test_prefetched_adapters_need_no_weights(server, expected):
    assert tokens_of(server, lora_task_id=77) == expected["prefetched"]


def test_an_adapter_folder_added_later_is_found(server, folders):
    asked = {"input_ids": PROMPT, "request_output_len": 4, "lora_name": "later"}
    (refused,) = ask(server.grpc, "tensorrt_llm", **asked)
    assert "later" in str(refused.error)
    make_adapter(folders["found"].parent / "later", seed=9)
    (answer,) = ask(server.grpc, "tensorrt_llm", **asked)
    assert answer.error is None, answer.error


def test_the_client_lists_loads_and_unloads(server, capsys):
    client = Client(server.grpc)
    known = {each.name: each for each in client.load_adapter("sql")}
    assert known["sql"].is_loaded and known["sql"].rank == 4 and known["sql"].num_bytes > 0
    assert {"sql", "chat"} <= set(known)
    assert not {each.name: each for each in client.unload_adapter("sql")}["sql"].is_loaded
    client.generate(PROMPT, 2, lora="sql")
    assert {each.name: each for each in client.adapters()}["sql"].is_loaded
    with pytest.raises(InferenceServerException) as refused:
        unary(server.grpc, lora_command='{"command": "unload", "task_id": 123456}')
    assert refused.value.status() == "StatusCode.NOT_FOUND"
    assert main(["adapters", "--url", server.grpc]) == 0
    assert '"name": "sql"' in capsys.readouterr().out


@pytest.mark.covers("lora_command", "adapters")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_every_model_lists_adapters(server, model):
    (answer,) = ask(server.grpc, model, lora_command='{"command": "list"}')
    assert answer.error is None and b'"sql"' in answer.outputs["adapters"].item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", with_all(["tp", "pp"], ["tp"]))
def test_ranks_have_their_parts_of_an_adapter(elsewhere, folders, expected, split):
    """Weights are sent to every rank once, outside of the broadcast; each rank keeps its part of them."""
    settings = {"max_tokens_in_paged_kv_cache": "16384", "lora_weights_data_type": "TYPE_FP32"}
    wanted = Wanted(adapters=(("chat", folders["chat"]),))
    options = ServerOptions(mode="orchestrator", wanted=wanted, **{split: 2})
    weights, config = as_tensors(folders["sql"])
    with serve(dtype="float32", settings=settings, options=options) as server:
        sent = {"lora_task_id": 5, "lora_weights": weights, "lora_config": config}
        assert tokens_of(server, **sent) == expected["sql"]
        assert tokens_of(server, lora_name="chat") == expected["chat"]
        assert tokens_of(server, lora_task_id=5) == expected["sql"]
        assert tokens_of(server) == expected[""]
