"""Proves an artifact without running it (``run=True`` also runs it).

One table of checks, in the order of what a reader should learn first: hashes, the papers beside it, ZIP structure, entries, host block,
version, programs and libraries, glibc floor, Windows limit. A paper that is not there is said, and no failure: a file may travel alone. Each failed check has its own error class and exit code. The file is read once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from . import binaries, checksums, container, files, loader, manifest, onepass, universal, zipformat
from . import pins as pins_module
from .console import Console, Mode, human_bytes
from .errors import (
    BinaryMismatch,
    ContainerError,
    DataError,
    EntryMismatch,
    FloorMismatch,
    HashMismatch,
    HeadroomError,
    HostMismatch,
    ManifestError,
    OpencotiError,
    RunMismatch,
    StructureMismatch,
    UsageError,
    VerifyError,
    VersionMismatch,
)
from .report import BUILD_INFO, RELEASE_NOTES
from .runner import Runner, SystemRunner
from .variants import ComponentLibrary, Variant
from .zipformat import Entry, Method


_NOT_THERE = "not there: not checked"


class State(Enum):
    """How a check ended. SKIPPED is said with its reason: what was not looked at was not proven."""

    PASSED = "ok"
    FAILED = "FAILED"
    SKIPPED = "skipped"


class Outcome(Enum):
    """The whole."""

    VERIFIED = "verified"
    FAILED = "failed"
    UNREAD = "unread"


@dataclass(frozen=True)
class Check:
    """One row. ``problems`` are sentences; ``error`` is the class that stands for this kind of failure."""

    name: str
    state: State
    detail: str
    error: type[VerifyError]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What was found about ``path``."""

    path: Path
    size: int
    sha256: str
    engine: str
    checks: tuple[Check, ...]
    signed: bool = False

    @property
    def failed(self) -> tuple[Check, ...]:
        """The rows that failed."""
        return tuple(check for check in self.checks if check.state is State.FAILED)

    @property
    def leading(self) -> Check | None:
        """The failed row that names the cause: a damaged entry also changes the file's sha256, so "hashes" leads only when it is alone."""
        return next((check for check in self.failed if check.error is not HashMismatch), next(iter(self.failed), None))

    @property
    def outcome(self) -> Outcome:
        """VERIFIED when no row failed."""
        return Outcome.FAILED if self.failed else Outcome.VERIFIED

    @property
    def problems(self) -> tuple[str, ...]:
        """Every problem of every failed row, in order."""
        return tuple(f"{check.name}: {problem}" for check in self.failed for problem in check.problems)

    def raise_for_failure(self, *, details: bool = True) -> None:
        """Raise the error of the leading row, with all problems as its details when there are more; does nothing when all is well."""
        if (leading := self.leading) is None:
            return
        more = "\n".join(self.problems) if details and len(self.problems) > 1 else ""
        raise leading.error(f"{self.path.name} is not what it claims to be: {leading.problems[0]}.", details=more)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": 1,
            "file": str(self.path),
            "size": self.size,
            "sha256": self.sha256,
            "engine": self.engine,
            "signed": self.signed,
            "outcome": self.outcome.value,
            "exit_code": self.leading.error.exit_code if self.leading else 0,
            "checks": [
                {"name": check.name, "state": check.state.value.lower(), "detail": check.detail, "problems": list(check.problems), "exit_code": check.error.exit_code}
                for check in self.checks
            ],
        }

    def show(self, console: Console) -> None:
        """Print the table, then what did not fit into it. The final line is for success only; a failure's is its error."""
        console.table(self.path.name, ["check", "state", "detail"], [[check.name, check.state.value, check.detail] for check in self.checks])
        if any(len(check.problems) > 1 for check in self.failed):
            for problem in self.problems:
                console.info(f"  {problem}")
        if self.outcome is Outcome.VERIFIED:
            skipped = sum(check.state is State.SKIPPED for check in self.checks)
            more = f", {skipped} could not be made (see above)" if skipped else ""
            console.success(f"{self.path.name} is verified: {len(self.checks) - skipped} checks passed{more}; sha256 {self.sha256}")


@dataclass
class _Findings:
    """Collects one row."""

    name: str
    error: type[VerifyError]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    looked: bool = False

    def bad(self, problem: str) -> None:
        self.looked = True
        self.problems.append(problem)

    def good(self, note: str = "") -> None:
        self.looked = True
        if note:
            self.notes.append(note)

    def check(self) -> Check:
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            return Check(self.name, State.FAILED, self.problems[0] + more, self.error, tuple(self.problems))
        return Check(self.name, State.PASSED if self.looked else State.SKIPPED, "; ".join(self.notes), self.error)


