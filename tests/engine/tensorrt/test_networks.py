"""Networks, evaluated in flight by the interpreter, compared with transformers.

Batches mix chunks and generation, in an order other than that of the slots; some slots are idle, some are
reused by another sequence, and initially the caches hold numbers that must not be read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.adapters.lora_modules import SPLIT_MODULES
from inflight.engine.low_rank import low_rank_layers
from inflight.engine.quantize import quantize_float8, quantize_int8
from inflight.engine.tensorrt.network import lacking
from inflight.models import read_model_description
from inflight.models.sharding import Part, Shard
from tests.engine.lora import Adapter, make_adapter
from tests.engine.tensorrt.in_flight import (
    SLOTS,
    Interpreted,
    Meeting,
    Rows,
    Runner,
    Text,
    build,
    largest_error,
    relative_error,
    run,
    schedule,
    take,
    texts_of,
)
from tests.engine.tensorrt.interpreter import Node
from tests.models.zoo import Zoo, ZooModel, make_model
from tests.models.zoo_configs import CASES
from tests.tiers import with_all

EXACT = 1e-4
"""Largest error of a logit in float32; those of the zoo's models have a standard deviation of 2 to 3."""
BOUND = {"bfloat16": 0.08, "float16": 0.01}
"""As in test_precision.py: root mean square error of the logits over their standard deviation."""
REFUSED = {
    "mistral4",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3-half-rotation",
    "glm4-moe-lite",
    "gpt-oss",
    "gemma2",
    "gemma3n",
    "gemma3n-widths",
    "gemma4",
    "gemma4-moe",
    "gemma4-unified-text",
    "gemma4-shared",
    "glm4-moe",
    "ernie4.5-moe",
    "hunyuan",
    "hunyuan-moe",
    "minimax-m2",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen3-next",
    "olmo-hybrid",
    "granite-hybrid",
    "granite-hybrid-moe",
    "lfm2",
    "lfm2-moe",
    "lfm3",
    "kimi-linear",
    "llama4",
    "llama4-no-norms",
    "apertus",
    "granite-swa",
    "granite-moe-swa",
    "nemotron-h",
    "nemotron-h-dense",
    "nemotron-h-wide-experts",
    "falcon-h1",
    "falcon-h1-norm",
    "falcon-alibi",
    "bloom",
    "bloom-12-heads",
}


One = Callable[..., Interpreted]
"""Takes a model and options of the build; returns the networks of its only rank, which are defined once."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> One:
    made: dict[tuple[Path, str], Interpreted] = {}

    def of(model: ZooModel, **options: Any) -> Interpreted:
        key = model.folder, repr(sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("networks")
            (made[key],) = build(model.folder, folder, **{"dtype": "float32", **options})
        return made[key]

    return of


@pytest.mark.parametrize(
    "case",
    with_all([case for case in CASES if case not in REFUSED], ["llama-gqa", "mixtral", "gemma3", "gpt2"]),
)
def test_logits_of_every_family_are_those_of_transformers(zoo: Zoo, one: One, case: str) -> None:
    model, texts = zoo[case], texts_of(zoo[case])
    run(Runner(one(model)), texts)
    assert largest_error(model, texts) < EXACT


@pytest.mark.exhaustive
def test_refused_families_are_those_with_unsupported_features(zoo: Zoo) -> None:
    assert {case for case in CASES if lacking(read_model_description(zoo[case].folder).decoder)} == REFUSED


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("case", with_all(["llama-gqa", "mistral-window", "gpt2"], ["llama-gqa"]))
def test_error_of_other_types_is_bounded(zoo: Zoo, one: One, case: str, dtype: str) -> None:
    model, texts = zoo[case], texts_of(zoo[case])
    engine = one(model, dtype=dtype)
    assert engine.sidecar.settings.dtype == dtype
    run(Runner(engine), texts)
    assert 0 < relative_error(model, texts) < BOUND[dtype]


@pytest.mark.parametrize(("dtype", "rounded"), [("int8", quantize_int8), ("fp8", quantize_float8)])
@pytest.mark.parametrize("case", with_all(["llama-gqa", "qwen3"], ["qwen3"]))
def test_quantized_weights_equal_rounded_matrices(
    zoo: Zoo, one: One, case: str, dtype: str, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Compared with transformers, whose matrices are converted to bfloat16 and then rounded in the same way."""
    model = zoo[case]
    oracle = copy.deepcopy(model.oracle)
    with torch.no_grad():
        for module in oracle.modules():
            if isinstance(module, torch.nn.Linear):
                levels, scales = rounded(module.weight.bfloat16())
                module.weight.copy_(levels.float() * scales[:, None])
    engine = one(model, dtype=dtype)
    assert (engine.sidecar.settings.weight_dtype, engine.sidecar.settings.dtype) == (dtype, "bfloat16")
    texts = texts_of(model)
    run(Runner(engine), texts)
    assert relative_error(ZooModel(model.folder, oracle), texts) < BOUND["bfloat16"]
    assert relative_error(ZooModel(model.folder, oracle), texts) < relative_error(model, texts)


