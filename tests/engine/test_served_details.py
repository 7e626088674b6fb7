"""Log probs and logits of generated tokens: the model's own, as transformers computes them."""

from __future__ import annotations

import pytest
import torch

from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from tests.engine.serving import Served, config_of, load, serve, to_torch
from tests.models.zoo import Zoo, ZooModel

CASES = ["llama-gqa", "mistral-window", "gpt2"]
NUM_TOKENS = 20
EVERYTHING = OutputOptions(
    return_log_probs=True,
    num_top_log_probs=4,
    return_prompt_log_probs=True,
    return_context_logits=True,
    return_generation_logits=True,
)
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=1.4, top_k=30, random_seed=1),
    SamplingConfig(repetition_penalty=1.5, frequency_penalty=0.5, no_repeat_ngram_size=2),
    SamplingConfig(temperature=0.7, top_p=0.9, presence_penalty=1.0, num_return_sequences=2, random_seed=2),
)


def make_requests(model: ZooModel, output: OutputOptions = EVERYTHING) -> list[Request]:
    return [
        Request(
            number,
            (*model.prompt(17), *model.prompt(3 + 5 * number, number)),
            NUM_TOKENS,
            streaming=number % 2 == 0,
            sampling=sampling,
            output=output,
            bad_words=((5,),),
            prompt_lookup_num_tokens=3 if number == 2 else 0,
            draft=ExternalDraft(model.prompt(4, 9)) if number == 1 else None,
        )
        for number, sampling in enumerate(SAMPLINGS)
    ]


def assert_details(model: ZooModel, request: Request, served: Served, sequence_index: int = 0) -> None:
    result, length = served.result(request, sequence_index), request.prompt_length
    tokens = served.tokens(request, sequence_index)
    assert len(tokens) == NUM_TOKENS
    exact = model.logits([*request.input_token_ids, *tokens])
    context, logits = to_torch(result.context_logits), to_torch(result.generation_logits[0])
    torch.testing.assert_close(context, exact[:length], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits, exact[length - 1 : -1], rtol=0, atol=1e-4)

    log_probs = logits.log_softmax(dim=-1)
    chosen = log_probs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    assert list(result.log_probs[0]) == pytest.approx(chosen.tolist(), abs=1e-6)
    assert result.cum_log_probs[0] == pytest.approx(sum(result.log_probs[0]), abs=1e-9)
    likeliest = log_probs.topk(4)
    assert [list(top.token_ids) for top in result.top_log_probs[0]] == likeliest.indices.tolist()
    values = torch.tensor([top.log_probs for top in result.top_log_probs[0]])
    torch.testing.assert_close(values, likeliest.values, rtol=0, atol=1e-6)

    following = torch.tensor(request.input_token_ids[1:])[:, None]
    expected = context.log_softmax(dim=-1)[:-1].gather(1, following).squeeze(1)
    assert list(result.prompt_log_probs) == pytest.approx([0.0, *expected.tolist()], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["no-evict", "utilization", "utilization-chunked-no-reuse"])
def test_log_probs_and_logits_are_the_models_own(zoo: Zoo, case: str, way: str) -> None:
    """Streamed or not, paused, in chunks, with drafts; penalties and bans have no influence."""
    model = zoo[case]
    requests = make_requests(model)
    served = serve(load(model.folder, 22, 5), config_of(way), requests)
    for request in requests:
        for index in range(request.sampling.num_sequences):
            assert_details(model, request, served, index)
    if "utilization" in way:
        assert served.num_pauses > 0


def test_asking_for_details_changes_no_token(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    asking, silent = make_requests(model), make_requests(model, OutputOptions())
    engine = load(model.folder, 100, 5)
    answers = [serve(engine, config_of("no-evict"), requests) for requests in (asking, silent)]
    for request, other in zip(asking, silent, strict=True):
        for index in range(request.sampling.num_sequences):
            assert answers[0].tokens(request, index) == answers[1].tokens(other, index)
    result = answers[1].result(silent[0])
    details = ("log_probs", "cum_log_probs", "top_log_probs", "prompt_log_probs")
    logits = ("context_logits", "generation_logits")
    assert [getattr(result, name) for name in (*details, *logits)] == [None] * 6
