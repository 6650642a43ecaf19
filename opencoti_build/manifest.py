"""MANIFEST.json: what one artifact is, of what it was made and what lies in it.

The document stands beside the artifact as ``FILE.MANIFEST.json``. Each class below is one object of it, with ``from_dict`` and
``to_dict``; keys that a reader does not know are kept, so an older toolkit can rewrite a newer document without losing anything.
Writing is canonical: the same document gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from . import files
from .errors import ManifestError

SCHEMA = 1
SUFFIX = ".MANIFEST.json"
SIZE_LIMIT = 16 << 20
"""Bytes a manifest may have; more is not a manifest."""

METHODS: Mapping[int, str] = {0: "stored", 8: "deflate"}

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CRC32 = re.compile(r"[0-9a-f]{8}")

_T = TypeVar("_T")


class _Reader:
    """Takes checked values out of a JSON object; what is left over at the end is kept as ``extra``."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: expected an object, found {type(value).__name__}.")
        self.left = dict(value)
        self.where = where

    def fail(self, key: str, problem: str) -> ManifestError:
        return ManifestError(f"{self.where}: {key} {problem}.")

    def take(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        if key not in self.left:
            if default is not None:
                return default
            raise self.fail(key, "is missing")
        value = self.left.pop(key)
        # bool is an int to Python, but not in a document.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(key, f"is {type(value).__name__}, not {kind.__name__}")
        return value

    def text(self, key: str, default: str | None = None, pattern: re.Pattern[str] | None = None) -> str:
        value = self.take(key, str, default)
        if pattern is not None and not pattern.fullmatch(value) and not (default is not None and value == default):
            raise self.fail(key, f"is {value[:80]!r}, which is not of the form {pattern.pattern}")
        return value

    def number(self, key: str) -> int:
        value = self.take(key, int)
        if value < 0:
            raise self.fail(key, "is negative")
        return value

    def rows(self, key: str, build: Callable[[Any, str], _T]) -> tuple[_T, ...]:
        return tuple(build(row, f"{self.where}: {key}[{index}]") for index, row in enumerate(self.take(key, list)))

    def strings(self, key: str) -> dict[str, str]:
        value = self.take(key, dict)
        if not all(isinstance(item, str) for item in value.values()):
            raise self.fail(key, "holds something that is not text")
        return value


def _dropping(value: dict[str, Any], *empty: str) -> dict[str, Any]:
    """``value`` without those keys whose value is empty."""
    return {key: item for key, item in value.items() if key not in empty or item not in ("", None)}


@dataclass(frozen=True)
class Base:
    """A pinned upstream: its commit (or ""), the git tree id of its unpacked source (or "")."""

    name: str
    version: str
    commit: str = ""
    tree: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Base:
        """Raises ManifestError, naming ``where``."""
        row = _Reader(value, where)
        return cls(row.text("name"), row.text("version"), row.text("commit", "", _COMMIT), row.text("tree", "", _COMMIT), row.left)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return _dropping({"name": self.name, "version": self.version, "commit": self.commit, "tree": self.tree} | dict(self.extra), "commit", "tree")


@dataclass(frozen=True)
class Patch:
    """A patch of the series: its number as in the file's name (``0001``), subject line, sha256 of the file."""

    number: str
    title: str
    sha256: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Patch:
        """Raises ManifestError, naming ``where``."""
        row = _Reader(value, where)
        return cls(row.text("number"), row.text("title"), row.text("sha256", None, _SHA256), row.left)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {"number": self.number, "title": self.title, "sha256": self.sha256} | dict(self.extra)


@dataclass(frozen=True)
class Missing:
    """A part that the variant asks for and the artifact lacks."""

    name: str
    reason: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Missing:
        """Raises ManifestError, naming ``where``."""
        row = _Reader(value, where)
        return cls(row.text("name"), row.text("reason", ""), row.left)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {"name": self.name, "reason": self.reason} | dict(self.extra)


@dataclass(frozen=True)
class Block:
    """A run of bytes: the host block, the first ``size`` bytes of the file."""

    size: int
    sha256: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Block:
        """Raises ManifestError, naming ``where``."""
        row = _Reader(value, where)
        return cls(row.number("size"), row.text("sha256", None, _SHA256), row.left)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {"size": self.size, "sha256": self.sha256} | dict(self.extra)


@dataclass(frozen=True)
class Entry:
    """A member of the ZIP. ``method`` is ``stored`` or ``deflate``; ``offset`` is the local header's, from byte 0; ``crc32`` has 8
    hex digits; ``sha256`` is of the uncompressed bytes; ``component`` and ``build`` say where it came from."""

    name: str
    method: str
    size: int
    compressed_size: int
    offset: int
    crc32: str
    sha256: str
    component: str = ""
    build: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Entry:
        """Raises ManifestError, naming ``where``."""
        row = _Reader(value, where)
        made = cls(
            row.text("name"),
            row.text("method"),
            row.number("size"),
            row.number("compressed_size"),
            row.number("offset"),
            row.text("crc32", None, _CRC32),
            row.text("sha256", None, _SHA256),
            row.text("component", ""),
            row.text("build", ""),
            row.left,
        )
        if made.method not in METHODS.values():
            raise ManifestError(f"{where}: method is {made.method!r}, not one of {', '.join(METHODS.values())}.")
        return made

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        value = {
            "name": self.name,
            "method": self.method,
            "size": self.size,
            "compressed_size": self.compressed_size,
            "offset": self.offset,
            "crc32": self.crc32,
            "sha256": self.sha256,
            "component": self.component,
            "build": self.build,
        }
        return _dropping(value | dict(self.extra), "component", "build")


@dataclass(frozen=True)
class Manifest:
    """The document. ``commit`` is this repository's ("" outside git), ``dirty`` tells of uncommitted changes; ``tree`` is the git
    tree id of the patched source; ``toolchains`` maps tools to versions; ``complete`` is False when ``missing`` names parts;
    ``inputs`` is the digest of everything the artifact's bytes depend on (a build compares it to skip its work).
    """

    file: str
    size: int
    sha256: str
    engine: str
    variant: str
    commit: str
    dirty: bool
    base: tuple[Base, ...]
    patches: tuple[Patch, ...]
    tree: str
    toolchains: Mapping[str, str]
    complete: bool
    missing: tuple[Missing, ...]
    host: Block
    entries: tuple[Entry, ...]
    inputs: str = ""
    schema: int = SCHEMA
    extra: Mapping[str, Any] = field(default_factory=dict)

    def entry(self, name: str) -> Entry | None:
        """The row of the entry called ``name``, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)

    @classmethod
    def from_dict(cls, value: Any, where: str = "MANIFEST") -> Manifest:
        """Raises ManifestError, naming ``where`` and the key, for anything that is not a manifest of a schema we read."""
        row = _Reader(value, where)
        schema = row.number("schema")
        if schema != SCHEMA:
            raise ManifestError(f"{where}: schema is {schema}; this toolkit reads {SCHEMA}. Use the toolkit of the release.")
        made = cls(
            row.text("file"),
            row.number("size"),
            row.text("sha256", None, _SHA256),
            row.text("engine"),
            row.text("variant", ""),
            row.text("commit", "", _COMMIT),
            row.take("dirty", bool),
            row.rows("base", Base.from_dict),
            row.rows("patches", Patch.from_dict),
            row.text("tree", "", _COMMIT),
            row.strings("toolchains"),
            row.take("complete", bool),
            row.rows("missing", Missing.from_dict),
            Block.from_dict(row.take("host", dict), f"{where}: host"),
            row.rows("entries", Entry.from_dict),
            row.text("inputs", ""),
            schema,
            row.left,
        )
        if made.complete and made.missing:
            raise ManifestError(f"{where}: complete is true, but {made.missing[0].name} is listed as missing.")
        names = [entry.name for entry in made.entries]
        if len(set(names)) != len(names):
            raise ManifestError(f"{where}: an entry is listed twice.")
        return made

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, keys in the order a person reads them."""
        return {
            "schema": self.schema,
            "file": self.file,
            "size": self.size,
            "sha256": self.sha256,
            "engine": self.engine,
            "variant": self.variant,
            "commit": self.commit,
            "dirty": self.dirty,
            "base": [row.to_dict() for row in self.base],
            "patches": [row.to_dict() for row in self.patches],
            "tree": self.tree,
            "toolchains": dict(sorted(self.toolchains.items())),
            "complete": self.complete,
            "missing": [row.to_dict() for row in self.missing],
            "host": self.host.to_dict(),
            "entries": [row.to_dict() for row in self.entries],
            "inputs": self.inputs,
        } | dict(self.extra)

    def to_bytes(self) -> bytes:
        """The document as it is written: UTF-8, two spaces of indentation, one line end at the end."""
        return (json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def beside(artifact: Path) -> Path:
    """Where the manifest of ``artifact`` stands."""
    return artifact.with_name(artifact.name + SUFFIX)


def parse(data: bytes, where: str = "MANIFEST") -> Manifest:
    """A manifest from its bytes. Raises ManifestError for anything else; never another exception."""
    if len(data) > SIZE_LIMIT:
        raise ManifestError(f"{where} is larger than {SIZE_LIMIT} bytes: that is not a manifest.")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_no_constants)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates are no text
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is not JSON as expected: {error}.") from error
    return Manifest.from_dict(value, where)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object, and readers will not agree on which one counts")
    return value


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def read(path: Path) -> Manifest:
    """The manifest in ``path``. Raises ManifestError when it is absent or not a manifest."""
    return parse(files.read_limited(path, SIZE_LIMIT, "manifest", ManifestError), path.name)


def write(path: Path, manifest: Manifest) -> None:
    """Write atomically; an equal file is left alone. Raises DiskError."""
    files.write_bytes(path, manifest.to_bytes())
