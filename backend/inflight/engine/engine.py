"""One engine for every device: a ModelRunner computes logits, and the Sampler samples tokens from them.

If several ranks share a model, one of them has a runner and the Sampler, the others only a runner, and
`ranks/rank_engine.py` synchronizes them. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.ports import StageMessages
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.engine.additional_outputs import with_token_rows
from inflight.engine.cuda.iteration_graphs import RecordedKinds
from inflight.engine.memory import computing
from inflight.engine.runner import ModelRunner, RowOutputs
from inflight.models import DecoderConfig
from inflight.sampling import Choice, Sampler


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch between `forward` and `decode`; another `forward` may come in between.

    Attributes:
        result: If the batch samples on the device, its tokens and the remaining work for rows that need the host;
            otherwise the logits to sample from, as `ModelRunner.run` returns them.
        positions: [rows] on the host: for each row, the position in its sequence of the token that it samples.
        outputs: The other outputs of the forward pass.
    """

    result: Choice | Tensor
    positions: NDArray[np.int64]
    outputs: RowOutputs


class ModelEngine:
    """`inflight.core.ports.Engine` with a runner of a whole model and a Sampler.

    `RankEngine` uses it on the ranks of the last pipeline stage, with a runner of that stage. One of them samples.
    On the others the Sampler only calls the logits post-processors, so that their state is the same on all ranks
    of the stage.

    Args:
        runner: The runner; closed with this object.
        sampler: Samples the tokens.
        chooses_tokens: Whether this rank samples; if not, another rank samples from the same logits.

    Attributes:
        limits: The limits for requests and batches.
        runner: The argument of the same name.
        sampler: The argument of the same name.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, chooses_tokens: bool = True) -> None:
        self.limits = runner.limits
        self.runner = runner
        self.sampler = sampler
        self._chooses_tokens = chooses_tokens

    @property
    def decoder_config(self) -> DecoderConfig:
        """The checkpoint's configuration of the model."""
        return self.runner.decoder_config

    @property
    def dtype(self) -> str:
        """The dtype of weights, activations and KV cache: float32, bfloat16 or float16."""
        return self.runner.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence, from the checkpoint's config files."""
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
    def forward(self, batch: ScheduledBatch, messages: StageMessages | None = None) -> Pending:
        """Run the forward pass, and start sampling if the batch samples on the device.

        If `forward` or `decode` raises, for whatever reason, the sequences of the batch have to start again; other
        sequences are not affected. For `messages` see `ModelRunner.run`.

        Raises:
            ValueError: See `ModelRunner.run`; or a row continues in a void slot.
            StepFailed: There is too little memory for the batch.
        """
        runner = self.runner
        with runner.void_slots.watch(batch), computing(batch.num_rows):
            runner.void_slots.refuse(batch)
            self.sampler.apply(batch)
            outputs = runner.run(batch, messages)
            batch = outputs.batch
            self.sampler.apply_drafts(batch)
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
        """Sample the next token of every sampled row, which becomes its slot's next input; beams are only ranked.

        Called before the next `forward`; for a batch that samples on the device, before the one after that.

        Raises:
            FloatingPointError: The model's logits are not finite; the message names the slots.
            StepFailed: See `forward`.
        """
        with self.runner.void_slots.watch(batch), computing(batch.num_rows):
            return self.choose(batch, pending)

    @torch.inference_mode()
    def choose(self, batch: ScheduledBatch, pending: Pending) -> ModelOutput:
        """Do `decode`'s work on one of several ranks, right after `forward`. If it raises, the slots stay valid
        until `forget` marks them void.

        The other ranks do not know yet that the batch has failed, and a later batch in flight may continue in its
        slots: either all ranks compute the later batch, or none does.
        """
        batch = pending.outputs.batch
        if isinstance(pending.result, Choice):
            output = self.sampler.finish(batch, pending.result, pending.positions)
            # Other slots have their next input, and their next rows may be in flight.
            if pending.result.host_slots:
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
        """Record the tokens that another rank has sampled: slots' next inputs, and the post-processors'
        history."""
        self.runner.remember(batch, output)
        self.sampler.remember(batch, output)

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        self.runner.forget(batch, since)

    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""
        self.runner.close()
        vars(self).pop("sampler", None)
