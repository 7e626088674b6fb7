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
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine import draft_costs
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.errors import ConfigError
from inflight.models.draft_folder import with_head_folder
from inflight.models.registry import read_model_description
from tests.engine.guesses import (
    METRICS,
    WAYS,
    Guesses,
    check_results_of_all_kinds,
    check_that_ranks_guess_the_same,
    fill_with_garbage,
    make_requests,
)
from tests.engine.pictures import Picture, make_prompt, request_of
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.engine.serving import config_of, load, serve
from tests.models.eagle_heads import make_random_head
from tests.models.gemma4_heads import CLUSTERS, Gemma4HeadFolder, make_head, make_target
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

pytestmark = pytest.mark.usefixtures("cheap_heads")

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
    """Prompts are longer than the window; chunks, reused blocks and pauses change no guess."""
    model, head = random(case, form)
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6), config_of("no-evict"), requests)
    engine = load(model.folder, 26, 4, draft_head_dir=str(head.folder), has_draft_head=True)
    guesses = Guesses(engine)
    fill_with_garbage(engine.runner.cache)
    served = serve(engine, with_head(way, 3), requests)
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)
    assert len(guesses.found) > 3 * len(requests)
    for request_id, known, guessed in guesses.found[:: len(guesses.found) // 40 + 1]:
        tokens = [*requests[request_id].input_token_ids, *plain.tokens(request_id)][:known]
        assert list(guessed) == head.guesses(tokens, len(guessed)), (request_id, known)


@pytest.mark.parametrize("form", FORMS)
def test_first_drafts_are_those_of_generate_with_an_assistant(random: Any, form: str) -> None:
    model, head = random("gemma4-shared", form)
    engine = load(model.folder, 60, draft_head_dir=str(head.folder), has_draft_head=True)
    guesses = Guesses(engine)
    requests = [Request(length, model.prompt(length, length), 8) for length in (2, 12, 21, 33, 50)]
    serve(engine, with_head("no-evict", 3), requests)
    found = {(number, known): list(guessed) for number, known, guessed in guesses.found}
    for request in requests:
        prompt = request.input_token_ids
        assert found[len(prompt), len(prompt) + 1] == head.first_draft(prompt, 3), len(prompt)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_longer_than_the_prompt_and_one_token_are_no_special_cases(random: Any, form: str) -> None:
    """A prompt of one token has no hidden state and no keys before its first token."""
    model, head = random("gemma4", form)
    engine = load(model.folder, 60, draft_head_dir=str(head.folder), has_draft_head=True)
    guesses = Guesses(engine)
    requests = [Request(number, model.prompt(1 + number), 30) for number in range(2)]
    served = serve(engine, with_head("no-evict", 4), requests)
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 30)
    lengths = {known for _, known, _ in guesses.found}
    assert min(lengths) == 2 and max(lengths) > 25
    for request_id, known, guessed in guesses.found[::3]:
        tokens = [*requests[request_id].input_token_ids, *served.tokens(request_id)][:known]
        assert list(guessed) == head.guesses(tokens, len(guessed)), (request_id, known)


def test_right_guesses_save_iterations(right: tuple[ZooModel, Gemma4HeadFolder]) -> None:
    model, head = right
    request = Request(0, model.prompt(9), 40, output=METRICS)
    plain = serve(load(model.folder, 100), config_of("no-evict"), [request])
    assert plain.tokens(0) == model.greedy(request.input_token_ids, 40)
    for count in (1, 3):
        engine = load(model.folder, 100, draft_head_dir=str(head.folder), has_draft_head=True)
        engine.limits = replace(engine.limits, guess_cost=0.0)  # drafts are as long as the request allows
        served = serve(engine, with_head("no-evict", count), [request])
        assert served.tokens(0) == plain.tokens(0)
        metrics = served.result(0).perf_metrics
        assert 10 < metrics.num_accepted_draft_tokens <= metrics.num_draft_tokens
        assert served.num_iterations == plain.num_iterations - metrics.num_accepted_draft_tokens


