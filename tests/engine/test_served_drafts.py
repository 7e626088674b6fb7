"""Drafts through the whole batcher: fewer iterations if they are right, and always the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from inflight.config import Speculation
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.sampling import reference
from tests.engine.serving import Served, config_of, load, serve, to_torch
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

every_case = pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "mistral-window", "gpt2"], ["mistral-window"])
)
"""Families differ in one pass over drafts, which test_drafts.py tests; by default one with windows."""
NUM_TOKENS = 30
METRICS = OutputOptions(return_perf_metrics=True)
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=1.2, top_k=8, top_p=0.9, random_seed=3),
    SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.3, no_repeat_ngram_size=3),
    SamplingConfig(temperature=0.8, top_p=0.9, presence_penalty=0.5, top_p_decay=0.95, random_seed=4),
)


def make_requests(model: ZooModel) -> list[Request]:
    """Return a request for each of SAMPLINGS, twice, with bad words for some."""
    return [
        Request(
            number,
            (*(model.prompt(17) if number % 2 else ()), *model.prompt(5 + 3 * number, number)),
            NUM_TOKENS,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            output=METRICS,
            bad_words=((11,), (12, 13)) if number % 3 else (),
        )
        for number in range(2 * len(SAMPLINGS))
    ]


def plain_run(model: ZooModel, requests: Sequence[Request]) -> list[list[int]]:
    """Return their tokens without drafts; cached, because several tests ask for the same ones."""
    return _plain_run(model, tuple(requests))


@cache
def _plain_run(model: ZooModel, requests: tuple[Request, ...]) -> list[list[int]]:
    served = serve(load(model.folder, 200, 8), config_of("no-evict"), requests)
    return [served.tokens(request) for request in requests]


def accepted(served: Served, request: Request) -> tuple[int, int]:
    """Return the numbers of accepted and of verified draft tokens."""
    metrics = served.result(request).perf_metrics
    return metrics.num_accepted_draft_tokens, metrics.num_draft_tokens


@every_case
@pytest.mark.parametrize("way", ["no-evict", "utilization", "utilization-chunked-no-reuse"])
def test_external_drafts_change_no_token(zoo: Zoo, case: str, way: str) -> None:
    """A batch has drafts that are entirely right, partly right, and wrong."""
    model = zoo[case]
    plain = make_requests(model)
    expected = plain_run(model, plain)
    requests, num_right = [], []
    for request, tokens in zip(plain, expected, strict=True):
        right = (6, 3, 0)[request.request_id % 3]
        wrong = [(token + 1) % 200 for token in tokens[right:6]]
        requests.append(replace(request, draft=ExternalDraft((*tokens[:right], *wrong))))
        num_right.append((right, 6))
    served = serve(load(model.folder, 30, 6), config_of(way), requests)
    assert [served.tokens(request) for request in requests] == expected
    assert [accepted(served, request) for request in requests] == num_right


@every_case
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_drafts_with_logits_are_accepted_as_by_the_reference(
    zoo: Zoo, case: str, threshold: float | None
) -> None:
    """The expected tokens are computed by `sampling.reference` from transformers' logits."""
    model = zoo[case]
    requests = []
    for plain in make_requests(model):
        # A draft model similar to the model: its logits plus noise, and the most likely tokens of these.
        known, rows = list(plain.input_token_ids), []
        for noise in torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(plain.request_id)):
            rows.append(model.logits(known)[-1] + noise)
            known.append(int(rows[-1].argmax()))
        logits = FloatTensor((5, VOCAB_SIZE), torch.stack(rows).numpy().tobytes())
        requests.append(replace(plain, draft=ExternalDraft(tuple(known[-5:]), logits, threshold)))
    served = serve(load(model.folder, 30, 6), config_of("utilization-chunked-no-reuse"), requests)
    for request in requests:
        tokens = list(request.input_token_ids)
        exact = model.logits([*tokens, *request.draft.token_ids])[len(tokens) - 1 :].tolist()
        given = to_torch(request.draft.logits).tolist()
        new = reference.verify_drafts(exact, request, tokens, request.draft.token_ids, 0, given)
        assert accepted(served, request) == (len(new) - 1, 5)
        tokens += new
        tokens.append(reference.next_token(model.logits(tokens)[-1].tolist(), request, tokens))
        assert served.tokens(request)[: len(new) + 1] == tokens[request.prompt_length :]
    counts = [accepted(served, request)[0] for request in requests]
    assert 0 < sum(counts) < 5 * len(counts)


@every_case
@pytest.mark.parametrize("way", ["no-evict", "utilization", "utilization-chunked-no-reuse"])
def test_prompt_lookup_changes_no_token(zoo: Zoo, case: str, way: str) -> None:
    """Prompts already contain much of the output, after n-grams that are repeated."""
    model = zoo[case]
    plain = make_requests(model)
    longer, looking = [], []
    for request, tokens in zip(plain, plain_run(model, plain), strict=True):
        prompt = (*request.input_token_ids, *tokens, *request.input_token_ids)
        longer.append(replace(request, input_token_ids=prompt))
        looking.append(replace(longer[-1], prompt_lookup_num_tokens=5))
    expected = plain_run(model, longer)
    served = serve(load(model.folder, 60, 6), config_of(way), looking)
    assert [served.tokens(request) for request in looking] == expected
    counts = [accepted(served, request) for request in looking]
    assert sum(count for _, count in counts) > 0, "nothing was ever looked up"


@every_case
@pytest.mark.parametrize("way", ["no-evict", "utilization-chunked-no-reuse"])
def test_suffix_decoding_changes_no_token(zoo: Zoo, case: str, way: str) -> None:
    """The same requests come twice; the later ones are drafted from the answers of the earlier ones."""
    model = zoo[case]
    first = make_requests(model)
    again = [replace(request, request_id=request.request_id + len(first)) for request in first]
    config = replace(config_of(way), speculative_decoding_mode=Speculation(Speculation.SUFFIX, 5))
    served = serve(load(model.folder, 60, 6), config, [*first, *again])
    assert [served.tokens(request) for request in [*first, *again]] == 2 * plain_run(model, first)
    right = [sum(accepted(served, request)[0] for request in each) for each in (first, again)]
    assert right[1] > 3 * right[0] and right[1] > NUM_TOKENS


@every_case
def test_prompt_lookup_saves_iterations(zoo: Zoo, case: str) -> None:
    """The output of a model that repeats itself is predicted."""
    model = zoo[case]
    circle = model.prompt(6)
    sampling = SamplingConfig(repetition_penalty=0.05)  # makes earlier tokens likely
    requests = [
        Request(0, circle * 4, 60, sampling=sampling, output=METRICS, prompt_lookup_num_tokens=count)
        for count in (0, 6)
    ]
    engine = load(model.folder, 100)
    plain, looking = (serve(engine, config_of("no-evict"), [request]) for request in requests)
    assert looking.tokens(0) == plain.tokens(0)
    assert looking.num_iterations < plain.num_iterations
    assert plain.num_iterations == 60
    right, verified = accepted(looking, requests[1])
    assert 0 < right <= verified
    assert right == 60 - looking.num_iterations
