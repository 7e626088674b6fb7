"""Pictures by URL: data:, file: and HTTP from servers of this test; every hostile URL is refused."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidArgument, Name
from inflight.pictures.sources import SourceRules, is_public, read_picture
from tests.openai_endpoint.serving import make_certificate

PICTURE = b"\x89PNG\r\n\x1a\nthe rest of a picture"
DATA = base64.b64encode(PICTURE).decode()
NAME = Name("messages[1].content[0].image_url.url")
RULES = SourceRules()
LOCAL = SourceRules(("127.0.0.1", "localhost"), is_allowed_address=lambda address: address.is_loopback)
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


def read(url: str, rules: SourceRules = RULES) -> bytes:
    return asyncio.run(read_picture(url, NAME, rules))


def refusal(url: str, rules: SourceRules = RULES) -> str:
    with pytest.raises(InvalidArgument) as refused:
        read(url, rules)
    message = str(refused.value)
    assert refused.value.names == (NAME,) and message.startswith(f"{NAME} ") and len(message) < 500
    assert DATA not in message
    return message


@asynccontextmanager
async def server(
    answer: bytes, secure: ssl.SSLContext | None = None, waits: bool = False
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """An HTTP server that gives every request the same answer; yields its port, and what it was asked."""
    asked: list[bytes] = []
    tasks: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if waits:
            await asyncio.Event().wait()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=secure)
    try:
        yield listening.sockets[0].getsockname()[1], asked
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def download(answer: bytes, rules: SourceRules = LOCAL, **options: Any) -> tuple[bytes | str, list[bytes]]:
    """Return the picture that a server answers with, or the refusal; and the requests that it got."""

    async def run() -> tuple[bytes | str, list[bytes]]:
        async with server(answer, **options) as (port, asked):
            scheme = "https" if options.get("secure") else "http"
            try:
                return await read_picture(f"{scheme}://127.0.0.1:{port}/a%20b/ü.png?q=ä", NAME, rules), asked
            except InvalidArgument as error:
                return str(error), asked

    return asyncio.run(run())


@pytest.mark.parametrize(
    "head", ["data:image/png;base64", "data:image/JPEG;BASE64", "DATA:image/webp;name=x;base64"]
)
def test_data_urls_are_read_without_a_permission(head: str) -> None:
    assert read(f"{head},{DATA}") == PICTURE


PRIVATE = SourceRules(
    ("localhost", "127.0.0.1", "::1", "::ffff:127.0.0.1", "2130706433", "0x7f000001", "127.1", "0")
)
ALLOWED = SourceRules(("images.example.com", "*.cdn.example.com"))
FORMS: dict[str, tuple[str, SourceRules, str]] = {
    "nothing": ("", RULES, "begins with data:"),
    "no scheme": ("picture.png", RULES, "begins with data:"),
    "no scheme, bare base64": (DATA, RULES, "begins with data:"),
    "ftp": ("ftp://images.example.com/a.png", ALLOWED, "begins with data: or https:"),
    "gopher": ("gopher://images.example.com/", ALLOWED, "begins with data: or https:"),
    "javascript": ("javascript:alert(1)", ALLOWED, "begins with data: or https:"),
    "blob": ("blob:https://images.example.com/1", ALLOWED, "begins with data: or https:"),
    "a path": ("/etc/passwd", RULES, "begins with data:"),
    "no permission for hosts": ("https://images.example.com/a.png", RULES, "--allowed-media-domains"),
    "no permission for files": ("file:///etc/passwd", RULES, "--allowed-local-media-path"),
    "another host": (
        "https://example.org/a.png",
        ALLOWED,
        "reads from images.example.com, *.cdn.example.com",
    ),
    "a parent of the host": ("https://example.com/a.png", ALLOWED, "may not read from"),
    "below an exact host": ("https://x.images.example.com/", ALLOWED, "may not read from"),
    "the host of a wildcard itself": ("https://cdn.example.com/", ALLOWED, "may not read from"),
    "an end that looks allowed": ("https://evilcdn.example.com/", ALLOWED, "may not read from"),
    "the host as a prefix": ("https://images.example.com.evil.org/", ALLOWED, "may not read from"),
    "a final dot": ("https://images.example.com./a.png", ALLOWED, "may not read from"),
    "a user": ("https://images.example.com@evil.org/", ALLOWED, "no user"),
    "a user of an allowed host": ("https://me:secret@images.example.com/", ALLOWED, "no user"),
    "an encoded @": ("https://images.example.com%40evil.org/", ALLOWED, "may not read from"),
    "a backslash": ("https://images.example.com\\@evil.org/", ALLOWED, "not a URL"),
    "a line end": ("https://images.example.com/\r\nHost: evil.org", ALLOWED, "not a URL"),
    "a tab in the scheme": ("ht\ttps://images.example.com/", ALLOWED, "begins with data:"),
    "a space before": (" https://images.example.com/", ALLOWED, "begins with data:"),
    "no host": ("https:///a.png", ALLOWED, "with a host"),
    "no slashes": ("https:images.example.com/a.png", ALLOWED, "with a host"),
    "letters outside ASCII": ("https://imаges.example.com/", ALLOWED, "in ASCII"),
    "a wrong port": ("https://images.example.com:99999/", ALLOWED, "not a URL"),
    "an unclosed bracket": ("https://[::1/", ALLOWED, "not a URL"),
    "loopback by name": ("http://localhost/", PRIVATE, "not public"),
    "loopback": ("http://127.0.0.1:22/", PRIVATE, "not public"),
    "loopback in IPv6": ("http://[::1]/", PRIVATE, "not public"),
    "loopback as IPv4 in IPv6": ("http://[::ffff:127.0.0.1]/", PRIVATE, "not public"),
    "loopback as one number": ("http://2130706433/", PRIVATE, "not public"),
    "loopback in hexadecimal": ("http://0x7f000001/", PRIVATE, "not public"),
    "loopback, shortened": ("http://127.1/", PRIVATE, "not public"),
    "this host": ("http://0/", PRIVATE, "not public"),
    "data: without base64": ("data:image/png,abc", RULES, "expected data:image/"),
    "data: without a comma": ("data:image/png;base64", RULES, "expected data:image/"),
    "data: without a type": (f"data:;base64,{DATA}", RULES, "expected a picture"),
    "a text": (f"data:text/html;base64,{DATA}", RULES, "'text/html'"),
    "SVG": (f"data:image/svg+xml;base64,{DATA}", RULES, "'image/svg+xml'"),
    "all types": (f"data:image/*;base64,{DATA}", RULES, "'image/*'"),
    "base64 cut off": (f"data:image/png;base64,{DATA[:-3]}", RULES, "base64 is invalid"),
    "base64 with line ends": (f"data:image/png;base64,{DATA[:8]}\n{DATA[8:]}", RULES, "base64 is invalid"),
    "base64 for URLs": ("data:image/png;base64,ab_-", RULES, "base64 is invalid"),
    "base64 outside ASCII": ("data:image/png;base64,äöü=", RULES, "base64 is invalid"),
    "base64 after its end": ("data:image/png;base64,QQ==QQ==", RULES, "base64 is invalid"),
    "no data": ("data:image/png;base64,", RULES, "empty"),
    "too much data": (f"data:image/png;base64,{DATA}", replace(RULES, max_bytes=20), "more than 20 bytes"),
}


@pytest.mark.parametrize("form", FORMS)
def test_hostile_urls_are_refused_with_a_reason(form: str) -> None:
    url, rules, reason = FORMS[form]
    assert reason in refusal(url, rules)


def test_a_data_url_is_never_repeated() -> None:
    assert "abcdef" not in refusal(f"data:image/png{';x=1' * 100},abcdef")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((public, True) for public in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")),
        *((local, False) for local in ("127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.0.1")),
        *((special, False) for special in ("169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255")),
        *((special, False) for special in ("224.0.0.1", "239.1.1.1", "240.0.0.1", "192.0.2.1", "198.18.0.1")),
        *(
            (local, False)
            for local in ("::1", "::", "fe80::1", "fe80::1%lo", "fc00::1", "fd12::1", "fec0::1")
        ),
        *((special, False) for special in ("ff02::1", "ff0e::1", "2001:db8::1", "2002:7f00:1::", "2001::1")),
        *((nested, False) for nested in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "::ffff:169.254.169.254")),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


def test_a_host_is_refused_if_one_of_its_addresses_is_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def resolve(loop: object, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        asked.append(host)
        return [(0, 0, 0, "", (address, port)) for address in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    assert "not public" in refusal("https://images.example.com/", ALLOWED)
    assert asked == ["images.example.com"]


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once: a second answer of its name server is never asked for."""
    names: list[str] = []
    resolve = asyncio.BaseEventLoop.getaddrinfo

    async def rebind(loop: Any, host: str, port: int, **options: Any) -> Any:
        names.append(host)
        return await resolve(loop, "127.0.0.1" if host == "images.example.com" else host, port, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", rebind)

    async def run() -> tuple[bytes, list[bytes]]:
        rules = replace(ALLOWED, is_allowed_address=LOCAL.is_allowed_address)
        async with server(f"{HEAD}\r\n".encode() + PICTURE) as (port, asked):
            return await read_picture(f"http://images.example.com:{port}/", NAME, rules), asked

    picture, asked = asyncio.run(run())
    assert picture == PICTURE and b"Host: images.example.com:" in asked[0]
    assert names.count("images.example.com") == 1


BODY = PICTURE.decode("latin-1")
LENGTH = f"Content-Length: {len(PICTURE)}\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"{HEAD}{LENGTH}\r\n{BODY}",
        f"{HEAD}\r\n{BODY}",
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n3\r\n{BODY[:3]}\r\n{len(BODY) - 3:x}\r\n{BODY[3:]}\r\n0\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n{LENGTH}\r\n{BODY}",
        f"HTTP/1.0 200 OK\r\n\r\n{BODY}",
    ],
)
def test_pictures_are_read_over_http(answer: str) -> None:
    picture, asked = download(answer.encode("latin-1"))
    assert picture == PICTURE
    assert asked[0].startswith(b"GET /a%20b/%C3%BC.png?q=%C3%A4 HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n{LENGTH}\r\n{BODY}", "redirect (302)"),
        ("HTTP/1.1 308 Permanent Redirect\r\nLocation: https://127.0.0.1/\r\n\r\n", "redirect (308)"),
        (f"HTTP/1.1 404 Not Found\r\n{LENGTH}\r\n{BODY}", "the HTTP status 404"),
        (f"HTTP/1.1 206 Partial Content\r\n{LENGTH}\r\n{BODY}", "the HTTP status 206"),
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "status 101"),
        (f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{LENGTH}\r\n{BODY}", "'text/html'"),
        (f"HTTP/1.1 200 OK\r\nContent-Type: image/svg+xml\r\n{LENGTH}\r\n{BODY}", "'image/svg+xml'"),
        (f"{HEAD}Content-Encoding: gzip\r\n{LENGTH}\r\n{BODY}", "'gzip'"),
        (f"{HEAD}Content-Length: 1000000\r\n\r\n", "more than 1000 bytes"),
        (f"{HEAD}\r\n{BODY * 100}", "more than 1000 bytes"),
        (f"{HEAD}Content-Length: {len(PICTURE) + 1}\r\n\r\n{BODY}", "ended too early"),
        (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n3\r\n{BODY[:3]}\r\n", "ended too early"),
        (HEAD, "ended too early"),
        ("", "ended too early"),
        (f"{HEAD}Content-Length: 0\r\n\r\n", "empty"),
        ("HTTP/1.1 200 OK\r\n" + f"X: {'x' * 60_000}\r\n" * 3, "too large"),
        ("220 mail.example.com ESMTP\r\n", "does not answer in HTTP"),
    ],
)
def test_answers_that_are_no_picture_are_refused(answer: str, reason: str) -> None:
    refused, asked = download(answer.encode("latin-1"), replace(LOCAL, max_bytes=1000))
    assert isinstance(refused, str) and reason in refused and len(asked) == 1


