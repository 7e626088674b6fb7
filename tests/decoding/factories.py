"""Short ways to call the fast pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from inflight.core.batch import SlotStart
from inflight.core.sampling_config import SamplingConfig
from inflight.decoding import SamplingTable, sample


def sample_rows(logits: Tensor, samplings: Sequence[SamplingConfig], positions: Sequence[int]) -> list[int]:
    """Tokens of a batch in which row i is sequence i of some request."""
    table = SamplingTable(len(samplings))
    for slot, sampling in enumerate(samplings):
        table.start(SlotStart(slot, 1, slot, 1, sampling))
    slots = np.arange(len(samplings))
    return sample(logits, table.rows(slots, np.array(positions))).tolist()
