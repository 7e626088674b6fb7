"""Keeps small operators of torch on the calling thread."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

_WORTH_SHARING = 1 << 22
"""Number of logits from which sampling is faster with several threads."""


def threads_for(logits: Tensor) -> AbstractContextManager[None]:
    """Use a single thread inside the `with` block if there are few logits on a CPU."""
    return single_thread(logits.device.type == "cpu" and logits.numel() <= _WORTH_SHARING)


@contextmanager
def single_thread(is_wanted: bool = True) -> Generator[None]:
    """Let torch's operators use a single thread inside the `with` block, if that is wanted.

    At the end of an operator that several threads share, the threads wait for each other. If there is little work,
    that takes longer than the work; and as long as a time slice of another program that occupies a processor.
    """
    if not is_wanted:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
