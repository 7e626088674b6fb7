"""How the next token is chosen from the logits: one frozen value per request."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """TensorRT-LLM's `SamplingConfig`, as far as it is built.

    Attributes:
        temperature: Divides the logits; 0 means greedy. Tensor `temperature`.
        top_k: Keep the k likeliest tokens; 0 keeps all, 1 is greedy. Tensor `runtime_top_k`.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches p, in (0, 1]; 0 means unset.
            Applied after top_k, on the renormalized probabilities. Tensor `runtime_top_p`.
        random_seed: Key of the counter-based random numbers, 0 .. 2**64 - 1. The default 0 is a seed like any
            other: identical requests give identical tokens. Tensor `random_seed` (alias `seed`).

    With top_k and top_p both 0 the request is greedy, whatever the temperature.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    random_seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0.0)

    def validate(self) -> None:
        """Raise InvalidArgument naming the tensor, what came and what was expected."""
        if not (0.0 <= self.temperature < float("inf")):
            raise InvalidArgument(f"temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise InvalidArgument(f"runtime_top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        if not (0.0 <= self.top_p <= 1.0):
            raise InvalidArgument(f"runtime_top_p must be in (0, 1], or <= 0 for unset, got {self.top_p}")
        if not (0 <= self.random_seed < 2**64):
            raise InvalidArgument(f"random_seed must fit in 64 unsigned bits, got {self.random_seed}")
