#!/usr/bin/env python3
"""Checks downloaded files of opencoti-llamafile. Needs Python 3.8 or newer and nothing else; executes none of the files.

    python verify.py                 everything in the folder that this file lies in
    python verify.py FILE|FOLDER...  these

It reads SHA256SUMS, FILE.MANIFEST.json and pin/*.txt (pin/PIN_FORMAT.md describes them) and compares size and sha256 of every file that
they speak of. Of a single-file executable it also checks the ZIP structure (one end record, nothing behind it, no name twice, every
local header equal to its central header, no bytes that belong to no entry), each embedded entry against payload.json, manifest and pins,
the host block and the version string. A listed file that is not there was not checked, and that is said.

What only the toolkit checks (``invoke verify artifact FILE``): that the programs' launcher, formats, machines, exports, needed libraries
and glibc versions are what they should be. Nothing here tells who made the papers: take the pin files from where you trust them (--pins).

Exit codes: 0 all as published, 2 cannot be read or asked so, 32 --strict and a listed file is not there, 41 a paper is not what its
format says, 50 nothing to check, 51 size or sha256, 52 ZIP structure, 53 an embedded entry, 54 host block, 55 version string,
58 Windows' 4 GiB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import struct
import sys
import threading
import time
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Iterable, Iterator, NamedTuple

USAGE, INCOMPLETE, PAPER, NOTHING, HASH, STRUCTURE, ENTRY, HOST, VERSION, LIMIT = 2, 32, 41, 50, 51, 52, 53, 54, 55, 58

SUMS = "SHA256SUMS"
MANIFEST = ".MANIFEST.json"
PAPERS_BESIDE = ("BUILD_INFO.md", "RELEASE_NOTES.md")
PINS = "pin"
INDEX = "payload.json"
UNIVERSAL = b"MZopencoti='\n"
PLATFORMS = ("linux-x86_64", "linux-aarch64", "macos-x86_64", "macos-arm64")
WINDOWS_LIMIT = 1 << 32
PAPER_LIMIT = 16 << 20
PIN_LIMIT = 1 << 20
HEAD_SIZE = 65536
BLOCK = 1 << 20

SHA256 = re.compile(r"[0-9a-f]{64}")
SINGLE_FILE = re.compile(r"\.llamafile(\.exe)?$")


class Refusal(Exception):
    """Ends the run: one sentence and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Check:
    """One row of a file's table. It failed when it has problems, and was skipped when nothing was looked at."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self.code = name, code
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.looked = False

    def bad(self, problem: str) -> None:
        self.looked = True
        self.problems.append(problem)

    def good(self, note: str = "") -> None:
        self.looked = True
        if note:
            self.notes.append(note)

    @property
    def state(self) -> str:
        return "FAILED" if self.problems else "ok" if self.looked else "skipped"

    @property
    def detail(self) -> str:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return self.problems[0] + more if self.problems else "; ".join(self.notes)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state.lower(), "detail": self.detail, "problems": self.problems, "exit_code": self.code}


class Result(NamedTuple):
    """What was found about one file."""

    path: Path
    size: int
    sha256: str
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.problems]


def leading(checks: Iterable[Check]) -> Check | None:
    """The failed row that names the cause: damage changes the file's sha256 as well, so a hash leads only when it is alone."""
    failed = [check for check in checks if check.problems]
    return next((check for check in failed if check.code != HASH), failed[0] if failed else None)


# The papers


