"""The options that all steps of loading a model share: the configuration and the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.config import EngineConfig
from inflight.engine.collectives import ALONE, Collectives
from inflight.engine.kv_cache import KvCache
from inflight.ranks.topology import Mapping


@dataclass(frozen=True, slots=True)
class KeptCache:
    """The memory that stays of an engine whose weights are given back and loaded again.

    Attributes:
        cache: The KV cache.
        num_adapter_pages: Number of pages for adapters, which the new engine has to have too.
    """

    cache: KvCache
    num_adapter_pages: int


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options with which one rank loads its part of a model.

    Attributes:
        config: The model and its parameters.
        mapping: This rank's position among the model's ranks.
        collectives: Collectives over the ranks of this rank's pipeline stage.
        min_over_ranks: Returns the minimum of a number over all ranks, each of which passes its own. See
            `load_stage`.
        post_processor_names: The logits post-processors that requests may name.
        kept: The KV cache to use, of an earlier engine with the same options; None: allocate one.
    """

    config: EngineConfig
    mapping: Mapping = field(default_factory=Mapping)
    collectives: Collectives = ALONE
    min_over_ranks: Callable[[int], int] = int
    post_processor_names: tuple[str, ...] = ()
    kept: KeptCache | None = None
