"""On a GPU that TensorRT supports: plans have the CPU's results. These tests have not been run yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.core.request.request import OutputOptions, Request
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.engine.tensorrt.build import BuildOptions, build_engine
from inflight.engine.tensorrt.module import find_module, module_name
from inflight.errors import ConfigError
from tests.engine import test_served_adapters as adapters
from tests.engine.cuda.test_iteration_graphs import replay_everything
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.serving import WAYS, config_of, serve, to_torch
from tests.models.zoo import Zoo, ZooModel


def why_not() -> str:
    """Return the reason why plans cannot run here; "" if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        module = find_module()
    except ConfigError as error:
        return str(error)
    if module_name(module) == "tensorrt_rtx" and torch.cuda.get_device_capability() == (9, 0):
        return "TensorRT for RTX does not run on Hopper"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]
SIZES = {"max_batch_size": 6, "max_seq_len": 128, "max_num_tokens": 512, "dtype": "float32"}


def load(model: ZooModel, folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> ModelEngine:
    """Build plans on this machine, and load an engine; `options` are the build's."""
    build_engine(model.folder, folder, BuildOptions(**(SIZES | options)))
    values = {"max_num_sequences": 4, "tokens_per_block": 8, "max_num_tokens": 512} | (changes or {})
    values.setdefault("max_tokens_in_paged_kv_cache", 8 * 40)
    return load_engine(EngineConfig(str(folder), device="cuda", implementation="tensorrt", **values))


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "qwen3", "gpt2", "gemma3", "mixtral"])
def test_greedy_tokens_and_logits_in_float32_are_those_of_transformers(
    zoo: Zoo, tmp_path: Path, case: str
) -> None:
    model = zoo[case]
    output = OutputOptions(return_generation_logits=True)
    requests = [
        Request(number, model.prompt(9 + 14 * number, number), 30, output=output) for number in range(4)
    ]
    served = serve(load(model, tmp_path), config_of("chunked"), requests)
    for request in requests:
        expected = model.greedy(request.input_token_ids, 30)
        assert served.tokens(request) == expected
        found = to_torch(served.result(request).generation_logits[0])
        wanted = model.logits([*request.input_token_ids, *expected])[request.prompt_length - 1 : -1]
        torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_mixed_requests_give_transformers_tokens_in_every_way_of_serving(
    zoo: Zoo, tmp_path: Path, way: str
) -> None:
    model = zoo["llama-gqa"]
    requests = some_of_everything(model)
    served = serve(load(model, tmp_path), config_of(way, max_beam_width=3), requests, 4)
    assert_as_transformers(model, served, requests)


@pytest.mark.parametrize("options", [{"attention": "packed"}, {"weights": "inputs"}], ids=str)
def test_packed_attention_and_weights_as_inputs_give_transformers_tokens(
    zoo: Zoo, tmp_path: Path, options: dict[str, str]
) -> None:
    """TensorRT for RTX does not build packed attention; these tests show whether and where TensorRT does."""
    model = zoo["llama-gqa"]
    try:
        engine = load(model, tmp_path, **options)
    except ConfigError as error:
        if "attention" not in options:
            raise
        pytest.xfail(str(error))
    requests = some_of_everything(model)
    assert_as_transformers(model, serve(engine, config_of("chunked", max_beam_width=3), requests), requests)


def test_recorded_batches_give_the_same_tokens(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo["llama-gqa"]
    changes = {"max_num_sequences": 11, "max_tokens_in_paged_kv_cache": 8 * 200}
    folder = tmp_path / "plans"
    recorded = load(model, folder, changes, max_batch_size=12)
    assert recorded.recorded.generation_sizes == (1, 2, 4, 8, 11)
    assert recorded.recorded.mixed_sizes[0] == 16, "with chunks, too"
    tokens = replay_everything(recorded, model.prompt)
    recorded.close()
    eager = load(model, folder, changes | {"cuda_graph_mode": False}, max_batch_size=12)
    assert tokens == replay_everything(eager, model.prompt)


def test_adapters_give_the_tokens_of_torchs_operators(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo["llama-gqa"]
    requests = [each for each in adapters.requests_of(model) if not each.lora or each.lora.task_id != 3]
    engine = load(model, tmp_path, max_lora_rank=24)
    served = adapters.serve(engine, config_of("chunked"), requests, model)
    expected = adapters.alone(model, "torch")
    for request_id, index in served.responses:
        assert served.tokens(request_id, index) == expected[request_id].tokens(request_id, index)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_as_torch_is(zoo: Zoo, tmp_path: Path, dtype: str) -> None:
    """Logits of a prompt: their error is the dtype's, not that of a wrong operation."""
    model = zoo["llama-gqa"]
    (request,) = [Request(0, model.prompt(60), 2, output=OutputOptions(return_context_logits=True))]
    served = serve(load(model, tmp_path, dtype=dtype), config_of("no-evict"), [request])
    found, wanted = to_torch(served.result(request).context_logits), model.logits(request.input_token_ids)
    error = (found.view(wanted.shape) - wanted).square().mean().sqrt() / wanted.std()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)
