"""Guides combined with all other controls, through scheduler and engine of a small random model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.stop import FinishReason
from inflight.errors import InvalidArgument
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.engine.serving import Served, config_of, serve
from tests.guided.factories import (
    check_tokens,
    load,
    make_request,
    text_of,
    tiny_backend,
    tiny_grammars,
    tiny_vocabulary,
)
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

WORDS = Guide(GuideKind.REGEX, "([a-d]{2,4} ){3,6}end")
NUMBERS = Guide(
    GuideKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}'
)
OBJECT = Guide(
    GuideKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "id": {"enum": ["one", "two"]}},
            "required": ["a", "id"],
            "additionalProperties": False,
        }
    ),
)
SUM = Guide(GuideKind.EBNF_GRAMMAR, 'root ::= [0-9]+ ("+" [0-9]+)*')
GUIDES = [WORDS, NUMBERS, OBJECT, SUM]
CONTROLS: dict[str, dict[str, object]] = {
    "greedy": {"top_p": 0.0},
    "sampled": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit bias": {"logit_bias_ids": (5, 99), "logit_bias_values": (100.0, 100.0)},
}


def requests_of(model: ZooModel, **changes: object) -> list[Request]:
    """Make a request for each of CONTROLS and GUIDES, and some without a guide."""
    requests: list[Request] = []
    for number, sampling in enumerate(CONTROLS.values()):
        for place, guide in enumerate((*GUIDES, None)):
            key = 10 * number + place
            prompt = model.prompt(4 + 5 * (key % 6), key % 4)
            requests.append(make_request(key, prompt, guide, 24, sampling=sampling, **changes))
    return requests


def check_all(served: Served, requests: Sequence[Request]) -> None:
    """Assert that every token was allowed, and that ended texts are complete."""
    for request in requests:
        if request.guide is None:
            continue
        for index in range(request.sampling.num_sequences):
            result = served.result(request, index)
            for beam, reason in enumerate(result.finish_reasons):
                tokens = served.tokens(request, index, beam)
                ended = reason is FinishReason.END_ID
                check_tokens(tiny_backend(), tiny_vocabulary(), request.guide, tokens, ended)


def test_guided_tokens_are_the_same_alone_and_in_every_batch(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    requests = requests_of(model)
    engine = load(model.folder, 256, 1)
    alone = serve(engine, config_of("no-evict"), requests)
    check_all(alone, requests)
    expected = {each.request_id: alone.tokens(each) for each in requests}
    num_pauses = 0
    ways = [("utilization-chunked-no-reuse", None), ("utilization", "torch"), ("chunked", None)]
    for way, kernels in ways:
        served = serve(load(model.folder, 20, 6, kernels=kernels), config_of(way), requests)
        assert {each.request_id: served.tokens(each) for each in requests} == expected
        num_pauses += served.num_pauses
    assert num_pauses
    reasons = [alone.result(each).finish_reasons[0] for each in requests if each.guide]
    assert reasons.count(FinishReason.END_ID) > len(reasons) // 2


# Two stages of two ranks each share matrices and pass hidden states.
@pytest.mark.parametrize(
    "topology",
    with_all([pytest.param(each, id=name) for name, each in TOPOLOGIES.items()], [TOPOLOGIES["tp2-pp2"]]),
)
def test_several_ranks_give_the_tokens_of_one(zoo: Zoo, topology: tuple[int, int]) -> None:
    model = zoo["llama-gqa"]
    requests = requests_of(model)[:15]
    one = serve(load(model.folder, 64, 4), config_of("no-evict"), requests)
    with ranks(model.folder, topology, make_grammars=tiny_grammars) as engine:
        many = serve(engine, config_of("no-evict"), requests)
    assert [many.tokens(each) for each in requests] == [one.tokens(each) for each in requests]


def test_prompt_lookup_and_drafts_do_not_change_tokens(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    plain = [
        make_request(n, model.prompt(20, n), guide, 40, sampling={"top_k": 2})
        for n, guide in enumerate(GUIDES)
    ]
    engine = load(model.folder)
    expected = serve(engine, config_of("no-evict"), plain)
    right = [tuple(expected.tokens(each)) for each in plain]
    guessed = [right[0][:6], (*right[1][:2], 7, 7), (9, 9, 9), (*right[3], 2, 2)[:12]]
    drafted = [
        make_request(
            10 + n, each.input_token_ids, each.guide, 40,
            sampling={"top_k": 2, "random_seed": n}, draft=ExternalDraft(guessed[n]),
        )
        for n, each in enumerate(plain)
    ]  # fmt: skip
    looked_up = [
        make_request(
            20 + n, (*right[n], *each.input_token_ids), each.guide, 40, sampling={"random_seed": n},
            prompt_lookup_num_tokens=5,
        )
        for n, each in enumerate(plain)
    ]  # fmt: skip
    without = [
        make_request(30 + n, each.input_token_ids, each.guide, 40, sampling={"random_seed": n})
        for n, each in enumerate(looked_up)
    ]
    served = serve(engine, config_of("no-evict"), [*drafted, *looked_up, *without])
    assert [served.tokens(each) for each in drafted] == [list(tokens) for tokens in right]
    assert [served.tokens(each) for each in looked_up] == [served.tokens(each) for each in without]
    metrics = [served.result(each) for each in drafted]
    assert all(result.finish_reasons[0] is not FinishReason.NOT_FINISHED for result in metrics)


def test_drafts_accepted_by_chance_stay_within_the_guide(zoo: Zoo) -> None:
    import numpy as np

    from inflight.core.request.request import FloatTensor

    model, rng = zoo["llama-gqa"], np.random.default_rng(0)
    requests = []
    for n, guide in enumerate(GUIDES * 4):
        logits = rng.normal(size=(4, VOCAB_SIZE)).astype(np.float32)
        draft = ExternalDraft(
            tuple(rng.integers(0, 120, 4).tolist()), FloatTensor(logits.shape, logits.tobytes()),
            None if n % 2 else 0.0,
        )  # fmt: skip
        requests.append(make_request(n, model.prompt(9, n), guide, 30, draft=draft))
    check_all(serve(load(model.folder), config_of("no-evict"), requests), requests)


@pytest.mark.parametrize("end_ids", [(2,), ()], ids=["end id", "no end id"])
def test_beams_and_several_sequences_follow_their_guides(zoo: Zoo, end_ids: tuple[int, ...]) -> None:
    model = zoo["llama-gqa"]
    output = OutputOptions(return_log_probs=True)
    searches = [
        make_request(
            n, model.prompt(8, n), guide, 30, end_ids,
            {"beam_width": 3, "num_return_sequences": 3, "top_p": 0.0}, output=output,
        )
        for n, guide in enumerate(GUIDES)
    ]  # fmt: skip
    several = [
        make_request(
            10 + n, model.prompt(8, n), guide, 30, end_ids, {"num_return_sequences": 3}, output=output
        )
        for n, guide in enumerate(GUIDES)
    ]
    requests = [*searches, *several]
    served = serve(load(model.folder), config_of("no-evict"), requests)
    check_all(served, requests)
    alone = serve(load(model.folder, 64, 3), config_of("no-evict"), requests)
    assert [served.beams(each) for each in searches] == [alone.beams(each) for each in searches]
    ended = [r for each in requests for r in served.result(each).finish_reasons if r is FinishReason.END_ID]
    assert ended
    for each in searches:
        assert len({tuple(beam) for beam in served.beams(each)}) > 1


def test_a_guide_that_can_only_end_ends_a_request_without_end_ids(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    requests = [
        make_request(n, model.prompt(5, n), Guide(GuideKind.REGEX, "(yes|no)"), 50, ()) for n in range(4)
    ]
    served = serve(load(model.folder), config_of("no-evict"), requests)
    for each in requests:
        assert text_of(tiny_vocabulary(), served.tokens(each)) in ("yes", "no")
        assert served.result(each).finish_reasons == (FinishReason.END_ID,)


def test_an_end_id_that_is_text_ends_only_where_the_guide_may_end(zoo: Zoo) -> None:
    """The end id 8 is a quotation mark; the string has two, and may end only after the second."""
    model = zoo["llama-gqa"]
    quote = tiny_vocabulary().tokens.index(b'"')
    guide = Guide(GuideKind.REGEX, '"[a-z]{2}"( |x)*')
    requests = [make_request(n, model.prompt(5, n), guide, 50, (quote,)) for n in range(4)]
    served = serve(load(model.folder), config_of("no-evict"), requests, may_fail=range(4))
    assert sorted(served.errors) == [0, 1, 2, 3], "the first token must be a quotation mark, and may not end"
    assert all("guided_decoding_guide must leave a token" in str(error) for error in served.errors.values())


def test_no_control_allows_a_token_that_the_guide_bans(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    guide = Guide(GuideKind.REGEX, "[ab]{5}")
    a, c = (tiny_vocabulary().tokens.index(each) for each in (b"a", b"c"))
    biased = make_request(
        0, model.prompt(5, 0), guide, sampling={"logit_bias_ids": (c,), "logit_bias_values": (1e30,)}
    )
    only = make_request(1, model.prompt(5, 1), guide, sampling={"allowed_token_ids": (a, c, 2)})
    none = make_request(2, model.prompt(5, 2), guide, sampling={"allowed_token_ids": (c,)})
    served = serve(load(model.folder), config_of("no-evict"), [biased, only, none], may_fail=[2])
    assert re.fullmatch("[ab]{5}", text_of(tiny_vocabulary(), served.tokens(0)))
    assert text_of(tiny_vocabulary(), served.tokens(1)) == "aaaaa"
    assert isinstance(served.errors[2], InvalidArgument)


def test_a_guide_whose_allowed_tokens_are_all_banned_is_an_error(zoo: Zoo) -> None:
    """After `a` the guide allows `b` or the end. A request that bans `b` and all other tokens fails; it does
    not end normally."""
    model = zoo["llama-gqa"]
    a = tiny_vocabulary().tokens.index(b"a")
    guide = Guide(GuideKind.REGEX, "ab*")
    request = make_request(0, model.prompt(5, 0), guide, 9, (), {"allowed_token_ids": (a,)})
    served = serve(load(model.folder), config_of("no-evict"), [request], may_fail=[0])
    assert "must leave a token" in str(served.errors[0])


def test_a_guide_that_fails_ends_only_its_request(zoo: Zoo) -> None:
    """The guide was never compiled, and the rank that samples detects this when it reaches the row."""
    model = zoo["llama-gqa"]
    broken = make_request(0, model.prompt(5, 0), Guide(GuideKind.REGEX, "(a"))
    others = [make_request(n, model.prompt(5, n), WORDS, 40) for n in (1, 2)]
    served = serve(load(model.folder), config_of("no-evict"), [broken, *others], may_fail=[0])
    assert "guided_decoding_guide cannot be used" in str(served.errors[0])
    check_all(served, others)


def test_an_engine_without_grammars_fails_only_guided_rows(zoo: Zoo) -> None:
    model = zoo["llama-gqa"]
    requests = [make_request(0, model.prompt(5, 0), WORDS), make_request(1, model.prompt(5, 1), None)]
    engine = load(model.folder, make_grammars=lambda vocab_size: None)
    served = serve(engine, config_of("no-evict"), requests, may_fail=[0])
    assert list(served.errors) == [0]
    assert served.tokens(1)


def test_a_greedy_stream_beside_guides_gets_a_token_every_iteration(zoo: Zoo) -> None:
    """The device overlaps iterations; all requests get the same tokens as without overlap."""
    model = zoo["llama-gqa"]
    requests = [Request(99, model.prompt(9), 80, streaming=True), *requests_of(model)[:5]]
    expected = serve(load(model.folder), config_of("no-evict"), requests)
    engine = load(model.folder)
    engine.limits = replace(engine.limits, overlaps_iterations=True)
    served = serve(engine, config_of("no-evict"), requests)
    assert served.most_in_flight == 2
    assert served.num_iterations == 80
    check_all(served, requests)
    for each in requests:
        assert served.tokens(each) == expected.tokens(each)
