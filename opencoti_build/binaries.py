"""Facts about programs and libraries, read with ``lief`` and never by running them.

ELF (System V gABI chapters 4 and 5, the GNU symbol versioning section of the LSB), PE (Microsoft's PE Format) and Mach-O are
told apart by their first bytes; everything the rest of the toolkit wants to know comes in one frozen record.
"""

from __future__ import annotations

import functools
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BinaryMismatch


HEAD_SIZE = 65536
"""Bytes from a file's start that hold every header looked at here."""


@functools.cache
def _lief() -> Any:
    """The parser, loaded when the first file is parsed: a third of a second that most commands need not spend."""
    import lief

    lief.logging.disable()
    return lief


class Format(Enum):
    """Executable formats."""

    ELF = "elf"
    PE = "pe"
    MACHO = "macho"


class Kind(Enum):
    """What the loader does with it."""

    PROGRAM = "program"
    LIBRARY = "library"


SYSTEMS: Mapping[Format, str] = {Format.ELF: "linux", Format.PE: "windows", Format.MACHO: "macos"}
"""The operating system each format stands for in our names."""


@dataclass(frozen=True)
class VersionNeed:
    """A symbol version (``GLIBC_2.28``), the libraries asked for it and the symbols bound to it."""

    version: str
    libraries: tuple[str, ...]
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binary:
    """What a file says about itself.

    ``machine`` is ``x86_64``, ``aarch64`` or the format's own name for another one. ``needed`` are the libraries in the order
    of the file (lower case for PE, whose loader ignores case). ``interpreter`` is the ELF loader's path, empty for a static
    program. ``signed`` tells of an Authenticode signature. ``problems`` are sentences about what is malformed.
    """

    format: Format
    machine: str
    kind: Kind
    needed: tuple[str, ...]
    versions: tuple[VersionNeed, ...] = ()
    interpreter: str = ""
    exports: tuple[str, ...] = field(default=(), repr=False)
    signed: bool = False
    problems: tuple[str, ...] = ()

    @property
    def system(self) -> str:
        """``linux``, ``windows`` or ``macos``."""
        return SYSTEMS[self.format]


def sniff(head: bytes) -> Format | None:
    """The format the first bytes promise; needs 4 bytes for ELF and Mach-O, 2 for PE."""
    if head[:4] == b"\x7fELF":
        return Format.ELF
    if head[:4] in (b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\xca\xfe\xba\xbf"):
        return Format.MACHO
    return Format.PE if head[:2] == b"MZ" else None


def read(path: Path, *, name: str | None = None) -> Binary:
    """Facts about the file at ``path``. Raises BinaryMismatch for anything that is not a well-formed program or library."""
    label = name or path.name
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD_SIZE)
    except OSError as error:
        raise BinaryMismatch(f"Cannot read {path}: {error.strerror or error}.") from error
    return _read(head, str(path), path.stat().st_size, label)


def read_bytes(data: bytes, *, name: str) -> Binary:
    """``read`` of a program in memory."""
    return _read(data[:HEAD_SIZE], data, len(data), name)


def read_stream(stream: BinaryIO, offset: int, size: int, *, name: str) -> Binary:
    """``read`` of ``size`` bytes at ``offset`` of ``stream`` (a member of a larger file)."""
    stream.seek(offset)
    return read_bytes(stream.read(size), name=name)


def _read(head: bytes, source: Any, size: int, name: str) -> Binary:
    kind = sniff(head)
    if kind is None:
        raise BinaryMismatch(f"{name} is neither an ELF, a PE nor a Mach-O file.")
    parse = {Format.ELF: _lief().ELF.parse, Format.PE: _lief().PE.parse, Format.MACHO: _lief().MachO.parse}[kind]
    convert = {Format.ELF: _elf, Format.PE: _pe, Format.MACHO: _macho}[kind]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the bindings warn about numbers outside their enums
            parsed = parse(source) if size >= 64 else None
            if parsed is None:
                raise BinaryMismatch(f"{name} begins like {kind.value.upper()} but is malformed.")
            return convert(parsed, head, size, name)
    except BinaryMismatch:
        raise
    except Exception as error:  # lief raises several unrelated types, from its properties too, when a file is malformed
        raise BinaryMismatch(f"{name} cannot be read as {kind.value.upper()}: {error}.") from error


