"""What Triton tells a model at load time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.triton.model_args import ModelArgs, read_model_args
from inflight.triton.parameters import Role
from tests.triton.factories import make_model_config


def read(role: Role = Role.ENGINE, **config: object) -> ModelArgs:
    args = {
        "model_config": json.dumps({**make_model_config(), **config}),
        "model_name": "a_model",
        "model_repository": "/models/a_model",
        "model_version": "3",
    }
    return read_model_args(args, role)


def test_what_is_read():
    args = read()
    assert (args.name, args.version_dir, args.decoupled) == ("a_model", Path("/models/a_model/3"), True)
    assert not read(model_transaction_policy={}).decoupled


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [{}],
        [{"count": 1, "kind": "KIND_CPU"}],
        [{"count": 1, "gpus": []}],
        [{"count": 1, "gpus": [3]}],
    ],
)
def test_an_engine_has_one_instance(groups):
    assert read(instance_group=groups).name == "a_model"


@pytest.mark.parametrize(
    "groups", [[{"count": 2}], [{"count": 1}, {"count": 1}], [{"count": 1, "gpus": [0, 1]}]]
)
def test_an_engine_of_two_instances_is_refused(groups):
    """The second would take the first one's place."""
    with pytest.raises(ConfigError, match="instance_group: got 2 instances, expected 1"):
        read(instance_group=groups)


def test_a_front_end_may_have_several():
    assert read(Role.FRONT_END, instance_group=[{"count": 2}]).name == "a_model"