def test_a_head_that_is_wrong_is_soon_left_alone(random: Any) -> None:
    model, head = random("gemma4")
    request = Request(0, model.prompt(9), 100, output=METRICS)
    engine = load(model.folder, 60, draft_head_dir=str(head.folder), has_draft_head=True)
    served = serve(engine, with_head("no-evict", 4), [request])
    assert served.tokens(0) == model.greedy(request.input_token_ids, 100)
    assert 2 <= served.result(0).perf_metrics.num_draft_tokens <= 12


@pytest.mark.parametrize("case", with_all(("gemma4-vision", "gemma4-large"), ("gemma4-large",)))
def test_guesses_after_pictures_change_no_token(tmp_path: Path, case: str) -> None:
    model = make_target(tmp_path / "model", case)
    head = make_head(tmp_path / "head", model)
    prompt = make_prompt(model, (5, Picture(2, 7, 1), 6, Picture(6, 2, 2), 3), 0)
    requests = [request_of(model, number, prompt, new, output=METRICS) for number, new in ((0, 12), (1, 20))]
    plain = serve(load(model.folder, 60), config_of("no-evict"), requests)
    engine = load(model.folder, 60, draft_head_dir=str(head.folder), has_draft_head=True)
    guesses = Guesses(engine)
    served = serve(engine, with_head("no-evict", 3), requests)
    assert len(guesses.found) > 10
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)


def test_requests_of_all_kinds_have_the_same_results_with_and_without_guesses(
    right: tuple[ZooModel, Gemma4HeadFolder],
) -> None:
    """Beams, logits and additional outputs have no drafts; adapters, stops and own drafts have effect as ever."""
    model, head = right

    def load_model(has_head: bool) -> ModelEngine:
        changes = {"draft_head_dir": str(head.folder), "has_draft_head": True} if has_head else {}
        return load(model.folder, 70, 8, lora_cache_gpu_memory_fraction=0.05, **changes)

    check_results_of_all_kinds(model, load_model, with_head)


@pytest.mark.parametrize(
    "changes", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"dtype": "int8"}]
)
def test_rounded_keys_and_weights_still_give_right_guesses(
    right: tuple[ZooModel, Gemma4HeadFolder], changes: dict[str, str]
) -> None:
    """The head reads an 8-bit cache as the model's layers do. A draft's rows may differ from generation's in
    the last bits, so tokens are not compared here."""
    model, head = right
    engine = load(model.folder, 100, draft_head_dir=str(head.folder), has_draft_head=True, **changes)
    engine.limits = replace(engine.limits, guess_cost=0.0)
    requests = [replace(each, sampling=SamplingConfig()) for each in make_requests(model, 4)]
    served = serve(engine, with_head("no-evict", 2), requests)
    metrics = [served.result(request).perf_metrics for request in requests]
    accepted = sum(each.num_accepted_draft_tokens for each in metrics)
    assert accepted > 0.8 * sum(each.num_draft_tokens for each in metrics) > 10


@pytest.mark.parametrize("topology", ["tp2", "pp2", "tp2-pp2"])
def test_ranks_guess_the_same_tokens(right: tuple[ZooModel, Gemma4HeadFolder], topology: str) -> None:
    model, head = right
    requests = make_requests(model, 4)
    changes = {"draft_head_dir": str(head.folder), "has_draft_head": True}
    plain = serve(load(model.folder, 80), config_of("no-evict"), requests)
    one = load(model.folder, 80, **changes)
    with ranks(model.folder, TOPOLOGIES[topology], 80, **changes) as many:
        check_that_ranks_guess_the_same(many, one, plain, with_head("no-evict", 2), requests)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_guess_as_transformers_does(random: Any, form: str) -> None:
    """Each rank has some of the head's query heads and of the output projection's tokens."""
    model, head = random("gemma4", form)
    request = Request(0, model.prompt(25), 12, output=METRICS)
    with ranks(model.folder, (2, 1), 40, draft_head_dir=str(head.folder), has_draft_head=True) as engine:
        guesses = Guesses(engine.stages[0])
        engine.limits = engine.stages[0].limits
        served = serve(engine, with_head("no-evict", 3), [request])
    assert served.tokens(0) == model.greedy(request.input_token_ids, 12)
    assert len(guesses.found) > 5
    for _, known, guessed in guesses.found:
        tokens = [*request.input_token_ids, *served.tokens(0)][:known]
        assert list(guessed) == head.guesses(tokens, len(guessed)), known


