"""Random requests and logits with every parameter of the pipeline, alone and combined."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st

from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import NO_REPEAT_OFF
from tests.sampling.factories import make_request

outputs = st.builds(
    OutputOptions,
    return_log_probs=st.booleans(),
    num_top_log_probs=st.sampled_from([0, 0, 1, 3]),
    return_generation_logits=st.booleans(),
)

_temperature = {"temperature": st.sampled_from([0.0, 0.05, 0.5, 0.7, 1.7, 50.0])}
_top_p = {"top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.7, 0.9, 0.999, 1.0])}
# Controls that are set together, because they only work together.
_FEATURES = [
    _temperature,
    {"top_k": st.sampled_from([1, 2, 3, 7, 100])},
    _top_p,
    {
        "top_p": st.sampled_from([0.0, 0.7, 0.9, 1.0]),
        "top_p_decay": st.sampled_from([0.5, 0.8, 0.95]),
        "top_p_min": st.sampled_from([0.0, 0.2, 0.8]),
        "top_p_reset_id": st.integers(-1, 3),
    },
    {"min_p": st.sampled_from([0.05, 0.3, 1.0])},
    {"repetition_penalty": st.sampled_from([0.5, 1.2, 2.0])},
    {"presence_penalty": st.sampled_from([-0.5, 0.4, 2.0]), **_temperature},
    {"frequency_penalty": st.sampled_from([-0.3, 0.1, 1.5]), **_temperature},
    {"min_length": st.integers(1, 4)},
    {"no_repeat_ngram_size": st.sampled_from([1, 2, 2, 3, 5, NO_REPEAT_OFF])},
    {"beam_search_diversity_rate": st.sampled_from([0.5, 2.0])},
]


@st.composite
def requests(draw: st.DrawFn, vocab_size: int, **always: object) -> Request:
    """Draw a request with a few parameters set; with many set, all tokens would be banned.

    Some prompts have ids beyond the vocabulary, which stand for rows of a table.
    """
    tokens = st.integers(0, vocab_size - 1)
    num_table_rows = draw(st.sampled_from([0, 0, 2]))
    features = draw(st.lists(st.sampled_from(range(len(_FEATURES))), max_size=4, unique=True))
    sampling: dict[str, object] = {"random_seed": draw(st.integers(0, 2**64 - 1))}
    for index in features:
        sampling |= {name: draw(values) for name, values in _FEATURES[index].items()}
    allowed = st.lists(tokens, min_size=1, max_size=vocab_size)
    sampling["allowed_token_ids"] = tuple(draw(st.just([]) | st.just([]) | allowed))
    pairs = st.lists(st.tuples(tokens, st.sampled_from([-math.inf, -4.0, -0.5, 0.25, 3.0])), max_size=4)
    biases = draw(st.just([]) | pairs)
    sampling["logit_bias_ids"] = tuple(token for token, _ in biases)
    sampling["logit_bias_values"] = tuple(value for _, value in biases)
    words = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3)
    bias = st.lists(st.floats(-3, 3, width=32), min_size=vocab_size, max_size=vocab_size)
    return make_request(
        draw(st.lists(st.integers(0, vocab_size + num_table_rows - 1), min_size=1, max_size=8)),
        num_table_rows=num_table_rows,
        end_ids=draw(st.lists(tokens, max_size=2, unique=True)),
        bad_words=draw(words),
        bias=draw(st.none() | st.none() | bias),
        output=draw(outputs),
        **{**sampling, **always},
    )


@st.composite
def logits_rows(draw: st.DrawFn, num_rows: int, vocab_size: int) -> list[list[float]]:
    """Draw few distinct multiples of 1/64, so that many values are equal and none nearly equal."""
    numbers = random.Random(draw(st.integers(0, 2**32)))
    few = (-3.0, -1.5, 0.0, 0.25, 1.0, 2.0, 4.0)
    return [
        [
            numbers.choice(few) if numbers.random() < 0.3 else round(64 * numbers.gauss(0, 3)) / 64
            for _ in range(vocab_size)
        ]
        for _ in range(num_rows)
    ]
