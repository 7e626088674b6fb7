"""Which part of a model one rank holds: of some of the layers whole attention heads and slices of the rest. Pure.

    column parallel   qkv, up, gate: each rank computes some of the outputs (Megatron's split)
    row parallel      output, down: each rank has some of the inputs; the ranks' results are added up
    vocabulary        embedding and output projection: each rank has some of the token ids
    replicated        norms, biases of row-parallel layers, learned positions
    pipeline          each stage has consecutive layers; the first embeds the tokens, the last makes the logits

A rank has whole key heads. Where there are fewer key heads than ranks, several ranks hold the same one. A low-rank
delta B A of a projection is split as that is: of a column-parallel one the rows of B, of a row-parallel one the
columns of A, and the other factor is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from inflight.errors import ConfigError
from inflight.models.decoder_config import DecoderConfig
from inflight.ranks.topology import Mapping, tensor_parallel_sizes

Range = tuple[int, int]
"""The first index, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor-parallel rank `rank` of `size`."""

    size: int = 1
    rank: int = 0

    def split(self, count: int) -> Range:
        """This rank's slice of `count` things, which need not divide: the last ranks have fewer, or none."""
        each = -(-count // self.size)
        return min(self.rank * each, count), min((self.rank + 1) * each, count)

    def check(self, decoder: DecoderConfig) -> None:
        """Raise ConfigError, with sizes that would do, if the model cannot be split so."""
        heads, kv_heads, inner = decoder.num_heads, decoder.num_kv_heads, decoder.intermediate_size
        sizes = tensor_parallel_sizes(heads, kv_heads, inner)
        if self.size in sizes:
            return
        raise ConfigError(
            f"tensor parallelism over {self.size} ranks does not divide this model: {heads} heads, {kv_heads} key "
            f"heads, MLP of {inner}; it can be {', '.join(map(str, sizes))}"
        )

    def part_of(self, decoder: DecoderConfig) -> DecoderConfig:
        """The model as this rank computes it: fewer heads and a narrower MLP, the same hidden size."""
        return replace(
            decoder,
            num_heads=decoder.num_heads // self.size,
            num_kv_heads=max(1, decoder.num_kv_heads // self.size),
            intermediate_size=decoder.intermediate_size // self.size,
        )

    def query_rows(self, decoder: DecoderConfig) -> Range:
        """This rank's rows of all query heads, which are its columns of the output projection."""
        return _scaled(self.split(decoder.num_heads), decoder.head_dim)

    def kv_rows(self, decoder: DecoderConfig) -> Range:
        """This rank's rows of all key heads, and of all value heads."""
        kv_heads = decoder.num_kv_heads
        if kv_heads >= self.size:
            return _scaled(self.split(kv_heads), decoder.head_dim)
        head = self.rank * kv_heads // self.size
        return _scaled((head, head + 1), decoder.head_dim)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds.

    Attributes:
        shard: Which part of each of its layers.
        layers: Its pipeline stage's.
        is_first_stage: Whether it has the embedding.
        is_last_stage: Whether it has the output projection.
    """

    shard: Shard
    layers: Range
    is_first_stage: bool = True
    is_last_stage: bool = True

    @classmethod
    def from_mapping(cls, mapping: Mapping, decoder: DecoderConfig) -> Part:
        """A rank's part of a model; ConfigError if it cannot be divided so."""
        shard = Shard(mapping.tp_size, mapping.tp_rank)
        shard.check(decoder)
        layers = mapping.layers(decoder.num_layers)
        return cls(shard, layers, mapping.is_first_stage, mapping.is_last_stage)

    @classmethod
    def whole(cls, decoder: DecoderConfig) -> Part:
        """All of a model."""
        return cls(WHOLE, (0, decoder.num_layers))

    def held_config(self, decoder: DecoderConfig) -> DecoderConfig:
        """The model as this rank computes it: its layers alone, the first of which is layer 0, of its shard."""
        begin, end = self.layers
        return replace(
            self.shard.part_of(decoder),
            num_layers=end - begin,
            sliding_windows=decoder.sliding_windows[begin:end],
        )


def _scaled(part: Range, width: int) -> Range:
    return part[0] * width, part[1] * width
