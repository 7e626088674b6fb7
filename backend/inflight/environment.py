"""The environment variables of this package: their meaning, their values, and the errors for wrong ones.

docs/settings.md has a table of the list. Every command line (`arguments.Parser`) and every engine checks the
environment of its process. Standard library only.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.near_words import equally_near

_PREFIX = "INFLIGHT_"
_ALIKE = 0.75
"""Least similarity of a name, without the prefix, to the one that it is taken for. Other programs may have
variables with this prefix, too."""
_MAX_SPIN_US = 1_000_000
# Kubernetes adds variables with the addresses of all services, and a service may be called inflight.
_OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")
_ADDRESS_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://.*")
_OF_MACHINES = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon-bf16", "neon-dot", "neon")}
"""Names of the targets of compiled layers that each architecture has beside `generic`."""


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of this package.

    Attributes:
        name: Its name.
        meaning: Its meaning in Markdown, with links from the folder docs.
        expected: The allowed values, in words for messages; "": every text.
        accepts: Function that returns whether a value, which is not empty, is allowed.
    """

    name: str
    meaning: str
    expected: str = ""
    accepts: Callable[[str], bool] = lambda text: True


def _choice(name: str, meaning: str, *values: str) -> Variable:
    return Variable(name, meaning, " or ".join(values), lambda text: text in values)


def _is_spin(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) <= _MAX_SPIN_US


VARIABLES: Mapping[str, Variable] = {
    each.name: each
    for each in (
        _choice(
            "INFLIGHT_ACCESS_LOG",
            "`0`: write no [access lines](operating.md#the-log); `--no-access-log` sets this value",
            "0",
            "1",
        ),
        Variable(
            "INFLIGHT_API_KEY",
            "API keys of `/v1`, separated by spaces, commas or line ends: [API keys](openai-server.md#api-keys)",
        ),
        Variable(
            "INFLIGHT_CONTROL_KEY",
            "key that clients need to load and unload models, and to use [other restricted "
            "APIs](production.md#what-clients-may-do) of Triton",
        ),
        _choice(
            "INFLIGHT_CPU_TARGET",
            "[target](operating.md#what-computes-the-layers) of the compiled layers, to be used instead of "
            "the fastest one: `amx`, `avx512`, `avx2`, `neon-bf16`, `neon-dot`, `neon` or `generic`",
            *_OF_MACHINES.get(platform.machine(), ()),
            "generic",
        ),
        _choice(
            "INFLIGHT_CPU_BUILD",
            "`local`: compile the layers on this machine even if the package contains them",
            "local",
        ),
        _choice(
            "INFLIGHT_CPU_PARTS",
            "`all`: compile the code for every kind of weights and KV cache, not only for the loaded model's "
            "kind",
            "all",
        ),
        Variable(
            "INFLIGHT_CPU_SPIN_US",
            "how many microseconds a [thread](operating.md#processors) of compiled layers spins before it "
            "sleeps, 0 to 1,000,000; default: 50",
            f"0 to {_MAX_SPIN_US} (microseconds)",
            _is_spin,
        ),
        _choice(
            "INFLIGHT_PROGRESS_BAR",
            "`1`: log the progress of the server's start every few seconds; on a terminal, `scripts/serve` "
            "sets the variable and shows these lines as a bar",
            "0",
            "1",
        ),
    )
}
"""The variables by name."""


def read(name: str) -> str:
    """Return the value of a variable of this process; "" without one. Raises ConfigError if it is not allowed."""
    value = os.environ.get(name, "")
    if reason := _why_refused(VARIABLES[name], value):
        raise ConfigError(reason)
    return value


def faults(environment: Mapping[str, str]) -> list[str]:
    """Return an error for each variable whose value is not allowed, or whose name is nearly one of the list."""
    refused = [_why_refused(variable, environment.get(name, "")) for name, variable in VARIABLES.items()]
    misspelled = [
        f"there is no environment variable {name}; did you mean {' or '.join(near)}?"
        for name in _unknown(environment)
        if (near := _near(name))
    ]
    return [*filter(None, refused), *misspelled]


def unused(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each other variable with this package's prefix, which may be another program's."""
    return [
        f"the environment variable {name} has no effect; there are {', '.join(VARIABLES)}"
        for name in _unknown(environment)
        if not _near(name)
    ]


def _why_refused(variable: Variable, value: str) -> str:
    if not value or variable.accepts(value):
        return ""
    return f"the environment variable {variable.name} is {value!r}, expected {variable.expected}"


def _unknown(environment: Mapping[str, str]) -> list[str]:
    return [
        name
        for name, value in environment.items()
        if name.upper().startswith(_PREFIX) and name not in VARIABLES and not _is_of_kubernetes(name, value)
    ]


def _is_of_kubernetes(name: str, value: str) -> bool:
    parts = name.removeprefix(_PREFIX).split("_")
    ends = ("_".join(parts[first:]) for first in range(len(parts)))
    return any(map(_OF_KUBERNETES.fullmatch, ends)) or (
        parts[-1] == "PORT" and _ADDRESS_OF_KUBERNETES.fullmatch(value) is not None
    )


def _near(name: str) -> list[str]:
    known = [each.removeprefix(_PREFIX) for each in VARIABLES]
    found = equally_near(name.upper().removeprefix(_PREFIX), known, cutoff=_ALIKE)
    return [f"{_PREFIX}{each}" for each in found]
