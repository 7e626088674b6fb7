"""On a fake device: an iteration over plans waits for it once, when its tokens arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.core.request.request import OutputOptions
from inflight.core.schedule.batch import EngineLimits
from inflight.engine.engine import ModelEngine
from inflight.engine.load import make_engine
from inflight.engine.runner import ModelRunner
from inflight.engine.tensorrt.decoder import TensorRtDecoder
from inflight.engine.tensorrt.row_cache import RowCache
from inflight.engine.tensorrt.sidecar import Plan, Sidecar
from inflight.models import read_model_description
from inflight.models.sharding import Part
from tests.engine.driver import Driver, Row
from tests.engine.fake_device import DEVICE, FakeDevice, _OnDevice, _values
from tests.engine.serving import config_of, serve
from tests.engine.tensorrt import engines, interpreter
from tests.engine.tensorrt.conftest import Plans
from tests.engine.test_overlapped_iterations import without_host_waits
from tests.engine.test_waits import ONE_COPY
from tests.models.zoo import Zoo
from tests.tiers import examples


class PlanOnDevice:
    """A `LoadedPlan` whose tensors are the fake device's."""

    def __init__(self, folder: Path, spec: Plan) -> None:
        network, _, _ = torch.load(folder / spec.file.name, weights_only=True)
        self.spec = spec
        self._network = interpreter.load(network)
        self._fixed: dict[str, Tensor] = {}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        self._fixed |= tensors

    def run(self, inputs: Mapping[str, Tensor], recording: Any = None) -> dict[str, Tensor]:
        given = {name: _values(tensor) for name, tensor in (self._fixed | dict(inputs)).items()}
        assert all(isinstance(tensor, _OnDevice) for tensor in inputs.values())
        with torch.utils._python_dispatch._disable_current_modes():
            found = interpreter.evaluate(self._network, given)
        return {name: _OnDevice(value) for name, value in found.items() if name not in given}


@torch.inference_mode()
def load(folder: Path, num_blocks: int = 80) -> ModelEngine:
    decoder = read_model_description(folder).decoder
    sidecar, part = Sidecar.read(folder / "rank0.json"), Part.whole(decoder)
    settings = sidecar.settings
    cache = RowCache(
        part.held_config(decoder),
        settings.max_batch_size,
        settings.max_seq_len,
        num_blocks,
        8,
        True,
        torch.float32,
        DEVICE,
    )
    layers, head = PlanOnDevice(folder, sidecar.layers), PlanOnDevice(folder, sidecar.head)
    made = TensorRtDecoder(decoder, part, settings, layers, head, cache)  # type: ignore[arg-type]
    limits = EngineLimits(
        decoder.vocab_size,
        settings.max_seq_len,
        settings.max_batch_size,
        num_blocks,
        8,
        overlaps_iterations=True,
    )
    return make_engine(ModelRunner(made, cache, limits, 512))


def test_each_batch_waits_for_the_device_once(zoo: Zoo, plans: Plans) -> None:
    """Batches have chunks, chunks beside generation, or generation only; some rows are filled from other
    sequences' blocks."""
    model = zoo["llama-gqa"]
    folder = plans(model, max_context_chunks=1)
    with FakeDevice() as device:
        driver = Driver(load(folder))
        first = driver.start(model.prompt(21))
        others = [driver.start(model.prompt(9, 1)), driver.start(model.prompt(5, 2))]

        def step(chunks: Mapping[Row, int], generation: Sequence[Row] = ()) -> None:
            batch = driver.batch(chunks, generation)
            device.waits.clear()
            output = driver.engine.decode(batch, driver.engine.forward(batch))
            assert device.waits == ONE_COPY
            for row, tokens in zip((*chunks, *generation), output.token_ids, strict=True):
                row.num_computed = len(row.tokens)
                row.tokens += tokens

        step({first: 21})
        step({others[0]: 9, others[1]: 5}, [first])
        for _ in range(4):
            step({}, [*others, first])
        sharing = driver.start(first.tokens[:22], shared_blocks=first.blocks[:2])
        step({sharing: 6}, [first])
        for _ in range(3):
            step({}, [sharing, *others])
    for row in (first, *others, sharing):
        prompt = tuple(row.tokens[: row.prompt_length])
        assert row.generated == model.greedy(prompt, len(row.generated))


def test_overlapped_iterations_give_the_same_tokens(zoo: Zoo, plans: Plans, monkeypatch) -> None:
    """A batch is queued before the previous one's tokens are read, as on a GPU."""
    model = zoo["llama-gqa"]
    requests = [
        replace(each, output=OutputOptions()) for each in without_host_waits(model)[: examples(6, all=12)]
    ]
    expected = serve(engines.load(plans(model), 40, max_num_sequences=6), config_of("chunked"), requests)
    with FakeDevice() as device:
        monkeypatch.setattr("inflight.sampling.transfer.record_event", device.record_event)
        served = serve(load(plans(model), 40), config_of("chunked"), requests)
    assert served.most_in_flight == 2
    for request_id, index in expected.responses:
        assert served.tokens(request_id, index) == expected.tokens(request_id, index)
