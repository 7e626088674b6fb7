"""Draft heads: guesses as by transformers' layers, and tokens as without guesses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import Speculation
from inflight.core.request.request import Request
from inflight.engine.cpu import layout
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.errors import ConfigError
from inflight.models.registry import read_model_description
from tests.engine.guesses import (
    KERNELS,
    METRICS,
    WAYS,
    Guesses,
    check_results_of_all_kinds,
    check_that_a_wrong_head_is_left_alone,
    check_that_ranks_guess_the_same,
    fill_with_garbage,
    make_requests,
)
from tests.engine.kernels import needs_native
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.engine.serving import config_of, load, serve
from tests.models.draft_heads import DraftingModel, make_drafting_model
from tests.models.quantized import awq, write
from tests.models.zoo import Zoo
from tests.tiers import with_all

pytestmark = pytest.mark.usefixtures("cheap_heads")

CASES = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "deepseek-v3", "glm4-moe", "glm4-moe-lite")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes each model once."""
    made: dict[tuple[str, bool], DraftingModel] = {}

    def get(case: str, agrees: bool = False) -> DraftingModel:
        if (case, agrees) not in made:
            made[case, agrees] = make_drafting_model(tmp_path_factory.mktemp(case), case, agrees)
        return made[case, agrees]

    return get


def with_head(way: str, count: int) -> Any:
    return config_of(way, speculative_decoding_mode=Speculation(Speculation.MTP, count))


@pytest.mark.parametrize("case", with_all(CASES, ("qwen3-next", "deepseek-v3", "qwen3.5")))
@pytest.mark.parametrize("way", with_all(WAYS, WAYS[1:2]))
@KERNELS
def test_guesses_are_those_of_transformers_layers(models: Any, case: str, way: str, kernels: str) -> None:
    """Chunks, reused blocks and pauses leave the head's cache complete, and no guess changes a token."""
    model = models(case)
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6, kernels="torch"), config_of(way), requests)
    engine = load(model.folder, 26, 4, has_draft_head=True, kernels=kernels)
    guesses = Guesses(engine)
    assert engine.runner._draft_head._layer.kernels == kernels
    fill_with_garbage(engine.runner.cache)
    served = serve(engine, with_head(way, 3), requests)
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)
    assert len(guesses.found) > 3 * len(requests)
    for request_id, known, guessed in guesses.found[:: len(guesses.found) // 40 + 1]:
        tokens = [*requests[request_id].input_token_ids, *plain.tokens(request_id)][:known]
        assert list(guessed) == model.guesses(tokens, len(guessed)), (request_id, known)


@pytest.mark.parametrize("case", with_all(CASES, ("deepseek-v3",)))
@KERNELS
def test_right_guesses_save_iterations(models: Any, case: str, kernels: str) -> None:
    model = models(case, agrees=True)
    request = Request(0, model.prompt(9), 40, output=METRICS)
    plain = serve(load(model.folder, 100, kernels="torch"), config_of("no-evict"), [request])
    assert plain.tokens(0) == model.greedy(request.input_token_ids, 40)
    for count in (1, 3):
        engine = load(model.folder, 100, has_draft_head=True, kernels=kernels)
        engine.limits = replace(engine.limits, guess_cost=0.0)  # drafts are as long as the request allows
        served = serve(engine, with_head("no-evict", count), [request])
        assert served.tokens(0) == plain.tokens(0)
        metrics = served.result(0).perf_metrics
        assert 10 < metrics.num_accepted_draft_tokens <= metrics.num_draft_tokens
        assert served.num_iterations == plain.num_iterations - metrics.num_accepted_draft_tokens


@pytest.mark.parametrize("case", with_all(CASES, ("qwen3.5",)))
def test_a_head_that_is_wrong_is_soon_left_alone(models: Any, case: str) -> None:
    """With a recurrent state too, which is saved at the blocks' ends."""
    model = models(case)
    engine = load(model.folder, 240, 6, has_draft_head=True)
    check_that_a_wrong_head_is_left_alone(engine, model, with_head("no-evict", 2), 3)


@pytest.mark.parametrize("case", with_all(CASES, ("qwen3-next",)))
@KERNELS
def test_requests_of_all_kinds_have_the_same_results_with_and_without_guesses(
    models: Any, case: str, kernels: str
) -> None:
    """Beams, logits and additional outputs have no drafts; adapters, stops and own drafts have effect as ever."""
    model = models(case, agrees=True)

    def load_model(has_head: bool) -> ModelEngine:
        return load(
            model.folder, 70, 8, kernels=kernels, has_draft_head=has_head, lora_cache_gpu_memory_fraction=0.05
        )

    check_results_of_all_kinds(model, load_model, with_head)


@needs_native
@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"dtype": "int8"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}],
    ids=["bfloat16", "int8", "int8 cache", "fp8 cache"],
)
@pytest.mark.parametrize("case", with_all(("qwen3-next", "qwen3.5", "glm4-moe"), ("qwen3.5",)))
def test_guesses_change_no_token_of_rounded_numbers(models: Any, case: str, changes: dict[str, str]) -> None:
    """Compiled layers compute each row in the same order, whether a draft or generation has it."""
    model = models(case, agrees=True)
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6, kernels="native", **changes), config_of("no-evict"), requests)
    engine = load(model.folder, 200, 6, kernels="native", has_draft_head=True, **changes)
    guesses = Guesses(engine)
    served = serve(engine, with_head("no-evict", 3), requests)
    assert len(guesses.found) > 20
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)


