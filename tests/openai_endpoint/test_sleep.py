"""/sleep, /wake_up and /is_sleeping, on the demo model and on the fake engine."""

from __future__ import annotations

import gc
import logging
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inflight.build import RunningEngine, start_engine
from inflight.config import Parameters
from inflight.errors import ConfigError
from inflight.load_model import load_model
from inflight.testing.fake_server import load_fake
from tests.openai_endpoint.serving import DEMO, DEMO_VOCABULARY, PATIENCE_S, demo_engine, served
from tests.own_process import run_checks
from tests.triton.factories import make_parameters

PROMPT = list(range(200, 280))
SLEEPS = "the engine sleeps, and takes no requests until it is woken (POST /wake_up)"
SLOW = {"gpt_model_path": f"vocab={DEMO_VOCABULARY},step_us=20000", "tokenizer_dir": str(DEMO)}
"""Parameters of a fake engine with 20 ms for a token."""


@contextmanager
def running(load: Any = load_model, **parameters: str) -> Iterator[RunningEngine]:
    values = {"gpt_model_path": str(DEMO), "dtype": "float32", "enable_sleep_mode": "true", **parameters}
    engine = start_engine(make_parameters(**values), "", load=load)
    try:
        yield engine
    finally:
        engine.close(0.0)


def post(url: str, route: str) -> httpx.Response:
    return httpx.post(f"{url}/{route}", timeout=PATIENCE_S)


def command(url: str, route: str) -> None:
    answer = post(url, route)
    assert (answer.status_code, answer.content) == (200, b""), answer.text


def is_sleeping(url: str) -> bool:
    told: dict[str, bool] = httpx.get(f"{url}/is_sleeping", timeout=PATIENCE_S).json()
    assert list(told) == ["is_sleeping"]
    return told["is_sleeping"]


def complete(url: str, model: str = "demo", **body: Any) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        options = {
            "max_tokens": 12,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        return client.completions.create(model=model, prompt=PROMPT, **{**options, **body})


def tokens(url: str, model: str = "demo") -> list[int]:
    found: list[int] = complete(url, model).choices[0].token_ids
    return found


def num_cached(url: str) -> int:
    return complete(url).usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize("level", ["", "?level=1", "?level=2&mode=wait"])
def test_weights_and_cache_are_given_back_and_tokens_are_equal_after_waking(level: str) -> None:
    with running(enable_kv_cache_reuse="true") as engine, served(engine.client) as url:
        before = tokens(url)
        assert num_cached(url) > 0
        runner: Any = engine._manager._engine.runner
        held = [weakref.ref(runner.decoder), weakref.ref(runner.cache)]
        del runner
        assert not is_sleeping(url)
        command(url, f"sleep{level}")
        gc.collect()
        assert is_sleeping(url) and [each() for each in held] == [None, None]
        with pytest.raises(openai.InternalServerError) as refused:
            tokens(url)
        assert refused.value.status_code == 503 and refused.value.body["message"] == SLEEPS
        command(url, f"sleep{level}")  # it sleeps already
        command(url, "wake_up")
        assert not is_sleeping(url)
        assert num_cached(url) == 0  # nothing is left of the cache, and its blocks are used again
        assert tokens(url) == before and num_cached(url) > 0
        command(url, "wake_up")


@pytest.mark.parametrize("woken_by", ["", "?tags=weights", "?tags=weights&tags=kv_cache"])
def test_the_kv_cache_is_kept_if_only_the_weights_are_given_back(woken_by: str) -> None:
    with running(enable_kv_cache_reuse="true") as engine, served(engine.client) as url:
        before, found = tokens(url), num_cached(url)
        runner: Any = engine._manager._engine.runner
        decoder, cache = weakref.ref(runner.decoder), weakref.ref(runner.cache)
        del runner
        command(url, "sleep?tags=weights")
        gc.collect()
        assert is_sleeping(url) and decoder() is None and cache() is not None
        command(url, f"wake_up{woken_by}")
        assert not is_sleeping(url)
        assert num_cached(url) == found > 0
        assert tokens(url) == before


def test_weights_alone_come_back_only_if_the_kv_cache_was_kept() -> None:
    with running() as engine, served(engine.client) as url:
        command(url, "sleep")
        refused = post(url, "wake_up?tags=weights")
        assert refused.status_code == 400 and "the KV cache was given back too" in refused.text
        assert is_sleeping(url)


def test_an_engine_that_cannot_keep_its_kv_cache_stays_awake() -> None:
    with running(load_fake, **SLOW) as engine, served(engine.client) as url:
        refused = post(url, "sleep?tags=weights")
        assert refused.status_code == 400 and "cannot keep its KV cache in sleep" in refused.text
        assert not is_sleeping(url)


def test_an_adapters_kv_cache_is_kept(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "sql")
    with (
        running(lora_dir=str(tmp_path), enable_kv_cache_reuse="true") as engine,
        served(engine.client) as url,
    ):
        before, of_base = tokens(url, "sql"), tokens(url)
        command(url, "sleep?tags=weights")
        command(url, "wake_up")
        answer = complete(url, "sql")
        assert answer.choices[0].token_ids == before and answer.usage.prompt_tokens_details.cached_tokens > 0
        assert tokens(url) == of_base != before


def test_what_needs_no_weights_is_served_while_the_engine_sleeps() -> None:
    with running() as engine, served(engine.client) as url:
        command(url, "sleep")
        assert httpx.get(f"{url}/health").status_code == 200
        assert post(url, "v1/load_lora_adapter").status_code == 400
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a lock"}).json()["count"] > 0
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list().data] == ["demo"]