@dataclass(frozen=True)
class _Subject:
    """The file and everything known about it when its content has been read."""

    path: Path
    view: mmap.mmap
    head: bytes
    directory: zipformat.Directory
    index: Mapping[str, Any]
    document: manifest.Manifest | None
    sha256s: Mapping[str, str]
    host_size: int
    host_sha256: str

    def row(self, name: str) -> Mapping[str, Any] | None:
        """The row of payload.json for an entry."""
        return next((row for row in self.index["libraries"] if row["name"] == name), None)

    def data(self, entry: Entry) -> bytes:
        """An entry's uncompressed bytes, in memory: the readers of executables want them whole."""
        if entry.method == Method.STORED:
            return self.view[entry.data_offset : entry.end]
        return b"".join(container.content(self.view, entry))  # type: ignore[arg-type]


def artifact(
    path: Path,
    *,
    manifest: Path | None = None,
    pins: Path | None = None,
    variants: Mapping[str, Variant] | None = None,
    console: Console | None = None,
    run: bool = False,
    wine: bool = False,
    runner: Runner | None = None,
) -> Report:
    """Verify ``path`` against ``manifest`` (default: FILE.MANIFEST.json beside it, if any), the pin files in ``pins`` and ``variants``.

    Executes nothing unless ``run`` (starts it with ``--version``) or ``wine`` (the same for its Windows side). Raises UsageError
    when the file cannot be read and ManifestError when a manifest or pin file cannot; everything about the file itself is in the report.
    """
    _refuse_other_than_file(path)
    if pins is not None and not pins.is_dir():
        raise UsageError(f"There is no folder {pins} of pin files.")
    try:
        with path.open("rb") as stream:
            return _Verification(path, stream, manifest, pins, console or Console(mode=Mode.QUIET), runner or SystemRunner(), variants or {}).report(run=run, wine=wine)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error