def read_limited(path: Path, limit: int) -> bytes:
    if not path.is_file():
        raise Refusal(PAPER, f"Cannot read {path}: it is a folder, a device or a link to nowhere.")
    try:
        with open(path, "rb") as stream:
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        raise Refusal(PAPER, f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
    if len(data) > limit:
        raise Refusal(PAPER, f"{path} is larger than {limit} bytes: that is not what its name says.")
    return data


def parse_sums(text: str) -> dict[str, str]:
    """Names to sha256 of a list as ``sha256sum`` writes it. Raises ValueError with a sentence's rest."""
    sums: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line[:-1] if line.endswith("\r") else line
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", line, re.DOTALL)
        if match is None:
            raise ValueError(f"{SUMS} line {number} is not '64 hex digits, two spaces, a name'")
        name = match[3]
        if match[1]:
            if "\\" in re.sub(r"\\[\\nr]", "", name):
                raise ValueError(f"{SUMS} line {number} has an escape that does not exist")
            name = re.sub(r"\\([\\nr])", lambda found: {"\\": "\\", "n": "\n", "r": "\r"}[found[1]], name)
        name = name[2:] if name.startswith("./") else name
        if sums.setdefault(name, match[2].lower()) != match[2].lower():
            raise ValueError(f"{SUMS} line {number}: {name!r} comes twice, with different sums")
    return sums


COMMIT = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})?")
CRC32 = re.compile(r"[0-9a-f]{8}")
METHOD = re.compile(r"stored|deflate")
_BLOCK_SHAPE = {"size": int, "sha256": SHA256}
# What a manifest holds: a type, a pattern for text, a list of objects, or an object. A ? marks what may be missing.
MANIFEST_SHAPE: dict[str, Any] = {
    "schema": int,
    "file": str,
    "size": int,
    "sha256": SHA256,
    "engine": str,
    "variant?": str,
    "commit?": COMMIT,
    "dirty": bool,
    "base": [{"name": str, "version": str, "commit?": COMMIT, "tree?": COMMIT}],
    "patches": [{"number": str, "title": str, "sha256": SHA256}],
    "tree?": COMMIT,
    "toolchains": dict,
    "complete": bool,
    "missing": [{"name": str, "reason?": str}],
    "host": _BLOCK_SHAPE,
    "entries": [
        {"name": str, "method": METHOD, "offset": int, "compressed_size": int, "crc32": CRC32, "component?": str, "build?": str, **_BLOCK_SHAPE},
    ],
    "inputs?": str,
}


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise ValueError unless a JSON value has this shape. Keys that the shape does not know are allowed."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is not a list")
        for number, item in enumerate(value):
            check_shape(item, shape[0], f"{where}[{number}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        for key, inner in shape.items():
            if key.rstrip("?") in value:
                check_shape(value[key.rstrip("?")], inner, f"{where}.{key.rstrip('?')}")
            elif not key.endswith("?"):
                raise ValueError(f"{where} has no {key}")
    elif shape is int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{where} is not a number from 0")
    elif shape is dict:
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise ValueError(f"{where} is not an object of texts")
    elif isinstance(shape, type):
        if not isinstance(value, shape):
            raise ValueError(f"{where} is not of type {shape.__name__}")
    elif not isinstance(value, str) or not shape.fullmatch(value):
        raise ValueError(f"{where} is not of the form {shape.pattern}")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest at ``path``. Raises Refusal for anything that is none."""
    data = read_limited(path, PAPER_LIMIT)
    try:
        value: dict[str, Any] = json.loads(data.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate is no text
        check_shape(value, {"schema": int}, "it")
        if value["schema"] != 1:
            raise ValueError(f"its schema is {value['schema']}, this program reads 1")
        check_shape(value, MANIFEST_SHAPE, "it")
        names = [entry["name"] for entry in value["entries"]]
        if len(set(names)) != len(names):
            raise ValueError("it lists an entry twice")
        if value["complete"] and value["missing"]:
            raise ValueError("it is complete and lists something as missing")
    except (ValueError, RecursionError) as error:
        raise Refusal(PAPER, f"{path} is not a manifest as expected: {error}.") from error
    return value


# Pin files (PIN_FORMAT.md, version 1)


class Pin(NamedTuple):
    """A row: a file with its path, or a sidecar with its name alone. ``size`` is None where a sidecar's row does not tell it."""

    component: str
    platform: str
    path: str
    sha256: str
    size: int | None
    build: str


_PIN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_PIN_BUILD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_PIN_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
_PIN_SUM = re.compile(r"([0-9a-f]{64})  ([\x20-\x7e]+)")
_PIN_SEGMENT = re.compile(r"(?! )[^\\/:*?\"<>|\x00-\x1f\x7f-\U0010ffff]*[^\\/:*?\"<>|. \x00-\x1f\x7f-\U0010ffff]")


def _pin_path(path: str) -> str:
    if len(path) > 1024 or not all(_PIN_SEGMENT.fullmatch(part) for part in path.split("/")):
        raise ValueError(f"the path {path[:80]!r} is not allowed")
    return path


def _pin_name(text: str) -> str:
    if not _PIN_NAME.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a name")
    return text


def _pin_size(text: str) -> int:
    if not _PIN_SIZE.fullmatch(text) or int(text) >= 1 << 63:
        raise ValueError(f"the size {text[:40]!r} is none")
    return int(text)


def _pin_value(text: str) -> str:
    if "%" in re.sub("%[0-9A-F]{2}", "", text):
        raise ValueError("a % is not followed by two hex digits")
    value = re.sub("%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), text).encode("latin-1").decode("utf-8")
    if re.search("[\x00-\x1f\x7f]", value):
        raise ValueError("an escaped value holds a control character")
    return value


def _pin_attributes(words: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"([a-z][a-z0-9_-]*)=([\x21-\x7e]+)", word)
        if match is None or match[1] in values:
            raise ValueError(f"{word[:80]!r} is no attribute, or comes twice")
        values[match[1]] = _pin_value(match[2])
    return values


def _pin_file(words: list[str], following: str, component: str) -> Pin:
    match = _PIN_SUM.fullmatch(following)
    if match is None:
        raise ValueError("no line of a sha256 and a path follows")
    values = _pin_attributes(words[1:])
    owner = _pin_name(values.get("component", "" if component == "index" else component))
    if "size" not in values or not _PIN_BUILD.fullmatch(values.get("build", "")):
        raise ValueError("size or build is missing or malformed")
    if owner == "index" or component not in ("index", owner):
        raise ValueError(f"a row of {owner} cannot stand here")
    if values.get("entry"):
        _pin_path(values["entry"])
    return Pin(owner, _pin_name(words[0] if words else ""), _pin_path(match[2]), match[1], _pin_size(values["size"]), values["build"])


def _pin_sidecar(words: list[str], component: str) -> Pin:
    if component == "index" or len(words) < 2 or not SHA256.fullmatch(words[1]):
        raise ValueError("a sidecar's row is not as it should be")
    name, values = _pin_path(_pin_value(words[0])), _pin_attributes(words[2:])
    if "/" in name:
        raise ValueError("a sidecar's name is not a mere file name")
    return Pin(component, "sidecar", name, words[1], _pin_size(values["size"]) if "size" in values else None, "")


def parse_pin(data: bytes) -> tuple[str, list[Pin]]:
    """The component's name and the rows of a pin file. Raises ValueError with a sentence's rest that names the line."""
    number = 1
    rows: list[Pin] = []
    seen: set[str] = set()
    try:
        lines = data.decode("utf-8").split("\n")
        if lines.pop() != "":
            number = len(lines) + 1
            raise ValueError("the last line has no end")
        bodies = [line[:-1] if line.endswith("\r") else line for line in lines]
        for number, (line, body) in enumerate(zip(lines, bodies), start=1):
            if len(line.encode("utf-8")) >= 4096 or re.search("[\x00-\x08\x0a-\x1f\x7f]", body):
                raise ValueError("it is longer than 4096 bytes, or holds a control character")
        number = 1
        head = bodies[0].split(" ") if bodies else []
        if head[:2] != ["#!", "pin"] or len(head) < 4:
            raise ValueError("a pin file begins with '#! pin 1 COMPONENT'")
        if head[2] != "1":
            raise ValueError(f"it is of version {head[2]}, this program reads 1")
        component = _pin_name(head[3])
        _pin_attributes(head[4:])
        while number < len(bodies):
            body, following = bodies[number], bodies[number + 1] if number + 1 < len(bodies) else ""
            number += 1
            row = _pin_row(body, following, component)
            if row is None:
                continue
            if row.path.lower() in seen:
                raise ValueError(f"{row.path!r} comes twice")
            seen.add(row.path.lower())
            rows.append(row)
            number += row.platform != "sidecar"
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    return component, rows


def _pin_row(body: str, following: str, component: str) -> Pin | None:
    """The row that begins with this line, None for what is merely kept: comments, and what a later version means."""
    if body.startswith("#!"):
        match = re.fullmatch(r"#! ([a-z][a-z0-9-]*)(?: (.*))?", body)
        if match is None or match[1] == "pin":
            raise ValueError("a directive is malformed, or '#! pin' comes twice")
        words = match[2].split(" ") if match[2] is not None else []
        if match[1] == "file":
            return _pin_file(words, following, component)
        return _pin_sidecar(words, component) if match[1] == "sidecar" else None
    if body and not body.startswith("#") and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,30}(?:[ \t].*)?", body):
        raise ValueError("it is neither a row nor a comment")
    return None


class Pins(NamedTuple):
    """A folder of pin files, by component."""

    folder: Path
    components: dict[str, list[Pin]]

    @staticmethod
    def read(folder: Path) -> Pins:
        """Raises Refusal when a file is none, or the index contradicts the rest."""
        components: dict[str, list[Pin]] = {}
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".txt") and not name.startswith("."))
        except OSError as error:
            raise Refusal(PAPER, f"Cannot read {folder}: {error.strerror or error}.") from error
        for name in names:
            try:
                component, rows = parse_pin(read_limited(folder / name, PIN_LIMIT))
                if component + ".txt" != name:
                    raise ValueError(f"it says that it is {component}.txt")
            except ValueError as error:
                raise Refusal(PAPER, f"{folder / name} is not a pin file as expected: {error}.") from error
            components[component] = rows
        for row in components.pop("index", []):
            if row not in components.get(row.component, []):
                raise Refusal(PAPER, f"{folder}: index.txt names {row.path}, and {row.component}.txt has no such row.")
        return Pins(folder, components)


