"""Gemma 4's draft head: guesses as by transformers' generation, tokens as without guesses, and refused folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.config import Speculation
from inflight.core.request.request import Request
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.errors import ConfigError
from inflight.models.draft_folder import with_head_folder
from inflight.models.registry import read_model_description
from tests.engine.guesses import (
    METRICS,
    WAYS,
    Guesses,
    fill_with_garbage,
    make_requests,
    requests_of_all_kinds,
)
from tests.engine.lora import make_adapter, stored
from tests.engine.ranks import ranks
from tests.engine.serving import Served, config_of, load, serve
from tests.models.eagle_heads import make_random_head
from tests.models.gemma4_heads import CLUSTERS, Gemma4HeadFolder, make_head, make_target
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

CASES = ("gemma4", "gemma4-shared", "gemma4-moe", "gemma4-unified-text")
FORMS = {"all tokens": {}, "clusters": CLUSTERS}


def with_head(way: str, count: int) -> Any:
    return config_of(way, speculative_decoding_mode=Speculation(Speculation.MTP, count))


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes each model with a random head once."""
    made: dict[tuple[str, str], tuple[ZooModel, Gemma4HeadFolder]] = {}

    def get(case: str, form: str = "all tokens") -> tuple[ZooModel, Gemma4HeadFolder]:
        if (case, form) not in made:
            folder = tmp_path_factory.mktemp(case)
            model = make_target(folder / "model", case)
            made[case, form] = model, make_head(folder / "head", model, **FORMS[form])
        return made[case, form]

    return get


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[ZooModel, Gemma4HeadFolder]:
    """A model whose next token depends on the last one, and a head that knows this."""
    folder = tmp_path_factory.mktemp("right")
    model = make_target(folder / "model", "gemma4-shared", is_simple=True)
    return model, make_head(folder / "head", model, is_right=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", with_all(CASES, CASES[:2]))
@pytest.mark.parametrize("way", with_all(WAYS, WAYS[1:2]))
def test_guesses_are_those_of_transformers_generation(random: Any, case: str, way: str, form: str) -> None:
    """Prompts are longer than the window; chunks, reused blocks and pauses change no guess, and guesses no token."""
    model, head = random(case, form)
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6), config_of("no-evict"), requests)
    engine = load(model.folder, 26, 4, eagle_dir=str(head.folder), has_draft_head=True)
    guesses = Guesses(engine)
    fill_with_garbage(engine.runner.cache)
    served = serve(engine, with_head(way, 3), requests)
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)
    assert len(guesses.found) > 3 * len(requests)
    for request_id, known, guessed in guesses.found[:: len(guesses.found) // 40 + 1]:
        tokens = [*requests[request_id].input_token_ids, *plain.tokens(request_id)][:known]
        assert list(guessed) == head.guesses(tokens, len(guessed)), (request_id, known)