def test_requests_in_flight_finish_and_new_ones_are_refused() -> None:
    with running(load_fake, **SLOW) as engine, served(engine.client) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
            )
            first = next(stream)
            sleeping = threading.Thread(target=command, args=(url, "sleep"))
            sleeping.start()
            while not _refuses(url):
                assert sleeping.is_alive()
            assert is_sleeping(url)  # from the first refusal on
            rest = list(stream)
            sleeping.join(PATIENCE_S)
        assert first.choices[0].finish_reason is None and rest[-1].choices[0].finish_reason == "length"
        assert is_sleeping(url)
        command(url, "wake_up")
        assert complete(url).usage.completion_tokens == 12


def test_requests_in_flight_may_be_cancelled() -> None:
    values = {
        "gpt_model_path": f"vocab={DEMO_VOCABULARY},step_us=20000",
        "tokenizer_dir": str(DEMO),
        "enable_sleep_mode": "true",
    }
    with running(load_fake, **values) as engine, served(engine.client) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=4_000, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            command(url, "sleep?mode=abort")
            assert is_sleeping(url)
            with pytest.raises(openai.APIError, match="cancelled"):
                list(stream)
        command(url, "wake_up")
        assert complete(url).usage.completion_tokens == 12


def test_many_commands_leave_threads_for_other_routes() -> None:
    with running(load_fake, **SLOW) as engine, served(engine.client) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=800, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            commands = [threading.Thread(target=command, args=(url, "sleep")) for _ in range(100)]
            for each in commands:
                each.start()
            while not _refuses(url):
                pass
            for _ in range(3):
                assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
            assert all(each.is_alive() for each in commands)  # no answer waited for the stream's end
            stream.close()
            for each in commands:
                each.join(PATIENCE_S)
        assert is_sleeping(url)