def overlay(path: Path) -> int:
    """Bytes behind what an ELF's or PE's own headers describe, not counting zeros that pad it; 0 for a Mach-O, which is not looked at.

    Raises BinaryMismatch for a malformed file.
    """
    binary = read(path)
    if binary.problems:
        raise BinaryMismatch(f"{path.name}: {binary.problems[0]}.")
    if binary.format is Format.MACHO:
        return 0
    parsed = (_lief().ELF if binary.format is Format.ELF else _lief().PE).parse(str(path))
    return len(bytes(parsed.overlay).rstrip(b"\0"))


_ELF_MACHINES = {"X86_64": "x86_64", "AARCH64": "aarch64"}
_PE_MACHINES = {"AMD64": "x86_64", "ARM64": "aarch64"}
_MACHO_MACHINES = {"X86_64": "x86_64", "ARM64": "aarch64"}


def _text(value: str | bytes) -> str:
    """A name as text: lief hands out bytes where a damaged file's name is no UTF-8."""
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


def _elf(parsed: Any, head: bytes, size: int, name: str) -> Binary:
    header = parsed.header
    machine = header.machine_type.name
    problems = _elf_bounds(head, size)
    bound: dict[str, tuple[list[str], list[str]]] = {}
    for requirement in parsed.symbols_version_requirement:
        for auxiliary in requirement.get_auxiliary_symbols():
            bound.setdefault(_text(auxiliary.name), ([], []))[0].append(_text(requirement.name))
    for symbol in parsed.dynamic_symbols:
        version = symbol.symbol_version if symbol.has_version else None
        auxiliary = version.symbol_version_auxiliary if version is not None and version.has_auxiliary_version else None
        if auxiliary is not None and symbol.imported and _text(auxiliary.name) in bound:
            bound[_text(auxiliary.name)][1].append(_text(symbol.name))
    kind = Kind.LIBRARY if header.file_type.name == "DYN" and not parsed.has_interpreter and not _is_pie(parsed) else Kind.PROGRAM
    if header.file_type.name not in ("DYN", "EXEC"):
        problems.append("it is an object file or core dump, not a program or library")
    if not list(parsed.segments):
        problems.append("it has no program headers")
    return Binary(
        Format.ELF,
        _ELF_MACHINES.get(machine, machine.lower()),
        kind,
        tuple(_text(library) for library in parsed.libraries),
        tuple(VersionNeed(version, tuple(libraries), tuple(sorted(symbols))) for version, (libraries, symbols) in sorted(bound.items())),
        _text(parsed.interpreter) if parsed.has_interpreter else "",
        tuple(sorted(_text(symbol.name) for symbol in parsed.exported_symbols)),
        problems=tuple(problems),
    )


def _elf_bounds(head: bytes, size: int) -> list[str]:
    """Parts that the headers promise beyond the end of the file; lief shortens them silently."""
    if head[4:6] != b"\2\1":
        return ["it is not a 64-bit little-endian file"]
    programs, sections = struct.unpack_from("<QQ", head, 0x20)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", head, 0x36)
    problems = []
    if program_count and (program_size != 56 or programs + 56 * program_count > min(size, len(head))):
        return ["its program headers lie outside the file or far from its start"]
    for index in range(program_count):
        offset, length = struct.unpack_from("<8xQ16xQ", head, programs + 56 * index)
        if offset + length > size:
            problems.append(f"segment {index} reaches beyond the end of the file (truncated?)")
    if sections + section_size * section_count > size:
        problems.append("the section table reaches beyond the end of the file (truncated?)")
    return problems


def _is_pie(parsed: Any) -> bool:
    """Static PIE programs have no interpreter; DF_1_PIE tells them from libraries."""
    flags = parsed.get(_lief().ELF.DynamicEntry.TAG.FLAGS_1)
    return flags is not None and bool(flags.value & 0x08000000)


