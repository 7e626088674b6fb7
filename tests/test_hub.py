"""Checkpoints by name, fetched from a test hub to which `HF_ENDPOINT` points."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint_config import checkpoint_name
from inflight.errors import ConfigError
from inflight.hub import find_checkpoint
from inflight.server.config_text import read_parameters
from tests.hub import TOKEN, Hub, Model, running_hub
from tests.models.zoo import make_model

_PROGRAM = """
import json, sys
from inflight.errors import ConfigError
from inflight.hub import find_checkpoint
for call in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"folder": str(find_checkpoint(*call))}))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
"""
_EXAMINE = """
import sys
from inflight.doctor.checkpoint import check_checkpoint
print(next(check_checkpoint(sys.argv[1], sys.argv[2], None, {})).says)
"""
_WITH_FULL_DISK = """
import collections, shutil, sys
usage = collections.namedtuple("usage", "total used free")
shutil.disk_usage = lambda folder: usage(1 << 30, (1 << 30) - 100, 100)
from inflight.errors import ConfigError
from inflight.hub import find_checkpoint
try:
    print(find_checkpoint(sys.argv[1]))
except ConfigError as error:
    print(error)
"""
_GENERATE = """
import sys
import inflight.executor as trtllm
from inflight.config import EngineConfig, Parameters
parameters = Parameters(engine=EngineConfig(dtype="float32", device="cpu", kernels="torch", engine_threads=1))
config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=512))
with trtllm.Executor(sys.argv[1], executor_config=config, parameters=parameters, revision="v2") as executor:
    [response] = executor.await_responses(executor.enqueue_request(trtllm.Request([5, 6, 7, 8], 10)))
    print(response.result.output_token_ids[0][4:])
"""
_SERVED = [
    "config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
]
_SERVED += ["chat_template.jinja", "additional_chat_templates/tools.jinja", "merges.txt", "tokenizer.model"]
_SERVED += ["modules.json", "1_Pooling/config.json"]
_T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
_NOT_SERVED = ["pytorch_model.bin", "modeling_own.py", "onnx/config.json", "onnx/model.safetensors"]
_NOT_SERVED += ["consolidated.safetensors", "README.md", ".gitattributes"]


def _write(folder: Path, text: str, files: list[str]) -> Path:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"{name}": "{text}"}}')
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("hub")
    new = _write(folder / "new", "new", _SERVED + _NOT_SERVED)
    old = _write(folder / "old", "old", _SERVED)
    t5 = _write(folder / "t5", "t5", _SERVED)
    (t5 / "config.json").write_text(json.dumps(_T5))
    return {
        "owner/t5": Model({"main": t5}),
        "owner/model-1.5": Model({"main": new, "v1": old}),
        "owner/gated": Model({"main": old}, is_gated=True),
    }


@pytest.fixture
def hub(models: dict[str, Model]) -> Iterator[Hub]:
    with running_hub(models) as hub:
        yield hub


class Caller:
    """Programs on a machine with an initially empty cache."""

    def __init__(self, home: Path, url: str) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_HOME": str(home),
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def run(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        options = {"capture_output": True, "text": True, "timeout": 300, "env": self.environment, **more}
        return subprocess.run(command, **options)

    def find(self, *calls: tuple[Any, ...], **environment: str) -> list[dict[str, str]]:
        """Return the result of `find_checkpoint`, or its error, for each call's arguments."""
        done = self.run("-c", _PROGRAM, json.dumps(calls), env={**self.environment, **environment})
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def caller(tmp_path: Path, hub: Hub) -> Caller:
    return Caller(tmp_path / "home", hub.url)


def _text(folder: str) -> str:
    return json.loads((Path(folder) / "config.json").read_text())["config.json"]


def test_a_model_is_fetched_once_and_found_without_the_hub(tmp_path: Path, models: dict[str, Model]) -> None:
    name = "owner/model-1.5"
    with running_hub(models) as hub:
        caller = Caller(tmp_path, hub.url)
        found, again = caller.find((name,), (name,))
        assert sorted(hub.fetched) == sorted(f"{name}/{file}" for file in _SERVED)
    folder = Path(found["folder"])
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == set(_SERVED) and again == found
    assert folder.is_relative_to(tmp_path) and checkpoint_name(folder) == name
    [gone] = caller.find((name,))
    assert gone == found, "the hub is away"
    [offline] = caller.find((name,), HF_HUB_OFFLINE="1")
    assert offline == found


