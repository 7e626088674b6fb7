"""Additional outputs: hidden states and top logits, for requests that ask for them.

The outputs that an engine offers are fixed when its model is loaded. A forward pass keeps the hidden states
between its layers only while a running request wants them. Independent of the device. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from inflight.additional_outputs import Meaning, OfferedOutput, OutputKind, WantedOutput, meaning_of
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch, TokenDetails
from inflight.errors import ConfigError
from inflight.sampling.argmax import top_indices
from inflight.sampling.transfer import as_array

TokenRows = Mapping[int, Sequence[Tensor]]
"""For each slot, one tensor per additional output of its request: [sampled rows, width] float32."""


def offer(
    outputs: Sequence[WantedOutput],
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    first_layer: int = 0,
) -> tuple[OfferedOutput, ...]:
    """Return the outputs that an engine offers, given the configured `outputs`.

    Args:
        outputs: The parameter additional_model_outputs.
        num_layers: Number of the model's layers.
        hidden_size: Width of a hidden state.
        vocab_size: Width of a row of logits.
        first_layer: First layer of the last pipeline stage, which alone answers requests.

    Raises:
        ConfigError: The model, or its last stage, does not have one of the outputs.
    """
    offered: list[OfferedOutput] = []
    for output in outputs:
        meaning = meaning_of(output.name)
        of_layers = meaning.kind is OutputKind.HIDDEN_STATES
        if of_layers and not first_layer <= meaning.number <= num_layers:
            of_stage = ", which the last pipeline stage has" if first_layer else ", which the model has"
            raise ConfigError(
                f"additional_model_outputs has {output.name}, expected hidden_states_{first_layer} to "
                f"hidden_states_{num_layers}{of_stage}"
            )
        if meaning.number > vocab_size and not of_layers:
            raise ConfigError(
                f"additional_model_outputs has {output.name}, expected at most {vocab_size}, the vocabulary"
            )
        is_hidden = of_layers or meaning.kind is OutputKind.LAST_HIDDEN_STATE
        width = hidden_size if is_hidden else meaning.number
        offered.append(OfferedOutput(output.name, output.gather_context, width))
    return tuple(offered)


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The hidden states between layers that a forward pass keeps.

    Attributes:
        wanted: Numbers of layers after which hidden states are wanted; 0 for the embeddings.
        found: Hidden states by number of layers, [rows, hidden_size] in the model's dtype; filled by a forward
            pass.
    """

    wanted: frozenset[int] = frozenset()
    found: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def keep(self, num_layers: int, hidden: Tensor) -> None:
        """Keep a copy of the hidden states after `num_layers` layers, if wanted."""
        if num_layers in self.wanted:
            self.found[num_layers] = hidden.clone()


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """The hidden states of a batch's rows after a forward pass.

    Attributes:
        last: [rows, hidden_size], the last layer's output.
        normalize: The model's final norm.
        between: Hidden states between layers, as in `HiddenStates.found`.
    """

    last: Tensor
    normalize: Callable[[Tensor], Tensor]
    between: Mapping[int, Tensor]


