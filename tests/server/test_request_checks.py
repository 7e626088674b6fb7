"""The library that tritonserver loads first, on a stand-in for tritonserver's: checks, build and records.

`tests/e2e/test_refused_requests.py` has such requests to a real tritonserver.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.log_lines import ACCESS_LOG_VARIABLE, parse_fields
from inflight.server import request_checks
from inflight.server.installation import Installation
from inflight.server.request_checks import CannotCompile, are_loaded, compile_checks, last_requests

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

STACK_BYTES = 8 << 20
"""Stack size of a thread, which suffices for 32,768 levels of JSON."""

# Errors are texts; a model named "flat" has no batch dimension; a request's number is its address.
STAND_IN = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
char* TRITONSERVER_ErrorNew(int code, const char* text) {
  char* error = malloc(strlen(text) + 8);
  error[0] = (char)('0' + code);
  error[1] = ' ';
  strcpy(error + 2, text);
  return error;
}
void TRITONSERVER_ErrorDelete(char* error) { free(error); }
char* TRITONSERVER_InferenceRequestNew(void** request, void* server, const char* model, int64_t version) {
  *request = strdup(model);
  return NULL;
}
char* TRITONSERVER_InferenceRequestSetId(void* request, const char* id) { return NULL; }
char* TRITONSERVER_InferenceRequestDelete(void* request) { return NULL; }
char* TRITONSERVER_ServerInferAsync(void* server, void* request, void* trace) { return NULL; }
char* TRITONSERVER_InferenceRequestAddInput(void* request, const char* name, int type, const int64_t* shape,
                                            uint64_t num_dims) { return NULL; }
char* TRITONSERVER_InferenceResponseOutput(void* response, uint32_t index, const char** name, int* type,
    const int64_t** shape, uint64_t* num_dims, const void** base, size_t* size, int* kind, int64_t* id, void** of){
  *type = (int)index;
  return NULL;
}
uint32_t TRITONSERVER_DataTypeByteSize(int type) { return type == 13 ? 0 : 4; }
char* TRITONSERVER_ServerModelBatchProperties(void* server, const char* model, int64_t version, uint32_t* flags,
                                              void** pointer) {
  *flags = strcmp(model, "flat") == 0 ? 1 : 2;
  return NULL;
}
"""
PROGRAM = """
import ctypes, json, os, socket, sys, threading, zlib
library = ctypes.CDLL(None)
INT8, INT32, FP64, BYTES = 6, 8, 12, 13

def new_request(model, name=""):
    request = ctypes.c_void_p()
    library.TRITONSERVER_InferenceRequestNew(ctypes.byref(request), None, model.encode(), ctypes.c_int64(-1))
    library.TRITONSERVER_InferenceRequestSetId(request, name.encode())
    return request

def add(request, shape, kind=INT32):
    call = library.TRITONSERVER_InferenceRequestAddInput
    call.restype = ctypes.c_char_p
    error = call(request, b"ids", kind, (ctypes.c_int64 * len(shape))(*shape), ctypes.c_uint64(len(shape)))
    return None if error is None else error.decode()

def new_error(text):
    call = library.TRITONSERVER_ErrorNew
    call.restype = ctypes.c_char_p
    return call(5, text.encode()).decode()

def byte_size_after(output):
    kind = ctypes.c_int()
    none = [None] * 7
    library.TRITONSERVER_InferenceResponseOutput(None, output, None, ctypes.byref(kind), *none)
    return library.TRITONSERVER_DataTypeByteSize(BYTES)

def read(data):
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    sender = threading.Thread(target=lambda: (far.sendall(data), far.close()))
    sender.start()
    try:
        while os.readv(near.fileno(), [bytearray(1 << 16)]):
            pass
        return "read"
    except ConnectionResetError:
        return "reset"
    finally:
        near.close()
        listener.close()
        sender.join()

def unpack(size):
    try:
        return len(zlib.decompress(zlib.compress(bytes(size), 1)))
    except zlib.error:
        return "error"
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the library and the stand-in, as a value of LD_PRELOAD."""
    folder = tmp_path_factory.mktemp("libraries")
    source = folder / "stand_in.c"
    source.write_text(STAND_IN)
    stand_in = folder / "stand_in.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(stand_in)], check=True)
    return f"{compile_checks(folder / 'checks.so')}:{stand_in}"


