"""Files on disk against pins: a whole release, a folder of single downloads, or named files.

A row is looked for at its path below the root and, where it is not there, by its mere name in the root: integrators put the parts of
a release into one folder. What is not there was not checked, and the report says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from . import checksums, files
from .console import Console, Mode, count_of
from .errors import HashMismatch, IncompleteError, ManifestError, OpencotiError, UsageError, VerifyError
from .pins import FOLDER, SUFFIX, File, Pins, Row


class State(Enum):
    """How a file stands to the pins."""

    PINNED = "ok"
    CHANGED = "CHANGED"
    UNPINNED = "UNPINNED"
    ABSENT = "not there"


@dataclass(frozen=True)
class Finding:
    """One row of the table. ``path`` is the file looked at, or where it would be; ``row`` is None for a file that nothing pins;
    ``wanted`` is False for a file of an older build, which nobody has to have."""

    state: State
    path: Path
    row: Row | None
    detail: str = ""
    wanted: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"state": self.state.value.lower(), "file": str(self.path), "detail": self.detail, "row": self.row.to_dict() if self.row else None}


@dataclass(frozen=True)
class Report:
    """What was found. ``problems`` are contradictions among the pin files themselves."""

    findings: tuple[Finding, ...]
    problems: tuple[str, ...] = ()
    strict: bool = False

    def count(self, state: State) -> int:
        """How many files are in this state."""
        return sum(finding.state is state for finding in self.findings)

    @property
    def error(self) -> OpencotiError | None:
        """The error that stands for the worst finding, None when all that is there is pinned."""
        bad = next((finding for finding in self.findings if finding.state is State.CHANGED), None)
        unknown = next((finding for finding in self.findings if finding.state is State.UNPINNED), None)
        absent = [finding for finding in self.findings if finding.state is State.ABSENT and finding.wanted]
        if bad is not None:
            more = f" (and {self.count(State.CHANGED) - 1} more files)" if self.count(State.CHANGED) > 1 else ""
            return HashMismatch(f"{bad.path} is not the pinned file: {bad.detail}{more}. Get it again from where it is published.")
        if self.problems:
            return ManifestError(f"The pin files contradict each other: {self.problems[0]}. Get them again, all from one release.", details="\n".join(self.problems[1:]))
        if unknown is not None:
            return VerifyError(f"{unknown.path} is pinned by no pin file: {unknown.detail}.")
        if absent and self.strict:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            return IncompleteError(f"{absent[0].path} is pinned and not there{more}: fetch it, or leave --strict out.")
        if not self.count(State.PINNED):
            return VerifyError("None of the pinned files is here, so nothing was checked: name the folder that holds them.")
        return None

    @staticmethod
    def merge(reports: Sequence[Report]) -> Report:
        """One report of several; strict when one of them is."""
        findings = tuple(finding for report in reports for finding in report.findings)
        problems = tuple(dict.fromkeys(problem for report in reports for problem in report.problems))
        return Report(findings, problems, any(report.strict for report in reports))

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        error = self.error
        return {
            "schema": 1,
            "outcome": "failed" if error else "verified",
            "exit_code": error.exit_code if error else 0,
            "error": error.message if error else "",
            "problems": list(self.problems),
            "files": [finding.to_dict() for finding in self.findings],
        }

    def show(self, console: Console) -> None:
        """Print the table and, for success, the final line. A failure's final line is its error."""
        rows = [(str(finding.path), _owner(finding.row), finding.state.value, finding.detail) for finding in self.findings]
        console.table("Files against pins", ("file", "pinned by", "state", "detail"), rows)
        if self.error is None:
            absent = self.count(State.ABSENT)
            more = f"; {count_of(absent, 'pinned file is', 'pinned files are')} not there and not checked" if absent else ""
            console.success(f"{count_of(self.count(State.PINNED), 'file is', 'files are')} as pinned{more}")


def _owner(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.component}{SUFFIX}, {row.platform if isinstance(row, File) else 'sidecar'}"


@dataclass(frozen=True)
class _Candidate:
    """A file that is there, and the rows that may mean it: one is enough."""

    path: Path
    rows: tuple[Row, ...]


