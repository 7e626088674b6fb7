"""Logits post-processors that a module declares, and errors for invalid modules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.sampling.logits_post_processors import load_post_processors

USABLE = """
def first(req_id, logits, ids, stream_ptr, client_id):
    pass

def second(req_id, logits, ids, stream_ptr):
    pass

PROCESSORS = {"first": first, "second": second}
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    return tmp_path / "some rules.py"


@pytest.mark.parametrize(
    ("more", "names", "replicate"),
    [
        ("", ("first", "second"), True),
        ("BATCHED = first", ("first", "second", "batched"), True),
        ("PROCESSORS = {}; BATCHED = second; REPLICATE = False", ("batched",), False),
    ],
)
def test_processors_are_loaded_from_a_file(
    module: Path, more: str, names: tuple[str, ...], replicate: bool
) -> None:
    module.write_text(USABLE + more)
    found = load_post_processors(str(module))
    assert (found.names, found.replicate) == (names, replicate)


def test_a_file_may_have_dataclasses_and_the_name_of_another_module(tmp_path: Path) -> None:
    file = tmp_path / "json.py"
    text = "from dataclasses import dataclass\n@dataclass\nclass State:\n    seen: int = 0\n"
    file.write_text("from __future__ import annotations\n" + text + USABLE)
    assert load_post_processors(str(file)).names == ("first", "second")
    assert json.loads("[1]") == [1] and sys.modules["json"] is json


def test_processors_are_loaded_from_an_importable_module(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module.parent / "rules_of_a_test.py").write_text(USABLE)
    monkeypatch.syspath_prepend(str(module.parent))
    assert load_post_processors("rules_of_a_test").names == ("first", "second")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it declares neither PROCESSORS = {name: function} nor BATCHED = function"),
        ("PROCESSORS = {}", "it declares neither"),
        ("PROCESSORS = [print]", "its PROCESSORS is a list, expected a dict of functions by name"),
        ("PROCESSORS = {'x': 3}", "the logits post-processor 'x' is 3, expected a function"),
        ("PROCESSORS = {'batched': print}", "a logits post-processor is named 'batched', expected"),
        ("BATCHED = lambda a: a", r"the logits post-processor 'batched' takes \(a\), expected"),
        ("BATCHED = print; REPLICATE = 'no'", "its REPLICATE is 'no', expected True or False"),
        ("import nowhere", "importing it raised ModuleNotFoundError: No module named 'nowhere'"),
        ("raise SystemExit(2)", "importing it raised SystemExit: 2"),
        ("def (", "importing it raised SyntaxError: "),
    ],
)
def test_an_invalid_module_is_refused(module: Path, text: str, message: str) -> None:
    module.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_post_processors(str(module))
    assert str(error.value).startswith(f"logits_post_processor_module is {str(module)!r}: ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/rules.py", "raised FileNotFoundError: "),
        ("no.such.module", "raised ModuleNotFoundError: No module named 'no'"),
        ("/no/such/rules", "raised ModuleNotFoundError: "),
    ],
)
def test_a_missing_module_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_post_processors(source)
