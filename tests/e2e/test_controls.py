"""Every sampling control on the real server, compared with transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from inflight.text.tokenizer import Tokenizer
from tests.models.zoo import ZooModel

from .clients import ask, completion, unary, word_list

PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return "
NUM_TOKENS = 24
VOCABULARY = 3072
SEED = 11


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


class SeenTokens(transformers.LogitsProcessor):
    """Presence and frequency penalties, which transformers lacks."""

    def __init__(self, presence: float = 0.0, frequency: float = 0.0) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token_id in set(input_ids[0].tolist()):
            count = int((input_ids[0] == token_id).sum())
            scores[0, token_id] -= self.presence + self.frequency * count
        return scores


def seen(**penalties: float) -> transformers.LogitsProcessorList:
    return transformers.LogitsProcessorList([SeenTokens(**penalties)])


def bias_of(values: dict[int, float]) -> np.ndarray:
    bias = np.zeros((1, VOCABULARY), np.float32)
    for token_id, value in values.items():
        bias[0, token_id] = value
    return bias


@dataclass(frozen=True)
class Control:
    """A control: the tensors sent to the server, and the arguments for transformers."""

    name: str
    tensors: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


GREEDY_CONTROLS = [
    Control("repetition_penalty", {"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    Control("presence_penalty", {"presence_penalty": 3.0}, {"logits_processor": seen(presence=3.0)}),
    Control("frequency_penalty", {"frequency_penalty": 1.0}, {"logits_processor": seen(frequency=1.0)}),
    Control("no_repeat_ngram_size", {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
]


@pytest.mark.parametrize(
    "control", [pytest.param(one, id=one.name, marks=pytest.mark.covers(one.name)) for one in GREEDY_CONTROLS]
)
def test_greedy_tokens_equal_those_of_transformers(exact_server, oracle, prompt, control):
    expected = oracle.generate(tuple(prompt), NUM_TOKENS, **control.options)
    assert expected != oracle.greedy(tuple(prompt), NUM_TOKENS), "the control has to change something"
    answer = completion(exact_server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, **control.tensors)
    assert answer.ids == expected


@pytest.mark.covers("end_id")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.covers(name)) for name in ("min_length", "min_tokens")]
)
def test_an_end_id_is_not_sampled_before_min_length(exact_server, oracle, prompt, name):
    """A stop word is not an end id: min_length does not keep it from ending the sequence."""
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    end_id = plain[4]
    expected = oracle.generate(tuple(prompt), NUM_TOKENS, end_id=end_id, min_new_tokens=12)
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS}
    short = completion(exact_server.grpc, end_id=end_id, **request)
    assert short.ids == plain[: plain.index(end_id)] and short.finish_reason == "END_ID"
    answer = completion(exact_server.grpc, end_id=end_id, **{name: 12}, **request)
    assert len(answer.ids) >= 12
    assert answer.ids == expected[: len(answer.ids)] and end_id not in answer.ids
    stopped = completion(exact_server.grpc, stop_words_list=word_list([end_id]), **{name: 12}, **request)
    assert stopped.ids == plain[: plain.index(end_id) + 1] and stopped.finish_reason == "STOP_WORDS"


@pytest.mark.covers("bad_words_list")
def test_bad_words_are_never_generated(exact_server, oracle, prompt):
    """A word is banned alone, and as the last token of a sequence; token 0 is no exception."""
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    words = [[plain[3]], [plain[0], plain[1]], [0]]
    expected = oracle.generate(tuple(prompt), NUM_TOKENS, bad_words_ids=words)
    assert expected != plain
    answer = completion(
        exact_server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, bad_words_list=word_list(*words)
    )
    assert answer.ids == expected


@pytest.mark.covers("bad_words_list")
def test_token_zero_can_be_banned(exact_server, oracle, tokenizer):
    """tensorrtllm_backend cannot ban token 0. In the demo model, token 0 ends a text and is soon reached."""
    prompt = tokenizer.encode("def f():\n    return 1\n")
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    assert 0 in plain
    answer = completion(
        exact_server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, bad_words_list=word_list([0])
    )
    assert answer.ids == oracle.generate(tuple(prompt), NUM_TOKENS, bad_words_ids=[[0]])


@pytest.mark.covers("embedding_bias")
def test_a_bias_is_added_to_the_logits(exact_server, oracle, prompt):
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    values = {plain[2]: -4.0, plain[5]: 2.5, 77: 3.0}
    options = {"sequence_bias": [[[token_id], value] for token_id, value in values.items()]}
    expected = oracle.generate(tuple(prompt), NUM_TOKENS, **options)
    assert expected != plain
    answer = completion(
        exact_server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, embedding_bias=bias_of(values)
    )
    assert answer.ids == expected


@pytest.mark.parametrize("sampling", [{}, {"runtime_top_p": 0.9}, {"beam_width": 2}])
def test_bans_of_all_tokens_are_an_error(exact_server, oracle, prompt, sampling):
    """Without the last two bans, the same server answers the request."""
    arguments = {"input_ids": prompt, "request_output_len": 4, **sampling}
    bias = bias_of(dict.fromkeys(range(2, VOCABULARY), -np.inf))
    (refused,) = ask(exact_server.grpc, **arguments, embedding_bias=bias, bad_words_list=word_list([0], [1]))
    assert refused.error is not None
    assert refused.error.message() == (
        "embedding_bias and bad_words_list must leave a token that may come next, got every token banned "
        "after 0 generated"
    )
    answer = completion(exact_server.grpc, **arguments, end_id=-1, embedding_bias=bias)
    assert set(answer.ids) <= {0, 1}


LOGIT_BIAS = ("logit_bias_ids", "logit_bias_values")


@pytest.mark.covers(*LOGIT_BIAS)
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_a_bias_of_a_few_tokens_is_added_to_their_logits(exact_server, oracle, tokenizer, prompt, model):
    """The biases of a token that is named twice are added."""
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    values = {plain[2]: -4.0, plain[5]: 2.5, 77: 3.0}
    expected = oracle.generate(
        tuple(prompt),
        NUM_TOKENS,
        sequence_bias=[[[token_id], value] for token_id, value in values.items()],
    )
    assert expected != plain
    bias = {"logit_bias_ids": [*values, 77], "logit_bias_values": [-4.0, 2.5, 2.0, 1.0]}
    _check_answer(exact_server, tokenizer, prompt, model, expected, bias)


@pytest.mark.covers("allowed_token_ids")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_only_allowed_tokens_are_sampled(exact_server, oracle, tokenizer, prompt, model):
    """transformers suppresses all other tokens."""
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    allowed = sorted({*plain[::2], *range(100, 400)})
    others = sorted(set(range(VOCABULARY)) - set(allowed))
    expected = oracle.generate(tuple(prompt), NUM_TOKENS, suppress_tokens=others)
    assert expected != plain and len(set(expected)) > 3
    _check_answer(exact_server, tokenizer, prompt, model, expected, {"allowed_token_ids": allowed})


def _check_answer(server, tokenizer, prompt, model, expected, tensors):
    if model == "tensorrt_llm":
        answer = completion(server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, **tensors)
        assert answer.ids == expected
        whole = unary(server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, **tensors)
        assert whole.as_numpy("output_ids")[0, 0].tolist() == [*prompt, *expected]
    else:
        (answer,) = ask(
            server.grpc,
            model,
            text_input=PROMPT,
            max_tokens=NUM_TOKENS,
            end_id=-1,
            exclude_input_in_output=True,
            **tensors,
        )
        assert answer.text == tokenizer.decode([*prompt, *expected])[len(PROMPT) :]


@pytest.mark.covers("allowed_token_ids")
def test_an_end_id_that_is_not_allowed_is_not_sampled(exact_server, oracle, tokenizer):
    prompt = tokenizer.encode("def f():\n    return 1\n")
    assert 0 in oracle.greedy(tuple(prompt), NUM_TOKENS), "the end of a text, which the model comes to soon"
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS, "end_id": 0}
    assert completion(exact_server.grpc, **request).finish_reason == "END_ID"
    answer = completion(exact_server.grpc, **request, allowed_token_ids=range(1, VOCABULARY))
    assert answer.finish_reason == "LENGTH" and 0 not in answer.ids
    assert answer.ids == oracle.generate(tuple(prompt), NUM_TOKENS, suppress_tokens=[0])


@pytest.mark.covers("allowed_token_ids", *LOGIT_BIAS)
@pytest.mark.parametrize(
    "more", [{}, {"beam_width": 3}, {"runtime_top_p": 0.9}, {"prompt_lookup_num_tokens": 3}]
)
def test_allowed_tokens_and_biases_combine_with_other_controls(exact_server, prompt, more):
    """A bias does not bring back a token that is not allowed; a token banned by its bias is never sampled."""
    answer = completion(
        exact_server.grpc,
        input_ids=prompt,
        request_output_len=NUM_TOKENS,
        end_id=-1,
        allowed_token_ids=[300, 301, 302],
        logit_bias_ids=[301, 500],
        logit_bias_values=[-np.inf, 1e9],
        **more,
    )
    assert all(len(beam) == NUM_TOKENS and set(beam) <= {300, 302} for beam in answer.beams)


TWO_IDS = {"logit_bias_ids": [1, 2]}
REFUSED = [
    (
        {"allowed_token_ids": [5, VOCABULARY]},
        "allowed_token_ids must be in [0, 3071], got 3072 at position 1",
    ),
    ({"logit_bias_ids": [-1], "logit_bias_values": [1.0]}, "logit_bias_ids must be in [0, 3071], got -1"),
    (
        {**TWO_IDS, "logit_bias_values": [1.0]},
        "logit_bias_ids has 2 token ids and logit_bias_values 1 values",
    ),
    (
        {**TWO_IDS, "logit_bias_values": [1.0, np.inf]},
        "logit_bias_values must be finite numbers, or -inf to ban",
    ),
    (
        {"allowed_token_ids": [7], "bad_words_list": word_list([7])},
        "bad_words_list and allowed_token_ids must leave a token that may come next, got every token banned",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED)
def test_controls_out_of_range_are_refused(exact_server, prompt, tensors, message):
    (refused,) = ask(exact_server.grpc, input_ids=prompt, request_output_len=4, **tensors)
    assert refused.error is not None and refused.error.message().startswith(message)


@pytest.mark.covers("embedding_bias_words", "embedding_bias_weights")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_a_bias_of_a_word_applies_to_each_of_its_tokens(exact_server, oracle, tokenizer, prompt, model):
    words, weights = [" self", "lines"], [8.0, -3.0]
    values: dict[int, float] = {}
    for word, weight in zip(words, weights):
        for token_id in set(tokenizer.encode(word, add_special_tokens=False)):
            values[token_id] = values.get(token_id, 0.0) + weight
    options = {"sequence_bias": [[[token_id], value] for token_id, value in values.items()]}
    expected = oracle.generate(tuple(prompt), NUM_TOKENS, **options)
    assert expected != oracle.greedy(tuple(prompt), NUM_TOKENS)
    length = "max_tokens" if model == "ensemble" else "request_output_len"
    (answer,) = ask(
        exact_server.grpc,
        model,
        text_input=PROMPT,
        end_id=-1,
        exclude_input_in_output=True,
        embedding_bias_words=words,
        embedding_bias_weights=weights,
        **{length: NUM_TOKENS},
    )
    assert answer.text == tokenizer.decode([*prompt, *expected])[len(PROMPT) :]


@pytest.mark.covers("bad_words")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_bad_words_may_be_texts(exact_server, oracle, tokenizer, prompt, model):
    """The demo model's vocabulary has different tokens for a word with and without a space before it."""
    plain = tokenizer.decode(oracle.greedy(tuple(prompt), NUM_TOKENS))
    word = next(word for word in plain.split() if word.isalpha() and len(word) > 2)
    length = "max_tokens" if model == "ensemble" else "request_output_len"
    (answer,) = ask(
        exact_server.grpc,
        model,
        text_input=PROMPT,
        exclude_input_in_output=True,
        bad_words=[word],
        **{length: NUM_TOKENS},
    )
    assert answer.error is None
    forbidden = {tuple(tokenizer.encode(f"{space}{word}", add_special_tokens=False)) for space in ("", " ")}
    assert any(len(ids) == 1 for ids in forbidden)
    assert word in plain and word not in answer.text.split()


