"""An engine is a Runner and a Sampler: one computes logits on a device, the other chooses tokens from them.

Every device brings a Runner of its own; everything else here serves any of them. The Sampler is
`inflight.sampling.Decoding`. Where several ranks share a
model, one of them has a Runner and the Sampler, the others have a Runner alone, and `rank_engine.py` keeps them in
step. One thread calls all of it, the loop's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ContextDetails, EngineLimits, ModelOutput, ScheduledBatch
from inflight.engine.additional_outputs import TokenRows, with_token_rows
from inflight.engine.memory import computing
from inflight.engine.slots import SlotTable, VoidSlots
from inflight.sampling import Choice, Decoding


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """What a forward pass makes of a batch.

    Attributes:
        rows: [rows, vocab_size] float32 logits to choose tokens from; before the last stage, hidden states.
        context: By slot, of chunks that want context outputs.
        additional: By slot, of rows that want additional outputs.
    """

    rows: Tensor
    context: dict[int, ContextDetails] = field(default_factory=dict[int, ContextDetails])
    additional: TokenRows = field(default_factory=dict[int, Sequence[Tensor]])


class Runner(ABC):
    """All of a model on a device, or one rank's part of it, and what its slots hold.

    Attributes:
        limits: What requests and batches may ask for.
        slots: What is remembered of each slot.
        void_slots: Slots of failed batches.
    """

    def __init__(self, limits: EngineLimits, slots: SlotTable) -> None:
        self.limits = limits
        self.slots = slots
        self.void_slots = VoidSlots()

    @abstractmethod
    def run(self, batch: ScheduledBatch, hidden: Tensor | None) -> RowOutputs:
        """Apply the batch to slots and blocks, then run the packed forward pass; on a GPU, queue it.

        Args:
            batch: What to run; it carries on in no void slot.
            hidden: Behind the first pipeline stage, what the stage before returned.

        Returns:
            At the last stage logits to choose tokens from, in the order of `ScheduledBatch.sampled_slots`: 1 +
            num_draft_tokens rows for a chunk and one for a generation slot. Before the last stage hidden states
            for the next one, [batch.num_tokens, hidden_size] in the model's dtype, and nothing by slot.

        Raises:
            ValueError: The batch breaks the contract: more than max_num_tokens rows, or a row without a block.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Tensor:
        """The logits, or hidden states, that `run` returns, for a rank that chooses no tokens.

        Raises:
            ValueError: As `ModelEngine.forward`.
            StepFailed: Likewise.
        """
        with self.void_slots.watch(batch), computing(batch.num_rows):
            self.void_slots.refuse(batch)
            return self.run(batch, hidden).rows

    @torch.inference_mode()
    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Feed the chosen tokens to their slots next; batches without rows of these slots may have begun since."""
        self.slots.remember(batch, output)

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """The batch failed on some rank: its slots are void, as if it had failed here.

        Batches that have begun `since` may have started some of those slots anew.
        """
        self.void_slots.add(batch, since)


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch between `forward` and `decode`, which may come after the next `forward`.

    Attributes:
        result: The tokens that the device has chosen, if the batch samples on the device, and what is left to do
            for its rows that need the host; else the logits to choose from, as `Runner.run` returns them.
        positions: [rows] on the host: where in its sequence the token belongs that each row chooses.
        outputs: What the forward pass has made beside.
    """

    result: Choice | Tensor
    positions: NDArray[np.int64]
    outputs: RowOutputs


class ModelEngine:
    """Implements `inflight.core.ports.Engine` with a Runner of a whole model and a Sampler.

    With a Runner of the last pipeline stage it is that stage, for `rank_engine`, at the rank that chooses tokens.

    Attributes:
        limits: What requests and batches may ask for.
        runner: Closed with this object.
        sampler: Chooses the tokens.
    """

    def __init__(self, runner: Runner, sampler: Decoding) -> None:
        self.limits = runner.limits
        self.runner = runner
        self.sampler = sampler

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Pending:
        """Run the forward pass, and let the device choose the tokens of a batch that samples on the device.

        If this or `decode` raises, whatever the reason, the sequences of the batch have to start again; nothing
        else is affected. `hidden` is as for `Runner.run`.

        Raises:
            ValueError: As `Runner.run`; or a row carries on a sequence whose last batch failed.
            StepFailed: There is too little memory for the batch.
        """
        runner = self.runner
        with runner.void_slots.watch(batch), computing(batch.num_rows):
            runner.void_slots.refuse(batch)
            self.sampler.apply(batch)
            outputs = runner.run(batch, hidden)
            positions = runner.slots.positions(batch)
            if not (batch.samples_on_device and len(positions)):
                return Pending(outputs.rows, positions, outputs)
            choice = self.sampler.begin(batch, outputs.rows, positions)
            runner.slots.feed(batch, choice.tokens)
            return Pending(choice, positions, outputs)

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
                self.runner.slots.remember(batch, output, pending.result.host_slots)
        else:
            output = self.sampler.decode(batch, pending.result, pending.positions)
            self.runner.slots.remember(batch, output)
        if pending.outputs.additional:
            output = with_token_rows(output, batch, pending.outputs.additional)
        context = pending.outputs.context
        return replace(output, context=context) if context else output

    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """As `Runner.remember`."""
        self.runner.remember(batch, output)

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """As `Runner.forget`."""
        self.runner.forget(batch, since)

    def close(self) -> None:
        """Free the device's memory. Idempotent; a later forward raises."""
        self.runner.close()
        vars(self).pop("sampler", None)
