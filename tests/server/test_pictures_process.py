"""The process that encodes pictures: which servers start it, and with which arguments."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.pictures.__main__ import _parser
from inflight.pictures.options import allowed_domains
from inflight.server import cli, launch
from inflight.server.launch import make_pictures
from inflight.server.pictures_process import PicturesProcess
from inflight.server.repository import RuntimeRepository, assemble, default_repository


@pytest.fixture
def repository(tmp_path: Path) -> RuntimeRepository:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    config = {"model_type": "llava", "vision_config": {}, "text_config": {}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "preprocessor_config.json").write_text("{}")
    options = cli.parse([])
    runtime = assemble(default_repository(), tmp_path / "out", options.wanted)
    return replace(runtime, checkpoint=str(checkpoint))


def made(
    repository: RuntimeRepository, *arguments: str, echo: io.StringIO | None = None
) -> PicturesProcess | None:
    return make_pictures(cli.parse(list(arguments)), repository, repository.path, echo)


@pytest.mark.parametrize(
    ("dtype", "passed_on"), [(None, ()), ("bfloat16", ("--dtype", "bfloat16")), ("int8", ()), ("fp8", ())]
)
def test_the_tower_has_the_wanted_type_if_it_is_one_of_numbers(
    repository: RuntimeRepository, dtype: str | None, passed_on: tuple[str, ...]
) -> None:
    """Quantized weights are the engine's alone; the tower then has the checkpoint's type."""
    process = made(repository, *(() if dtype is None else ("--dtype", dtype)))
    assert process is not None and process._arguments()[5:-2] == passed_on


def test_the_flags_for_urls_are_passed_on(repository: RuntimeRepository, tmp_path: Path) -> None:
    flags = ("--limit-mm-per-prompt", "image=3", "--allowed-media-domains", "a.example", "*.b.example")
    process = made(repository, *flags, "--allowed-local-media-path", str(tmp_path))
    assert process is not None
    given = _parser().parse_args(process._arguments()[2:])
    assert (given.limit_mm_per_prompt, given.allowed_local_media_path) == (3, tmp_path)
    assert allowed_domains(given) == ("a.example", "*.b.example")


def test_no_vision_starts_no_process(repository: RuntimeRepository) -> None:
    assert made(repository, "--no-vision") is None


def test_missing_packages_are_named(repository: RuntimeRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "missing_packages", lambda: ["Pillow"])
    said = io.StringIO()
    assert made(repository, echo=said) is None
    assert "pictures are refused, because Pillow are not installed" in said.getvalue()
