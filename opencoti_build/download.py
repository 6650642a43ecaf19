"""Brings one file of known size and sha256 over HTTP: streamed, resumed, checked on the way, moved into the cache when it is right.

The unfinished file lies in ``cache.part(sha256)``; a second run goes on where the first stopped, however it stopped. What has
arrived is hashed anew before it is continued, so a part that something else damaged never becomes a blob. Bytes that are complete and
wrong are kept in ``cache.rejected`` as evidence. A lock per blob makes two runs share one download.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import requests
import urllib3

from . import files
from .cache import Cache
from .console import Console, Meter, human_bytes, human_seconds
from .errors import BusyError, ChecksumError, DiskError, DownloadError, OfflineError, OpencotiError

EVIDENCE_LIMIT = 1 << 20
"""Bytes kept of an answer whose announced length already shows that it is another file."""

_HOPELESS = (
    requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, requests.exceptions.MissingSchema, requests.exceptions.TooManyRedirects,
)  # fmt: skip

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Wanted:
    """The file to bring: a name for messages, its size in bytes, its sha256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Policy:
    """How patient a download is. Times are seconds."""

    attempts: int = 5
    """Tries of one source in a row that bring no new byte."""
    first_pause: float = 1.0
    longest_pause: float = 60.0
    """Also the longest Retry-After that is waited for."""
    connect_timeout: float = 15.0
    read_timeout: float = 60.0
    lock_wait: float = 6 * 3600.0


@dataclass(frozen=True)
class Damage:
    """What lay in a file's place in the cache instead of it, in words, and where that is kept now."""

    found: str
    kept: Path

    def __str__(self) -> str:
        return f"found {self.found}; moved to {self.kept}"


class Candidate(Protocol):
    """A place the file may come from. ``locate`` gives its address; it may ask an index for it and raise DownloadError."""

    @property
    def label(self) -> str: ...

    def locate(self) -> str: ...


@dataclass(frozen=True)
class Address:
    """A candidate whose address is known."""

    url: str

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.url

    def locate(self) -> str:
        """The address itself."""
        return self.url


class _Refused(Exception):
    """This candidate will not do; the next may. ``mismatch``: it delivered other bytes than the pinned ones."""

    def __init__(self, reason: str, *, mismatch: bool = False) -> None:
        super().__init__(reason)
        self.mismatch = mismatch


