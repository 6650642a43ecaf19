"""The loader as the toolkit sees it: which programs it can map, what it is told, and what is made of what the linker wrote."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import binary_fixtures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import loader, universal
from opencoti_build.errors import ContainerError, ToolchainError

PROGRAM = binary_fixtures.elf(pie=True, interpreter="/lib64/ld.so", padding=bytes(9000))


def changed(data: bytes, at: int, form: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


def test_program_that_can_be_mapped() -> None:
    assert loader.can_map(PROGRAM)
    assert loader.can_map(binary_fixtures.elf("aarch64", pie=True, interpreter="/lib/ld.so", padding=bytes(9000)))


UNMAPPABLE = {
    "at a fixed address": binary_fixtures.elf(interpreter="/lib64/ld.so", padding=bytes(9000)),
    "without an interpreter": binary_fixtures.elf(pie=True, padding=bytes(9000)),
    "too short": PROGRAM[: loader.HEAD - 1],
    "Windows": binary_fixtures.pe(text=bytes(9000)),
    "another machine": changed(PROGRAM, 18, "<H", 243),
    "its table far away": changed(PROGRAM, 32, "<Q", 8192),
    "its interpreter's name far away": changed(PROGRAM, 64 + 8, "<Q", 8192),
    "pages that do not fit": changed(PROGRAM, 64 + 56 + 16, "<Q", 0x800),
}


@pytest.mark.parametrize("name", list(UNMAPPABLE))
def test_programs_that_are_copied_instead(name: str) -> None:
    assert not loader.can_map(UNMAPPABLE[name])


def test_pages_of_64_kib_are_asked_of_aarch64_alone() -> None:
    for machine, fits in (("x86_64", True), ("aarch64", False)):
        program = binary_fixtures.elf(machine, pie=True, interpreter="/lib/ld.so", padding=bytes(9000))
        assert loader.can_map(changed(program, 64 + 56 + 16, "<Q", 0x1000)) is fits


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_can_or_cannot_be_mapped(data: st.DataObject) -> None:
    raw = bytearray(PROGRAM[: loader.HEAD])
    for _ in range(data.draw(st.integers(1, 5))):
        struct.pack_into("<H", raw, data.draw(st.integers(0, 64 + 112)), data.draw(st.integers(0, 0xFFFF)))
    assert loader.can_map(bytes(raw)) in (True, False)


def test_told_about_a_program() -> None:
    told = loader.fill(binary_fixtures.loader(), PROGRAM, 0x30000)
    at = told.index(loader.MAGIC)
    offset, size, crc32, head, own, length = struct.unpack_from("<QQIIII", told, at + 16)
    assert (offset, size, length) == (0x30000, len(PROGRAM), loader.SIZE)
    assert (crc32, head) == (zlib.crc32(PROGRAM), zlib.crc32(PROGRAM[:4096]))
    assert own == zlib.crc32(told[: at + 40] + bytes(4) + told[at + 44 :])
    assert loader.problem(told, PROGRAM, 0x30000, len(PROGRAM), zlib.crc32(PROGRAM)) is None
    assert told[:at] == binary_fixtures.loader()[:at]


@pytest.mark.parametrize("template", [b"", bytes(8192), binary_fixtures.loader() + b"x", binary_fixtures.loader()[:-16] + loader.MAGIC, bytes(8192 - 16) + loader.MAGIC])
def test_only_a_loader_with_one_place_is_told(template: bytes) -> None:
    with pytest.raises(ContainerError, match="exactly one place to fill in"):
        loader.fill(template, PROGRAM, 0)
    assert loader.problem(template, PROGRAM, 0, len(PROGRAM), 0) == "is not a loader"


def linked(*segments: tuple[int, int, int, int, int], length: int = 3000) -> bytes:
    """As from a linker: (type, rights, offset, stored size, size) of each segment, and a table of sections behind."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0x400, 64, length, 0, 64, 56, len(segments), 64, 3, 2)
    table = b"".join(struct.pack("<IIQQQQQQ", kind, rights, at, at, at, stored, size, 0x10000) for kind, rights, at, stored, size in segments)
    return (header + table).ljust(length, b"c") + bytes(192)


CODE = (1, 5, 0, 2500, 2500)


def test_what_the_linker_wrote_becomes_one_segment() -> None:
    data = loader.one_segment(linked((6, 4, 64, 200, 200), CODE, (1, 6, 2500, 128, 128), (2, 6, 2500, 128, 128), (0x6474E551, 6, 0, 0, 0)))
    assert len(data) == loader.SIZE and not any(data[2500:])
    assert struct.unpack_from("<Q", data, 40) == (0,) and struct.unpack_from("<HH", data, 60) == (0, 0)
    kinds = [struct.unpack_from("<II24xQQ", data, 64 + 56 * index) for index in range(5)]
    assert kinds == [(0, 0, 0, 0), (1, 5, loader.SIZE, loader.SIZE), (0, 0, 0, 0), (0, 0, 0, 0), (0x6474E551, 6, 0, 0)]


@pytest.mark.parametrize("segments", [(CODE, (1, 6, 2500, 8, 8)), (CODE, (1, 6, 2500, 0, 64)), (CODE, CODE), ((1, 4, 0, 9, 9),), ((1, 5, 0, 9000, 9000),), ((1, 5, 0, 2500, 2600),)])
def test_a_loader_that_breaks_its_promise_is_refused(segments: tuple[tuple[int, int, int, int, int], ...]) -> None:
    with pytest.raises(ToolchainError, match="one segment"):
        loader.one_segment(linked(*segments, length=10_000))


def test_a_host_has_loaders_of_what_can_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "win.exe").write_bytes(binary_fixtures.pe())
    programs = {"linux-x86_64": PROGRAM, "linux-aarch64": binary_fixtures.elf("aarch64", padding=bytes(9000))}
    for name, data in programs.items():
        (tmp_path / name).write_bytes(data)
    templates = dict.fromkeys(programs, binary_fixtures.loader())
    block = universal.build_host(tmp_path / "host", tmp_path / "win.exe", {name: tmp_path / name for name in programs}, "opencoti-1-c1", templates)
    assert [row.name for row in block.members] == ["bin/launcher.sh", "bin/linux-x86_64.loader", "bin/linux-x86_64", "bin/linux-aarch64"]
    _, its_loader, program, _ = block.members
    data = (tmp_path / "host").read_bytes()
    told = data[its_loader.data_offset :][: loader.SIZE]
    assert its_loader.data_offset % 4096 == 0
    assert told == loader.fill(binary_fixtures.loader(), PROGRAM, program.data_offset)
    assert f" _l={its_loader.data_offset // 4096}".encode() in data[:4096] and f" _y={universal.posix_cksum(told)} ".encode() in data[:4096]