def folder(root: Path, pins: Pins, *, strict: bool = False, console: Console | None = None) -> Report:
    """Every row of ``pins`` against the files below ``root``. Raises UsageError when ``root`` is no folder, ChecksumError for a file
    that cannot be read."""
    if not root.is_dir():
        raise UsageError(f"There is no folder {root}.")
    found: dict[Path, list[Row]] = {}
    absent = []
    current = {row.path for row in pins.current}
    for row in pins.rows:
        places = _places(root, row, pins)
        here = next((place for place in places if os.path.lexists(place)), None)
        if here is None:
            wanted = not isinstance(row, File) or row.path in current
            absent.append(Finding(State.ABSENT, places[0], row, "not checked" if wanted else "of another build than the current: not checked", wanted))
        else:
            found.setdefault(here, []).append(row)
    checked = _compare([_Candidate(path, tuple(rows)) for path, rows in found.items()], console)
    return Report((*checked, *absent), pins.problems(), strict)


def _places(root: Path, row: Row, pins: Pins) -> list[Path]:
    if isinstance(row, File):
        return [root / row.path, root / row.name]
    homes = dict.fromkeys(PurePosixPath(item.path).parent for item in pins.components[row.component].files)
    return [root / row.name, *(root / home / row.name for home in homes)]


def named(paths: Sequence[Path], pins: Pins, *, console: Console | None = None) -> Report:
    """Each of the files against the rows of its name. Raises UsageError for what is no file, ChecksumError for one that cannot be read."""
    candidates, unpinned = [], []
    for path in paths:
        if (what := files.what_lies_at(path)) != "a file":
            raise UsageError(f"{path} is {what}, not a file." if what else f"There is no file {path}.")
        rows = tuple(row for row in pins.rows if row.name == path.name)
        if rows:
            candidates.append(_Candidate(path, rows))
        else:
            unpinned.append(Finding(State.UNPINNED, path, None, f"no row in {pins.folder} has its name"))
    return Report((*_compare(candidates, console), *unpinned), pins.problems())


def unread(error: OpencotiError) -> dict[str, Any]:
    """For ``--json``, when there is no report."""
    return {"schema": 1, "outcome": "unread", "exit_code": error.exit_code, "error": error.message, "problems": [], "files": []}


def find_pins(start: Path) -> Path | None:
    """The nearest ``pin/`` folder with pin files in ``start`` or above it."""
    here = Path(os.path.abspath(start))
    return next((place / FOLDER for place in (here, *here.parents) if any((place / FOLDER).glob(f"*{SUFFIX}"))), None)


def _compare(candidates: Iterable[_Candidate], console: Console | None) -> list[Finding]:
    """Hash what has a pinned size; a file of another size needs no hash to be another file."""
    candidates = list(candidates)
    plain = {item.path: item.path.stat().st_size for item in candidates if files.what_lies_at(item.path) == "a file"}
    worth = [item.path for item in candidates if item.path in plain and any(row.size in (None, plain[item.path]) for row in item.rows)]
    sums = checksums.hash_files(worth, console=console or Console(mode=Mode.QUIET))
    return [_finding(item, plain.get(item.path), sums.get(item.path)) for item in candidates]


def _finding(item: _Candidate, size: int | None, sha256: str | None) -> Finding:
    row = item.rows[0]
    if size is None:
        return Finding(State.CHANGED, item.path, row, f"it is {files.what_lies_at(item.path) or 'gone'}, not a file")
    match = next((row for row in item.rows if row.sha256 == sha256 and row.size in (None, size)), None)
    if match is not None:
        build = f"build {match.build}" if isinstance(match, File) else ""
        return Finding(State.PINNED, item.path, match, build)
    if sha256 is None:
        return Finding(State.CHANGED, item.path, row, f"it has {size} bytes, pinned is one of {' or '.join(str(row.size) for row in item.rows)}")
    return Finding(State.CHANGED, item.path, row, f"it has sha256 {sha256}, pinned is {' or '.join(row.sha256 for row in item.rows)}")