def run(libraries: str, folder: Path, expression: str) -> object:
    """Evaluate the expression in a process that has loaded both, with `folder` as its server's folder."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}\nprint(json.dumps({expression}))"],
        env={**os.environ, "LD_PRELOAD": libraries, "XDG_RUNTIME_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard)),
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("shape", "kind", "says"),
    [
        ([1, 5], "INT32", None),
        ([1, 0], "INT32", None),
        ([], "INT32", None),
        ([1, 2**29 - 1], "INT32", None),
        ([0, 1], "INT32", "the shape [0,1], expected at least one element in the first dimension"),
        ([0], "BYTES", "the shape [0], expected at least one element in the first dimension"),
        ([1, 2**29], "INT32", "expected a tensor of less than 2 GiB"),
        ([1, 2**62], "INT32", "the shape [1,4611686018427387904], expected a tensor of less than 2 GiB"),
        ([0, 2**62], "INT32", "expected a tensor of less than 2 GiB"),
        ([2**62, 0], "INT32", "expected a tensor of less than 2 GiB"),
        ([2**32, 2**32], "INT8", "expected a tensor of less than 2 GiB"),
        ([2**63 - 1], "BYTES", "expected a tensor of less than 2 GiB"),
        ([-1, 5], "INT32", "the shape [-1,5], expected no negative dimension"),
    ],
)
def test_invalid_shapes_are_refused(libraries, tmp_path, shape, kind, says):
    error = run(libraries, tmp_path, f"add(new_request('model'), {shape}, {kind})")
    assert error is None if says is None else error.startswith("3 ids: got") and says in error


@pytest.mark.parametrize(("switch", "num_lines"), [("1", 2), ("0", 0)])
def test_a_request_that_is_deleted_before_it_runs_has_an_access_line(
    libraries, tmp_path, monkeypatch, capfd, switch, num_lines
):
    monkeypatch.setenv(ACCESS_LOG_VARIABLE, switch)
    delete = "library.TRITONSERVER_InferenceRequestDelete"
    runs = f"[library.TRITONSERVER_ServerInferAsync(None, good, None), {delete}(good)]"
    refused = f"{delete}(new_request('m', 'bad')), {delete}(new_request('m', ''))"
    given = f"[[{runs} for good in [new_request('m', 'good')]], {refused}]"
    assert run(libraries, tmp_path, f"len({given})") == 3
    lines = [parse_fields(line) for line in capfd.readouterr().err.splitlines() if "access]" in line]
    assert [line["request_id"].split("-")[0] for line in lines] == ["bad", "refused"][:num_lines]


def test_the_name_of_a_shared_memory_region_is_removed_from_errors(libraries, tmp_path):
    text = "Failed to increase the shared memory pool size for key 'inflight-server-ab-1' to 8 bytes: ENOSPC"
    found = run(libraries, tmp_path, f"[new_error({text!r}), new_error('for key x')]")
    assert found == [f"5 {text.replace('inflight-server-ab-1', '…')}", "5 for key x"]


def test_an_empty_tensor_is_accepted_by_a_model_without_batching(libraries, tmp_path):
    assert run(libraries, tmp_path, "add(new_request('flat'), [0])") is None


def test_over_http_a_tensor_is_bounded_by_what_a_json_body_can_express(libraries, tmp_path):
    shapes = [[1, 2**25], [1, 2**25 + 1]]
    found = run(
        libraries, tmp_path, f"[read(b'POST'), *(add(new_request('m'), shape, FP64) for shape in {shapes})]"
    )
    assert found[:2] == ["read", None] and "at most 256 MiB" in found[2]


def test_texts_have_a_nonzero_size_only_for_classification(libraries, tmp_path):
    expression = (
        "[library.TRITONSERVER_DataTypeByteSize(BYTES), byte_size_after(BYTES), byte_size_after(INT32)]"
    )
    assert run(libraries, tmp_path, expression) == [0, 1, 0]
    after_request = (
        "[byte_size_after(BYTES), new_request('m') and library.TRITONSERVER_DataTypeByteSize(BYTES)]"
    )
    assert run(libraries, tmp_path, after_request) == [1, 0]


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("b'[' * 30_000", "read"),
        ("b'[]' * 40_000", "read"),
        ("b'[' * 40_000", "reset"),
        ("b'POST / HTTP/1.1\\r\\n\\r\\n' + b'{\"a\":' * 40_000", "reset"),
        ("b'[\"]\",' * 40_000", "reset"),
        ("b'X-Odd: \"\\r\\n\\r\\n' + b'[\"]\",' * 40_000", "reset"),
        ("b'\"' + b'\\\\\\\\\"[' * 10", "read"),
        (r"b'X-Odd: \\\"\r\n\r\n' + b'[' * 40_000", "reset"),
        (r"b'GET / HTTP/1.1\r\nX: \"\r\n\r\n' * 2 + b'[' * 40_000", "reset"),
        (r"b'[\"\r\n4\r\n\",' + b'[' * 40_000", "reset"),  # a chunk ends inside a string
        (r"b'[\"\\\r\n4\r\n\"\",' + b'[' * 40_000", "reset"),  # and after a backslash
        (r"b'{\"a\": [1, 2],\r\n' * 10 + b'}' * 10 + b'[]' * 40_000", "read"),
    ],
)
def test_too_deeply_nested_json_closes_its_connection(libraries, tmp_path, body, ends):
    assert run(libraries, tmp_path, f"read({body})") == ends


def test_nesting_is_counted_per_connection(libraries, tmp_path):
    assert run(libraries, tmp_path, "[read(b'[' * 30_000) for _ in range(3)]") == ["read"] * 3


def test_the_decompressed_size_of_a_body_is_bounded(libraries, tmp_path):
    sizes = [64 << 20, (64 << 20) + (1 << 22)]
    found = run(libraries, tmp_path, f"[read(b''), *(unpack(size) for size in {sizes})]")
    assert found == ["read", 64 << 20, "error"]


def test_the_last_requests_are_recorded(libraries, tmp_path):
    calls = "[add(new_request(f'model{i}', f'id {i}'), [1, i]) for i in range(100)]"
    run(libraries, tmp_path, f"[{calls}, add(new_request('model\\n', ''), [0, 1])]")
    assert are_loaded(tmp_path)
    lines = [line.split(" ", 1) for line in last_requests(tmp_path, 3)]
    assert [text for _, text in lines] == [
        "model98 id id 98 ids[1,98]",
        "model99 id id 99 ids[1,99]",
        "model? ids[0,1]; refused",
    ]
    assert len(last_requests(tmp_path, 1000)) == 64


def test_a_program_other_than_tritonserver_is_not_changed(libraries, tmp_path):
    checks = libraries.split(":")[0]
    assert run(checks, tmp_path, "[read(b'[' * 40_000), 'LD_PRELOAD' in os.environ]") == ["read", True]
    assert not are_loaded(tmp_path) and last_requests(tmp_path, 3) == []


def test_processes_that_tritonserver_starts_do_not_load_the_library(libraries, tmp_path):
    # os.environ is a copy from before the library left LD_PRELOAD; a child that C starts gets the current value.
    assert run(libraries, tmp_path, "ctypes.CDLL(None).system(b'test -z \"${LD_PRELOAD##*checks*}\"')") != 0


def test_without_a_compiler_there_is_no_library(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotCompile, match="no C compiler"):
        compile_checks(tmp_path / "checks.so")


def test_without_a_compiler_the_wheels_library_is_used(tmp_path, monkeypatch):
    prebuilt = tmp_path / "request_checks.so"
    prebuilt.write_bytes(b"a library")
    monkeypatch.setattr(request_checks, "_PREBUILT", prebuilt)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert compile_checks(tmp_path / "checks.so").read_bytes() == b"a library"


def test_the_library_is_loaded_before_the_users_preloads(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/a/library.so")
    found = Installation(Path("/a/tritonserver"), Path("/b"), preloaded=(Path("/c/checks.so"),))
    assert found.variables()["LD_PRELOAD"] == "/c/checks.so:/a/library.so"