def test_a_head_that_reads_layers_of_two_stages_is_refused(random: Any) -> None:
    model, head = random("gemma4")
    message = (
        "pipeline_parallel_size is 2, expected at most 1: layers 0 to 2 must be in one stage, because the draft "
        "head reads keys and values of some of them"
    )
    changes = {"draft_head_dir": str(head.folder), "has_draft_head": True}
    with pytest.raises(ConfigError, match=message), ranks(model.folder, (1, 2), **changes):
        pass


def test_a_head_that_cannot_be_divided_by_the_ranks_is_refused(random: Any) -> None:
    """The model has eight query heads, its head four."""
    model, head = random("gemma4")
    message = "the draft head: tensor parallelism over 8 ranks does not divide this model: 4 heads"
    with (
        pytest.raises(ConfigError, match=message),
        ranks(model.folder, (8, 1), draft_head_dir=str(head.folder), has_draft_head=True),
    ):
        pass


@pytest.mark.parametrize("implementation", ["transformers", "tensorrt"])
def test_engines_without_draft_heads_refuse_them(
    right: tuple[ZooModel, Gemma4HeadFolder], implementation: str
) -> None:
    model, head = right
    message = f"mtp, expected none, prompt-lookup or suffix: engine is {implementation}"
    with pytest.raises(ConfigError, match=message):
        load(
            model.folder,
            20,
            draft_head_dir=str(head.folder),
            has_draft_head=True,
            implementation=implementation,
        )


def test_a_head_needs_memory_for_hidden_states_alone(random: Any) -> None:
    model, head = random("gemma4")
    described = read_model_description(model.folder)
    decoder, with_it = described.decoder, with_head_folder(described, str(head.folder)).decoder
    cache = KvCache(with_it, 4, 16, torch.bfloat16, torch.device("cpu"))
    more = block_bytes(with_it, 16, torch.bfloat16) - block_bytes(decoder, 16, torch.bfloat16)
    assert more == 16 * 2 * decoder.hidden_size
    assert sum(memory.nbytes for memory in cache._memories()) == 5 * block_bytes(with_it, 16, torch.bfloat16)