# ---------------------------------------------------------------- sampling: tokens that may be drawn


def kept(oracle: ZooModel, prompt: list[int], tokens: list[int], *warpers: Any) -> list[bool]:
    """Return whether each of `tokens` is among those that transformers' warpers keep."""
    logits = oracle.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    for warper in warpers:
        logits = warper(None, logits.clone())
    return torch.isfinite(logits[range(len(tokens)), tokens]).tolist()


def sampled(server, prompt: list[int], count: int = NUM_TOKENS, **tensors: Any) -> list[int]:
    given = {"temperature": 1.8, "random_seed": SEED} | tensors
    return completion(server.grpc, input_ids=prompt, request_output_len=count, **given).ids


class TopNSigmaWarper:
    """llama.cpp's sampler of this name, which transformers lacks."""

    def __init__(self, n: float) -> None:
        self._n = n

    def __call__(self, _: Any, logits: torch.Tensor) -> torch.Tensor:
        least = logits.amax(dim=-1, keepdim=True) - self._n * logits.std(dim=-1, correction=0, keepdim=True)
        return logits.masked_fill(logits < least, -torch.inf)


WARPED = [
    Control("runtime_top_k", {"runtime_top_k": 3}, {"warper": transformers.TopKLogitsWarper(3)}),
    Control("runtime_top_p", {"runtime_top_p": 0.4}, {"warper": transformers.TopPLogitsWarper(0.4)}),
    Control("min_p", {"min_p": 0.25}, {"warper": transformers.MinPLogitsWarper(0.25)}),
    Control("top_n_sigma", {"top_n_sigma": 1.0}, {"warper": TopNSigmaWarper(1.0)}),
]


