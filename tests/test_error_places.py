"""Error messages to clients name no path on the server's machine."""

import pytest

from inflight.errors import StepFailed, unexpected, without_places


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "Failed to increase the shared memory pool size for key 'inflight-server-ab12cd_e0f3-9c' to 8 bytes",
            "Failed to increase the shared memory pool size for key '…' to 8 bytes",
        ),
        ("key 'triton_python_backend_shm_region_12': No space", "key '…': No space"),
        ("cannot connect to /tmp/inflight-server-x/engine.sock: refused", "cannot connect to …: refused"),
        ("[Errno 2] No such file: '/srv/models/a b.json'", "[Errno 2] No such file: '… b.json'"),
        ("File /opt/a/model.py, line 3 (see /opt/b/c)", "File …, line 3 (see …)"),
    ],
)
def test_paths_are_left_out_of_errors(text: str, told: str) -> None:
    assert without_places(text) == told


@pytest.mark.parametrize(
    "text", ["tokens/s and/or 3/4", "use a larger --shm-size for /dev", "a_b is 5, expected 1"]
)
def test_texts_without_paths_are_unchanged(text: str) -> None:
    assert without_places(text) == text


def test_an_unexpected_error_keeps_its_class_and_text() -> None:
    error = unexpected("the front end failed", OSError(28, "No space left", "/dev/shm/inflight-server-abc"))
    assert isinstance(error, StepFailed)
    assert str(error) == "the front end failed: OSError(28, 'No space left')"
    assert str(unexpected("it failed", ValueError("/a/b"))) == "it failed: ValueError('…')"
