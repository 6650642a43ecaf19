"""Files: whole or absent under their final name, hashed in streams, locked against a second run."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .errors import BusyError, DiskError, OpencotiError

CHUNK = 1 << 20
"""Bytes per read when streaming a file."""


def _disk_error(error: OSError, path: Path) -> DiskError:
    if error.errno == errno.ENOSPC:
        return DiskError(f"No space left while writing {path}: free some and run the same command again.")
    return DiskError(f"Cannot write {path}: {error.strerror or error}.")


@contextlib.contextmanager
def disk_errors(path: Path, *, reading: bool = False) -> Iterator[None]:
    """Turn an OSError of the block into the DiskError that names ``path``."""
    try:
        yield
    except OSError as error:
        if reading:
            raise DiskError(f"Cannot read {error.filename or path}: {error.strerror or error}.") from error
        raise _disk_error(error, path) from error


def fsync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` durable; does nothing where directories cannot be synced (Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o644, sync: bool = True) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes ``path`` when the block ends well and vanishes when it does not.

    The temporary name is unique and lies in the same directory, so two writers never share it and the rename is atomic.
    The file is readable as well (``w+b``). Raises DiskError when the file system refuses.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with open(name, "w+b", opener=lambda *_: handle) as stream:
            yield stream
            stream.flush()
            os.chmod(temporary, mode)
            if sync:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
        if sync:
            fsync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _disk_error(error, path) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a whole file atomically; an equal file is left alone, so its modification time tells of a real change."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == mode:
            return
    with atomic_file(path, mode=mode) as stream:
        stream.write(data)


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """``write_bytes`` of UTF-8 text with LF line ends."""
    write_bytes(path, text.encode("utf-8"), mode=mode)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what lies at ``path`` (a link itself); None for nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a fresh directory that becomes ``path`` when the block ends well; an existing ``path`` is replaced.

    One that another run put there meanwhile stays, and the fresh one goes: both were made for the same name, and the other run may be reading
    its own already. Left-overs of killed runs (``.NAME.*.tmp``) older than a day are removed.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent, f".{path.name}.*.tmp")
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        before = _identity(path)
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        if _identity(path) == before:
            old = None
            if before is not None:
                old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old.tmp", dir=path.parent))
                with contextlib.suppress(FileNotFoundError):  # another run was quicker to take it away
                    os.replace(path, old / "content")
            try:
                os.replace(temporary, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)  # still there where another's stays
        fsync_directory(path.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _disk_error(error, path) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def what_lies_at(path: Path) -> str:
    """In words for a message: "a file", "a folder", "a link to nowhere", "a device or a pipe"; empty for nothing. Links are followed."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link to nowhere" if os.path.lexists(path) else ""
    return "a file" if stat.S_ISREG(mode) else "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"


def put_aside(path: Path, place: Path) -> Path:
    """Move whatever lies at ``path`` to ``place``, or, where something lies there already, to that name with a number; gives the new place.

    A link is moved itself. Raises DiskError when the file system refuses.
    """
    with disk_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        names = (place, *(place.with_name(f"{place.name}.{number}") for number in range(2, 10000)))
        kept = next(name for name in names if not os.path.lexists(name))
        os.replace(path, kept)
    return kept


def remove_stale(directory: Path, pattern: str, *, age_seconds: float = 86400.0) -> None:
    """Remove temporary files and directories matching ``pattern`` that a killed run left behind."""
    limit = time.time() - age_seconds
    for left_over in directory.glob(pattern):
        with contextlib.suppress(OSError):
            if left_over.lstat().st_mtime < limit:
                if left_over.is_dir() and not left_over.is_symlink():
                    shutil.rmtree(left_over, ignore_errors=True)
                else:
                    left_over.unlink(missing_ok=True)


def read_limited(path: Path, limit: int, what: str, error: type[OpencotiError]) -> bytes:
    """The bytes of a small file. Raises ``error`` when it cannot be read, or is larger than ``limit`` bytes and so no ``what``."""
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as problem:
        raise error(f"Cannot read {path}: {getattr(problem, 'strerror', None) or problem}.") from problem
    if len(data) > limit:
        raise error(f"{path} is larger than {limit} bytes: that is no {what}.")
    return data


def sha256_file(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Hex sha256 of a file; ``progress`` gets the number of bytes of every step."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


@contextlib.contextmanager
def lock(path: Path, *, wait_seconds: float = 0.0, what: str = "this") -> Iterator[IO[bytes]]:
    """Hold an exclusive advisory lock on ``path``; the kernel drops it when the process dies, however it dies.

    Yields the locked file: a child that inherits it holds the lock as well, for as long as it lives.

    Raises BusyError when another process still holds it after ``wait_seconds``.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")
    with stream:
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(stream):
            if time.monotonic() >= deadline:
                raise BusyError(f"Another run is busy with {what} (lock {path}): wait for it, or end it.")
            time.sleep(0.1)
        yield stream


if os.name == "nt":  # pragma: no cover - exercised on Windows only
    import msvcrt

    def _try_lock(stream: IO[bytes]) -> bool:
        try:
            stream.seek(0)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(stream: IO[bytes]) -> bool:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
