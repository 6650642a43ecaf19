"""Unpacks archives from outside without trusting them, and computes the git tree id of a folder.

Formats: tar (plain, gzip, bzip2, xz; POSIX.1-2001 and GNU headers) and ZIP (APPNOTE 6.3; stored and deflated), which
includes PyPI's sdists and wheels. Only files come out: a folder exists because a file lies in it. Modes are 644, or 755 where the archive says the
owner may execute; times are those of the unpacking. Everything else is refused: absolute names, ``..``, names that differ only in
case, devices, hard links, encryption, more bytes or files than allowed, and symbolic links unless asked for and pointing inside.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import io
import lzma
import os
import posixpath
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from .errors import ArchiveError, DiskError
from .files import CHUNK, disk_errors

FILE_LIMIT = 500_000
"""Members an archive may have at most, whatever the caller allows."""

_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile,
    EOFError, struct.error, NotImplementedError, ValueError, OverflowError,
)  # fmt: skip
"""What the standard library raises for damaged input."""

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\:]")


@dataclass(frozen=True)
class Limits:
    """What unpacking may yield: ``size`` bytes of files, ``files`` of them."""

    size: int
    files: int = FILE_LIMIT


@dataclass(frozen=True)
class Unpacked:
    """What came out: number of files, their bytes, and the paths of those that are executable."""

    files: int
    size: int
    executables: frozenset[str]


def unpack(
    archive: Path,
    directory: Path,
    *,
    limits: Limits,
    folder: str = "",
    executables: Collection[str] = (),
    links: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Unpacked:
    """Write the files of ``archive`` that lie below ``folder`` into the empty ``directory``.

    ``executables`` are paths (relative to ``directory``) that become executable whatever the archive says; each must be there.
    ``links`` allows relative symbolic links that stay inside. ``progress`` gets the bytes of every step.
    Raises ArchiveError for whatever is refused or damaged, DiskError when the file system refuses.
    """
    writer = _Writer(directory, limits, folder, set(executables), links, progress)
    try:
        with archive.open("rb") as stream:
            magic = stream.read(6)
            stream.seek(0)
            (_read_zip if magic[:2] == b"PK" else _read_tar)(stream, magic, writer)
    except _DAMAGED as error:
        raise ArchiveError(f"{archive.name} is damaged or of a kind that is not supported: {str(error) or type(error).__name__}.") from error
    except RuntimeError as error:  # zipfile: encrypted
        raise ArchiveError(f"{archive.name} cannot be read: {error}.") from error
    except ArchiveError as error:
        raise ArchiveError(f"{archive.name} is refused: {error.message}") from error
    except OSError as error:
        if error.errno in (None, errno.EINVAL, errno.EOVERFLOW):  # bz2's way to say so; a seek to a senseless offset
            raise ArchiveError(f"{archive.name} is damaged: {error}.") from error
        raise DiskError(f"Cannot read {archive}: {error.strerror or error}.") from error
    writer.finish(archive.name)
    return Unpacked(writer.files, writer.size, frozenset(writer.executable))


class _Writer:
    """Takes members by name, refuses the bad ones and writes the rest."""

    def __init__(self, directory: Path, limits: Limits, folder: str, executables: set[str], links: bool, progress: Callable[[int], None] | None) -> None:
        self.directory = directory
        self.limits = limits
        self.prefix = f"{folder}/" if folder else ""
        self.wanted = executables
        self.links_allowed = links
        self.progress = progress
        self.files = self.size = self.members = 0
        self.executable: set[str] = set()
        self.links: dict[str, str] = {}
        self.spelling: dict[str, tuple[str, bool]] = {}
        self.made: set[str] = set()

    def path_of(self, name: str) -> str | None:
        """The checked path below the folder, or None when the member lies outside it."""
        self.members += 1
        if self.members > FILE_LIMIT:
            raise ArchiveError(f"it has more than {FILE_LIMIT} members.")
        plain = name[2:] if name.startswith("./") else name
        parts = plain.split("/")
        if _FORBIDDEN.search(plain) or plain.startswith("/") or any(part in ("", ".", "..") for part in parts):
            raise ArchiveError(f"the name {name!r} is not a plain relative path.")
        if len(plain.encode("utf-8", "surrogateescape")) > 4096 or any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts):
            raise ArchiveError(f"the name {name[:60]!r}... is too long.")
        if not plain.startswith(self.prefix):
            return None
        return plain[len(self.prefix) :]

    def _claim(self, path: str) -> None:
        """Refuse what another file system would take for an earlier name: other case, other Unicode form, a file as a folder."""
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            part_path = "/".join(parts[:depth])
            is_file = depth == len(parts)
            key = unicodedata.normalize("NFC", part_path).casefold()
            before = self.spelling.get(key)
            if before is None:
                self.spelling[key] = (part_path, is_file)
            elif before[0] != part_path:
                raise ArchiveError(f"the names {before[0]!r} and {part_path!r} are one on some systems.")
            elif is_file or before[1]:
                raise ArchiveError(f"the name {part_path!r} stands twice.")

    def file(self, path: str, size: int, executable: bool, chunks: Iterator[bytes]) -> None:
        """Write one file of exactly ``size`` bytes."""
        self._claim(path)
        self._count()
        if size < 0 or size > self.limits.size - self.size:
            raise ArchiveError(f"it unpacks to more than the {self.limits.size} bytes that are expected ({path}).")
        executable = executable or path in self.wanted
        target = self._target(path)
        written = 0
        with disk_errors(target):
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0), 0o700)
        try:
            for chunk in chunks:
                written += len(chunk)
                if written > size:
                    break
                with disk_errors(target):
                    _write_all(handle, chunk)
                if self.progress is not None:
                    self.progress(len(chunk))
        finally:
            os.close(handle)
        with disk_errors(target):
            os.chmod(target, 0o755 if executable else 0o644)
        if written != size:
            raise ArchiveError(f"{path} has another size than the archive says.")
        self.size += size
        if executable:
            self.executable.add(path)

    def link(self, path: str, target: str) -> None:
        """Remember a symbolic link; it is made at the end, so nothing is ever written through one."""
        if not self.links_allowed:
            raise ArchiveError(f"{path} is a symbolic link.")
        self._claim(path)
        self._count()
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not target or _FORBIDDEN.search(target) or target.startswith("/") or inside == ".." or inside.startswith("../"):
            raise ArchiveError(f"{path} is a symbolic link that points outside.")
        self.links[path] = target
        self.size += len(target.encode())

    def _count(self) -> None:
        self.files += 1
        if self.files > self.limits.files:
            raise ArchiveError(f"it has more than the {self.limits.files} files that are expected.")

    def _target(self, path: str) -> Path:
        parent, _, name = path.rpartition("/")
        folder = self.directory / parent
        if parent not in self.made:
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self.made.add(parent)
        return folder / name

    def finish(self, archive: str) -> None:
        """Make the links; refuse an empty result and missing executables."""
        if not self.files:
            raise ArchiveError(f"{archive} has no file below {self.prefix or 'its root'}.")
        if missing := sorted(self.wanted - self.executable):
            raise ArchiveError(f"{archive} lacks {missing[0]}, which the pin names as a program.")
        for path, target in self.links.items():
            # ``..`` behind another link would start from that link's target, so the look at the spelling alone is not enough.
            if any(place in self.links for place in _passed(path, target)):
                raise ArchiveError(f"{archive} is refused: {path} is a symbolic link through another one.")
            place = self._target(path)
            with disk_errors(place):
                place.symlink_to(target)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _passed(path: str, target: str) -> Iterator[str]:
    """The folders that following a link goes through, before its last step."""
    place = path.split("/")[:-1]
    for part in target.split("/")[:-1]:
        if part == "..":
            del place[-1:]
        elif part not in ("", "."):
            place.append(part)
        yield "/".join(place)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _steps(source: IO[bytes]) -> Iterator[bytes]:
    while block := source.read(CHUNK):
        yield block


class _Bounded(io.RawIOBase):
    """A decompressed stream that ends with an error instead of going on for ever."""

    def __init__(self, inner: _Readable, limit: int) -> None:
        self.inner = inner
        self.left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.inner.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise ArchiveError("it unpacks to far more than is expected.")
        buffer[: len(data)] = data
        return len(data)


class _StrictHeader(tarfile.TarInfo):
    """A header that is damaged is an error; tarfile would take it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictHeader:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not any(buf):
                raise  # zeros, or nothing: the regular end
            raise ArchiveError(f"a header is damaged ({error}).") from error


