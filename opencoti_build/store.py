"""Components that are built elsewhere or by another command: libraries below ``dist/components/NAME/BUILD/``.

Beside each library lies ``FILE.json``::

    {"schema": 1, "file": NAME, "size": N, "sha256": HEX, "crc32": N, "abi": HEX, "build": "YYMMDDHHMMNNN"}

The newest build that has the file wins (build ids sort by time).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from . import files
from .errors import ChecksumError, ManifestError
from .variants import ComponentLibrary

SCHEMA = 1


@dataclass(frozen=True)
class Found:
    """A library of a component, its bytes verified."""

    path: Path
    size: int
    sha256: str
    crc32: int
    abi: str
    build: str


@dataclass(frozen=True)
class Store:
    """The components below ``root``."""

    root: Path

    def folder(self, library: ComponentLibrary) -> Path:
        """Where all builds of the library's component lie."""
        return self.root / library.component

    def find(self, library: ComponentLibrary) -> Found | None:
        """The newest build of ``library``, or None. Raises ManifestError for a damaged description, ChecksumError for damaged bytes."""
        for description in sorted(self.folder(library).glob(f"*/{library.file}.json"), key=lambda path: path.parent.name, reverse=True):
            return _read(description)
        return None


def _read(description: Path) -> Found:
    path = description.with_name(description.name.removesuffix(".json"))
    try:
        data = json.loads(description.read_text("utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this toolkit reads {SCHEMA}")
        found = Found(path, int(data["size"]), str(data["sha256"]), int(data["crc32"]), str(data["abi"]), str(data["build"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{description} cannot be read: {error}.") from error
    if not path.is_file() or path.stat().st_size != found.size or files.sha256_file(path) != found.sha256:
        raise ChecksumError(f"{path} is not what {description.name} says: put the right file there, or remove both.")
    return found