# ZIP


class Entry(NamedTuple):
    """A member; offsets from byte 0 of the file."""

    name: str
    size: int
    crc32: int
    header_offset: int
    data_offset: int
    method: int
    compressed_size: int

    @property
    def end(self) -> int:
        return self.data_offset + self.compressed_size


class Archive(NamedTuple):
    entries: list[Entry]
    offset: int
    comment: bytes
    gaps: list[tuple[int, int]]

    def get(self, name: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == name), None)


LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
M16, M32 = 0xFFFF, 0xFFFFFFFF


class Damaged(Exception):
    """The archive cannot be read further."""


class Scanner:
    """Reads the archive that ends at byte ``size`` strictly; ``findings`` are sentences. Never raises for bad content."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size = stream, size
        self.findings: list[str] = []

    def scan(self) -> Archive | None:
        try:
            start, count, length, offset, comment = self.find_end()
            if offset + length != start:
                raise Damaged(f"the central directory should be at bytes {offset} to {offset + length}, but must end at {start}")
            if length > 64 << 20:
                raise Damaged(f"the central directory is {length} bytes long")
            headers = self.read_central(self.read(offset, length), count)
        except Damaged as error:
            self.findings.append(str(error))
            return None
        entries = [self.read_local(*header, limit=offset) for header in headers]
        gaps = self.check_layout(entries, offset)
        self.check_names(entries)
        return Archive(entries, offset, comment, gaps)

    def read(self, offset: int, count: int) -> bytes:
        self.stream.seek(offset)
        return self.stream.read(count)

    # The end record

    def find_end(self) -> tuple[int, int, int, int, bytes]:
        """Where the directory must end, how many entries it has, its length and offset, and the comment."""
        base = max(0, self.size - END.size - M16)
        tail = self.read(base, self.size - base)
        exact, near = [], []
        at = tail.rfind(b"PK\5\6")
        while at >= 0:
            if at + END.size <= len(tail):
                stop = at + END.size + struct.unpack_from("<H", tail, at + 20)[0]
                if stop == len(tail):
                    exact.append(at)
                elif stop < len(tail) and self.leads_somewhere(tail, at, base):
                    near.append(len(tail) - stop)
            at = tail.rfind(b"PK\5\6", 0, at)
        # Program code holds the signature as a constant: only a record that leads to a directory counts.
        real = [at for at in exact if self.leads_somewhere(tail, at, base)] or exact[:1]
        if not real:
            raise Damaged(f"{near[0]} bytes beyond the ZIP end record" if near else "there is no ZIP end record")
        if len(real) > 1:
            raise Damaged(f"there are {len(real)} ZIP end records")
        _, disk, start_disk, here, count, length, offset, _ = END.unpack_from(tail, real[0])
        if disk not in (0, M16) or start_disk not in (0, M16) or here != count:
            raise Damaged("the archive claims to span several disks")
        comment = tail[real[0] + END.size :]
        return (*self.follow_zip64(base + real[0], count, length, offset), comment)

    def leads_somewhere(self, tail: bytes, at: int, base: int) -> bool:
        _, _, _, _, count, length, offset, _ = END.unpack_from(tail, at)
        here = base + at
        if M32 in (length, offset) or count == M16:
            return here >= LOCATOR64.size and self.read(here - LOCATOR64.size, 4) == b"PK\6\7"
        if offset + length > here:
            return False
        if count == 0:
            return (length, offset) == (0, here)
        return b"PK\1\2" in (self.read(offset, 4), self.read(here - length, 4))

    def follow_zip64(self, end: int, count: int, length: int, offset: int) -> tuple[int, int, int, int]:
        place = end - LOCATOR64.size
        locator = self.read(place, LOCATOR64.size) if place >= 0 else b""
        if not locator.startswith(b"PK\6\7"):
            if M32 in (length, offset):
                raise Damaged("the end record refers to a zip64 record that is not there")
            return end, count, length, offset
        if count != M16 and M32 not in (length, offset) and offset + length == end:
            return end, count, length, offset  # the directory's last bytes only look like a locator
        _, disk, at, disks = LOCATOR64.unpack(locator)
        record = self.read(at, END64.size) if at + END64.size <= place else b""
        if disk or disks > 1 or len(record) < END64.size or not record.startswith(b"PK\6\6"):
            raise Damaged("the zip64 locator points to no zip64 end record")
        _, size, _, _, disk, start_disk, here, count64, length64, offset64 = END64.unpack(record)
        if size < END64.size - 12 or at + 12 + size != place:
            raise Damaged("the zip64 end record does not end where its locator begins")
        if disk or start_disk or here != count64:
            raise Damaged("the archive claims to span several disks")
        if count not in (M16, count64) or length not in (M32, length64) or offset not in (M32, offset64):
            raise Damaged("the zip64 end record contradicts the end record")
        return at, count64, length64, offset64

    # Headers

    def read_central(self, data: bytes, count: int) -> list[tuple[Entry, bytes, tuple[int, ...]]]:
        """Each entry with its raw name and the fields that its local header must repeat."""
        made: list[tuple[Entry, bytes, tuple[int, ...]]] = []
        at = 0
        for number in range(count):
            if at + CENTRAL.size > len(data) or data[at : at + 4] != b"PK\1\2":
                raise Damaged(f"the central directory holds {number} entries, the end record promises {count}")
            _, _, version, flags, method, clock, date, crc, packed, size, n_name, n_extra, n_comment, disk, _, mode, offset = CENTRAL.unpack_from(data, at)
            stop = at + CENTRAL.size + n_name + n_extra + n_comment
            if stop > len(data):
                raise Damaged(f"entry {number} of the central directory is cut off")
            raw = data[at + CENTRAL.size : at + CENTRAL.size + n_name]
            try:
                name = raw.decode("utf-8" if flags & 0x800 or all(byte < 128 for byte in raw) else "cp437")
            except UnicodeDecodeError:
                name = raw.decode("utf-8", "replace")
                self.findings.append(f"the name of entry {number} is not UTF-8")
            fields = extra_fields(data[at + CENTRAL.size + n_name : at + CENTRAL.size + n_name + n_extra])
            if fields is None:
                raise Damaged(f"the extra fields of entry {name!r} do not parse")
            wide, numbers = fields.get(1), [size, packed, offset]
            for place, value in enumerate(numbers):
                if value == M32 and wide is not None:
                    if len(wide) < 8:
                        raise Damaged(f"the zip64 field of entry {name!r} is too short")
                    numbers[place], wide = struct.unpack_from("<Q", wide)[0], wide[8:]
            size, packed, offset = numbers
            kind = mode >> 16 & 0o170000
            for wrong, problem in (
                (version > 45, f"asks for a reader of ZIP version {version / 10:.1f}"),
                (flags & ~0x806, f"has flags {flags:#06x}: encrypted, or with a data descriptor, or of another meaning"),
                (method not in (0, 8), f"has compression method {method}; 0 and 8 are allowed"),
                (method == 0 and size != packed, f"is stored, but has two sizes: {size} and {packed}"),
                (kind not in (0, 0o100000) and not (kind == 0o040000 and name.endswith("/")), "is marked as something other than a file"),
                (disk not in (0, M16), "claims to be on another disk"),
            ):
                if wrong:
                    self.findings.append(f"entry {name!r} {problem}")
            made.append((Entry(name, size, crc, offset, offset, method, packed), raw, (flags, method, clock, date)))
            at = stop
        if at != len(data):
            raise Damaged(f"{len(data) - at} bytes of the central directory belong to no entry")
        return made

    def read_local(self, entry: Entry, raw: bytes, common: tuple[int, ...], *, limit: int) -> Entry:
        """Compare the local header; gives the entry with its data's offset."""
        what = f"the local header of entry {entry.name!r}"
        header = self.read(entry.header_offset, LOCAL.size) if entry.header_offset + LOCAL.size <= limit else b""
        if len(header) < LOCAL.size or header[:4] != b"PK\3\4":
            self.findings.append(f"entry {entry.name!r} points to no local header (offset {entry.header_offset})")
            return entry
        _, version, flags, method, clock, date, crc, packed, size, n_name, n_extra = LOCAL.unpack(header)
        rest = self.read(entry.header_offset + LOCAL.size, n_name + n_extra)
        fields = extra_fields(rest[n_name:])
        if version > 45:
            self.findings.append(f"{what} asks for a reader of ZIP version {version / 10:.1f}")
        if fields is None or len(rest) < n_name + n_extra:
            self.findings.append(f"{what} is damaged")
            return entry
        if 1 in fields and M32 in (size, packed):
            if len(fields[1]) < 16:
                self.findings.append(f"the zip64 field of {what} is too short")
                return entry
            wide = struct.unpack_from("<QQ", fields[1])
            size, packed = (wide[0] if size == M32 else size), (wide[1] if packed == M32 else packed)
        here = (rest[:n_name], (flags, method, clock, date), crc, size, packed)
        there = (raw, common, entry.crc32, entry.size, entry.compressed_size)
        for field, local, central in zip(("name", "flags, method, time", "crc32", "size", "compressed size"), here, there):
            if local != central:
                self.findings.append(f"{what} contradicts the central directory: {field} {local!r} and {central!r}")
        start = entry.header_offset + LOCAL.size + n_name + n_extra
        if start + entry.compressed_size > limit:
            self.findings.append(f"the data of entry {entry.name!r} reaches into the central directory")
        return entry._replace(data_offset=start)

    def check_layout(self, entries: list[Entry], limit: int) -> list[tuple[int, int]]:
        """Entries must not overlap; gives the ranges that belong to none."""
        gaps, at, owner = [], 0, ""
        for entry in sorted(entries, key=lambda entry: (entry.header_offset, entry.end)):
            if entry.header_offset < at:
                self.findings.append(f"entries {owner!r} and {entry.name!r} overlap")
            elif entry.header_offset > at:
                gaps.append((at, entry.header_offset))
            if entry.end >= at:
                at, owner = entry.end, entry.name
        return gaps + ([(at, limit)] if at < limit else [])

    def check_names(self, entries: list[Entry]) -> None:
        seen: set[str] = set()
        for entry in entries:
            if not good_name(entry.name):
                self.findings.append(f"the name {entry.name!r} is not allowed")
            if entry.name.casefold() in seen:
                self.findings.append(f"the name {entry.name!r} comes twice (upper and lower case count as equal)")
            seen.add(entry.name.casefold())


