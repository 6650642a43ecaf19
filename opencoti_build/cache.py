"""The content-addressed cache: downloads by sha256, results of work by the digest of their inputs.

Layout below the root (``OPENCOTI_CACHE``, else the user's cache folder)::

    blobs/SHA256            a downloaded or produced file, whole and verified when it was put there
    parts/SHA256.part       a download in progress, resumable
    rejected/NAME.SHA256    a file whose hash was wrong, kept for evidence
    results/KIND/KEY/       the output of a step; KEY is the digest of everything the output depends on
    locks/                  advisory locks

Nothing under a final name is ever incomplete: files and directories arrive by rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """``OPENCOTI_CACHE``, else ``opencoti`` in the platform's folder for caches."""
    if root := environment.get("OPENCOTI_CACHE"):
        return Path(root).expanduser()
    if sys.platform == "win32":
        base = Path(environment.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "opencoti-build"


def digest_of(value: Any) -> str:
    """Hex sha256 of a JSON-able value in canonical form: the key of a result."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True)
class Cache:
    """The cache below ``root``; directories appear when they are first needed."""

    root: Path

    def blob(self, sha256: str) -> Path:
        """Where the file with this hash lies, or would lie."""
        return self.root / "blobs" / sha256

    def part(self, sha256: str) -> Path:
        """Where an unfinished download of this file lies, or would lie."""
        return self.root / "parts" / f"{sha256}.part"

    def rejected(self, name: str, sha256: str) -> Path:
        """Where a file that came with a wrong hash is kept."""
        return self.root / "rejected" / f"{name}.{sha256[:16]}"

    def result(self, kind: str, key: str) -> Path:
        """Where the result of a step lies, or would lie; it is complete if it exists."""
        return self.root / "results" / kind / key

    def lock(self, name: str, *, wait_seconds: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """An exclusive lock called ``name``."""
        return files.lock(self.root / "locks" / f"{name}.lock", wait_seconds=wait_seconds, what=name)

    @contextlib.contextmanager
    def producing(self, kind: str, key: str) -> Iterator[Path]:
        """Yield a scratch directory that becomes ``result(kind, key)`` when the block ends well."""
        with files.atomic_directory(self.result(kind, key)) as directory:
            yield directory
