"""The process that encodes pictures and its client: errors, order, clients that leave."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.errors import InvalidArgument, QueueFull, StepFailed, Unreachable
from inflight.log_lines import REQUEST_ID
from inflight.pictures.__main__ import main
from inflight.pictures.client import PicturesClient
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.pictures.server import PicturesServer
from tests.lines_of import lines_of
from tests.pictures.small_models import picture, save_model
from tests.pictures.test_sources import HEAD, LOCAL
from tests.pictures.test_sources import server as local_server

TIMEOUT_S = 60


def make_prompt(text: str) -> EncodedPrompt:
    rows = Matrix((2, 4), "bfloat16", RawBuffer(bytes(range(16))))
    angles = Matrix((3, 2), "float32", RawBuffer(bytes(24)))
    return EncodedPrompt(
        (len(text), 1000, 1001),
        (0, 2**64 - 1, 2),
        PromptTable.of(rows, is_identified=True),
        RotaryTable.of(angles, -1, is_identified=True),
        (2,),
    )


class FakeEncoder:
    """Encodes a prompt when it may, or raises the error that its text names."""

    def __init__(self) -> None:
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.texts: list[str] = []

    def encode(
        self, text: str, pictures: Sequence[bytes | memoryview], vocab_size: int, special_tokens: object
    ) -> EncodedPrompt:
        assert self.may_encode.wait(TIMEOUT_S)
        self.texts.append(text)
        if text == "invalid":
            raise InvalidArgument(f"{len(pictures)} pictures of {vocab_size}: {bytes(pictures[0])!r}")
        if text == "broken":
            raise OSError("/some/place/file is lost")
        return make_prompt(text)

    def stats(self) -> PictureStats:
        return PictureStats(len(self.texts), 0, 1.5, 0)


@asynccontextmanager
async def serving(
    path: Path, encoder: FakeEncoder, max_prompts: int = 64, **options: Any
) -> AsyncIterator[tuple[PicturesClient, PicturesServer]]:
    stop, ready = asyncio.Event(), asyncio.Event()
    server = PicturesServer(encoder, max_prompts, **options)
    task = asyncio.ensure_future(server.serve(str(path), stop, ready.set))
    await ready.wait()
    try:
        yield PicturesClient(str(path)), server
    finally:
        encoder.may_encode.set()
        stop.set()
        await task


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


async def until_it_has(server: PicturesServer, num_prompts: int) -> None:
    while server._num_prompts != num_prompts:
        await asyncio.sleep(0)


def test_prompts_and_statistics_arrive_as_they_are(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path / "socket", FakeEncoder()) as (client, _):
            assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o600
            assert await client.encode("some text", [b"one", b"two"], 1000) == make_prompt("some text")
            assert await client.stats() == PictureStats(1, 0, 1.5, 0)
        assert not (tmp_path / "socket").exists()

    run(test())


def test_each_prompt_has_a_line_without_its_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(tmp_path / "socket", FakeEncoder()) as (client, _):
            await client.encode("some text", [b"one", b"two"], 1000)

    with caplog.at_level(logging.INFO, "inflight.pictures.server"):
        run(test())
    (line,) = (record.getMessage() for record in caplog.records if record.name == "inflight.pictures.server")
    assert re.fullmatch(
        r"a prompt with 2 pictures: \d+ of its \d+ tokens are theirs, \d+ ms, 0 prompts wait", line
    )


def test_every_line_about_a_prompt_has_its_requests_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with serving(tmp_path / "socket", FakeEncoder()) as (client, server):
            REQUEST_ID.set("a b")
            await client.encode("some text", [b"one"], 1000)
            with pytest.raises(StepFailed, match="could not be encoded"):
                await client.encode("broken", [b"one"], 9)
            monkeypatch.setattr(server._reader, "read_all", lambda *_: 1 / 0)
            with pytest.raises(StepFailed, match="could not be read"):
                await client.encode("unread", ["data:,"], 9)
            REQUEST_ID.set("")
            with pytest.raises(StepFailed, match="could not be read"):
                await client.encode("unread", ["data:,"], 9)

    with lines_of("inflight.pictures.server") as lines:
        run(test())
    assert lines[0].endswith(' ms, 0 prompts wait request_id="a b"')
    assert lines[1:] == [
        'a prompt could not be encoded request_id="a b"',
        'pictures could not be read request_id="a b"',
        "pictures could not be read",
    ]


def test_errors_arrive_with_their_kinds(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path / "socket", FakeEncoder()) as (client, _):
            with pytest.raises(InvalidArgument, match="2 pictures of 9: b'one'"):
                await client.encode("invalid", [b"one", b"two"], 9)
            with pytest.raises(StepFailed, match=r"could not be encoded.*…"):
                await client.encode("broken", [b"one"], 9)
        with pytest.raises(Unreachable, match="cannot be reached"):
            await client.stats()

    run(test())


def test_prompts_are_encoded_in_order_and_a_full_queue_refuses(tmp_path: Path) -> None:
    async def test() -> None:
        encoder = FakeEncoder()
        encoder.may_encode.clear()
        async with serving(tmp_path / "socket", encoder, max_prompts=3) as (client, server):
            prompts: list[asyncio.Future[EncodedPrompt]] = []
            for text in ("a", "bb", "ccc"):
                prompts.append(asyncio.ensure_future(client.encode(text, [b""], 9)))
                await until_it_has(server, len(prompts))
            with pytest.raises(QueueFull, match="3 prompts with pictures wait already"):
                await client.encode("dddd", [b""], 9)
            encoder.may_encode.set()
            assert [(await prompt).token_ids[0] for prompt in prompts] == [1, 2, 3]
            assert encoder.texts == ["a", "bb", "ccc"]

    run(test())


def test_a_client_that_leaves_takes_its_prompt_back(tmp_path: Path) -> None:
    async def test() -> None:
        encoder = FakeEncoder()
        encoder.may_encode.clear()
        async with serving(tmp_path / "socket", encoder, max_prompts=3) as (client, server):
            first = asyncio.ensure_future(client.encode("first", [b""], 9))
            await until_it_has(server, 1)
            left = asyncio.ensure_future(client.encode("left", [b""], 9))
            await until_it_has(server, 2)
            left.cancel()
            await until_it_has(server, 1)
            encoder.may_encode.set()
            await first
            await client.encode("last", [b""], 9)
            assert encoder.texts == ["first", "last"]

    run(test())


def test_pictures_are_read_by_their_urls(tmp_path: Path) -> None:
    """The fake encoder's error has the content of the first picture."""

    async def test() -> None:
        async with (
            serving(tmp_path / "socket", FakeEncoder(), rules=LOCAL) as (client, _),
            local_server(f"{HEAD}Content-Length: 2\r\n\r\nab".encode()) as (port, asked),
        ):
            urls = [f"http://127.0.0.1:{port}/a.png", "data:image/png;base64,YmM="]
            with pytest.raises(InvalidArgument, match="2 pictures of 9: b'ab'"):
                await client.encode("invalid", urls, 9)
            with pytest.raises(InvalidArgument, match="2 pictures of 9: b'bc'"):
                await client.encode("invalid", urls[::-1], 9)
            assert len(asked) == 2

    run(test())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com/a.png", r"pictures\[1\] is on the host .* \(--allowed-media-domains\)"),
        ("file:///a.png", r"pictures\[1\] is a file: URL, .* --allowed-local-media-path"),
        ("ftp://example.com/a.png", r"pictures\[1\] is 'ftp:.*', expected a URL that begins with data:$"),
        ("data:text/plain;base64,YQ==", r"pictures\[1\] is a data: URL"),
    ],
)
def test_urls_that_are_not_allowed_are_refused(tmp_path: Path, url: str, message: str) -> None:
    async def test() -> None:
        async with serving(tmp_path / "socket", encoder := FakeEncoder()) as (client, server):
            with pytest.raises(InvalidArgument, match=message) as refused:
                await client.encode("text", ["data:image/png;base64,YmM=", url], 9)
            assert refused.value.names == ("pictures[1]",)
            assert not encoder.texts and not server._num_prompts

    run(test())


