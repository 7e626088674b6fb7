"""Restricted APIs: clients need a key to load models, register shared memory or change settings."""

import base64
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from inflight.errors import Unavailable
from inflight.openai.kserve_client import KServeEngineClient
from inflight.server import cli
from inflight.server.client_apis import CONTROL_KEY_HEADER, CONTROL_KEY_VARIABLE, ClientApis
from inflight.server.errors import OptionError
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.repository import default_repository
from tests.commands import shared_memory_of

from .conftest import make_counting_repository

KEY = "key-of-the-operator"
HEADERS = {CONTROL_KEY_HEADER: KEY}
METADATA = {f"triton-grpc-protocol-{CONTROL_KEY_HEADER}": KEY}
MODEL = "tensorrt_llm"
ROOT = Path(__file__).parents[2]
DEMO_MODEL = default_repository() / "tensorrt_llm" / "1" / "demo_model"
REFUSED = 403

RESTRICTED = [
    ("POST", "repository/index"),
    ("POST", "repository/models/evil/load"),
    ("POST", f"repository/models/{MODEL}/unload"),
    ("POST", "repository/here/models/evil/load"),
    ("GET", "logging"),
    ("POST", "logging"),
    ("GET", "trace/setting"),
    ("POST", "trace/setting"),
    ("POST", f"models/{MODEL}/trace/setting"),
    ("GET", "systemsharedmemory/status"),
    ("POST", "systemsharedmemory/region/x/register"),
    ("POST", "systemsharedmemory/unregister"),
    ("GET", "cudasharedmemory/status"),
    ("GET", f"models/{MODEL}/config"),
    ("POST", "cudasharedmemory/region/x/register"),
]


def restrictions(apis: ClientApis) -> list[tuple[str, str, str]]:
    """Return (APIs, header, key) of each argument, HTTP's first."""
    words = []
    for argument, option in zip(
        apis.arguments(), ("--http-restricted-api=", "--grpc-restricted-protocol="), strict=True
    ):
        names, _, header_and_key = argument.removeprefix(option).partition(":")
        assert names != argument
        header, _, key = header_and_key.partition("=")
        words.append((names, header, key))
    return words


def test_without_an_operators_key_a_random_one_is_used_whose_header_cannot_be_sent() -> None:
    first, second = restrictions(ClientApis()), restrictions(ClientApis())
    assert first[0] == first[1] and first != second
    names, header, key = first[0]
    assert names == "model-repository,shared-memory,logging,trace,model-config"
    assert ":" in header  # neither HTTP nor gRPC accepts such a name
    assert len(key) == 64


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--allow-shared-memory", "model-repository,logging,trace,model-config"),
        ("--allow-logging", "model-repository,shared-memory,trace,model-config"),
        ("--allow-trace", "model-repository,shared-memory,logging,model-config"),
        ("--allow-model-config", "model-repository,shared-memory,logging,trace"),
    ],
)
def test_each_flag_opens_one_api(flag: str, names: str) -> None:
    assert [each[0] for each in restrictions(cli.parse([flag]).client_apis)] == [names, names]


def test_the_operators_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.parse([]).client_apis.key is None
    monkeypatch.setenv(CONTROL_KEY_VARIABLE, KEY)
    assert restrictions(cli.parse([]).client_apis)[0][1:] == (CONTROL_KEY_HEADER, KEY)


