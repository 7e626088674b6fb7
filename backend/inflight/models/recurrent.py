"""The layers that remember a sequence as a state of fixed size: their shapes, and their weights.

Each is a product of the hidden states, a causal convolution over the last few tokens, linear attention with decay
(`engine/recurrent/linear_attention.py`) for all but `ShortConv`, and the layer's output projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

AnyLinear = TypeVar("AnyLinear")


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid): linear attention by the delta rule with decay.

    The product's columns are queries, keys, values, gates, and for each value head one of beta and of the decay.

    Attributes:
        num_key_heads: Heads of queries and of keys; `num_value_heads / num_key_heads` value heads share each.
        num_value_heads: Heads of values, gates and states.
        key_dim: Width of a query or key.
        value_dim: Width of a value.
        conv_width: Tokens of the convolution, the present one included.
        norm_eps: Of the norm of each head's output.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float

    @property
    def conv_channels(self) -> int:
        """Columns that the convolution runs over: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.output_width

    @property
    def projected_width(self) -> int:
        """Columns of the product."""
        return self.conv_channels + self.output_width + 2 * self.num_value_heads

    @property
    def output_width(self) -> int:
        """Columns that the output projection takes."""
        return self.num_value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A state: value heads, key_dim, value_dim."""
        return (self.num_value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 (Granite 4-H, Nemotron-H, Falcon-H1): linear attention with a decay that depends on the step size.

    The product's columns are gates, values, keys (B), queries (C) and one step size for each head.

    Attributes:
        num_heads: Heads of values and states.
        head_dim: Width of a value.
        state_dim: Width of a query or key.
        num_groups: Groups of heads that share a query and a key; also the groups of the norm.
        conv_width: Tokens of the convolution, the present one included.
        norm_eps: Of the norm of the gated output, over each group.
        step_limit: Least and largest step size.
        has_norm: Whether the gated output has a norm.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    norm_eps: float
    step_limit: tuple[float, float] = (0.0, float("inf"))
    has_norm: bool = True

    @property
    def conv_channels(self) -> int:
        """Columns that the convolution runs over: values, keys and queries."""
        return self.output_width + 2 * self.num_groups * self.state_dim

    @property
    def projected_width(self) -> int:
        """Columns of the product."""
        return self.output_width + self.conv_channels + self.num_heads

    @property
    def output_width(self) -> int:
        """Columns that the output projection takes."""
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A state: heads, state_dim, head_dim."""
        return (self.num_heads, self.state_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution (LFM2): no state but the last tokens of the convolution.

    The product's columns are gates of the input, gates of the output and the input.

    Attributes:
        width: Columns of each of the three, and of the output.
        conv_width: Tokens of the convolution, the present one included.
    """

    width: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        """Columns that the convolution runs over."""
        return self.width

    @property
    def projected_width(self) -> int:
        """Columns of the product."""
        return 3 * self.width

    @property
    def output_width(self) -> int:
        """Columns that the output projection takes."""
        return self.width

    @property
    def state_shape(self) -> None:
        """No state beside that of the convolution."""
        return


RecurrentConfig = GatedDelta | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class RecurrentWeights(Generic[AnyLinear]):
    """The weights of a recurrent layer but its output projection; vectors are float32.

    Attributes:
        projection: The product, its columns in the order that the config names.
        conv: The convolution [conv_channels, conv_width], the last tap that of the present token.
        conv_bias: [conv_channels]; None: it has none.
        decay: [heads], at most 0: multiplies the step size, which gives the logarithm of the decay.
        step_bias: [heads]: added before the softplus that makes the step size.
        skip: [heads]: how much of a value goes to the output by itself; None: nothing.
        norm: The norm of the output: [value_dim] of gated DeltaNet, [output_width] of Mamba-2; None: none.
    """

    projection: AnyLinear
    conv: Tensor
    conv_bias: Tensor | None = None
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
