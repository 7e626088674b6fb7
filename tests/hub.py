"""A Hugging Face hub on this machine, with the parts that huggingface_hub needs to fetch a snapshot."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_of_somebody_who_may_read"
_INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/revision/([^/?]+)(?:\?blobs=[Tt]rue)?")
_TREE = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/tree/([^/?]+)")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class Model:
    """A repository on the hub.

    Attributes:
        revisions: Folders of files, by the name of a branch or tag.
        is_gated: Whether files are sent only to clients with TOKEN.
    """

    revisions: dict[str, Path]
    is_gated: bool = False

    def commit(self, revision: str) -> str:
        """Return a fake commit id, 40 hexadecimal digits."""
        return hashlib.sha1(f"{revision} {self.revisions[revision]}".encode()).hexdigest()

    def find(self, revision: str) -> tuple[str, Path] | None:
        """Return commit and folder of a branch, tag or commit."""
        for name, folder in self.revisions.items():
            if revision in (name, self.commit(name)):
                return self.commit(name), folder
        return None


@dataclass
class Hub:
    """A running hub.

    Attributes:
        models: Repositories by name; may be changed while it runs.
        url: Value for HF_ENDPOINT.
        fetched: Files that were sent, as NAME/FILE.
        asked: All requested paths.
        broken: Files that the hub fails to send.
    """

    models: dict[str, Model]
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)


@contextmanager
def running_hub(models: dict[str, Model]) -> Iterator[Hub]:
    """Serve until the end of the `with` block."""
    hub = Hub(models)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.asked.append(self.path)
        if found := _INFO.fullmatch(self.path):
            self._info(found[1], found[2])
        elif found := _TREE.match(self.path):
            self._tree(found[1], found[2])
        elif found := _FILE.fullmatch(self.path):
            self._file(*found.groups())
        else:
            self._send(404, b"")

    def _find(self, name: str, revision: str) -> tuple[str, Path] | None:
        """Return commit and folder, or send an error and return None."""
        if name not in self.hub.models:
            # The hub sends this to unknown clients too, because the repository might be private.
            self._send(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
            return None
        found = self.hub.models[name].find(revision)
        if found is None:
            self._send(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        return found

    def _info(self, name: str, revision: str) -> None:
        if found := self._find(name, revision):
            files = [{"rfilename": path, "size": len(content)} for path, content in _files(found[1]).items()]
            self._send_json({"_id": "0", "id": name, "modelId": name, "sha": found[0], "siblings": files})

    def _tree(self, name: str, revision: str) -> None:
        if found := self._find(name, revision):
            self._send_json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                    for path, content in _files(found[1]).items()
                ]
            )

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        if self.hub.models[name].is_gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        content = _files(found[1]).get(path)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if path in self.hub.broken:
            return self._send(403, b"")
        if self.command == "GET":
            self.hub.fetched.append(f"{name}/{path}")
        self._send(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": found[0]})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