@pytest.mark.parametrize("begun", ["", "HTTP/1.1 200 OK\r\nX", f"{HEAD}{LENGTH}\r\n{BODY[:4]}"])
def test_a_server_that_does_not_finish_is_given_up(begun: str) -> None:
    refused, _ = download(begun.encode("latin-1"), replace(LOCAL, timeout_s=0.05), waits=True)
    assert isinstance(refused, str) and "within 0.05 seconds" in refused


def test_a_certificate_that_nobody_trusts_is_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate, key)
    refused, asked = download(f"{HEAD}\r\n{BODY}".encode("latin-1"), secure=secure)
    assert isinstance(refused, str) and "TLS failed" in refused and asked == []


def test_a_certificate_is_checked_for_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert download(f"{HEAD}\r\n{BODY}".encode("latin-1"), secure=secure)[0] == PICTURE


def test_a_closed_port_is_refused() -> None:
    async def run() -> int:
        async with server(b"") as (port, _):
            return port

    assert "the connection failed" in refusal(f"http://127.0.0.1:{asyncio.run(run())}/", LOCAL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of pictures, beside a file that nobody may read."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    pictures = tmp_path / "pictures"
    (pictures / "below").mkdir(parents=True)
    (pictures / "below" / "a b.png").write_bytes(PICTURE)
    (pictures / "inside.png").symlink_to(pictures / "below" / "a b.png")
    (pictures / "outside.png").symlink_to(tmp_path / "secret.png")
    (pictures / "up").symlink_to(tmp_path)
    (pictures / "empty.png").touch()
    os.mkfifo(pictures / "pipe.png")
    (tmp_path / "pictures-of-others").mkdir()
    (tmp_path / "pictures-of-others" / "a.png").write_bytes(b"secret")
    return pictures


@pytest.mark.parametrize(
    "url", ["file://{}/below/a%20b.png", "file://localhost{}/inside.png", "FILE:{}/inside.png"]
)
def test_files_of_the_allowed_folder_are_read(folder: Path, url: str) -> None:
    assert read(url.format(folder), SourceRules(folder=folder)) == PICTURE


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "not a file in the allowed folder"),
        ("file://{}/outside.png", "not a file in the allowed folder"),
        ("file://{}/up/secret.png", "not a file in the allowed folder"),
        ("file://{}/../secret.png", "not a file in the allowed folder"),
        ("file://{}/%2e%2e/secret.png", "not a file in the allowed folder"),
        ("file://{}-of-others/a.png", "not a file in the allowed folder"),
        ("file://{}/nothing.png", "not a file in the allowed folder"),
        ("file://{}/below", "not a file in the allowed folder"),
        ("file://{}/pipe.png", "not a file in the allowed folder"),
        ("file:below/a%20b.png", "not a file in the allowed folder"),
        ("file://host{}/inside.png", "expected file:///PATH"),
        ("file://{}/inside.png?x", "expected file:///PATH"),
        ("file://{}/inside.png%00.png", "expected file:///PATH"),
        ("file://{}/a b.png", "not a URL"),
        ("file://{}/empty.png", "empty"),
        ("file://{}/inside.png", "more than 20 bytes"),
    ],
)
def test_other_files_are_refused(folder: Path, url: str, reason: str) -> None:
    most = 20 if reason.startswith("more") else 1000
    message = refusal(url.format(folder), SourceRules(folder=folder, max_bytes=most))
    assert reason in message and "secret" not in message.replace("secret.png", "")


def test_a_file_that_is_replaced_by_a_link_meanwhile_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was opened is the one that was checked, even if a folder of its path has become a link."""
    opens: Callable[..., int] = os.open

    def swap(path: str, flags: int) -> int:
        if path.endswith("a b.png"):
            (folder / "below").rename(folder / "moved")
            (folder.parent / "a b.png").write_bytes(b"secret")
            (folder / "below").symlink_to(folder.parent)
        return opens(path, flags)

    monkeypatch.setattr(os, "open", swap)
    assert "not a file in the allowed folder" in refusal(
        f"file://{folder}/inside.png", SourceRules(folder=folder)
    )
