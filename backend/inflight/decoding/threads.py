"""How many processors torch computes with while tokens are chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_WORTH_SHARING = 1 << 22  # logits


@contextlib.contextmanager
def threads_for(logits: Tensor) -> Iterator[None]:
    """One thread for all that the caller does with few logits on a CPU, for as long as the `with` lasts.

    Choosing tokens takes dozens of operators, and threads that share one meet at its end. Where another program
    has a processor, each of them waits there until that program's turn is over.
    """
    if logits.device.type != "cpu" or logits.numel() > _WORTH_SHARING:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