def _read_tar(stream: IO[bytes], magic: bytes, writer: _Writer) -> None:
    with contextlib.ExitStack() as stack:
        opened: _Readable = stream
        if magic[:2] == b"\x1f\x8b":
            opened = stack.enter_context(gzip.GzipFile(fileobj=stream))
        elif magic[:3] == b"BZh":
            opened = stack.enter_context(bz2.BZ2File(stream))
        elif magic[:6] == b"\xfd7zXZ\x00":
            opened = stack.enter_context(lzma.LZMAFile(stream))
        # Headers, padding and members outside the folder come on top of what is written.
        overhead = (64 << 20) + writer.limits.size // 2
        bounded = io.BufferedReader(_Bounded(opened, writer.limits.size + overhead), 1 << 16)
        tar = stack.enter_context(tarfile.open(fileobj=bounded, mode="r|", tarinfo=_StrictHeader, encoding="utf-8", errors="surrogateescape"))
        for member in tar:
            name = member.name.rstrip("/") if member.isdir() else member.name
            if member.isdir() and name in (".", ""):
                continue
            path = writer.path_of(name)
            if member.isdir() or path is None:
                continue
            if member.issym():
                writer.link(path, member.linkname)
                continue
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                raise ArchiveError(f"{name} is neither a file nor a folder.")
            source = tar.extractfile(member)
            assert source is not None
            writer.file(path, member.size, bool(member.mode & 0o100), _steps(source))


