"""Single files for the engine tests: a host with a payload behind it, right or deliberately wrong.

The layout is the one of the container: ZIP members behind the host, absolute offsets, stored, no data descriptors, times
1980-01-01, ``payload.json`` first. Everything is written with :mod:`zipfile`, so what the engine reads was not made by the
code that writes the releases.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENGINE = "opencoti-0.10.7-c1"
"""Engine string of the payloads made here; the engine takes the name of its cache folder from it."""

EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Library:
    """One library of a payload: its bytes and its row in ``payload.json``.

    The digest of the row is that of :attr:`data` unless :attr:`overrides` says something else.
    """

    name: str
    data: bytes
    kind: str = "cpu"
    variant: str = ""
    os: str = "linux"
    arch: str = "x86_64"
    file: str = ""
    method: int = zipfile.ZIP_STORED
    overrides: dict[str, object] = field(default_factory=dict)

    @property
    def published(self) -> str:
        """The published file name: looked for beside the executable."""
        return self.file or self.name

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the content, the key of the extracted copy."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def abi(self) -> str:
        """The hash that the library answers with: the one 64-digit text in it; zeros for data that is no library."""
        texts = set(re.findall(rb"(?<![0-9a-f])[0-9a-f]{64}(?=\0)", self.data))
        return texts.pop().decode() if len(texts) == 1 else "0" * 64

    def row(self) -> dict[str, object]:
        """The row of ``payload.json``."""
        row: dict[str, object] = {
            "name": self.name,
            "file": self.published,
            "kind": self.kind,
            "variant": self.variant,
            "os": self.os,
            "arch": self.arch,
            "size": len(self.data),
            "sha256": self.sha256,
            "abi": self.abi,
            "build": "2611301800123",
        }
        return {**row, **self.overrides}


def host_bytes(path: Path) -> bytes:
    """Content of an executable, without an archive that may already be behind it."""
    try:
        with zipfile.ZipFile(path) as archive:
            end = min(info.header_offset for info in archive.infolist())
    except zipfile.BadZipFile:
        return path.read_bytes()
    with path.open("rb") as stream:
        return stream.read(end)


def write_payload(
    target: Path,
    host: Path,
    libraries: Sequence[Library],
    *,
    index: dict[str, object] | bytes | None = None,
    absent: Iterable[str] = (),
) -> Path:
    """Write ``host`` and a payload of ``libraries`` to ``target``, executable.

    ``index`` replaces ``payload.json`` (bytes as they are, a mapping merged over the right one); entries named in ``absent``
    are listed and not stored. The host is hard to copy 16 times, so its bytes are copied by the file system where it can.
    """
    content = host_bytes(host)
    target.write_bytes(content)
    document: dict[str, object] = {
        "schema": 1,
        "engine": ENGINE,
        "host": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()},
        "libraries": [library.row() for library in libraries],
    }
    text = index if isinstance(index, bytes) else json.dumps({**document, **(index or {})}).encode()
    left_out = set(absent)
    with zipfile.ZipFile(target, "a") as archive:
        _add(archive, "payload.json", text, zipfile.ZIP_STORED)
        for library in libraries:
            if library.name not in left_out:
                _add(archive, library.name, library.data, library.method)
    target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return target


def _add(archive: zipfile.ZipFile, name: str, data: bytes, method: int) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.compress_type = method
    info.external_attr = 0o644 << 16
    info.create_system = 3
    archive.writestr(info, data)


def copy_engine(engine: Path, folder: Path, name: str = "engine") -> Path:
    """The engine alone, without a payload, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    target.write_bytes(host_bytes(engine))
    shutil.copymode(engine, target)
    return target


def cache_copy(root: Path, library: Library, engine: str = ENGINE) -> Path:
    """Where the engine keeps the extracted copy of ``library`` below ``root`` (EXEDIR or the home folder)."""
    return root / ".llamafile" / "v" / engine / "p" / library.sha256 / os.path.basename(library.name)