def extra_fields(extra: bytes) -> dict[int, bytes] | None:
    """Extra fields by id; None when they do not parse or one comes twice. Padding zeros may end the block."""
    fields: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(extra):
        key, size = struct.unpack_from("<HH", extra, at)
        if at + 4 + size > len(extra) or key in fields:
            return None
        fields[key] = extra[at + 4 : at + 4 + size]
        at += 4 + size
    return fields if not extra[at:].strip(b"\0") else None


def good_name(name: str) -> bool:
    """Whether an entry's name means one file on every system, and one below the folder that it is unpacked into."""
    if not name or len(name.encode("utf-8", "surrogatepass")) > 1024 or any(letter in name for letter in '\\:*?"<>|'):
        return False
    if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for letter in name) or unicodedata.normalize("NFC", name) != name:
        return False
    parts = (name[:-1] if name.endswith("/") else name).split("/")
    return not any(part in ("", ".", "..") or part.endswith((" ", ".")) for part in parts)


# Reading content


class Progress:
    """A line on a terminal: how much was read, how much is left. Counts the bytes of all threads."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.started = self.shown = time.monotonic()
        self.lock = threading.Lock()
        self.visible = sys.stderr.isatty()

    def advance(self, count: int) -> None:
        with self.lock:
            self.done += count
            now = time.monotonic()
            if not self.visible or now - self.shown < 0.2:
                return
            self.shown = now
            left = (now - self.started) * max(0, self.total - self.done) / max(1, self.done)
            sys.stderr.write(f"\r  read {self.done >> 20} of {self.total >> 20} MiB, {left:.0f} s left ")
            sys.stderr.flush()

    def finish(self) -> None:
        if self.visible and self.shown != self.started:
            sys.stderr.write("\r" + " " * 60 + "\r")
            sys.stderr.flush()


def blocks(stream: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    stream.seek(offset)
    while size > 0:
        block = stream.read(min(size, BLOCK))
        if not block:
            return
        size -= len(block)
        yield block


def content(stream: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """An entry's uncompressed bytes. Raises ValueError when they are cut off, damaged, or more or fewer than promised."""
    unpacker = zlib.decompressobj(-15) if entry.method == 8 else None
    given = taken = 0
    for block in blocks(stream, entry.data_offset, entry.compressed_size):
        taken += len(block)
        if unpacker is None:
            given += len(block)
            yield block
            continue
        while block:
            try:
                piece = unpacker.decompress(block, BLOCK)
            except zlib.error as error:
                raise ValueError(f"entry {entry.name!r} has damaged deflate data") from error
            block = unpacker.unconsumed_tail
            given += len(piece)
            if given > entry.size:
                raise ValueError(f"entry {entry.name!r} unpacks to more than it promises")
            yield piece
            if unpacker.eof and (block or unpacker.unused_data or taken < entry.compressed_size):
                raise ValueError(f"entry {entry.name!r} has bytes behind its deflate data")
    if taken < entry.compressed_size:
        raise ValueError(f"entry {entry.name!r} is cut off")
    if unpacker is not None and (not unpacker.eof or given != entry.size):
        raise ValueError(f"entry {entry.name!r} does not unpack to the size that it promises")


