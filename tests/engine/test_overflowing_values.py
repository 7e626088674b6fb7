"""A sequence with NaN or infinite values is answered with an error and affects no other, in its batch or later.

A checkpoint in which some tokens' embeddings have NaN or infinity simulates a model that overflows on some input.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from tests.engine.driver import Driver, load_engine
from tests.engine.failing import serve_through_faults
from tests.engine.kernels import needs_native
from tests.engine.serving import config_of, load
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

OVERFLOWING = {7: float("nan"), 8: float("inf"), 9: -float("inf")}
"""Token ids, and the values of their embeddings."""
WAYS = [
    *(pytest.param("native", dtype, "auto", marks=needs_native) for dtype in ("float32", "bfloat16", "int8")),
    *(pytest.param("native", "float32", cache, marks=needs_native) for cache in ("int8", "fp8")),
    *(("torch", dtype, "auto") for dtype in ("float32", "bfloat16")),
    *(("torch", "float32", cache) for cache in ("int8", "fp8")),
]

SAMPLED = SamplingConfig(top_k=5, random_seed=3)

every_way = pytest.mark.parametrize(("kernels", "dtype", "cache"), WAYS)


@pytest.fixture(scope="module")
def overflowing(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overflowing") / "model"
    shutil.copytree(zoo["llama-gqa"].folder, folder)
    tensors = load_file(folder / "model.safetensors")
    for token, value in OVERFLOWING.items():
        tensors["model.embed_tokens.weight"][token, token] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def harmless(model: ZooModel, length: int, seed: int) -> tuple[int, ...]:
    return tuple(token if token not in OVERFLOWING else 50 for token in model.prompt(length, seed))


@every_way
@pytest.mark.parametrize(
    ("token", "place"), with_all(itertools.product(OVERFLOWING, [0, 10, 20]), [(7, 10), (8, 10)])
)
def test_a_nan_is_detected_at_any_position(
    zoo: Zoo, overflowing: Path, kernels: str, dtype: str, cache: str, token: int, place: int
) -> None:
    """The NaN comes from the beginning of the context, from a later chunk, or from the last token."""
    engine = load_engine(overflowing, kernels=kernels, dtype=dtype, kv_cache_dtype=cache)
    prompt = list(harmless(zoo["llama-gqa"], 21, 1))
    prompt[place] = token
    driver = Driver(engine)
    row = driver.start(prompt)
    driver.step({row: 9})
    with pytest.raises(FloatingPointError, match=f"slot {row.slot}"):
        driver.step({row: 12})


@every_way
def test_requests_beside_a_nan_are_unaffected(
    zoo: Zoo, overflowing: Path, kernels: str, dtype: str, cache: str
) -> None:
    model = zoo["llama-gqa"]
    harmful = tuple((token,) for token in OVERFLOWING)
    requests = [
        Request(0, harmless(model, 30, 0), 12, bad_words=harmful),
        Request(1, (*harmless(model, 12, 1), 7, *harmless(model, 5, 2)), 12),
        Request(2, harmless(model, 13, 3), 12, bad_words=harmful, sampling=SAMPLED),
        Request(3, harmless(model, 9, 4), 12, bad_words=harmful, sampling=SamplingConfig(beam_width=2)),
    ]
    engine = load(overflowing, 40, 6, kernels=kernels, dtype=dtype, kv_cache_dtype=cache)
    config = config_of("chunked", max_beam_width=2)
    served = serve_through_faults(engine, config, requests, faulty_id=1)
    expected = serve_through_faults(engine, config, [requests[0], *requests[2:]])
    assert served.keys() == expected.keys()
    if kernels == "native" or dtype == "float32":  # torch's products in bfloat16 depend on a batch's shape
        for key, result in served.items():
            assert result.output_token_ids == expected[key].output_token_ids


def leave_behind(engine: ModelEngine, value: float) -> None:
    """Fill every block that can be allocated."""
    cache, count = engine.runner.cache, engine.limits.num_blocks
    with torch.inference_mode():
        cache._blocks[0][:, :, :count] = value if cache.quantization is None else 127  # NaN as float8 too
        cache._scales[0][:, :, :count] = value


@every_way
@pytest.mark.parametrize("case", with_all(["llama-gqa", "mistral-window", "gpt2"], ["mistral-window"]))
@pytest.mark.parametrize("tokens_per_block", with_all([2, 24], [2]))
def test_a_nan_left_in_a_block_affects_no_later_sequence(
    zoo: Zoo, case: str, kernels: str, dtype: str, cache: str, tokens_per_block: int
) -> None:
    """Contexts of even and odd lengths, whole and in chunks, side by side, followed by generation."""
    model = zoo[case]
    engine = load_engine(
        model.folder, kernels=kernels, dtype=dtype, kv_cache_dtype=cache, tokens_per_block=tokens_per_block
    )
    runs = []
    for left_behind in (float("nan"), float("inf"), 0.0):
        driver = Driver(engine)
        rows = [driver.start(model.prompt(length, length)) for length in (1, 2, 21, 34)]
        short, even, odd, long = rows
        driver.step({short: 1, odd: 10, long: 34})
        driver.step({even: 2, odd: 11}, [short, long])
        for _ in range(9):
            driver.step(generation=rows)
        runs.append(rows)
        leave_behind(engine, left_behind)
    for clean, *others in zip(*runs, strict=True):
        assert torch.stack(clean.logits).isfinite().all()
        for row in others:
            assert row.generated == clean.generated
            assert torch.equal(torch.stack(row.logits), torch.stack(clean.logits))


@every_way
def test_a_nan_left_in_a_block_is_not_copied_between_beams(
    zoo: Zoo, kernels: str, dtype: str, cache: str
) -> None:
    """Beams diverge inside a block whose remaining positions have not been written."""
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, kernels=kernels, dtype=dtype, kv_cache_dtype=cache)
    found = []
    for _ in range(2):
        driver = Driver(engine)
        search = driver.search(model.prompt(11), SamplingConfig(beam_width=3))
        driver.step({search.row: 11}, searches=[search])
        for _ in range(10):
            driver.step(searches=[search])
        assert search.num_copies > 0
        found.append((search.generated, [beam.score for beam in search.beams]))
        leave_behind(engine, float("nan"))
    assert found[0] == found[1]
