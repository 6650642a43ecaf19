"""A hub on 127.0.0.1 for tests: it speaks what the real client says, keeps every commit, and fails as scripted.

Commits with whole trees lie in memory, large objects in a folder. A ``Fault`` names the kind of request it meets and which of them ("the
3rd upload"); everything that was asked is noted, so a test can count bytes and look for what must not be there.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_RecognisableTokenOfTheTests0123456789"
BLOCK = 1 << 16


@dataclass(frozen=True)
class Stored:
    """A file of a tree: in git (``data``), or in the large file storage (``sha256``)."""

    size: int
    blob: str
    data: bytes = b""
    sha256: str = ""


@dataclass(frozen=True)
class Commit:
    """A commit and its whole tree."""

    oid: str
    parent: str
    message: str
    tree: Mapping[str, Stored]


@dataclass
class Fault:
    """What goes wrong with requests of one ``kind``: from the ``nth`` on (the first is 1), ``times`` of them."""

    kind: str
    nth: int = 1
    times: int = 1
    status: int = 0
    """Answer so, and do nothing."""
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "scripted"
    drop_after: int | None = None
    """Cut the connection after so many bytes of the request's body, and do nothing."""
    lose_reply: bool = False
    """Do it, and cut the connection instead of answering."""
    cut_reply: int | None = None
    """Do it, answer, and cut the connection after so many bytes of the answer's body."""
    delay: float = 0.0
    """Seconds before it is done."""
    delay_reply: float = 0.0
    """Seconds after it is done and before it is answered."""
    damage: bool = False
    """Change a byte of what is stored."""
    lie: bool = False
    """Tell a wrong hash."""
    status_after: int = 0
    """Do it, and answer so: a gateway that lost patience with the hub behind it."""
    rubbish: bool = False
    """Do it, and answer with a page that is no JSON."""


@dataclass
class Asked:
    """A request: what it was, how many bytes of body came, its headers."""

    kind: str
    method: str
    path: str
    headers: dict[str, str]
    body: int = 0
    sent_content: int = 0
    """Of a commit: bytes of files that came inside it."""


_KINDS: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<rev>[^/]+))?", "info"),
    ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)(/(?P<path>.*))?", "tree"),
    ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/paths-info/(?P<rev>[^/]+)", "paths"),
    ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)", "preupload"),
    ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)", "commit"),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/put/(?P<oid>[0-9a-f]{64})", "put"),
    ("PUT", r"/lfs/part/(?P<oid>[0-9a-f]{64})/(?P<part>[0-9]+)", "part"),
    ("POST", r"/lfs/complete/(?P<oid>[0-9a-f]{64})", "complete"),
    ("POST", r"/lfs/verify", "verify"),
    ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.*)", "resolve"),
    ("HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.*)", "resolve"),
)

KINDS = tuple(dict.fromkeys(kind for _, _, kind in _KINDS))