def _pe(parsed: Any, head: bytes, size: int, name: str) -> Binary:
    machine = parsed.header.machine.name
    problems = []
    for section in parsed.sections:
        if section.pointerto_raw_data + section.sizeof_raw_data > size:
            problems.append(f"section {_text(section.name)} reaches beyond the end of the file (truncated?)")
    is_library = parsed.header.has_characteristic(_lief().PE.Header.CHARACTERISTICS.DLL)
    needed = [_text(entry.name).lower() for entry in parsed.imports] + [_text(entry.name).lower() for entry in getattr(parsed, "delay_imports", ())]
    exports = parsed.get_export() if parsed.has_exports else None
    return Binary(
        Format.PE,
        _PE_MACHINES.get(machine, machine.lower()),
        Kind.LIBRARY if is_library else Kind.PROGRAM,
        tuple(dict.fromkeys(needed)),
        exports=tuple(sorted(_text(entry.name) for entry in exports.entries if entry.name)) if exports is not None else (),
        signed=parsed.data_directory(_lief().PE.DataDirectory.TYPES.CERTIFICATE_TABLE).size > 0,
        problems=tuple(problems),
    )


def _macho(parsed: Any, head: bytes, size: int, name: str) -> Binary:
    binaries = list(parsed)
    if not binaries:
        raise BinaryMismatch(f"{name} begins like MACHO but is malformed.")
    if len(binaries) != 1:
        raise BinaryMismatch(f"{name} is a fat Mach-O file of {len(binaries)} machines; a file for one machine is wanted.")
    binary = binaries[0]
    machine = binary.header.cpu_type.name
    is_library = binary.header.file_type.name in ("DYLIB", "BUNDLE")
    return Binary(
        Format.MACHO,
        _MACHO_MACHINES.get(machine, machine.lower()),
        Kind.LIBRARY if is_library else Kind.PROGRAM,
        tuple(_text(library.name) for library in binary.libraries),
        exports=tuple(sorted(_text(symbol.name).removeprefix("_") for symbol in binary.exported_symbols)),
        signed=binary.has_code_signature,
    )


_GLIBC = re.compile(r"GLIBC_(\d+(?:\.\d+)+)")


def version_key(text: str) -> tuple[int, ...]:
    """``2.28`` as numbers, so that 2.9 comes before 2.28."""
    return tuple(int(part) for part in text.split("."))


def version_order(text: str) -> tuple[int, ...]:
    """Sorts ``GLIBC_x.y`` names; any other name (``GLIBC_PRIVATE``) comes after all of them."""
    match = _GLIBC.fullmatch(text)
    return version_key(match[1]) if match else (1 << 30,)


def glibc_floor(binary: Binary) -> VersionNeed | None:
    """The highest ``GLIBC_x.y`` version the file needs, with the symbols that need it; None when it needs none."""
    needs = [(version_key(match[1]), need) for need in binary.versions if (match := _GLIBC.fullmatch(need.version))]
    return max(needs, key=lambda pair: pair[0])[1] if needs else None


def above_glibc(binary: Binary, floor: str) -> tuple[VersionNeed, ...]:
    """All needs above glibc ``floor`` (e.g. ``2.28``); GLIBC_PRIVATE counts as above every floor."""
    limit = version_key(floor)
    out = []
    for need in binary.versions:
        match = _GLIBC.fullmatch(need.version)
        if (match and version_key(match[1]) > limit) or need.version == "GLIBC_PRIVATE":
            out.append(need)
    return tuple(out)


def is_pe_at(head: bytes) -> bool:
    """Whether ``head`` (the first kilobytes of a file) leads to a PE header; an ``MZ`` alone may be a DOS program."""
    if len(head) < 64 or head[:2] != b"MZ":
        return False
    at = struct.unpack_from("<I", head, 0x3C)[0]
    return head[at : at + 4] == b"PE\0\0"


def certificate_table(head: bytes) -> tuple[int, int] | None:
    """File offset and size of a PE's Authenticode table, None for an unsigned PE or another format.

    ``head`` must reach over the PE's optional header. Data directory 4 is the one directory that holds a file offset.
    """
    if not is_pe_at(head):
        return None
    optional = struct.unpack_from("<I", head, 0x3C)[0] + 24
    if optional + 240 > len(head):
        return None
    magic = struct.unpack_from("<H", head, optional)[0]
    directories = optional + (112 if magic == 0x20B else 96)
    if struct.unpack_from("<I", head, directories - 4)[0] <= 4:
        return None
    offset, size = struct.unpack_from("<II", head, directories + 32)
    return (offset, size) if size else None
