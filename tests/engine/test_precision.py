"""bfloat16, float16, int8, fp8: the same model, with an error within the bounds for each format given here."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.engine.driver import alone, load_engine
from tests.engine.kernels import by_default_and
from tests.models.zoo import Zoo
from tests.tiers import with_all

# Root mean square error of the logits over their standard deviation. Measured here, with compiled layers and
# torch: 0.018 to 0.056 in bfloat16, 0.0025 to 0.0076 in float16, 0.035 to 0.106 with int8 weights;
# transformers' own forward pass of these models: 0.024 to 0.082 in bfloat16 and 0.0031 to 0.0100 in float16.
BOUND = {"bfloat16": 0.08, "float16": 0.01, "int8": 0.15, "fp8": 0.5}


def _relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return ((logits - exact).square().mean().sqrt() / exact.std()).item()


@pytest.mark.parametrize(("dtype", "kernels"), by_default_and(["bfloat16", "int8"], list(BOUND)))
@pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "mistral-window", "qwen3", "gpt2"], ["llama-gqa", "gpt2"])
)
def test_error_of_each_dtype_is_bounded(zoo: Zoo, case: str, dtype: str, kernels: str | None) -> None:
    model = zoo[case]
    engine = load_engine(model.folder, dtype=dtype, kernels=kernels)
    prompt = model.prompt(32)

    row = alone(engine, prompt, 24)

    assert engine.dtype == ("bfloat16" if dtype in ("int8", "fp8") else dtype)
    exact = model.logits(row.tokens)[len(prompt) - 1 : -1]
    ours = _relative_error(torch.stack(row.logits), exact)
    assert ours < BOUND[dtype]


def test_a_half_precision_checkpoint_is_loaded_as_it_is(
    zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = zoo["llama"]
    folder = tmp_path_factory.mktemp("half")
    copy.deepcopy(model.oracle).bfloat16().save_pretrained(folder)  # other tests use the model itself
    engine = load_engine(folder)
    assert engine.dtype == engine.decoder_config.dtype == "bfloat16"
