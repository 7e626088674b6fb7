"""One engine for every device: a ModelRunner computes logits, and the Sampler chooses tokens from them.

Where several ranks share a model, one of them has a runner and the Sampler, the others have a runner alone, and
`ranks/rank_engine.py` keeps them in step. One thread calls all of it, the loop's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.engine.additional_outputs import with_token_rows
from inflight.engine.cuda.iteration_graphs import RecordedKinds
from inflight.engine.memory import computing
from inflight.engine.runner import ModelRunner, RowOutputs
from inflight.models import DecoderConfig
from inflight.sampling import Choice, Sampler


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch between `forward` and `decode`, which may come after the next `forward`.

    Attributes:
        result: The tokens that the device has chosen, if the batch samples on the device, and what is left to do
            for its rows that need the host; else the logits to choose from, as `ModelRunner.run` returns them.
        positions: [rows] on the host: where in its sequence the token belongs that each row chooses.
        outputs: What the forward pass has made beside.
    """

    result: Choice | Tensor
    positions: NDArray[np.int64]
    outputs: RowOutputs


class ModelEngine:
    """Implements `inflight.core.ports.Engine` with a runner of a whole model and a Sampler.

    With a runner of the last pipeline stage it is one of that stage's ranks, for `RankEngine`: the one that
    chooses tokens, or one whose Sampler only calls the logits post-processors, so that what they keep is the same
    at all ranks with these logits.

    Args:
        runner: Closed with this object.
        sampler: Chooses the tokens.
        chooses_tokens: Whether this rank does; if not, another chooses from the same logits.

    Attributes:
        limits: What requests and batches may ask for.
        runner: As given.
        sampler: As given.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, chooses_tokens: bool = True) -> None:
        self.limits = runner.limits
        self.runner = runner
        self.sampler = sampler
        self._chooses_tokens = chooses_tokens

    @property
    def decoder_config(self) -> DecoderConfig:
        """The checkpoint's description of the model."""
        return self.runner.decoder_config

    @property
    def dtype(self) -> str:
        """The dtype of weights, activations and KV cache: float32, bfloat16 or float16."""
        return self.runner.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, by the checkpoint."""
        return self.runner.eos_token_ids

    @property
    def kernels(self) -> str:
        """The implementation of the layers: "native", "torch", "transformers" or "tensorrt"."""
        return self.runner.kernels

    @property
    def recorded(self) -> RecordedKinds:
        """The kinds of batches that are recorded as CUDA graphs."""
        return self.runner.recorded

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Pending:
        """Run the forward pass, and let the device choose the tokens of a batch that samples on the device.

        If this or `decode` raises, whatever the reason, the sequences of the batch have to start again; nothing
        else is affected. `hidden` is as for `ModelRunner.run`.

        Raises:
            ValueError: As `ModelRunner.run`; or a row carries on a sequence whose last batch failed.
            StepFailed: There is too little memory for the batch.
        """
        runner = self.runner
        with runner.void_slots.watch(batch), computing(batch.num_rows):
            runner.void_slots.refuse(batch)
            self.sampler.apply(batch)
            outputs = runner.run(batch, hidden)
            positions = runner.slots.positions(batch)
            if batch.samples_on_device and len(positions):
                choice = self.sampler.begin(batch, outputs.rows, positions)
                runner.slots.feed(batch, choice.tokens)
                return Pending(choice, positions, outputs)
        if not self._chooses_tokens:
            self.sampler.post_process(batch, outputs.rows, positions)
        return Pending(outputs.rows, positions, outputs)

    @torch.inference_mode()
    def decode(self, batch: ScheduledBatch, pending: Pending) -> ModelOutput:
        """Choose what follows every sampled row, and feed it to its slot next; beams are only ranked.

        Called before the next `forward`, but for a batch that samples on the device: before the one after that.

        Raises:
            FloatingPointError: The model's logits are not numbers; names the slots.
            StepFailed: As `forward`.
        """
        with self.runner.void_slots.watch(batch), computing(batch.num_rows):
            return self.choose(batch, pending)

    @torch.inference_mode()
    def choose(self, batch: ScheduledBatch, pending: Pending) -> ModelOutput:
        """`decode` at one of several ranks, right after `forward`. If it raises, `forget` makes the slots void.

        Other ranks do not know yet that the batch has failed, and a batch that is in flight behind it may carry on
        in its slots: all ranks have to compute that one, or none.
        """
        if isinstance(pending.result, Choice):
            output = self.sampler.finish(batch, pending.result, pending.positions)
            if pending.result.host_slots:  # the others have been fed, and their next rows may be in flight
                self.runner.take_tokens(batch, output, pending.result.host_slots)
        else:
            output = self.sampler.decode(batch, pending.result, pending.positions)
            self.runner.take_tokens(batch, output)
        if pending.outputs.additional:
            output = with_token_rows(output, batch, pending.outputs.additional)
        context = pending.outputs.context
        return replace(output, context=context) if context else output

    @torch.inference_mode()
    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Take over tokens that another rank has chosen: slots are fed them next, post-processors see them."""
        self.runner.remember(batch, output)
        self.sampler.remember(batch, output)

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        self.runner.forget(batch, since)

    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""
        self.runner.close()
        vars(self).pop("sampler", None)
