"""Prompts with pictures' rows and their rotary positions, in every way of serving, compared with transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.errors import InvalidArgument, TooLong, Unsupported
from tests.engine.driver import Driver, load_engine
from tests.engine.kernels import by_default_and
from tests.engine.pictures import (
    Picture,
    PicturePrompt,
    as_matrix,
    expected_logits,
    expected_tokens,
    make_prompt,
    request_of,
)
from tests.engine.ranks import ranks
from tests.engine.serving import Served, config_of, load, serve
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

NUM_ADDED = {"qwen3-vl": 2, "qwen3-vl-moe": 1}
BIDIRECTIONAL = ["gemma3-vision", "gemma4-large", "gemma4-moe-vision", "gemma4-unified"]
"""Models in which the tokens of a picture attend to each other in both directions."""
CASES = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5-vision", *BIDIRECTIONAL]
every_model = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(CASES, CASES),
        [
            ("qwen3-vl", None),
            ("qwen3-vl", "torch"),
            ("qwen2.5-vl", None),
            ("qwen3.5-vision", None),
            ("gemma3-vision", None),
            ("gemma3-vision", "torch"),
            ("gemma4-large", None),
        ],
    ),
)
of_one = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(["qwen3-vl", "qwen2.5-vl", "gemma3-vision"], CASES),
        [("qwen3-vl", None), ("gemma3-vision", None)],
    ),
)
METRICS = OutputOptions(return_perf_metrics=True)


def prompt_of(model: ZooModel, case: str, *parts: int | Picture, seed: int = 0) -> PicturePrompt:
    return make_prompt(model, parts, NUM_ADDED.get(case, 0), seed)


def mixed_prompts(model: ZooModel, case: str) -> list[PicturePrompt]:
    """Return prompts that begin or end with a picture, with several, and with wide and high ones."""
    wide, high, square = Picture(2, 7, 1), Picture(6, 2, 2), Picture(4, 4, 3)
    parts = [(5, wide, 6), (square, 9), (7, high), (3, wide, 2, high, 5), (4, square, 3, square, 2)]
    return [prompt_of(model, case, *each, seed=number) for number, each in enumerate(parts)]


@every_model
@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_and_tokens_are_those_of_transformers(zoo: Zoo, case: str, kernels: str | None, chunk) -> None:
    model = zoo[case]
    prompt = prompt_of(model, case, 5, Picture(3, 4, 1), 6, Picture(2, 5, 2), 4)
    request = request_of(model, 1, prompt)
    driver = Driver(load_engine(model.folder, kernels=kernels))
    row = driver.start(prompt.token_ids, prompt_table=request.prompt_table, rotary_table=request.rotary_table)
    if chunk and case in BIDIRECTIONAL:  # a chunk does not end inside a picture
        for size in (3, 2 + 12, 4, 2 + 10):
            driver.step({row: size})
    driver.generate(row, 16, chunk)
    assert row.generated == expected_tokens(model, prompt, 16)
    logits = expected_logits(model, prompt, row.generated[:-1])[len(prompt.token_ids) - 1 :]
    torch.testing.assert_close(torch.stack(row.logits), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
@every_model
def test_packed_with_text_requests_every_prompt_gets_transformers_tokens(
    zoo: Zoo, case: str, kernels: str | None, way: str
) -> None:
    model = zoo[case]
    prompts = mixed_prompts(model, case)
    requests = [request_of(model, number, prompt, 14) for number, prompt in enumerate(prompts)]
    text = Request(10, model.prompt(21), 14)
    engine = load(model.folder, num_blocks=40, max_num_sequences=8, kernels=kernels)
    served = serve(engine, config_of(way), [*requests, text])
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(model, prompt, 14)
    assert served.tokens(text) == model.greedy(text.input_token_ids, 14)


# ---------------------------------------------------------------------- the KV cache


def reused(served: Served, request: Request) -> int:
    metrics = served.result(request).perf_metrics
    assert metrics is not None
    return metrics.num_reused_blocks


@of_one
@pytest.mark.parametrize("is_identified", [True, False])
def test_the_same_pictures_share_blocks_and_others_never(
    zoo: Zoo, case: str, kernels: str | None, is_identified: bool
) -> None:
    """With identified pictures, also prompts that go on with other pictures share what is before."""
    model = zoo[case]
    first, other = Picture(4, 4, 1), Picture(4, 4, 2)
    contents = [(8, first, 10, first, 8)] * 2 + [(8, other, 10, first, 8), (8, first, 10, other, 8)]
    prompts = [prompt_of(model, case, *each) for each in contents]
    requests = [
        request_of(model, number, prompt, is_identified=is_identified, output=METRICS)
        for number, prompt in enumerate(prompts)
    ]
    served = serve(load(model.folder, 200, kernels=kernels), config_of("no-evict"), requests, per_iteration=1)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(model, prompt, request.max_new_tokens)
    counts = [reused(served, request) for request in requests]
    # 5: four blocks, and the beginning of the next one
    # A recurrent state has to be there too.
    shared = [0, 7, 0, 1] if case == "qwen3.5-vision" else [0, 7, 1, 5]
    assert counts == (shared if is_identified else [0, 7, 0, 0])


@of_one
def test_text_before_a_picture_is_shared_with_a_text_request(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    prompt = prompt_of(model, case, 20, Picture(4, 4, 1), 4)
    requests = [Request(1, prompt.token_ids[:20], 4), request_of(model, 2, prompt, output=METRICS)]
    served = serve(load(model.folder, 200, kernels=kernels), config_of("no-evict"), requests, per_iteration=1)
    assert reused(served, requests[1]) == 2
    assert served.tokens(requests[1]) == expected_tokens(model, prompt, 12)


def test_a_planted_loss_of_positions_is_detected(zoo: Zoo) -> None:
    model = zoo["qwen3-vl"]
    prompt = prompt_of(model, "qwen3-vl", 5, Picture(3, 4, 1), 6)
    lost = replace(request_of(model, 1, prompt, 16), rotary_table=None)
    no_delta = request_of(model, 2, prompt, 16)
    assert no_delta.rotary_table is not None
    no_delta = replace(no_delta, rotary_table=replace(no_delta.rotary_table, delta=0, digest=b"other"))
    served = serve(load(model.folder, 200), config_of("no-reuse"), [lost, no_delta])
    expected = expected_tokens(model, prompt, 16)
    assert served.tokens(lost) != expected
    assert served.tokens(no_delta) != expected


# ---------------------------------------------------------------------- bidirectional attention


of_bidirectional = pytest.mark.parametrize(
    ("case", "kernels"),
    with_all(
        by_default_and(BIDIRECTIONAL, BIDIRECTIONAL),
        [("gemma3-vision", None), ("gemma3-vision", "torch"), ("gemma4-large", None)],
    ),
)


@of_bidirectional
def test_a_picture_may_be_longer_than_the_window_and_end_a_prompt(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    """The second time only a part of the last picture is computed, as the other part's blocks are there."""
    model = zoo[case]
    long, short = Picture(5, 6, 1), Picture(4, 4, 2)
    contents = [(6, long, 5, short), (6, long, 5, short), (long, 3, long)]
    prompts = [prompt_of(model, case, *parts) for parts in contents]
    requests = [request_of(model, number, prompt, output=METRICS) for number, prompt in enumerate(prompts)]
    way = config_of("chunked", max_num_tokens=36)
    served = serve(load(model.folder, 200, kernels=kernels), way, requests, per_iteration=1)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(model, prompt, 12)
    assert [reused(served, request) for request in requests] == [0, 7, 0]