def prefix_hashes(path: Path, stops: Iterable[int], changes: dict[int, bytes], progress: Progress) -> dict[int, str]:
    """sha256 of the first bytes up to each stop, with a few bytes (all in the first block) replaced."""
    digest, at, found = hashlib.sha256(), 0, {}
    wanted = sorted(set(stops))
    with open(path, "rb") as stream:
        for stop in wanted:
            for block in blocks(stream, at, stop - at):
                for place, data in changes.items():
                    if at <= place < at + len(block):
                        block = block[: place - at] + data + block[place - at + len(data) :]
                digest.update(block)
                at += len(block)
                progress.advance(len(block))
            if at == stop:
                found[stop] = digest.hexdigest()
    return found


def is_pe(head: bytes) -> bool:
    if len(head) < 64 or head[:2] != b"MZ":
        return False
    at = struct.unpack_from("<I", head, 0x3C)[0]
    return head[at : at + 4] == b"PE\0\0"


def signature(head: bytes) -> tuple[tuple[int, int] | None, dict[int, bytes]]:
    """Offset and size of a PE's Authenticode table (None for an unsigned file), and the fields as they were before signing."""
    if not is_pe(head):
        return None, {}
    optional = struct.unpack_from("<I", head, 0x3C)[0] + 24
    if optional + 240 > len(head):
        return None, {}
    directories = optional + (112 if struct.unpack_from("<H", head, optional)[0] == 0x20B else 96)
    if struct.unpack_from("<I", head, directories - 4)[0] <= 4:
        return None, {}
    start, size = struct.unpack_from("<II", head, directories + 32)
    return ((start, size), {optional + 64: bytes(4), directories + 32: bytes(8)}) if size else (None, {})


# One file


class Expected:
    """What the papers say about one file."""

    def __init__(self) -> None:
        self.sums: list[str] = []
        self.manifest: Path | None = None
        self.pins: list[Pin] = []

    def add(self, other: Expected) -> None:
        """Take over what other papers say about the same file."""
        self.sums += [sha256 for sha256 in other.sums if sha256 not in self.sums]
        self.pins += [row for row in other.pins if row not in self.pins]
        self.manifest = self.manifest or other.manifest


def verify_plain(path: Path, expected: Expected, progress: Progress) -> Result:
    """A file without inner structure: its size and sha256."""
    check = Check("hashes", HASH)
    if not path.is_file():
        check.bad("it is a folder, a device or a link to nowhere, not a file")
        return Result(path, 0, "", [check])
    size = path.stat().st_size
    sha256 = prefix_hashes(path, [size], {}, progress).get(size, "")
    compare_papers(check, expected, size, sha256)
    return Result(path, size, sha256, [check])


def compare_papers(check: Check, expected: Expected, size: int, sha256: str) -> None:
    """SHA256SUMS and pins. Several builds may have a file of this name: one of them is enough."""
    for wanted in expected.sums:
        if wanted == sha256:
            check.good(f"as in {SUMS}")
        else:
            check.bad(f"it has sha256 {sha256}, {SUMS} says {wanted}")
    if expected.pins:
        if any(row.sha256 == sha256 and row.size in (None, size) for row in expected.pins):
            check.good("as pinned")
        else:
            row = expected.pins[0]
            check.bad(f"it has {size} bytes and sha256 {sha256}, pinned in {row.component}.txt is {' or '.join(row.sha256 for row in expected.pins)}")


