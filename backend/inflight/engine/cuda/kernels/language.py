"""Triton's language with Python types for kernels: Triton declares none that a type checker could use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import triton  # pyright: ignore[reportMissingTypeStubs]
import triton.language  # pyright: ignore[reportMissingTypeStubs]

tl: Any = triton.language
"""The functions that kernels may use."""

if TYPE_CHECKING:
    Value: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    Value = triton.language.tensor
    """A tensor, pointer or number in a kernel."""
    constexpr = triton.language.constexpr
    """A parameter of a kernel that is known when it is compiled; Triton recognizes the name."""

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])


def jit(**options: Any) -> Callable[[_Kernel], _Kernel]:
    """Return the decorator `triton.jit`, by whose result other kernels are called like the function itself."""
    return cast("Callable[[_Kernel], _Kernel]", triton.jit(**options))  # pyright: ignore[reportUnknownMemberType]
