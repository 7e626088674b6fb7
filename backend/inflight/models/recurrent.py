"""Configurations and weights of recurrent layers, which keep a state of fixed size for each sequence.

Each layer is an input projection of the hidden states, a causal convolution over the last few tokens, linear
attention with decay (`engine/recurrent/linear_attention.py`; not in `ShortConv`), and an output projection. The
outputs of the input projection are divided into sections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive columns of an input projection: `count` heads, or groups of heads, of `width` columns each."""

    count: int
    width: int

    @property
    def size(self) -> int:
        """Number of columns of the whole section."""
        return self.count * self.width


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid): linear attention with decay and the delta rule.

    Attributes:
        num_key_heads: Number of query heads and of key heads; `num_value_heads / num_key_heads` value heads share
            each of them.
        num_value_heads: Number of heads of values, gates and states.
        key_dim: Width of a query or key.
        value_dim: Width of a value.
        conv_width: Number of tokens of the convolution, the present one included.
        norm_eps: Added to the variance in the norm over each head's output.
        beta_scale: Factor of beta, which is the sigmoid of beta's columns of the input projection.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the input and output projections have biases.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    beta_scale: float = 1.0
    has_conv_bias: bool = False
    has_bias: bool = False

    @property
    def sections(self) -> tuple[Section, ...]:
        """Columns of the input projection: queries, keys, values, gates, beta and step sizes."""
        keys, values = (
            Section(self.num_key_heads, self.key_dim),
            Section(self.num_value_heads, self.value_dim),
        )
        return keys, keys, values, values, Section(self.num_value_heads, 1), Section(self.num_value_heads, 1)

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """Sections that are inputs of the convolution: queries, keys and values."""
        return self.sections[:3]

    @property
    def output_width(self) -> int:
        """Width of the output projection's input."""
        return self.num_value_heads * self.value_dim

    @property
    def num_heads(self) -> int:
        """Number of heads of the state."""
        return self.num_value_heads

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """Weights of the norm, shared by all heads."""
        return (Section(1, self.value_dim),)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of linear attention: value heads, key_dim, value_dim."""
        return (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def num_parts(self) -> int:
        """Number of key heads; the number of tensor-parallel ranks must divide it."""
        return self.num_key_heads

    def divided(self, size: int) -> GatedDelta:
        """Return the part that one of `size` ranks has; `size` divides `num_parts`."""
        return replace(
            self, num_key_heads=self.num_key_heads // size, num_value_heads=self.num_value_heads // size
        )


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """Kimi Delta Attention (Kimi Linear): gated DeltaNet in which each dimension of a key has its own decay.

    Decays and output gates have two projections: columns of the input projection, as many as the width of one
    head, and a second projection from these to all heads.

    Attributes:
        num_heads: Number of heads.
        head_dim: Width of a query, key or value.
        conv_width: Number of tokens of the convolution, the present one included.
        norm_eps: Added to the variance in the norm over each head's output.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the input and output projections have biases.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float
    has_conv_bias: bool = False
    has_bias: bool = False

    @property
    def sections(self) -> tuple[Section, ...]:
        """Columns of the input projection: queries, keys, values, decays (to be projected), beta, and gates (to
        be projected)."""
        heads, shared = Section(self.num_heads, self.head_dim), Section(1, self.head_dim)
        return heads, heads, heads, shared, Section(self.num_heads, 1), shared

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """Sections that are inputs of the convolution: queries, keys and values."""
        return self.sections[:3]

    @property
    def output_width(self) -> int:
        """Number of columns of the output projection's input."""
        return self.num_heads * self.head_dim

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """Weights of the norm, shared by all heads."""
        return (Section(1, self.head_dim),)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of linear attention: heads, head_dim, head_dim."""
        return (self.num_heads, self.head_dim, self.head_dim)

    @property
    def num_parts(self) -> int:
        """Number of heads; the number of tensor-parallel ranks must divide it."""
        return self.num_heads

    def divided(self, size: int) -> KimiDelta:
        """Return the part that one of `size` ranks has; `size` divides `num_parts`."""
        return replace(self, num_heads=self.num_heads // size)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Granite 4-H, Nemotron-H, Falcon-H1): linear attention with a decay that depends on the step size.

    Attributes:
        num_heads: Number of heads of values and states.
        head_dim: Width of a value.
        state_dim: Width of a query or key.
        num_groups: Number of groups of heads; the heads of a group share a query, a key and a norm.
        conv_width: Number of tokens of the convolution, the present one included.
        norm_eps: Added to the variance in the norm over each group of the gated output.
        step_limit: Minimum and maximum step size.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the input and output projections have biases.
        has_norm: Whether the gated output has a norm.
        num_group_ranks: Number of tensor-parallel ranks that share the heads of each group; each of these
            ranks has the group's query and key.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    norm_eps: float
    step_limit: tuple[float, float] = (0.0, float("inf"))
    has_conv_bias: bool = False
    has_bias: bool = False
    has_norm: bool = True
    num_group_ranks: int = 1

    @property
    def sections(self) -> tuple[Section, ...]:
        """Columns of the input projection: gates, values, keys (B), queries (C) and step sizes."""
        values, keys = Section(self.num_heads, self.head_dim), Section(self.num_groups, self.state_dim)
        return values, values, keys, keys, Section(self.num_heads, 1)

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """Sections that are inputs of the convolution: values, keys and queries."""
        return self.sections[1:4]

    @property
    def output_width(self) -> int:
        """Number of columns of the output projection's input."""
        return self.num_heads * self.head_dim

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """Sections of the weight vector of the norm before the output projection."""
        return (Section(self.num_heads, self.head_dim),) if self.has_norm else ()

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of linear attention: heads, state_dim, head_dim."""
        return (self.num_heads, self.state_dim, self.head_dim)

    @property
    def num_parts(self) -> int:
        """Number of groups, or of heads if there is one group; the number of tensor-parallel ranks must divide
        it."""
        return self.num_heads if self.num_groups == 1 else self.num_groups

    def divided(self, size: int) -> Mamba2:
        """Return the part that one of `size` ranks has; `size` divides `num_parts`."""
        num_heads = self.num_heads // size
        if self.num_groups == 1:
            return replace(self, num_heads=num_heads, num_group_ranks=size)
        return replace(self, num_heads=num_heads, num_groups=self.num_groups // size)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution (LFM2), whose only state is the convolution's inputs for the last tokens.

    Attributes:
        width: Number of columns of the input, and of the gates of input and output.
        conv_width: Number of tokens of the convolution, the present one included.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the input and output projections have biases.
    """

    width: int
    conv_width: int
    has_conv_bias: bool = False
    has_bias: bool = False

    @property
    def sections(self) -> tuple[Section, ...]:
        """Columns of the input projection: gates of the input, gates of the output, and the input."""
        return (Section(self.width, 1),) * 3

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """Section with the shape of the convolution's input, the gated input."""
        return self.sections[:1]

    @property
    def output_width(self) -> int:
        """Number of columns of the output projection's input."""
        return self.width

    @property
    def num_heads(self) -> int:
        """Number of heads of the state of linear attention, which this layer does not have: 0."""
        return 0

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """Weights of the norm, which this layer does not have."""
        return ()

    @property
    def state_shape(self) -> None:
        """Always None: there is no state of linear attention."""
        return

    @property
    def num_parts(self) -> int:
        """Number of columns; the number of tensor-parallel ranks must divide it."""
        return self.width

    def divided(self, size: int) -> ShortConv:
        """Return the part that one of `size` ranks has; `size` divides `num_parts`."""
        return replace(self, width=self.width // size)


RecurrentConfig = GatedDelta | KimiDelta | Mamba2 | ShortConv


def total_size(sections: tuple[Section, ...]) -> int:
    """Return the number of columns of several sections."""
    return sum(section.size for section in sections)


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Weights of a recurrent layer other than its input and output projections.

    Attributes:
        conv: Weights of the convolution, [columns, conv_width] float32; the last one is for the present token.
        conv_bias: Biases of the convolution, [columns] float32; None: there are none.
        decay: [heads] float32, at most 0; multiplied by the step size, the logarithm of the decay. None in
            `ShortConv`.
        step_bias: [heads] float32, in `KimiDelta` [heads * head_dim], added before the softplus that gives the
            step size; None in `ShortConv`.
        skip: [heads] float32, factor of the values that are added to the output; None: there is none.
        norm: Weights of the norm on the output, [columns of `norm_sections`]; None: there is none.
        step_up: Projection to steps of all heads, [heads * head_dim, head_dim]; None except in `KimiDelta`.
        gate_up: Projection to gates of all heads, [heads * head_dim, head_dim]; None except in `KimiDelta`.
    """

    conv: Tensor
    conv_bias: Tensor | None = None
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
    step_up: Tensor | None = None
    gate_up: Tensor | None = None
