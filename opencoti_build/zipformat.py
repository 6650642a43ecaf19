"""ZIP, the part of it we write and accept (source: PKWARE APPNOTE.TXT, sections 4.3 to 4.5).

The standard library's ``zipfile`` is lenient on purpose: it takes trailing bytes, headers that contradict each other and
overlapping entries. An artifact whose hash people pin needs the opposite, so reading here is strict and writing is fixed:
absolute offsets from byte 0, methods stored and deflate, no data descriptors, times 1980-01-01, one end record and nothing
behind it, zip64 records only where a number does not fit.
"""

from __future__ import annotations

import os
import struct
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import BinaryIO

from .console import count_of
from .errors import ContainerError

LOCAL_SIGNATURE = b"PK\x03\x04"
CENTRAL_SIGNATURE = b"PK\x01\x02"
END_SIGNATURE = b"PK\x05\x06"
END64_SIGNATURE = b"PK\x06\x06"
LOCATOR64_SIGNATURE = b"PK\x06\x07"

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")

ZIP64_EXTRA = 0x0001
MAX16 = 0xFFFF
MAX32 = 0xFFFFFFFF

DOS_DATE = 0x0021
"""1980-01-01, the first day a ZIP can name; together with time 0 it is every entry's time (no time zone reaches the bytes)."""

FLAG_UTF8 = 0x0800
_FLAGS_ALLOWED = FLAG_UTF8 | 0x0006
"""Bits 1 and 2 tell how hard a deflater tried; every other bit changes how the entry must be read."""

_MADE_BY_UNIX = 3 << 8

_VERSION = 20
_VERSION_ZIP64 = 45
"""What a reader must know, in tenths (APPNOTE 4.4.3): deflate, zip64. Common readers refuse an entry that asks for more."""
_KINDS = {0o120000: "a symbolic link", 0o040000: "a folder", 0o020000: "a device", 0o060000: "a device", 0o010000: "a pipe", 0o140000: "a socket"}
_MAX_CENTRAL = 64 << 20
"""Bytes of central directory we are willing to hold in memory; our own files have a few kilobytes."""

MODE_PROGRAM = 0o100755
MODE_DATA = 0o100644


class Method(IntEnum):
    """Compression methods that are allowed."""

    STORED = 0
    DEFLATED = 8


