"""SHA256SUMS, as ``sha256sum`` of GNU coreutils writes and checks it.

A line is 64 hex digits, a space, ``*`` or a space (binary or text, the same on every system we know) and the name. A name with a
backslash or a line end is escaped (``\\\\``, ``\\n``, ``\\r``), and the line then begins with a backslash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import files
from .console import Console, Mode
from .errors import ChecksumError, ManifestError

NAME = "SHA256SUMS"
_SIZE_LIMIT = 16 << 20
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True)
class Sum:
    """One line: a file name, relative and with forward slashes, and its sha256 in lower-case hex."""

    name: str
    sha256: str

    def line(self) -> str:
        """The line, without its end."""
        escaped = self.name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        mark = "\\" if escaped != self.name else ""
        return f"{mark}{self.sha256}  {escaped}"


def parse(text: str, where: str = NAME) -> tuple[Sum, ...]:
    """The lines of a SHA256SUMS file. Raises ManifestError, naming the line, for anything else and for a name that comes twice."""
    sums: dict[str, Sum] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ManifestError(f"{where} line {number} is not '64 hex digits, two spaces, a name'.")
        name = match[3]
        if match[1]:
            if re.sub(r"\\[\\nr]", "", name).count("\\"):
                raise ManifestError(f"{where} line {number} has an escape that does not exist.")
            name = re.sub(r"\\[\\nr]", lambda found: _ESCAPES[found[0]], name)
        name = name.removeprefix("./")
        if name in sums and sums[name].sha256 != match[2].lower():
            raise ManifestError(f"{where} line {number}: {name!r} comes twice, with different sums.")
        sums[name] = Sum(name, match[2].lower())
    return tuple(sums.values())


def read(path: Path) -> tuple[Sum, ...]:
    """The lines of the file at ``path``. Raises ManifestError."""
    try:
        return parse(files.read_limited(path, _SIZE_LIMIT, "list of checksums", ManifestError).decode("utf-8"), path.name)
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} is not UTF-8 text (byte {error.start}).") from error


def render(sums: Iterable[Sum]) -> str:
    """The text of a SHA256SUMS file, sorted by name."""
    return "".join(f"{row.line()}\n" for row in sorted(sums, key=lambda row: row.name))


def hash_files(paths: Iterable[Path], *, console: Console | None = None) -> dict[Path, str]:
    """sha256 of many files, on all processors. Raises ChecksumError for a file that cannot be read."""
    unique = list(dict.fromkeys(paths))
    try:
        total = sum(path.stat().st_size for path in unique)
        talk = console or Console(mode=Mode.QUIET)
        with talk.progress("hashing", total, unit="bytes") as meter, ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            return dict(zip(unique, pool.map(lambda path: files.sha256_file(path, progress=meter.advance), unique), strict=True))
    except OSError as error:
        raise ChecksumError(f"Cannot read {error.filename}: {error.strerror or error}.") from error


def write(path: Path, targets: Iterable[Path], *, known: Mapping[Path, str] | None = None, console: Console | None = None) -> tuple[Sum, ...]:
    """Write SHA256SUMS over ``targets``, named relative to its folder; ``known`` sums are not computed again.

    Raises ChecksumError for a file that cannot be read or lies elsewhere.
    """
    known = known or {}
    targets = list(dict.fromkeys(targets))
    for target in targets:
        if not target.resolve().is_relative_to(path.parent.resolve()):
            raise ChecksumError(f"{target} does not lie in {path.parent}: {path.name} cannot name it.")
    computed = hash_files([target for target in targets if target not in known], console=console)
    rows = tuple(Sum(target.resolve().relative_to(path.parent.resolve()).as_posix(), known.get(target) or computed[target]) for target in targets)
    files.write_text(path, render(rows))
    return rows
