"""BeamSearch over a small model's logits against `generate` of transformers: tokens and scores, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import transformers
from torch import Tensor

from inflight.core.request.beam_search import BeamCandidates, BeamSearch, Hypothesis
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from tests.tiers import with_all

VOCAB_SIZE = 48
MAX_NEW_TOKENS = 12
ONE_END_ID, SEVERAL_END_IDS = (7,), (7, 19, 33)
PROMPTS = ((3, 11, 40, 8), (29,), (5, 6, 5, 6, 17, 2))
EARLY_STOPPING = {0: False, 1: True, 2: "never"}

Processors = transformers.LogitsProcessorList


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    torch.manual_seed(20)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def make_request(prompt: Sequence[int], end_ids: tuple[int, ...] = (), **fields) -> Request:
    words = {name: fields.pop(name) for name in ("stop_words", "stop_words_after") if name in fields}
    return Request(
        1, tuple(prompt), MAX_NEW_TOKENS, end_ids=end_ids, sampling=SamplingConfig(**fields), **words
    )


@torch.no_grad()
def search(
    model: transformers.PreTrainedModel,
    request: Request,
    process: Callable[[Tensor, Tensor], Tensor] = lambda ids, logits: logits,
) -> list[Hypothesis]:
    """Search as the device does for a beam group, computing every beam from its first token."""
    beams = BeamSearch(request)
    while not beams.done:
        rows = [request.input_token_ids + beams.row_tokens(row) for row in range(beams.num_rows)]
        ids = torch.tensor(rows)
        logits = model(ids, use_cache=False).logits[:, -1].float()
        model_log_probs = logits.log_softmax(-1)
        ranked = process(ids, logits).log_softmax(-1) + torch.tensor(beams.scores)[:, None]
        scores, order = ranked.flatten().topk(beams.num_candidates)
        beams.advance(
            BeamCandidates(
                rows=tuple((order // VOCAB_SIZE).tolist()),
                token_ids=tuple((order % VOCAB_SIZE).tolist()),
                scores=tuple(scores.tolist()),
                log_probs=tuple(model_log_probs.flatten()[order].tolist()),
            )
        )
    return beams.hypotheses()


def generate(
    model: transformers.PreTrainedModel, request: Request, **options
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the generated tokens, without end ids and padding, and the scores."""
    sampling = request.sampling
    output = model.generate(
        torch.tensor([request.input_token_ids]),
        attention_mask=torch.ones(1, request.prompt_length, dtype=torch.long),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.num_outputs,
        length_penalty=sampling.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.early_stopping],
        eos_token_id=list(request.end_ids) or None,
        pad_token_id=-1 % VOCAB_SIZE,
        return_dict_in_generate=True,
        output_scores=True,
        use_cache=False,
        **options,
    )
    lengths = (output.beam_indices >= 0).sum(1).tolist()  # the end id counts
    tokens = []
    for row, length in zip(output.sequences[:, request.prompt_length :].tolist(), lengths):
        generated = tuple(row[:length])
        tokens.append(generated[:-1] if generated[-1] in request.end_ids else generated)
    return tokens, output.sequences_scores.tolist()


def assert_same(found: list[Hypothesis], expected: tuple[list[tuple[int, ...]], list[float]]) -> None:
    tokens, scores = expected
    assert [hypothesis.token_ids for hypothesis in found] == tokens
    assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("length_penalty", with_all([0.0, 0.7, 1.0, 2.0], [0.7]))
