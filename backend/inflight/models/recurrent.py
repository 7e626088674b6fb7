"""The layers that remember a sequence as a state of fixed size: their shapes, and their weights.

Each is a product of the hidden states, a causal convolution over the last few tokens, linear attention with decay
(`engine/recurrent/linear_attention.py`) for all but `ShortConv`, and the layer's output projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive columns of a product: `count` heads, or groups of heads, of `width` columns each."""

    count: int
    width: int

    @property
    def size(self) -> int:
        """Number of columns."""
        return self.count * self.width


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid): linear attention by the delta rule with decay.

    Attributes:
        num_key_heads: Heads of queries and of keys; `num_value_heads / num_key_heads` value heads share each.
        num_value_heads: Heads of values, gates and states.
        key_dim: Width of a query or key.
        value_dim: Width of a value.
        conv_width: Tokens of the convolution, the present one included.
        norm_eps: Of the norm of each head's output.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the product and the output projection have biases.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    has_conv_bias: bool = False
    has_bias: bool = False

    @property
    def sections(self) -> tuple[Section, ...]:
        """The product's columns: queries, keys, values, gates, beta and step sizes."""
        keys, values = (
            Section(self.num_key_heads, self.key_dim),
            Section(self.num_value_heads, self.value_dim),
        )
        return keys, keys, values, values, Section(self.num_value_heads, 1), Section(self.num_value_heads, 1)

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """The columns that the convolution runs over: queries, keys and values."""
        return self.sections[:3]

    @property
    def output_width(self) -> int:
        """Columns that the output projection takes."""
        return self.num_value_heads * self.value_dim

    @property
    def num_heads(self) -> int:
        """Heads that have a state."""
        return self.num_value_heads

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """The weights of the norm, which all heads share."""
        return (Section(1, self.value_dim),)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A state: value heads, key_dim, value_dim."""
        return (self.num_value_heads, self.key_dim, self.value_dim)

    def divided(self, size: int) -> GatedDelta:
        """The layer as one of `size` ranks computes it; ValueError, with the reason, if it cannot be divided."""
        if self.num_key_heads % size:
            raise ValueError(f"{self.num_key_heads} key heads of gated DeltaNet")
        return replace(
            self, num_key_heads=self.num_key_heads // size, num_value_heads=self.num_value_heads // size
        )


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Granite 4-H, Nemotron-H, Falcon-H1): linear attention with a decay that depends on the step size.

    Attributes:
        num_heads: Heads of values and states.
        head_dim: Width of a value.
        state_dim: Width of a query or key.
        num_groups: Groups of heads that share a query and a key; also the groups of the norm.
        conv_width: Tokens of the convolution, the present one included.
        norm_eps: Of the norm of the gated output, over each group.
        step_limit: Least and largest step size.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the product and the output projection have biases.
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

    @property
    def sections(self) -> tuple[Section, ...]:
        """The product's columns: gates, values, keys (B), queries (C) and step sizes."""
        values, keys = Section(self.num_heads, self.head_dim), Section(self.num_groups, self.state_dim)
        return values, values, keys, keys, Section(self.num_heads, 1)

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """The columns that the convolution runs over: values, keys and queries."""
        return self.sections[1:4]

    @property
    def output_width(self) -> int:
        """Columns that the output projection takes."""
        return self.num_heads * self.head_dim

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """The weights of the norm."""
        return (Section(self.num_heads, self.head_dim),)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A state: heads, state_dim, head_dim."""
        return (self.num_heads, self.state_dim, self.head_dim)

    def divided(self, size: int) -> Mamba2:
        """The layer as one of `size` ranks computes it; ValueError, with the reason, if it cannot be divided."""
        if self.num_groups % size:
            raise ValueError(f"{self.num_groups} groups of Mamba-2's heads")
        return replace(self, num_heads=self.num_heads // size, num_groups=self.num_groups // size)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution (LFM2): no state but the last tokens of the convolution.

    Attributes:
        width: Columns of the input, of its gates and of those of the output.
        conv_width: Tokens of the convolution, the present one included.
        has_conv_bias: Whether the convolution has biases.
        has_bias: Whether the product and the output projection have biases.
    """

    width: int
    conv_width: int
    has_conv_bias: bool = False
    has_bias: bool = False

    @property
    def sections(self) -> tuple[Section, ...]:
        """The product's columns: gates of the input, gates of the output, and the input."""
        return (Section(self.width, 1),) * 3

    @property
    def conv_sections(self) -> tuple[Section, ...]:
        """The columns that the convolution runs over."""
        return self.sections[:1]

    @property
    def output_width(self) -> int:
        """Columns that the output projection takes."""
        return self.width

    @property
    def num_heads(self) -> int:
        """Heads that have a state: none."""
        return 0

    @property
    def norm_sections(self) -> tuple[Section, ...]:
        """The weights of a norm: none."""
        return ()

    @property
    def state_shape(self) -> None:
        """No state beside that of the convolution."""
        return

    def divided(self, size: int) -> ShortConv:
        """The layer as one of `size` ranks computes it; ValueError, with the reason, if it cannot be divided."""
        if self.width % size:
            raise ValueError(f"{self.width} columns of the convolution")
        return replace(self, width=self.width // size)


RecurrentConfig = GatedDelta | Mamba2 | ShortConv


def total_size(sections: tuple[Section, ...]) -> int:
    """Columns of several sections."""
    return sum(section.size for section in sections)


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a recurrent layer between its product and its output projection.

    Attributes:
        conv: The convolution [columns, conv_width] float32, the last tap that of the present token.
        conv_bias: [columns] float32; None: it has none.
        decay: [heads] float32, at most 0: multiplies the step size, which gives the logarithm of the decay.
        step_bias: [heads] float32: added before the softplus that makes the step size.
        skip: [heads] float32: how much of a value goes to the output by itself; None: nothing.
        norm: The norm of the output, as wide as `norm_sections`; None: there is none.
    """

    conv: Tensor
    conv_bias: Tensor | None = None
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
