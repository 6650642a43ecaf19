"""Writes a large file while a second thread reads back what lies in it and computes its sha256.

Copies go from file to file inside the kernel where the system can do that; hashing costs no time of its own as long as there is a second
processor, and the sum is of the bytes that the file really holds.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable
from typing import IO

_STEP = 8 << 20
_BLOCK = 1 << 20
_CANNOT = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
"""copy_file_range(2) cannot do it for these two files; reading and writing can."""


class HashingWriter:
    """Appends to ``stream``, an empty file whose ``name`` is its path. ``advance`` gets the number of bytes of every step."""

    def __init__(self, stream: IO[bytes], advance: Callable[[int], None]) -> None:
        stream.flush()
        self.position = 0
        self._target = stream.fileno()
        self._reader = open(stream.name, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._advance = advance
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._failure: BaseException | None = None
        self._ended = False
        self._turn = threading.Condition()
        self._in_kernel = hasattr(os, "copy_file_range")
        self._thread = threading.Thread(target=self._hash, name="sha256", daemon=True)
        self._thread.start()

    def copy(self, source: IO[bytes], count: int) -> int:
        """Append ``count`` bytes of a file that has just been opened; returns how many there were, fewer when it is shorter."""
        left = count
        while left and (done := self._step(source, min(left, _STEP))):
            left -= done
            self._grown(done)
        return count - left

    def write(self, data: bytes) -> None:
        """Append a few bytes, such as a header."""
        self._put(data)
        self._grown(len(data))

    def digest(self) -> str:
        """sha256 of everything written so far. Raises OSError when it cannot be read back."""
        with self._turn:
            self._turn.wait_for(lambda: self._hashed == self.position or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._digest.copy().hexdigest()

    def close(self) -> None:
        """End the thread; the file stays open."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()
        self._thread.join()
        self._reader.close()

    def _step(self, stream: IO[bytes], count: int) -> int:
        if self._in_kernel:
            try:
                if done := os.copy_file_range(stream.fileno(), self._target, count):
                    return done
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
            self._in_kernel = False  # some file systems answer 0 instead of an error
        data = stream.read(min(count, _BLOCK))
        self._put(data)
        return len(data)

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._target, view) :]

    def _grown(self, count: int) -> None:
        with self._turn:
            self.position += count
            self._turn.notify_all()
        self._advance(count)

    def _hash(self) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(lambda: self._ended or self._hashed < self.position)
                    if self._ended:
                        return
                    left = self.position - self._hashed
                count = self._reader.readinto(buffer[: min(left, _BLOCK)])  # type: ignore[attr-defined]
                if not count:
                    raise OSError(errno.EIO, "bytes that were written cannot be read back")
                self._digest.update(buffer[:count])
                with self._turn:
                    self._hashed += count
                    if self._hashed == self.position:
                        self._turn.notify_all()
        except BaseException as error:  # carried over to the caller's thread
            with self._turn:
                self._failure = error
                self._turn.notify_all()
        finally:
            with contextlib.suppress(Exception):
                buffer.release()
