"""What a repository holds: paths and the identity of the bytes below them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import files

BLOB_LIMIT = 16 << 20
"""Files up to so many bytes get a git blob id: more than a hub keeps in git itself."""


@dataclass(frozen=True)
class Content:
    """The identity of a file's bytes: ``size`` in bytes, sha256 in hex, and the id of the git blob in hex.

    A hub knows one of the two: the sha256 of a file in its large file storage, the blob id of a file in git. A file here has both,
    except one that is too large for git.
    """

    size: int
    sha256: str = ""
    blob: str = ""

    def same(self, other: Content | None) -> bool:
        """Whether both are the same bytes, as far as a hash that both have can tell."""
        if other is None or self.size != other.size:
            return False
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return bool(self.blob) and self.blob == other.blob

    @property
    def stored_large(self) -> bool:
        """Of a published file: whether it lies in the large file storage, where it can be copied without sending it."""
        return bool(self.sha256)


Tree = Mapping[str, Content]


def difference(expected: Tree, found: Tree) -> tuple[str, ...]:
    """The paths, sorted, that are not the same in both."""
    paths = expected.keys() | found.keys()
    return tuple(sorted(path for path in paths if path not in expected or not expected[path].same(found.get(path))))


def content_of(data: bytes) -> Content:
    """The identity of bytes at hand."""
    return Content(len(data), hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest())


def read_content(path: Path, progress: Callable[[int], None] | None = None) -> Content:
    """The identity of the file at ``path``, read once. Raises DiskError."""
    sha256 = hashlib.sha256()
    with files.disk_errors(path, reading=True), path.open("rb") as stream:
        size = path.stat().st_size
        blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if size <= BLOB_LIMIT else None
        done = 0
        while block := stream.read(files.CHUNK):
            done += len(block)
            sha256.update(block)
            if blob is not None:
                blob.update(block)
            if progress is not None:
                progress(len(block))
    # A file that grows while it is read has no identity; the size that was read is never the one that git's header names.
    return Content(done, sha256.hexdigest(), blob.hexdigest() if blob is not None and done == size else "")