class _Verification:
    """One run over one file."""

    def __init__(self, path: Path, stream: BinaryIO, document: Path | None, pins: Path | None, console: Console, runner: Runner, variants: Mapping[str, Variant]) -> None:
        self.path, self.stream, self.pins, self.variants, self.console, self.runner = path, stream, pins, variants, console, runner
        self.size = os.fstat(stream.fileno()).st_size
        self.head = stream.read(binaries.HEAD_SIZE)
        self.document, self.no_document = _find_manifest(path, document)
        self.document_path = document or manifest.beside(path)
        self.certificate = binaries.certificate_table(self.head)
        rows: tuple[tuple[str, type[VerifyError]], ...] = (
            ("hashes", HashMismatch),
            (checksums.NAME, HashMismatch),
            (BUILD_INFO, HashMismatch),
            (RELEASE_NOTES, HashMismatch),
            ("ZIP structure", StructureMismatch),
            ("entries", EntryMismatch),
            ("host block", HostMismatch),
            ("version string", VersionMismatch),
            ("programs and libraries", BinaryMismatch),
            ("glibc floor", FloorMismatch),
            ("Windows limit", HeadroomError),
        )
        self.rows = [_Findings(name, error) for name, error in rows]
        self.hashes, self.sums, self.build_info, self.release_notes, self.structure, self.entries, *others = self.rows
        self.host, self.version, self.binaries, self.floor, self.limit = others

    def report(self, *, run: bool, wine: bool) -> Report:
        """All checks."""
        self._check_limit()
        archive_end = self._archive_end()
        scan = zipformat.scan(self.stream, archive_end)
        for finding in scan.findings:
            self.structure.bad(finding)
        directory = scan.directory
        index = self._read_index(directory)
        host_size = index["host"]["size"] if index else 0
        measured = self._measure(directory, archive_end, host_size)
        self._check_hashes(measured)
        if index is not None and not 0 < host_size <= self.size:
            self.host.bad(f"{container.INDEX_NAME} says that the host block has {host_size} bytes, of a file that has {self.size}")
        subject = None
        if directory is not None and index is not None and not scan.findings and measured.complete and not self.host.problems:
            subject = self._subject(directory, index, measured)
        if subject is None or directory is None:
            if not any(row.problems for row in self.rows):
                self.structure.bad("its entries cannot be read to their ends")
            if directory is not None:
                self._check_checksums(directory, measured)
            for row in (self.entries, self.host, self.version, self.binaries, self.floor):
                if not row.looked:
                    row.notes.append("the ZIP structure or its index is damaged")
        else:
            with subject.view:
                self._check_layout(subject)
                self._check_checksums(directory, measured)
                self._check_entries(subject)
                self._check_host(subject)
                self._check_version(subject)
                self._check_binaries(subject)
        checks = [row.check() for row in self.rows]
        engine = index["engine"] if index else ""
        if run or wine:
            failed = any(check.state is State.FAILED for check in checks)
            checks.append(self._run(engine, native=run, wine=wine, failed=failed))
        return Report(self.path, self.size, measured.sha256, engine, tuple(checks), self.certificate is not None)

    # Reading

    def _archive_end(self) -> int:
        """Where the ZIP must end: at the end of the file, or where a signature's table begins."""
        if self.certificate is None:
            return self.size
        start, length = self.certificate
        if start + length != self.size or start > self.size:
            self.structure.bad(f"the certificate table (offset {start}, {length} bytes) does not end at the end of the file")
            return self.size
        self.structure.good(f"an Authenticode signature of {length} bytes follows the archive")
        # The table begins on a multiple of 8; up to 7 zeros come before it.
        self.stream.seek(max(0, start - 7))
        before = self.stream.read(min(7, start))
        return start - (len(before) - len(before.rstrip(b"\0"))) if self._ends_at(start) is None else start

    def _ends_at(self, end: int) -> zipformat.Directory | None:
        """The archive that ends exactly at ``end``, None when there is none (an empty comment ends in zeros itself)."""
        return zipformat.scan(self.stream, end).directory

    def _read_index(self, directory: zipformat.Directory | None) -> Mapping[str, Any] | None:
        if directory is None:
            return None
        entry = directory.get(container.INDEX_NAME)
        if entry is None:
            self.entries.bad(f"there is no {container.INDEX_NAME}")
            return None
        try:
            return container.read_index(self.stream, entry)
        except ManifestError as error:
            self.entries.bad(error.message.removesuffix("."))
            return None

    def _measure(self, directory: zipformat.Directory | None, archive_end: int, host_size: int) -> _Measured:
        """The one pass over the file."""
        entries = [entry for entry in directory.entries if entry.end <= self.size] if directory else []
        stored = [entry for entry in entries if entry.method == Method.STORED and entry.size == entry.compressed_size]
        # Damaged directories may let entries overlap; each range is then measured as far as the lanes can.
        ranges = [onepass.Range(entry.data_offset, entry.size) for entry in stored]
        host_size = max(0, min(host_size, self.size))
        whole = onepass.PrefixHash([self.size] if self.certificate else [self.size, host_size])
        unsigned = onepass.PrefixHash([archive_end, host_size], _unsigned_fields(self.head)) if self.certificate else None
        hashes, sums = onepass.RangeHashes(ranges), onepass.RangeChecksums(ranges)
        consumers: list[onepass.Consumer] = [whole, hashes, sums]
        if unsigned is not None:
            consumers.append(unsigned)
        with self.console.progress(f"reading {self.path.name}", self.size, unit="bytes") as meter:
            onepass.run(self.stream, consumers, advance=meter.advance)
        if self.size not in whole.digests:
            raise UsageError(f"{self.path} changed its size while it was read: verify it again when it is finished.")
        sha256s = {entry.name: value for entry, value in zip(stored, hashes.hexdigests, strict=True)}
        crcs = {entry.name: value for entry, value in zip(stored, sums.values, strict=True)}
        problems = []
        for entry in entries:
            if entry.name in sha256s:
                continue
            digest, crc = hashlib.sha256(), 0
            try:
                for block in container.content(self.stream, entry):
                    digest.update(block)
                    crc = zipformat.crc32(block, crc)
            except ContainerError as error:
                problems.append(error.message.removesuffix("."))
                continue
            sha256s[entry.name], crcs[entry.name] = digest.hexdigest(), crc
        for problem in problems:
            self.entries.bad(problem)
        prefix = unsigned.digests if unsigned else whole.digests
        complete = directory is not None and not problems and len(entries) == len(directory.entries)
        return _Measured(whole.digests[self.size], prefix.get(archive_end, "") if unsigned else "", prefix.get(host_size, ""), sha256s, crcs, complete)

    def _subject(self, directory: zipformat.Directory, index: Mapping[str, Any], measured: _Measured) -> _Subject:
        view = mmap.mmap(self.stream.fileno(), 0, access=mmap.ACCESS_READ)
        return _Subject(self.path, view, self.head, directory, index, self.document, measured.sha256s, index["host"]["size"], measured.host_sha256)

    # Checks

    def _check_limit(self) -> None:
        if not binaries.is_pe_at(self.head):
            self.limit.good("not a Windows program")
        elif self.size < container.WINDOWS_LIMIT:
            self.limit.good(f"{human_bytes(container.WINDOWS_LIMIT - 1 - self.size)} of headroom")
        elif self.path.suffix.lower() == ".exe":
            self.limit.bad(f"it is {self.size} bytes long, and Windows starts nothing of 4 GiB or more")
        else:
            self.limit.notes.append("4 GiB or more: Windows cannot start it, and its name does not promise that")

    def _check_hashes(self, measured: _Measured) -> None:
        if self.document is None:
            self.hashes.notes.append(self.no_document)
        elif (self.document.size, self.document.sha256) == (self.size, measured.sha256):
            self.hashes.good("size and sha256 are the manifest's")
        elif measured.unsigned_sha256 and measured.unsigned_sha256 == self.document.sha256:
            self.hashes.good("without its signature the file has the manifest's sha256")
        elif self.document.size != self.size:
            self.hashes.bad(f"the file has {self.size} bytes, its manifest says {self.document.size}")
        else:
            self.hashes.bad(f"the file has sha256 {measured.sha256}, its manifest says {self.document.sha256}")
        if self.document is not None and self.document.file != self.path.name:
            self.hashes.notes.append(f"its manifest calls it {self.document.file}")
        self._check_papers(measured.sha256)

    def _check_papers(self, sha256: str) -> None:
        """The file and the papers beside it against SHA256SUMS: what they say beyond the file's bytes is proven by their own sums alone."""
        sums = self.path.with_name(checksums.NAME)
        listed = self._listed(sums)
        if (wanted := listed.get(self.path.name)) == sha256:
            self.sums.good("it has the file's sha256")
        elif wanted is not None:
            self.sums.bad(f"the file has sha256 {sha256}, {checksums.NAME} says {wanted}")
        self._check_manifest_sum(sums, listed)
        for row in (self.build_info, self.release_notes):
            paper = self.path.with_name(row.name)
            if not os.path.lexists(paper):
                row.notes.append(_NOT_THERE)
            elif (what := files.what_lies_at(paper)) != "a file":
                row.bad(f"it is {what}, not a file")
            elif (wanted := listed.get(row.name)) is None:
                row.notes.append(f"it stands in no {checksums.NAME}: not checked")
            else:
                self._compare(row, row.name, paper, wanted)

    def _listed(self, sums: Path) -> Mapping[str, str]:
        if not os.path.lexists(sums):
            self.sums.notes.append(_NOT_THERE)
            return {}
        try:
            listed = {row.name: row.sha256 for row in checksums.read(sums)}
        except ManifestError as error:
            self.sums.bad(error.message.removesuffix("."))
            return {}
        if self.path.name not in listed:
            self.sums.notes.append("it does not list the file: not checked")
        return listed

    def _check_manifest_sum(self, sums: Path, listed: Mapping[str, str]) -> None:
        if self.document is None:
            return
        beside = self.document_path.resolve().parent == sums.resolve().parent
        if (wanted := listed.get(self.document_path.name) if beside else None) is None:
            self.sums.notes.append(f"the manifest itself stands in no {checksums.NAME}: its lists of patches and missing parts are not proven")
        else:
            self._compare(self.sums, "the manifest", self.document_path, wanted)

    @staticmethod
    def _compare(row: _Findings, name: str, path: Path, wanted: str) -> None:
        try:
            actual = files.sha256_file(path)
        except OSError as error:
            row.bad(f"{name} cannot be read: {error.strerror or error}")
            return
        if actual == wanted:
            row.good(f"{name} has the sha256 that {checksums.NAME} says")
        else:
            row.bad(f"{name} has sha256 {actual}, {checksums.NAME} says {wanted}: it was changed")

    def _check_layout(self, subject: _Subject) -> None:
        """Nothing hides between the parts: gaps lie in the host only, and there only zeros between its members."""
        first = min((entry.header_offset for entry in subject.directory.entries), default=0)
        for start, end in subject.directory.gaps:
            if end <= subject.host_size:
                # What comes before the first member is the program itself.
                if universal.is_universal(self.head) and start >= first and subject.view[start:end].strip(b"\0"):
                    self.structure.bad(f"bytes {start} to {end} belong to no entry and are not zeros")
            elif start < subject.host_size:
                # A program's own tail, or an older directory of an Actually Portable Executable.
                if end != subject.host_size:
                    self.structure.bad(f"bytes {subject.host_size} to {end} belong to no entry")
            else:
                self.structure.bad(f"bytes {start} to {end} belong to no entry")
        count = len(subject.directory.entries)
        behind = "" if self.certificate else ", nothing behind the end record"
        self.structure.good(f"{count} entr{'y' if count == 1 else 'ies'}, headers agree{behind}")

    def _check_checksums(self, directory: zipformat.Directory, measured: _Measured) -> None:
        for entry in directory.entries:
            crc = measured.crc32s.get(entry.name)
            if crc is not None and crc != entry.crc32:
                self.entries.bad(f"entry {entry.name} has crc32 {crc:08x}, its header says {entry.crc32:08x}")

    def _check_entries(self, subject: _Subject) -> None:
        present = {entry.name: entry for entry in subject.directory.entries}
        for row in subject.index["libraries"]:
            entry = present.get(row["name"])
            if entry is None:
                self.entries.bad(f"{container.INDEX_NAME} lists {row['name']}, which is not in the file")
            elif (entry.size, subject.sha256s[entry.name]) != (row["size"], row["sha256"]):
                self.entries.bad(f"{row['name']} is not the library that {container.INDEX_NAME} lists: sha256 {subject.sha256s[entry.name]}, listed {row['sha256']}")
        names = [row["name"] for row in subject.index["libraries"]]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.entries.bad(f"{container.INDEX_NAME} lists {name} twice")
        self.entries.good(f"{len(names)} librar{'y' if len(names) == 1 else 'ies'} as in {container.INDEX_NAME}")
        if subject.document is not None:
            self._check_manifest_entries(subject.document, present, subject.sha256s)
        self._check_pins(subject)

    def _check_manifest_entries(self, document: manifest.Manifest, present: Mapping[str, Entry], sha256s: Mapping[str, str]) -> None:
        for row in document.entries:
            entry = present.get(row.name)
            if entry is None:
                self.entries.bad(f"the manifest lists {row.name}, which is not in the file")
                continue
            found = (
                ("method", manifest.METHODS[entry.method], row.method),
                ("size", entry.size, row.size),
                ("compressed size", entry.compressed_size, row.compressed_size),
                ("offset", entry.header_offset, row.offset),
                ("crc32", f"{entry.crc32:08x}", row.crc32),
                ("sha256", sha256s[entry.name], row.sha256),
            )
            for what, here, there in found:
                if here != there:
                    self.entries.bad(f"entry {row.name} has {what} {here}, the manifest says {there}")
        for name in present:
            if document.entry(name) is None:
                self.entries.bad(f"entry {name} is not in the manifest")
        self._check_complete(document, present)
        self.entries.good("all as in the manifest")

    def _check_complete(self, document: manifest.Manifest, present: Mapping[str, Entry]) -> None:
        """What the variant should hold is there, or the manifest says that it is missing."""
        if not self.variants:
            return
        variant = self.variants.get(document.variant)
        if variant is None:
            self.entries.notes.append(f"this checkout knows no variant {document.variant!r}, so nobody can tell what should be in it")
            return
        missing = {row.name for row in document.missing}
        for library in variant.libraries:
            if isinstance(library, ComponentLibrary) and library.entry not in present and library.part not in missing:
                self.entries.bad(f"{library.part} is neither in the file nor listed as missing, but belongs to the variant {document.variant}")

    def _check_pins(self, subject: _Subject) -> None:
        """Libraries of a pinned component must have a sha256 that its pin file lists."""
        if self.pins is None or not self.pins.is_dir() or subject.document is None:
            return
        checked = 0
        for row in subject.index["libraries"]:
            described = subject.document.entry(row["name"])
            component = described.component.partition("/")[0] if described else ""
            if not component or row.get("kind") == "cpu":  # CPU libraries are made with the engine and have no pin of their own
                continue
            place = self.pins / f"{component}{pins_module.SUFFIX}"
            if not os.path.lexists(place):
                continue
            pinned = pins_module.read(place).sha256s()
            checked += 1
            if subject.sha256s.get(row["name"]) not in pinned:
                self.entries.bad(f"{row['name']} has sha256 {subject.sha256s.get(row['name'])}, which pin/{component}.txt does not list")
        if checked:
            self.entries.good(f"{checked} as pinned")

    def _check_host(self, subject: _Subject) -> None:
        promised = subject.index["host"]
        index_entry = subject.directory.get(container.INDEX_NAME)
        if index_entry is not None and index_entry.header_offset != subject.host_size:
            self.host.bad(f"the host block should end at byte {subject.host_size}, but {container.INDEX_NAME} begins at {index_entry.header_offset}")
        if promised["sha256"] != subject.host_sha256:
            self.host.bad(f"the host block has sha256 {subject.host_sha256}, {container.INDEX_NAME} says {promised['sha256']}")
        if subject.document is not None:
            host = subject.document.host
            if (host.size, host.sha256) != (subject.host_size, subject.host_sha256):
                self.host.bad(f"the host block has {subject.host_size} bytes and sha256 {subject.host_sha256}, the manifest says {host.size} and {host.sha256}")
        if universal.is_universal(self.head):
            for problem in _launcher_problems(subject):
                self.host.bad(problem)
        self.host.good(f"{human_bytes(subject.host_size)}, sha256 {subject.host_sha256[:16]}...")

    def _check_version(self, subject: _Subject) -> None:
        """Each program holds the engine string and the tree id of its sources, which binds the manifest's patches to it."""
        engine = subject.index["engine"]
        if subject.document is not None and subject.document.engine != engine:
            self.version.bad(f"{container.INDEX_NAME} says {engine}, the manifest {subject.document.engine}")
        needle = engine.encode()
        tree = subject.document.tree if subject.document is not None else ""
        for name, start, end in _programs(subject):
            if not _finds(subject.view, needle, start, end):
                self.version.bad(f"{name} does not contain the version string {engine}")
            elif tree and subject.view.find(tree.encode(), start, end) < 0:
                self.version.bad(f"{name} was not built from the tree {tree} that the manifest names")
            else:
                self.version.good()
        comment = subject.directory.comment
        if comment != engine.encode():
            self.version.bad(f"the ZIP comment is {comment[:80]!r}, {container.INDEX_NAME} says {engine}")
        if not self.version.problems:
            self.version.notes.append(engine)

    def _check_binaries(self, subject: _Subject) -> None:
        rules = Rules.load()
        for name, binary, system, arch, kind in self._read_binaries(subject):
            for problem in binary.problems:
                self.binaries.bad(f"{name}: {problem}")
            if (binary.system, binary.machine) != (system, arch):
                self.binaries.bad(f"{name} is for {binary.system} {binary.machine}, not for {system} {arch}")
            for library in rules.foreign(binary, kind):
                self.binaries.bad(f"{name} needs {library}, which is not part of every {system} system")
            if kind in rules.export_kinds:
                for problem in rules.export_problems(binary):
                    self.binaries.bad(f"{name} {problem}")
            self.binaries.good()
            self._check_floor(name, binary, rules)
        if not self.floor.looked:
            self.floor.good("no Linux program or library")
        if not self.binaries.problems:
            self.binaries.notes.append(f"{self._seen} read, machines and needed libraries as they should be")

    def _read_binaries(self, subject: _Subject) -> Iterator[tuple[str, binaries.Binary, str, str, str]]:
        """(name, facts, expected system, expected machine, kind) of everything executable in the file."""
        self._seen = 0
        for name, start, end in _programs(subject):
            system, arch = _expected(name)
            read = self._facts(name, lambda start=start, end=end: subject.view[start:end])  # type: ignore[misc]
            if read is not None:
                yield name, read, system or read.system, arch or read.machine, "host"
        for row in subject.index["libraries"]:
            entry = subject.directory.get(row["name"])
            if entry is None:
                continue
            read = self._facts(entry.name, lambda entry=entry: subject.data(entry))  # type: ignore[misc]
            if read is None:
                continue
            kind = str(row.get("kind", ""))
            abi = row.get("abi")
            if kind != "sidecar" and isinstance(abi, str) and abi and not _entry_contains(subject, entry, abi.encode()):
                self.binaries.bad(f"{entry.name} does not contain the ABI hash {abi} that {container.INDEX_NAME} lists")
            if kind != "sidecar" and read.kind is not binaries.Kind.LIBRARY:
                self.binaries.bad(f"{entry.name} is a program, not a library")
            yield entry.name, read, str(row.get("os", read.system)), str(row.get("arch", read.machine)), kind

    def _facts(self, name: str, data: Callable[[], bytes]) -> binaries.Binary | None:
        self._seen += 1
        try:
            return binaries.read_bytes(data(), name=name)
        except BinaryMismatch as error:
            self.binaries.bad(error.message.removesuffix("."))
            return None

    def _check_floor(self, name: str, binary: binaries.Binary, rules: Rules) -> None:
        if binary.format is not binaries.Format.ELF:
            return
        above = sorted(binaries.above_glibc(binary, rules.glibc), key=lambda need: binaries.version_order(need.version), reverse=True)
        if above:
            self.floor.bad(f"{name} needs {', '.join(_need(need) for need in above)}; the floor is {rules.glibc}")
        highest = binaries.glibc_floor(binary)
        self.floor.good()
        if highest is not None and not above:
            note = f"at most {highest.version}, promised {rules.glibc}"
            best = [text for text in self.floor.notes if text.startswith("at most")]
            if not best:
                self.floor.notes.append(note)
            elif binaries.version_order(best[0].split()[2].rstrip(",")) < binaries.version_order(highest.version):
                self.floor.notes[self.floor.notes.index(best[0])] = note

    def _run(self, engine: str, *, native: bool, wine: bool, failed: bool) -> Check:
        row = _Findings("start", RunMismatch)
        if failed:
            row.notes.append("not started: a check above failed")
            return row.check()
        if native:
            words: Sequence[str] = [str(self.path.resolve())] if sys.platform == "win32" else ["sh", str(self.path.resolve())]
            self._start(row, "natively", [*words, "--version"], engine)
        if wine:
            program = next((found for name in ("wine64", "wine", "/usr/lib/wine/wine64") if (found := shutil.which(name))), None)
            if program is None:
                row.bad("wine is not installed, so the Windows side cannot be started here")
            elif not binaries.is_pe_at(self.head):
                row.bad("it is not a Windows program, so wine cannot start it")
            else:
                self._start(row, "under wine", [program, str(self.path.resolve()), "--version"], engine)
        return row.check()

    def _start(self, row: _Findings, how: str, argv: Sequence[str], engine: str) -> None:
        """Start it in a home of its own, so that neither an older extracted copy answers nor anything is left behind."""
        with tempfile.TemporaryDirectory(prefix="opencoti-verify.", ignore_cleanup_errors=True) as folder:
            environment = {key: value for key, value in os.environ.items() if not key.startswith(("OPENCOTI_", "LLAMA_"))}
            environment |= {"OPENCOTI_LLAMAFILE_CACHE": folder, "WINEPREFIX": str(Path(folder) / "wine"), "WINEDEBUG": "-all"}
            outcome = self.runner.run(argv, env=environment, check=False, error=RunMismatch)
        lines = [line.strip()[:200] for line in outcome.output.splitlines() if line.strip()]
        # Under wine its own messages come first.
        first = next((line for line in lines if engine in line.split()), lines[0] if lines else "nothing")
        if outcome.code != 0:
            row.bad(f"started {how} it ended with exit code {outcome.code}: {first}")
        elif engine not in outcome.output.split():
            row.bad(f"started {how} it says {first!r}, not {engine}")
        else:
            row.good(f"{how}: {first}")


