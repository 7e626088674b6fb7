"""The files for Compose are valid by their schema, and agree with each other and with the server.

The schema is that of the Compose Specification, from the PyPI package check-jsonschema 0.39.0 (licence and
notice beside it).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from inflight.server import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ADDRESS = re.compile(r"(?:(?P<host>[\d.]+):)?(?P<published>\d+):(?P<target>\d+)")


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


@pytest.fixture(scope="module")
def compose_schema() -> jsonschema.Draft202012Validator:
    schema = json.loads((Path(__file__).parent / "compose_spec" / "compose-spec.json").read_text())
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_are_valid(compose_schema, name):
    compose_schema.validate(load(name))


def test_the_compose_schema_rejects_errors(compose_schema):
    wrong = load("compose.yaml")
    wrong["services"]["inflight"]["ports"] = "8000"
    with pytest.raises(jsonschema.ValidationError):
        compose_schema.validate(wrong)


def test_paths_that_compose_mounts_exist():
    services = load("compose.yaml")["services"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert len(files) == 4 and all((DEPLOY / file).exists() for file in files)
    assert (DEPLOY / services["inflight"]["build"]["context"] / "Dockerfile").is_file()
    named = {mount for mount in mounts if not mount.startswith((".", "$"))}
    assert named == set(load("compose.yaml")["volumes"])


def test_compose_opens_ports_to_this_host_only_and_prometheus_scrapes_the_servers():
    services = load("compose.yaml")["services"]
    ports = {
        name: [ADDRESS.fullmatch(port) for port in service["ports"]] for name, service in services.items()
    }
    assert {port["host"] for each in ports.values() for port in each} == {"127.0.0.1"}
    asked = {
        target
        for job in load("prometheus/prometheus.yml")["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert asked == {"inflight:8002", "inflight:9000"}
    assert {target.split(":")[1] for target in asked} <= {port["target"] for port in ports["inflight"]}
    url = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["url"]
    assert url == f"http://prometheus:{ports['prometheus'][0]['target']}"
    exposed = re.search(r"^EXPOSE (.*)", (ROOT / "Dockerfile").read_text(), re.M)[1].split()
    assert exposed == [port["target"] for port in ports["inflight"]]


def test_the_dashboard_is_mounted_where_grafana_looks():
    mounts = dict(mount.split(":")[:2] for mount in load("compose.yaml")["services"]["grafana"]["volumes"])
    folder = load("grafana/provisioning/dashboards/inflight.yaml")["providers"][0]["options"]["path"]
    assert mounts["./grafana/dashboards"] == folder
    home = load("compose.yaml")["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert (DEPLOY / "grafana/dashboards" / Path(home).relative_to(folder)).is_file()


def test_compose_kills_the_server_only_after_its_exit_timeout():
    grace = load("compose.yaml")["services"]["inflight"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > cli.parse([]).exit_timeout_s


def test_the_server_accepts_the_flags_in_the_compose_file():
    arguments = load("compose.yaml")["services"]["inflight"]["command"]
    checkpoint = ROOT / "model_repository/tensorrt_llm/1/demo_model"
    options = cli.parse([str(checkpoint) if argument == "/model" else argument for argument in arguments])
    assert options.wanted.model == checkpoint
