"""Which rank does what: TensorRT-LLM's `Mapping` of tensor and pipeline parallelism. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mapping:
    """One rank of a world. Ranks of a pipeline stage are neighbours, so that a stage may have a node to itself.

    Attributes:
        tp_size: Ranks that share every layer.
        pp_size: Pipeline stages, each with some of the layers.
        rank: 0 .. world_size - 1.
    """

    tp_size: int = 1
    pp_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError unless such a rank exists."""
        for name, size in (("tensor_parallel_size", self.tp_size), ("pipeline_parallel_size", self.pp_size)):
            if size < 1:
                raise ConfigError(f"{name} is {size}, expected at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank is {self.rank}, expected 0 to {self.world_size - 1}: tensor_parallel_size {self.tp_size} "
                f"times pipeline_parallel_size {self.pp_size} makes {self.world_size} ranks"
            )

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """Which part of its layers this rank has."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Which stage this rank is in."""
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage makes the logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def sampler(self) -> int:
        """The rank that chooses tokens, for all: the last stage's first."""
        return self.world_size - self.tp_size

    @property
    def is_sampler(self) -> bool:
        """Whether this rank is that one."""
        return self.rank == self.sampler

    def layers(self, num_layers: int) -> tuple[int, int]:
        """This stage's layers, first and behind the last; the first stages have one more where they do not divide.

        Raises ConfigError if a stage would have none.
        """
        if num_layers < self.pp_size:
            raise ConfigError(
                f"pipeline_parallel_size is {self.pp_size}, but the model has {num_layers} layers only"
            )
        each, more = divmod(num_layers, self.pp_size)
        begin = self.pp_rank * each + min(self.pp_rank, more)
        return begin, begin + each + (self.pp_rank < more)
