"""The HTTP transport below the hub's client: it waits, tries again, gives up, counts what is sent, and lets no secret into a message.

The client has a patience of its own (it sleeps by itself, for as long as a server asks, and retries without limit of time). It never gets to see
what would set that off: a trouble that may pass is settled here, by ``Policy``, and one that does not pass leaves as an error of ours.

A commit is the one request that is not repeated here, unless the hub said clearly that it did not take it (429): whether a commit whose reply was
lost has been made, only the repository can tell.
"""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.request import getproxies, proxy_bypass

from huggingface_hub.utils import httpx

from ..console import human_seconds
from ..errors import HubRefused, HubUnavailable, OpencotiError
from .policy import PASSING, STOP, Clock, Policy, asked_pause

REPLY_LIMIT = 64 << 20
"""Bytes of a reply; what is asked here is lists and small files."""

_REASON_LIMIT = 400


class ReplyLost(OpencotiError):
    """A commit was sent and no clear answer came: it may have been made. ``execute`` finds out; this never reaches a person."""


class Stopped(OpencotiError):
    """The run ends (another upload failed, or a person interrupted it), and this upload with it."""


@dataclass
class Secrets:
    """Words that may stand in no message: the token."""

    words: tuple[str, ...] = ()

    def clean(self, text: str) -> str:
        """``text`` in one line of bounded length, without control characters and secrets."""
        for word in self.words:
            text = text.replace(word, "[token]")
        return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:_REASON_LIMIT]


@dataclass
class Traffic:
    """What the transports of one run share. ``on_sent`` gets the bytes of file content as they go out, negative when they have to go again."""

    policy: Policy
    clock: Clock
    secrets: Secrets
    on_sent: Callable[[int], None] = lambda count: None
    on_wait: Callable[[str], None] = lambda sentence: None
    stop: threading.Event = field(default_factory=threading.Event)
    _local: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def sending(self, stream: IO[bytes]) -> Iterator[None]:
        """While the block runs, request bodies of this thread are read from ``stream``, which can be rewound."""
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = None

    def body_of(self, request: httpx.Request) -> IO[bytes] | None:
        """The file that the request's body is read from, or None when the body is at hand."""
        return getattr(self._local, "stream", None) if request.method == "PUT" else None


class _Counted(httpx.SyncByteStream):
    """A request body that tells how much of it has been sent."""

    def __init__(self, stream: Any, traffic: Traffic) -> None:
        self.stream = stream
        self.traffic = traffic
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        for block in self.stream:
            if self.traffic.stop.is_set():
                raise Stopped("Stopped.")
            yield block
            self.sent += len(block)
            self.traffic.on_sent(len(block))

    def take_back(self) -> None:
        """Nothing of it arrived."""
        self.traffic.on_sent(-self.sent)


class PatientTransport(httpx.BaseTransport):
    """Sends requests, with patience."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._transports: dict[tuple[str, str], httpx.HTTPTransport] = {}
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The reply, whole. Raises HubRefused, HubUnavailable, ReplyLost, Stopped."""
        policy, clock = self.traffic.policy, self.traffic.clock
        is_commit = request.method == "POST" and "/commit/" in request.url.path
        body = self.traffic.body_of(request)
        start = body.tell() if body is not None else 0
        plain, failures = request.stream, 0
        while True:
            if self.traffic.stop.is_set():
                raise Stopped("Stopped.")
            counted = _Counted(plain, self.traffic) if body is not None else None
            request.stream = counted if counted is not None else plain
            if body is not None:
                body.seek(start)
            pause = None
            try:
                reply = self._send(request)
            except httpx.TransportError as error:
                what = f"{request.url.host} does not answer ({self.traffic.secrets.clean(str(error)) or type(error).__name__})"
                lost = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol))
            else:
                if reply.status_code in STOP:
                    raise HubRefused(f"{request.url.host} refuses ({reply.status_code}): {self._reason(reply)}.")
                if reply.status_code not in PASSING:
                    return reply
                what = f"{request.url.host} answers {reply.status_code}: {self._reason(reply)}"
                lost = reply.status_code != 429
                pause = asked_pause(reply.headers, clock.now())
            if counted is not None:
                counted.take_back()
            if is_commit and lost:
                raise ReplyLost(what)
            failures += 1
            if failures >= policy.attempts:
                raise HubUnavailable(f"{what}, {failures} times in a row: run the same command again later, it goes on from here.")
            if pause is not None and pause > policy.longest_wait:
                raise HubUnavailable(f"{what}, and asks to wait {human_seconds(pause)}: run the same command again then, it goes on from here.")
            seconds = pause if pause is not None else policy.pause(failures)
            self.traffic.on_wait(f"{what}; trying again in {human_seconds(seconds)} ({failures + 1} of {policy.attempts})")
            clock.sleep(seconds, self.traffic.stop)

    def _send(self, request: httpx.Request) -> httpx.Response:
        place = (request.url.scheme, request.url.host)
        with self._lock:
            if place not in self._transports:
                self._transports[place] = httpx.HTTPTransport(verify=_certificates(), proxy=_proxy(request.url) or None)
            transport = self._transports[place]
        reply = transport.handle_request(request)
        data = bytearray()
        try:
            # Read here, so that a connection that breaks in the middle of a reply is settled here as well.
            for block in reply.stream:  # type: ignore[union-attr]
                data += block
                if len(data) > REPLY_LIMIT:
                    raise HubRefused(f"{request.url.host} sends a reply of more than {REPLY_LIMIT} bytes, which is none that was asked for.")
        finally:
            reply.close()
        return httpx.Response(reply.status_code, headers=reply.headers, stream=httpx.ByteStream(bytes(data)), request=request, extensions=reply.extensions)

    def _reason(self, reply: httpx.Response) -> str:
        """What the host says itself: the hub's own header, an ``error`` in JSON, or nothing better than the status in words."""
        text = reply.headers.get("x-error-message", "")
        if not text:
            with contextlib.suppress(Exception):
                reply.read()
                if match := re.search(r'"error"\s*:\s*"((?:[^"\\]|\\.)*)"', reply.text):
                    text = match[1]
        return self.traffic.secrets.clean(text).rstrip(".") or reply.reason_phrase or "no reason given"

    def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            transport.close()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Whom to trust; loaded once, that takes a while."""
    return httpx.create_ssl_context()


def _proxy(url: httpx.URL) -> str:
    """The proxy that the environment names for ``url``, or "": a client with a transport of its own does not look."""
    if proxy_bypass(url.host):
        return ""
    proxies = getproxies()
    return proxies.get(url.scheme) or proxies.get("all") or ""


def client(traffic: Traffic) -> httpx.Client:
    """The client that the hub's library is to use."""
    timeout = httpx.Timeout(traffic.policy.reply_timeout, connect=traffic.policy.connect_timeout, pool=None)
    return httpx.Client(transport=PatientTransport(traffic), follow_redirects=True, timeout=timeout)
