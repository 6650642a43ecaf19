"""The loader of a native program in a universal file: built from resources/loader.c, told which program it starts, checked.

A start of the file executes a copy of the loader, which maps the program out of the file instead of copying it (docs/decisions/0006). It has a
fixed size, so that the launcher can tell a loader in the cache from a program there, and one segment, all of it. Which program it
starts stands in a structure that begins with ``MAGIC``::

    char magic[16]; u64 offset, size; u32 crc32, head, own, length

``offset`` and ``size`` of the program in the file, ``crc32`` as in its ZIP entry, ``head`` the CRC of its first ``HEAD`` bytes, ``own`` the
CRC of the loader with that field zero, ``length`` of the loader; little-endian.
"""

from __future__ import annotations

import struct
from importlib import resources
from pathlib import Path

from . import files, zipformat
from .cache import Cache, digest_of
from .errors import ContainerError, ToolchainError
from .runner import Runner
from .toolchains import Target, ZigToolchain

SIZE = 8192
"""Bytes of a finished loader."""

MAGIC = b"opencoti-place\n\0"
HEAD = 4096

_SCHEMA = 1
_PLACE = struct.Struct("<16sQQIIII")
_OWN = 40  # of the field in the structure
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_LOAD, _DYNAMIC, _INTERPRETER, _STACK = 1, 2, 3, 0x6474E551
_PAGES = {62: 4096, 183: 65536}
"""The largest page of a machine (by its ELF number)."""

COMPILE = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-Os", "-ffreestanding", "-fno-builtin", "-fPIE", "-fno-stack-protector", "-fno-sanitize=all", "-fno-jump-tables",
           "-fno-unwind-tables", "-fno-asynchronous-unwind-tables", "-fomit-frame-pointer", "-fvisibility=hidden", "-fno-ident", "-g0")  # fmt: skip
LINK = ("-pie", "--no-dynamic-linker", "-z", "norelro", "-z", "noseparate-code", "-z", "max-page-size=65536", "--no-rosegment", "--build-id=none", "--gc-sections", "-s")


def build(target: Target, toolchain: ZigToolchain, *, cache: Cache, runner: Runner, scratch: Path) -> bytes:
    """The loader for ``target``, not yet told about a program; from the cache or built now. Raises ToolchainError, ContainerError."""
    source = resources.files("opencoti_build").joinpath("resources/loader.c").read_text("utf-8")
    key = digest_of([_SCHEMA, source, COMPILE, LINK, dict(toolchain.identity(target)), target.arch, target.cpu])
    path = cache.result("loader", key) / "loader"
    if not path.is_file():
        place = scratch / f"loader-{target.name}"
        place.mkdir(parents=True, exist_ok=True)
        files.write_text(place / "loader.c", source)
        toolchain.link_freestanding(target, place / "loader.c", place / "loader", COMPILE, LINK, cache, runner)
        data = one_segment((place / "loader").read_bytes())
        with cache.producing("loader", key) as fresh:
            files.write_bytes(fresh / path.name, data)
    return path.read_bytes()


def one_segment(data: bytes) -> bytes:
    """A linked loader, its one segment of code made to reach over ``SIZE`` bytes, without what only tools and ld.so would read.

    Raises ToolchainError when it needs to be relocated or written to, or is too long: then it is not what loader.c promises.
    """
    header = list(_HEADER.unpack_from(data))
    at, size, count = header[5], header[9], header[10]
    table = [list(_SEGMENT.unpack_from(data, at + size * index)) for index in range(count)]
    code = [row for row in table if row[0] == _LOAD and row[1] & 1]
    if len(code) != 1 or code[0][2] or code[0][5] != code[0][6] or code[0][5] > SIZE:
        raise ToolchainError(f"The loader was linked to something else than one segment of at most {SIZE} bytes.")
    end = code[0][5]
    dynamic = [row[2:7] for row in table if row[0] == _DYNAMIC]
    if any(row[0] == _LOAD and row is not code[0] and row[2:7] not in dynamic for row in table):
        raise ToolchainError("The loader has data that is written to, which its one segment does not allow.")
    code[0][5] = code[0][6] = SIZE
    for row in table:
        if row is not code[0] and row[0] != _STACK:
            row[:] = [0] * len(row)
    header[6] = header[11] = header[12] = header[13] = 0  # the table of sections, which lay behind
    out = bytearray(data[:end].ljust(SIZE, b"\0"))
    _HEADER.pack_into(out, 0, *header)
    for index, row in enumerate(table):
        _SEGMENT.pack_into(out, at + size * index, *row)
    return bytes(out)


def can_map(program: bytes) -> bool:
    """Whether the loader can start ``program``: position-independent, with an interpreter, its tables at its beginning, pages that fit."""
    if len(program) < HEAD or program[:6] != b"\x7fELF\x02\x01":
        return False
    header = _HEADER.unpack_from(program)
    kind, machine, at, size, count = header[1], header[2], header[5], header[9], header[10]
    if kind != 3 or machine not in _PAGES or size != _SEGMENT.size or at % 8 or at + size * count > HEAD:
        return False
    table = [_SEGMENT.unpack_from(program, at + size * index) for index in range(count)]
    loads = [row for row in table if row[0] == _LOAD]
    paths = [row for row in table if row[0] == _INTERPRETER]
    return len(paths) == 1 and paths[0][2] + paths[0][5] <= HEAD and bool(loads) and all((row[3] - row[2]) % _PAGES[machine] == 0 for row in loads)


def fill(loader: bytes, program: bytes, offset: int) -> bytes:
    """``loader`` told that ``program`` lies at ``offset`` of the file. Raises ContainerError when it cannot be told."""
    if len(loader) != SIZE or loader.count(MAGIC) != 1 or loader.index(MAGIC) + _PLACE.size > SIZE:
        raise ContainerError(f"The loader is not {SIZE} bytes long with exactly one place to fill in: build it from resources/loader.c.")
    out = bytearray(loader)
    at = out.index(MAGIC)
    _PLACE.pack_into(out, at, MAGIC, offset, len(program), zipformat.crc32(program), zipformat.crc32(program[:HEAD]), 0, SIZE)
    struct.pack_into("<I", out, at + _OWN, zipformat.crc32(bytes(out)))
    return bytes(out)


def problem(loader: bytes, program_head: bytes, offset: int, size: int, crc32: int) -> str | None:
    """What is wrong with a finished ``loader`` of the program with these properties in the file; None when it starts that program."""
    at = loader.find(MAGIC)
    if len(loader) != SIZE or loader.count(MAGIC) != 1 or at + _PLACE.size > SIZE:
        return "is not a loader"
    _, its_offset, its_size, its_crc32, its_head, own, length = _PLACE.unpack_from(loader, at)
    if (its_offset, its_size) != (offset, size):
        return f"starts what lies at byte {its_offset} ({its_size} bytes), not its program at byte {offset} ({size} bytes)"
    if (its_crc32, its_head) != (crc32, zipformat.crc32(program_head[:HEAD])):
        return "has the checksum of another program"
    if length != SIZE or zipformat.crc32(loader[: at + _OWN] + bytes(4) + loader[at + _OWN + 4 :]) != own:
        return "does not have its own checksum"
    return None
