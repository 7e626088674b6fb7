"""How large the KV cache is to be: the least of what was asked for, what fits and what could ever be used.

A pure function of figures; `memory_probe` finds out what there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import ConfigError

REUSE_ROOM = 2
"""On a CPU, times the tokens that all slots can hold, so that ended sequences stay to be reused."""


@dataclass(frozen=True, slots=True)
class KvCacheDemand:
    """What the size of a KV cache follows from.

    Attributes:
        block_bytes: Bytes of one block, over all layers.
        tokens_per_block: Tokens per block.
        max_num_sequences: Slots.
        max_sequence_length: Longest sequence in tokens.
        free_bytes: Memory this process may still use on the device.
        fraction: Share of it that the cache may take.
        fraction_name: The parameter that sets `fraction`, for messages.
        max_tokens: Most tokens asked for; None: no limit.
        bounded_by_use: Whether to stop at REUSE_ROOM times what all slots can hold.
    """

    block_bytes: int
    tokens_per_block: int
    max_num_sequences: int
    max_sequence_length: int
    free_bytes: int
    fraction: float
    fraction_name: str
    max_tokens: int | None = None
    bounded_by_use: bool = False


@dataclass(frozen=True, slots=True)
class KvCachePlan:
    """The size chosen, and the parameter or fact that decided it, for the log."""

    num_blocks: int
    decided_by: str


def plan_kv_cache(demand: KvCacheDemand) -> KvCachePlan:
    """The number of blocks. Raises ConfigError if they would not be one for each slot."""
    in_memory = int(demand.free_bytes * demand.fraction) // demand.block_bytes - 1  # the null block
    bounds = [KvCachePlan(max(0, in_memory), demand.fraction_name)]
    if demand.max_tokens is not None:
        in_tokens = demand.max_tokens // demand.tokens_per_block
        bounds.append(KvCachePlan(in_tokens, "max_tokens_in_paged_kv_cache"))
    if demand.bounded_by_use:
        longest = -(-demand.max_sequence_length // demand.tokens_per_block)
        useful = demand.max_num_sequences * longest * REUSE_ROOM
        bounds.append(KvCachePlan(useful, f"{REUSE_ROOM} times what max_num_sequences can hold"))
    plan = min(bounds, key=lambda bound: bound.num_blocks)
    if plan.num_blocks < demand.max_num_sequences:
        raise ConfigError(_too_small(plan, demand))
    return plan


def _too_small(plan: KvCachePlan, demand: KvCacheDemand) -> str:
    return (
        f"the KV cache would have {plan.num_blocks} blocks of {demand.tokens_per_block} tokens "
        f"({demand.block_bytes / 2**20:.2f} MiB each), fewer than one for each of "
        f"{demand.max_num_sequences} sequences; {plan.decided_by} decides. "
        f"Free memory is {demand.free_bytes / 2**20:.0f} MiB, {demand.fraction_name} is {demand.fraction}, "
        f"max_tokens_in_paged_kv_cache is {demand.max_tokens or 'unset'}. "
        "Raise them, or lower max_num_sequences or tokens_per_block"
    )