@pytest.mark.parametrize("key", ["", "two words", "with\nline", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match=CONTROL_KEY_VARIABLE):
        ClientApis(key=key)


# ---------------------------------------------------------------- the real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose models clients with the key may load and unload."""
    repository = make_counting_repository(tmp_path_factory.mktemp("apis") / "models")
    options = ServerOptions(model_control="explicit", client_apis=ClientApis(key=KEY))
    with serve(repository, options=options) as running:
        yield running


def call(
    server: TritonServer, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    data = json.dumps(body or {}).encode() if method == "POST" else None
    asked = urllib.request.Request(f"http://{server.http}/v2/{path}", data, headers or {}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.e2e
@pytest.mark.parametrize(("method", "path"), RESTRICTED)
def test_restricted_apis_over_http_need_the_key(server: TritonServer, method: str, path: str) -> None:
    for headers in (None, {CONTROL_KEY_HEADER: "another"}, {CONTROL_KEY_HEADER: KEY + "x"}):
        status, said = call(server, method, path, headers=headers)
        assert status == REFUSED and "restricted" in said


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["evil", MODEL])
def test_a_load_request_with_code_is_refused_and_runs_nothing(
    server: TritonServer, name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "it-ran"
    code = f"open({str(mark)!r}, 'w')\nclass TritonPythonModel:\n    def execute(self, r): return []\n"
    parameters = {
        "config": json.dumps({"backend": "python", "input": [], "output": []}),
        "file:1/model.py": base64.b64encode(code.encode()).decode(),
    }
    body = {"parameters": parameters}
    for headers in ({}, {"Content-Type": "text/plain", "Origin": "http://elsewhere.example"}):
        status, _ = call(server, "POST", f"repository/models/{name}/load", body, headers)
        assert status == REFUSED
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.load_model(name, config=parameters["config"], files={"file:1/model.py": code.encode()})
        assert client.is_model_ready(MODEL)
    assert not mark.exists()


@pytest.mark.e2e
def test_the_python_backends_memory_cannot_be_registered(server: TritonServer) -> None:
    (region,) = shared_memory_of(server.repository.path.parent.name)
    body = {"key": f"/{region.name}", "offset": 0, "byte_size": 64}
    assert call(server, "POST", "systemsharedmemory/region/x/register", body)[0] == REFUSED
    with (
        grpcclient.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="restricted"),
    ):
        client.register_system_shared_memory("x", f"/{region.name}", 64)


@pytest.mark.e2e
def test_restricted_apis_over_grpc_need_the_key(server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for ask in (
            client.get_model_repository_index,
            lambda headers: client.unload_model(MODEL, headers=headers),
            client.get_system_shared_memory_status,
            client.get_cuda_shared_memory_status,
            client.get_log_settings,
            lambda headers: client.update_log_settings({"log_error": False}, headers=headers),
            client.get_trace_settings,
            lambda headers: client.get_model_config(MODEL, headers=headers),
            lambda headers: client.update_trace_settings(settings={"trace_level": ["OFF"]}, headers=headers),
        ):
            for headers in (None, dict.fromkeys(METADATA, "another")):
                with pytest.raises(InferenceServerException, match="restricted"):
                    ask(headers=headers)
        assert client.is_model_ready(MODEL)


@pytest.mark.e2e
def test_a_client_with_the_key_may_use_every_restricted_api(server: TritonServer) -> None:
    status, said = call(server, "POST", "repository/index", headers=HEADERS)
    assert (status, [model["name"] for model in json.loads(said)]) == (200, [MODEL])
    assert call(server, "GET", "logging", headers=HEADERS)[0] == 200
    assert call(server, "GET", "systemsharedmemory/status", headers=HEADERS)[0] == 200
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.load_model(MODEL, headers=METADATA)
        assert client.is_model_ready(MODEL)
        assert client.get_log_settings(headers=METADATA, as_json=True)
        assert client.get_model_config(MODEL, headers=METADATA, as_json=True)["config"]["name"] == MODEL


@pytest.mark.e2e
def test_inference_health_and_metadata_need_no_key(server: TritonServer) -> None:
    for path in ("health/ready", f"models/{MODEL}", f"models/{MODEL}/stats"):
        assert call(server, "GET", path)[0] == 200
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.get_model_metadata(MODEL, as_json=True)["name"] == MODEL
        assert client.get_inference_statistics(MODEL)


@pytest.mark.e2e
def test_a_remote_endpoint_names_the_flag_that_opens_the_model_config(
    server: TritonServer,
) -> None:
    client = KServeEngineClient(server.grpc, str(DEMO_MODEL), MODEL)
    with pytest.raises(Unavailable, match="--allow-model-config"):
        client.describe()
    client.close()


@pytest.mark.e2e
def test_perf_analyzer_names_the_flag_that_opens_the_model_config(server: TritonServer) -> None:
    command = [sys.executable, "-m", "benchmarks.measuring.perf_analyzer", "-m", MODEL, "-i", "grpc"]
    done = subprocess.run(
        [*command, "-u", server.grpc, "--streaming"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0 and "restricted" in done.stderr
    assert done.stderr.endswith("perf_analyzer: start the server with --allow-model-config\n")