@pytest.mark.parametrize("pictures", [[b"a", b"b"], ["data:image/png;base64,YmM="] * 2])
def test_a_prompt_has_a_limit_of_pictures(tmp_path: Path, pictures: Any) -> None:
    message = r"pictures: 2 pictures; this server takes at most 1 in a prompt \(--limit-mm-per-prompt\)"

    async def test() -> None:
        async with serving(tmp_path / "socket", FakeEncoder(), max_pictures=1) as (client, _):
            with pytest.raises(InvalidArgument, match=message):
                await client.encode("text", pictures, 9)
            await client.encode("text", pictures[:1], 9)

    run(test())


def test_a_client_that_leaves_ends_its_downloads(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            serving(tmp_path / "socket", encoder := FakeEncoder(), rules=LOCAL) as (client, server),
            local_server(HEAD.encode(), waits=True) as (port, asked),
        ):
            left = asyncio.ensure_future(client.encode("left", [f"http://127.0.0.1:{port}/a.png"], 9))
            while not asked:
                await asyncio.sleep(0.01)
            assert server._num_prompts == 1
            left.cancel()
            await until_it_has(server, 0)
            await client.encode("last", [b""], 9)
            assert encoder.texts == ["last"]

    run(test())


def test_bytes_that_are_no_message_end_their_connection_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path / "socket", FakeEncoder()) as (client, _):
            for sent in (b"\0\0\0\1\xc1", b"\xff\xff\xff\xff", b"\0\0"):
                reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
                writer.write(sent)
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()
            await client.encode("text", [b""], 9)

    run(test())


def test_process_serves_until_a_signal(tmp_path: Path) -> None:
    save_model(tmp_path, "llava")
    path = tmp_path / "socket"
    command = [
        sys.executable,
        "-m",
        "inflight.pictures",
        str(tmp_path),
        "--socket",
        str(path),
        "--threads",
        "1",
    ]

    async def ask() -> None:
        client = PicturesClient(str(path))
        files = [picture(20, 20)]
        made = await client.encode("<s>What is <image>?", files, 1000)
        assert made.table.num_rows == 16
        assert await client.encode("<s>What is <image>?", files, 1000) == made
        stats = await client.stats()
        assert (stats.num_encoded, stats.num_cache_hits) == (1, 1)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"LISTENING {path}\n"
            run(ask())
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def test_checkpoint_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--socket", str(tmp_path / "socket")]) == 2
    assert capsys.readouterr().err.startswith(f"pictures: {tmp_path}/config.json does not exist")