def _refuses(url: str) -> bool:
    body = {"prompt": PROMPT, "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code in (200, 503)
    return answer.status_code == 503


def test_an_adapter_is_used_again_after_waking(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "sql")
    with running(lora_dir=str(tmp_path)) as engine, served(engine.client) as url:
        before = tokens(url, "sql")
        assert before != tokens(url)
        command(url, "sleep")
        command(url, "wake_up")
        assert tokens(url, "sql") == before


def test_an_engine_whose_files_have_changed_stays_asleep(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    with running(gpt_model_path=str(folder)) as engine, served(engine.client) as url:
        before = tokens(url)
        command(url, "sleep")
        config = folder / "config.json"
        aside = config.rename(tmp_path / "config.json")
        refused = post(url, "wake_up")
        assert refused.status_code == 503
        assert "cannot wake up: config.json was changed while the engine slept" in refused.text
        assert is_sleeping(url)
        aside.rename(config)
        command(url, "wake_up")
        assert tokens(url) == before


@pytest.mark.parametrize("is_noticed", ["while loading", "afterwards"])
def test_an_engine_that_finds_too_little_memory_gives_back_what_it_took(
    is_noticed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_short, loaded = False, list[weakref.ref[Any]]()
    kept: list[list[bool]] = []  # whether each loaded model is still used, whenever memory is returned

    def note() -> None:
        kept.append([each() is not None for each in loaded])

    monkeypatch.setattr("inflight.model_memory.return_free_memory", note)

    def load(parameters: Parameters, *rest: Any) -> Any:
        if is_short and is_noticed == "afterwards":
            engine = replace(parameters.engine, max_tokens_in_paged_kv_cache=1024)
            parameters = replace(parameters, engine=engine)
        model: Any = load_model(parameters, *rest)
        loaded.append(weakref.ref(model.engine.runner.decoder))
        if is_short and is_noticed == "while loading":
            raise ConfigError("there is too little memory for the weights")
        return model

    with running(load) as engine, served(engine.client) as url:
        before = tokens(url)
        command(url, "sleep")
        is_short = True
        refused = post(url, "wake_up")
        assert refused.status_code == 503 and "there is too little memory for" in refused.text
        assert is_sleeping(url) and kept == [[False], [False, False]]
        is_short = False
        command(url, "wake_up")
        assert tokens(url) == before


def test_less_free_memory_is_enough_if_what_the_engine_had_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 4 << 30
    monkeypatch.setattr("inflight.engine.capacity.free_memory", lambda _: free)
    caplog.set_level(logging.INFO)
    with running(lora_cache_gpu_memory_fraction="0.005") as engine, served(engine.client) as url:
        before = tokens(url)
        command(url, "sleep")
        free = 2 << 30
        command(url, "wake_up")
        assert tokens(url) == before
    first, second = map(int, re.findall(r"LoRA adapters: (\d+) pages", caplog.text))
    assert 8 <= first == second < 64, "by the free memory, not by the number of slots"


def test_an_engine_closes_while_it_sleeps() -> None:
    with running() as engine, served(engine.client) as url:
        command(url, "sleep")
        assert engine.close(0.0)


@pytest.mark.parametrize(
    ("route", "param", "problem"),
    [
        ("sleep?level=0", "level", "level is '0', expected 1 or 2"),
        ("sleep?mode=keep", "mode", "mode is 'keep', expected wait or abort"),
        ("sleep?tags=kv_cache", "tags", "the KV cache is not given back without the weights"),
        ("sleep?tags=weights&tags=adapters", "tags", "expected weights, or weights and kv_cache"),
        ("wake_up?tags=kv_cache", "tags", "the KV cache does not come back without the weights"),
        ("sleep?lvl=2", "lvl", "the query parameter lvl is unknown, expected level, mode, tags, model"),
        ("wake_up?level=2", "level", "the query parameter level is unknown, expected tags, model"),
    ],
)
def test_what_is_not_supported_is_refused(route: str, param: str, problem: str) -> None:
    with running() as engine, served(engine.client) as url:
        refused = post(url, route)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param and problem in refused.json()["error"]["message"]
        command(url, "wake_up?tags=weights&tags=kv_cache")


def test_a_model_that_the_server_does_not_have_cannot_be_meant() -> None:
    with running() as engine, served(engine.client) as url:
        for answer in (post(url, "sleep?model=second"), httpx.get(f"{url}/is_sleeping?model=second")):
            assert answer.status_code == 404 and "this server has demo" in answer.text
        assert not is_sleeping(url)
        command(url, "sleep?model=demo")
        assert is_sleeping(url)


def test_clients_may_not_command_a_server_that_does_not_allow_it() -> None:
    with demo_engine() as engine, served(engine) as url:
        for answer in (post(url, "sleep"), post(url, "wake_up"), httpx.get(f"{url}/is_sleeping")):
            assert answer.status_code == 403
            assert "--set enable_sleep_mode=true" in answer.json()["error"]["message"]


def test_a_page_of_another_site_cannot_make_the_engine_sleep() -> None:
    headers = {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}
    with running() as engine, served(engine.client) as url:
        answer = httpx.post(f"{url}/sleep", headers=headers)
        assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]["message"]
        assert not is_sleeping(url)


def test_saved_blocks_are_loaded_after_waking(tmp_path: Path) -> None:
    with (
        running(kv_cache_dir=str(tmp_path), enable_kv_cache_reuse="true") as engine,
        served(engine.client) as url,
    ):
        before, found = tokens(url), num_cached(url)
        command(url, "sleep")
        command(url, "wake_up")
        assert tokens(url) == before and num_cached(url) == found > 0
        assert engine._manager._scheduler.metrics().num_loaded_blocks > 0


def test_the_system_has_the_memory_of_a_sleeping_process_back() -> None:
    run_checks(Path(__file__).with_name("check_sleeping_memory.py"), timeout_s=300)
