"""Base classes of the Executor API's data classes: assigned values are checked and copied.

TensorRT-LLM's classes are bindings of C++ classes: assigning a value of a wrong type raises TypeError, a
number out of range raises RuntimeError, an unknown attribute raises AttributeError, and objects keep copies
of assigned values. `Typed` implements this for dataclasses, from their annotations. `Frozen` is for classes
with read-only attributes.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from functools import cache, wraps
from numbers import Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from inflight.core.request.control import Range
from inflight.core.request.sampling_config import CONTROLS
from inflight.executor.errors import InvalidValue

_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)


class _AnyTensor:
    """Stands for torch.Tensor in annotations, as torch is not imported; arrays of numpy are accepted, too."""


_NAMES_IN_ANNOTATIONS = {"torch": SimpleNamespace(Tensor=_AnyTensor)}


POSITIVE = Range(">= 1", lambda value: value >= 1)
NOT_NEGATIVE = Range(">= 0", lambda value: value >= 0)
SHARE = Range("in [0, 1]", lambda value: 0.0 <= value <= 1.0)
FRACTION = Range("in (0, 1)", lambda value: 0.0 < value < 1.0)


def within(default: _T, values: Range) -> _T:
    """Return a field with a default whose values must be in a range."""
    return field(default=default, metadata={"range": values})


def of_control(name: str, default: _T) -> _T:
    """Return a field for a sampling control, whose values must be in the range of the control's declaration."""
    control = CONTROLS[name].executor
    assert control is not None, f"{name} is not a control of this API"
    return within(default, control.range)


def required(values: Range) -> Any:
    """Return a field without default whose values must be in a range."""
    return field(metadata={"range": values})


class Typed:
    """Base of mutable data classes. A subclass is a dataclass whose annotations are its fields' types.

    Lists and objects of the API are copied when they are assigned, so that later changes to the originals
    have no effect. `config.kv_cache_config.max_tokens = 42` changes the copy in `config`.

    Attributes:
        accepts_unknown: Whether unknown attributes may be set, like `dynamic_attr` of the bindings.
        read_only: Fields that cannot be assigned again.
    """

    accepts_unknown: ClassVar[bool] = False
    read_only: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        rule = _rules_of(type(self)).get(name)
        if rule is not None:
            if name in self.read_only and name in vars(self):
                raise AttributeError(f"{type(self).__name__}.{name} is read-only")
            value = rule(value)
        elif not self.accepts_unknown and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        object.__setattr__(self, name, value)

    def __copy__(self: _T) -> _T:
        twin = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(twin, name, value)
        return twin


class Frozen:
    """Base of immutable data classes. A subclass is a frozen dataclass."""

    def __post_init__(self) -> None:
        for name, rule in _rules_of(type(self)).items():
            object.__setattr__(self, name, rule(getattr(self, name)))


def also_called(**names: str) -> Callable[[_C], _C]:
    """Class decorator that gives fields second names: with `also_called(other="field")`, `other` means `field`.

    The names can be used as attributes and in the constructor. If the constructor gets both, the field's own
    name takes precedence.
    """

    def add_names(cls: _C) -> _C:
        construct = cls.__init__

        @wraps(construct)
        def __init__(self: Any, *args: Any, **keywords: Any) -> None:
            for other, name in names.items():
                if other in keywords:
                    value = keywords.pop(other)
                    if keywords.get(name) is None:
                        keywords[name] = value
            construct(self, *args, **keywords)

        cls.__init__ = __init__
        for other, name in names.items():
            setattr(cls, other, _same_as(name))
        return cls

    return add_names


def _same_as(name: str) -> property:
    return property(
        lambda self: getattr(self, name),
        lambda self, value: setattr(self, name, value),
        doc=f"The same as `{name}`.",
    )


# ---------------------------------------------------------------------- rules


_Convert = Callable[[Any], Any]


class _Mismatch(Exception):
    """Raised if a value does not have the annotated type."""


@cache
def _rules_of(cls: Any) -> dict[str, _Convert]:
    """Return, by field, the function that checks and converts its values. It raises TypeError or InvalidValue."""
    annotated = SimpleNamespace(__annotations__={each.name: each.type for each in fields(cls)})
    hints = get_type_hints(
        annotated, vars(sys.modules[cls.__module__]), {**vars(cls), **_NAMES_IN_ANNOTATIONS}
    )
    return {
        each.name: _rule(
            f"{cls.__name__}.{each.name}", hints[each.name], each.type, each.metadata.get("range")
        )
        for each in fields(cls)
    }


def _rule(name: str, hint: Any, annotation: Any, values: Range | None) -> _Convert:
    convert = _converter(hint)

    def apply(value: Any) -> Any:
        try:
            kept = convert(value)
        except _Mismatch:
            raise TypeError(f"{name} must be {annotation}, got {value!r} ({type(value).__name__})") from None
        if values is not None and kept is not None and not values.contains(kept):
            raise InvalidValue(f"{name} must be {values.text}, got {value!r}")
        return kept

    return apply


def _converter(hint: Any) -> _Convert:
    """Return a function that converts values to type `hint`, and copies mutable values. It raises _Mismatch."""
    if hint is Any:
        return lambda value: value
    if hint is int:
        return _to_int
    if hint is float:
        return _to_float
    if hint is _AnyTensor:
        return _to_tensor
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Union or origin is UnionType:
        return _to_one_of(
            [_converter(each) for each in arguments if each is not NoneType], NoneType in arguments
        )
    if origin is list:
        return _to_list(arguments[0])
    if origin is dict:
        return lambda value: dict(_of_type(Mapping, value))
    if origin is Callable:
        return _to_callable
    return lambda value: copy.copy(value) if isinstance(_of_type(hint, value), Typed) else value


def _to_one_of(converters: list[_Convert], takes_none: bool) -> _Convert:
    def convert(value: Any) -> Any:
        if value is None and takes_none:
            return None
        for one in converters[:-1]:
            with contextlib.suppress(_Mismatch):
                return one(value)
        return converters[-1](value)

    return convert


def _to_list(hint: Any) -> _Convert:
    one = _converter(hint)

    def convert(value: Any) -> list[Any]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise _Mismatch
        values = cast("Iterable[Any]", value)
        return _to_ints(values) if hint is int else [one(each) for each in values]

    return convert


def _to_ints(values: Iterable[Any]) -> list[int]:
    try:
        return list(map(operator.index, values))  # fast, since prompts are long
    except TypeError:
        raise _Mismatch from None


def _to_int(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _Mismatch from None


def _to_callable(value: Any) -> Any:
    if not callable(value):
        raise _Mismatch
    return value


def _to_float(value: Any) -> float:
    return float(_of_type(Real, value))


def _to_tensor(value: Any) -> Any:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise _Mismatch
    return value


def _of_type(wanted: Any, value: Any) -> Any:
    if not isinstance(value, wanted):
        raise _Mismatch
    return value
