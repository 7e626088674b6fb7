"""EAGLE-3 heads: guesses as by their published formulas, tokens as without guesses, and refused folders."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.config import Speculation
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import Request
from inflight.engine import draft_costs
from inflight.engine.cpu.layout import MAX_HEAD_DIM
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.errors import ConfigError
from inflight.models.checkpoint import Checkpoint
from inflight.models.eagle_head import with_eagle_head
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
from tests.engine.pictures import Picture, make_prompt, request_of
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.engine.serving import config_of, load, serve
from tests.guided.factories import load as load_guided
from tests.guided.factories import make_request as make_guided_request
from tests.models.eagle_heads import AFTER, EagleHeadFolder, make_random_head, make_right_head, weaken
from tests.models.zoo import Zoo, ZooModel, make_model
from tests.tiers import with_all

pytestmark = pytest.mark.usefixtures("cheap_heads")

CASES = ("llama-gqa", "qwen3.5", "deepseek-v3", "qwen3", "gpt-oss")


GUIDES = (
    Guide(GuideKind.REGEX, "([a-d]{2,4} ){3,6}end"),
    Guide(GuideKind.REGEX, "[^0]*"),
    Guide(GuideKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 2}'),
    None,
)
NUM_ADDED = {"qwen3-vl": 2}
READ_LAYERS = "eagle_aux_hidden_state_layer_ids"
ROOT = Path(__file__).parents[2]


def with_head(way: str, count: int) -> Any:
    return config_of(way, speculative_decoding_mode=Speculation(Speculation.EAGLE3, count))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[ZooModel, EagleHeadFolder]:
    """A model whose next token depends on the last one, and a head that knows this."""
    folder = tmp_path_factory.mktemp("right")
    model = make_model(folder / "model", "llama-gqa")
    weaken(model)
    model.found.clear()
    return model, make_right_head(folder / "head", model)


@pytest.mark.parametrize("case", with_all(CASES, ("llama-gqa", "qwen3.5", "deepseek-v3")))
@pytest.mark.parametrize("way", with_all(WAYS, WAYS[1:]))
@KERNELS
def test_guesses_follow_the_published_formulas(
    zoo: Zoo, tmp_path: Path, case: str, way: str, kernels: str
) -> None:
    """Chunks, reused blocks and pauses leave the head's cache complete, and no guess changes a token."""
    model = zoo[case]
    head = make_random_head(tmp_path, model)
    requests = make_requests(model)
    plain = serve(load(model.folder, 200, 6, kernels="torch"), config_of("no-evict"), requests)
    engine = load(model.folder, 26, 4, draft_head_dir=str(head.folder), kernels=kernels)
    guesses = Guesses(engine)
    assert engine.runner._draft_head._layer.kernels == kernels
    fill_with_garbage(engine.runner.cache)
    served = serve(engine, with_head(way, 3), requests)
    for request in requests:
        assert served.tokens(request) == plain.tokens(request)
    assert len(guesses.found) > 3 * len(requests)
    for request_id, known, guessed in guesses.found[:: len(guesses.found) // 40 + 1]:
        tokens = [*requests[request_id].input_token_ids, *plain.tokens(request_id)][:known]
        assert list(guessed) == head.guesses(tokens, len(guessed)), (request_id, known)


@pytest.mark.parametrize(
    "changes",
    [
        {"has_embedding": True},
        {"draft_vocab_size": None},
        {"attention_bias": True, "num_key_value_heads": 4},
        {"architectures": ["LlamaForCausalLM"]},
        {"head_dim": MAX_HEAD_DIM + 4},  # its layer runs on torch's operators, beside compiled layers
        {
            "eagle_aux_hidden_state_layer_ids": None,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [each - 1 for each in AFTER],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None,
            },
            "fc_norm": False,
            "norm_before_residual": False,
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_variants_of_the_layout_guess_alike(zoo: Zoo, tmp_path: Path, changes: dict[str, Any]) -> None:
    model = zoo["llama-gqa"]
    head = make_random_head(tmp_path, model, **changes)
    engine = load(model.folder, 40, draft_head_dir=str(head.folder))
    guesses = Guesses(engine)
    fill_with_garbage(engine.runner.cache)
    (request,) = make_requests(model, 1)
    served = serve(engine, with_head("no-evict", 2), [request])
    assert served.tokens(0) == model.greedy(request.input_token_ids, request.max_new_tokens)
    assert len(guesses.found) > 5
    for _, known, guessed in guesses.found:
        tokens = [*request.input_token_ids, *served.tokens(0)][:known]
        assert list(guessed) == head.guesses(tokens, len(guessed)), known


def test_the_training_script_trains_and_writes_such_heads(zoo: Zoo, tmp_path: Path) -> None:
    """Its guesses in a row are those of the formulas, its loss falls, and the engine reads what it writes."""
    script, model, vocab = load_script(), zoo["llama-gqa"], 70
    torch.manual_seed(0)
    config = script.head_config(model.oracle.config, vocab)
    token_ids = torch.arange(1, 3 * vocab, 3)
    trained = script.new_head(config, model.oracle, token_ids)
    parameters = {name: tensor.detach().bfloat16() for name, tensor in trained.state_dict().items()}
    trained.load_state_dict({name: tensor.float() for name, tensor in parameters.items()})
    script.save(trained, config, token_ids, tmp_path)
    head = EagleHeadFolder(tmp_path, config, load_file(tmp_path / "model.safetensors"), model)
    prompt = model.prompt(12)
    guessed = head.guesses(prompt, 3)
    rows = torch.tensor([[*prompt, *guessed]])
    with torch.no_grad():
        found = model.oracle(rows, output_hidden_states=True)
        read = torch.cat([found.hidden_states[number] for number in config[READ_LAYERS]], dim=-1)
        embedded = model.oracle.get_input_embeddings()(rows)
        in_a_row = script.guesses_in_a_row(trained, embedded, read)
        assert [int(token_ids[logits[0, len(prompt) - 2].argmax()]) for logits in in_a_row] == guessed

    engine = load(model.folder, 40, draft_head_dir=str(tmp_path))
    guesses = Guesses(engine)
    served = serve(engine, with_head("no-evict", 3), [Request(0, prompt, 6)])
    for _, known, found_there in guesses.found:
        assert list(found_there) == head.guesses([*prompt, *served.tokens(0)][:known], len(found_there))

    rows = torch.tensor([model.prompt(40, seed) for seed in range(4)])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        loss, _ = script.loss_of(trained, model.oracle, config, token_ids, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def load_script() -> Any:
    """Return scripts/train_draft_head as a module."""
    loader = SourceFileLoader("train_draft_head", str(ROOT / "scripts" / "train_draft_head"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None, "a spec of a file has a loader"
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@KERNELS
def test_right_guesses_save_iterations(right: tuple[ZooModel, EagleHeadFolder], kernels: str) -> None:
    model, head = right
    request = Request(0, model.prompt(9), 40, output=METRICS)
    plain = serve(load(model.folder, 100, kernels="torch"), config_of("no-evict"), [request])
    assert plain.tokens(0) == model.greedy(request.input_token_ids, 40)
    for count in (1, 3):
        engine = load(model.folder, 100, draft_head_dir=str(head.folder), kernels=kernels)
        engine.limits = replace(engine.limits, guess_cost=0.0)  # drafts are as long as the request allows
        served = serve(engine, with_head("no-evict", count), [request])
        assert served.tokens(0) == plain.tokens(0)
        metrics = served.result(0).perf_metrics
        assert 10 < metrics.num_accepted_draft_tokens <= metrics.num_draft_tokens
        assert served.num_iterations == plain.num_iterations - metrics.num_accepted_draft_tokens


@pytest.mark.parametrize("count", [1, 6])
def test_a_head_that_is_wrong_is_soon_left_alone(zoo: Zoo, tmp_path: Path, count: int) -> None:
    folder = make_random_head(tmp_path, zoo["llama-gqa"]).folder
    engine = load(zoo["llama-gqa"].folder, 240, 6, draft_head_dir=str(folder))
    check_that_a_wrong_head_is_left_alone(engine, zoo["llama-gqa"], with_head("no-evict", 4), count)


def test_a_guess_costs_a_layer_and_the_output_projection(zoo: Zoo, tmp_path: Path) -> None:
    model = read_model_description(zoo["llama-gqa"].folder)
    decoder = with_eagle_head(model, str(make_random_head(tmp_path, zoo["llama-gqa"]).folder)).decoder
    of_layer = 64 * (8 * 8 + 2 * 2 * 8 + 8 * 8 + 3 * 96)
    of_head = 64 * (4 * 12 + 2 * 2 * 12 + 4 * 12 + 3 * 40)
    assert draft_costs.guess_cost(decoder, 0.0) == (of_head + 64 * 70) / (3 * of_layer + 64 * 211)
    of_entry = 3 * 64 * 64 + 2 * 64 * (4 * 12 + 2 * 2 * 12)
    assert draft_costs.entry_cost(decoder, 0.0) == of_entry / (3 * of_layer + 64 * 211)
    limits = load(model.folder, 20, draft_head_dir=str(tmp_path)).limits
    assert (limits.guess_cost, limits.entry_cost) == (
        draft_costs.guess_cost(decoder, 0.0),
        draft_costs.entry_cost(decoder, 0.0),
    )
    limits = load(model.folder, 20).limits
    assert limits.guess_cost == limits.entry_cost == 0


def test_a_head_that_cannot_pay_is_never_used(
    right: tuple[ZooModel, EagleHeadFolder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its operations that are not products take longer than a token of this model."""
    model, head = right
    monkeypatch.setitem(draft_costs._OVERHEAD_BYTES, "cpu", 1e6)
    engine = load(model.folder, 60, draft_head_dir=str(head.folder))
    assert engine.limits.guess_cost > 1
    assert "the draft head is not used, because a guess takes longer than a token of the model" in caplog.text
    monkeypatch.setattr(engine.runner._draft_head, "fill", None)  # a call is an error
    served = serve(engine, with_head("no-evict", 3), [Request(0, model.prompt(9), 20, output=METRICS)])
    assert len(served.tokens(0)) == 20
    assert served.result(0).perf_metrics.num_draft_tokens == 0


def test_the_overhead_of_a_head_weighs_more_beside_smaller_weights(
    right: tuple[ZooModel, EagleHeadFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = right
    found = []
    for dtype in ("float32", "bfloat16", "int8"):
        monkeypatch.setitem(draft_costs._OVERHEAD_BYTES, "cpu", 0.0)
        less = load(model.folder, 20, dtype=dtype, draft_head_dir=str(head.folder)).limits
        monkeypatch.setitem(draft_costs._OVERHEAD_BYTES, "cpu", 1e5)
        more = load(model.folder, 20, dtype=dtype, draft_head_dir=str(head.folder)).limits
        found.append(more.entry_cost - less.entry_cost)
        assert more.guess_cost - less.guess_cost == pytest.approx(found[-1])
    assert found[1] == pytest.approx(2 * found[0])
    assert 1.2 * found[1] < found[2] < 2 * found[1]  # embeddings and norms are not in int8


@KERNELS
def test_requests_of_all_kinds_have_the_same_results_with_and_without_guesses(
    right: tuple[ZooModel, EagleHeadFolder], kernels: str
) -> None:
    """Beams, logits and additional outputs have no drafts; adapters, stops and own drafts have effect as ever."""
    model, head = right

    def load_model(has_head: bool) -> ModelEngine:
        folder = str(head.folder) if has_head else None
        return load(
            model.folder, 70, 8, kernels=kernels, draft_head_dir=folder, lora_cache_gpu_memory_fraction=0.05
        )

    check_results_of_all_kinds(model, load_model, with_head)


def test_guided_requests_have_drafts_and_the_same_tokens(right: tuple[ZooModel, EagleHeadFolder]) -> None:
    """The masks of a draft's rows follow the guesses, of which a guide may allow none."""
    model, head = right
    requests = [
        make_guided_request(
            10 * number + place, model.prompt(7, place), guide, 40, sampling=sampling, output=METRICS
        )
        for number, sampling in enumerate(({"top_p": 0.0}, {}))
        for place, guide in enumerate(GUIDES)
    ]
    plain = serve(load_guided(model.folder, kernels="torch"), config_of("no-evict"), requests)
    engine = load_guided(model.folder, 60, 6, draft_head_dir=str(head.folder))
    engine.limits = replace(engine.limits, guess_cost=0.0)
    for way in ("no-evict", "utilization-chunked-no-reuse"):
        served = serve(engine, with_head(way, 3), requests)
        counts = [0, 0]
        for request in requests:
            assert served.tokens(request) == plain.tokens(request)
            if request.guide is not None:
                metrics = served.result(request).perf_metrics
                counts[0] += metrics.num_accepted_draft_tokens
                counts[1] += metrics.num_draft_tokens - metrics.num_accepted_draft_tokens
        assert counts[0] > 5 and counts[1] > 20


@pytest.mark.parametrize("has_embedding", [False, True])
@pytest.mark.parametrize("case", ["qwen3-vl", "gemma3-vision"])
def test_guesses_after_pictures_change_no_token(
    zoo: Zoo, tmp_path: Path, case: str, has_embedding: bool
) -> None:
    """Rows of pictures have no token in the head's own embedding, and its layer rotates by plain positions."""
    model = zoo[case]
    head = make_random_head(tmp_path, model, has_embedding)
    parts = (5, Picture(2, 7, 1), 6, Picture(6, 2, 2), 3)
    prompt = make_prompt(model, parts, NUM_ADDED.get(case, 0))
    requests = [request_of(model, number, prompt, new, output=METRICS) for number, new in ((0, 12), (1, 20))]
    plain = serve(load(model.folder, 60, kernels="torch"), config_of("no-evict"), requests)
    engine = load(model.folder, 60, draft_head_dir=str(head.folder))
    guesses = Guesses(engine)
    served = serve(engine, with_head("no-evict", 3), requests)
    assert len(guesses.found) > 10
    with ranks(model.folder, (1, 2), 60, draft_head_dir=str(head.folder)) as stages:
        in_stages = Guesses(stages.stages[1])
        stages.limits = stages.stages[1].limits
        served_in_stages = serve(stages, with_head("no-evict", 3), requests)
    assert len(in_stages.found) > 10
    for request in requests:
        assert served.tokens(request) == served_in_stages.tokens(request) == plain.tokens(request)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ranks_guess_the_same_tokens(right: tuple[ZooModel, EagleHeadFolder], topology: str) -> None:
    """With pipeline stages, the head reads hidden states of earlier stages."""
    model, head = right
    requests = make_requests(model, 4)
    plain = serve(load(model.folder, 80, kernels="torch"), config_of("no-evict"), requests)
    one = load(model.folder, 80, draft_head_dir=str(head.folder))
    with ranks(model.folder, TOPOLOGIES[topology], 80, draft_head_dir=str(head.folder)) as many:
        check_that_ranks_guess_the_same(many, one, plain, with_head("no-evict", 2), requests)


@pytest.mark.parametrize("case", ["llama-gqa", "deepseek-v3"])
def test_a_head_needs_memory_for_its_layer_and_for_hidden_states(zoo: Zoo, tmp_path: Path, case: str) -> None:
    head = make_random_head(tmp_path, zoo[case])
    model = read_model_description(zoo[case].folder)
    decoder, with_it = model.decoder, with_eagle_head(model, str(head.folder)).decoder
    cache = KvCache(with_it, 4, 16, torch.bfloat16, torch.device("cpu"))
    more = block_bytes(with_it, 16, torch.bfloat16) - block_bytes(decoder, 16, torch.bfloat16)
    of_head = 2 * head.config["num_key_value_heads"] * head.config["head_dim"]
    assert more == 16 * 2 * (of_head + decoder.hidden_size)
    assert sum(memory.nbytes for memory in cache._memories()) == 5 * block_bytes(with_it, 16, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"implementation": "transformers"},
            "eagle3, expected none, prompt-lookup or suffix: engine is transformers",
        ),
        (
            {"implementation": "tensorrt"},
            "eagle3, expected none, prompt-lookup or suffix: engine is tensorrt",
        ),
    ],
)
def test_engines_without_draft_heads_refuse_them(
    right: tuple[ZooModel, EagleHeadFolder], changes: dict[str, str], message: str
) -> None:
    model, head = right
    with pytest.raises(ConfigError, match=message):
        load(model.folder, 20, draft_head_dir=str(head.folder), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["EagleLlamaForCausalLM"]},
            "an EAGLE head of another version or family, expected an",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None},
            "without draft_vocab_size, as a whole",
        ),
        ({"medusa_num_heads": 4}, "speculative_model_dir has a Medusa head, expected an EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2, expected 1, as EAGLE-3 heads have"),
        (
            {"hidden_size": 32},
            "'hidden_size' is 32, expected 64 as in .*, because the head must fit this model",
        ),
        ({"vocab_size": 500}, "'vocab_size' is 500, expected 211 as in"),
        ({"draft_vocab_size": 212}, "'draft_vocab_size' is 212, expected at most vocab_size, which is 211"),
        ({"target_hidden_size": 128}, "'target_hidden_size' is 128, expected 64"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]},
            r"is \[0, 1, 4\], expected three numbers of layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1]}, r"is \[1\], expected three numbers of layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state' is False, expected true"),
        ({"fc_norm": True}, "'fc_norm' is True, expected false: heads of this form are not read"),
        (
            {"norm_before_residual": True},
            "'norm_before_residual' is True, expected false: heads of this form",
        ),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm' is False, expected true"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm' is True, expected false"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step' is 4, expected 1"),
        ({"eagle_config": {"has_gate": False}}, "'eagle_config.has_gate' is False, expected no such key"),
        (
            {"intermediate_size": 41},
            r"has shape \[40, 64\], expected \[41, 64\] from config.json of the head",
        ),
        ({"attention_bias": True}, "lacks midlayer.self_attn.q_proj.bias, .*, expected an EAGLE-3 head"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_its_config(
    zoo: Zoo, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = zoo["llama-gqa"]
    head = make_random_head(tmp_path, model)
    config = {key: value for key, value in (head.config | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(model.folder, 20, draft_head_dir=str(head.folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc.weight": None}, "lacks fc.weight and has no tensor beside what is known"),
        (
            {"fc.weight": torch.zeros(64, 128)},
            r"an EAGLE-1 or EAGLE-2 head \(fc.weight has shape \[64, 128\]\)",
        ),
        ({"d2t": None}, "lacks d2t"),
        ({"d2t": torch.full((70,), 200)}, "d2t leads to tokens 200 to 269, expected 0 to 210"),
        ({"d2t": torch.zeros(70)}, "'d2t' has dtype F32, expected I64 or I32"),
        (
            {"fc_norm.0.weight": torch.zeros(64)},
            "lacks no tensor and has fc_norm.0.weight beside what is known",
        ),
        (
            {"lm_head.weight": torch.zeros(69, 64)},
            r"'lm_head.weight' has shape \[69, 64\], expected \[70, 64\]",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_its_tensors(
    zoo: Zoo, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = zoo["llama-gqa"]
    head = make_random_head(tmp_path, model)
    tensors = {name: tensor for name, tensor in (head.tensors | changes).items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(model.folder, 20, draft_head_dir=str(head.folder))


def test_a_folder_without_weights_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo["llama-gqa"]
    make_random_head(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"has config\.json, expected model\.safetensors or pytorch_model\.bin$"
    ):
        load(model.folder, 20, draft_head_dir=str(tmp_path))


@pytest.mark.parametrize("size", [0, 40, 300])
def test_a_file_that_was_cut_is_refused(zoo: Zoo, tmp_path: Path, size: int) -> None:
    model = zoo["llama-gqa"]
    path = make_random_head(tmp_path, model).folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match="has no tensors, or is not a whole file of safetensors"):
        load(model.folder, 20, draft_head_dir=str(tmp_path))


@pytest.mark.parametrize("as_parameters", [False, True])
def test_a_head_saved_by_torch_has_the_same_weights(zoo: Zoo, tmp_path: Path, as_parameters: bool) -> None:
    """SafeAILab publishes heads in pytorch_model.bin."""
    model = zoo["llama-gqa"]
    head = make_random_head(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    saved = {
        name: torch.nn.Parameter(each) if as_parameters and each.is_floating_point() else each
        for name, each in head.tensors.items()
    }
    torch.save(saved, tmp_path / "pytorch_model.bin")
    weights = load(model.folder, 20, draft_head_dir=str(tmp_path)).runner._draft_head._weights
    assert torch.equal(weights.token_ids, torch.arange(70) + head.tensors["d2t"])
    with Checkpoint(tmp_path, may_be_pickled=True) as checkpoint:
        assert all(torch.equal(checkpoint.read(name), each) for name, each in head.tensors.items())


class _Harmful:
    """An object whose unpickling creates a file."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("harmed"),)


def test_code_in_a_pickled_head_is_not_run(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = zoo["llama-gqa"]
    head = make_random_head(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**head.tensors, "fc.weight": _Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is not a whole file of tensors"):
        load(model.folder, 20, draft_head_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read: Weights only load failed"):
        Checkpoint(tmp_path, may_be_pickled=True)
    assert not Path("harmed").exists()


@pytest.mark.parametrize("size", [0, 40, 3000])
def test_a_pickled_head_that_was_cut_is_refused(zoo: Zoo, tmp_path: Path, size: int) -> None:
    model = zoo["llama-gqa"]
    head = make_random_head(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(head.tensors, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is not a whole file of tensors"):
        load(model.folder, 20, draft_head_dir=str(tmp_path))


def test_no_numbers_of_layers_mean_the_usual_ones(zoo: Zoo, tmp_path: Path) -> None:
    """ModelOpt writes an empty list."""
    model = make_model(tmp_path / "model", "llama-gqa", changes={"num_hidden_layers": 7})
    head = make_random_head(
        tmp_path / "head",
        model,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True},
    )
    described = with_eagle_head(read_model_description(model.folder), str(head.folder))
    assert described.decoder.eagle.read_layers == (2, 3, 4)


def test_a_model_of_few_layers_needs_the_numbers_of_layers(zoo: Zoo, tmp_path: Path) -> None:
    """The usual three numbers, 2, half and three before the end, are not all layers of a model of two."""
    model = make_model(tmp_path / "model", "llama-gqa", changes={"num_hidden_layers": 2})
    head = make_random_head(tmp_path / "head", model, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(
        ConfigError, match=r"is missing, expected three .*without the key they are \[2, 1, -1\]"
    ):
        load(model.folder, 20, draft_head_dir=str(head.folder))
