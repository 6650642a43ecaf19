"""The universal host block: one file that is a Windows program, a shell script and the container of native programs.

Layout, all offsets from byte 0::

    0x0000  DOS header whose first line is ``MZopencoti='``: a shell reads an assignment, so no NUL may come before the line end
            and one lower-case letter must (both are what shells take for "text")
    0x0040  ``'`` and stage 1 of resources/launcher.sh
            PE header and section table (e_lfanew points here), moved down from the PE's own place
            sections, every raw offset moved by the same distance; no virtual address changes
            ZIP local header ``bin/launcher.sh``, data on a 4 KiB border: stage 2
            ZIP local header ``bin/SYSTEM-MACHINE.loader``, data on a 4 KiB border: what maps a native program (loader.py), once for each
            that can be mapped
            ZIP local header ``bin/SYSTEM-MACHINE``, data on a 64 KiB border: a native program, once for each

Only local headers: the central directory belongs to whoever finishes the file (``container.append``). What it must list stands
in a side file, the host's name plus ``.json``. Zeros fill the gaps. Sources: Microsoft's PE Format, PKWARE APPNOTE.TXT 4.3.7.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from . import binaries, files, loader, zipformat
from .console import count_of
from .errors import BinaryMismatch, ContainerError, ManifestError

MAGIC = b"MZopencoti='\n"
"""The first line of every universal file."""

HOST_SCHEMA = 1
LAUNCHER_MEMBER = "bin/launcher.sh"
LAUNCHER_ALIGNMENT = 4096
LOADER_SUFFIX = ".loader"
PROGRAM_ALIGNMENT = 65536

_DOS_HEADER = 0x40
_STAGE_MARK = "#@@ stage 2\n"
_STAGE_END = ": end of stage 2"

PLATFORMS: Mapping[str, tuple[binaries.Format, str, tuple[str, ...]]] = {
    "linux-x86_64": (binaries.Format.ELF, "x86_64", ("Linux x86_64", "Linux amd64")),
    "linux-aarch64": (binaries.Format.ELF, "aarch64", ("Linux aarch64", "Linux arm64")),
    "macos-x86_64": (binaries.Format.MACHO, "x86_64", ("Darwin x86_64",)),
    "macos-arm64": (binaries.Format.MACHO, "aarch64", ("Darwin arm64",)),
}
"""Native programs a host may hold: format, machine, and what ``uname -sm`` prints there."""


@dataclass(frozen=True)
class Member:
    """A ZIP member of a host block. ``offset`` is the local header's, ``data_offset`` the data's; sizes in bytes."""

    name: str
    offset: int
    data_offset: int
    size: int
    crc32: int
    sha256: str

    def entry(self) -> zipformat.Entry:
        """As it goes into the central directory."""
        return zipformat.Entry(self.name, self.size, self.crc32, self.offset, self.data_offset, mode=zipformat.MODE_PROGRAM)


@dataclass(frozen=True)
class HostBlock:
    """The finished block: its bytes by size and sha256, and the members in it."""

    engine: str
    size: int
    sha256: str
    members: tuple[Member, ...]

    def to_dict(self) -> dict[str, Any]:
        """The side file's content; crc32 as 8 hex digits."""
        return {
            "schema": HOST_SCHEMA,
            "engine": self.engine,
            "size": self.size,
            "sha256": self.sha256,
            "members": [
                {
                    "name": member.name,
                    "offset": member.offset,
                    "data_offset": member.data_offset,
                    "size": member.size,
                    "crc32": f"{member.crc32:08x}",
                    "sha256": member.sha256,
                }
                for member in self.members
            ],
        }

    @classmethod
    def from_dict(cls, data: Any) -> HostBlock:
        """The inverse of ``to_dict``; raises ManifestError for anything else."""
        try:
            if data["schema"] != HOST_SCHEMA:
                raise ManifestError(f"The host's side file has schema {data['schema']!r}; this toolkit reads {HOST_SCHEMA}.")
            members = tuple(
                Member(str(row["name"]), int(row["offset"]), int(row["data_offset"]), int(row["size"]), int(row["crc32"], 16), str(row["sha256"]))
                for row in data["members"]
            )
            return cls(str(data["engine"]), int(data["size"]), str(data["sha256"]), members)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ManifestError(f"The host's side file is not what its format says: {error!r}.") from error


