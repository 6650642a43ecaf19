"""An HTTP server on 127.0.0.1 for tests; each path answers as scripted, well or badly. It notes what it was asked and what it sent."""

from __future__ import annotations

import contextlib
import re
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler


@dataclass
class Reply:
    """How one request is answered. ``body`` is the whole file; ranges are cut from it unless ``ranges`` is off."""

    body: bytes = b""
    status: int = 200
    ranges: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = -1
    """What Content-Length says: -1 the truth, None nothing (the connection's end ends the body), else this number."""
    chunked: bool = False
    drop_after: int | None = None
    """Cut the connection after so many bytes of the body."""
    pause: float = 0.0
    """Seconds between blocks of 64 KiB: a slow line."""


@dataclass
class Request:
    """What came in, and how many bytes of body went out."""

    path: str
    headers: dict[str, str]
    sent: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self.close_connection = True
        script = self.server.owner
        request = Request(self.path, dict(self.headers.items()))
        with script.lock:
            script.requests.append(request)
            replies = script.routes.get(self.path, [Reply(status=404)])
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        body, status, headers = reply.body, reply.status, dict(reply.headers)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        if asked and reply.ranges and status == 200 and (condition is None or condition == headers.get("ETag")):
            start = int(asked[1])
            if start >= len(body):
                status, headers["Content-Range"], body = 416, f"bytes */{len(body)}", b""
            else:
                headers.setdefault("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                status, body = 206, body[start:]
        self.send_response_only(status, reply.headers.get("reason"))
        for name, value in headers.items():
            self.send_header(name, value)
        if reply.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif reply.length is not None:
            self.send_header("Content-Length", str(len(body) if reply.length == -1 else reply.length))
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            for start in range(0, len(body), 1 << 16):
                block = body[start : start + (1 << 16)]
                if reply.drop_after is not None:
                    block = block[: max(0, reply.drop_after - request.sent)]
                    if not block:
                        break
                self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if reply.chunked else block)
                request.sent += len(block)
                if reply.pause:
                    time.sleep(reply.pause)
            if reply.chunked and reply.drop_after is None:
                self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    owner: Script

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@dataclass
class Script:
    """``routes`` maps a path to its replies, used one after the other; the last one stays."""

    url: str = ""
    routes: dict[str, list[Reply]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, path: str, *replies: Reply) -> str:
        """Script a path; gives its whole address."""
        self.routes[path] = list(replies)
        return self.url + path

    def asked(self, path: str) -> list[Request]:
        """The requests for a path so far."""
        return [request for request in self.requests if request.path == path]


@contextlib.contextmanager
def running() -> Iterator[Script]:
    """A server for the time of the block."""
    script = Script()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.owner = script
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