def _read_zip(stream: IO[bytes], magic: bytes, writer: _Writer) -> None:
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            # Not filename and is_dir(): zipfile cuts a name at a NUL, and an empty rest has no last character to look at.
            name = entry.orig_filename
            path = writer.path_of(name.rstrip("/"))
            if name.endswith("/") or path is None:
                continue
            mode = entry.external_attr >> 16 if entry.create_system == 3 else 0
            kind = stat.S_IFMT(mode)
            if entry.flag_bits & 0x41:
                raise ArchiveError(f"{path} is encrypted.")
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArchiveError(f"{path} is compressed by method {entry.compress_type}; only stored and deflated are supported.")
            if kind == stat.S_IFLNK:
                if entry.file_size > 4096:
                    raise ArchiveError(f"{path} is a symbolic link with too long a target.")
                writer.link(path, archive.read(entry).decode("utf-8"))
                continue
            if kind not in (0, stat.S_IFREG):
                raise ArchiveError(f"{path} is neither a file nor a folder.")
            with archive.open(entry) as source:
                writer.file(path, entry.file_size, bool(mode & 0o100), _steps(source))


@dataclass(frozen=True)
class TreeDigest:
    """A folder's identity: its git tree id (40 hex digits), number of files, their bytes."""

    tree: str
    files: int
    size: int


def tree_digest(directory: Path, *, executables: Collection[str] | None = None, progress: Callable[[int], None] | None = None) -> TreeDigest:
    """The id that ``git write-tree`` gives for everything below ``directory`` (SHA-1 object format, no filters).

    Executable is what the owner may execute, or, where the file system cannot tell (Windows), what ``executables`` names.
    Folders without files do not count, as in git. Raises ArchiveError for what git cannot hold (a ``.git``, a device), DiskError
    when something cannot be read.
    """
    if executables is None and os.name == "nt":
        executables = ()
    found: list[tuple[bytes, bytes, Path, int]] = []  # path, mode, place, size
    with disk_errors(directory, reading=True):
        _collect(directory, b"", executables, found)
        # Hashing releases the interpreter's lock, so threads help; small files go in batches to keep the overhead down.
        workers = min(8, os.cpu_count() or 1)
        batches = [found[start : start + 64] for start in range(0, len(found), 64)]

        def digest(batch: list[tuple[bytes, bytes, Path, int]]) -> list[bytes]:
            return [_blob_id(place, mode, size) for _, mode, place, size in batch]

        ids: list[bytes] = []
        with ThreadPoolExecutor(workers) as pool:
            for batch, result in zip(batches, pool.map(digest, batches), strict=True):
                ids += result
                if progress is not None:
                    progress(sum(size for *_, size in batch))
    root = _Level({}, {})
    for (path, mode, _, _), blob in zip(found, ids, strict=True):
        *parents, name = path.split(b"/")
        level = root
        for parent in parents:
            level = level.folders.setdefault(parent, _Level({}, {}))
        level.files[name] = (mode, blob)
    return TreeDigest(_tree_id(root).hex(), len(found), sum(size for *_, size in found))


@dataclass(frozen=True)
class _Level:
    folders: dict[bytes, _Level]
    files: dict[bytes, tuple[bytes, bytes]]


def _collect(directory: Path, prefix: bytes, executables: Collection[str] | None, found: list[tuple[bytes, bytes, Path, int]]) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if name.lower() == b".git":
                raise ArchiveError(f"{directory} holds a .git, which cannot be part of a tree.")
            path = prefix + name
            information = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(information.st_mode):
                found.append((path, b"120000", Path(entry.path), information.st_size))
            elif stat.S_ISDIR(information.st_mode):
                _collect(Path(entry.path), path + b"/", executables, found)
            elif stat.S_ISREG(information.st_mode):
                executable = bool(information.st_mode & 0o100) if executables is None else os.fsdecode(path) in executables
                found.append((path, b"100755" if executable else b"100644", Path(entry.path), information.st_size))
            else:
                raise ArchiveError(f"{entry.path} is neither a file nor a folder.")


def _blob_id(place: Path, mode: bytes, size: int) -> bytes:
    if mode == b"120000":
        target = os.fsencode(os.readlink(place))
        return hashlib.sha1(b"blob %d\0" % len(target) + target, usedforsecurity=False).digest()
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    read = 0
    with place.open("rb", buffering=0) as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
            read += len(block)
    if read != size:
        raise ArchiveError(f"{place} changed while it was read.")
    return digest.digest()


def _tree_id(level: _Level) -> bytes:
    """git's tree object: entries sorted by name, a folder's name compared as if it ended in a slash."""
    entries = [(name, b"%s %s\0%s" % (mode, name, blob)) for name, (mode, blob) in level.files.items()]
    entries += [(name + b"/", b"40000 %s\0%s" % (name, _tree_id(inner))) for name, inner in level.folders.items()]
    body = b"".join(entry for _, entry in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).digest()