def test_the_command_downloads_a_checkpoint_for_a_server_without_the_hub(caller: Caller, hub: Hub) -> None:
    done = caller.run("-m", "inflight.hub", "owner/model-1.5", "--revision", "v1")
    [offline] = caller.find(("owner/model-1.5", "v1"), HF_HUB_OFFLINE="1")
    assert done.stdout == f"{offline['folder']}\n" and _text(offline["folder"]) == "old"
    refused = caller.run("-m", "inflight.hub", "owner/gated")
    assert refused.returncode == 1 and "set HF_TOKEN to a token of yours" in refused.stderr


def test_serve_refuses_a_family_before_its_weights_are_downloaded(caller: Caller, hub: Hub) -> None:
    done = caller.run("-m", "inflight", "serve", "owner/t5")
    assert done.returncode == 2 and not done.stdout
    reason = "owner/t5 is T5ForConditionalGeneration, an encoder with a decoder: take a decoder of text"
    assert done.stderr.startswith(f"serve: --model {reason}")
    assert hub.fetched == ["owner/t5/config.json"]


def test_a_repository_without_config_is_refused_before_its_weights_are_downloaded(
    caller: Caller, hub: Hub, tmp_path: Path
) -> None:
    hub.models = {"owner/gguf": Model({"main": _write(tmp_path / "gguf", "gguf", ["model.safetensors"])})}
    [found] = caller.find(("owner/gguf",))
    assert found["error"].startswith(f"owner/gguf: no config.json on {hub.url}") and not hub.fetched


def test_a_disk_without_room_is_reported_before_the_download(caller: Caller, hub: Hub) -> None:
    name = "owner/model-1.5"
    done = caller.run("-c", _WITH_FULL_DISK, name)
    cache = Path(caller.environment["HF_HOME"], "hub")
    assert done.stdout.startswith(
        f"{name}: its files take 0.0 MiB, and the hub's cache {cache} has 0.0 MiB free"
    )
    assert hub.fetched == [f"{name}/config.json"]
    [found] = caller.find((name,))
    assert caller.run("-c", _WITH_FULL_DISK, name).stdout == f"{found['folder']}\n", (
        "all files are in the cache"
    )


def test_revisions_are_branches_tags_and_commits(caller: Caller, hub: Hub) -> None:
    name = "owner/model-1.5"
    commit = hub.models[name].commit("v1")
    main, tag, by_commit, other = caller.find((name,), (name, "v1"), (name, commit), (name, "v2"))
    assert [_text(found["folder"]) for found in (main, tag, by_commit)] == ["new", "old", "old"]
    assert tag == by_commit
    assert other["error"] == f"{name}: no such folder, and on {hub.url} it has no revision 'v2'"


def test_urls_are_told_without_their_passwords(tmp_path: Path) -> None:
    caller = Caller(tmp_path, "http://me:s3cret@127.0.0.1:1")
    by_name, by_url = caller.find(("owner/model",), ("https://me:s3cret@huggingface.co/owner/model",))
    assert "from http://127.0.0.1:1 (" in by_name["error"]
    assert by_url["error"] == (
        "https://huggingface.co/owner/model: not a folder, and no name on the Hugging Face hub such as owner/model"
    )
    assert "cret" not in f"{by_name}{by_url}"


def test_a_model_that_cannot_be_fetched_is_an_error_with_its_remedy(caller: Caller, hub: Hub) -> None:
    unknown, gated = caller.find(("owner/unknown",), ("owner/gated",))
    assert f"{hub.url} has no model of this name, or it is private: then set HF_TOKEN" in unknown["error"]
    assert f"it is gated: accept its conditions at {hub.url}/owner/gated, and set HF_TOKEN" in gated["error"]
    assert not hub.fetched
    [found] = caller.find(("owner/gated",), HF_TOKEN=TOKEN)
    assert _text(found["folder"]) == "old"


def test_without_a_hub_the_cache_is_named(tmp_path: Path) -> None:
    caller = Caller(tmp_path, "http://127.0.0.1:9")  # a port without a listener
    name = "owner/model-1.5"
    [away] = caller.find((name,))
    assert "it cannot be fetched from http://127.0.0.1:9 (" in away["error"]
    assert (
        f"and the hub's cache {tmp_path}" in away["error"] and "all files of revision 'main'" in away["error"]
    )
    [offline] = caller.find((name,), HF_HUB_OFFLINE="1")
    assert f"the hub's cache {tmp_path}" in offline["error"] and "has not all files" in offline["error"]


def test_an_incomplete_checkpoint_in_the_cache_is_refused(tmp_path: Path, models: dict[str, Model]) -> None:
    name = "owner/model-1.5"
    with running_hub(models) as hub:
        caller = Caller(tmp_path, hub.url)
        hub.broken = {"model-00001-of-00001.safetensors"}
        [found] = caller.find((name,))
        assert f"it cannot be fetched from {hub.url} (403" in found["error"]
    [away] = caller.find((name,))
    assert "it cannot be fetched" in away["error"] and "has not all files of revision" in away["error"]