@dataclass(frozen=True)
class _Measured:
    """Results of the pass. ``unsigned_sha256`` is of the file as it was before signing, empty for an unsigned file."""

    sha256: str
    unsigned_sha256: str
    host_sha256: str
    sha256s: Mapping[str, str]
    crc32s: Mapping[str, int]
    complete: bool


def unread(path: Path, error: OpencotiError) -> dict[str, Any]:
    """For ``--json``, when there is no report: the same keys as far as they are known."""
    return {"schema": 1, "file": str(path), "outcome": Outcome.UNREAD.value, "error": error.message, "exit_code": error.exit_code, "checks": []}


def _refuse_other_than_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise UsageError(f"There is no file {path}.") from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder: name the file in it.")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is a device or a pipe, not a file.")


def _find_manifest(path: Path, given: Path | None) -> tuple[manifest.Manifest | None, str]:
    if given is not None:
        return manifest.read(given), ""
    beside = manifest.beside(path)
    if not os.path.lexists(beside):
        return None, f"no {beside.name} beside it: give --manifest"
    return manifest.read(beside), ""


def _unsigned_fields(head: bytes) -> dict[int, bytes]:
    """The bytes a signer fills in, as our hosts have them before: checksum and certificate directory are zero."""
    optional = struct.unpack_from("<I", head, 0x3C)[0] + 24
    directories = optional + (112 if struct.unpack_from("<H", head, optional)[0] == 0x20B else 96)
    return {optional + 64: bytes(4), directories + 32: bytes(8)}


