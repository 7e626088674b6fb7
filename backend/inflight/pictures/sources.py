"""Reads the pictures that requests name by URL: from the URL itself, over HTTP, or from a folder of the server.

A client must not make the server read what only the server can reach. So hosts and files are those that the
operator allows, a host's addresses must be public, the connection goes to the address that was checked, and
redirects are not followed. `read_picture` runs on an event loop. Imports no torch.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import re
import socket
import ssl
import stat
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httptools

from inflight.errors import InvalidArgument, Name
from inflight.pictures.encoded_prompt import MAX_PICTURE_BYTES

TIMEOUT_S = 10.0
"""Largest time for a download, from the resolution of the host's name to the last byte."""

_MAX_DOWNLOADS = 32
"""Number of pictures that are read at a time, for all requests together."""
_MAX_HEAD_BYTES = 64 << 10
_PART_BYTES = 64 << 10
_SHOWN = 80
_SHOWN_DATA = 16
_MEDIA_TYPE = re.compile(r"image/[a-z0-9][a-z0-9.+-]*", re.IGNORECASE)
_UNTYPED = ("", "application/octet-stream", "binary/octet-stream")
"""Media types of servers that do not know what a file is."""
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: IpAddress) -> bool:
    """Return whether an address belongs to a host of the public Internet.

    An IPv6 address that stands for an IPv4 address is judged by the latter; tunnels (6to4 and Teredo) are not
    public.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.sixtofour is not None or address.teredo is not None or address.is_site_local:
            return False
    is_special = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )
    return address.is_global and not is_special


@dataclass(frozen=True, slots=True)
class SourceRules:
    """The operator's rules for the URLs of requests. By default only data: URLs are read.

    Attributes:
        domains: Hosts of http: and https: URLs, in lower case; "*.example.com" stands for all hosts below
            example.com.
        folder: Folder with the files that file: URLs may name; None: none.
        max_bytes: Largest file, in bytes.
        timeout_s: Largest time for a download, in seconds.
        is_allowed_address: Whether a host's address may be connected to.
    """

    domains: tuple[str, ...] = ()
    folder: Path | None = None
    max_bytes: int = MAX_PICTURE_BYTES
    timeout_s: float = TIMEOUT_S
    is_allowed_address: Callable[[IpAddress], bool] = is_public

    def allows_host(self, host: str) -> bool:
        """Return whether pictures may be read from a host, given in lower case."""
        return any(
            host.endswith(domain[1:]) and len(host) >= len(domain)
            if domain.startswith("*.")
            else host == domain
            for domain in self.domains
        )


async def read_picture(url: str, name: Name, rules: SourceRules) -> bytes:
    """Return the file that a URL names, unchecked except for its size and the media type that comes with it.

    Args:
        url: The URL.
        name: Name of the URL in the client's request, for errors.
        rules: The operator's rules.

    Raises:
        InvalidArgument: The URL is malformed or not allowed, or there is no such picture.
    """
    try:
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(_decode, url, rules)
        if scheme == "file":
            return await asyncio.to_thread(_read_file, _split(url), rules)
        if scheme in _PORTS:
            return await _download(url, rules)
        expected = " or ".join(
            ["data:", *(["https:"] if rules.domains else []), *(["file:"] if rules.folder else [])]
        )
        raise _Unreadable(f"is {_shown(url)}, expected a URL that begins with {expected}")
    except _Unreadable as refused:
        raise InvalidArgument(name, f" {refused}") from None


class PictureReader:
    """Reads the pictures of all requests. Runs on an event loop.

    Args:
        rules: The operator's rules.
    """

    def __init__(self, rules: SourceRules) -> None:
        self._rules = rules
        self._reading = asyncio.Semaphore(_MAX_DOWNLOADS)

    async def read_all(self, urls: Sequence[str], names: Sequence[Name]) -> list[bytes]:
        """Read pictures at the same time (`read_picture`). The first error ends the others."""
        reading = [asyncio.ensure_future(self._read(*each)) for each in zip(urls, names, strict=True)]
        try:
            return await asyncio.gather(*reading)
        finally:
            for each in reading:
                each.cancel()

    async def _read(self, url: str, name: Name) -> bytes:
        async with self._reading:
            return await read_picture(url, name, self._rules)


class _Unreadable(Exception):
    """The reason why a picture is not read, to be appended to the name of its URL."""


def _shown(url: str) -> str:
    """Return a URL for a message: only its beginning, and of a data: URL nothing of the data."""
    if url[:5].lower() == "data:":
        url = url[:_SHOWN].partition(",")[0] + ",…"
    elif ":" not in url[:_SHOWN]:  # a picture in base64, without the beginning of a data: URL
        url = url[:_SHOWN_DATA] + ("…" if len(url) > _SHOWN_DATA else "")
    return repr(url if len(url) <= _SHOWN else f"{url[:_SHOWN]}…")


def _decode(url: str, rules: SourceRules) -> bytes:
    head, comma, data = url.partition(",")
    media_type, *parameters = head[len("data:") :].split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise _Unreadable(f"is {_shown(url)}, expected data:image/…;base64,…")
    _check_media_type(media_type, "is a data: URL of type")
    if len(data) // 4 * 3 > rules.max_bytes + 2:
        raise _too_large(rules)
    try:
        decoded = base64.b64decode(data.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        reason = "letters outside ASCII" if isinstance(error, UnicodeEncodeError) else str(error)
        raise _Unreadable(f"is a data: URL whose base64 is invalid ({reason})") from None
    return _checked_size(decoded, rules)


def _check_media_type(given: str, subject: str) -> None:
    media_type = given.partition(";")[0].strip().lower()
    if _MEDIA_TYPE.fullmatch(media_type) is None or media_type.startswith("image/svg"):
        raise _Unreadable(
            f"{subject} {media_type[:_SHOWN]!r}, expected a picture such as image/png or image/jpeg"
        )


def _checked_size(data: bytes, rules: SourceRules) -> bytes:
    if not data:
        raise _Unreadable("is an empty file, expected a picture")
    if len(data) > rules.max_bytes:
        raise _too_large(rules)
    return data


def _too_large(rules: SourceRules) -> _Unreadable:
    return _Unreadable(
        f"has more than {rules.max_bytes} bytes, which is the largest picture that this server reads"
    )


def _split(url: str) -> SplitResult:
    """Split a URL, and refuse what different readers of URLs understand differently."""
    try:
        if re.search(r"[\s\x00-\x1f\x7f\\]", url):
            raise ValueError("it has white space, control characters or a backslash in it")
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is not a number up to 65535
    except ValueError as error:
        raise _Unreadable(f"is {_shown(url)}, which is not a URL: {error}") from None
    return parts


def _read_file(url: SplitResult, rules: SourceRules) -> bytes:
    if rules.folder is None:
        raise _Unreadable("is a file: URL, which this server reads only with --allowed-local-media-path")
    if (
        url.netloc not in ("", "localhost")
        or url.query
        or url.fragment
        or "\x00" in (path := unquote(url.path))
    ):
        raise _Unreadable(f"is {_shown(url.geturl())}, expected file:///PATH")
    refused = _Unreadable(f"is {_shown(url.geturl())}, which is not a file in the allowed folder")
    folder = os.path.realpath(rules.folder)
    place = os.path.realpath(path)
    if os.path.commonpath((folder, place)) != folder:
        raise refused
    try:
        # realpath has no link in it: a path that has one now was changed meanwhile.
        opened = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode) or os.readlink(f"/proc/self/fd/{opened}") != place:
                raise refused
            return _checked_size(file.read(rules.max_bytes + 1), rules)
    except OSError:
        raise refused from None


async def _download(url: str, rules: SourceRules) -> bytes:
    parts = _split(url)
    host = parts.hostname or ""
    if "@" in parts.netloc or not host or not host.isascii():
        raise _Unreadable(f"is {_shown(url)}, expected https://HOST/PATH with a host in ASCII and no user")
    if not rules.allows_host(host):
        allowed = f"; it reads from {', '.join(rules.domains)}" if rules.domains else ""
        raise _Unreadable(
            f"is on the host {host[:_SHOWN]!r}, which this server may not read from (--allowed-media-domains)"
            f"{allowed}. Send the picture as data:image/…;base64,…"
        )
    download = _Download(parts, host, rules)
    try:
        return await asyncio.wait_for(download.run(), rules.timeout_s)
    except asyncio.TimeoutError:
        raise _Unreadable(f"could not be read within {rules.timeout_s:g} seconds from {host!r}") from None
    except (OSError, httptools.HttpParserError) as error:
        raise _Unreadable(f"could not be read from {host!r}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or 'no secure connection'})"
    if isinstance(error, OSError):
        return "the connection failed"
    return "it does not answer in HTTP"


class _Download:
    """One GET request, on a connection of its own. httptools calls the methods on_… for parts of the answer."""

    def __init__(self, url: SplitResult, host: str, rules: SourceRules) -> None:
        self._url = url
        self._host = host
        self._rules = rules
        self._port = url.port or _PORTS[url.scheme]
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._has_head = self._is_complete = False
        self._refusal: _Unreadable | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def run(self) -> bytes:
        """Return the body of the answer."""
        address = await self._resolve()
        secure = None
        if self._url.scheme == "https":
            secure = await asyncio.to_thread(ssl.create_default_context)  # reads a file of 200 KB
        name = self._host if secure else None
        reader, writer = await asyncio.open_connection(address, self._port, ssl=secure, server_hostname=name)
        try:
            writer.write(self._request())
            await self._read(reader)
        finally:
            writer.transport.abort()
        return _checked_size(b"".join(self._parts), self._rules)

    async def _resolve(self) -> str:
        """Return the address to connect to. All addresses of the host must be allowed."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError):
            raise _Unreadable(f"is on the host {self._host[:_SHOWN]!r}, which has no address") from None
        addresses = [str(place[0]) for *_, place in found]
        if not addresses or not all(
            self._rules.is_allowed_address(ipaddress.ip_address(each)) for each in addresses
        ):
            raise _Unreadable(
                f"is on the host {self._host[:_SHOWN]!r}, whose address is not public: this server does not read "
                "from its own network"
            )
        return addresses[0]

    def _request(self) -> bytes:
        url = self._url
        target = quote(url.path or "/", safe=string.punctuation)
        if url.query:
            target += "?" + quote(url.query, safe=string.punctuation)
        host = f"[{self._host}]" if ":" in self._host else self._host
        place = host if self._port == _PORTS[url.scheme] else f"{host}:{self._port}"
        lines = (
            f"GET {target} HTTP/1.1",
            f"Host: {place}",
            "User-Agent: inflight",
            "Accept: image/*",
            "Accept-Encoding: identity",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode("ascii")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        num_read = 0
        while not self._is_complete and (part := await reader.read(_PART_BYTES)):
            num_read += len(part)
            try:
                self._parser.feed_data(part)
            except httptools.HttpParserCallbackError:
                if self._refusal is None:
                    raise
            except httptools.HttpParserUpgrade:
                self._refusal = _Unreadable(f"could not be read from {self._host!r}: it changed the protocol")
            if self._refusal is not None:
                raise self._refusal
            if not self._has_head and num_read > _MAX_HEAD_BYTES:
                raise _Unreadable(
                    f"could not be read from {self._host!r}: its answer's headers are too large"
                )
        ends_with_connection = not {b"content-length", b"transfer-encoding"} & self._headers.keys()
        if not self._is_complete and not (self._has_head and ends_with_connection):
            raise _Unreadable(f"could not be read from {self._host!r}: the connection ended too early")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._refusal = self._problem_of_head()
        if self._refusal is not None:
            raise self._refusal

    def _problem_of_head(self) -> _Unreadable | None:
        status = self._parser.get_status_code()
        if 300 <= status < 400:
            return _Unreadable(
                f"is answered by {self._host!r} with a redirect ({status}), which is not followed"
            )
        if status != 200:
            return _Unreadable(f"is answered by {self._host!r} with the HTTP status {status}")
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._rules.max_bytes:
            return _too_large(self._rules)
        coding = self._headers.get(b"content-encoding", b"identity").decode("latin-1")
        if coding.lower() != "identity":
            return _Unreadable(
                f"is answered by {self._host!r} with the encoding {coding[:_SHOWN]!r}, expected none"
            )
        media_type = self._headers.get(b"content-type", b"").decode("latin-1").strip()
        if media_type.partition(";")[0].strip().lower() not in _UNTYPED:
            try:
                _check_media_type(media_type, f"is answered by {self._host!r} with a file of type")
            except _Unreadable as refused:
                return refused
        return None

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._rules.max_bytes:
            self._refusal = _too_large(self._rules)
            raise self._refusal
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
