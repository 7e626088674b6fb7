"""Pictures are encoded outside of execute, and a server without an encoder refuses them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from inflight.config import SpecialTokens
from inflight.errors import Cancelled, Unsupported
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.server.runtime_directory import FOLDER_VARIABLE, PICTURES_SOCKET
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.spec import Vocabulary
from inflight.triton.front_end import FrontEnd
from inflight.triton.pictures import ServerPictures
from tests.tensors.factories import make_description, text_inputs
from tests.tensors.test_pictures import URL
from tests.triton.factories import make_model_args, make_parameters, make_triton_request
from tests.triton.stage import Stage

WAIT_S = 30


class WaitingEncoder:
    """Encodes when it is released."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode(
        self, text: str, pictures: Sequence[bytes], vocab_size: int, special_tokens: object
    ) -> EncodedPrompt:
        assert self.go_on.wait(WAIT_S)
        raise Unsupported(f"encoded {text} by {threading.current_thread().name}")


def test_execute_does_not_wait_for_the_encoder() -> None:
    stage, encoder = Stage(Vocabulary.TEXT), WaitingEncoder()
    stage.front_end.close()
    client = type(stage.client)(make_description())
    finder = TokenizerFinder(None)
    arguments = make_model_args(make_parameters())
    front_end = FrontEnd(
        stage.pb_utils, client, client.close, arguments, finder, Vocabulary.TEXT, pictures=encoder
    )
    request = make_triton_request(text_inputs(image_url=[[URL]]))
    front_end.execute([request])
    sender = request.get_response_sender()
    assert not sender.sent
    encoder.go_on.set()
    front_end.close()
    assert len(sender.sent) == 1


def test_a_request_that_was_ended_is_known_to_its_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, begun = Stage(Vocabulary.TEXT), threading.Event()

    def encode(self: ServerPictures, *_: object) -> EncodedPrompt:
        begun.set()
        while not self._is_ended():
            time.sleep(0.01)
        raise Cancelled("ended")

    monkeypatch.setattr(ServerPictures, "encode", encode)
    request = make_triton_request(text_inputs(image_url=[[URL]]))
    stage.front_end.execute([request])
    assert begun.wait(WAIT_S)
    stage.front_end.close()
    assert len(request.get_response_sender().sent) == 1


def test_a_server_without_an_encoder_refuses_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(Unsupported, match="pictures cannot be encoded: this server has no process for it"):
        ServerPictures().encode("", [b""], 0, SpecialTokens.ADDED)


def test_an_ended_request_takes_its_prompt_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed, so that a prompt that waits is not encoded (tests/pictures/test_server.py)."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / PICTURES_SOCKET))
        listening.listen()
        listening.settimeout(WAIT_S)
        with pytest.raises(Cancelled):
            ServerPictures(lambda: True).encode("", [b""], 0, SpecialTokens.ADDED)
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(WAIT_S)
            while connection.recv(1 << 16):
                pass
