"""Chooses the kernels that find the highest logit of each row: in Triton's language, or torch's. Loading
thread."""

from __future__ import annotations

import torch

from inflight.engine.cuda.trial import IsOff, has_triton, log_not_used
from inflight.sampling.nan_check import find_peaks
from inflight.sampling.row_kernels import RowKernels
from inflight.sampling.transfer import to_list


def find_row_kernels(vocab_size: int, device: torch.device) -> RowKernels:
    """Return the kernels for rows of `vocab_size` logits on a device; torch's operators if none can be used."""
    if device.type != "cuda" or not has_triton():
        return RowKernels()
    from inflight.engine.cuda.kernels.peaks import KernelRowKernels  # imports triton

    try:
        check_peaks_of(KernelRowKernels(), vocab_size, device)
    except IsOff as reason:
        log_not_used("the highest logit", reason)
        return RowKernels()
    return KernelRowKernels()


def check_peaks_of(tried: RowKernels, vocab_size: int, device: torch.device) -> None:
    """Compare the highest logits that `tried` finds with torch's. Raises IsOff if they differ, or if `tried`
    raises."""
    draw = torch.Generator(device).manual_seed(0)
    for num_rows in (1, 3):
        logits = torch.randn((num_rows, vocab_size), generator=draw, device=device)
        logits[0, ::7] = 9.0  # a tie, of which the first token is the result
        if num_rows > 1:
            logits[1] = -torch.inf
            logits[2, vocab_size // 2] = torch.nan
        expected = find_peaks(logits)
        try:
            found = tried.find_peaks(logits)
        except Exception as error:  # an unsupported kernel may raise anything
            raise IsOff(str(error).split("\n")[0]) from error
        if not torch.equal(found.highest.nan_to_num(), expected.highest.nan_to_num()):
            raise IsOff(f"the highest logits of {num_rows} rows are {to_list(found.highest)}")
        if found.tokens[0] != 0 or (num_rows > 1 and found.tokens[2] != vocab_size // 2):
            raise IsOff(f"the tokens with the highest logits of {num_rows} rows are {to_list(found.tokens)}")