@pytest.mark.parametrize("beam_width", with_all(range(2, 9), [5]))
def test_tokens_and_scores_are_those_of_transformers(model, beam_width, length_penalty, early_stopping):
    for prompt, end_ids in product(PROMPTS, (ONE_END_ID, SEVERAL_END_IDS)):
        request = make_request(
            prompt,
            end_ids,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        found = search(model, request)
        assert_same(found, generate(model, request))
        for hypothesis in found:
            length = len(hypothesis.token_ids) + (hypothesis.finish_reason is FinishReason.END_ID)
            assert hypothesis.score == pytest.approx(hypothesis.cum_log_prob / length**length_penalty)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("num_return_sequences", with_all([1, 2, 5], [2]))
def test_the_requested_number_of_beams_is_returned(model, num_return_sequences, early_stopping):
    request = make_request(
        PROMPTS[0],
        SEVERAL_END_IDS,
        beam_width=5,
        num_return_sequences=num_return_sequences,
        length_penalty=1.0,
        early_stopping=early_stopping,
    )
    found = search(model, request)
    assert len(found) == num_return_sequences
    assert_same(found, generate(model, request))


@pytest.mark.parametrize("beam_width", with_all([2, 4], [4]))
def test_without_end_ids_every_beam_reaches_the_length(model, beam_width):
    request = make_request(PROMPTS[2], beam_width=beam_width, length_penalty=1.0)
    found = search(model, request)
    assert_same(found, generate(model, request))
    assert all(len(hypothesis.token_ids) == MAX_NEW_TOKENS for hypothesis in found)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("beam_width", with_all([2, 3, 5], [3]))
def test_bans_renormalize_as_in_transformers(model, beam_width, early_stopping):
    """After bans by min_new_tokens and no_repeat_ngram the other probabilities add up to one again."""
    for prompt, end_ids in product(PROMPTS, (ONE_END_ID, SEVERAL_END_IDS)):
        processors = Processors(
            [
                transformers.MinNewTokensLengthLogitsProcessor(len(prompt), 5, list(end_ids)),
                transformers.NoRepeatNGramLogitsProcessor(2),
            ]
        )
        request = make_request(
            prompt, end_ids, beam_width=beam_width, length_penalty=1.0, early_stopping=early_stopping
        )
        found = search(model, request, processors)
        expected = generate(model, request, min_new_tokens=5, no_repeat_ngram_size=2, renormalize_logits=True)
        assert_same(found, expected)


class _StopAtWords(transformers.StoppingCriteria):
    """Stop words as a stopping criterion of transformers, for each row; they count after `after` tokens."""

    def __init__(self, words: tuple[tuple[int, ...], ...], prompt_length: int, after: int = 0) -> None:
        self._words, self._prompt_length, self._after = words, prompt_length, after

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        rows = [tuple(row[self._prompt_length :]) for row in input_ids.tolist()]
        return torch.tensor(
            [
                len(row) > self._after and any(row[-len(word) :] == word for word in self._words)
                for row in rows
            ]
        )


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("beam_width", with_all([2, 4], [4]))
def test_stop_words_finish_a_beam_as_end_ids_do(model, beam_width, early_stopping):
    """There are so many stop words that sometimes fewer than K candidates can continue."""
    reasons = set()
    for prompt, num_words in product(PROMPTS, (4, 24)):
        words = tuple((token_id,) for token_id in range(1, 1 + num_words)) + ((40, 41), (27, 41, 30))
        request = make_request(
            prompt,
            ONE_END_ID,
            beam_width=beam_width,
            length_penalty=1.0,
            early_stopping=early_stopping,
            stop_words=words,
        )
        found = search(model, request)
        criteria = transformers.StoppingCriteriaList([_StopAtWords(words, len(prompt))])
        assert_same(found, generate(model, request, stopping_criteria=criteria))
        reasons |= {hypothesis.finish_reason for hypothesis in found}
    assert FinishReason.STOP_WORDS in reasons


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("beam_width", with_all([2, 3, 5], [3]))
def test_no_beam_ends_before_min_tokens(model, beam_width, early_stopping):
    """End ids are banned until then, and beams continue after stop words."""
    lengths: list[int] = []
    least, reasons = 5, set()
    for prompt, end_ids in product(PROMPTS, (ONE_END_ID, SEVERAL_END_IDS)):
        words = tuple((token_id,) for token_id in range(1, 20) if token_id not in end_ids) + ((40, 41),)
        request = make_request(
            prompt, end_ids, beam_width=beam_width, length_penalty=1.0, early_stopping=early_stopping,
            min_length=least, stop_words=words, stop_words_after=least,
        )  # fmt: skip
        process = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), least, list(end_ids))
        found = search(model, request, process)
        criteria = transformers.StoppingCriteriaList([_StopAtWords(words, len(prompt), least)])
        options = {"min_new_tokens": least, "renormalize_logits": True, "stopping_criteria": criteria}
        assert_same(found, generate(model, request, **options))
        reasons |= {hypothesis.finish_reason for hypothesis in found}
        lengths += [len(hypothesis.token_ids) for hypothesis in found]
    assert FinishReason.STOP_WORDS in reasons
    assert min(lengths) >= least


def test_the_cases_cover_every_ending(model):
    """Beams must also end early in the comparisons."""
    reasons, lengths = set(), set()
    for prompt, penalty in product(PROMPTS, (0.0, 2.0)):
        request = make_request(prompt, SEVERAL_END_IDS, beam_width=4, length_penalty=penalty)
        for hypothesis in search(model, request):
            reasons.add(hypothesis.finish_reason)
            lengths.add(len(hypothesis.token_ids))
    assert reasons == {FinishReason.END_ID, FinishReason.LENGTH}
    assert len(lengths) > 3


def test_early_stopping_changes_some_results(model):
    found = [
        tuple(
            search(
                model,
                make_request(
                    prompt, SEVERAL_END_IDS, beam_width=4, length_penalty=2.0, early_stopping=early_stopping
                ),
            )[0].token_ids
            for prompt in PROMPTS
        )
        for early_stopping in EARLY_STOPPING
    ]
    assert len(set(found)) > 1


def test_log_probs_equal_those_of_the_model_and_their_sum_excludes_the_end_id(model):
    request = make_request(PROMPTS[0], SEVERAL_END_IDS, beam_width=4)
    for hypothesis in search(model, request):
        ids = torch.tensor([request.input_token_ids + hypothesis.token_ids])
        with torch.no_grad():
            log_probs = model(ids).logits[0, request.prompt_length - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(hypothesis.token_ids)[:, None])[:, 0].tolist()
        assert hypothesis.log_probs == pytest.approx(expected, abs=1e-4)
        if hypothesis.finish_reason is FinishReason.END_ID:
            assert hypothesis.cum_log_prob < sum(expected)
        else:
            assert hypothesis.cum_log_prob == pytest.approx(sum(expected), abs=1e-4)
