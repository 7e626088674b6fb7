"""Adapters by name, id, path and folder, through the whole cache, with real folders."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.adapters.cache import HostAdapterCache
from inflight.adapters.commands import AdapterCommands
from inflight.adapters.host import make_adapter_cache
from inflight.adapters.lora_files import CONFIG_FILE, WEIGHTS_FILE, read_lora_files, write_lora_files
from inflight.adapters.lora_modules import Module
from inflight.adapters.peft_folder import read_peft_folder
from inflight.adapters.sources import AdapterFolders
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.errors import ConfigError, InvalidArgument, NotFound, Unavailable, error_from_kind
from inflight.models.registry import ModelDescription, read_model_description
from tests.adapters.factories import make_peft_model, make_weights, save_adapter
from tests.models.zoo import Zoo

MIB = 1 << 20


@pytest.fixture
def model(zoo: Zoo) -> ModelDescription:
    return read_model_description(zoo["llama-gqa"].folder)


@pytest.fixture
def peft_folder(zoo: Zoo, tmp_path: Path) -> Path:
    return save_adapter(
        make_peft_model(zoo["llama-gqa"], target_modules=["q_proj"], use_dora=True), tmp_path / "peft"
    )


class Served:
    """A cache of folders, used for one adapter at a time."""

    def __init__(self, model: ModelDescription, max_bytes: int = 8 * MIB, **folders: Any) -> None:
        self.notified: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.folders = AdapterFolders(**folders)
        self.cache: HostAdapterCache = make_adapter_cache(
            model, 8, max_bytes, "float32", lambda: self.notified.put(None), self.folders
        )
        self._number = 0

    def ask(self, **wanted: Any) -> AdapterUpdate:
        self._number += 1
        self.cache.submit(self._number, LoraRequest(**wanted))
        while not (update := self.cache.update()):
            self.notified.get(timeout=60)
        self.cache.forget(self._number)
        return update

    def error(self, **wanted: Any) -> str:
        (event,) = self.ask(**wanted).events
        error = error_from_kind(event.error_kind, event.error)
        return f"{error.code}: {error}"


@pytest.fixture
def serve(model: ModelDescription) -> Iterator[Any]:
    made: list[Served] = []

    def serve(**options: Any) -> Served:
        made.append(Served(model, **options))
        return made[-1]

    yield serve
    for each in made:
        each.cache.close()


def test_an_adapter_has_one_digest_from_a_peft_or_a_prefetch_folder(
    serve: Any, model: ModelDescription, peft_folder: Path, tmp_path: Path
) -> None:
    write_lora_files(read_peft_folder(peft_folder, model), tmp_path / "prefetch" / "12")
    it = serve(names={"one": peft_folder}, lora_dir=tmp_path, prefetch_dir=tmp_path / "prefetch")
    found = [it.ask(**each).stored[0] for each in (
        {"name": "one"}, {"name": "peft"}, {"path": "peft"}, {"path": str(peft_folder)}, {"path": "prefetch/12"},
        {"task_id": 12},
    )]  # fmt: skip
    assert len({each.digest for each in found}) == 1
    assert len({each.handle for each in found}) == len(found)
    assert [each.task_id for each in found] == [None] * 5 + [12]


def test_a_command_waits_at_most_its_timeout(
    serve: Any, peft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = serve(lora_dir=tmp_path)
    commands, gate = AdapterCommands(it.cache, it.folders), threading.Event()
    read = it.cache._read
    monkeypatch.setattr(it.cache, "_read", lambda lora: gate.wait(60) and read(lora))
    with pytest.raises(Unavailable, match=r"the adapter new is still being read after 0\.01 s"):
        commands.load("new", "peft", 0.01)
    gate.set()
    commands.load("new", "peft", 60)
    assert {each.name: each.is_loaded for each in commands.list_adapters()}["new"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="neither"):
        commands.load("other", "empty", 60)
    assert "other" not in {each.name for each in commands.list_adapters()}, (
        "a name that led nowhere is given up"
    )


def test_a_name_that_a_client_gave_ends_with_unloading(serve: Any, peft_folder: Path, tmp_path: Path) -> None:
    it = serve(names={"own": peft_folder}, lora_dir=tmp_path)
    commands = AdapterCommands(it.cache, it.folders)

    def names() -> set[str]:
        return {each.name for each in commands.list_adapters()}

    for name, path in (("given", "peft"), ("own", "peft"), ("peft", "peft")):
        commands.load(name, path, 60)
    commands.load("given", "", 60)
    assert names() == {"given", "own", "peft"}
    for name in ("given", "own", "peft"):
        commands.unload(name, None)
    assert names() == {"own", "peft"}, "the operator's names stay"
    assert "no adapter has this name" in it.error(name="given")
    with pytest.raises(NotFound):
        commands.unload("given", None)
    commands.load("given", "peft", 60)
    it.cache.unload("given")  # as if it had been evicted
    commands.unload("given", None)
    assert names() == {"own", "peft"}


def test_a_load_may_replace_an_adapter(serve: Any, model: ModelDescription, tmp_path: Path) -> None:
    def write(folder: str, seed: int) -> None:
        write_lora_files(make_weights(model.decoder, [(Module.ATTN_Q, 0, 2)], seed), tmp_path / folder)

    def digest(name: str = "it") -> bytes:
        return it.ask(name=name).stored[0].digest

    write("one", 1)
    write("two", 2)
    (tmp_path / "empty").mkdir()
    it = serve(lora_dir=tmp_path)
    commands = AdapterCommands(it.cache, it.folders)
    commands.load("it", "one", 60)
    first = digest()
    with pytest.raises(InvalidArgument, match="already has a folder other than 'two'"):
        commands.load("it", "two", 60)
    commands.load("it", "two", 60, replaces=True)
    second = digest()
    write("two", 3)
    commands.load("it", "two", 60)  # it is loaded: nothing is read
    assert not it.ask(name="it").stored
    commands.load("it", "", 60, replaces=True)
    third = digest()
    assert len({first, second, third}) == 3
    with pytest.raises(InvalidArgument, match="neither"):
        commands.load("it", "empty", 60, replaces=True)
    assert it.cache.update().dropped
    assert digest() == third, "the name has its old folder again"
    with pytest.raises(InvalidArgument, match="already has a folder"):
        commands.load("one", "two", 60, replaces=True)  # lora_dir's own name


def test_a_folder_that_has_changed_is_read_after_unloading(
    serve: Any, model: ModelDescription, tmp_path: Path
) -> None:
    def write(seed: int) -> None:
        write_lora_files(make_weights(model.decoder, [(Module.ATTN_Q, 0, 2)], seed), tmp_path / "it")

    write(0)
    it = serve(lora_dir=tmp_path)
    first = it.ask(name="it").stored[0]
    write(1)
    assert it.ask(name="it").events[0].handle == first.handle
    it.cache.unload("it")
    it.cache.load("it").result(60)
    second = it.ask(name="it").stored[0]
    assert second.digest != first.digest and second.handle != first.handle


def test_unknown_names_and_paths_are_errors(serve: Any, peft_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dir" / "inner").mkdir(parents=True)
    (tmp_path / "dir" / "link").symlink_to(peft_folder)
    (tmp_path / "dir" / "loop").symlink_to(tmp_path / "dir" / "loop")
    it = serve(lora_dir=tmp_path / "dir")
    outside = "expected a folder below the server's lora_dir"
    for path in (
        "../peft",
        "inner/../../peft",
        str(peft_folder),
        "link",
        "/",
        ".",
        "inner/..",
        "a\0b",
        "\ud800",
        "loop",
    ):
        assert it.error(path=path).startswith("INVALID_ARG"), path
        assert outside in it.error(path=path), path
    assert it.error(path="nothing") == "NOT_FOUND: lora_path is 'nothing': lora_dir has no such folder"
    for name in ("nothing", "..", ".", "inner/../../peft", "../peft", "a\0b", "x" * 5000, "\ud800"):
        assert it.error(name=name).startswith("NOT_FOUND: lora_name is"), name
    assert it.ask(name="link").stored, "what the operator has put there under a name is meant"
    assert "neither adapter_config.json nor" in it.error(name="inner")
    (tmp_path / "dir" / "new").symlink_to(peft_folder)
    assert it.ask(name="new").stored, "found without a restart"


def test_an_unknown_name_is_answered_with_the_configured_names(
    serve: Any, peft_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "secret").symlink_to(peft_folder)
    it = serve(names={"sql": peft_folder, "summary": peft_folder}, lora_dir=tmp_path / "dir")
    says = "NOT_FOUND: lora_name is {!r}: no adapter has this name, and lora_dir has no such folder"
    there = "; there are sql, summary"
    assert it.error(name="sumary") == says.format("sumary") + there + "; did you mean 'summary'?"
    assert it.error(name="secre") == says.format("secre") + there, "names in lora_dir are not shown"


def test_without_adapter_folders_no_adapter_is_found(serve: Any) -> None:
    it = serve()
    assert it.error(name="a") == "NOT_FOUND: lora_name is 'a': no adapter has this name"
    assert it.error(path="a") == "INVALID_ARG: lora_path is 'a', and the server has no lora_dir to look in"
    says = "NOT_FOUND: LoRA task 5 not found in cache. Please send LoRA weights with request"
    assert it.error(task_id=5).startswith(says)


def test_an_invalid_folder_is_an_error_with_name_and_reason(
    serve: Any, peft_folder: Path, tmp_path: Path
) -> None:
    config = peft_folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "modules_to_save": ["lm_head"]}))
    it = serve(names={"it": peft_folder})
    assert it.error(name="it").startswith(
        "INVALID_ARG: LoRA adapter it: adapter_config.json: modules_to_save is ['lm_head'], expected nothing there"
    )
    assert str(tmp_path) not in it.error(name="it"), "clients do not see the server's paths"


def test_prefetching_takes_ids_and_warns_of_other_names(
    serve: Any, model: ModelDescription, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("3", "10", "007", "adapter", "-1", "٣"):
        write_lora_files(make_weights(model.decoder, [(Module.ATTN_Q, 0, 2)]), tmp_path / name)
    (tmp_path / "5").write_text("a file")
    it = serve(prefetch_dir=tmp_path)
    assert [each.task_id for each in it.cache.list_adapters()] == [3, 10]
    for name in ("007", "adapter", "-1", "٣"):
        assert f"the folder {name} is skipped, expected a task id" in caplog.text
    write_lora_files(make_weights(model.decoder, [(Module.ATTN_Q, 0, 2)]), tmp_path / "11")
    assert it.ask(task_id=11).stored, "one that came later is read on a miss"


def test_adapters_that_do_not_fit_at_load_are_read_on_a_miss(
    serve: Any, model: ModelDescription, tmp_path: Path
) -> None:
    rows = [(Module.MLP_4H_TO_H, layer, 8) for layer in range(3)]
    size = 3 * 8 * (96 + 64) * 4
    for task in range(40):
        write_lora_files(make_weights(model.decoder, rows, task), tmp_path / str(task))
    it = serve(prefetch_dir=tmp_path, max_bytes=20 * size)
    assert [each.task_id for each in it.cache.list_adapters()] == list(range(20))
    assert it.ask(task_id=39).stored
    assert {each.task_id for each in it.cache.list_adapters()} == {*range(1, 20), 39}


def test_missing_folders_fail_the_load(model: ModelDescription, tmp_path: Path) -> None:
    for folders, says in (
        ({"names": {"a": tmp_path / "x"}}, "--lora a is"),
        ({"lora_dir": tmp_path / "x"}, "lora_dir is"),
        ({"prefetch_dir": tmp_path / "x"}, "lora_prefetch_dir is"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_adapter_cache(model, 8, MIB, "float16", lambda: None, AdapterFolders(**folders))


def test_a_cache_without_room_for_one_adapter_fails_the_load(model: ModelDescription) -> None:
    size = 3 * 7 * (8 * (64 + 96) + 96) * 2  # with magnitudes
    says = "Not enough space allocated to host LoRA cache to hold 1 max sized LoRA: one of rank"
    with pytest.raises(ConfigError, match=says):
        make_adapter_cache(model, 8, size - 1, "float16", lambda: None, AdapterFolders())
    make_adapter_cache(model, 8, size, "float16", lambda: None, AdapterFolders()).close()
    with pytest.raises(ConfigError, match=says):
        make_adapter_cache(model, 8, size, "float32", lambda: None, AdapterFolders())
    make_adapter_cache(model, 1 << 20, None, "float32", lambda: None, AdapterFolders()).close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_written_files_are_read_back_unchanged(
    model: ModelDescription, peft_folder: Path, tmp_path: Path, dtype: str
) -> None:
    adapter = read_peft_folder(peft_folder, model, dtype)
    write_lora_files(adapter, tmp_path / "out")
    assert read_lora_files(tmp_path / "out") == adapter
    weights, config = np.load(tmp_path / "out" / WEIGHTS_FILE), np.load(tmp_path / "out" / CONFIG_FILE)
    assert weights.shape == (1, *adapter.weights.shape) and config.shape == (1, len(adapter.config), 4)
    assert config.dtype == np.int32
    assert weights.dtype == {"float32": "f4", "float16": "f2", "bfloat16": "V2"}[dtype]


def test_errors_name_damaged_files(tmp_path: Path) -> None:
    np.save(tmp_path / CONFIG_FILE, np.zeros((1, 1, 4), np.int32))
    with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} is missing"):
        read_lora_files(tmp_path)
    for data in (b"", b"no array", np.array([{}], object).dumps()):
        (tmp_path / WEIGHTS_FILE).write_bytes(data)
        with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} cannot be read"):
            read_lora_files(tmp_path)
    np.save(tmp_path / WEIGHTS_FILE, np.array([{}], object), allow_pickle=True)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_lora_files(tmp_path)
    np.save(tmp_path / WEIGHTS_FILE, np.zeros((1, 1, 4), np.float64))
    with pytest.raises(InvalidArgument, match="float64"):
        read_lora_files(tmp_path)


def test_finding_a_name_reads_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = AdapterFolders({f"n{n}": tmp_path for n in range(1000)}, tmp_path, tmp_path)

    def never(_: Path) -> None:
        raise AssertionError("a folder is walked through")

    monkeypatch.setattr(Path, "iterdir", never)
    assert folders.find(LoraRequest(name="n999")) == tmp_path
    with pytest.raises(NotFound):
        folders.find(LoraRequest(name="m"))
    with pytest.raises(NotFound):
        folders.find(LoraRequest(task_id=1))


def test_names_outside_ascii_are_found(serve: Any, peft_folder: Path, tmp_path: Path) -> None:
    os.rename(os.fsencode(peft_folder), os.fsencode(tmp_path) + "/übersetzer".encode())
    it = serve(lora_dir=tmp_path)
    assert it.ask(name="übersetzer").stored
    assert it.ask(path="übersetzer").stored
