"""Requests of every kind for one batch, and transformers' results for each."""

from __future__ import annotations

from inflight.core.request.request import ExternalDraft, Request
from inflight.core.request.sampling_config import SamplingConfig
from tests.engine.serving import Served
from tests.models.zoo import ZooModel


def some_of_everything(model: ZooModel, longest: int = 30) -> list[Request]:
    """Return prompts of which two share a prefix, a beam search, partly right drafts, prompt lookup, and a stop
    word.

    `longest`: maximum number of new tokens.
    """
    prompt, other = model.prompt(33), model.prompt(21, seed=1)
    right = model.greedy(other, 4)
    return [
        Request(0, prompt, min(24, longest)),
        Request(1, (*prompt[:30], *other[:5]), min(20, longest)),
        Request(2, other, 12, sampling=SamplingConfig(beam_width=3)),
        Request(3, other, 12, draft=ExternalDraft((*right[:3], (right[3] + 1) % 200))),
        Request(4, (*prompt, *prompt[:12]), 16, prompt_lookup_num_tokens=3),
        *(Request(number, model.prompt(5 + number, number), longest) for number in range(5, 9)),
        Request(9, other, 12, stop_words=(tuple(right[2:]),)),
    ]


def assert_as_transformers(model: ZooModel, served: Served, requests: list[Request]) -> None:
    """Compare tokens and beams with those of `generate`."""
    for request in requests:
        prompt, count = request.input_token_ids, request.max_new_tokens
        if request.sampling.uses_beams:
            expected = model.beams(prompt, count, num_beams=3, num_return_sequences=3, length_penalty=0.0)
            assert served.beams(request) == [tokens for tokens, _ in expected]
        else:
            tokens = model.greedy(prompt, count)
            ends = [
                end
                for word in request.stop_words
                for end in range(len(word), count + 1)
                if tuple(tokens[end - len(word) : end]) == word
            ]
            assert served.tokens(request) == tokens[: min(ends, default=count)]