class AdditionalOutputs:
    """The requests that want additional outputs, by slot.

    Args:
        num_layers: Number of the model's layers.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._wanted: dict[int, tuple[WantedOutput, ...]] = {}

    def apply(self, batch: ScheduledBatch) -> None:
        """Record the started sequences that want additional outputs, and forget released slots."""
        for slot in batch.released_slots:
            self._wanted.pop(slot, None)
        for start in batch.starts:
            if start.request.output.additional_outputs:
                self._wanted[start.slot] = start.request.output.additional_outputs
            else:
                self._wanted.pop(start.slot, None)

    def are_wanted(self, batch: ScheduledBatch) -> bool:
        """Whether a sequence of the batch wants additional outputs."""
        return bool(self._wanted) and not self._wanted.keys().isdisjoint(_slots(batch))

    def between_layers(self, batch: ScheduledBatch) -> HiddenStates:
        """Return the hidden states that a forward pass of the batch must keep."""
        wanted_outputs = (self._wanted.get(slot, ()) for slot in _slots(batch))
        meanings = (self._meaning(output) for outputs in wanted_outputs for output in outputs)
        return HiddenStates(
            frozenset(each.number for each in meanings if each.kind is OutputKind.HIDDEN_STATES)
        )

    def of_tokens(
        self, batch: ScheduledBatch, layers: LayerOutputs, sampled_rows: Tensor, logits: Tensor
    ) -> TokenRows:
        """Return the additional outputs of sampled rows, including draft rows that verification may reject.

        Args:
            batch: The batch, already passed to `apply`.
            layers: The hidden states of the batch's rows.
            sampled_rows: Indices of the sampled rows, in the order of `ScheduledBatch.sampled_slots`.
            logits: Logits of these rows, [n, vocab_size] float32.
        """
        found: dict[int, Sequence[Tensor]] = {}
        for slot, begin, end in _sampled(batch):
            if outputs := self._wanted.get(slot):
                rows, of_rows = sampled_rows[begin:end], logits[begin:end]
                found[slot] = [self.values(output, layers, rows, of_rows) for output in outputs]
        return found

    def needs_logits(self, output: WantedOutput) -> bool:
        """Whether an output is computed from logits."""
        return self._meaning(output).kind in (OutputKind.TOP_LOGITS, OutputKind.TOP_LOGIT_IDS)

    def values(
        self, output: WantedOutput, layers: LayerOutputs, rows: Tensor, logits: Tensor | None
    ) -> Tensor:
        """Return an output's values [n, width] float32 for the rows [n] int64. `logits` are the logits of
        these rows, or None if the output does not need them."""
        meaning = self._meaning(output)
        if meaning.kind is OutputKind.LAST_HIDDEN_STATE:
            return layers.normalize(layers.last[rows]).float()
        if meaning.kind is OutputKind.HIDDEN_STATES:
            return layers.between[meaning.number][rows].float()
        assert logits is not None, f"{output.name} is computed from logits"
        indices = top_indices(logits, meaning.number)
        return logits.gather(1, indices) if meaning.kind is OutputKind.TOP_LOGITS else indices.float()

    def _meaning(self, output: WantedOutput) -> Meaning:
        """Return the meaning of an output's name. As in transformers, the final norm follows the last layer."""
        meaning = meaning_of(output.name)
        is_last = meaning.kind is OutputKind.HIDDEN_STATES and meaning.number == self._num_layers
        return Meaning(OutputKind.LAST_HIDDEN_STATE) if is_last else meaning


def with_token_rows(output: ModelOutput, batch: ScheduledBatch, found: TokenRows) -> ModelOutput:
    """Return `output` with the additional outputs of the accepted tokens; waits for the device.
    `found` is the result of `AdditionalOutputs.of_tokens`."""
    details = dict(output.details)
    for slot, token_ids in zip(batch.sampled_slots(), output.token_ids, strict=True):
        if token_ids and slot in found:
            arrays = [as_array(values[: len(token_ids)].cpu()) for values in found[slot]]
            rows = tuple(tuple(row.tobytes() for row in rows) for rows in zip(*arrays, strict=True))
            details[slot] = replace(details.get(slot, TokenDetails()), additional_outputs=rows)
    return replace(output, details=details)


def _slots(batch: ScheduledBatch) -> Iterator[int]:
    yield from (chunk.slot for chunk in batch.context)
    yield from batch.generation_slots


def _sampled(batch: ScheduledBatch) -> Iterator[tuple[int, int, int]]:
    """Yield slot, first row and the row after the last for each of `ScheduledBatch.sampled_slots`."""
    begin = 0
    for chunk in batch.context:
        if chunk.is_last:
            yield chunk.slot, begin, begin + 1 + chunk.num_draft_tokens
            begin += 1 + chunk.num_draft_tokens
    for row, slot in enumerate(batch.generation_slots, begin):
        yield slot, row, row + 1
