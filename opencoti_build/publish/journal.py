"""Remembers what has been uploaded to a repository, so that a run that was killed goes on instead of asking and sending again.

A text file in the cache, one line an upload: sha256 in hex, a space, the size in bytes. Each line is written and synced after the hub has
confirmed the upload; one that a kill tore is not believed. The hub has the last word all the same: it is asked for every
object before the commit, and what it has lost is sent anew.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..cache import Cache, digest_of

_LINE = re.compile(rb"([0-9a-f]{64}) ([0-9]{1,18})")
_SIZE_LIMIT = 16 << 20


@dataclass(frozen=True)
class Journal:
    """The journal at ``path``."""

    path: Path

    @classmethod
    def of(cls, cache: Cache, endpoint: str, repository: str) -> Journal:
        """The journal of one repository of one hub."""
        return cls(cache.root / "publish" / f"{digest_of([endpoint, repository])[:16]}.journal")

    def uploaded(self) -> dict[str, int]:
        """sha256 to size of every upload it remembers; lines that are damaged are left out, and so is a file that is no journal."""
        try:
            with self.path.open("rb") as stream:
                data = stream.read(_SIZE_LIMIT)
        except OSError:
            return {}
        # Whatever follows the last line end was torn off by a kill.
        lines = data.split(b"\n")[:-1]
        return {match[1].decode("ascii"): int(match[2]) for line in lines if (match := _LINE.fullmatch(line))}

    def add(self, sha256: str, size: int) -> None:
        """Remember an upload. Raises DiskError."""
        with files.disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as stream:
                end = stream.seek(0, os.SEEK_END)
                torn = False
                if end:
                    stream.seek(end - 1)
                    torn = stream.read(1) != b"\n"
                # A torn line must not become one that can be believed.
                stream.write((b" torn\n" if torn else b"") + f"{sha256} {size}\n".encode("ascii"))
                stream.flush()
                os.fsync(stream.fileno())

    def forget(self) -> None:
        """Remove it: the commit holds what it remembered."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