class SingleFile:
    """One run over one single-file executable."""

    def __init__(self, path: Path, expected: Expected, pins: Pins | None, progress: Progress) -> None:
        self.path, self.expected, self.pins, self.progress = path, expected, pins, progress
        self.hashes, self.sums = Check("hashes", HASH), Check(SUMS, HASH)
        self.structure, self.entries, self.host = Check("ZIP structure", STRUCTURE), Check("entries", ENTRY), Check("host block", HOST)
        self.version, self.limit = Check("version string", VERSION), Check("Windows limit", LIMIT)
        self.binaries = Check("programs and libraries", NOTHING)
        self.binaries.notes.append("not read by this program: invoke verify artifact does")
        self.document = read_manifest(expected.manifest) if expected.manifest is not None else None

    def verify(self) -> Result:
        if not self.path.is_file():
            self.hashes.bad("it is a folder, a device or a link to nowhere, not a file")
            return Result(self.path, 0, "", [self.hashes])
        with open(self.path, "rb") as stream:
            self.size = os.fstat(stream.fileno()).st_size
            self.head = stream.read(HEAD_SIZE)
            self.check_limit()
            self.certificate, unsigned = signature(self.head)
            scanner = Scanner(stream, self.archive_end(stream))
            archive = scanner.scan()
            self.structure.problems += scanner.findings
            index = self.read_index(stream, archive)
            host_size = index["host"]["size"] if index else 0
            measured = self.measure(stream, archive, scanner.size, host_size, unsigned)
            self.check_hashes()
            if index is not None and not 0 < host_size <= self.size:
                self.host.bad(f"{INDEX} says that the host block has {host_size} bytes, of a file that has {self.size}")
            if archive is not None and index is not None and measured and not scanner.findings and not self.host.problems:
                with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    self.check_layout(archive, host_size, view)
                    self.check_crcs(archive)
                    self.check_entries(archive, index)
                    self.check_host(archive, index, host_size)
                    self.check_version(archive, index, host_size, view)
            else:
                checks = (self.hashes, self.sums, self.structure, self.entries, self.host, self.limit)
                if not any(check.problems for check in checks):
                    self.structure.bad("its entries cannot be read to their ends")
                self.check_crcs(archive)
                for check in (self.entries, self.host, self.version):
                    if not check.looked:
                        check.notes.append("the ZIP structure or its index is damaged")
        return Result(self.path, self.size, self.sha256, [self.hashes, self.sums, self.structure, self.entries, self.host, self.version, self.binaries, self.limit])

    def check_limit(self) -> None:
        if not is_pe(self.head):
            self.limit.good("not a Windows program")
        elif self.size < WINDOWS_LIMIT:
            self.limit.good("below 4 GiB")
        elif self.path.name.lower().endswith(".exe"):
            self.limit.bad(f"it is {self.size} bytes long, and Windows starts nothing of 4 GiB or more")
        else:
            self.limit.notes.append("4 GiB or more: Windows cannot start it, and its name does not promise that")

    def archive_end(self, stream: BinaryIO) -> int:
        """Where the ZIP must end: at the end, or where a signature's table begins (on a multiple of 8, after up to 7 zeros)."""
        if self.certificate is None:
            return self.size
        start, length = self.certificate
        if start + length != self.size or start > self.size:
            self.structure.bad(f"the certificate table (offset {start}, {length} bytes) does not end at the end of the file")
            return self.size
        self.structure.good(f"an Authenticode signature of {length} bytes follows the archive")
        if Scanner(stream, start).scan() is not None:
            return start
        stream.seek(max(0, start - 7))
        before = stream.read(min(7, start))
        return start - (len(before) - len(before.rstrip(b"\0")))

    def read_index(self, stream: BinaryIO, archive: Archive | None) -> dict[str, Any] | None:
        if archive is None:
            return None
        entry = archive.get(INDEX)
        if entry is None:
            self.entries.bad(f"there is no {INDEX}")
            return None
        try:
            if max(entry.size, entry.compressed_size) > PAPER_LIMIT:
                raise ValueError("it is too long")
            stream.seek(entry.data_offset)
            data = stream.read(entry.compressed_size)
            if entry.method == 8:
                data = zlib.decompressobj(-15).decompress(data, entry.size + 1)
            value: dict[str, Any] = json.loads(data.decode("utf-8"))
            json.dumps(value, ensure_ascii=False).encode("utf-8")
            if not isinstance(value["host"]["size"], int) or not isinstance(value["host"]["sha256"], str) or not isinstance(value["engine"], str):
                raise TypeError("a value has the wrong type")
            check_shape(value["libraries"], [{"name": str, "sha256": str}], "libraries")
            if not all(isinstance(row["size"], int) for row in value["libraries"]) or value["schema"] != 1:
                raise TypeError("a size is none, or its schema is not 1")
        except (ValueError, KeyError, TypeError, zlib.error, RecursionError) as error:
            self.entries.bad(f"{INDEX} is not what its format says: {error}")
            return None
        return value

    def measure(self, stream: BinaryIO, archive: Archive | None, end: int, host_size: int, unsigned: dict[int, bytes]) -> bool:
        """All hashes, on all processors; whether every entry could be read."""
        entries = [entry for entry in archive.entries if entry.end <= self.size] if archive else []
        host_size = max(0, min(host_size, self.size))
        self.sha256s: dict[str, str] = {}
        self.crc32s: dict[str, int] = {}
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            whole = pool.submit(prefix_hashes, self.path, [self.size] + ([] if self.certificate else [host_size]), {}, self.progress)
            without = pool.submit(prefix_hashes, self.path, [end, host_size] if self.certificate else [], unsigned, self.progress)
            jobs = [(entry, pool.submit(self.measure_entry, entry)) for entry in entries]
        found, prefix = whole.result(), without.result()
        if self.size not in found:
            raise Refusal(USAGE, f"{self.path} changed its size while it was read: verify it again when it is finished.")
        self.sha256, self.unsigned_sha256 = found[self.size], prefix.get(end, "")
        self.host_sha256 = (prefix if self.certificate else found).get(host_size, "")
        complete = archive is not None and len(entries) == len(archive.entries)
        for entry, job in jobs:
            try:
                self.sha256s[entry.name], self.crc32s[entry.name] = job.result()
            except ValueError as error:
                self.entries.bad(str(error))
                complete = False
        return complete

    def measure_entry(self, entry: Entry) -> tuple[str, int]:
        digest, crc = hashlib.sha256(), 0
        with open(self.path, "rb") as stream:
            for block in content(stream, entry):
                digest.update(block)
                crc = zlib.crc32(block, crc)
                self.progress.advance(len(block))
        return digest.hexdigest(), crc & M32

    def check_hashes(self) -> None:
        document, sha256 = self.document, self.sha256
        if document is None:
            self.hashes.notes.append(f"no {self.path.name}{MANIFEST}")
        elif (document["size"], document["sha256"]) == (self.size, sha256):
            self.hashes.good("size and sha256 are the manifest's")
        elif self.unsigned_sha256 and self.unsigned_sha256 == document["sha256"]:
            self.hashes.good("without its signature the file has the manifest's sha256")
        elif document["size"] != self.size:
            self.hashes.bad(f"the file has {self.size} bytes, its manifest says {document['size']}")
        else:
            self.hashes.bad(f"the file has sha256 {sha256}, its manifest says {document['sha256']}")
        if not self.expected.sums and not self.expected.pins:
            self.sums.notes.append(f"it stands in no {SUMS}")
        compare_papers(self.sums, self.expected, self.size, sha256)

    def check_layout(self, archive: Archive, host_size: int, view: mmap.mmap) -> None:
        """Nothing hides between the parts: gaps lie in the host only, and between the members of a universal host only zeros."""
        first = min((entry.header_offset for entry in archive.entries), default=0)
        for start, end in archive.gaps:
            if end <= host_size:
                if self.head.startswith(UNIVERSAL) and start >= first and view[start:end].strip(b"\0"):
                    self.structure.bad(f"bytes {start} to {end} belong to no entry and are not zeros")
            else:
                self.structure.bad(f"bytes {max(start, host_size)} to {end} belong to no entry")
        self.structure.good(f"{len(archive.entries)} entries, headers agree, nothing behind the end record")

    def check_crcs(self, archive: Archive | None) -> None:
        for entry in archive.entries if archive else ():
            crc = self.crc32s.get(entry.name, entry.crc32)
            if crc != entry.crc32:
                self.entries.bad(f"entry {entry.name} has crc32 {crc:08x}, its header says {entry.crc32:08x}")

    def check_entries(self, archive: Archive, index: dict[str, Any]) -> None:
        names = [row["name"] for row in index["libraries"]]
        for row in index["libraries"]:
            entry = archive.get(row["name"])
            if entry is None:
                self.entries.bad(f"{INDEX} lists {row['name']}, which is not in the file")
            elif (entry.size, self.sha256s[entry.name]) != (row["size"], row["sha256"]):
                self.entries.bad(f"{row['name']} is not the library that {INDEX} lists: sha256 {self.sha256s[entry.name]}, listed {row['sha256']}")
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.entries.bad(f"{INDEX} lists {name} twice")
        self.entries.good(f"{len(names)} libraries as in {INDEX}")
        if self.document is None:
            return
        described = {row["name"]: row for row in self.document["entries"]}
        for name, row in described.items():
            entry = archive.get(name)
            if entry is None:
                self.entries.bad(f"the manifest lists {name}, which is not in the file")
                continue
            method = {0: "stored", 8: "deflate"}[entry.method]
            here = (method, entry.size, entry.compressed_size, entry.header_offset, f"{entry.crc32:08x}", self.sha256s[name])
            for key, value in zip(("method", "size", "compressed_size", "offset", "crc32", "sha256"), here):
                if value != row[key]:
                    self.entries.bad(f"entry {name} has {key.replace('_', ' ')} {value}, the manifest says {row[key]}")
        for entry in archive.entries:
            if entry.name not in described:
                self.entries.bad(f"entry {entry.name} is not in the manifest")
        self.entries.good("all as in the manifest")
        self.check_pins(index, described)

    def check_pins(self, index: dict[str, Any], described: dict[str, Any]) -> None:
        """A library of a pinned component must be one of its files. CPU libraries are made with the engine and have no pin."""
        checked = 0
        for row in index["libraries"]:
            component = described.get(row["name"], {}).get("component", "").partition("/")[0]
            if self.pins is None or row.get("kind") == "cpu" or component not in self.pins.components:
                continue
            checked += 1
            if self.sha256s.get(row["name"]) not in [pin.sha256 for pin in self.pins.components[component]]:
                self.entries.bad(f"{row['name']} has sha256 {self.sha256s.get(row['name'])}, which pin/{component}.txt does not list")
        if checked:
            self.entries.good(f"{checked} as pinned")

    def check_host(self, archive: Archive, index: dict[str, Any], host_size: int) -> None:
        entry = archive.get(INDEX)
        if entry is not None and entry.header_offset != host_size:
            self.host.bad(f"the host block should end at byte {host_size}, but {INDEX} begins at {entry.header_offset}")
        if index["host"]["sha256"] != self.host_sha256:
            self.host.bad(f"the host block has sha256 {self.host_sha256}, {INDEX} says {index['host']['sha256']}")
        if self.document is not None and (self.document["host"]["size"], self.document["host"]["sha256"]) != (host_size, self.host_sha256):
            self.host.bad(f"the host block has {host_size} bytes and sha256 {self.host_sha256}, the manifest says otherwise")
        self.host.good(f"{host_size} bytes, sha256 {self.host_sha256[:16]}...")

    def check_version(self, archive: Archive, index: dict[str, Any], host_size: int, view: mmap.mmap) -> None:
        engine = index["engine"]
        tree = self.document.get("tree", "") if self.document is not None else ""
        if self.document is not None and self.document["engine"] != engine:
            self.version.bad(f"{INDEX} says {engine}, the manifest {self.document['engine']}")
        for name, start, end in self.programs(archive, host_size):
            if not finds(view, engine.encode("utf-8"), start, end):
                self.version.bad(f"{name} does not contain the version string {engine}")
            elif tree and view.find(tree.encode(), start, end) < 0:
                self.version.bad(f"{name} was not built from the tree {tree} that the manifest names")
        if archive.comment != engine.encode("utf-8"):
            self.version.bad(f"the ZIP comment is {archive.comment[:80]!r}, {INDEX} says {engine}")
        self.version.good(engine)

    def programs(self, archive: Archive, host_size: int) -> Iterator[tuple[str, int, int]]:
        """Name, start and end of the engine's programs: the native ones of a universal host and what comes before them, or the host."""
        members = [entry for entry in archive.entries if entry.end <= host_size and entry.name.startswith("bin/")]
        if not self.head.startswith(UNIVERSAL):
            yield "the host", 0, host_size
            return
        yield "bin/windows-x86_64", 0, min((entry.header_offset for entry in members), default=host_size)
        for entry in members:
            if entry.name[len("bin/") :] in PLATFORMS and entry.method == 0:
                yield entry.name, entry.data_offset, entry.end


