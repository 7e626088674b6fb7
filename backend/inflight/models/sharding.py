"""The part of a model that one rank has: some layers, and of these whole attention heads and slices of the
rest. Pure.

    column parallel   qkv, up, gate: each rank computes some of the outputs (Megatron's split)
    row parallel      output, down: each rank has some of the inputs; the ranks' results are summed
    vocabulary        embedding and output projection: each rank has some of the token ids
    experts           each rank has a slice of every expert, as of an MLP; with expert parallelism, each group of
                      ranks has different experts, and each rank of the group a slice of these
    replicated        norms, biases of row-parallel layers, learned positions, routers
    pipeline          each stage has consecutive layers; the first embeds the tokens, the last computes the logits.
                      The last one has the draft head, which needs the embedding too.
                      A layer that reads another one's keys and values is in the same stage. A layer's columns of
                      the table of per-layer embeddings are in the layer's stage

A rank has whole key heads. If there are fewer key heads than ranks, several ranks have the same key head. With
latent attention a rank has some of the heads and everything that the heads share: the projection to the
compressed latent, and the cached values. A low-rank delta B A of a projection is split like the projection: for
a column-parallel projection by the rows of B, for a row-parallel one by the columns of A; the other factor is
replicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

from inflight.errors import ConfigError
from inflight.models.decoder_config import DecoderConfig, Gemma4HeadConfig
from inflight.models.recurrent import GatedDelta, Section
from inflight.ranks.topology import Mapping, tensor_parallel_sizes

Range = tuple[int, int]
"""A range: the first index, and the index after the last."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor-parallel rank `rank` of `size` ranks, which form `moe_ep_size` groups with different experts each.

    As in TensorRT-LLM, neighbouring ranks are in different groups.
    """

    size: int = 1
    rank: int = 0
    moe_ep_size: int = 1

    def split(self, count: int) -> Range:
        """Return this rank's slice of `count` items; if `count` is not divisible, the last ranks get fewer
        items or none."""
        each = -(-count // self.size)
        return min(self.rank * each, count), min((self.rank + 1) * each, count)

    def share(self, count: int) -> Range:
        """Return this rank's slice of `count` heads; if there are fewer heads than ranks, several ranks get the
        same head."""
        if count >= self.size:
            return self.split(count)
        head = self.rank * count // self.size
        return head, head + 1

    def experts(self, count: int) -> Range:
        """Return the range of this rank's experts among `count`; a rank may have whole experts or slices of
        them."""
        each, group = count // self.moe_ep_size, self.rank % self.moe_ep_size
        return group * each, (group + 1) * each

    def slice_of_experts(self, inner: int) -> Range:
        """Return this rank's slice of an expert's inner width `inner`."""
        return Shard(self.size // self.moe_ep_size, self.rank // self.moe_ep_size).split(inner)

    def check(self, decoder: DecoderConfig) -> None:
        """Raise ConfigError that lists possible sizes if the model cannot be split over this number of ranks."""
        if self.moe_ep_size > 1:
            self._check_experts(decoder)
        heads, kv_heads, inner = decoder.num_heads, decoder.num_kv_heads, math.gcd(*self._mlp_widths(decoder))
        all_kv_heads = dict.fromkeys((kv_heads, *(layer.num_kv_heads for layer in decoder.layer_sizes)))
        possible = [tensor_parallel_sizes(heads, each, inner) for each in all_kv_heads]
        sizes = [size for size in possible[0] if all(size in others for others in possible)]
        widths = f"{heads} heads, {' or '.join(map(str, all_kv_heads))} key heads, MLP of {inner}"
        if decoder.recurrent is not None:
            parts = decoder.recurrent.num_parts
            sizes = [size for size in sizes if parts % size == 0]
            widths += f", recurrent layers of {parts} parts"
        if self.size in sizes:
            return
        raise ConfigError(
            f"tensor parallelism over {self.size} ranks does not divide this model: {widths}; it can be "
            f"{', '.join(map(str, sizes))}"
        )

    def _check_experts(self, decoder: DecoderConfig) -> None:
        name = f"moe_expert_parallel_size is {self.moe_ep_size}"
        if decoder.experts is None:
            raise ConfigError(f"{name}, but this model has no experts, expected 1")
        count = decoder.experts.count
        if count % self.moe_ep_size:
            sizes = [each for each in range(1, self.size + 1) if not (self.size % each or count % each)]
            raise ConfigError(
                f"{name}, which does not divide the {count} experts of this model; with tensor_parallel_size "
                f"{self.size} it can be {', '.join(map(str, sizes))}"
            )

    def _mlp_widths(self, decoder: DecoderConfig) -> list[int]:
        """Return the MLP widths that the number of ranks must divide.

        Widths of experts must be divisible by `size` / `moe_ep_size`, the number of ranks that share experts.
        """
        widths = [decoder.dense_width] if decoder.dense_width else []
        widths += [layer.intermediate_size for layer in decoder.layer_sizes if decoder.dense_width]
        experts = decoder.experts
        if experts is not None:
            widths += [experts.intermediate_size * self.moe_ep_size, experts.shared_intermediate_size]
        return [width for width in widths if width]

    def part_of(self, decoder: DecoderConfig) -> DecoderConfig:
        """Return the model as this rank computes it: fewer heads, a narrower MLP, the same hidden size."""
        experts = decoder.experts and replace(
            decoder.experts,
            intermediate_size=decoder.experts.intermediate_size * self.moe_ep_size // self.size,
            held=self.experts(decoder.experts.count),
            shared_intermediate_size=decoder.experts.shared_intermediate_size // self.size,
        )
        return replace(
            decoder,
            experts=experts,
            num_heads=decoder.num_heads // self.size,
            alibi=decoder.alibi
            and replace(decoder.alibi, slopes=decoder.alibi.slopes[slice(*self.split(decoder.num_heads))]),
            num_kv_heads=max(1, decoder.num_kv_heads // self.size),
            intermediate_size=decoder.intermediate_size // self.size,
            layer_sizes=tuple(
                replace(
                    layer,
                    num_kv_heads=max(1, layer.num_kv_heads // self.size),
                    intermediate_size=layer.intermediate_size // self.size,
                )
                for layer in decoder.layer_sizes
            ),
            recurrent=decoder.recurrent and decoder.recurrent.divided(self.size),
            eagle=decoder.eagle and replace(decoder.eagle, layer=self.part_of(decoder.eagle.layer)),
            gemma4_head=decoder.gemma4_head
            and replace(decoder.gemma4_head, layers=self.part_of(decoder.gemma4_head.layers)),
        )

    def query_rows(self, decoder: DecoderConfig) -> Range:
        """Return this rank's range of the rows of all query heads; `decoder` has the layer's sizes."""
        return self.head_rows(decoder, decoder.head_dim)

    def head_rows(self, decoder: DecoderConfig, width: int) -> Range:
        """Return this rank's range of rows in a matrix with `width` rows per query head."""
        return _scaled(self.split(decoder.num_heads), width)

    def section_rows(self, sections: tuple[Section, ...]) -> tuple[Range, ...]:
        """Return this rank's ranges of rows of sections that are stored one after the other."""
        begins = accumulate((section.size for section in sections), initial=0)
        owns = (self.share(section.count) for section in sections)
        return tuple(
            (begin + first * section.width, begin + last * section.width)
            for begin, section, (first, last) in zip(begins, sections, owns)
        )

    def key_head_rows(self, sections: tuple[Section, ...], num_key_heads: int) -> tuple[Range, ...]:
        """Return this rank's ranges of rows, section by section, of sections that are stored by key head."""
        widths = [section.size // num_key_heads for section in sections]
        heads = range(*self.split(num_key_heads))
        return tuple(
            (head * sum(widths) + begin, head * sum(widths) + begin + width)
            for begin, width in zip(accumulate(widths, initial=0), widths)
            for head in heads
        )

    def recurrent_rows(self, decoder: DecoderConfig, module: int) -> tuple[Range, ...]:
        """Return the ranges of rows that this rank reads of a module in recurrent layers' input projections."""
        recurrent = decoder.recurrent
        assert recurrent is not None, "the layer is recurrent"
        sections = decoder.recurrent_sections(module)
        if decoder.recurrent_by_key_head:
            assert isinstance(recurrent, GatedDelta), "other recurrent layers have no key heads"
            return self.key_head_rows(sections, recurrent.num_key_heads)
        return self.section_rows(sections)

    def kv_rows(self, decoder: DecoderConfig) -> Range:
        """Return this rank's range of the rows of all key heads, which is also its range of all value heads."""
        return _scaled(self.share(decoder.num_kv_heads), decoder.head_dim)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the model that one rank has.

    Attributes:
        shard: The rank's part of each layer.
        layers: The layers of the rank's pipeline stage.
        is_first_stage: Whether the rank has the embedding.
        is_last_stage: Whether the rank has the output projection.
    """

    shard: Shard
    layers: Range
    is_first_stage: bool = True
    is_last_stage: bool = True

    @classmethod
    def from_mapping(cls, mapping: Mapping, decoder: DecoderConfig) -> Part:
        """Return a rank's part of a model; raise ConfigError if the model cannot be divided by this mapping."""
        shard = Shard(mapping.tp_size, mapping.tp_rank, mapping.moe_ep_size)
        shard.check(decoder)
        of_folder = {
            "EAGLE-3": decoder.eagle and decoder.eagle.layer,
            "draft": decoder.gemma4_head and decoder.gemma4_head.layers,
        }
        for kind, head in of_folder.items():
            if head is None:
                continue
            try:
                Shard(mapping.tp_size, mapping.tp_rank).check(head)
            except ConfigError as error:
                raise ConfigError(f"the {kind} head: {error}") from None
        divided = decoder.num_layers, decoder.first_read_layer
        part = cls(shard, mapping.layers(*divided), mapping.is_first_stage, mapping.is_last_stage)
        if decoder.gemma4_head is not None:
            first = decoder.cached_layers[min(decoder.gemma4_head.layers.read_kv)]
            sizes = [size for size in range(1, mapping.pp_size + 1) if _begin_of_last(size, divided) <= first]
            if mapping.pp_size not in sizes:
                raise ConfigError(
                    f"pipeline_parallel_size is {mapping.pp_size}, expected at most {max(sizes)}: layers {first} "
                    f"to {decoder.num_layers - 1} must be in one stage, because the draft head reads keys and "
                    "values of some of them"
                )
        return part

    @classmethod
    def whole(cls, decoder: DecoderConfig) -> Part:
        """Return the part that is the whole model."""
        return cls(WHOLE, (0, decoder.num_layers))

    def read_kv_of(self, head: Gemma4HeadConfig, decoder: DecoderConfig) -> tuple[int, ...]:
        """Return the head's `DecoderConfig.read_kv`, counted from this stage's first layer."""
        num_earlier = sum(layer < self.layers[0] for layer in decoder.cached_layers)
        return tuple(place - num_earlier for place in head.layers.read_kv)

    def held_config(self, decoder: DecoderConfig) -> DecoderConfig:
        """Return the model as this rank computes it: its shard of its layers, which are counted from 0."""
        begin, end = self.layers
        part = self.shard.part_of(decoder)
        return replace(
            part,
            experts=part.experts and replace(part.experts, layers=part.experts.layers[begin:end]),
            num_layers=end - begin,
            ropes=decoder.ropes[begin:end],
            sliding_windows=decoder.sliding_windows[begin:end],
            attention_chunks=decoder.attention_chunks[begin:end],
            bidirectional_layers=decoder.bidirectional_layers[begin:end],
            recurrent_layers=decoder.recurrent_layers[begin:end],
            attention_layers=decoder.attention_layers[begin:end],
            mlp_layers=decoder.mlp_layers[begin:end],
            layer_sizes=part.layer_sizes[begin:end],
            keys_are_values=decoder.keys_are_values[begin:end],
            gate_sparsity=decoder.gate_sparsity[begin:end],
            kv_layers=tuple(layer - begin for layer in decoder.kv_layers[begin:end]),
            has_draft_head=decoder.has_draft_head and self.is_last_stage,
            eagle=part.eagle if self.is_last_stage else None,
            gemma4_head=part.gemma4_head if self.is_last_stage else None,
        )


def _begin_of_last(pp_size: int, divided: tuple[int, int | None]) -> int:
    """Return the first layer of the last of `pp_size` stages; see `Mapping.layers`."""
    return Mapping(1, pp_size, pp_size - 1).layers(*divided)[0]


def _scaled(part: Range, width: int) -> Range:
    return part[0] * width, part[1] * width
