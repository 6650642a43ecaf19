"""A model hub on 127.0.0.1 that serves local files under the names of repositories, and the download cache it would fill.

It speaks the four requests that llama.cpp's downloader makes (common/hf-cache.cpp, common/download.cpp of the base): the branches of a
repository, the files of a commit, HEAD and GET of a file, ranges included. ``MODEL_ENDPOINT`` points the engine at it. Only the standard
library is used: the server's test suite loads this module inside its own pytest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

Repositories = Mapping[str, Mapping[str, Path]]
"""Repository (``owner/name``) to its files: path in the repository to local file."""

_REFS = re.compile(r"/api/models/([^/]+/[^/]+)/refs")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def commit_of(repository: str) -> str:
    """The commit that every repository has: 40 hex digits, a function of its name."""
    return hashlib.sha1(repository.encode(), usedforsecurity=False).hexdigest()


def object_of(file: Path) -> str:
    """The object id (sha256) of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def place(cache: Path, repositories: Repositories) -> None:
    """Fill an engine's download cache (``LLAMA_CACHE``) as if it had fetched every file: blobs, a commit's files, its branch."""
    for repository, files in repositories.items():
        folder = cache / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit_of(repository)
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit_of(repository), "ascii")
        for name, file in files.items():
            blob = folder / "blobs" / object_of(file)
            if not blob.is_symlink():
                blob.symlink_to(file.resolve())
            entry = snapshot / name
            entry.parent.mkdir(parents=True, exist_ok=True)
            if not entry.is_symlink():
                entry.symlink_to(blob)


@contextlib.contextmanager
def serving(repositories: Repositories) -> Iterator[str]:
    """Serve while the block runs; yields the address, without a slash at its end."""

    class Handler(_Handler):
        served = repositories

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="model hub", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: ClassVar[Repositories] = {}
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the requests are no news."""

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if (match := _REFS.fullmatch(path)) and match[1] in self.served:
            self._json({"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": commit_of(match[1])}]}, body)
        elif (match := _TREE.fullmatch(path)) and match[1] in self.served and match[2] in ("main", commit_of(match[1])):
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": object_of(file)[:40], "lfs": {"oid": object_of(file), "size": file.stat().st_size}}
                for name, file in self.served[match[1]].items()
            ]
            self._json(entries, body)
        elif (match := _FILE.fullmatch(path)) and match[3] in self.served.get(match[1], {}) and match[2] in ("main", commit_of(match[1])):
            self._file(self.served[match[1]][match[3]], body)
        else:
            self._send(HTTPStatus.NOT_FOUND, b'{"error":"not found"}', "application/json", body)

    def _json(self, value: object, body: bool) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), "application/json", body)

    def _file(self, file: Path, body: bool) -> None:
        data = file.read_bytes()
        start = 0
        if (wish := self.headers.get("Range")) and (match := _RANGE.fullmatch(wish)):
            start, end = int(match[1]), int(match[2] or len(data) - 1)
            if start >= len(data):
                self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", "text/plain", body, {"Content-Range": f"bytes */{len(data)}"})
                return
            part = data[start : end + 1]
            self._send(HTTPStatus.PARTIAL_CONTENT, part, "application/octet-stream", body, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"})
            return
        kind = "image/png" if file.suffix == ".png" else "application/octet-stream"
        self._send(HTTPStatus.OK, data, kind, body, {"ETag": f'"{object_of(file)}"', "Accept-Ranges": "bytes"})

    def _send(self, status: HTTPStatus, data: bytes, kind: str, body: bool, headers: Mapping[str, str] | None = None) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)