@pytest.mark.parametrize(
    "control",
    [pytest.param(one, id=one.name, marks=pytest.mark.covers(one.name, "temperature")) for one in WARPED],
)
def test_sampled_tokens_are_among_the_tokens_kept_by_the_control(exact_server, oracle, prompt, control):
    warpers = (transformers.TemperatureLogitsWarper(1.8), control.options["warper"])
    free = sampled(exact_server, prompt, runtime_top_p=1.0)
    assert not all(kept(oracle, prompt, free, *warpers)), "without the control others are drawn"
    tokens = sampled(exact_server, prompt, **control.tensors)
    assert all(kept(oracle, prompt, tokens, *warpers))
    assert tokens != oracle.greedy(tuple(prompt), NUM_TOKENS)


@pytest.mark.covers("temperature")
def test_temperature_zero_is_greedy_and_a_low_one_nearly_greedy(exact_server, oracle, prompt):
    greedy = oracle.greedy(tuple(prompt), NUM_TOKENS)
    assert sampled(exact_server, prompt, runtime_top_k=50, temperature=0.0) == greedy
    assert sampled(exact_server, prompt, runtime_top_k=50, temperature=0.001) == greedy


@pytest.mark.covers("random_seed", "seed")
def test_the_seed_decides_the_sampled_tokens(exact_server, prompt):
    default = sampled(exact_server, prompt, runtime_top_p=1.0, random_seed=0)
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS, "temperature": 1.8}
    assert completion(exact_server.grpc, runtime_top_p=1.0, **request).ids == default
    assert completion(exact_server.grpc, runtime_top_p=1.0, seed=SEED, **request).ids != default
    other = completion(exact_server.grpc, runtime_top_p=1.0, seed=SEED, **request).ids
    assert other == sampled(exact_server, prompt, runtime_top_p=1.0)


