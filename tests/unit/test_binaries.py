"""Facts about programs: hand-made ELF and PE files, and the damage they can have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import binary_fixtures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import binaries
from opencoti_build.binaries import Format, Kind
from opencoti_build.errors import BinaryMismatch

IMPORTS = {"puts": ("libc.so.6", "GLIBC_2.2.5"), "fcntl64": ("libc.so.6", "GLIBC_2.28"), "exp": ("libm.so.6", "GLIBC_2.29"), "log": ("libm.so.6", "GLIBC_2.29")}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_program_with_libraries(machine: str) -> None:
    got = binaries.read_bytes(binary_fixtures.elf(machine, needed=["libc.so.6", "libm.so.6"], imports=IMPORTS), name="x")
    assert (got.format, got.machine, got.kind, got.system) == (Format.ELF, machine, Kind.PROGRAM, "linux")
    assert got.needed == ("libc.so.6", "libm.so.6")
    assert got.interpreter == binary_fixtures.INTERPRETERS[machine]
    assert got.problems == ()
    assert {need.version: (need.libraries, need.symbols) for need in got.versions} == {
        "GLIBC_2.2.5": (("libc.so.6",), ("puts",)),
        "GLIBC_2.28": (("libc.so.6",), ("fcntl64",)),
        "GLIBC_2.29": (("libm.so.6",), ("exp", "log")),
    }


def test_static_program() -> None:
    got = binaries.read_bytes(binary_fixtures.elf(), name="x")
    assert (got.kind, got.needed, got.interpreter, got.versions) == (Kind.PROGRAM, (), "", ())


def test_library_and_its_exports() -> None:
    got = binaries.read_bytes(binary_fixtures.elf(library=True, exports=["ggml_backend_init", "x"], imports=IMPORTS), name="x")
    assert (got.kind, got.exports) == (Kind.LIBRARY, ("ggml_backend_init", "x"))


def test_other_machine_keeps_its_name() -> None:
    assert binaries.read_bytes(binary_fixtures.elf("riscv64"), name="x").machine == "riscv"


def test_windows_program_and_library() -> None:
    got = binaries.read_bytes(binary_fixtures.pe(imports={"KERNEL32.dll": ["ExitProcess"], "WS2_32.dll": ["recv", "send"]}), name="x")
    assert (got.format, got.machine, got.kind, got.system) == (Format.PE, "x86_64", Kind.PROGRAM, "windows")
    assert (got.needed, got.signed, got.problems) == (("kernel32.dll", "ws2_32.dll"), False, ())
    assert binaries.read_bytes(binary_fixtures.pe(dll=True), name="x").kind is Kind.LIBRARY
    assert binaries.read_bytes(binary_fixtures.pe(certificate=True), name="x").signed


def test_glibc_floor_compares_numbers_not_text() -> None:
    got = binaries.read_bytes(binary_fixtures.elf(needed=["libc.so.6"], imports={"a": ("libc.so.6", "GLIBC_2.9"), "b": ("libc.so.6", "GLIBC_2.17")}), name="x")
    highest = binaries.glibc_floor(got)
    assert highest is not None and (highest.version, highest.symbols) == ("GLIBC_2.17", ("b",))
    assert [need.version for need in binaries.above_glibc(got, "2.10")] == ["GLIBC_2.17"]
    assert binaries.above_glibc(got, "2.17") == ()


def test_private_glibc_symbols_are_above_every_floor() -> None:
    got = binaries.read_bytes(binary_fixtures.elf(needed=["libc.so.6"], imports={"a": ("libc.so.6", "GLIBC_PRIVATE")}), name="x")
    assert [need.version for need in binaries.above_glibc(got, "9.99")] == ["GLIBC_PRIVATE"]


@pytest.mark.parametrize("data", [b"", b"\x7f", b"#!/bin/sh\n", b"PK\3\4" + bytes(60), bytes(4096)])
def test_other_files_are_named_as_what_they_are_not(data: bytes) -> None:
    with pytest.raises(BinaryMismatch, match="bin/x is neither an ELF, a PE nor a Mach-O file"):
        binaries.read_bytes(data, name="bin/x")


@pytest.mark.parametrize("data", [binary_fixtures.elf()[:20], binary_fixtures.pe()[:0x90], b"MZ" + bytes(100), b"\xcf\xfa\xed\xfe" + bytes(8)])
def test_cut_off_headers_are_refused(data: bytes) -> None:
    with pytest.raises(BinaryMismatch, match="malformed|cannot be read"):
        binaries.read_bytes(data, name="x")


def test_truncated_program_is_a_problem() -> None:
    whole = binary_fixtures.elf(padding=bytes(5000))
    assert "beyond the end of the file" in binaries.read_bytes(whole[:3000], name="x").problems[0]


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BinaryMismatch, match="No such file"):
        binaries.read(tmp_path / "absent")


def test_certificate_table_is_found_without_parsing_the_whole_file() -> None:
    signed = binary_fixtures.pe(certificate=True)
    assert binaries.certificate_table(signed[: binaries.HEAD_SIZE]) == (len(signed) - 16, 16)
    assert binaries.certificate_table(binary_fixtures.pe()) is None
    assert binaries.certificate_table(binary_fixtures.elf()) is None
    assert binaries.certificate_table(signed[:0x100]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads this system's own programs")
def test_agrees_with_readelf_about_a_real_program() -> None:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("readelf is not installed")
    program = Path(sys.executable).resolve()
    text = subprocess.run([tool, "-dW", str(program)], capture_output=True, text=True, check=True).stdout
    expected = [line.partition("[")[2].partition("]")[0] for line in text.splitlines() if "(NEEDED)" in line]
    assert list(binaries.read(program).needed) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_files_raise_nothing_but_our_error(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([binary_fixtures.elf(needed=["libc.so.6"], imports=IMPORTS, exports=["z"]), binary_fixtures.pe(debug=True)])))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = binaries.read_bytes(bytes(raw), name="x")
    except BinaryMismatch:
        return
    binaries.glibc_floor(got)
    binaries.above_glibc(got, "2.28")
    binaries.certificate_table(bytes(raw))
