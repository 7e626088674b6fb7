"""Every built tensor is sent or received by a test here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from _pytest.mark.structures import Mark, ParameterSet

from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import TensorTable, Vocabulary


def marks_of(function: FunctionType) -> Iterator[Mark]:
    """Yield the function's own marks, and those of its parameters."""
    for mark in getattr(function, "pytestmark", ()):
        yield mark
        for values in mark.args[1] if mark.name == "parametrize" else ():
            if isinstance(values, ParameterSet):
                yield from (getattr(one, "mark", one) for one in values.marks)


def covered_names() -> set[str]:
    names: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_"):
                marks = (mark for mark in marks_of(function) if mark.name == "covers")
                names.update(name for mark in marks for name in mark.args)
    return names


def rows_of(table: TensorTable, names: set[str]) -> set[str]:
    """Return the main names of tensors, given any of their names."""
    found = [table.sent_as(name, vocabulary) for name in names for vocabulary in Vocabulary]
    return {spec.name for spec in found if spec is not None}


@pytest.mark.parametrize("table", [INPUTS, OUTPUTS], ids=["inputs", "outputs"])
def test_every_built_tensor_is_covered(table: TensorTable) -> None:
    """A fixture checks that the marked tests really send or receive them."""
    built = {spec.name for spec in table.specs if spec.built}
    assert built - rows_of(table, covered_names()) == set()


def test_every_tensor_in_a_covers_mark_exists() -> None:
    names = covered_names()
    known = {name for table in (INPUTS, OUTPUTS) for v in Vocabulary for name, _ in table.declared(v)}
    assert names - known == set()
