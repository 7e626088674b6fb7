"""Out of memory: a failed load names the bytes, and an iteration ends only requests that do not fit even alone."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine import load_decoder, memory
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache
from inflight.engine.layers.decoder import Decoder
from inflight.errors import ConfigError, StepFailed
from inflight.models import read_model_description
from inflight.models.loader import num_weight_bytes
from tests.engine.driver import load_engine
from tests.engine.failing import serve_through_faults
from tests.engine.serving import load
from tests.engine.test_after_failure import CASE, CONFIG, assert_same, make_requests, undisturbed
from tests.models.zoo import Zoo

CPU_TEXT = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
SAID = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    RuntimeError(CPU_TEXT),
    MemoryError("much"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("error", SAID, ids=lambda error: type(error).__name__)
def test_a_failed_load_states_the_size_of_the_weights(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder = zoo["llama"].folder
    monkeypatch.setattr(load_decoder, "load_weights", raising(error))
    monkeypatch.setattr(memory, "free_memory", lambda device: 7 << 20)
    with pytest.raises(ConfigError, match="too little memory for the weights") as caught:
        load_engine(folder, kernels="torch", dtype="bfloat16")
    wanted = num_weight_bytes(read_model_description(folder), torch.bfloat16, torch.bfloat16)
    said = str(caught.value)
    assert f"about {wanted / 2**20:.1f} MiB are needed, and 7.0 MiB were free on cpu before" in said
    assert "smaller dtype" in said and type(error).__name__ in said and "more" not in said.split("(")[-1]


@pytest.mark.parametrize("error", SAID, ids=lambda error: type(error).__name__)
def test_a_failed_load_by_transformers_states_the_size_of_the_weights(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder = zoo["llama"].folder
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", raising(error))
    monkeypatch.setattr(memory, "free_memory", lambda device: 7 << 20)
    with pytest.raises(ConfigError, match="too little memory for the weights") as caught:
        load_engine(folder, implementation="transformers")
    wanted = (folder / "model.safetensors").stat().st_size
    assert f"about {wanted / 2**20:.1f} MiB are needed" in str(caught.value)


def test_a_failed_load_states_the_size_of_cache_and_adapters(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo["llama"].folder
    with monkeypatch.context() as patched:
        patched.setattr(KvCache, "__init__", raising(SAID[0]))
        with pytest.raises(
            ConfigError, match=r"memory for the KV cache: .* lower kv_cache_free_gpu_mem_fraction"
        ):
            load_engine(folder)
    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "reserve_adapters", raising(SAID[0]))
        with pytest.raises(ConfigError, match=r"for LoRA adapters: .* lower lora_cache_gpu_memory_fraction"):
            load_engine(folder, kernels="torch", lora_cache_gpu_memory_fraction=0.01)


def test_memory_of_a_failed_load_is_free() -> None:
    allocated: list[weakref.ref[torch.Tensor]] = []

    def allocate() -> None:
        tensor = torch.zeros(10)
        allocated.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with (
        pytest.raises(ConfigError) as caught,
        memory.allocating("it", lambda: 40, torch.device("cpu"), "take less"),
    ):
        allocate()
    assert allocated[0]() is None and caught.value is not None


def test_other_errors_of_a_load_are_unchanged(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_decoder, "load_weights", raising(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        load_engine(zoo["llama"].folder, kernels="torch")


def limit(engine: ModelEngine, is_too_much: Callable[[ScheduledBatch], bool]) -> list[str]:
    """Let the forward pass of some batches run out of memory; the result collects what is reported of them."""
    run, forward, said = engine.runner.run, engine.forward, []

    def limited(batch: ScheduledBatch, hidden: torch.Tensor | None) -> Any:
        outputs = run(batch, hidden)
        if is_too_much(batch):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return outputs

    def noting(batch: ScheduledBatch) -> Any:
        try:
            return forward(batch)
        except StepFailed as error:
            said.append(str(error))
            raise

    engine.runner.run = limited  # type: ignore[method-assign]
    engine.forward = noting  # type: ignore[method-assign]
    return said


def test_only_a_request_that_does_not_fit_alone_ends(zoo: Zoo) -> None:
    model = zoo[CASE]
    expected, requests = undisturbed(model, "torch"), make_requests(model)
    faulty = requests[3]
    engine = load(model.folder, 100, 7, kernels="torch")

    def is_too_much(batch: ScheduledBatch) -> bool:
        slots, runner = engine.sampler._slots, engine.runner
        found = [(slot, slots.requests[slot]) for slot in batch.sampled_slots()]
        return any(
            each is not None
            and each.request.request_id == faulty.request_id
            and runner.slots.num_tokens[slot] > 25
            for slot, each in found
        )

    said = limit(engine, is_too_much)
    served = serve_through_faults(engine, CONFIG, requests, faulty_id=faulty.request_id)
    assert served.keys() == expected.keys() - {(faulty.request_id, 0)}
    for key, result in served.items():
        assert_same(result, expected[key])
    assert "there was too little memory for an iteration of 1 rows" in said[-1]
    assert "OutOfMemoryError: CUDA out of memory" in said[-1] and "max_num_tokens" in said[-1]


def test_too_large_batches_are_halved_and_no_request_ends(zoo: Zoo) -> None:
    model = zoo[CASE]
    expected = undisturbed(model, "torch")
    engine = load(model.folder, 100, 7, kernels="torch")
    said = limit(engine, lambda batch: len(batch.sampled_slots()) > 4)
    served = serve_through_faults(engine, CONFIG, make_requests(model))
    assert said, "some batch was too large"
    assert served.keys() == expected.keys()
    for key, result in served.items():
        assert_same(result, expected[key])