@pytest.mark.parametrize(
    ("case", "dtype"),
    with_all(
        [
            ("llama-attention-bias", "float32"),
            ("llama-gqa-tied", "bfloat16"),
            ("mixtral", "int8"),
            ("gpt2", "fp8"),
        ],
        ["llama-gqa-tied", "mixtral", "gpt2"],  # test_served_plans.py has float32
    ),
)
def test_weights_as_inputs_give_the_same_logits(zoo: Zoo, one: One, case: str, dtype: str) -> None:
    model = zoo[case]
    both: list[list[Text]] = []
    for weights in ("constants", "inputs"):
        both.append(texts_of(model))
        run(Runner(one(model, dtype=dtype, weights=weights)), both[-1])
    assert all(torch.equal(a, b) for text, other in zip(*both) for a, b in zip(text.logits, other.logits))


def test_packed_attention_gives_transformers_logits(zoo: Zoo, one: One) -> None:
    model, texts = zoo["llama-gqa"], texts_of(zoo["llama-gqa"])
    engine = one(model, attention="packed")
    assert "ctx_q_gather" not in engine.layers.inputs
    run(Runner(engine), texts)
    assert largest_error(model, texts) < EXACT


@pytest.mark.parametrize("chunk", with_all([1, 3, 40], [1, 40]))  # the other tests' chunks have 5
def test_chunks_of_any_size_give_transformers_logits(zoo: Zoo, one: One, chunk: int) -> None:
    model, texts = zoo["mistral-window"], texts_of(zoo["mistral-window"])
    run(Runner(one(model, max_num_tokens=192)), texts, chunk)
    assert largest_error(model, texts) < EXACT


def test_a_batch_changes_only_the_cache_entries_that_it_writes(zoo: Zoo, one: One) -> None:
    model = zoo["llama-gqa"]
    runner = Runner(one(model))
    before = {name: cache.clone() for name, cache in runner.caches.items()}
    runner.hidden([Rows(2, model.prompt(7), 4, True), Rows(0, (5,), 9, False)])
    for name, cache in runner.caches.items():
        changed = (cache != before[name]).any(-1).any(1)
        expected = torch.zeros_like(changed)
        expected[2, 4:11], expected[0, 9] = True, True
        assert torch.equal(changed, expected), name


# Faults that must be detected: mistakes in the inputs, or in the network.


def _in_other_order(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"slot_order": torch.arange(len(inputs["slot_order"]), dtype=torch.int32)}


def _given_back_in_other_order(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"packed_order": torch.arange(len(inputs["packed_order"]), dtype=torch.int32)}


def _written_one_behind(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"write_indices": inputs["write_indices"] + (inputs["write_indices"] > 0).int()}


def _one_key_too_many(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"gen_kv_lengths": inputs["gen_kv_lengths"] + 1}


def _positions_from_one(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"position_ids": inputs["position_ids"] + 1}


def _slots_of_others(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"ctx_slots": (inputs["ctx_slots"] + 1) % SLOTS}