class _Passing(Exception):
    """A trouble that may pass; ``pause`` is what the server asked for, in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


@dataclass
class Downloader:
    """Brings files into ``cache``. ``session`` and ``sleep`` are there for tests and for a session with the user's settings."""

    cache: Cache
    console: Console
    offline: bool = False
    policy: Policy = Policy()
    session: requests.Session = field(default_factory=requests.Session)
    sleep: Callable[[float], None] = time.sleep

    def fetch(self, wanted: Wanted, candidates: Sequence[Candidate], *, hint: str = "invoke vendor fetch") -> Path:
        """The verified file in the cache, brought from the first candidate that delivers it.

        A candidate that delivers wrong bytes gets a second chance after all others had their turn: caches on the way are known to
        serve a stale file now and then. ``hint`` is the command that OfflineError names.

        Raises ChecksumError when bytes came but never the right ones, DownloadError when none came, OfflineError, DiskError, BusyError.
        """
        blob = self.cache.blob(wanted.sha256)
        if self.have(wanted):
            return blob
        if self.offline:
            raise OfflineError(f"{wanted.name} is not in the cache and offline was asked for: run '{hint}' once with a network (cache: {self.cache.root}).")
        with self._lock(wanted):
            if self.have(wanted):
                return blob
            with files.disk_errors(blob):
                for folder in (blob.parent, self.cache.part(wanted.sha256).parent, self.cache.rejected("x", "0").parent):
                    folder.mkdir(parents=True, exist_ok=True)
            if damage := self._check(wanted):
                self.console.warn(f"{wanted.name} in the cache is not the pinned file: {damage}; fetching it again")
            self._check_room(wanted)
            return self._from_candidates(wanted, candidates, blob)

    def discover(self, name: str, candidates: Sequence[Candidate], *, limit: int = 4 << 30) -> Wanted:
        """Bring a file whose hash nobody knows yet, into the cache under the hash it has; gives name, size and sha256.

        For new pins only: it trusts what it gets. One try per candidate and no resume. Raises DownloadError, OfflineError, DiskError.
        """
        if self.offline:
            raise OfflineError(f"{name} is not pinned yet and offline was asked for.")
        reports = []
        part = self.cache.part(f"{name}.{os.getpid()}")
        for candidate in candidates:
            digest = hashlib.sha256()
            size = 0
            try:
                url = candidate.locate()
                with files.atomic_file(part, sync=False) as stream, self.console.progress(name, unit="bytes") as meter:
                    for chunk in self._plain(url):
                        size += len(chunk)
                        if size > limit:
                            raise _Refused(f"it has more than {limit} bytes")
                        stream.write(chunk)
                        digest.update(chunk)
                        meter.advance(len(chunk))
            except (_Refused, DownloadError) as refusal:
                reports.append(f"  {candidate.label}: {refusal}")
                continue
            wanted = Wanted(name, size, digest.hexdigest())
            blob = self.cache.blob(wanted.sha256)
            blob.parent.mkdir(parents=True, exist_ok=True)
            self._accept_file(part, blob)
            return wanted
        raise DownloadError(f"{name}: no source delivers it.", details="\n".join(reports))

    def _plain(self, url: str) -> Iterator[bytes]:
        if urlsplit(url).scheme == "file":
            try:
                with file_path(url).open("rb") as source:
                    while block := source.read(files.CHUNK):
                        yield block
            except OSError as error:
                raise _Refused(f"{error.strerror or error}") from error
            return
        try:
            timeout = (self.policy.connect_timeout, self.policy.read_timeout)
            with self.session.get(url, headers={"Accept-Encoding": "identity"}, stream=True, timeout=timeout) as response:
                if response.status_code != 200:
                    raise _Refused(f"the server answers {response.status_code}")
                yield from response.iter_content(files.CHUNK >> 2)
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise _Refused(_reason(error)) from error

    def have(self, wanted: Wanted) -> bool:
        """Whether the cache holds the file. Its bytes were verified when it was put there; here only the size is looked at."""
        try:
            information = self.cache.blob(wanted.sha256).stat()
        except OSError:
            return False
        return stat.S_ISREG(information.st_mode) and information.st_size == wanted.size

    def check(self, wanted: Wanted) -> Damage | None:
        """Hash the file in the cache again; whatever lies there instead of it is moved aside, so the next fetch brings it anew.

        None when it is right, or when nothing is there. Raises DiskError when what is wrong cannot be moved, BusyError.
        """
        with self._lock(wanted):
            return self._check(wanted)

    def _check(self, wanted: Wanted) -> Damage | None:
        blob = self.cache.blob(wanted.sha256)
        kind = files.what_lies_at(blob)
        if not kind:
            return None
        if kind != "a file":
            return Damage(kind, files.put_aside(blob, self.cache.rejected(wanted.name, kind.split()[1])))
        try:
            with self.console.progress(wanted.name, wanted.size, unit="bytes") as meter:
                actual = files.sha256_file(blob, progress=meter.advance)
            size = blob.stat().st_size
        except OSError as error:
            return Damage(f"a file that cannot be read ({error.strerror or error})", files.put_aside(blob, self.cache.rejected(wanted.name, "unreadable")))
        if actual == wanted.sha256:
            return None
        return Damage(f"{size} bytes, sha256 {actual}", self.reject(wanted, blob, actual))

    def reject(self, wanted: Wanted, path: Path, sha256: str) -> Path:
        """Move bytes that are not the wanted ones aside; gives the place they are kept at."""
        place = self.cache.rejected(wanted.name, sha256)
        with files.disk_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
        return place

    @contextlib.contextmanager
    def _lock(self, wanted: Wanted) -> Iterator[None]:
        name = f"blob-{wanted.sha256}"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.cache.lock(name))
            except BusyError:
                self.console.info(f"    {wanted.name}: another run is downloading it, waiting for that one")
                stack.enter_context(self.cache.lock(name, wait_seconds=self.policy.lock_wait))
            yield

    def _check_room(self, wanted: Wanted) -> None:
        part = self.cache.part(wanted.sha256)
        present = part.stat().st_size if part.exists() else 0
        free = shutil.disk_usage(part.parent).free
        if free < wanted.size - present:
            needs = human_bytes(wanted.size - present)
            raise DiskError(f"{wanted.name} needs {needs} more, {part.parent} has {human_bytes(free)} free: make room, or set OPENCOTI_CACHE to another folder.")

    def _from_candidates(self, wanted: Wanted, candidates: Sequence[Candidate], blob: Path) -> Path:
        part = self.cache.part(wanted.sha256)
        if _size(part) == wanted.size and files.sha256_file(part) == wanted.sha256:
            self._accept(wanted, blob)  # a run was killed between the last byte and the rename
            return blob
        reports: list[str] = []
        mismatch = False
        again: list[Candidate] = []
        with self.console.progress(wanted.name, wanted.size, unit="bytes") as meter:
            for chance, turn in enumerate((candidates, again)):
                for candidate in tuple(turn):
                    try:
                        self._from_one(wanted, candidate, meter)
                    except _Refused as refusal:
                        reports.append(f"  {candidate.label}\n    {refusal}")
                        mismatch |= refusal.mismatch
                        if refusal.mismatch and chance == 0:
                            again.append(candidate)
                        self.console.warn(f"{wanted.name} from {candidate.label}: {refusal}")
                        continue
                    self._accept(wanted, blob)
                    return blob
        expected = f"  expected: {wanted.size} bytes, sha256 {wanted.sha256}"
        details = "\n".join(["tried in this order:", *reports, expected]) if reports else "no source is known for it"
        if mismatch:
            kept = self.cache.rejected("x", "0").parent
            raise ChecksumError(f"{wanted.name}: no source delivers the pinned bytes; compare the files kept in {kept} with the pin.", details=details)
        raise DownloadError(f"{wanted.name}: no source delivers it; check the network and run the same command again (it resumes).", details=details)

    def _accept(self, wanted: Wanted, blob: Path) -> None:
        part = self.cache.part(wanted.sha256)
        self._accept_file(part, blob)
        _notes(part).unlink(missing_ok=True)

    @staticmethod
    def _accept_file(part: Path, blob: Path) -> None:
        with files.disk_errors(blob):
            if blob.is_dir():
                raise OSError(errno.EISDIR, "a folder is in the way; remove it")
            _fsync(part)
            os.replace(part, blob)
            files.fsync_directory(blob.parent)

    def _from_one(self, wanted: Wanted, candidate: Candidate, meter: Meter) -> None:
        """Complete the part from one candidate, or raise _Refused."""
        failures = 0
        fresh_start = False
        while True:
            before = _size(self.cache.part(wanted.sha256))
            try:
                url = candidate.locate()
                resumed = self._attempt(wanted, url, meter)
            except OpencotiError as error:
                if isinstance(error, DiskError):
                    raise
                raise _Refused(f"{error.message} {error.details}".strip()) from error
            except _Passing as trouble:
                failures = 0 if _size(self.cache.part(wanted.sha256)) > before else failures + 1
                if failures >= self.policy.attempts:
                    raise _Refused(f"{trouble} ({failures} tries)") from trouble
                pause = trouble.pause if trouble.pause is not None else min(self.policy.longest_pause, self.policy.first_pause * 2.0 ** max(0, failures - 1))
                if pause > self.policy.longest_pause:
                    raise _Refused(f"{trouble}; it asks to wait {human_seconds(pause)}") from trouble
                meter.set(_size(self.cache.part(wanted.sha256)), note=f"{trouble}, next try in {human_seconds(pause)}")
                self.sleep(pause)
                continue
            part = self.cache.part(wanted.sha256)
            actual = files.sha256_file(part) if resumed is None else resumed
            if actual == wanted.sha256:
                return
            if before and not fresh_start:
                # The first bytes may stem from another file of the same address: that is no one's fault, begin anew once.
                fresh_start = True
                self._discard(part)
                continue
            size = part.stat().st_size
            place = self.reject(wanted, part, actual)
            _notes(part).unlink(missing_ok=True)
            raise _Refused(f"got {size} bytes, sha256 {actual} (kept as {place})", mismatch=True)

    def _discard(self, part: Path) -> None:
        with files.disk_errors(part):
            part.unlink(missing_ok=True)
            _notes(part).unlink(missing_ok=True)

    def _attempt(self, wanted: Wanted, url: str, meter: Meter) -> str | None:
        """One request. Returns the sha256 of the complete part (None: to be computed). Raises _Passing, _Refused, DiskError."""
        part = self.cache.part(wanted.sha256)
        have = _size(part)
        if have > wanted.size:
            self._discard(part)
            have = 0
        if have == wanted.size:
            return None
        if urlsplit(url).scheme == "file":
            return self._copy(wanted, url, part, meter)
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            notes = _read_notes(part)
            if notes.get("url") == url and notes.get("validator"):
                headers["If-Range"] = notes["validator"]
        try:
            with self.session.get(url, headers=headers, stream=True, timeout=(self.policy.connect_timeout, self.policy.read_timeout)) as response:
                return self._receive(wanted, url, response, have, meter)
        except requests.exceptions.SSLError as error:
            raise _Refused(f"the connection is not trusted: {_reason(error)}") from error
        except _HOPELESS as error:
            raise _Refused(_reason(error)) from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, TimeoutError, ConnectionError) as error:
            raise _Passing(_reason(error)) from error

    def _receive(self, wanted: Wanted, url: str, response: requests.Response, have: int, meter: Meter) -> str | None:
        part = self.cache.part(wanted.sha256)
        status = response.status_code
        if status == 416 and have:
            self._discard(part)
            raise _Passing("the server no longer has the range to resume at", 0.0)
        if status in (408, 425, 429) or status >= 500:
            raise _Passing(f"the server answers {status} {response.reason or ''}".rstrip(), _retry_after(response.headers.get("Retry-After")))
        if status not in (200, 206):
            raise _Refused(f"the server answers {status} {response.reason or ''}".rstrip())
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            return self._receive_encoded(wanted, response, encoding, part, meter)
        start = 0
        if status == 206:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not match or int(match[1]) != have or match[3] not in ("*", str(wanted.size)):
                self._discard(part)
                if match and match[3] not in ("*", str(wanted.size)):
                    raise _Refused(f"the server announces a file of {match[3]} bytes", mismatch=True)
                raise _Passing("the server sends another range than was asked for", 0.0)
            start = have
        announced = response.headers.get("Content-Length", "")
        total = start + int(announced) if announced.isdigit() else None
        limit = wanted.size if total is None or total <= wanted.size else min(wanted.size, EVIDENCE_LIMIT)
        digest = hashlib.sha256()
        with files.disk_errors(part), part.open("r+b" if start else "wb") as stream:
            if start:
                _feed(digest, stream)
            self._note(part, url, response)
            received = start
            meter.set(received, wanted.size, note="")
            chunks = response.raw.stream(files.CHUNK >> 2, decode_content=False)
            try:
                while True:
                    try:
                        chunk = next(chunks, b"")
                    except (urllib3.exceptions.HTTPError, OSError) as error:  # of the network, not of the disk
                        raise _Passing(_reason(error)) from error
                    if not chunk:
                        break
                    chunk = chunk[: limit + 1 - received]
                    stream.write(chunk)
                    digest.update(chunk)
                    received += len(chunk)
                    meter.advance(len(chunk))
                    if received > limit:
                        break
            finally:
                stream.flush()
        if received > limit:
            place = self.reject(wanted, part, digest.hexdigest())
            _notes(part).unlink(missing_ok=True)
            says = f"announces {total} bytes" if total is not None and total != wanted.size else f"sends more than {wanted.size} bytes"
            raise _Refused(f"the server {says} instead of {wanted.size} (its beginning is kept as {place})", mismatch=True)
        if total is not None and received < total:
            raise _Passing(f"the connection ended after {received} of {total} bytes")
        if received < wanted.size and total is None and "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
            # Such an answer ends with the connection: whether it was whole cannot be told.
            raise _Passing(f"the connection ended after {received} of {wanted.size} bytes")
        return digest.hexdigest()

    def _receive_encoded(self, wanted: Wanted, response: requests.Response, encoding: str, part: Path, meter: Meter) -> str:
        """A body with Content-Encoding although none was asked for.

        Some servers compress on the way; others label a .gz file so and send its own bytes. Both readings are tried.
        """
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise _Refused(f"the server sends Content-Encoding {encoding}, which was not asked for")
        self._discard(part)
        raw = part.with_name(part.name + ".encoded")
        limit = wanted.size + wanted.size // 64 + (1 << 16)
        digest = hashlib.sha256()
        received = 0
        try:
            with files.disk_errors(raw), raw.open("wb") as stream:
                meter.set(0, wanted.size, note="")
                for chunk in response.raw.stream(files.CHUNK >> 2, decode_content=False):
                    received += len(chunk)
                    if received > limit:
                        raise _Refused(f"the server sends more than {wanted.size} bytes", mismatch=True)
                    stream.write(chunk)
                    digest.update(chunk)
                    meter.set(min(received, wanted.size))
            if digest.hexdigest() == wanted.sha256:
                os.replace(raw, part)
                return wanted.sha256
            plain = hashlib.sha256()
            size = 0
            with files.disk_errors(part), raw.open("rb") as source, part.open("wb") as target:
                for block in _decoded(source):
                    size += len(block)
                    if size > wanted.size:
                        raise _Refused(f"the server sends more than {wanted.size} bytes", mismatch=True)
                    target.write(block)
                    plain.update(block)
            return plain.hexdigest()
        except zlib.error as error:
            os.replace(raw, part)
            self.console.warn(f"{wanted.name}: the answer says Content-Encoding {encoding} and is not ({error})")
            return digest.hexdigest()
        except _Refused:
            part.unlink(missing_ok=True)
            raise
        finally:
            raw.unlink(missing_ok=True)

    def _copy(self, wanted: Wanted, url: str, part: Path, meter: Meter) -> str:
        source = file_path(url)
        digest = hashlib.sha256()
        received = 0
        try:
            opened = source.open("rb")
        except OSError as error:
            raise _Refused(f"{source}: {error.strerror or error}") from error
        meter.set(0, wanted.size, note="")
        with opened, files.disk_errors(part), part.open("wb") as target:
            while (block := opened.read(files.CHUNK)) and received <= wanted.size:
                block = block[: wanted.size + 1 - received]
                target.write(block)
                digest.update(block)
                received += len(block)
                meter.advance(len(block))
        return digest.hexdigest()

    def _note(self, part: Path, url: str, response: requests.Response) -> None:
        """Remember what If-Range needs: a strong ETag, else the time of the last change (RFC 9110, 13.1.5)."""
        tag = response.headers.get("ETag", "")
        validator = tag if tag.startswith('"') else "" if tag else response.headers.get("Last-Modified", "")
        with contextlib.suppress(OSError):
            _notes(part).write_text(json.dumps({"url": url, "validator": validator}), "utf-8")


