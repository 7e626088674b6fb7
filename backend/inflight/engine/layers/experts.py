"""Mixtures of experts in torch's operators: routing of rows to experts, and the sum of the experts' outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.models.decoder_config import ExpertsConfig
from inflight.models.decoder_weights import ExpertWeights, Linear
from inflight.sampling.transfer import to_list

_MIN_SUM = 1e-20  # lower bound of the sum by which probabilities are divided


def mix_experts(
    x: Tensor,
    experts: ExpertWeights[Linear],
    config: ExpertsConfig,
    activate: Callable[[Tensor], Tensor],
    routed: Tensor | None = None,
) -> Tensor:
    """Return for each row the weighted sum of its experts' outputs [rows, hidden_size], over this rank's experts.

    With `weighs_inputs`, the experts' inputs are weighted instead of their outputs. `routed` is the router's
    input; None: x. Rows are sorted by expert, so that an expert with any rows takes two matrix products. A
    row's results are added up in the order of its experts' ids, independent of the other rows. Every rank
    routes all rows, and skips the experts of other ranks.
    """
    chances, chosen = route(x if routed is None else routed, experts, config)
    by_expert, order = chosen.flatten().sort(stable=True)
    counts: list[int] = to_list(torch.bincount(by_expert, minlength=config.count))
    given = x.new_zeros(x.shape, dtype=torch.float32)
    if config.held is not None:
        first, last = config.held
        order = order[sum(counts[:first]) : sum(counts[:last])]
        counts = counts[first:last]
        if not len(order):
            return given.to(x.dtype)
    rows, weights = order // config.num_per_token, chances.flatten()[order, None]
    read = x.index_select(0, rows)
    if config.weighs_inputs:
        read = (read * weights).to(x.dtype)
    parts = read.split_with_sizes(counts)
    results = [
        experts.down.at(index)(activate(experts.up.at(index)(part)))
        for index, part in enumerate(parts)
        if len(part)
    ]
    weighed = torch.cat(results).float()
    if not config.weighs_inputs:
        weighed = weighed * weights
    return given.index_add_(0, rows, weighed).to(x.dtype)


def route(x: Tensor, experts: ExpertWeights[Linear], config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Return the weights (float32) and the ids (int64) of each row's experts: [rows, num_per_token] each."""
    if config.has_float32_router:
        logits = F.linear(x.float(), experts.router.weight.float())
    else:
        logits = experts.router(x).float()
    chances = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    wanted = chances if experts.choice_bias is None else chances + experts.choice_bias
    if config.num_groups_per_token < config.num_groups:
        wanted = wanted.masked_fill(~_is_in_best_groups(wanted, config), -torch.inf)
    chosen = wanted.topk(config.num_per_token, dim=-1).indices
    chances = chances.gather(-1, chosen)
    if config.is_normalized:
        chances = chances / chances.sum(-1, keepdim=True).clamp(min=_MIN_SUM)
    if experts.scales is not None:
        chances = chances * experts.scales.float()[chosen]
    return chances * config.result_scale, chosen


def _is_in_best_groups(wanted: Tensor, config: ExpertsConfig) -> Tensor:
    """Return [rows, count] bool: whether each expert is in one of the groups chosen for the row."""
    grouped = torch.unflatten(wanted, -1, (config.num_groups, -1))
    of_groups = grouped.topk(config.scores_per_group, dim=-1).values.sum(-1)
    best = of_groups.topk(config.num_groups_per_token, dim=-1).indices
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, best, True)
    return is_best.repeat_interleave(grouped.shape[-1], dim=-1)
