"""Prompts with pictures from the encoder through the engine, compared with transformers' whole models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from inflight.pictures.encoder import PictureEncoder
from tests.engine.serving import Served, config_of, load, serve
from tests.pictures.small_models import (
    CASES,
    SmallModel,
    expected_beams,
    expected_tokens,
    picture,
    save_model,
)
from tests.tiers import with_all

NUM_TOKENS = 12
WIDE, TALL = picture(30, 18), picture(13, 27, seed=1)
RECURRENT = ("qwen3.5-vision", "qwen3.5-moe-vision")
"""Models with recurrent layers, which reuse only prefixes whose recurrent state is kept."""


class Case(SmallModel):
    def load(self, num_blocks: int = 400) -> ModelEngine:
        return load(self.folder, num_blocks)

    def request(
        self,
        number: int,
        text: str,
        pictures: Sequence[bytes],
        num_tokens: int = NUM_TOKENS,
        beam_width: int = 1,
    ) -> Request:
        made = self.encoder.encode(text, pictures, self.whole.config.get_text_config().vocab_size)
        return Request(
            number,
            made.token_ids,
            num_tokens,
            sampling=SamplingConfig(beam_width=beam_width),
            prompt_table=made.table,
            rotary_table=made.rotary,
            identity=PrefixIdentity(extra_ids=made.extra_ids),
            output=OutputOptions(return_perf_metrics=True),
        )

    def requests(
        self, prompts: Sequence[tuple[str, list[bytes]]], num_tokens: int = NUM_TOKENS
    ) -> list[Request]:
        return [self.request(number, *prompt, num_tokens) for number, prompt in enumerate(prompts)]

    def expected(self, text: str, pictures: Sequence[bytes], num_tokens: int = NUM_TOKENS) -> list[int]:
        return expected_tokens(self.whole, self.encoder._processor, text, pictures, num_tokens)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    whole = save_model(folder, request.param)
    return Case(request.param, folder, whole, PictureEncoder(str(folder), "float32"))


# transformers' generate has other positions than its forward after a prompt of Qwen that ends with a picture, so
# every text here goes on after its last one.
def of_every_family(fast: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", with_all(CASES, fast), indirect=True)


def num_reused(served: Served, requests: Sequence[Request]) -> list[int]:
    metrics = [served.result(request).perf_metrics for request in requests]
    return [each.num_reused_blocks for each in metrics if each is not None]


@of_every_family(CASES)
def test_tokens_are_those_of_the_whole_model(case: Case) -> None:
    prompts = [
        (f"<s>Compare {case.place} with {case.place}, please.", [WIDE, TALL]),
        (f"<s>Compare {case.place} with {case.place}, please.", [WIDE, WIDE]),
        (f"{case.place} is first", [TALL]),
    ]
    requests = case.requests(prompts)
    # A chunk has room for a little more than the largest picture, in case its tokens attend to each other.
    rows = max(request.prompt_table.num_rows for request in requests if request.prompt_table)
    served = serve(case.load(), config_of("chunked", max_num_tokens=max(32, rows // 2 + 8)), requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == case.expected(*prompt)


@of_every_family(["qwen3-vl", "gemma3-vision", "gemma4-large", "mistral3"])
def test_later_turns_reuse_the_pictures_of_earlier_ones(case: Case) -> None:
    turns = [f"<s>Look: {case.place} ok", " One. And this?", f" {case.place} and now?"]
    prompts = [("".join(turns[:count]), [WIDE, TALL][: 1 + count // 3]) for count in (1, 2, 3)]
    engine, requests = case.load(), case.requests(prompts)
    served = serve(engine, config_of("no-evict"), requests, per_iteration=1)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == case.expected(*prompt)
    reused = num_reused(served, requests)
    full = [request.prompt_length // engine.limits.tokens_per_block for request in requests]
    assert reused[0] == 0 and reused[1] >= full[0] > 1 and reused[2] >= full[1] > full[0]


@of_every_family(["smolvlm"])
def test_the_same_picture_shares_blocks_and_another_never(case: Case) -> None:
    text = f"<s>{case.place} is here, and {case.place}, too"
    pictures = ([WIDE, TALL], [WIDE, TALL], [TALL, WIDE], [WIDE, picture(13, 27, seed=2)])
    prompts = [(text, each) for each in pictures]
    requests = case.requests(prompts)
    served = serve(case.load(), config_of("no-evict"), requests, per_iteration=1)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == case.expected(*prompt)
    first, same, *others = num_reused(served, requests)
    assert first == 0 and same >= (requests[0].prompt_length - 1) // 8
    for request, reused in zip(requests[2:], others, strict=True):
        common = num_common_tokens(requests[0], request)
        assert reused <= -(-common // 8)  # the beginning of a block may be copied
        assert reused >= common // 8 or case.name in RECURRENT


def num_common_tokens(one: Request, other: Request) -> int:
    """Return the number of tokens before the first difference of two prompts or of their pictures."""
    pairs = zip(tokens_and_pictures(one), tokens_and_pictures(other))
    return next(at for at, (mine, others) in enumerate(pairs) if mine != others)


def tokens_and_pictures(request: Request) -> list[tuple[int, int]]:
    assert request.identity is not None
    return list(zip(request.input_token_ids, request.identity.extra_ids, strict=True))


@of_every_family(["mistral3"])
def test_paused_requests_get_the_same_tokens(case: Case) -> None:
    prompts = [
        (f"<s>Compare {case.place} with {case.place}, please.", [WIDE, TALL]),
        (f"<s>What is {case.place}?", [picture(20, 20, seed=2)]),
        (f"{case.place} is first", [TALL]),
    ]
    requests = case.requests(prompts, 30)
    num_blocks = sum(-(-request.prompt_length // 8) for request in requests) + 4
    served = serve(case.load(num_blocks), config_of("utilization"), requests, per_iteration=3)
    assert served.num_pauses > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == case.expected(*prompt, 30)


@of_every_family(["llava"])
def test_beams_are_those_of_the_whole_model(case: Case) -> None:
    text, pictures = f"<s>Compare {case.place} with {case.place}, please.", [WIDE, TALL]
    request = case.request(1, text, pictures, beam_width=3)
    served = serve(case.load(), config_of("no-evict"), [request])
    expected = expected_beams(case.whole, case.encoder._processor, text, pictures, NUM_TOKENS, 3)
    assert served.beams(request) == expected
