"""The files in deploy/ are valid by their schemas, and agree with each other and with the server.

The schema of compose files is that of the Compose Specification, from the PyPI package check-jsonschema 0.39.0
(licence and notice beside it); Kubernetes' schemas come with kubernetes-validate.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from inflight.server import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFEST = (DEPLOY / "kubernetes" / "inflight.yaml").read_text()
MANIFESTS = {"cpu": MANIFEST, "gpu": re.sub("# gpu: ", "", MANIFEST)}
OLDEST_KUBERNETES = "1.29"
ADDRESS = re.compile(r"(?:(?P<host>[\d.]+):)?(?P<published>\d+):(?P<target>\d+)")


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def manifests(variant: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFESTS[variant])}


def container(variant: str) -> Any:
    (found,) = manifests(variant)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


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
    assert len(files) == 3 and all((DEPLOY / file).exists() for file in files)
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


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("variant", MANIFESTS)
def test_manifests_are_valid(variant, version):
    found = manifests(variant)
    assert set(found) == {"PersistentVolumeClaim", "Service", "Deployment", "HorizontalPodAutoscaler"}
    for each in found.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_of_kubernetes_rejects_errors():
    wrong = manifests("cpu")["Deployment"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST_KUBERNETES, strict=True)


def test_only_the_gpu_variant_requests_a_gpu():
    assert "nvidia.com/gpu" not in container("cpu")["resources"]["limits"]
    assert container("gpu")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert manifests("gpu")["Deployment"]["spec"]["template"]["spec"]["tolerations"]


def test_probes_and_the_service_refer_to_ports_that_the_container_has():
    names = {port["name"]: port["containerPort"] for port in container("cpu")["ports"]}
    assert set(names.values()) == {8000, 8001, 8002, 9000}
    probes = [container("cpu")[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} <= set(names)
    assert {
        port["targetPort"]: port["port"] for port in manifests("cpu")["Service"]["spec"]["ports"]
    } == names


def test_the_shared_memory_volume_fits_into_the_memory_limit():
    (shm,) = (
        v for v in manifests("cpu")["Deployment"]["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"
    )
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container("cpu")["volumeMounts"]


def test_the_autoscaler_uses_the_adapters_metric():
    spec = manifests("cpu")["HorizontalPodAutoscaler"]["spec"]
    (rule,) = load("kubernetes/prometheus-adapter.yaml")["rules"]["custom"]
    assert [metric["pods"]["metric"]["name"] for metric in spec["metrics"]] == [rule["name"]["as"]]
    target = manifests("cpu")["Deployment"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": target["apiVersion"], "kind": target["kind"], "name": target["metadata"]["name"],
    }  # fmt: skip


def test_a_pod_is_killed_only_after_the_servers_exit_timeout():
    spec = manifests("cpu")["Deployment"]["spec"]["template"]["spec"]
    arguments = container("cpu")["args"]
    exit_timeout = int(arguments[arguments.index("--exit-timeout") + 1])
    waits = int(container("cpu")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > waits + exit_timeout
    grace = load("compose.yaml")["services"]["inflight"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > cli.parse([]).exit_timeout_s


@pytest.mark.parametrize(
    "arguments", [container("cpu")["args"], load("compose.yaml")["services"]["inflight"]["command"]]
)
def test_the_server_accepts_the_flags_in_the_manifest_and_compose_file(arguments):
    checkpoint = ROOT / "model_repository/tensorrt_llm/1/demo_model"
    options = cli.parse([str(checkpoint) if argument == "/model" else argument for argument in arguments])
    assert options.wanted.model == checkpoint