@of_bidirectional
def test_pictures_side_by_side_are_one_span_and_share_blocks_with_neither(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    one, other = Picture(4, 4, 1), Picture(3, 3, 2)
    contents = [(4, one, 6), (4, one, other, 6), (4, one, other, 6), (4, one, 6)]
    prompts = [prompt_of(model, case, *parts) for parts in contents]
    requests = [request_of(model, number, prompt, output=METRICS) for number, prompt in enumerate(prompts)]
    served = serve(load(model.folder, 200, kernels=kernels), config_of("no-evict"), requests, per_iteration=1)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(model, prompt, 12)
    assert [reused(served, request) for request in requests] == [0, 1, 4, 3]


@of_bidirectional
def test_causal_attention_is_detected(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    prompt = prompt_of(model, case, 5, Picture(4, 4, 1), 6)
    engine = load(model.folder, 200, kernels=kernels)
    engine.runner._first_virtual_id = None
    served = serve(engine, config_of("no-reuse"), [request_of(model, 1, prompt, 16)])
    assert served.tokens(1) != expected_tokens(model, prompt, 16)


def test_a_picture_that_no_iteration_holds_is_refused(zoo: Zoo) -> None:
    model = zoo["gemma3-vision"]
    request = request_of(model, 1, prompt_of(model, "gemma3-vision", 5, Picture(5, 6, 1), 6))
    limits = load(model.folder, 200).limits.model_limits(config_of("chunked"))
    with pytest.raises(
        TooLong, match=r"a picture of 30 tokens, .* at most 29 together: raise max_num_tokens"
    ):
        request.validate(limits)


# ---------------------------------------------------------------------- pauses, beams, drafts, sequences, ranks


@of_one
def test_paused_requests_get_the_same_tokens(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    prompts = mixed_prompts(model, case)
    requests = [request_of(model, number, prompt, 30) for number, prompt in enumerate(prompts)]
    engine = load(model.folder, 16, kernels=kernels)
    served = serve(engine, config_of("utilization"), requests, per_iteration=5)
    assert served.num_pauses > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(model, prompt, 30)


@of_one
def test_beams_are_those_of_a_search_with_transformers_logits(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    prompt = prompt_of(model, case, 5, Picture(3, 4, 1), 3)
    request = request_of(model, 1, prompt, 6, sampling=SamplingConfig(beam_width=3))
    served = serve(load(model.folder, 200, kernels=kernels), config_of("no-evict"), [request])
    assert served.beams(request) == expected_beams(model, prompt, 6, 3)


def expected_beams(model: ZooModel, prompt: PicturePrompt, num_tokens: int, width: int) -> list[list[int]]:
    """Return the beams of a search that computes every step from the beginning, best first."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(num_tokens):
        candidates = []
        for score, tokens in beams:
            best = expected_logits(model, prompt, tokens)[-1].log_softmax(0).topk(2 * width)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            candidates += [(score + value, [*tokens, token]) for value, token in pairs]
        beams = sorted(candidates, key=lambda each: -each[0])[:width]
    return [tokens for _, tokens in beams]


@of_one
def test_drafts_and_further_sequences_change_no_token(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    prompt = prompt_of(model, case, 5, Picture(3, 4, 1), 6)
    expected = expected_tokens(model, prompt, 16)
    wrong = [(token + 1) % 100 for token in expected[:4]]
    requests = [
        request_of(model, 1, prompt, 16, draft=ExternalDraft(tuple(expected[:3]))),
        request_of(model, 2, prompt, 16, draft=ExternalDraft((expected[0], *wrong[1:]))),
        request_of(model, 3, prompt, 16, prompt_lookup_num_tokens=4),
        request_of(model, 4, prompt, 16, sampling=SamplingConfig(top_k=1, num_return_sequences=3)),
    ]
    served = serve(load(model.folder, 200, 8, kernels=kernels), config_of("no-evict"), requests)
    for request in requests[:3]:
        assert served.tokens(request) == expected
    assert [served.tokens(requests[3], index) for index in range(3)] == [expected] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("case", ["qwen3-vl", "qwen2.5-vl", "gemma3-vision", "gemma4-large"])
def test_several_ranks_give_transformers_tokens(zoo: Zoo, case: str, shape: tuple[int, int]) -> None:
    model = zoo[case]
    prompts = mixed_prompts(model, case)
    requests = [request_of(model, number, prompt) for number, prompt in enumerate(prompts)]
    with ranks(model.folder, shape, num_blocks=80) as engine:
        served = serve(engine, config_of("no-evict"), requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(model, prompt, 12)


# ---------------------------------------------------------------------- invalid requests


def test_a_model_without_such_positions_refuses_them(zoo: Zoo) -> None:
    limits = load(zoo["llama-gqa"].folder, 40).limits.model_limits(config_of("no-evict"))
    table = RotaryTable.of(as_matrix(torch.ones(9, 16)), 0)
    with pytest.raises(
        Unsupported, match="mrope_rotary_cos_sin is not available: the model has no multimodal"
    ):
        Request(1, (5,) * 9, 4, rotary_table=table).validate(limits)


@pytest.mark.parametrize(
    ("rows", "width", "delta", "message"),
    [
        (8, 24, 0, "mrope_rotary_cos_sin must have 24 numbers for each of the 9 prompt tokens, got 192"),
        (9, 22, 0, "mrope_rotary_cos_sin must have 24 numbers for each of the 9 prompt tokens, got 198"),
        (9, 24, -10, r"mrope_position_deltas must be in \[-9, \d+\] for 9 prompt tokens and 4 more, got -10"),
        (9, 24, 999, r"mrope_position_deltas must be in \[-9, \d+\] for 9 prompt tokens and 4 more, got 999"),
    ],
)
def test_an_invalid_rotary_table_is_refused(
    zoo: Zoo, rows: int, width: int, delta: int, message: str
) -> None:
    limits = load(zoo["qwen3-vl"].folder, 40).limits.model_limits(config_of("no-evict"))
    table = RotaryTable.of(as_matrix(torch.ones(rows, width)), delta)
    with pytest.raises(InvalidArgument, match=message):
        Request(1, (5,) * 9, 4, rotary_table=table).validate(limits)


def test_rows_may_have_the_width_of_added_layers(zoo: Zoo) -> None:
    limits = load(zoo["qwen3-vl"].folder, 40).limits
    assert (limits.num_added_layers, limits.rotary_dim) == (2, 24)
    table = PromptTable.of(as_matrix(torch.ones(2, 128)))
    with pytest.raises(
        InvalidArgument, match=r"must have shape \[1, rows, 64 or 192\] .*, got \[1, 2, 128\]"
    ):
        table.validate(64, limits.num_added_layers)
