"""Latent attention of compiled layers, compared with torch's operators, in both forms and with windows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.engine.cpu.targets import on_own_and_generic
from tests.engine.driver import Driver, load_engine
from tests.engine.kernels import needs_native
from tests.models.zoo import Zoo, ZooModel

pytestmark = [needs_native, on_own_and_generic, pytest.mark.usefixtures("target")]
CHUNKS = {"absorbed": 3, "decompressed": 150, "both": 40}
"""Tokens per chunk, by the form in which chunks after the first are computed; 40 use both forms."""


def _logits(model: ZooModel, chunk: int, **changes: Any) -> torch.Tensor:
    """Logits of the last token of each prefill chunk and of six decode steps, for three prompts."""
    driver = Driver(load_engine(model.folder, max_num_sequences=20, **changes))
    rows = [driver.start(model.prompt(length, seed=length)) for length in (5, 66, 147)]
    for row in rows:
        stops = [*range(0, len(row.tokens), chunk), len(row.tokens)]
        for begin, end in pairwise(stops):
            driver.step({row: end - begin})
    for _ in range(6):
        driver.step(generation=rows)
    return torch.stack([logits for row in rows for logits in row.logits])


@pytest.mark.parametrize("case", ["deepseek-v3", "deepseek-v2-lite", "deepseek-v3-half-rotation"])
@pytest.mark.parametrize("form", CHUNKS)
def test_chunks_in_either_form_give_transformers_logits(zoo: Zoo, case: str, form: str) -> None:
    model = zoo[case]
    prompt = model.prompt(150)
    driver = Driver(load_engine(model.folder, kernels="native"))
    row = driver.start(prompt)
    driver.generate(row, 20, CHUNKS[form])
    assert row.generated == model.greedy(prompt, 20)
    expected = model.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=1e-4)


def test_small_and_large_chunks_are_computed_in_different_forms(zoo: Zoo) -> None:
    """The forms round differently; if all chunks had one form, the logits would be bitwise the same."""
    absorbed, decompressed = (
        _logits(zoo["deepseek-v3"], CHUNKS[form], kernels="native") for form in ("absorbed", "decompressed")
    )
    assert not torch.equal(absorbed, decompressed)


@pytest.mark.parametrize("form", CHUNKS)
def test_rows_with_windows_have_the_logits_of_torchs_operators(zoo: Zoo, form: str) -> None:
    model, windows = zoo["deepseek-v3"], {"max_attention_window_size": (70, 19, 256), "sink_token_length": 4}
    found, expected = (
        _logits(model, CHUNKS[form], kernels=kernels, **windows) for kernels in ("native", "torch")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("form", ["absorbed", "decompressed"])
def test_results_are_bitwise_the_same_with_any_number_of_threads(
    zoo: Zoo, form: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"kernels": "native", "dtype": dtype}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = _logits(zoo["deepseek-v3"], CHUNKS[form], **changes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(_logits(zoo["deepseek-v3"], CHUNKS[form], **changes), alone)