@pytest.mark.covers("runtime_top_p_decay", "runtime_top_p_min")
def test_top_p_decayed_to_zero_is_greedy_and_runtime_top_p_min_bounds_it(exact_server, oracle, prompt):
    nucleus = {"runtime_top_p": 0.95, "temperature": 1.0}
    plain = sampled(exact_server, prompt, **nucleus)
    decayed = sampled(exact_server, prompt, runtime_top_p_decay=0.001, **nucleus)
    assert decayed[0] == plain[0]
    assert decayed[1:] == oracle.greedy((*prompt, decayed[0]), NUM_TOKENS - 1) != plain[1:]
    floored = sampled(exact_server, prompt, runtime_top_p_decay=0.001, runtime_top_p_min=0.95, **nucleus)
    assert floored == plain


@pytest.mark.covers("runtime_top_p_reset_ids")
def test_a_reset_id_resets_top_p(exact_server, oracle, prompt):
    """The token after it is sampled with the first top_p; afterwards all tokens are greedy again."""
    nucleus = {"runtime_top_p": 0.95, "temperature": 2.5}
    decayed = sampled(exact_server, prompt, runtime_top_p_decay=0.001, **nucleus)
    reset_at = 3
    assert decayed.index(decayed[reset_at]) == reset_at
    tokens = sampled(
        exact_server,
        prompt,
        runtime_top_p_decay=0.001,
        runtime_top_p_reset_ids=decayed[reset_at],
        **nucleus,
    )
    before = decayed[: reset_at + 1]
    (drawn,) = sampled(exact_server, [*prompt, *before], 1, **nucleus)
    assert drawn != decayed[reset_at + 1], "the seed has to draw another token than the likeliest"
    assert tokens[: reset_at + 2] == [*before, drawn]