@dataclass(frozen=True)
class Entry:
    """One member. Sizes in bytes, ``header_offset`` and ``data_offset`` from byte 0 of the file.

    ``central`` holds the central header as it was read, so that rewriting a foreign directory changes nothing in it.
    """

    name: str
    size: int
    crc32: int
    header_offset: int
    data_offset: int
    method: int = Method.STORED
    compressed_size: int = -1
    mode: int = MODE_DATA
    central: bytes = field(default=b"", repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.compressed_size < 0:
            object.__setattr__(self, "compressed_size", self.size)

    @property
    def end(self) -> int:
        """Offset just behind the entry's data."""
        return self.data_offset + self.compressed_size


@dataclass(frozen=True)
class Directory:
    """A whole archive as read. ``gaps`` are the byte ranges (start, end) before the directory that no entry owns."""

    entries: tuple[Entry, ...]
    offset: int
    size: int
    end: int
    comment: bytes
    zip64: bool
    gaps: tuple[tuple[int, int], ...]

    def get(self, name: str) -> Entry | None:
        """The entry called ``name``, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass(frozen=True)
class Scan:
    """What reading gave. ``directory`` is None when no central directory could be read; ``findings`` are sentences.

    ``trailing`` counts the bytes behind the end record, ``present`` says whether there was anything that means to be a ZIP.
    """

    directory: Directory | None
    findings: tuple[str, ...]
    present: bool
    trailing: int = 0


def name_problem(name: str) -> str | None:
    """Why ``name`` must not be an entry's name, or None.

    A name must mean the same file on every system and never one outside the folder it is unpacked into.
    """
    if not name:
        return "is empty"
    if len(name.encode("utf-8", "surrogatepass")) > 1024:
        return "is longer than 1024 bytes"
    if not (name.isascii() and name.isprintable()):
        if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for letter in name):
            return "holds a control or unassigned character"
        if unicodedata.normalize("NFC", name) != name:
            return "is not in Unicode normal form C"
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/"):
        return "is absolute"
    if any(letter in name for letter in ':*?"<>|'):
        return "holds a character that Windows does not allow in file names"
    parts = name.removesuffix("/").split("/")
    if any(part == ".." for part in parts):
        return "climbs out with '..'"
    if any(part in ("", ".") for part in parts):
        return "holds an empty or '.' part"
    if any(part.endswith((" ", ".")) for part in parts):
        return "has a part that ends with a space or a dot, which Windows drops"
    return None


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """ZIP's CRC-32 of ``data``, continued from ``value``."""
    return zlib.crc32(data, value) & MAX32


# Writing


def _encode_name(name: str) -> tuple[bytes, int]:
    raw = name.encode("utf-8")
    return raw, 0 if raw.isascii() else FLAG_UTF8


def local_header_size(name: str, size: int, compressed_size: int | None = None) -> int:
    """Bytes of the local header that ``local_header`` will give."""
    needs_zip64 = size >= MAX32 or (compressed_size or 0) >= MAX32
    return _LOCAL.size + len(_encode_name(name)[0]) + (20 if needs_zip64 else 0)


def local_header(name: str, size: int, crc: int, *, method: int = Method.STORED, compressed_size: int | None = None) -> bytes:
    """The local file header (APPNOTE 4.3.7); zip64 needs both sizes in its extra field (4.5.3)."""
    raw, flags = _encode_name(name)
    compressed = size if compressed_size is None else compressed_size
    extra = b""
    if size >= MAX32 or compressed >= MAX32:
        extra = struct.pack("<HHQQ", ZIP64_EXTRA, 16, size, compressed)
    version = _VERSION_ZIP64 if extra else _VERSION
    sizes = (MAX32, MAX32) if extra else (compressed, size)
    return _LOCAL.pack(LOCAL_SIGNATURE, version, flags, method, 0, DOS_DATE, crc, *sizes, len(raw), len(extra)) + raw + extra


def central_header(entry: Entry) -> bytes:
    """The central header (APPNOTE 4.3.12) of ``entry``; verbatim for an entry that was read from a file."""
    if entry.central:
        return entry.central
    raw, flags = _encode_name(entry.name)
    both = entry.size >= MAX32 or entry.compressed_size >= MAX32
    far = entry.header_offset >= MAX32
    extra = b""
    if both or far:
        values = ([entry.size, entry.compressed_size] if both else []) + ([entry.header_offset] if far else [])
        extra = struct.pack(f"<HH{len(values)}Q", ZIP64_EXTRA, 8 * len(values), *values)
    version = _VERSION_ZIP64 if extra else _VERSION
    return (
        _CENTRAL.pack(
            CENTRAL_SIGNATURE,
            _MADE_BY_UNIX | version,
            version,
            flags,
            entry.method,
            0,
            DOS_DATE,
            entry.crc32,
            MAX32 if both else entry.compressed_size,
            MAX32 if both else entry.size,
            len(raw),
            len(extra),
            0,
            0,
            0,
            entry.mode << 16,
            MAX32 if far else entry.header_offset,
        )
        + raw
        + extra
    )


def directory_bytes(entries: Sequence[Entry], offset: int, *, comment: bytes = b"") -> bytes:
    """Central directory and end records for ``entries``, to be written at ``offset``.

    Raises ContainerError for a comment that is too long or that a reader could mistake for an end record.
    """
    if len(comment) > MAX16 or END_SIGNATURE in comment:
        raise ContainerError("The ZIP comment is too long or looks like an end record.")
    headers = b"".join(central_header(entry) for entry in entries)
    out = [headers]
    count, size = len(entries), len(headers)
    if count >= MAX16 or size >= MAX32 or offset >= MAX32:
        out.append(_END64.pack(END64_SIGNATURE, _END64.size - 12, _MADE_BY_UNIX | 45, 45, 0, 0, count, count, size, offset))
        out.append(_LOCATOR64.pack(LOCATOR64_SIGNATURE, 0, offset + size, 1))
    short = min(count, MAX16)
    out.append(_END.pack(END_SIGNATURE, 0, 0, short, short, min(size, MAX32), min(offset, MAX32), len(comment)))
    out.append(comment)
    return b"".join(out)


# Reading


def _read_at(stream: BinaryIO, offset: int, count: int) -> bytes:
    stream.seek(offset)
    data = stream.read(count)
    while len(data) < count:
        more = stream.read(count - len(data))
        if not more:
            break
        data += more
    return data


@dataclass(frozen=True)
class _End:
    position: int
    start: int
    count: int
    size: int
    offset: int
    comment: bytes
    zip64: bool


def scan(stream: BinaryIO, size: int | None = None) -> Scan:
    """Read the archive that ends at byte ``size`` (default: the end of the file) and say everything that is wrong with it.

    Never raises for bad content; OSError passes through. Reads headers only, no entry data.
    """
    if size is None:
        size = stream.seek(0, os.SEEK_END)
    findings: list[str] = []
    end, present, trailing = _find_end(stream, size, findings)
    if end is None:
        return Scan(None, tuple(findings), present, trailing)
    if end.offset + end.size != end.start:
        findings.append(f"the end record puts the central directory at bytes {end.offset} to {end.offset + end.size}, but it must end at {end.start}")
        return Scan(None, tuple(findings), True)
    if end.size > _MAX_CENTRAL:
        findings.append(f"the central directory is {end.size} bytes long, more than the {_MAX_CENTRAL} that any file of ours may need")
        return Scan(None, tuple(findings), True)
    entries = _read_central(_read_at(stream, end.offset, end.size), end, findings)
    if entries is None:
        return Scan(None, tuple(findings), True)
    located = [_read_local(stream, entry, end.offset, findings) for entry in entries]
    gaps = _check_layout(located, end.offset, findings)
    _check_names(located, findings)
    directory = Directory(tuple(located), end.offset, end.size, size, end.comment, end.zip64, gaps)
    return Scan(directory, tuple(findings), True)


def read_directory(stream: BinaryIO, size: int | None = None) -> Directory:
    """``scan`` that raises ContainerError when anything at all is wrong."""
    result = scan(stream, size)
    if result.findings or result.directory is None:
        first = result.findings[0] if result.findings else "no central directory"
        raise ContainerError(f"The ZIP structure is damaged: {first}.", details="\n".join(result.findings[1:]))
    return result.directory


def _find_end(stream: BinaryIO, size: int, findings: list[str]) -> tuple[_End | None, bool, int]:
    """The end record, whether anything ZIP-like is there, and the number of trailing bytes."""
    base = max(0, size - _END.size - MAX16)
    tail = _read_at(stream, base, size - base)
    exact: list[int] = []
    near: list[int] = []
    position = tail.rfind(END_SIGNATURE)
    while position >= 0:
        if position + _END.size <= len(tail):
            comment_size = struct.unpack_from("<H", tail, position + 20)[0]
            stop = position + _END.size + comment_size
            if stop == len(tail):
                exact.append(position)
            elif stop < len(tail) and _plausible(stream, tail, position, base):
                near.append(position)
        position = tail.rfind(END_SIGNATURE, 0, position)
    # Program code holds the signature as a constant; only a candidate that leads to a directory counts.
    real = [position for position in exact if _plausible(stream, tail, position, base)]
    if not real and exact:
        real = exact[:1]
    if not real:
        if near:
            stop = near[0] + _END.size + struct.unpack_from("<H", tail, near[0] + 20)[0]
            findings.append(f"{count_of(len(tail) - stop, 'byte')} beyond the ZIP end record")
            return None, True, len(tail) - stop
        findings.append("there is no ZIP end record")
        return None, False, 0
    if len(real) > 1:
        findings.append(f"there are {len(real)} ZIP end records, and readers will not agree on which one counts")
        return None, True, 0
    at = real[0]
    _, disk, start_disk, here, total, cd_size, cd_offset, comment_size = _END.unpack_from(tail, at)
    if disk not in (0, MAX16) or start_disk not in (0, MAX16) or here != total:
        findings.append("the archive claims to span several disks")
        return None, True, 0
    absolute = base + at
    comment = tail[at + _END.size : at + _END.size + comment_size]
    plain = _End(absolute, absolute, total, cd_size, cd_offset, comment, False)
    return _with_zip64(stream, plain, findings), True, 0


def _plausible(stream: BinaryIO, tail: bytes, position: int, base: int) -> bool:
    """Whether the record at ``position`` of ``tail`` leads to a central directory."""
    _, _, _, _, total, size, offset, _ = _END.unpack_from(tail, position)
    absolute = base + position
    if MAX32 in (size, offset) or total == MAX16:
        return absolute >= _LOCATOR64.size and _read_at(stream, absolute - _LOCATOR64.size, 4) == LOCATOR64_SIGNATURE
    if offset + size > absolute:
        return False
    if total == 0:
        return size == 0 and offset == absolute
    return _read_at(stream, offset, 4) == CENTRAL_SIGNATURE or _read_at(stream, absolute - size, 4) == CENTRAL_SIGNATURE


def _with_zip64(stream: BinaryIO, end: _End, findings: list[str]) -> _End | None:
    """Follow the zip64 locator in front of the end record (APPNOTE 4.3.14, 4.3.15) where there is one."""
    locator_at = end.position - _LOCATOR64.size
    locator = _read_at(stream, locator_at, _LOCATOR64.size) if locator_at >= 0 else b""
    wants = end.count == MAX16 or MAX32 in (end.size, end.offset)
    if not locator.startswith(LOCATOR64_SIGNATURE):
        # 65535 entries exactly do not need zip64; a size or offset of 4 GiB - 1 would.
        if MAX32 in (end.size, end.offset):
            findings.append("the end record refers to a zip64 record that is not there")
            return None
        return end
    if not wants and end.offset + end.size == end.position:
        return end  # The last directory bytes only look like a locator.
    _, disk, at, disks = _LOCATOR64.unpack(locator)
    record = _read_at(stream, at, _END64.size) if at + _END64.size <= locator_at else b""
    if disk != 0 or disks > 1 or len(record) < _END64.size or not record.startswith(END64_SIGNATURE):
        findings.append("the zip64 locator points to no zip64 end record")
        return None
    _, record_size, _, _, disk, start_disk, here, total, size, offset = _END64.unpack(record)
    if record_size < _END64.size - 12 or at + 12 + record_size != locator_at:
        findings.append("the zip64 end record does not end where its locator begins")
        return None
    if disk or start_disk or here != total:
        findings.append("the archive claims to span several disks")
        return None
    for short, long, limit in ((end.count, total, MAX16), (end.size, size, MAX32), (end.offset, offset, MAX32)):
        if short not in (limit, long):
            findings.append("the zip64 end record contradicts the end record")
            return None
    return _End(end.position, at, total, size, offset, end.comment, True)


def _decode_name(raw: bytes, flags: int) -> str | None:
    try:
        return raw.decode("utf-8" if flags & FLAG_UTF8 or raw.isascii() else "cp437")
    except UnicodeDecodeError:
        return None


def _extra_fields(extra: bytes) -> dict[int, bytes] | None:
    """Extra fields by id, None when they do not parse or one comes twice. Up to three padding zeros may end the block."""
    fields: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(extra):
        key, size = struct.unpack_from("<HH", extra, at)
        if at + 4 + size > len(extra) or key in fields:
            return None
        fields[key] = extra[at + 4 : at + 4 + size]
        at += 4 + size
    return fields if not extra[at:].strip(b"\0") else None


def _asks_for(version: int) -> str:
    return f"asks for a reader of ZIP version {version / 10:.1f}; stored and deflated entries need {_VERSION_ZIP64 / 10} at most"


def _read_central(data: bytes, end: _End, findings: list[str]) -> list[Entry] | None:
    entries: list[Entry] = []
    at = 0
    for number in range(end.count):
        if at + _CENTRAL.size > len(data) or data[at : at + 4] != CENTRAL_SIGNATURE:
            findings.append(f"the central directory holds {number} entries, the end record promises {end.count}")
            return None
        (_, _, version, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, disk, _, attributes, offset) = _CENTRAL.unpack_from(data, at)
        stop = at + _CENTRAL.size + n_name + n_extra + n_comment
        if stop > len(data):
            findings.append(f"entry {number} of the central directory is cut off")
            return None
        raw_name = data[at + _CENTRAL.size : at + _CENTRAL.size + n_name]
        name = _decode_name(raw_name, flags)
        label = repr(name) if name is not None else f"number {number}"
        if name is None:
            findings.append(f"the name of entry number {number} is not UTF-8")
            name = raw_name.decode("utf-8", "replace")
        fields = _extra_fields(data[at + _CENTRAL.size + n_name : at + _CENTRAL.size + n_name + n_extra])
        if fields is None:
            findings.append(f"the extra fields of entry {label} do not parse")
            return None
        wide = fields.get(ZIP64_EXTRA, b"")
        values = []
        for value in (size, packed, offset):
            if value != MAX32 or ZIP64_EXTRA not in fields:
                values.append(value)
                continue
            if len(wide) < 8:
                findings.append(f"the zip64 field of entry {label} is too short")
                return None
            values.append(struct.unpack_from("<Q", wide)[0])
            wide = wide[8:]
        size, packed, offset = values
        if version > _VERSION_ZIP64:
            findings.append(f"entry {label} {_asks_for(version)}")
        if flags & 1:
            findings.append(f"entry {label} is encrypted")
        elif flags & 8:
            findings.append(f"entry {label} has a data descriptor")
        elif flags & ~_FLAGS_ALLOWED:
            findings.append(f"entry {label} has flags {flags:#06x} that change its meaning")
        if method not in (Method.STORED, Method.DEFLATED):
            findings.append(f"entry {label} has compression method {method}; only 0 (stored) and 8 (deflate) are allowed")
        elif method == Method.STORED and size != packed:
            findings.append(f"entry {label} is stored, but its two sizes differ: {size} and {packed}")
        kind = attributes >> 16 & 0o170000
        if kind not in (0, 0o100000) and not (kind == 0o040000 and name.endswith("/")):
            findings.append(f"entry {label} is marked as {_KINDS.get(kind, 'something other than a file')}")
        if disk not in (0, MAX16):
            findings.append(f"entry {label} claims to be on another disk")
        entries.append(Entry(name, size, crc, offset, offset, method, packed, attributes >> 16, data[at:stop]))
        at = stop
    if at != len(data):
        findings.append(f"{len(data) - at} bytes of the central directory belong to no entry")
        return None
    return entries


def _read_local(stream: BinaryIO, entry: Entry, limit: int, findings: list[str]) -> Entry:
    """Compare the local header with ``entry`` and return it with its data offset."""
    label = repr(entry.name)
    if entry.header_offset + _LOCAL.size > limit:
        findings.append(f"entry {label} points behind the central directory's start")
        return entry
    header = _read_at(stream, entry.header_offset, _LOCAL.size)
    if header[:4] != LOCAL_SIGNATURE or len(header) < _LOCAL.size:
        findings.append(f"entry {label} points to bytes that are no local header (offset {entry.header_offset})")
        return entry
    _, version, flags, method, time, date, crc, packed, size, n_name, n_extra = _LOCAL.unpack(header)
    if version > _VERSION_ZIP64:
        findings.append(f"the local header of entry {label} {_asks_for(version)}")
    rest = _read_at(stream, entry.header_offset + _LOCAL.size, n_name + n_extra)
    fields = _extra_fields(rest[n_name:])
    if fields is None or len(rest) < n_name + n_extra:
        findings.append(f"the local header of entry {label} is damaged")
        return entry
    if ZIP64_EXTRA in fields and MAX32 in (size, packed):
        wide = fields[ZIP64_EXTRA]
        if len(wide) < 16:
            findings.append(f"the zip64 field in the local header of entry {label} is too short")
            return entry
        wide_size, wide_packed = struct.unpack_from("<QQ", wide)
        size, packed = (wide_size if size == MAX32 else size), (wide_packed if packed == MAX32 else packed)
    _, _, _, c_flags, c_method, c_time, c_date, _, _, _, c_name, *_ = _CENTRAL.unpack_from(entry.central)
    pairs = (
        ("name", rest[:n_name], entry.central[_CENTRAL.size : _CENTRAL.size + c_name]),
        ("flags", flags, c_flags),
        ("method", method, c_method),
        ("time", (time, date), (c_time, c_date)),
        ("crc32", crc, entry.crc32),
        ("size", size, entry.size),
        ("compressed size", packed, entry.compressed_size),
    )
    for what, local, central in pairs:
        if local != central:
            findings.append(f"the local header of entry {label} contradicts the central directory: {what} {local!r} and {central!r}")
    start = entry.header_offset + _LOCAL.size + n_name + n_extra
    if start + entry.compressed_size > limit:
        findings.append(f"the data of entry {label} reaches into the central directory or beyond the end of the file")
    return Entry(entry.name, entry.size, entry.crc32, entry.header_offset, start, entry.method, entry.compressed_size, entry.mode, entry.central)


def _check_layout(entries: Sequence[Entry], limit: int, findings: list[str]) -> tuple[tuple[int, int], ...]:
    gaps: list[tuple[int, int]] = []
    at = 0
    owner = None
    for entry in sorted(entries, key=lambda entry: (entry.header_offset, entry.end)):
        if entry.header_offset < at:
            findings.append(f"entries {owner!r} and {entry.name!r} overlap")
        elif entry.header_offset > at:
            gaps.append((at, entry.header_offset))
        if entry.end >= at:
            at, owner = entry.end, entry.name
    if at < limit:
        gaps.append((at, limit))
    return tuple(gaps)


def _check_names(entries: Sequence[Entry], findings: list[str]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        if problem := name_problem(entry.name):
            findings.append(f"the name {entry.name!r} {problem}")
        key = entry.name.casefold()
        if key in seen:
            same = "comes twice" if seen[key] == entry.name else f"differs from {seen[key]!r} only in upper and lower case"
            findings.append(f"the name {entry.name!r} {same}")
        seen.setdefault(key, entry.name)