def _programs(subject: _Subject) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of the engine's programs: the native ones of a universal host, and what the host itself is."""
    members = [entry for entry in subject.directory.entries if entry.end <= subject.host_size and entry.name.startswith("bin/")]
    if universal.is_universal(subject.head):
        first = min((entry.header_offset for entry in members), default=subject.host_size)
        yield "bin/windows-x86_64", 0, first
        for entry in members:
            if entry.name.removeprefix("bin/") in universal.PLATFORMS and entry.method == Method.STORED:
                yield entry.name, entry.data_offset, entry.end
    else:
        yield "the host", 0, subject.host_size


def _expected(name: str) -> tuple[str, str]:
    """System and machine that a program's name promises; empty for a host whose name promises nothing."""
    if name == "bin/windows-x86_64":
        return "windows", "x86_64"
    if platform := universal.PLATFORMS.get(name.removeprefix("bin/")):
        return binaries.SYSTEMS[platform[0]], platform[1]
    return "", ""


def _launcher_problems(subject: _Subject) -> Iterator[str]:
    """The launcher must extract exactly the members that are listed, same place, size and sha256; and a loader must start its program."""
    text = subject.view[: min(4096, subject.host_size)]
    arms = re.findall(rb"_o=(\d+) +_s=(\d+) _k=\d+ +_h=([0-9a-f]{64})(?: _l=(\d+) +_y=(\d+))?", text)
    found = {(int(offset) * universal.PROGRAM_ALIGNMENT, int(size), sha256.decode()) for offset, size, sha256, _, _ in arms}
    listed = {
        (entry.data_offset, entry.size, subject.sha256s[entry.name])
        for entry in subject.directory.entries
        if entry.name.startswith("bin/") and entry.name.removeprefix("bin/") in universal.PLATFORMS
    }
    for offset, _, sha256 in sorted(found - listed):
        yield f"the launcher extracts a program at byte {offset} (sha256 {sha256}) that is not among the entries"
    for offset, _, sha256 in sorted(listed - found):
        yield f"the launcher knows nothing of the program at byte {offset} (sha256 {sha256})"
    known = {(int(place) * universal.LAUNCHER_ALIGNMENT, int(cksum)) for *_, place, cksum in arms if place}
    loaders = [entry for entry in subject.directory.entries if entry.name.startswith("bin/") and entry.name.endswith(universal.LOADER_SUFFIX)]
    for entry in loaders:
        data = bytes(subject.data(entry))
        program = subject.directory.get(entry.name.removesuffix(universal.LOADER_SUFFIX))
        if program is None:
            yield f"{entry.name} is there without its program"
            continue
        head = bytes(subject.view[program.data_offset : program.data_offset + loader.HEAD])
        if wrong := loader.problem(data, head, program.data_offset, program.size, program.crc32):
            yield f"{entry.name} {wrong}"
        if (entry.data_offset, universal.posix_cksum(data)) not in known:
            yield f"the launcher knows nothing of {entry.name}"
    places = {entry.data_offset for entry in loaders}
    for offset, _ in sorted(known):
        if offset not in places:
            yield f"the launcher extracts a loader at byte {offset} that is not among the entries"