class _Answer(Exception):
    """An answer other than the good one."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class _Cut(Exception):
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        kind, words = "unknown", {}
        for method, pattern, name in _KINDS:
            if method == self.command and (match := re.fullmatch(pattern, url.path)):
                kind, words = name, {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
        asked = Asked(kind, self.command, self.path, {key.lower(): value for key, value in self.headers.items()})
        fault = hub.note(asked)
        try:
            self._serve(hub, asked, fault, words, url.query)
        except _Cut:
            self._cut()
        except OSError:
            self.close_connection = True

    do_POST = do_PUT = do_HEAD = do_GET

    def _serve(self, hub: HubServer, asked: Asked, fault: Fault | None, words: dict[str, str], query: str) -> None:
        place = hub.folder / f"incoming.{threading.get_ident()}"
        try:
            self._read_body(place, asked, fault)
            status, headers, body = self._answer(hub, asked, fault, place, words, query)
        finally:
            place.unlink(missing_ok=True)
        if fault is not None:
            if fault.delay_reply:
                time.sleep(fault.delay_reply)
            if fault.lose_reply:
                raise _Cut
            if fault.status_after:
                status = fault.status_after
            if fault.rubbish:
                headers, body = {"Content-Type": "text/html"}, b"<html>It works!</html>"
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            if fault is not None and fault.cut_reply is not None:
                self.wfile.write(body[: fault.cut_reply])
                raise _Cut
            self.wfile.write(body)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(2)

    def _read_body(self, place: Path, asked: Asked, fault: Fault | None) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        limit = fault.drop_after if fault is not None and fault.drop_after is not None else None
        with place.open("wb") as out:
            while asked.body < length:
                want = min(BLOCK, length - asked.body, BLOCK if limit is None else limit - asked.body)
                if want <= 0 or not (block := self.rfile.read1(want)):
                    break
                asked.body += len(block)
                out.write(block)
        if limit is not None or asked.body < length:
            raise _Cut

    def _answer(self, hub: HubServer, asked: Asked, fault: Fault | None, place: Path, words: dict[str, str], query: str) -> tuple[int, dict[str, str], bytes]:
        try:
            if fault is not None and fault.status:
                raise _Answer(fault.status, fault.message)
            if fault is not None and fault.delay:
                time.sleep(fault.delay)
            if fault is not None and fault.damage and place.stat().st_size:
                data = bytearray(place.read_bytes())
                data[len(data) // 2] ^= 1
                place.write_bytes(data)
            with hub.lock:
                return hub.answer(asked, place, words, query, lie=fault is not None and fault.lie)
        except _Answer as answer:
            headers = {"X-Error-Message": answer.message, "Content-Type": "application/json"} | ({"X-Error-Code": answer.code} if answer.code else {})
            if fault is not None:
                headers |= dict(fault.headers)
            return answer.status, headers, json.dumps({"error": answer.message}).encode()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32
    hub: HubServer

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@dataclass
class HubServer:
    """The state of the hub, and what to look at and to turn in a test."""

    folder: Path
    repository: str = "owner/engine"
    url: str = ""
    token: str = TOKEN
    multipart_from: int = 1 << 62
    """Objects from this size on are uploaded in parts of ``part_size`` bytes."""
    part_size: int = 1 << 20
    page: int = 1000
    """Entries of one page of a tree."""
    large_patterns: tuple[str, ...] = ("*.exe", "*.llamafile", "*.dll", "*.so", "*.bin")
    commits: list[Commit] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    seen: Counter[str] = field(default_factory=Counter)

    # ---- for the test --------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Commit:
        """The commit the branch stands at."""
        return self.commits[-1]

    def script(self, *faults: Fault) -> None:
        """Forget what was asked and what was scripted; from now on, this."""
        with self.lock:
            self.faults, self.asked, self.seen = list(faults), [], Counter()

    def count(self, kind: str) -> int:
        """How often this kind of request came since ``script``."""
        return self.seen[kind]

    @property
    def uploaded(self) -> int:
        """Bytes of bodies of uploads since ``script``, whole or not."""
        return sum(asked.body for asked in self.asked if asked.kind in ("put", "part"))

    @property
    def committed(self) -> int:
        """Bytes of files that came inside commits since ``script``."""
        return sum(asked.sent_content for asked in self.asked)

    def bytes_of(self, stored: Stored) -> bytes:
        """The bytes that a download gives."""
        return self._object(stored.sha256).read_bytes() if stored.sha256 else stored.data

    def content(self, commit: Commit | None = None) -> dict[str, str]:
        """Path to sha256 of the very bytes, for a commit (default: the head)."""
        return {path: hashlib.sha256(self.bytes_of(stored)).hexdigest() for path, stored in (commit or self.head).tree.items()}

    def write(self, changes: Mapping[str, bytes | None], message: str = "by hand") -> str:
        """Commit as somebody else: bytes to put, None to delete."""
        with self.lock:
            tree = dict(self.head.tree) if self.commits else {}
            for path, data in changes.items():
                if data is None:
                    del tree[path]
                elif self.is_large(path, data[:512], len(data)):
                    oid = hashlib.sha256(data).hexdigest()
                    self._object(oid).write_bytes(data)
                    tree[path] = self._pointer(oid, len(data))
                else:
                    tree[path] = _in_git(data)
            return self._commit(tree, message)

    def lose_object(self, sha256: str) -> None:
        """As if the large file storage had been swept."""
        self._object(sha256).unlink()

    # ---- inside --------------------------------------------------------------------------------------------------------------

    def note(self, asked: Asked) -> Fault | None:
        """Count a request; gives what goes wrong with it."""
        with self.lock:
            self.asked.append(asked)
            self.seen[asked.kind] += 1
            number = self.seen[asked.kind]
            return next((fault for fault in self.faults if fault.kind == asked.kind and fault.nth <= number < fault.nth + fault.times), None)

    def is_large(self, path: str, sample: bytes, size: int) -> bool:
        """Whether a file belongs into the large file storage."""
        return size > 10_000_000 or b"\0" in sample or any(fnmatch.fnmatch(path, pattern) for pattern in self.large_patterns)

    def _object(self, oid: str) -> Path:
        return self.folder / "objects" / oid

    def _pointer(self, oid: str, size: int) -> Stored:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()
        return Stored(size, _in_git(text).blob, sha256=oid)

    def _commit(self, tree: Mapping[str, Stored], message: str) -> str:
        parent = self.commits[-1].oid if self.commits else ""
        listing = json.dumps([len(self.commits), parent, message, sorted((path, stored.blob) for path, stored in tree.items())])
        self.commits.append(Commit(hashlib.sha1(listing.encode()).hexdigest(), parent, message, dict(tree)))
        return self.commits[-1].oid

    def _at(self, revision: str) -> Commit:
        if revision == "main":
            return self.head
        found = next((commit for commit in self.commits if commit.oid == revision), None)
        if found is None:
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def answer(self, asked: Asked, place: Path, words: dict[str, str], query: str, *, lie: bool) -> tuple[int, dict[str, str], bytes]:
        """The good answer; raises _Answer for another."""
        authorised = asked.headers.get("authorization") == f"Bearer {self.token}"
        if asked.kind in ("whoami", "preupload", "commit", "batch", "verify") and not authorised:
            raise _Answer(401, "Invalid username or password.")
        if asked.kind in ("put", "part") and "authorization" in asked.headers:
            raise _Answer(400, "an upload address is signed: it must not get the token")
        if "repo" in words and words["repo"] != self.repository:
            raise _Answer(404, "Repository not found", "RepoNotFound")
        handler = getattr(self, f"_on_{asked.kind}", None)
        if handler is None:
            raise _Answer(404, f"no such address: {asked.path}")
        done = handler(asked, place, words, parse_qs(query), lie)
        if isinstance(done, tuple):
            return done
        return 200, {"Content-Type": "application/json"}, json.dumps(done).encode()

    def _on_whoami(self, *_: object) -> object:
        return {"type": "user", "name": "owner", "auth": {"type": "access_token"}}

    def _on_validate(self, *_: object) -> object:
        return {"warnings": [], "errors": []}

    def _on_info(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        commit = self._at(words.get("rev", "main"))
        return {"id": self.repository, "modelId": self.repository, "sha": commit.oid, "private": False, "siblings": [{"rfilename": path} for path in commit.tree]}

    def _listed(self, path: str, stored: Stored, lie: bool) -> dict[str, object]:
        row: dict[str, object] = {"type": "file", "path": path, "oid": stored.blob if not lie else "0" * 40, "size": stored.size}
        if stored.sha256:
            row["lfs"] = {"oid": stored.sha256 if not lie else "0" * 64, "size": stored.size, "pointerSize": 134}
        return row

    def _on_tree(self, asked: Asked, place: Path, words: dict[str, str], query: dict[str, list[str]], lie: bool) -> object:
        commit = self._at(words["rev"])
        folders = {"/".join(path.split("/")[:depth]) for path in commit.tree for depth in range(1, path.count("/") + 1)}
        rows = [{"type": "directory", "path": path, "oid": "1" * 40, "size": 0} for path in sorted(folders)]
        rows += [self._listed(path, stored, lie) for path, stored in sorted(commit.tree.items())]
        start = int(query.get("cursor", ["0"])[0])
        headers = {"Content-Type": "application/json"}
        if start + self.page < len(rows):
            headers["Link"] = f'<{self.url}{urlsplit(asked.path).path}?recursive=true&cursor={start + self.page}>; rel="next"'
        return 200, headers, json.dumps(rows[start : start + self.page]).encode()

    def _on_paths(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        commit = self._at(words["rev"])
        paths = parse_qs(place.read_text("ascii")).get("paths", [])
        return [self._listed(path, commit.tree[path], lie) for path in paths if path in commit.tree]

    def _on_preupload(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        tree = self._at(words["rev"]).tree
        rows = []
        for file in json.loads(place.read_bytes())["files"]:
            large = self.is_large(file["path"], base64.b64decode(file["sample"]), file["size"])
            stored = tree.get(file["path"])
            oid = (stored.sha256 or stored.blob) if stored is not None else None
            rows.append({"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
        return {"files": rows}

    def _on_batch(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        rows = []
        for item in json.loads(place.read_bytes())["objects"]:
            oid, size = item["oid"], item["size"]
            row: dict[str, object] = {"oid": oid, "size": size}
            if not self._object(oid).exists():
                upload: dict[str, object] = {"href": f"{self.url}/lfs/put/{oid}"}
                if size >= self.multipart_from:
                    parts = {str(number): f"{self.url}/lfs/part/{oid}/{number}" for number in range(1, -(-size // self.part_size) + 1)}
                    upload = {"href": f"{self.url}/lfs/complete/{oid}", "header": {"chunk_size": str(self.part_size), **parts}}
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/lfs/verify"}}
            rows.append(row)
        return {"transfer": "basic", "objects": rows}

    def _on_put(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        os.replace(place, self.folder / f"{words['oid']}.upload")
        place.touch()
        return 200, {"ETag": '"whole"'}, b""

    def _on_part(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        digest = hashlib.md5(place.read_bytes(), usedforsecurity=False).hexdigest()
        os.replace(place, self.folder / f"{words['oid']}.{words['part']}.{digest}")
        place.touch()
        return 200, {"ETag": f'"{digest}"'}, b""

    def _on_complete(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        wanted = json.loads(place.read_bytes())
        with (self.folder / f"{words['oid']}.upload").open("wb") as out:
            for part in wanted["parts"]:
                source = self.folder / f"{words['oid']}.{part['partNumber']}.{part['etag'].strip(chr(34))}"
                if not source.exists():
                    raise _Answer(400, f"part {part['partNumber']} never came")
                out.write(source.read_bytes())
        return {}

    def _on_verify(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        wanted = json.loads(place.read_bytes())
        upload = self.folder / f"{wanted['oid']}.upload"
        if self._object(wanted["oid"]).exists():
            return {}
        if not upload.exists():
            raise _Answer(404, "never uploaded")
        data = upload.read_bytes()
        if hashlib.sha256(data).hexdigest() != wanted["oid"] or len(data) != wanted["size"]:
            upload.unlink()
            raise _Answer(422, "the bytes that came are not those of the oid")
        os.replace(upload, self._object(wanted["oid"]))
        return {}

    def _on_commit(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        try:
            lines = [json.loads(line) for line in place.read_bytes().splitlines()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            if header.get("parentCommit", self.head.oid) != self.head.oid:
                raise _Answer(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(self.head.tree)
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    data = base64.b64decode(value["content"], validate=True)
                    asked.sent_content += len(data)
                    tree[value["path"]] = _in_git(data)
                elif line["key"] == "lfsFile":
                    if not self._object(value["oid"]).exists():
                        raise _Answer(400, f"Your push was rejected because an LFS pointer points to a file that does not exist: {value['oid']}")
                    tree[value["path"]] = self._pointer(value["oid"], self._object(value["oid"]).stat().st_size)
                elif line["key"] == "deletedFile":
                    if value["path"] not in tree:
                        raise _Answer(404, "A file with this name doesn't exist", "EntryNotFound")
                    del tree[value["path"]]
                elif line["key"] != "header":
                    raise _Answer(400, f"unknown key {line['key']}")
        except (ValueError, KeyError, StopIteration, binascii.Error) as error:
            raise _Answer(400, f"not a commit: {error}") from error
        oid = self._commit(tree, header["summary"])
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{self.repository}/commit/{oid}", "hookOutput": ""}

    def _on_resolve(self, asked: Asked, place: Path, words: dict[str, str], query: object, lie: bool) -> object:
        commit = self._at(words["rev"])
        stored = commit.tree.get(words["path"])
        if stored is None:
            raise _Answer(404, "Entry not found", "EntryNotFound")
        data = self.bytes_of(stored)
        if lie and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        etag = f'"{stored.sha256 or stored.blob}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if stored.sha256:
            headers |= {"X-Linked-Size": str(stored.size), "X-Linked-ETag": etag}
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.headers.get("range", ""))
        if match and (match[1] or match[2]):
            start = int(match[1]) if match[1] else max(0, len(data) - int(match[2]))
            end = min(int(match[2]), len(data) - 1) if match[1] and match[2] else len(data) - 1
            if start > end:
                raise _Answer(416, "no such range")
            return 206, headers | {"Content-Range": f"bytes {start}-{end}/{len(data)}"}, data[start : end + 1]
        if asked.method == "HEAD":
            headers["Content-Length"] = str(len(data))
        return 200, headers, data


def _in_git(data: bytes) -> Stored:
    return Stored(len(data), hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(), data)


def resolve_address(hub: HubServer, path: str, revision: str = "main") -> str:
    """Where a file is downloaded from."""
    return f"{hub.url}/{hub.repository}/resolve/{revision}/{quote(path)}"


@contextlib.contextmanager
def running(folder: Path, **settings: object) -> Iterator[HubServer]:
    """A hub with an empty repository, for the time of the block."""
    hub = replace(HubServer(folder), **settings)  # type: ignore[arg-type]
    (folder / "objects").mkdir(parents=True, exist_ok=True)
    hub.write({".gitattributes": b"*.exe filter=lfs diff=lfs merge=lfs -text\n"}, "initial commit")
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.hub = hub
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
