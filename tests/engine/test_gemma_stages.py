"""Pipeline stages of Gemma 3n and Gemma 4: residual streams, per-layer embeddings, and layers that read another
layer's keys and values, which are in that layer's stage. Results equal those of transformers, in float32."""

from __future__ import annotations

import pytest
import torch

from inflight.additional_outputs import parse_outputs
from inflight.core.request.request import OutputOptions, Request
from inflight.errors import ConfigError
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.ranks import ranks
from tests.engine.serving import WAYS, config_of, load, serve, to_torch
from tests.models.zoo import Zoo, ZooModel, make_model
from tests.tiers import examples, with_all

LOGITS = OutputOptions(return_generation_logits=True, return_context_logits=True)
NUM_TOKENS = 16
TOPOLOGIES = {
    "gemma3n": [(1, 2), (2, 2)],
    "gemma3n-widths": [(1, 2), (1, 3), (2, 2)],
    "gemma3n-deep": [(1, 2), (1, 3), (2, 2)],
    "gemma4-shared": [(1, 2), (2, 2)],
}
"""(tp_size, pp_size) by case. In some a stage is neither the first nor the last."""
DEEP = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
    "num_kv_shared_layers": 3,
    "activation_sparsity_pattern": [0.7, 0.0, 0.5, 0.7, 0.0, 0.6, 0.0],
}
"""Seven layers, of which the last five belong together."""
on_stages = pytest.mark.parametrize(
    ("case", "topology"),
    with_all(
        [(case, sizes) for case, all_sizes in TOPOLOGIES.items() for sizes in all_sizes],
        [("gemma3n-deep", (2, 2)), ("gemma4-shared", (1, 2))],
    ),
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ZooModel:
    """Gemma 3n with `DEEP`."""
    return make_model(tmp_path_factory.mktemp("deep"), "gemma3n", changes=DEEP)


@pytest.fixture
def model(case: str, zoo: Zoo, deep: ZooModel) -> ZooModel:
    """The model of a case."""
    return deep if case == "gemma3n-deep" else zoo[case]


@on_stages
def test_logits_of_prompts_and_tokens_are_those_of_transformers(
    model: ZooModel, topology: tuple[int, int]
) -> None:
    requests = [Request(n, model.prompt(27 + n, n), NUM_TOKENS, output=LOGITS) for n in range(3)]
    with ranks(model.folder, topology) as engine:
        served = serve(engine, config_of("no-evict"), requests)
    for request in requests:
        result, length = served.result(request), request.prompt_length
        tokens = served.tokens(request)
        assert tokens == model.greedy(request.input_token_ids, NUM_TOKENS)
        expected = model.logits([*request.input_token_ids, *tokens])
        for found, wanted in (
            (result.generation_logits[0], expected[length - 1 : -1]),
            (result.context_logits, expected[:length]),
        ):
            torch.testing.assert_close(to_torch(found), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", with_all(list(WAYS), ["utilization-chunked-no-reuse"]))
@on_stages
def test_beams_drafts_and_chunks_give_transformers_tokens(
    model: ZooModel, topology: tuple[int, int], way: str
) -> None:
    requests = some_of_everything(model, longest=examples(18, all=30))
    with ranks(model.folder, topology, num_blocks=26, max_num_sequences=8) as engine:
        served = serve(engine, config_of(way), requests)
    assert served.most_in_flight == topology[1]
    assert_as_transformers(model, served, requests)
    assert served.num_pauses > 0 or "utilization" not in way


@pytest.mark.parametrize(("case", "first"), [("gemma3n-deep", 2), ("gemma4-shared", 1)])
def test_the_last_stage_offers_the_hidden_states_of_its_layers(model: ZooModel, first: int) -> None:
    """It has more than half of the layers."""
    outputs = parse_outputs(f"hidden_states_{first}:context, hidden_states_{first + 1}, last_hidden_state")
    wanted = OutputOptions(additional_outputs=outputs)
    requests = [Request(number, model.prompt(30 + number, number), 9, output=wanted) for number in range(2)]
    one = serve(load(model.folder, 64, additional_model_outputs=outputs), config_of("no-evict"), requests)
    with ranks(model.folder, (1, 2), additional_model_outputs=outputs) as engine:
        many = serve(engine, config_of("no-evict"), requests)
    for request in requests:
        pairs = zip(
            many.result(request).additional_outputs, one.result(request).additional_outputs, strict=True
        )
        for found, expected in pairs:
            assert found.name == expected.name
            torch.testing.assert_close(
                to_torch(found.tensors[0]), to_torch(expected.tensors[0]), rtol=0, atol=1e-4
            )
    earlier = parse_outputs(f"hidden_states_{first - 1}")
    with pytest.raises(
        ConfigError, match=f"has hidden_states_{first - 1}, expected hidden_states_{first} to"
    ):
        ranks(model.folder, (1, 2), additional_model_outputs=earlier).__enter__()


@pytest.mark.parametrize("case", ["gemma4-shared"])
def test_more_stages_than_divisible_layers_are_refused(model: ZooModel) -> None:
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size is 3, expected at most 2: layers 1 to 5 must"
    ):
        ranks(model.folder, (1, 3)).__enter__()
