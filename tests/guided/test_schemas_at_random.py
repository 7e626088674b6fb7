"""Random schemas: every text that a guide allows is valid by jsonschema, in the schema's dialect."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft3Validator, Draft201909Validator, SchemaError

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend
from inflight.guided.make_backend import make_backend
from tests.guided.schemas_at_random import BYTES, VALIDATORS, follows, make_schema, make_text, write
from tests.tiers import with_all

_SEEDS = 6
_SCHEMAS = 150
_VALUES, _TEXTS = 30, 3


@pytest.fixture(scope="module")
def backend() -> GuideBackend:
    return make_backend("llguidance", BYTES)


def is_valid(validator: Any, value: Any) -> bool:
    try:
        return validator.is_valid(value)
    except RecursionError:  # a schema that refers to itself
        return True


def make_validator(kind: Any, url: str, schema: Any) -> Any:
    """Make jsonschema's validator; None for a schema that is invalid in its dialect."""
    text = json.dumps(schema)
    if isinstance(schema, bool) or (
        not url and re.search('"(extends|disallow|divisibleBy|dependencies)":', text)
    ):
        return None
    if kind is Draft3Validator and re.search('"required": \\[|: (true|false)[,}]|\\[(true|false)', text):
        return None
    if kind is Draft201909Validator and '"unevaluatedProperties": false' in text:
        return None  # it takes properties that additionalProperties has evaluated for unevaluated
    try:
        kind.check_schema(schema)
    except SchemaError:
        return None
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


@pytest.mark.parametrize("seed", with_all(range(_SEEDS), [0]))
def test_every_text_that_a_guide_allows_is_valid(backend: GuideBackend, seed: int) -> None:
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for number in range(_SCHEMAS):
        kind, url = VALIDATORS[number % len(VALIDATORS)]
        schema = make_schema(rng)
        if url and isinstance(schema, dict):
            schema = {"$schema": url, **schema}
        guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
        try:
            matcher = backend.load(guide, backend.compile(guide))
        except InvalidArgument as error:
            counts["refused"] += 1
            assert str(error).startswith("guided_decoding_guide cannot be used: "), (schema, error)
            continue
        counts["taken"] += 1
        validator = make_validator(kind, url, schema)
        if validator is None:
            continue
        texts = [make_text(rng) for _ in range(_VALUES)]
        texts = [text for text in texts if follows(matcher, text)]
        counts["values"] += len(texts)
        written = [
            write(backend, matcher, np.random.default_rng([seed, number, each])) for each in range(_TEXTS)
        ]
        texts += [text for text in written if text is not None]
        counts["written"] += sum(text is not None for text in written)
        for text in texts:
            assert is_valid(validator, json.loads(text)), (schema, text)
    assert counts["taken"] > 0.5 * _SCHEMAS, counts
    assert counts["written"] > counts["taken"], counts
    assert counts["values"] > counts["taken"], counts
