"""LoRA adapters beside pictures, compared with PEFT on transformers' whole models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from inflight.adapters.peft_folder import read_peft_folder
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.adapter import LoraRequest, StoredAdapter
from inflight.core.request.request import OutputOptions, Request
from inflight.models import read_model_description
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.pictures.encoder import PictureEncoder
from tests.engine.driver import Driver, load_engine
from tests.engine.lora import stored
from tests.engine.serving import config_of, load, serve
from tests.pictures.small_models import CASES, generate, picture, placeholder, save_model
from tests.tiers import with_all

NUM_TOKENS = 12
WIDE, TALL = picture(30, 18), picture(13, 27, seed=1)
TARGETS = r".*(language|text)_model\..*layers\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
METRICS = OutputOptions(return_perf_metrics=True)


@dataclass(frozen=True, eq=False)
class Adapted:
    """A small model with adapters: by name PEFT's model and the adapter as the engine takes it."""

    folder: Path
    encoder: PictureEncoder
    place: str
    models: dict[str, Any]
    adapters: dict[str, StoredAdapter]

    def prompt(self, text: str, files: Sequence[bytes]) -> EncodedPrompt:
        vocab_size = read_model_description(self.folder).decoder.vocab_size
        return self.encoder.encode(text, files, vocab_size)


@cache
def expected(model: Adapted, name: str, text: str, files: tuple[bytes, ...]) -> tuple[list[int], Tensor]:
    """Return the greedy tokens with an adapter, and the logits from which they are chosen."""
    whole, processor = model.models[name], model.encoder._processor
    made, length = generate(whole, processor, text, files, NUM_TOKENS, output_logits=True)
    return made.sequences[0, length:].tolist(), torch.cat(made.logits).float()


def make(folder: Path, case: str) -> Adapted:
    whole = save_model(folder / "model", case)
    models, adapters = {"": whole}, {}
    for number, name in enumerate("ab", 1):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=4 * number, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
        adapted = peft.get_peft_model(copy.deepcopy(whole), config).eval()
        adapted.save_pretrained(folder / name)
        weights = read_peft_folder(folder / name, read_model_description(folder / "model"))
        models[name], adapters[name] = adapted, stored(weights, number)
    encoder = PictureEncoder(str(folder / "model"), "float32")
    return Adapted(folder / "model", encoder, placeholder(case), models, adapters)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    yield make(tmp_path_factory.mktemp("qwen"), "qwen3-vl")


def check_logits_and_tokens(model: Adapted) -> None:
    text = f"<s>Compare {model.place} with {model.place}, please."
    prompt = model.prompt(text, [WIDE, TALL])
    driver = Driver(load_engine(model.folder, dtype="float32", tokens_per_block=32))
    # A chunk does not end inside a picture whose tokens see each other.
    chunk = None if any(read_model_description(model.folder).decoder.bidirectional_layers) else 17
    for name in model.models:
        adapter = driver.put(model.adapters[name]) if name else -1
        row = driver.start(
            prompt.token_ids, adapter=adapter, prompt_table=prompt.table, rotary_table=prompt.rotary
        )
        driver.generate(row, NUM_TOKENS, chunk)
        tokens, logits = expected(model, name, text, (WIDE, TALL))
        assert row.generated == tokens
        torch.testing.assert_close(torch.stack(row.logits), logits, rtol=0, atol=1e-4)
        driver.release(row)


def test_logits_and_tokens_are_pefts(qwen: Adapted) -> None:
    check_logits_and_tokens(qwen)


@pytest.mark.parametrize("case", with_all([case for case in CASES if case != "qwen3-vl"], ["mistral3"]))
def test_logits_and_tokens_of_other_families_are_pefts(case: str, tmp_path: Path) -> None:
    check_logits_and_tokens(make(tmp_path, case))


def check_sharing(model: Adapted) -> None:
    text = f"<s>Compare {model.place} with {model.place}, please."
    prompt = model.prompt(text, [WIDE, TALL])
    names = ["", "a", "b", "a", "", "b"]
    requests = [
        Request(
            number,
            prompt.token_ids,
            NUM_TOKENS,
            prompt_table=prompt.table,
            rotary_table=prompt.rotary,
            identity=PrefixIdentity(extra_ids=prompt.extra_ids),
            lora=LoraRequest(number) if name else None,
            output=METRICS,
        )
        for number, name in enumerate(names)
    ]
    adapters = {number: model.adapters[name] for number, name in enumerate(names) if name}
    served = serve(load(model.folder, 400), config_of("no-evict"), requests, 1, adapters=adapters)
    reused = []
    for request, name in zip(requests, names, strict=True):
        assert served.tokens(request) == expected(model, name, text, (WIDE, TALL))[0]
        metrics = served.result(request).perf_metrics
        assert metrics is not None
        reused.append(metrics.num_reused_blocks)
    assert reused[:3] == [0, 0, 0] and min(reused[3:]) >= len(prompt.token_ids) // 8 - 1


def test_a_picture_is_shared_by_requests_with_one_adapter_alone(qwen: Adapted) -> None:
    check_sharing(qwen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["gemma3-vision", "gemma4-large", "mistral3"])
def test_a_picture_of_other_families_is_shared_with_one_adapter_alone(case: str, tmp_path: Path) -> None:
    check_sharing(make(tmp_path, case))
