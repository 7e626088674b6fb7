"""The wheel of scripts/wheel serves without a compiler, with the compiled layers that it contains."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from inflight.engine.cpu import library
from inflight.testing.make_model import make_model
from tests.engine.driver import Driver, load_engine

from .installation import ROOT, Installation

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]  # seconds: all libraries are compiled

PROMPT = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel for this machine, and return its path."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([ROOT / "scripts" / "wheel", folder], check=True, timeout=3600)
    (found,) = folder.glob(f"inflight-*_{os.uname().machine}.whl")
    return found


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(wheel, tmp_path_factory.mktemp("installation"))


def test_the_client_has_a_wheel_of_its_own(wheel: Path) -> None:
    (client,) = wheel.parent.glob("inflight_client-*-py3-none-any.whl")
    with zipfile.ZipFile(client) as files:
        assert {"inflight_client/__init__.py", "inflight_client/__main__.py"} <= set(files.namelist())


def test_wheel_has_a_manylinux_tag(wheel: Path) -> None:
    assert "-py3-none-manylinux_2_" in wheel.name


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_wheel_serves_without_a_compiler(installation: Installation, tmp_path: Path, kind: str) -> None:
    is_int8 = kind == "int8"
    dtype = "bfloat16" if is_int8 else kind
    folder = make_model(
        tmp_path / "model", dtype=dtype, standard_deviation=0.5, quantize=kind if is_int8 else None
    )
    where, loaded, tokens = installation.run("-c", PROGRAM, str(folder)).splitlines()
    assert all(Path(each).is_relative_to(installation.packages) for each in (where, loaded))
    assert (
        Path(loaded).name == library._prebuilt_path(library.find_target(dtype, is_int8), dtype, is_int8).name
    )
    driver = Driver(load_engine(folder, kernels="native"))
    assert json.loads(tokens) == [*PROMPT, *driver.generate(driver.start(PROMPT), 10)]
    assert not list(installation.cache.rglob("*.so")), "nothing was compiled"


PROGRAM = """
import sys
import inflight
import inflight.executor as trtllm

with trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1)) as executor:
    request = trtllm.Request(input_token_ids=[1, 2, 3, 4], max_tokens=10)
    (response,) = executor.await_responses(executor.enqueue_request(request))
    with open("/proc/self/maps") as maps:
        (loaded,) = {line.split()[-1] for line in maps if "decoder-" in line}
print(inflight.__file__)
print(loaded)
print(response.result.output_token_ids[0])
"""


def test_the_doctor_reports_the_wheels_compiled_layers(installation: Installation) -> None:
    findings = json.loads(installation.run("-m", "inflight.doctor", "--json"))["findings"]
    layers = {each["name"]: each["says"] for each in findings if each["name"].startswith("CPU layers")}
    for kind, (dtype, int8) in {"float32": ("float32", False), "int8": ("bfloat16", True)}.items():
        expected = f"compiled layers ({library.describe_target(dtype, int8)}), which came with the package"
        assert layers[f"CPU layers, {kind}"] == expected


def test_the_wheels_libraries_are_not_used_if_a_local_build_is_requested(
    installation: Installation,
) -> None:
    program = "from inflight.engine.cpu import library; print(library.foresee('float32'))"
    with pytest.raises(AssertionError, match=r"no C\+\+ compiler .*, and INFLIGHT_CPU_BUILD is local"):
        installation.run("-c", program, INFLIGHT_CPU_BUILD="local")


def test_the_wheel_has_the_command_and_the_demo_model(installation: Installation) -> None:
    assert installation.run("-m", "inflight", "--version").startswith("inflight ")
    program = "from inflight.server.repository import default_repository; print(default_repository())"
    repository = Path(installation.run("-c", program).strip())
    assert repository.is_relative_to(installation.packages)
    assert (repository / "tensorrt_llm" / "1" / "demo_model" / "model.safetensors").is_file()
    assert "  offline " in installation.run("-m", "inflight", "bench", "--help")