def file_path(url: str) -> Path:
    """The local path of a ``file:`` address."""
    return Path(url2pathname(unquote(urlsplit(url).path) if os.name != "nt" else urlsplit(url).path))


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_notes(part: Path) -> dict[str, str]:
    try:
        notes = json.loads(_notes(part).read_bytes()[:65536])
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in notes.items() if isinstance(value, str)} if isinstance(notes, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _feed(digest: hashlib._Hash, stream: IO[bytes]) -> None:
    while block := stream.read(files.CHUNK):
        digest.update(block)


def _decoded(source: IO[bytes]) -> Iterator[bytes]:
    """The plain bytes of a gzip or zlib stream, in steps of bounded size. Raises zlib.error when it is damaged or cut short."""
    engine = zlib.decompressobj(wbits=47)  # 32 + 15: recognises the header of either
    pending = b""
    while True:
        pending = pending or source.read(files.CHUNK)
        if not pending:
            break
        yield engine.decompress(pending, files.CHUNK)
        pending = engine.unconsumed_tail
        if engine.eof:
            return
    raise zlib.error("it is cut short")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3); None when absent or senseless."""
    if not text:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _reason(error: BaseException) -> str:
    """The innermost cause of a network error, without the library's wrapping."""
    text = str(error) or type(error).__name__
    inner = error
    for _ in range(8):
        nested = next((argument for argument in inner.args if isinstance(argument, BaseException)), None)
        following = inner.__cause__ or inner.__context__ or nested or getattr(inner, "reason", None)
        if not isinstance(following, BaseException):
            break
        inner = following
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return (str(inner) or text).splitlines()[0][:200]
