"""Environment variables: wrong values and misspelled names are errors, those of other programs are not."""

from __future__ import annotations

import pytest

from inflight import environment
from inflight.engine.cpu import library
from inflight.errors import ConfigError


def test_a_right_environment_has_no_faults() -> None:
    right = {
        "INFLIGHT_ACCESS_LOG": "0",
        "INFLIGHT_API_KEY": "a, b",
        "INFLIGHT_CPU_TARGET": "generic",
        "INFLIGHT_CPU_BUILD": "",
        "INFLIGHT_CPU_PARTS": "all",
        "INFLIGHT_CPU_SPIN_US": "1000000",
        "PATH": "/bin",
    }
    assert not environment.faults(right) and not environment.unused(right)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("INFLIGHT_ACCESS_LOG", "off", "0 or 1"),
        ("INFLIGHT_CPU_TARGET", "avx", " or ".join(target.name for target in library.TARGETS)),
        ("INFLIGHT_CPU_TARGET", "sse", " or ".join(target.name for target in library.TARGETS)),
        ("INFLIGHT_CPU_BUILD", "native", "local"),
        ("INFLIGHT_CPU_PARTS", "some", "all"),
        ("INFLIGHT_CPU_SPIN_US", "-1", "0 to 1000000 (microseconds)"),
        ("INFLIGHT_CPU_SPIN_US", "1e3", "0 to 1000000 (microseconds)"),
        ("INFLIGHT_PROGRESS_BAR", "yes", "0 or 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"the environment variable {name} is {value!r}, expected {expected}"
    assert environment.faults({name: value}) == [said]
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        environment.read(name)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("INFLIGHT_API_KEYS", "INFLIGHT_API_KEY"),
        ("INFLIGHT_CPU_TARGT", "INFLIGHT_CPU_TARGET"),
        ("INFLIGHT_CPU_SPIN", "INFLIGHT_CPU_SPIN_US"),
        ("INFLIGHT_ACCESSLOG", "INFLIGHT_ACCESS_LOG"),
        ("inflight_api_key", "INFLIGHT_API_KEY"),
    ],
)
def test_a_misspelled_name_is_an_error_without_the_value(name: str, meant: str) -> None:
    assert environment.faults({name: "secret"}) == [
        f"there is no environment variable {name}; did you mean {meant}?"
    ]
    assert not environment.unused({name: "secret"})


def test_a_name_that_is_like_no_other_gives_a_warning() -> None:
    given = {"INFLIGHT_MODEL": "x"}
    assert not environment.faults(given)
    (warning,) = environment.unused(given)
    assert "INFLIGHT_MODEL has no effect; there are INFLIGHT_ACCESS_LOG, " in warning


@pytest.mark.parametrize("service", ["INFLIGHT", "INFLIGHT_CPU", "INFLIGHT_API"])
def test_variables_that_kubernetes_adds_for_a_service_are_left_alone(service: str) -> None:
    added = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "9000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.0.0.1:9000",
        f"{service}_PORT_9000_TCP": "tcp://10.0.0.1:9000",
        f"{service}_PORT_9000_TCP_PROTO": "tcp",
        f"{service}_PORT_9000_TCP_PORT": "9000",
        f"{service}_PORT_9000_TCP_ADDR": "10.0.0.1",
    }
    assert not environment.faults(added) and not environment.unused(added)


def test_the_targets_of_compiled_layers_are_those_that_can_be_compiled() -> None:
    targets = {
        machine: tuple(each.name for each in targets) for machine, targets in library._OF_MACHINES.items()
    }
    assert targets == environment._OF_MACHINES
