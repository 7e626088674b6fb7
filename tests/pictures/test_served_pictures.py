"""Prompts with pictures from the encoder through the engine, compared with transformers' whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.request import OutputOptions, Request
from inflight.pictures.encoder import PictureEncoder
from tests.engine.serving import config_of, load, serve
from tests.pictures.small_models import CASES, expected_tokens, picture, placeholder, save_model

NUM_TOKENS = 12
WIDE, TALL = picture(30, 18), picture(13, 27, seed=1)


def request_of(
    encoder: PictureEncoder, vocab_size: int, number: int, text: str, pictures: list[bytes]
) -> Request:
    made = encoder.encode(text, pictures, vocab_size)
    return Request(
        number,
        made.token_ids,
        NUM_TOKENS,
        prompt_table=made.table,
        rotary_table=made.rotary,
        identity=PrefixIdentity(extra_ids=made.extra_ids),
    )


@pytest.mark.parametrize("case", ["qwen3-vl", "gemma3-vision", "gemma4-large"])
def test_later_turns_reuse_the_pictures_of_earlier_ones(case: str, tmp_path: Path) -> None:
    whole, place = save_model(tmp_path, case), placeholder(case)
    encoder = PictureEncoder(str(tmp_path), "float32")
    turns = [f"<s>Look: {place} ok", " One. And this?", f" {place} and now?"]
    prompts = [("".join(turns[:count]), [WIDE, TALL][: 1 + count // 3]) for count in (1, 2, 3)]
    engine = load(tmp_path, 400, 4)
    requests = [
        replace(
            request_of(encoder, engine.limits.vocab_size, number, *prompt),
            output=OutputOptions(return_perf_metrics=True),
        )
        for number, prompt in enumerate(prompts)
    ]
    served = serve(engine, config_of("no-evict"), requests, per_iteration=1)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(whole, encoder._processor, *prompt, NUM_TOKENS)
    metrics = [served.result(request).perf_metrics for request in requests]
    reused = [each.num_reused_blocks for each in metrics if each is not None]
    full = [request.prompt_length // engine.limits.tokens_per_block for request in requests]
    assert reused[0] == 0 and reused[1] >= full[0] > 1 and reused[2] >= full[1] > full[0]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_whole_model(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(case)
    whole, place = save_model(folder, case), placeholder(case)
    encoder = PictureEncoder(str(folder), "float32")
    prompts = [
        (f"<s>Compare {place} with {place}, please.", [WIDE, TALL]),
        (f"<s>Compare {place} with {place}, please.", [WIDE, WIDE]),
        (f"{place} is first", [TALL]),
    ]
    engine = load(folder, 400, 4)
    requests = [
        request_of(encoder, engine.limits.vocab_size, number, *prompt)
        for number, prompt in enumerate(prompts)
    ]
    # A chunk has room for a little more than the largest picture, in case its tokens attend to each other.
    rows = max(request.prompt_table.num_rows for request in requests if request.prompt_table)
    served = serve(engine, config_of("chunked", max_num_tokens=max(32, rows // 2 + 8)), requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert served.tokens(request) == expected_tokens(whole, encoder._processor, *prompt, NUM_TOKENS)
