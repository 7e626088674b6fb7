"""The options of a load, which every step of loading takes: the configuration and the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.config import EngineConfig
from inflight.engine.collectives import ALONE, Collectives
from inflight.ranks.topology import Mapping


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How one rank loads its part of a model.

    Attributes:
        config: What to load, and how.
        mapping: Which rank this is of those that hold the model together.
        collectives: Connects the ranks of this one's pipeline stage.
        agree: Called with a number of this rank's, returns the least of all ranks'; `load_stage` says of what.
        post_processor_names: The logits post-processors that requests may name.
    """

    config: EngineConfig
    mapping: Mapping = field(default_factory=Mapping)
    collectives: Collectives = ALONE
    agree: Callable[[int], int] = int
    post_processor_names: tuple[str, ...] = ()
