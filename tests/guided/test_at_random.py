"""Hundreds of random guides: every finished text follows its guide, and the other library agrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.core.request.guide import GuideKind
from inflight.core.request.stop import FinishReason
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend
from inflight.guided.grammars import Grammars
from inflight.guided.make_backend import make_backend
from inflight.guided.vocabulary import GuideVocabulary
from inflight.text.tokenizer import Tokenizer
from tests.engine.serving import Served, config_of, serve
from tests.guided.at_random import Case, make_cases
from tests.guided.factories import (
    check_tokens,
    grammars_of,
    load,
    make_request,
    text_of,
    tiny_backend,
    tiny_grammars,
    tiny_vocabulary,
)
from tests.models.zoo import Zoo
from tests.tiers import examples, with_all

DEMO_MODEL = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/demo_model"
NUM_TINY, NUM_DEMO = examples(fast=120, all=300), 60


def check(
    served: Served,
    cases: dict[int, Case],
    vocabulary: GuideVocabulary,
    other: GuideBackend,
) -> tuple[int, int]:
    """Check all texts and tokens.

    Return the numbers of ended texts and of guides that the other library accepts.
    """
    num_ended = num_compared = 0
    for number, case in cases.items():
        tokens = served.tokens(number)
        has_ended = served.result(number).finish_reasons[0] is FinishReason.END_ID
        if has_ended:
            num_ended += 1
            case.check(text_of(vocabulary, tokens))
        if not case.is_shared:
            continue
        try:
            other.compile(case.guide)
        except InvalidArgument:
            continue
        num_compared += 1
        check_tokens(other, vocabulary, case.guide, tokens, has_ended)
    return num_ended, num_compared


@pytest.mark.parametrize("name", with_all(["llguidance", "xgrammar"], ["llguidance"]))
def test_texts_of_a_random_model_follow_their_guides(zoo: Zoo, name: str) -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")
    model = zoo["llama-gqa"]
    cases = make_cases(0, NUM_TINY) if name == "llguidance" else make_cases(1000, 60)
    if name == "xgrammar":  # it allows invalid UTF-8 in free text
        cases = {n: case for n, case in cases.items() if case.guide.type is not GuideKind.STRUCTURAL_TAG}
    requests = [make_request(n, model.prompt(3 + n % 7, n), case.guide) for n, case in cases.items()]
    engine = load(model.folder, 1024, 64, make_grammars=lambda size: tiny_grammars(size, name))
    served = serve(engine, config_of("no-evict"), requests, per_iteration=8)
    other = tiny_backend("xgrammar" if name == "llguidance" else "llguidance")
    num_ended, num_compared = check(served, cases, tiny_vocabulary(), other)
    assert num_ended > 0.6 * len(cases)
    assert num_compared > 0.7 * len(cases)


@pytest.mark.exhaustive
def test_texts_of_the_demo_model_follow_their_guides() -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    tokens = tokenizer.token_bytes()
    prompt = tokenizer.encode("def answer():\n    return ")
    found: list[GuideVocabulary] = []

    def make_grammars(vocab_size: int) -> Grammars:
        found.append(GuideVocabulary.of_size(vocab_size, tokens, tokenizer.special_ids))
        return grammars_of(make_backend("llguidance", found[0]), found[0])

    engine = load(DEMO_MODEL, 600, 32, make_grammars=make_grammars)
    (vocabulary,) = found
    cases = make_cases(2000, NUM_DEMO)
    requests = [
        make_request(n, prompt, case.guide, num_tokens=40, end_ids=engine.eos_token_ids)
        for n, case in cases.items()
    ]
    served = serve(engine, config_of("no-evict"), requests, per_iteration=8)
    num_ended, num_compared = check(served, cases, vocabulary, make_backend("xgrammar", vocabulary))
    assert num_ended > 0.5 * len(cases)
    assert num_compared > 0.7 * len(cases)
    assert all(
        tokenizer.decode(served.tokens(n)) == text_of(vocabulary, served.tokens(n))
        for n in cases
        if served.result(n).finish_reasons[0] is FinishReason.END_ID
    )
