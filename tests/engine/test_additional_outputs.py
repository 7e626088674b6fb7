"""Hidden states and top logits of prompts and generated tokens, compared with transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.additional_outputs import WantedOutput, parse_outputs
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.additional_outputs import HiddenStates, offer
from inflight.engine.collectives import ALONE
from inflight.engine.cpu.decoder import NativeDecoder
from inflight.engine.engine import ModelEngine
from inflight.errors import ConfigError, InvalidArgument
from tests.engine.kernels import by_default_and
from tests.engine.paging import load_paged
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.engine.serving import WAYS, Served, config_of, load, serve, to_torch
from tests.engine.tape import Tape
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

CASES = ["llama-gqa", "qwen2", "gpt2"]
every_case = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(by_default_and(CASES, CASES), [("llama-gqa", None), ("gpt2", "torch")]),
)
OFFERED = "hidden_states_0:context, hidden_states_1:context, hidden_states_2, hidden_states_3:context, "
OFFERED += "last_hidden_state:context, top_5_logits:context, top_5_logit_ids:context"
OUTPUTS = parse_outputs(OFFERED)
NUM_TOKENS = 9


def load_offering(
    model: ZooModel, kernels: str | None = None, outputs: str = OFFERED, num_blocks: int = 64
) -> ModelEngine:
    return load(model.folder, num_blocks, kernels=kernels, additional_model_outputs=parse_outputs(outputs))


@torch.inference_mode()
def expected(model: ZooModel, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return transformers' additional outputs of every position."""
    found = model.oracle(torch.tensor([list(tokens)]), output_hidden_states=True)
    base = model.oracle.base_model(torch.tensor([list(tokens)])).last_hidden_state
    top = found.logits[0].topk(5)
    return {
        **{f"hidden_states_{i}": states[0] for i, states in enumerate(found.hidden_states)},
        "last_hidden_state": base[0],
        "top_5_logits": top.values,
        "top_5_logit_ids": top.indices.float(),
    }


def assert_outputs(
    model: ZooModel,
    request: Request,
    result: SequenceResult,
    tokens: Sequence[int],
    outputs: Sequence[WantedOutput] = OUTPUTS,
) -> None:
    """Check that exactly the requested outputs are returned, each with all of its rows."""
    wanted = expected(model, [*request.input_token_ids, *tokens])
    length = request.prompt_length
    names = [f"context_{each.name}" for each in outputs if each.gather_context]
    names += [f"generation_{each.name}" for each in outputs]
    found = {each.name: each.tensors for each in result.additional_outputs}
    assert list(found) == names
    for name, (tensor,) in found.items():
        part, _, plain = name.partition("_")
        rows = slice(length) if part == "context" else slice(length - 1, length - 1 + len(tokens))
        torch.testing.assert_close(to_torch(tensor), wanted[plain][rows], rtol=0, atol=1e-3, msg=name)


def request_of(
    model: ZooModel, number: int, length: int, outputs: Sequence[WantedOutput] = OUTPUTS, **options
) -> Request:
    output = OutputOptions(additional_outputs=tuple(outputs))
    return Request(number, model.prompt(length, number), NUM_TOKENS, output=output, **options)


@every_case
@pytest.mark.parametrize("way", with_all(WAYS, ["utilization-chunked-no-reuse", "chunked"]))
def test_additional_outputs_are_those_of_transformers(
    zoo: Zoo, case: str, kernels: str | None, way: str
) -> None:
    """Packed with requests for some or none of the outputs; in chunks, with pauses, streamed and not."""
    model = zoo[case]
    requests = [
        request_of(model, 1, 27),
        request_of(model, 2, 40, OUTPUTS[3:5], streaming=True),
        request_of(model, 3, 35, [WantedOutput("hidden_states_1")]),
        Request(4, model.prompt(40, 2), NUM_TOKENS),  # has the second request's prompt
        request_of(model, 5, 70, streaming=True),
    ]
    num_blocks = 11 if way.startswith("utilization") else 64
    served = serve(load_offering(model, kernels, num_blocks=num_blocks), config_of(way), requests)
    for request in requests:
        tokens = served.tokens(request)
        assert tokens == model.greedy(request.input_token_ids, NUM_TOKENS)
        outputs = request.output.additional_outputs
        assert_outputs(model, request, served.result(request), tokens, outputs)
    if way.startswith("utilization"):
        assert served.num_pauses
    assert_deltas(served, requests[4])