@needs_native
@pytest.mark.parametrize("case", with_all(("qwen3-next", "qwen3.5", "qwen3.5-moe"), ("qwen3.5-moe",)))
def test_a_quantized_checkpoint_drafts_with_its_levels(models: Any, tmp_path: Path, case: str) -> None:
    """The head's layer keeps the checkpoint's 4 bits as the model's layers do, and guesses right as often."""
    model = write(models(case, agrees=True), tmp_path, awq(32), dtype="bfloat16")
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6, dtype=None), config_of("no-evict"), requests)
    engine = load(model.folder, 200, 6, dtype=None, has_draft_head=True)
    assert engine.runner._draft_head._layer._packed[0].struct.output.kind == layout.INT4
    engine.limits = replace(engine.limits, guess_cost=0.0)
    served = serve(engine, with_head("no-evict", 2), requests)
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)
    assert sum(served.result(each).perf_metrics.num_accepted_draft_tokens for each in requests) > 10


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", with_all(CASES, ("qwen3-next",)))
def test_ranks_guess_the_same_tokens(models: Any, case: str, topology: str) -> None:
    model = models(case, agrees=True)
    requests = make_requests(model, 4)
    plain = serve(load(model.folder, 80, kernels="torch"), config_of("no-evict"), requests)
    one = load(model.folder, 80, has_draft_head=True)
    with ranks(model.folder, TOPOLOGIES[topology], 80, has_draft_head=True) as many:
        check_that_ranks_guess_the_same(many, one, plain, with_head("no-evict", 2), requests)


def test_a_head_needs_memory_for_its_layer_and_for_hidden_states(models: Any) -> None:
    decoder = read_model_description(models("qwen3.5").folder).decoder
    with_it = replace(decoder, has_draft_head=True)
    cache = KvCache(with_it, 4, 16, torch.bfloat16, torch.device("cpu"))
    more = block_bytes(with_it, 16, torch.bfloat16) - block_bytes(decoder, 16, torch.bfloat16)
    assert more == 16 * 2 * (decoder.cached_size + decoder.hidden_size)
    blocks = sum(memory.nbytes for memory in cache._memories())
    assert blocks == 5 * block_bytes(with_it, 16, torch.bfloat16)


def test_saved_blocks_have_all_that_the_head_needs(models: Any) -> None:
    """A block's bytes, copied to another block, are the head's keys, values and hidden states too."""
    model = models("deepseek-v3")
    engine = load(model.folder, 20, has_draft_head=True)
    serve(engine, with_head("no-evict", 2), [Request(0, model.prompt(20), 4)])
    cache = engine.runner.cache
    assert cache.hidden.view(21, -1).any(dim=1).sum() == 3
    before = [memory.clone() for memory in cache._memories()]
    used = int(cache.hidden.view(21, -1).any(dim=1).nonzero()[0, 0])
    other = (used + 10) % 20
    with torch.inference_mode():
        cache.copy(torch.tensor([used]), torch.tensor([other]))
    for memory, old in zip(cache._memories(), before, strict=True):
        assert torch.equal(memory[:, :, other], old[:, :, used]) and old[:, :, used].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"implementation": "transformers"},
            "mtp, expected none, prompt-lookup or suffix: engine is transformers",
        ),
        ({"implementation": "tensorrt"}, "mtp, expected none, prompt-lookup or suffix: engine is tensorrt"),
    ],
)
def test_engines_without_draft_heads_refuse_them(models: Any, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(models("qwen3.5").folder, 20, has_draft_head=True, **changes)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "qwen3.5",
            r"expected a checkpoint with a draft head: missing mtp\.pre_fc_norm_embedding\.weight, .* more$",
        ),
        (
            "deepseek-v3",
            r"expected a checkpoint with a draft head: missing model\.layers\.3\.enorm\.weight, .* more$",
        ),
        ("llama-gqa", r"expected a family with a draft head \(tensors mtp\.\*"),
    ],
)
def test_a_checkpoint_without_a_head_is_refused_by_the_tensors_names(
    zoo: Zoo, case: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"speculative_decoding_mode is mtp, {message}"):
        load(zoo[case].folder, 20, has_draft_head=True)


def test_without_mtp_the_head_is_not_read(models: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine = load(models("qwen3.5").folder, 20)
    assert "tensors not read: mtp (" in caplog.text
    assert engine.runner._draft_head is None and len(engine.runner.cache.hidden) == 0