def test_the_hub_is_not_asked_for_paths_and_folders(caller: Caller, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty, file = tmp_path / "empty", tmp_path / "weights.bin"
    file.touch()
    found = caller.find(
        ("./missing",), ("/missing",), ("a/b/c",), (str(file),), ("",), (str(empty),), (str(tmp_path), "v1")
    )
    assert ["not a folder" in each["error"] for each in found[:4]] == [True] * 4
    assert "but a file, expected a checkpoint's folder" in found[3]["error"]
    assert found[4]["error"] == "got '', expected a folder, a GGUF file or a name on the Hugging Face hub"
    assert "no config.json in that folder" in found[5]["error"]
    assert "revision 'v1' is for names of the Hugging Face hub" in found[6]["error"]
    assert not hub.asked


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("https://huggingface.co/Qwen/Qwen3-4B/tree/main", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-4B/", "Qwen/Qwen3-4B"),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),  # Ollama's form, which names no model of the hub
    ],
)
def test_a_text_like_a_name_of_the_hub_is_answered_with_one(model: str, name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"not a folder, and no name on the Hugging Face hub such as {name}$"
    ):
        find_checkpoint(model)


def test_a_folder_that_is_no_checkpoint_is_answered_with_what_to_name(tmp_path: Path) -> None:
    adapter, cache = tmp_path / "adapter", tmp_path / "models--owner--name"
    snapshot = cache / "snapshots" / "1a2b"
    for folder in (adapter, snapshot):
        folder.mkdir(parents=True)
    (adapter / "adapter_config.json").touch()
    (snapshot / "config.json").touch()
    with pytest.raises(ConfigError, match="but a LoRA adapter: name its base model by --model"):
        find_checkpoint(str(adapter))
    with pytest.raises(ConfigError, match=f"not a Hugging Face checkpoint; {snapshot} has one$"):
        find_checkpoint(str(cache))


def test_a_model_is_found_in_the_cache_where_fetching_is_forbidden(caller: Caller, hub: Hub) -> None:
    name = "owner/model-1.5"
    [missing] = caller.find((name, None, False))
    assert "has not all files of revision" in missing["error"] and not hub.asked
    fetched, found = caller.find((name,), (name, None, False))
    assert found == fetched


def test_fetching_shows_a_progress_bar_on_a_terminal(caller: Caller) -> None:
    call = json.dumps([["owner/model-1.5"]])
    assert "Fetching" not in caller.run("-c", _PROGRAM, call).stderr
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    try:
        done = caller.run(
            "-c", _PROGRAM, json.dumps([["owner/model-1.5", "v1"]]), capture_output=False, stderr=follower
        )
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 1 << 16):
                shown += chunk
        except OSError:  # a terminal whose other end is closed
            pass
    finally:
        os.close(leader)
    assert done.returncode == 0
    assert b"Fetching 10 files" in shown and b"100%" in shown


def test_serve_and_doctor_accept_names_of_the_hub(caller: Caller, tmp_path: Path) -> None:
    """`doctor` fetches nothing; after a repository was written, the checkpoint is in the cache."""
    name = "owner/model-1.5"

    def says() -> str:
        done = caller.run("-c", _EXAMINE, name, "v1")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "the hub's cache" in says()
    target = tmp_path / "repository"
    done = caller.run(
        "-m", "inflight.server", "--model", name, "--revision", "v1", "--write-repository", str(target)
    )
    assert done.returncode == 0, done.stderr
    [found] = caller.find((name, "v1"))
    parameters = read_parameters((target / "tensorrt_llm" / "config.pbtxt").read_text())
    assert parameters["gpt_model_path"] == parameters["tokenizer_dir"] == found["folder"]
    refused = says()
    assert "it is refused" in refused and found["folder"] in refused, "what it lacks is named"


def test_a_revision_needs_a_name(tmp_path: Path) -> None:
    done = Caller(tmp_path, "http://127.0.0.1:9").run("-m", "inflight.server", "--revision", "v1")
    assert done.returncode != 0 and "--revision is for a --model" in done.stderr


@pytest.mark.exhaustive
def test_an_executor_accepts_names_of_the_hub(tmp_path: Path) -> None:
    model = make_model(tmp_path / "v2", "llama", max_shard_size="60KB")
    models = {"owner/model": Model({"main": make_model(tmp_path / "main", "llama", seed=1).folder})}
    models["owner/model"].revisions["v2"] = model.folder
    with running_hub(models) as hub:
        done = Caller(tmp_path / "home", hub.url).run("-c", _GENERATE, "owner/model")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == model.greedy((5, 6, 7, 8), 10)
