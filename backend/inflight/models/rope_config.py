"""The rotary positions of a layer, and their scaling for longer contexts: numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear RoPE scaling: positions are divided by `factor`.

    Attributes:
        factor: Greater than 1 to extend the usable positions.
        original_max_positions: Number of positions with which the model was first trained.
    """

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: no scaling up to the number of positions with which the model was trained.

    In longer sequences every further token increases the base by `factor`, for all tokens of the sequence. Cached
    keys would have to be recomputed, so this engine does not allow longer sequences.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low rotary frequencies are divided by `factor`, high ones are kept, with a ramp in between.

    If `high_freq_factor` is at most `low_freq_factor`, there is no ramp: frequencies that are not low are kept.

    Attributes:
        factor: Divides the frequencies of long wavelengths.
        low_freq_factor: Wavelengths above original_max_positions / low_freq_factor are long.
        high_freq_factor: Wavelengths below original_max_positions / high_freq_factor are short.
        original_max_positions: Number of positions with which the model was first trained.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: a ramp over the dimensions from unscaled to scaled frequencies, and a factor on cos and sin.

    Attributes:
        factor: Divides the scaled frequencies.
        original_max_positions: Number of positions with which the model was first trained.
        beta_fast: Dimensions with more rotations than this over the original positions are not scaled.
        beta_slow: Dimensions with fewer rotations than this over the original positions are fully scaled.
        attention_factor: Multiplies cos and sin.
        truncate: Whether the ramp begins and ends at whole dimensions.
        all_dim_factor: The factor computed from `mscale_all_dim` and `factor`; 1 if not given. Latent attention
            multiplies all dimensions of queries and keys by it, rotated or not; other kinds of attention ignore
            it.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    all_dim_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: each pair of dimensions has its own factor, and there are two sets of factors.

    Cached keys are valid for one set only, so an engine uses one set for all sequences: the short factors if no
    sequence can be longer than the model was first trained with, otherwise the long factors. transformers changes
    the set when a sequence becomes longer, which invalidates results that were already computed.

    Attributes:
        short_factors: Divide the frequencies, one per rotated pair, in short sequences.
        long_factors: Divide the frequencies, one per rotated pair, in long sequences.
        original_max_positions: Number of positions with which the model was first trained.
        attention_factor: Multiplies cos and sin.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Proportional RoPE: the first pairs of a head are rotated as in a fully rotated head, the other pairs are
    not.

    Pairs are dimensions i and i + head_dim / 2.

    Attributes:
        part: Fraction of the pairs that are rotated.
        factor: Divides the frequencies.
    """

    part: float
    factor: float


RopeScaling = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of a layer.

    Attributes:
        theta: Base of the angles.
        scaling: Scaling for longer contexts; None: no scaling.
        partial_factor: Fraction of each head's dimensions, from the first on, that are rotated.
        interleaved: Whether the checkpoint's model rotates dimensions 2i and 2i + 1 together, instead of i and
            i + rotary_dim / 2. Rows of query and key projections are reordered for the second form when they are
            read, which does not change attention scores.
        is_multimodal: Whether pairs of dimensions are assigned to positions in time, height and width (mRoPE). In
            text these are equal; requests may bring other rotations.
    """

    theta: float
    scaling: RopeScaling | None = None
    partial_factor: float = 1.0
    interleaved: bool = False
    is_multimodal: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.partial_factor)

    def rows_in_halves(self, head_dim: int) -> tuple[tuple[int, int, int], ...]:
        """Return ranges (begin, end, step) of a head's stored rows, which together have the order of the
        rotation."""
        rotated = self.rotary_dim(head_dim) if self.interleaved else 0
        ranges = (0, rotated, 2), (1, rotated, 2), (rotated, head_dim, 1)
        return tuple(each for each in ranges if each[0] < each[1])