@pytest.mark.parametrize(
    "mistake",
    [
        _in_other_order,
        _given_back_in_other_order,
        _written_one_behind,
        _one_key_too_many,
        _positions_from_one,
        _slots_of_others,
    ],
)
def test_wrong_inputs_change_the_logits(
    zoo: Zoo, one: One, mistake: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    model, texts = zoo["gpt2"], texts_of(zoo["gpt2"])
    runner = Runner(one(model))
    for batch in schedule(texts, 5):
        take(batch, runner.logits(batch, **mistake(runner.inputs(batch))), texts)
    assert largest_error(model, texts) > 100 * EXACT


def _turned_backwards(node: Node) -> Node:
    """Exchange cos and sin of rotary positions."""
    if node.kind != "ROTARY_EMBEDDING":
        return node
    x, cos, sin, positions = node.inputs
    return replace(node, inputs=(x, sin, cos, positions))


def _seeing_what_comes(node: Node) -> Node:
    """Return the mask of chunks with < for >."""
    if node.kind != "ELEMENTWISE" or node.attributes["op"] != "GREATER":
        return node
    return replace(node, inputs=node.inputs[::-1])


def _keys_as_values(node: Node) -> Node:
    if node.kind != "ATTENTION":
        return node
    queries, keys, _, *others = node.inputs
    return replace(node, inputs=(queries, keys, keys, *others))


def _without_square_root(node: Node) -> Node:
    """Make norms divide by the variance."""
    is_sqrt = node.kind == "UNARY" and node.attributes["op"] == "SQRT"
    return replace(node, kind="CAST", attributes={"to_type": "FLOAT"}) if is_sqrt else node


def _largest_of_the_others(node: Node) -> Node:
    """Return the experts with the lowest scores."""
    return replace(node, attributes=node.attributes | {"op": "MIN"}) if node.kind == "TOPK" else node


@pytest.mark.parametrize(
    "broken",
    [_turned_backwards, _seeing_what_comes, _keys_as_values, _without_square_root, _largest_of_the_others],
)
def test_wrongly_connected_networks_are_detected(zoo: Zoo, one: One, broken: Callable[[Node], Node]) -> None:
    model, texts = zoo["mixtral"], texts_of(zoo["mixtral"])
    engine = one(model)
    nodes = tuple(broken(node) for node in engine.layers.nodes)
    assert nodes != engine.layers.nodes
    run(Runner(replace(engine, layers=replace(engine.layers, nodes=nodes))), texts)
    assert not largest_error(model, texts) < 100 * EXACT


def test_experts_that_a_row_does_not_go_to_may_be_infinite(tmp_path: Path, one: One) -> None:
    """In float16 an expert's result may overflow for rows that are not routed to the expert."""
    model = make_model(tmp_path / "model", "mixtral")
    with torch.no_grad():
        model.oracle.model.layers[-1].mlp.experts.gate_up_proj[0] = torch.inf
    model.oracle.save_pretrained(model.folder)
    runner, tokens = Runner(one(model)), model.prompt(30)
    logits, expected = runner.logits([Rows(1, tokens, 0, True)]), model.logits(tokens)
    is_there = expected.isfinite().all(1)
    assert 0 < is_there.sum() < len(tokens)
    torch.testing.assert_close(logits[is_there], expected[is_there], rtol=0, atol=EXACT)


def test_hidden_states_between_layers_are_those_of_transformers(zoo: Zoo, one: One) -> None:
    model = zoo["gemma3"]
    names = ("hidden_states_0", "hidden_states_2")
    runner = Runner(one(model, additional_outputs=names))
    tokens = model.prompt(12)
    hidden = runner.hidden([Rows(3, tokens, 0, True)])
    with torch.inference_mode():
        found = model.oracle(torch.tensor([tokens]), output_hidden_states=True)
    for name in names:
        expected = found.hidden_states[int(name[-1])][0]
        torch.testing.assert_close(runner.additional[name], expected, rtol=1e-4, atol=1e-4)
    normalized = runner.head(hidden)["normalized"]
    torch.testing.assert_close(normalized, found.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-gqa", "gemma3"])
def test_prompt_tables_give_the_logits_of_inputs_embeds(zoo: Zoo, one: One, case: str) -> None:
    model = zoo[case]
    runner = Runner(one(model))
    tokens, virtual = model.prompt(9), torch.randn((3, 64), generator=torch.Generator().manual_seed(1))
    rows = [1, 2, 6]
    embedding = model.oracle.get_input_embeddings()
    with torch.inference_mode():
        embedded = embedding.weight[torch.tensor(tokens)].clone()
        embedded[rows] = virtual
        scale = getattr(embedding, "embed_scale", torch.tensor(1.0))
        expected = model.oracle(inputs_embeds=(embedded * scale)[None]).logits[0]
    batch = [
        Rows(4, (7,), 0, False),
        Rows(1, tuple(0 if i in rows else t for i, t in enumerate(tokens)), 0, True),
    ]
    picked = runner.inputs(batch)["embedding_gather"].clone()
    picked[[1 + row for row in rows]] = torch.arange(3, dtype=torch.int32) + len(picked)
    logits = runner.logits(batch, embedding_gather=picked, virtual_embeddings=virtual)
    torch.testing.assert_close(logits[1:], expected, rtol=1e-4, atol=EXACT)
    torch.testing.assert_close(logits[0], model.logits((7,))[0], rtol=1e-4, atol=EXACT)


def _bank(runner: Runner, part: Part, adapters: dict[int, Adapter]) -> dict[str, Tensor]:
    """Return the matrices of adapters by slot, concatenated."""
    decoder = read_model_description(next(iter(adapters.values())).oracle.folder).decoder
    found = {
        name: value for name, value in runner.inputs([Rows(0, (1,), 0, True)]).items() if "lora_" in name
    }
    for adapter in adapters.values():
        layers = low_rank_layers(adapter.weights, decoder, part)
        for layer, modules in layers.items():
            for module in SPLIT_MODULES:
                if module in modules:
                    a, b = (f"lora_{kind}_{layer}_{module.text}" for kind in "ab")
                    found[a] = torch.cat((found[a], modules[module].a))
                    found[b] = torch.cat((found[b], modules[module].b), 1)
    del found["lora_mask"]
    return found


def _mask(batch: list[Rows], ranks: dict[int, int]) -> Tensor:
    owners = torch.tensor([slot for slot, rank in ranks.items() for _ in range(rank)])
    slots = torch.tensor([rows.slot for rows in batch for _ in rows.token_ids])
    return (slots[:, None] == owners).float()


@pytest.mark.parametrize("num_ranks", with_all([1, 2], [2]))
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
def test_adapters_give_the_results_of_merged_weights(
    zoo: Zoo, tmp_path: Path, case: str, num_ranks: int
) -> None:
    model = zoo[case]
    adapters = {1: make_adapter(model, 1, r=4), 3: make_adapter(model, 2, r=7)}
    engines = build(model.folder, tmp_path, dtype="float32", max_lora_rank=16, tensor_parallel_size=num_ranks)
    whole = Part.whole(read_model_description(model.folder).decoder)

    def logits(rank: int, meeting: Meeting) -> list[Text]:
        texts = [Text(slot, model.prompt(14, seed=slot), 11) for slot in (0, 1, 3)]
        runner = Runner(engines[rank], meeting.rank(rank))
        bank = _bank(runner, Part(Shard(num_ranks, rank), whole.layers), adapters)
        for batch in schedule(texts, 5):
            mask = _mask(batch, {1: 4, 3: 7})
            take(batch, runner.logits(batch, lora_mask=mask, **bank), texts)
        return texts

    for texts in _in_step(num_ranks, logits):
        for text in texts:
            of = adapters[text.slot].merged() if text.slot in adapters else model
            assert largest_error(of, [text]) < EXACT
            assert text.slot not in adapters or largest_error(model, [text]) > 100 * EXACT


@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "olmo2", "qwen2-moe", "opt", "granite"], ["olmo2", "qwen2-moe"])
)
def test_ranks_in_step_give_the_results_of_one(zoo: Zoo, tmp_path: Path, case: str) -> None:
    model = zoo[case]
    engines = build(model.folder, tmp_path, dtype="float32", tensor_parallel_size=2)

    def logits(rank: int, meeting: Meeting) -> list[Text]:
        texts, communicator = texts_of(model), meeting.rank(rank)
        run(Runner(engines[rank], communicator), texts)
        assert communicator.num_calls
        return texts

    for texts in _in_step(2, logits):
        assert largest_error(model, texts) < EXACT


def _in_step(num_ranks: int, work: Callable[[int, Meeting], list[Text]]) -> list[list[Text]]:
    """Run the ranks in step and return the result of each."""
    meeting = Meeting(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return [each.result() for each in [pool.submit(work, rank, meeting) for rank in range(num_ranks)]]