def _need(need: binaries.VersionNeed) -> str:
    symbols = ", ".join(need.symbols[:5]) + (f" and {len(need.symbols) - 5} more" if len(need.symbols) > 5 else "")
    return f"{need.version} ({symbols or 'no symbol named'})"


def _finds(view: mmap.mmap, needle: bytes, start: int, end: int) -> bool:
    """Whether ``needle`` lies in the range and is not just the beginning of a longer version (c1 of c12)."""
    at = view.find(needle, start, end)
    while at >= 0:
        after = view[at + len(needle) : at + len(needle) + 1]
        if at + len(needle) >= end or not after.isalnum():
            return True
        at = view.find(needle, at + 1, end)
    return False


def _entry_contains(subject: _Subject, entry: Entry, needle: bytes) -> bool:
    if entry.method == Method.STORED:
        return subject.view.find(needle, entry.data_offset, entry.end) >= 0
    return needle in subject.data(entry)


@dataclass(frozen=True)
class Rules:
    """resources/allowed_libraries.yaml."""

    glibc: str
    libraries: Mapping[str, Mapping[str, Sequence[str]]]
    export_kinds: frozenset[str]
    exports_required: frozenset[str]
    exports_allowed: frozenset[str]

    @staticmethod
    @cache
    def load() -> Rules:
        """Read the data. Raises DataError when it is not as described in it."""
        try:
            data = yaml.safe_load(resources.files("opencoti_build").joinpath("resources/allowed_libraries.yaml").read_text("utf-8"))
            exports = data["exports"]
            required = frozenset(exports["required"])
            return Rules(str(data["glibc"]["linux"]), data["libraries"], frozenset(exports["kinds"]), required, required | frozenset(exports["allowed"]))
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise DataError(f"resources/allowed_libraries.yaml cannot be used: {error!r}.") from error

    def foreign(self, binary: binaries.Binary, kind: str) -> list[str]:
        """Needed libraries that are on no list for this system and kind."""
        lists = self.libraries.get(binary.system, {})
        allowed = [*lists.get("host", ()), *(lists.get(kind, ()) if kind != "host" else ())]
        exact = {name for name in allowed if not name.endswith("*")}
        prefixes = tuple(name[:-1] for name in allowed if name.endswith("*"))
        return [name for name in binary.needed if name not in exact and not name.startswith(prefixes or ("\0",))]

    def export_problems(self, binary: binaries.Binary) -> list[str]:
        """What is wrong with a backend library's exports."""
        missing = sorted(self.exports_required - set(binary.exports))
        surplus = sorted(set(binary.exports) - self.exports_allowed)
        problems = [f"does not export {name}" for name in missing]
        if surplus:
            more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
            problems.append(f"exports {', '.join(surplus[:3])}{more}, which could be mistaken for another library's")
        return problems
