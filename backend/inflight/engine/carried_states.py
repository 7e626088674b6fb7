"""Hidden states that pipeline stages pass on beside their output, for an EAGLE-3 head in the last stage."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.additional_outputs import HiddenStates
from inflight.models import DecoderConfig


class CarriedStates:
    """Joins hidden states to a stage's output, and splits them from it in the next stage.

    Args:
        config: The configuration of the whole model.

    Attributes:
        layers: Numbers of the layers after which an EAGLE-3 head reads hidden states; none without such a head.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.layers = frozenset(() if config.eagle is None else config.eagle.read_layers)
        self._order = sorted(self.layers)
        self._width = config.hidden_size

    def join(self, output: Tensor, between: HiddenStates) -> Tensor:
        """Return the output [rows, any], followed by each hidden state [rows, hidden_size] that was found.

        The states that are not in `between.found` are zeros: the layer is in a later stage, or the head does not
        read the batch.
        """
        if not self._order:
            return output
        zeros = output.new_zeros(len(output), self._width)
        return torch.cat([output, *(between.found.get(number, zeros) for number in self._order)], dim=1)

    def split(self, message: Tensor, between: HiddenStates) -> Tensor:
        """Return the output of the previous stage, given the result of `join`; add wanted states to
        `between.found`."""
        if not self._order:
            return message
        output, *states = message.tensor_split(
            [-self._width * left for left in range(len(self._order), 0, -1)], 1
        )
        for number, state in zip(self._order, states, strict=True):
            if number in between.wanted:
                between.found[number] = state
        return output.contiguous()
