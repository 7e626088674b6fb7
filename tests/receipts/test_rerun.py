"""Receipts of the demo model: the same tokens under other batches, chunkings and policies, and alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inflight.core.ports import EngineClient
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.sampling_config import SamplingConfig
from inflight.receipts.document import NO_TEXT, Receipt, finished
from inflight.receipts.rerun import Rerun, Sources
from inflight.receipts.verify import first_difference
from inflight.server.repository import default_repository
from tests.openai_endpoint.serving import DEMO
from tests.receipts.factories import (
    TOKENIZER,
    Asked,
    asked_again,
    engine,
    make_request,
    run_together,
    sampled,
    stopping,
)
from tests.tiers import examples, with_all

PROMPTS = ("def area(radius):", "import os\n", "for i in range(10):\n    print(", "class Stack:\n")
CHUNKED = {"enable_chunked_context": "true", "max_num_tokens": "48"}
OTHERS = {
    "chunks": {**CHUNKED, "context_chunking_policy": "equal_progress", "engine_threads": "1"},
    "pauses": {**CHUNKED, "batch_scheduler_policy": "max_utilization", "max_tokens_in_paged_kv_cache": "512"},
    "static": {"gpt_model_type": "V1"},
    "no reuse": {"enable_kv_cache_reuse": "false", "max_batch_size": "8"},
    "queue": {"batch_scheduler_policy": "max_utilization"},
    "longest prefix first": {**CHUNKED, "schedule_policy": "lpm", "max_batch_size": "4"},
}
SOURCES = Sources(default_repository(), model=str(DEMO), settings={"max_tokens_in_paged_kv_cache": "8192"})


def draw(seed: int) -> Asked:
    """Return a random request."""
    chance = random.Random(seed)
    text = chance.choice(PROMPTS) * chance.choice((1, 1, 6))
    kind = seed % 6
    fields: dict[str, object] = {"end_ids": chance.choice(((), (2,)))}
    options = NO_TEXT
    sampling = sampled(random_seed=chance.getrandbits(64), top_k=chance.choice((0, 20)))
    if kind == 1:
        sampling = SamplingConfig()
    elif kind == 2:
        options = stopping("\n", "return", min_tokens=chance.choice((0, 3)))
    elif kind == 3:
        sampling = replace(sampling, num_return_sequences=2, repetition_penalty=1.2)
    elif kind == 4:
        sampling = SamplingConfig(beam_width=3, num_return_sequences=2)
    elif kind == 5:
        fields["guide"] = Guide(GuideKind.REGEX, "[a-z]{3,12}( [0-9]+)*")
    request = make_request(TOKENIZER.encode(text), chance.randint(4, 24), sampling=sampling, **fields)
    return request, options


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with engine() as client:
        yield client


@pytest.fixture(scope="module")
def receipts(client: EngineClient) -> list[Receipt]:
    """Receipts of requests that ran side by side."""
    return run_together(client, [draw(seed) for seed in range(examples(fast=18, all=200))])


@pytest.mark.parametrize("name", with_all(OTHERS, ["chunks", "pauses"]))
def test_tokens_are_equal_beside_other_requests(receipts: list[Receipt], name: str) -> None:
    asked = [asked_again(receipt) for receipt in receipts]
    order = list(range(len(asked)))
    random.Random(name).shuffle(order)
    noise = [draw(10_000 + seed) for seed in range(4)]
    with engine(**OTHERS[name]) as other:
        found = run_together(other, [*noise, *(asked[number] for number in order)], streaming=name == "queue")
    for number, again in zip(order, found[len(noise) :], strict=True):
        assert first_difference(receipts[number], again) == "", receipts[number].request
        assert again.request == receipts[number].request
        assert again.model == receipts[number].model


def test_equal_requests_have_equal_receipts(client: EngineClient, receipts: list[Receipt]) -> None:
    again = run_together(client, [asked_again(receipt) for receipt in receipts[::-1]])[::-1]
    assert [finished(each, "") for each in again] == [finished(each, "") for each in receipts]


def test_receipts_contain_the_tokens_up_to_the_stop_string(receipts: list[Receipt]) -> None:
    stopped = [receipt for receipt in receipts if receipt.request.stop_strings]
    ends = [receipt.outputs[0] for receipt in stopped if receipt.outputs[0].finish_reason == "STOP_WORDS"]
    assert ends
    for output in ends:
        text, before = TOKENIZER.decode(output.token_ids), TOKENIZER.decode(output.token_ids[:-1])
        assert ("\n" in text or "return" in text) or len(output.token_ids) <= 3, (text, before)


def test_a_receipt_is_rerun_alone(receipts: list[Receipt]) -> None:
    chosen = [receipts[2], receipts[4]] if examples(fast=1, all=2) == 1 else receipts[:12]
    for receipt in chosen:
        rerun = Rerun(receipt, SOURCES)
        assert rerun.files() == receipt.model.files
        again = rerun.run()
        assert first_difference(receipt, again) == ""
        assert (again.engine, again.software) == (receipt.engine, receipt.software)


def test_special_tokens_divide_stop_strings_only_if_they_are_shown(client: EngineClient) -> None:
    (special,) = TOKENIZER.special_ids
    sampling = sampled(
        random_seed=3, logit_bias_ids=(special,), logit_bias_values=(7.0,), presence_penalty=7.0
    )  # gives about one special token
    request = make_request(TOKENIZER.encode(PROMPTS[0]), 24, sampling=sampling)
    (whole,) = run_together(client, [(request, NO_TEXT)])
    ids = whole.outputs[0].token_ids
    place = next(
        n for n in range(1, len(ids) - 1) if ids[n] == special and special not in (ids[n - 1], ids[n + 1])
    )
    stop = TOKENIZER.decode((ids[place - 1], ids[place + 1]))
    several = [(request, stopping(stop, skip_special_tokens=skips)) for skips in (True, False)]
    skipping, showing = run_together(client, several)
    assert skipping.outputs[0].finish_reason == "STOP_WORDS"
    assert showing.outputs == whole.outputs
    assert "skip_special_tokens" not in finished(skipping, "")  # as receipts that lack the field
    again = Rerun(showing, SOURCES).run()
    assert first_difference(showing, again) == ""
    assert again.request == showing.request


def test_a_receipt_names_code_and_settings(receipts: list[Receipt]) -> None:
    made = json.loads(finished(receipts[0], ""))
    assert set(made["model"]["files"]) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (made["engine"]["dtype"], made["engine"]["parameters"]) == ("float32", {"dtype": "float32"})
    assert made["engine"]["kernels"] in ("native", "torch") and made["engine"]["instruction_set"]
    assert made["software"].keys() == {"inflight", "torch"}