def assert_deltas(served: Served, request: Request) -> None:
    """Check that each response has the rows of its own tokens, and only the first one those of the prompt."""
    first, *others = [response.result for response in served.responses[request.request_id, 0]]
    assert any(each.name.startswith("context_") for each in first.additional_outputs)
    assert others
    for result in others:
        assert all(each.name.startswith("generation_") for each in result.additional_outputs)
    for result in (first, *others):
        rows = {each.tensors[0].shape[0] for each in result.additional_outputs if "generation_" in each.name}
        assert rows == {result.num_output_tokens[0]}


@every_case
def test_only_requests_without_outputs_of_the_prompt_reuse_blocks(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    engine = load_offering(model, kernels)
    rows_alone = [WantedOutput(each.name) for each in OUTPUTS]
    prompt = model.prompt(60)
    wanted = [
        OutputOptions(return_perf_metrics=True, additional_outputs=tuple(outputs))
        for outputs in ((), rows_alone, OUTPUTS)
    ]
    requests = [Request(number, prompt, NUM_TOKENS, output=output) for number, output in enumerate(wanted)]
    served = serve(engine, config_of("no-evict"), requests, per_iteration=1)
    reused = [served.result(request).perf_metrics.num_reused_blocks for request in requests]
    assert reused[0] == 0 and reused[1] > 0 and reused[2] == 0
    for request in requests[1:]:
        tokens = served.tokens(request)
        assert_outputs(model, request, served.result(request), tokens, request.output.additional_outputs)


@every_case
def test_rejected_drafts_have_no_rows(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    prompt = model.prompt(30)
    tokens = model.greedy(prompt, NUM_TOKENS)
    half_right = ExternalDraft((*tokens[:3], (tokens[3] + 1) % 200, tokens[4]))
    output = OutputOptions(additional_outputs=OUTPUTS)
    by_draft = Request(1, prompt, NUM_TOKENS, output=output, draft=half_right)
    repeated = (*prompt[:10], *prompt[:10], *prompt[:10])
    by_lookup = Request(2, repeated, NUM_TOKENS, output=output, prompt_lookup_num_tokens=4)
    served = serve(load_offering(model, kernels), config_of("no-evict"), [by_draft, by_lookup])
    for request in (by_draft, by_lookup):
        found = served.tokens(request)
        assert found == model.greedy(request.input_token_ids, NUM_TOKENS)
        assert_outputs(model, request, served.result(request), found)


@every_case
def test_every_sequence_of_a_request_has_its_own_rows(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    sampling = SamplingConfig(num_return_sequences=3, top_k=20, temperature=1.5, random_seed=7)
    request = request_of(model, 1, 30, sampling=sampling)
    served = serve(load_offering(model, kernels), config_of("no-evict"), [request])
    answers = [served.tokens(request, index) for index in range(3)]
    assert len({tuple(tokens) for tokens in answers}) == 3
    for index, tokens in enumerate(answers):
        assert_outputs(model, request, served.result(request, index), tokens)


@pytest.mark.parametrize(
    "topology", with_all([pytest.param(sizes, id=name) for name, sizes in TOPOLOGIES.items()], [(2, 2)])
)
@every_case
def test_several_ranks_give_the_additional_outputs_of_one(
    zoo: Zoo, case: str, kernels: str | None, topology: tuple[int, int]
) -> None:
    model = zoo[case]
    outputs = OUTPUTS[2:] if topology[1] > 1 else OUTPUTS
    requests = [request_of(model, number, 30 + number, outputs) for number in range(3)]
    with ranks(model.folder, topology, kernels=kernels, additional_model_outputs=outputs) as engine:
        served = serve(engine, config_of("no-evict"), requests)
    for request in requests:
        assert_outputs(model, request, served.result(request), served.tokens(request), outputs)


def test_outputs_that_only_earlier_stages_have_are_refused_at_load(zoo: Zoo) -> None:
    outputs = parse_outputs("hidden_states_1")
    with (
        pytest.raises(
            ConfigError, match=r"has hidden_states_1, expected hidden_states_2 to .*_3, which the last"
        ),
        ranks(zoo["gpt2"].folder, (1, 2), additional_model_outputs=outputs),
    ):
        pass


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("hidden_states_4", "expected hidden_states_0 to hidden_states_3, which the model has"),
        ("top_212_logits", "top_212_logits, expected at most 211"),
    ],
)
def test_outputs_that_the_model_lacks_are_refused_at_load(zoo: Zoo, outputs: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_offering(zoo["gpt2"], outputs=outputs)


@pytest.mark.parametrize(
    ("output", "sampling", "message"),
    [
        (WantedOutput("hidden_states_3"), {}, "no output 'hidden_states_3'; .* has last_hidden_state"),
        (WantedOutput("last_hidden_state", True), {}, "have to say last_hidden_state:context"),
        (WantedOutput("last_hidden_state"), {"beam_width": 2}, "needs beam_width 1"),
    ],
)  # fmt: skip
def test_outputs_that_are_not_offered_are_refused_at_admission(
    zoo: Zoo, output, sampling, message: str
) -> None:
    engine = load_offering(zoo["gpt2"], outputs="last_hidden_state")
    config = config_of("no-evict")
    request = Request(
        1,
        (5, 6, 7),
        4,
        sampling=SamplingConfig(**sampling),
        output=OutputOptions(additional_outputs=(output,)),
    )
    with pytest.raises(InvalidArgument, match=message):
        request.validate(engine.limits.model_limits(config))


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_hidden_states_are_not_kept_unless_a_request_asks_for_them(
    zoo: Zoo, kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states are neither kept nor normalized a second time if no request asks for them."""
    model = zoo["llama-gqa"]
    engine = load_offering(model, kernels)
    kept = []
    monkeypatch.setattr(HiddenStates, "keep", lambda states, *_: kept.append(states.wanted))
    monkeypatch.setattr(engine.runner.decoder, "normalize", lambda hidden: pytest.fail("nobody asked"))
    logits = OutputOptions(return_generation_logits=True, return_context_logits=True)
    serve(engine, config_of("no-evict"), [Request(1, model.prompt(20), 5, output=logits)])
    assert set(kept) <= {frozenset()}


def test_calls_of_compiled_layers_end_where_hidden_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An addition replaces the compiled layers, so that the test runs on every machine."""
    decoder = object.__new__(NativeDecoder)
    vars(decoder).update(
        _layers=[None] * 4,
        _first_layer=2,
        collectives=ALONE,
        _handle=None,
        _library=SimpleNamespace(prepare=lambda *_: True),
    )
    calls = []

    def run(batch: object, x: torch.Tensor, first: int, last: int) -> None:
        calls.append((first, last))
        x += last - first

    monkeypatch.setattr(decoder, "_begin", lambda *_: (None, torch.full((3, 2), 2.0)), raising=False)
    monkeypatch.setattr(decoder, "_run", run, raising=False)
    nothing: Any = None
    packed: Any = SimpleNamespace(virtual=None)
    for wanted, expected_calls in (([], [(0, 4)]), ([2, 3, 5], [(0, 1), (1, 3), (3, 4)])):
        calls.clear()
        between = HiddenStates(frozenset(wanted))
        assert decoder.forward(packed, nothing, None, between).tolist() == [[6.0, 6.0]] * 3
        assert calls == expected_calls
        assert {number: hidden[0, 0].item() for number, hidden in between.found.items()} == {
            number: number for number in wanted
        }


@pytest.mark.parametrize(
    ("outputs", "is_replayed"),
    [("last_hidden_state, top_5_logits", True), ("last_hidden_state, hidden_states_1", False)],
)
def test_recorded_batches_return_outputs_after_all_layers(zoo: Zoo, outputs: str, is_replayed: bool) -> None:
    """An iteration with a request for inner layers is not replayed."""
    model, tape, wanted = zoo["llama-gqa"], Tape(), parse_outputs(outputs)
    engine = load_paged(model.folder, 60, capture=tape)
    engine.limits = replace(engine.limits, additional_outputs=offer(wanted, 3, 64, VOCAB_SIZE))
    requests = [request_of(model, 1, 27, wanted), request_of(model, 2, 14, wanted[:1])]
    alone = [requests[0]] if not is_replayed else requests
    served = serve(engine, config_of("no-evict"), alone)
    assert bool(tape.replayed) == is_replayed
    for request in alone:
        tokens = served.tokens(request)
        assert_outputs(model, request, served.result(request), tokens, request.output.additional_outputs)