def side_file(host: Path) -> Path:
    """Where the description of the host block ``host`` lies."""
    return host.with_name(host.name + ".json")


def is_universal(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is one of ours."""
    return head.startswith(MAGIC)


def read_host(host: Path) -> HostBlock:
    """The description beside ``host``; ContainerError when it is not there, ManifestError when it is damaged."""
    try:
        text = side_file(host).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContainerError(f"{host} is a universal host, but {side_file(host).name} beside it cannot be read: build the host again.") from error
    try:
        return HostBlock.from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{side_file(host)} is not JSON: {error}.") from error


# The script


def minify(text: str) -> str:
    """Drop comment lines, indentation and empty lines. Line content is kept as it is, so quoting cannot change."""
    lines = (line.strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("#"))


def launcher_stages() -> tuple[str, str]:
    """Stage 1 and stage 2 of the launcher, minified, placeholders not yet filled in."""
    text = resources.files("opencoti_build").joinpath("resources/launcher.sh").read_text("utf-8")
    first, mark, second = text.partition(_STAGE_MARK)
    first, second = minify(first), minify(second)
    if not mark or not second.endswith(_STAGE_END + "\n") or not (first + second).isascii():
        raise ContainerError("resources/launcher.sh lacks its stage mark or end, or is not ASCII.")
    return first, second.rstrip("\n")


@dataclass(frozen=True)
class _Program:
    platform: str
    data: bytes
    sha256: str
    interpreter: str
    loader: bytes | None


@dataclass(frozen=True)
class _Place:
    """Where a program lies in the file, and its loader; zeros while that is not known."""

    program: int = 0
    loader: int = 0
    loader_cksum: int = 0


_REVERSED = bytes(int(f"{value:08b}"[::-1], 2) for value in range(256))


def posix_cksum(data: bytes) -> int:
    """What the POSIX utility ``cksum`` prints: the CRC of IEEE 802.3 with the most significant bit first, over data and length.

    ZIP's CRC is the same polynomial with the least significant bit first, so zlib computes it over bytes turned around.
    """
    length = b""
    left = len(data)
    while left:
        length += bytes([left & 0xFF])
        left >>= 8
    value = zipformat.crc32(length.translate(_REVERSED), zipformat.crc32(data.translate(_REVERSED), zipformat.MAX32))
    return int(f"{value:032b}"[::-1], 2)


def _case(program: _Program, place: _Place) -> str:
    """One arm of the launcher's choice. Fixed width, since the text's length decides about the offsets in it."""
    labels = "|".join(f'"{label}"' for label in PLATFORMS[program.platform][2])
    numbers = f"_o={place.program // PROGRAM_ALIGNMENT}".ljust(9) + f" _s={len(program.data)} _k={posix_cksum(program.data)}".ljust(28)
    mapped = "" if program.loader is None else f" _l={place.loader // LAUNCHER_ALIGNMENT}".ljust(11) + f" _y={place.loader_cksum}".ljust(14)
    return f"{labels}) {numbers} _h={program.sha256}{mapped} _i={program.interpreter};;"


def _stage1(template: str, programs: list[_Program], places: list[_Place], launcher: tuple[int, int]) -> bytes:
    systems = ", ".join([PLATFORMS[program.platform][2][0] for program in programs] + ["Windows x86_64"])
    skip, size = launcher
    values = {
        "@MAGIC@": MAGIC.decode("ascii").partition("'")[0],
        "@CASES@": "\n".join(_case(program, place) for program, place in zip(programs, places, strict=True)),
        "@SYSTEMS@": systems,
        "@SKIP@": str(skip // LAUNCHER_ALIGNMENT).ljust(7),
        "@COUNT@": str(size // LAUNCHER_ALIGNMENT).ljust(3),
        "@LOADER@": str(loader.SIZE),
        "@BLOCKS@": str(loader.SIZE // LAUNCHER_ALIGNMENT),
    }
    text = re.sub(r"@[A-Z]+@", lambda match: values[match[0]], template)
    return b"'\n" + text.encode("ascii")


# The PE


@dataclass(frozen=True)
class _Pe:
    """Where things lie in the PE that is taken in; offsets in the file."""

    data: bytes
    header: int
    optional: int
    table: int
    sections: int
    file_alignment: int
    first_address: int
    first_raw: int
    end: int

    @property
    def header_size(self) -> int:
        """Bytes from the PE signature to the end of the section table."""
        return self.table + 40 * self.sections - self.header


def _u16(data: bytes | bytearray, at: int) -> int:
    return struct.unpack_from("<H", data, at)[0]


def _u32(data: bytes | bytearray, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def _directory(data: bytes | bytearray, optional: int, index: int) -> tuple[int, int]:
    """Address and size of a data directory; zeros when the header has not that many."""
    if _u32(data, optional + 108) <= index:
        return 0, 0
    return struct.unpack_from("<II", data, optional + 112 + 8 * index)


_DIRECTORY_SECURITY, _DIRECTORY_DEBUG, _DIRECTORY_BOUND_IMPORT = 4, 6, 11


def _parse_pe(data: bytes, name: str) -> _Pe:
    """Check everything that moving the headers relies on. Raises ContainerError with the one thing that is in the way."""

    def refuse(reason: str) -> ContainerError:
        return ContainerError(f"{name} cannot become part of a universal file: {reason}.")

    if len(data) < 64 or data[:2] != b"MZ":
        raise refuse("it is not a Windows program (no MZ)")
    header = _u32(data, 0x3C)
    if header < 4 or header + 24 > len(data) or data[header : header + 4] != b"PE\0\0":
        raise refuse("it is not a Windows program (no PE header)")
    if data.startswith(MAGIC):
        raise refuse("it is a universal file already")
    machine, sections, optional_size = _u16(data, header + 4), _u16(data, header + 6), _u16(data, header + 20)
    optional = header + 24
    table = optional + optional_size
    if machine != 0x8664:
        raise refuse(f"its machine is {machine:#06x}, not x86_64 (0x8664)")
    if optional_size < 112 or table + 40 * sections > len(data) or _u16(data, optional) != 0x20B:
        raise refuse("it is not a PE32+ image")
    if optional_size < 112 + 8 * _u32(data, optional + 108):
        raise refuse("its optional header is cut off")
    characteristics = _u16(data, header + 22)
    if not characteristics & 0x0002 or characteristics & 0x2000:
        raise refuse("it is a DLL or an object file, not a program")
    if _u16(data, optional + 68) != 3:
        raise refuse("it is not a console program")
    if _directory(data, optional, _DIRECTORY_SECURITY)[1]:
        raise refuse("it is signed; join first and sign the finished file")
    if _directory(data, optional, _DIRECTORY_BOUND_IMPORT)[1]:
        raise refuse("it has bound imports, which lie in the headers")
    if _u32(data, header + 12) or _u32(data, header + 16):
        raise refuse("it has a symbol table; link it with -s")
    alignment = _u32(data, optional + 36)
    if alignment < 512 or alignment > 65536 or alignment & (alignment - 1):
        raise refuse(f"its file alignment {alignment} is not a power of two from 512 to 65536")
    ranges = []
    addresses = []
    for index in range(sections):
        at = table + 40 * index
        address, raw_size, raw, relocations, lines = struct.unpack_from("<5I", data, at + 12)
        addresses.append(address)
        if relocations or lines:
            raise refuse("a section has COFF relocations or line numbers")
        if raw_size:
            ranges.append((raw, raw + raw_size))
    if not ranges:
        raise refuse("it has no sections")
    ranges.sort()
    if ranges[0][0] < table + 40 * sections or any(before[1] > after[0] for before, after in zip(ranges, ranges[1:], strict=False)):
        raise refuse("its sections overlap each other or the headers")
    end = ranges[-1][1]
    if end > len(data):
        raise refuse("it is truncated")
    if end < len(data):
        raise refuse(f"{count_of(len(data) - end, 'byte')} beyond its last section (an overlay, such as debug data or a ZIP)")
    if min(addresses) < ranges[0][0] and min(addresses) < table + 40 * sections:
        raise refuse("its first section is mapped over the headers")
    return _Pe(data, header, optional, table, sections, alignment, min(addresses), ranges[0][0], end)


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _move_pe(pe: _Pe, script: bytes) -> bytes:
    """The PE with ``script`` between its DOS header and its PE header."""
    header = _align(_DOS_HEADER + len(script), 8)
    while 0x27 in struct.pack("<I", header):  # e_lfanew lies inside the shell's quotes: no quote mark in it
        header += 8
    headers_end = _align(header + pe.header_size, pe.file_alignment)
    if headers_end > pe.first_address:
        room = pe.first_address // pe.file_alignment * pe.file_alignment - pe.header_size - _DOS_HEADER
        raise ContainerError(f"The launcher's first stage is {len(script)} bytes long, and the PE leaves room for {room}: shorten resources/launcher.sh.")
    distance = headers_end - pe.first_raw
    out = bytearray(pe.data)
    debug_address, debug_size = _directory(out, pe.optional, _DIRECTORY_DEBUG)
    for index in range(pe.sections):
        at = pe.table + 40 * index
        address, raw_size, raw = struct.unpack_from("<3I", out, at + 12)
        if not raw_size:
            struct.pack_into("<I", out, at + 20, 0)
            continue
        if debug_size and address <= debug_address < address + raw_size:
            if debug_address + debug_size > address + raw_size:
                raise ContainerError("The Windows program's debug directory reaches out of its section: it is damaged.")
            for entry in range(debug_size // 28):
                pointer = raw + debug_address - address + 28 * entry + 24
                if _u32(out, pointer):
                    struct.pack_into("<I", out, pointer, (_u32(out, pointer) + distance) & 0xFFFFFFFF)
        struct.pack_into("<I", out, at + 20, raw + distance)
    struct.pack_into("<I", out, pe.optional + 60, headers_end)  # SizeOfHeaders
    struct.pack_into("<I", out, pe.optional + 64, 0)  # CheckSum: not checked for programs, and a signer fills it in
    dos = bytearray(_DOS_HEADER)
    dos[: len(MAGIC)] = MAGIC
    struct.pack_into("<H", dos, 0x18, _DOS_HEADER)  # e_lfarlc: file(1) looks for a PE only from 0x40 on
    struct.pack_into("<I", dos, 0x3C, header)
    head = bytes(dos) + script
    head += b"\n" * (header - len(head)) + out[pe.header : pe.header + pe.header_size]
    return head.ljust(headers_end, b"\0") + out[pe.first_raw : pe.end]


# Joining


def _load_program(platform: str, path: Path, template: bytes | None = None) -> _Program:
    if platform not in PLATFORMS:
        raise ContainerError(f"A universal file cannot hold a program for {platform!r}; known are {', '.join(PLATFORMS)}.")
    wanted, machine, _ = PLATFORMS[platform]
    data = _read(path)
    try:
        facts = binaries.read_bytes(data, name=str(path))
    except BinaryMismatch as error:
        raise ContainerError(f"{path} cannot be the program for {platform}: {error}") from error
    if facts.format is not wanted or facts.machine != machine:
        raise ContainerError(f"{path} cannot be the program for {platform}: it is {facts.format.value.upper()} for {facts.machine}.")
    if facts.kind is not binaries.Kind.PROGRAM or facts.problems:
        reason = facts.problems[0] if facts.problems else "it is a library"
        raise ContainerError(f"{path} cannot be the program for {platform}: {reason}.")
    if not re.fullmatch(r"[A-Za-z0-9/._+-]*", facts.interpreter):
        raise ContainerError(f"{path} cannot be the program for {platform}: its loader has an odd name, {facts.interpreter!r}.")
    mapped = template if facts.format is binaries.Format.ELF and loader.can_map(data) else None
    return _Program(platform, data, hashlib.sha256(data).hexdigest(), facts.interpreter, mapped)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ContainerError(f"Cannot read {path}: {error.strerror or error}.") from error


def build_host(out: Path, pe: Path, programs: Mapping[str, Path], engine: str, loaders: Mapping[str, bytes] | None = None) -> HostBlock:
    """Join the Windows program ``pe`` and the native ``programs`` (by platform, see PLATFORMS) into the host block ``out``.

    ``loaders`` are those of ``loader.build``, by platform; a program without one, or which a loader cannot map, is copied when it is started.
    Writes ``out`` (mode 755) and its side file, both atomically, the side file last. The bytes depend on the inputs alone.
    Raises ContainerError, naming the one thing that is wrong, for a PE or program that cannot be joined.
    """
    parsed = _parse_pe(_read(pe), str(pe))
    templates = loaders or {}
    loaded = [_load_program(platform, programs[platform], templates.get(platform)) for platform in PLATFORMS if platform in programs]
    if unknown := [platform for platform in programs if platform not in PLATFORMS]:
        _load_program(unknown[0], programs[unknown[0]])
    first, second = launcher_stages()
    second_data = second.encode("ascii")
    # Line ends to the block's end; the shell drops them, and dd reads whole blocks.
    second_data = second_data.ljust(_align(len(second_data) + 1, LAUNCHER_ALIGNMENT), b"\n")
    # The script's length does not depend on the numbers in it, so any numbers tell where the PE part ends.
    length = len(_move_pe(parsed, _stage1(first, loaded, [_Place()] * len(loaded), (0, len(second_data)))))
    wanted = [(LAUNCHER_MEMBER, len(second_data), LAUNCHER_ALIGNMENT)]
    wanted += [(f"bin/{program.platform}{LOADER_SUFFIX}", loader.SIZE, LAUNCHER_ALIGNMENT) for program in loaded if program.loader is not None]
    wanted += [(f"bin/{program.platform}", len(program.data), PROGRAM_ALIGNMENT) for program in loaded]
    offsets: dict[str, int] = {}
    position = length
    for name, size, alignment in wanted:
        offsets[name] = _align(position + zipformat.local_header_size(name, size), alignment)
        position = offsets[name] + size
    contents = {LAUNCHER_MEMBER: second_data}
    places = []
    for program in loaded:
        name = f"bin/{program.platform}"
        contents[name] = program.data
        place = _Place(offsets[name])
        if program.loader is not None:
            told = contents[name + LOADER_SUFFIX] = loader.fill(program.loader, program.data, place.program)
            place = _Place(place.program, offsets[name + LOADER_SUFFIX], posix_cksum(told))
        places.append(place)
    members = [
        Member(name, offsets[name] - zipformat.local_header_size(name, size), offsets[name], size, zipformat.crc32(contents[name]), hashlib.sha256(contents[name]).hexdigest())
        for name, size, _ in wanted
    ]
    head = _move_pe(parsed, _stage1(first, loaded, places, (members[0].data_offset, len(second_data))))
    if len(head) != length:
        raise ContainerError("The launcher's text changed its length with the offsets in it: a number outgrew its column.")
    digest = hashlib.sha256()
    side_file(out).unlink(missing_ok=True)
    with files.atomic_file(out, mode=0o755) as stream:

        def write(data: bytes) -> None:
            stream.write(data)
            digest.update(data)

        write(head)
        at = length
        for member in members:
            write(bytes(member.offset - at))
            write(zipformat.local_header(member.name, member.size, member.crc32))
            write(contents[member.name])
            at = member.data_offset + member.size
    block = HostBlock(engine, position, digest.hexdigest(), tuple(members))
    files.write_text(side_file(out), json.dumps(block.to_dict(), indent=1) + "\n")
    return block