def finds(view: mmap.mmap, needle: bytes, start: int, end: int) -> bool:
    """Whether ``needle`` lies in the range and is not just the beginning of a longer version (c1 of c12)."""
    at = view.find(needle, start, end)
    while at >= 0:
        if at + len(needle) >= end or not view[at + len(needle) : at + len(needle) + 1].isalnum():
            return True
        at = view.find(needle, at + 1, end)
    return False


# Folders


class Folder:
    """The papers of one folder. ``expected`` are the files that are there; ``absent`` those that are not."""

    def __init__(self, folder: Path, pins: Path | None) -> None:
        self.folder = folder
        # The papers of a published cut lie in releases/FULL-TAG/, its single files and components in the root above.
        self.roots = [folder] + ([folder.parent.parent] if folder.parent.name == "releases" else [])
        self.expected: dict[Path, Expected] = {}
        self.absent: list[Path] = []
        self.problems: list[Result] = []
        place = pins or next((root / PINS for root in self.roots if any((root / PINS).glob("*.txt"))), None)
        self.pins = Pins.read(place) if place is not None else None
        self.read_sums()
        self.read_pins()
        for path in sorted(folder.glob("*" + MANIFEST)):
            expected = self.about(path.name[: -len(MANIFEST)])
            if expected is not None:
                expected.manifest = path

    @property
    def speaks(self) -> bool:
        return bool(self.expected or self.absent or self.problems)

    def about(self, *names: str) -> Expected | None:
        """What to expect of the file that is at one of these places, looked for in this order; None where there is none."""
        places = [root / name for root in self.roots for name in names]
        here = next((place for place in places if os.path.lexists(place)), None)
        if here is not None:
            return self.expected.setdefault(here, Expected())
        above = names[0].startswith("components/") or SINGLE_FILE.search(names[0])
        missing = self.roots[-1 if above else 0] / names[0]
        if missing not in self.absent:
            self.absent.append(missing)
        return None

    def read_sums(self) -> None:
        path = self.folder / SUMS
        if not os.path.lexists(path):
            return
        check, listed = Check(SUMS, HASH), {}
        try:
            listed = parse_sums(read_limited(path, PAPER_LIMIT).decode("utf-8"))
        except Refusal as error:
            check.bad(error.message.rstrip("."))
        except UnicodeDecodeError as error:
            check.bad(f"it is not UTF-8 text (byte {error.start})")
        except ValueError as error:
            check.bad(str(error))
        for name, sha256 in listed.items():
            if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or "\0" in name or (os.name == "nt" and ":" in name):
                check.bad(f"it names {name!r}, which leads out of the folder")
                continue
            expected = self.about(name)
            if expected is not None:
                expected.sums.append(sha256)
        if check.problems:
            self.problems.append(Result(path, 0, "", [check]))

    def read_pins(self) -> None:
        for _, rows in sorted(self.pins.components.items() if self.pins is not None else ()):
            homes = list(dict.fromkeys(str(PurePosixPath(row.path).parent) for row in rows if row.platform != "sidecar"))
            for row in rows:
                name = PurePosixPath(row.path).name
                expected = self.about(row.path, name, *(f"{home}/{name}" for home in homes if row.platform == "sidecar"))
                if expected is not None:
                    expected.pins.append(row)


def check_files(expected: dict[Path, Expected], pins: Pins | None, progress: Progress) -> list[Result]:
    """Each file by what it is: a single-file executable has a manifest or the name of one, or nothing speaks of it."""
    progress.total += sum(2 * path.stat().st_size for path in expected if path.is_file())
    results = []
    for path, about in expected.items():
        if about.manifest is not None or SINGLE_FILE.search(path.name) or not (about.sums or about.pins):
            results.append(SingleFile(path, about, pins, progress).verify())
        else:
            results.append(verify_plain(path, about, progress))
    return results