@pytest.mark.covers("num_return_sequences", "sequence_index", "streaming")
@pytest.mark.parametrize("streaming", [True, False])
def test_several_sequences_are_sampled_independently(exact_server, prompt, streaming):
    request = {"input_ids": prompt, "request_output_len": 8, "runtime_top_p": 1.0, "temperature": 1.5}
    answers = ask(
        exact_server.grpc,
        num_return_sequences=4,
        streaming=streaming,
        exclude_input_in_output=True,
        **request,
    )
    sequences: dict[int, list[int]] = {}
    for answer in answers:
        sequences.setdefault(answer.outputs["sequence_index"].item(), []).extend(answer.ids)
    assert sorted(sequences) == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in sequences.values()}) == 4
    assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert sequences[0] == completion(exact_server.grpc, **request).ids


# ---------------------------------------------------------------- the end of the prompt and of the output


@pytest.mark.covers("input_ids", "input_lengths", "text_input", "request_output_len", "max_tokens", "stop")
def test_a_prompt_given_as_text_or_as_padded_ids_gives_the_same_tokens(
    exact_server, oracle, tokenizer, prompt
):
    expected = oracle.greedy(tuple(prompt), 8)
    by_length = completion(
        exact_server.grpc,
        input_ids=[*prompt, 5, 6],
        input_lengths=len(prompt),
        request_output_len=8,
        stop=False,
    )
    by_text = completion(exact_server.grpc, text_input=PROMPT, request_output_len=8, end_id=-1)
    (ensemble,) = ask(
        exact_server.grpc,
        "ensemble",
        text_input=PROMPT,
        max_tokens=8,
        end_id=-1,
        exclude_input_in_output=True,
    )
    assert by_length.ids == by_text.ids == expected
    assert ensemble.text == by_text.text == tokenizer.decode([*prompt, *expected])[len(PROMPT) :]


@pytest.mark.covers("stop_words_list")
def test_a_stop_word_ends_the_output_is_returned_and_not_searched_in_the_prompt(exact_server, oracle, prompt):
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    words = word_list([plain[4], plain[5], plain[6]], prompt[-2:], [prompt[-1], plain[0]])
    answer = completion(
        exact_server.grpc, input_ids=prompt, request_output_len=NUM_TOKENS, stop_words_list=words
    )
    assert answer.ids == plain[:7] and answer.finish_reason == "STOP_WORDS"


@pytest.mark.covers("stop_words", "text_output")
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_ends_the_text_before_it(exact_server, oracle, tokenizer, prompt, model, streaming):
    plain = oracle.greedy(tuple(prompt), NUM_TOKENS)
    whole = tokenizer.decode([*prompt, *plain])[len(PROMPT) :]
    stop = whole[9:12]
    names = ("max_tokens", "stream") if model == "ensemble" else ("request_output_len", "streaming")
    answers = ask(
        exact_server.grpc,
        model,
        text_input=PROMPT,
        end_id=-1,
        exclude_input_in_output=True,
        stop_words=[stop, "never to be seen"],
        **dict(zip(names, (NUM_TOKENS, streaming))),
    )
    assert "".join(answer.text for answer in answers) == whole[: whole.index(stop)]
    assert answers[-1].finish_reason == "STOP_WORDS" and answers[-1].final
    if model == "tensorrt_llm":
        ids = [token_id for answer in answers for token_id in answer.ids]
        assert ids == plain[: len(ids)]
        assert stop in tokenizer.decode([*prompt, *ids])[len(PROMPT) :]
        assert stop not in tokenizer.decode([*prompt, *ids[:-1]])[len(PROMPT) :]