def test_a_guess_costs_its_layers_and_the_products_for_its_logits(random: Any) -> None:
    attention, mlp = 48 * 2 * 4 * (12 + 12 + 24 + 24), 48 * 3 * 56 * 4
    projections = 48 * 3 * 64
    costs = {"all tokens": 220, "clusters": 20 + 3 * 11}
    for form, num_products in costs.items():
        model, head = random("gemma4", form)
        decoder = with_head_folder(read_model_description(model.folder), str(head.folder)).decoder
        used = draft_costs._weights_of_model(decoder)
        assert (
            draft_costs.guess_cost(decoder, 0.0) == (attention + mlp + projections + 48 * num_products) / used
        )
        assert draft_costs.entry_cost(decoder, 0.0) == 64 / used


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 96}, "'backbone_hidden_size' is 96, expected 64, the hidden_size of"),
        ({"text": {"vocab_size": 240}}, "'text_config.vocab_size' is 240, expected 220 as in"),
        (
            {"text": {"sliding_window": 20}},
            "sliding_window of sliding_attention layers is 20, expected 19 as in",
        ),
        (
            {"text": {"num_key_value_heads": 2}},
            "num_key_value_heads of sliding_attention layers is 2, expected 4 as in",
        ),
        ({"text": {"head_dim": 16}}, "head_dim of sliding_attention layers is 16, expected 12 as in"),
        (
            {
                "text": {
                    "rope_parameters": {
                        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                        "full_attention": {
                            "rope_type": "proportional",
                            "partial_rotary_factor": 0.25,
                            "rope_theta": 1e6,
                        },
                    }
                }
            },
            "rope_parameters of sliding_attention layers is .*, expected .* whose keys and values they read",
        ),
    ],
    ids=["width", "tokens", "window", "key heads", "head size", "positions"],
)
def test_a_head_of_another_model_is_refused(
    random: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model, _ = random("gemma4")
    head = make_head(tmp_path, model, **changes)
    with pytest.raises(ConfigError, match=message):
        load(model.folder, 20, draft_head_dir=str(head.folder), has_draft_head=True)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (None, {"num_centroids": 7}, "'num_centroids' is 7, expected a divisor of vocab_size, 220"),
        (None, {"centroid_intermediate_top_k": 21}, "is 21, expected at most num_centroids, 20"),
        (None, {"has_gate": True}, "'has_gate' is True, expected no such key: its effect is unknown"),
        (None, {"quantization_config": {"quant_method": "awq"}}, "quantized heads of Gemma 4 are not read"),
        (
            "text_config",
            {"model_type": "llama"},
            "'text_config.model_type' is 'llama', expected gemma4_text or",
        ),
        ("text_config", {"num_kv_shared_layers": 2}, "is 2, expected 4: all layers read the model's keys"),
        ("text_config", {"enable_moe_block": True}, "'text_config.enable_moe_block' is True, expected false"),
        ("text_config", {"hidden_size_per_layer_input": 8}, "is 8, expected 0, as in all heads of Gemma 4"),
        (
            "text_config",
            {"intermediate_size": 64},
            r"has shape \[56, 48\], expected \[64, 48\] from config.json",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_head_is_refused_by_its_config(
    random: Any, tmp_path: Path, section: str | None, changes: dict[str, Any], message: str
) -> None:
    model, head = random("gemma4", "clusters")
    config = json.loads((head.folder / "config.json").read_text())
    (config if section is None else config[section]).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(head.folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(model.folder, 20, draft_head_dir=str(tmp_path), has_draft_head=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pre_projection.weight": None},
            "lacks pre_projection.weight and has no tensor beside what is known",
        ),
        (
            {"model.layers.1.self_attn.k_proj.weight": torch.zeros(48, 48)},
            "lacks no tensor and has model.layers.1.self_attn.k_proj.weight beside what is known, expected a",
        ),
        ({"post_projection.weight": torch.zeros(64, 64)}, r"has shape \[64, 64\], expected \[64, 48\]"),
        (
            {"masked_embedding.token_ordering": torch.zeros(220, dtype=torch.int64)},
            "does not have each number from 0 to 219 once, expected an order of all tokens",
        ),
        ({"masked_embedding.token_ordering": torch.zeros(220)}, "has dtype F32, expected I64 or I32"),
    ],
    ids=["missing", "unknown", "shape", "order", "dtype"],
)
def test_a_head_is_refused_by_its_tensors(
    random: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model, head = random("gemma4", "clusters")
    tensors = load_file(head.folder / "model.safetensors") | changes
    save_file(
        {name: each for name, each in tensors.items() if each is not None}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((head.folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        load(model.folder, 20, draft_head_dir=str(tmp_path), has_draft_head=True)


def test_only_a_gemma_4_takes_such_a_head(random: Any, zoo: Zoo, tmp_path: Path) -> None:
    _, head = random("gemma4")
    for case in ("llama-gqa", "gemma3"):
        with pytest.raises(ConfigError, match=r"expected a head for .*, which is not a Gemma 4"):
            load(zoo[case].folder, 20, draft_head_dir=str(head.folder), has_draft_head=True)


def test_a_model_without_windows_has_no_keys_for_the_heads_windows(random: Any, tmp_path: Path) -> None:
    model = make_target(tmp_path / "model", "gemma4", layer_types=["full_attention"] * 3)
    _, head = random("gemma4")
    with pytest.raises(ConfigError, match=r"layer_types' .* which has no sliding_attention with keys"):
        load(model.folder, 20, draft_head_dir=str(head.folder), has_draft_head=True)


def test_a_gemma_4_takes_an_eagle_head_too(random: Any, tmp_path: Path) -> None:
    model, _ = random("gemma4")
    head = make_random_head(tmp_path, model)
    engine = load(model.folder, 40, draft_head_dir=str(head.folder))
    request = Request(0, model.prompt(12), 8)
    config = config_of("no-evict", speculative_decoding_mode=Speculation(Speculation.EAGLE3, 2))
    assert serve(engine, config, [request]).tokens(0) == model.greedy(request.input_token_ids, 8)