def of_folder(folder: Path, pins: Path | None, progress: Progress) -> tuple[list[Result], list[Path]]:
    """Everything that the papers of a folder speak of; in the root of a published repository also those of its releases."""
    found = [Folder(folder, pins)] + [Folder(path.parent, pins) for path in sorted(folder.glob(f"releases/*/{SUMS}"))]
    if not any(one.speaks for one in found):
        raise Refusal(NOTHING, f"No {SUMS}, no {MANIFEST[1:]} and no pin file in {folder} speaks of any file: put this program beside them.")
    merged: dict[Path, Expected] = {}
    for one in found:
        for path, about in one.expected.items():
            merged.setdefault(path, Expected()).add(about)
    known = next((one.pins for one in found if one.pins is not None), None)
    results = check_files(dict(sorted(merged.items())), known, progress)
    return [problem for one in found for problem in one.problems] + results, list(dict.fromkeys(path for one in found for path in one.absent))


def papers_about(path: Path, pins: Path | None) -> Folder:
    """The papers beside a file; where they do not speak of it, those of a release below or of a folder above that do."""
    beside = Folder(path.parent, pins)
    if path in beside.expected:
        return beside
    others = [release.parent for release in sorted(path.parent.glob(f"releases/*/{SUMS}"))] + list(path.parent.parents)[:4]
    for folder in others:
        if any(os.path.lexists(folder / name) for name in (SUMS, PINS)):
            other = Folder(folder, pins)
            if path in other.expected:
                return other
    return beside


def of_file(path: Path, manifest: Path | None, pins: Path | None, progress: Progress) -> tuple[list[Result], list[Path]]:
    """One file against its papers, and those papers against SHA256SUMS."""
    papers = papers_about(path, pins)
    about = papers.expected.get(path, Expected())
    about.manifest = manifest or about.manifest
    beside = [papers.folder / name for name in PAPERS_BESIDE] + ([about.manifest] if about.manifest is not None else [])
    also = {paper: papers.expected[paper] for paper in beside if paper in papers.expected and papers.expected[paper].sums}
    also.update({paper: Expected() for paper in beside if os.path.lexists(paper) and not paper.is_file() and paper not in also})
    results = check_files({path: about}, papers.pins, progress)
    return papers.problems + results + [verify_plain(paper, expected, progress) for paper, expected in also.items()], []


# The command


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def show(results: list[Result], absent: list[Path]) -> None:
    """A table: a line a file that is well and one a failed or skipped row below it."""
    rows: list[tuple[str, str, str]] = []
    for result in results:
        rows.append((str(result.path), "FAILED" if result.failed else "ok", result.sha256 or "-"))
        for check in result.checks:
            if check.state != "ok" or len(result.checks) > 1:
                rows.append((f"  {check.name}", check.state, check.detail))
    rows += [(str(path), "skipped", "not there: not checked") for path in absent]
    rows = [(printable(name), state, printable(text)) for name, state, text in rows]
    widths = [max(len(row[column]) for row in rows + [("file", "state", "")]) for column in (0, 1)]
    for row in [("file", "state", "sha256, or what was found")] + rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip())


def conclude(results: list[Result], absent: list[Path], strict: bool) -> tuple[int, str]:
    """Exit code and final line."""
    check = leading(check for result in results for check in result.checks)
    if check is not None:
        result = next(result for result in results if check in result.checks)
        bad = sum(bool(result.failed) for result in results)
        more = f" ({bad} files failed)" if bad > 1 else ""
        return check.code, f"FAILED: {result.path.name} is not what it claims to be: {check.name}: {check.problems[0]}{more}."
    if not results:
        return NOTHING, "FAILED: none of the listed files is here, so nothing was checked."
    if absent and strict:
        return INCOMPLETE, f"FAILED: {absent[0]} is listed and not there ({len(absent)} in all)."
    files = "1 file is" if len(results) == 1 else f"{len(results)} files are"
    more = f"; {len(absent)} listed and not there, not checked" if absent else ""
    return 0, f"ok: {files} as published{more}."


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refusal(USAGE, f"{message[:1].upper()}{message[1:]}: --help lists what can be given.")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = Parser(prog="verify.py", description=(__doc__ or "").split("\n\n")[0], epilog=(__doc__ or "").split("\n\n")[-1])
    parser.add_argument("paths", nargs="*", metavar="FILE|FOLDER", help="what to check (default: the folder of this program)")
    parser.add_argument("--pins", help="a folder of pin files to trust instead of the pin/ that is there")
    parser.add_argument("--manifest", help="the manifest of the one FILE (default: FILE.MANIFEST.json beside it)")
    parser.add_argument("--strict", action="store_true", help="a listed file that is not there is a failure")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    return parser.parse_args(words)


def run(given: argparse.Namespace, progress: Progress) -> tuple[list[Result], list[Path]]:
    """Results and absent files of all that was asked for. Raises Refusal."""
    pins, manifest = Path(given.pins) if given.pins else None, Path(given.manifest) if given.manifest else None
    if pins is not None and not pins.is_dir():
        raise Refusal(USAGE, f"There is no folder {pins} of pin files.")
    if manifest is not None and len(given.paths) != 1:
        raise Refusal(USAGE, "--manifest goes with one FILE.")
    results: list[Result] = []
    absent: list[Path] = []
    for text in given.paths or [str(Path(__file__).resolve().parent)]:
        path = Path(os.path.abspath(text))
        if path.is_dir():
            if manifest is not None:
                raise Refusal(USAGE, "--manifest goes with one FILE.")
            found = of_folder(path, pins, progress)
        elif path.is_file():
            found = of_file(path, manifest, pins, progress)
        else:
            raise Refusal(USAGE, f"There is no file {text}." if not path.exists() else f"{text} is a device or a pipe, not a file.")
        results += found[0]
        absent += found[1]
    return results, absent


def main(words: list[str]) -> int:
    """The whole program; gives the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    progress = Progress(0)
    as_json = "--json" in words
    try:
        given = arguments(words)
        results, absent = run(given, progress)
        code, line = conclude(results, absent, given.strict)
    except (Refusal, OSError) as error:
        progress.finish()
        code = error.code if isinstance(error, Refusal) else USAGE
        line = error.message if isinstance(error, Refusal) else f"Cannot read {error.filename or 'a file'}: {error.strerror or error}."
        if as_json:
            print(json.dumps({"schema": 1, "outcome": "unread", "exit_code": code, "error": line, "files": [], "absent": []}, indent=1))
        print(f"error: {printable(line)}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("error: Interrupted.", file=sys.stderr)
        return 130
    progress.finish()
    if as_json:
        files = [
            {"file": str(one.path), "size": one.size, "sha256": one.sha256, "outcome": "failed" if one.failed else "verified", "checks": [check.to_dict() for check in one.checks]}
            for one in results
        ]
        print(json.dumps({"schema": 1, "outcome": "failed" if code else "verified", "exit_code": code, "error": line if code else "", "files": files, "absent": [str(path) for path in absent]}, indent=1))
    else:
        show(results, absent)
    print(printable(line), file=sys.stderr if as_json else sys.stdout)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
