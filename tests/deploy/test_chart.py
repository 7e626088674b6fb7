"""The chart renders valid, restricted manifests, and deploy/kubernetes/ has its output for the example values.

Tests that need Helm are skipped without it (tests/deploy/chart.py says where it comes from). With it,
`UPDATE_TABLES=1` rewrites deploy/kubernetes/.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from inflight import hub
from inflight.config import PARAMETERS
from inflight.openai.http_metrics import HttpMetrics
from inflight.server import cli
from inflight.serving.metric_table import COUNTERS, FAMILIES, GAUGES, LEVELS
from inflight.triton.settings_page import FIELDS

from .chart import (
    CHART,
    EXAMPLES,
    RENDERED,
    ROOT,
    Manifest,
    by_kind,
    digest,
    documents,
    needs_helm,
    pod_templates,
    render,
    run_helm,
    validate,
)

HERE = Path(__file__).parent
OLDEST_KUBERNETES = "1.29"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
PAGE = ROOT / "docs" / "kubernetes.md"
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())


def rendered(example: str) -> list[Manifest]:
    return documents((RENDERED / f"{example}.yaml").read_text())


def containers(manifests: list[Manifest]) -> list[Manifest]:
    specs = [template["spec"] for template in pod_templates(manifests)]
    return [each for spec in specs for each in (*spec["containers"], *spec.get("initContainers", ()))]


def server(manifests: list[Manifest]) -> Manifest:
    (found,) = (each for each in containers(manifests) if each["name"] == "inflight")
    return found


# ---------------------------------------------------------------------- with Helm


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES)
def test_rendered_examples_are_the_charts_output(example: str) -> None:
    text = render("-f", CHART / "ci" / f"{example}-values.yaml")
    if os.environ.get("UPDATE_TABLES"):
        head = f"# Written by Helm from deploy/helm/inflight with ci/{example}-values.yaml ({digest(example)}).\n"
        lines = (line.rstrip() for line in text.splitlines())
        (RENDERED / f"{example}.yaml").write_text(head + "\n".join(lines) + "\n")
    assert documents(text) == rendered(example)


@needs_helm
@pytest.mark.parametrize("example", [*EXAMPLES, None])
def test_helm_finds_no_fault(example: str | None) -> None:
    values = [] if example is None else ["-f", CHART / "ci" / f"{example}-values.yaml"]
    done = run_helm("lint", "--strict", CHART, *values)
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("model.idd=x", "additional properties 'idd' not allowed"),
        ("replicas=two", "got string, want integer"),
        ("model.id=a/b", "a checkpoint needs a volume"),
        ("model.path=a,volume.kind=shared", "set volume.kind to existing"),
        ("model.id=a/b,model.path=a,volume.kind=existing", "name two checkpoints"),
        ("model.path=a,volume.kind=existing", "needs volume.claim"),
        ("multiNode.nodes=2", "needs multiNode.sshSecret"),
        ("autoscaling.kind=keda", "needs autoscaling.prometheus"),
        ("gateway.enabled=true", "needs gateway.parents"),
        ("rollout.maxSurge=0", "cannot both be 0"),
        ("settings.tensor_parallel_size=2", "not"),
    ],
)
def test_wrong_values_are_refused(values: str, message: str) -> None:
    done = run_helm("template", CHART, "--set", values)
    assert done.returncode != 0 and message in done.stderr


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        "",
        "volume.kind=existing,volume.claim=mine,model.path=a",
        "volume.kind=shared,model.id=a/b,model.revision=v1",
        "gpus=4,image.pullSecrets={one,two},service.type=LoadBalancer,podLabels.team=a,podAnnotations.b=c",
        "networkPolicy.enabled=false,disruptionBudget.enabled=false,topologySpread.enabled=false",
        "networkPolicy.triton[0].podSelector.matchLabels.app=router,nodeSelector.disk=ssd,priorityClassName=high",
        "env[0].name=A,env[0].value=b,extraVolumes[0].name=v,extraVolumes[0].emptyDir.medium=Memory,"
        "extraVolumeMounts[0].name=v,extraVolumeMounts[0].mountPath=/v,tolerations[0].operator=Exists",
        "multiNode.nodes=3,multiNode.sshSecret=s,volume.kind=perPod,model.id=a/b,autoscaling.kind=hpa,gpus=2",
        "monitoring.podMonitor=true,monitoring.rules=true,monitoring.labels.release=prometheus",
        "flags={--ssl-certfile,/tls/chain.pem},monitoring.podMonitor=true",
    ],
)
def test_other_values_render_valid_manifests(values: str) -> None:
    for each in documents(render(*(["--set", values] if values else []))):
        validate(each, OLDEST_KUBERNETES)


def scrapes_of_v1(manifests: list[Manifest]) -> list[Manifest]:
    endpoints = by_kind(manifests)["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoints[0] == {"port": "metrics", "path": "/metrics", "interval": "15s"}
    return endpoints[1:]


@needs_helm
def test_prometheus_reads_the_metrics_of_v1_if_it_can() -> None:
    def scrapes(values: str = "") -> list[Manifest]:
        return scrapes_of_v1(documents(render("--set", f"monitoring.podMonitor=true,{values}")))

    assert not scrapes("apiKeySecret.name=keys"), "every scrape would fail"
    (plain,) = scrapes()
    assert "authorization" not in plain and "scheme" not in plain
    (encrypted,) = scrapes("flags={--ssl-certfile,/tls/chain.pem}")
    assert encrypted["scheme"] == "https"


@needs_helm
def test_servers_may_connect_to_what_the_page_adds(tmp_path: Path) -> None:
    def rules(*arguments: str | Path) -> list[Manifest]:
        policy = by_kind(documents(render(*arguments)))["NetworkPolicy"]
        validate(policy, OLDEST_KUBERNETES)
        return policy["spec"]["egress"]

    (block,) = re.findall(r"^```yaml\n(networkPolicy:.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    values = tmp_path / "values.yaml"
    values.write_text(block)
    (dns,) = rules()
    assert {port["port"] for port in dns["ports"]} == {53}
    added = yaml.safe_load(block)["networkPolicy"]["egress"]
    assert len(added) == 2 and rules("-f", values) == [dns, *added]
    model = "model.id=a/b,volume.kind=perPod,multiNode.nodes=2,multiNode.sshSecret=s"
    before = rules("--set", model)
    assert len(before) == 3 and rules("--set", model, "-f", values) == [*before, *added]


@needs_helm
def test_the_commands_of_the_page_render_valid_manifests() -> None:
    page = PAGE.read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("helm ")]
    assert [command[1] for command in commands] == ["install", "upgrade", "install", "install"]
    for _, _, name, chart, *values in commands:
        values = [str(ROOT / value) if value.endswith(".yaml") else value for value in values]
        values = [value for value in values if value != "--reuse-values"]
        done = run_helm("template", name, ROOT / chart, *values)
        assert done.returncode == 0, done.stderr
        for each in documents(done.stdout):
            validate(each, OLDEST_KUBERNETES)


# ---------------------------------------------------------------------- by the rendered files


@pytest.mark.parametrize("example", EXAMPLES)
def test_rendered_examples_are_of_the_present_chart(example: str) -> None:
    head = (RENDERED / f"{example}.yaml").read_text().partition("\n")[0]
    assert f"({digest(example)})" in head, (
        "render it: UPDATE_TABLES=1 scripts/test tests/deploy/test_chart.py, with Helm"
    )


def test_there_is_one_rendered_file_for_each_example() -> None:
    assert sorted(path.stem for path in RENDERED.iterdir()) == EXAMPLES


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("example", EXAMPLES)
def test_rendered_manifests_are_valid(example: str, version: str) -> None:
    for each in rendered(example):
        validate(each, version)


def test_the_examples_have_every_kind() -> None:
    kinds = {each["kind"] for example in EXAMPLES for each in rendered(example)}
    assert kinds == {
        *(
            "ConfigMap",
            "Deployment",
            "HTTPRoute",
            "HorizontalPodAutoscaler",
            "LeaderWorkerSet",
            "NetworkPolicy",
        ),
        *("PersistentVolumeClaim", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "ScaledObject"),
        *("Service", "ServiceAccount"),
    }


@pytest.mark.parametrize(
    ("example", "kind", "place"),
    [
        ("cpu", "Deployment", ("spec", "template", "spec")),
        ("gpu", "PodMonitor", ("spec",)),
        ("gpu", "PrometheusRule", ("spec", "groups", 0)),
        ("gpu", "ScaledObject", ("spec",)),
        ("gpu", "HTTPRoute", ("spec",)),
        ("multi-node", "LeaderWorkerSet", ("spec",)),
        ("multi-node", "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec")),
    ],
)
def test_the_schemas_refuse_unknown_fields(example: str, kind: str, place: tuple[Any, ...]) -> None:
    manifest = copy.deepcopy(by_kind(rendered(example))[kind])
    inner = manifest
    for step in place:
        inner = inner[step]
    inner["nonsense"] = 1
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        validate(manifest, OLDEST_KUBERNETES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_meet_the_restricted_standard(example: str) -> None:
    """The rules of Kubernetes' Pod Security Standard `restricted`, and a read-only root file system."""
    for template in pod_templates(rendered(example)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (
            not {"hostNetwork", "hostPID", "hostIPC"} & set(spec) and not spec["automountServiceAccountToken"]
        )
        allowed = {"emptyDir", "persistentVolumeClaim", "ephemeral", "projected", "configMap", "secret"}
        assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"])
    for each in containers(rendered(example)):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in each["resources"]["limits"] and "hostPort" not in str(each.get("ports"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_mounts_name_volumes_of_their_pod_and_what_is_written_is_mounted(example: str) -> None:
    for template in pod_templates(rendered(example)):
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for each in (*spec["containers"], *spec.get("initContainers", ())):
            mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
            assert set(mounts.values()) <= volumes
            folders = [
                variable["value"]
                for variable in each.get("env", ())
                if variable.get("value", "").startswith("/")
            ]
            assert all(any(folder.startswith(mount) for mount in mounts) for folder in folders)
            assert "/tmp" in mounts


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_server_accepts_its_flags(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_model = ROOT / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
    monkeypatch.setattr(cli, "find_checkpoint", lambda model, revision, judge: demo_model)
    options = cli.parse(server(rendered(example))["args"])
    assert options.restarts == 0 and options.wanted.model == demo_model
    keys = {spec.key for spec in (*FIELDS, *PARAMETERS)}
    assert set(options.wanted.settings) <= keys
    spec = pod_templates(rendered(example))[0]["spec"]
    waits = int(server(rendered(example))["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > waits + options.exit_timeout_s


def test_the_checkpoint_is_downloaded_before_the_server_starts_and_only_then_with_the_token() -> None:
    manifests = rendered("gpu")
    (fetch,) = (each for each in containers(manifests) if each["name"] == "fetch")
    arguments = hub.parse(fetch["args"])
    served = server(manifests)
    assert arguments.model == served["args"][served["args"].index("--model") + 1]
    assert fetch["command"] == ["python3", "-m", hub.__name__]
    names = {each["name"]: {variable["name"] for variable in each["env"]} for each in (fetch, served)}
    assert "HF_TOKEN" in names["fetch"] and "HF_TOKEN" not in names["inflight"]
    assert "HF_HUB_OFFLINE" in names["inflight"] and {"HF_HOME"} <= names["fetch"] & names["inflight"]


def test_a_shared_volume_can_be_mounted_by_several_nodes() -> None:
    for example in EXAMPLES:
        for each in rendered(example):
            if each["kind"] == "PersistentVolumeClaim":
                assert each["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_probes_services_and_policies_name_ports_of_the_container(example: str) -> None:
    manifests = rendered(example)
    ports = {port["name"]: port["containerPort"] for port in server(manifests)["ports"]}
    exposed = re.search(r"^EXPOSE (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert exposed and set(map(str, ports.values())) == set(exposed[1].split())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server(manifests)[probe]["httpGet"] == {"path": "/health", "port": "openai", "scheme": "HTTP"}
    kinds = by_kind(manifests)
    service = kinds["Service"]["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    policy = kinds["NetworkPolicy"]["spec"]
    named = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
    assert named <= set(ports) and {"http", "grpc"}.isdisjoint(named), "Triton's ports have no authentication"
    pods = pod_templates(manifests)[0]["metadata"]["labels"]
    budget = kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    for selector in (service["selector"], policy["podSelector"]["matchLabels"], budget):
        assert selector.items() <= pods.items()


def test_prometheus_reads_every_metric_of_v1_once_and_may_do_so() -> None:
    manifests = rendered("gpu")
    (scrape,) = scrapes_of_v1(manifests)
    assert scrape["authorization"]["credentials"] == {"name": "inflight-metrics-key", "key": "key"}
    (kept,) = scrape["metricRelabelings"]
    (job,) = (
        job
        for job in yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())[
            "scrape_configs"
        ]
        if "metric_relabel_configs" in job
    )
    (kept_by_compose,) = job["metric_relabel_configs"]
    assert kept["regex"] == kept_by_compose["regex"] and kept["action"] == kept_by_compose["action"] == "keep"
    own = re.findall(r"^# TYPE (\S+)", HttpMetrics().page(), re.MULTILINE)
    series = [*own, f"{own[1]}_bucket", "vllm:num_requests_waiting", "vllm:e2e_request_latency_seconds_sum"]
    assert all(re.fullmatch(kept["regex"], name) for name in series)
    assert not [family.name for family in FAMILIES if re.fullmatch(kept["regex"], family.name)]
    rules = by_kind(manifests)["NetworkPolicy"]["spec"]["ingress"]
    peers = {port["port"]: rule["from"] for rule in rules for port in rule["ports"]}
    assert all(peer in peers["openai"] for peer in peers["metrics"])


def test_autoscalers_name_their_workload_and_the_adapters_metric() -> None:
    hpa = by_kind(rendered("cpu"))["HorizontalPodAutoscaler"]["spec"]
    scaled_object = by_kind(rendered("gpu"))["ScaledObject"]["spec"]
    adapter = yaml.safe_load((ROOT / "deploy" / "helm" / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert [metric["pods"]["metric"]["name"] for metric in hpa["metrics"]] == [rule["name"]["as"]]
    for example, scaler in (("cpu", hpa), ("gpu", scaled_object)):
        workload = by_kind(rendered(example))["Deployment"]
        named = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": "inflight"}
        assert scaler["scaleTargetRef"] == named
        assert "replicas" not in workload["spec"], "an upgrade would undo the autoscaler's number"


def test_the_leader_starts_ranks_on_every_pod_of_its_group() -> None:
    workload = by_kind(rendered("multi-node"))["LeaderWorkerSet"]
    group = workload["spec"]["leaderWorkerTemplate"]
    options = cli.parse([*server(rendered("multi-node"))["args"][2:]])
    hosts = re.search(r"--host (\S+)", options.mpirun_arguments or "")
    assert hosts and hosts[1].split(",") == ["$(POD_NAME):8", "$(POD_NAME)-1.inflight:8"]
    assert group["size"] == options.pp == 2 and options.tp == 8
    config = by_kind(rendered("multi-node"))["ConfigMap"]["data"]
    (port,) = {port["containerPort"] for port in group["workerTemplate"]["spec"]["containers"][0]["ports"]}
    assert all(f"Port {port}\n" in text for text in config.values())


# ---------------------------------------------------------------------- values and alerts


def test_the_schema_describes_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)
    assert set(schema["properties"]) == {*VALUES, "global"}
    for name, value in VALUES.items():
        known = schema["properties"][name]
        if isinstance(value, dict) and not known.get("additionalProperties", True):
            assert set(value) == set(known["properties"]) - {"claims"}, name


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version and chart["version"] == chart["appVersion"] == version[1]


def test_alerts_read_metrics_of_the_server() -> None:
    names = {family.name for family in (*COUNTERS, *GAUGES, *LEVELS)} | {"up"}
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    for rule in rules:
        found = re.findall(r"\b(?:nv_|inflight_)\w+|\bup\b", rule["expr"])
        assert found and set(found) <= names, rule["alert"]
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_unit.yaml"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_of_the_page_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "production.md").read_text()
    listed = re.findall(r"^\| `(Inflight\w+)` \|", page, re.MULTILINE)
    assert listed == [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]


def test_compose_reads_the_same_alerts() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["prometheus"]
    mounts = dict(mount.split(":")[:2] for mount in compose["volumes"])
    (rules,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["rule_files"]
    assert mounts["./helm/inflight/files/alerts.yaml"] == rules
