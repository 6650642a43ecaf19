"""The host block: what is refused, where things lie, and that the bytes depend on the inputs alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import binary_fixtures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import binaries, universal, zipformat
from opencoti_build.errors import ContainerError, ManifestError, OpencotiError

ENGINE = "opencoti-1.2.3-c4"
WINDOWS = binary_fixtures.pe(text=ENGINE.encode(), debug=True)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "win.exe").write_bytes(WINDOWS)
    for machine in ("x86_64", "aarch64"):
        (folder / f"linux-{machine}").write_bytes(binary_fixtures.elf(machine, needed=["libc.so.6"], padding=machine.encode() * 9000))
    return folder


def build(parts: Path, out: Path) -> universal.HostBlock:
    return universal.build_host(out, parts / "win.exe", {name: parts / name for name in ("linux-aarch64", "linux-x86_64")}, ENGINE)


def test_members_lie_where_the_description_says(parts: Path, tmp_path: Path) -> None:
    block = build(parts, tmp_path / "host")
    data = (tmp_path / "host").read_bytes()
    assert (block.size, block.sha256, block.engine) == (len(data), hashlib.sha256(data).hexdigest(), ENGINE)
    assert [member.name for member in block.members] == ["bin/launcher.sh", "bin/linux-x86_64", "bin/linux-aarch64"]
    for member in block.members:
        content = data[member.data_offset : member.data_offset + member.size]
        assert data[member.offset : member.data_offset] == zipformat.local_header(member.name, len(content), zipformat.crc32(content))
        assert member.sha256 == hashlib.sha256(content).hexdigest()
        if member.name != "bin/launcher.sh":
            assert content == (parts / member.name.removeprefix("bin/")).read_bytes()
            assert member.data_offset % 65536 == 0
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o755
    assert universal.read_host(tmp_path / "host") == block


def test_first_line_is_text_to_a_shell(parts: Path, tmp_path: Path) -> None:
    build(parts, tmp_path / "host")
    data = (tmp_path / "host").read_bytes()
    line = data[: data.index(b"\n")]
    assert line.startswith(b"MZ") and b"\0" not in line and len(line) < 0x18
    assert any(chr(value).islower() for value in line)
    # Between the quotes: only the DOS header, which must not close them.
    assert data[data.index(b"'") + 1 : 0x40].count(b"'") == 0
    assert data[0x40:0x42] == b"'\n"


def test_the_pe_is_moved_and_nothing_else_about_it_changes(parts: Path, tmp_path: Path) -> None:
    block = build(parts, tmp_path / "host")
    data = (tmp_path / "host").read_bytes()[: block.members[0].offset]
    before, after = binaries.read_bytes(WINDOWS, name="before"), binaries.read_bytes(data, name="after")
    assert (before.machine, before.needed, before.kind) == (after.machine, after.needed, after.kind)
    sections = {name: _section(WINDOWS, name) for name in (b".text", b".rdata")}
    distance = None
    for name, (old_raw, size, address) in sections.items():
        new_raw, new_size, new_address = _section(data, name)
        assert (new_size, new_address) == (size, address)
        assert distance in (None, new_raw - old_raw)
        distance = new_raw - old_raw
        moved, original = bytearray(data[new_raw : new_raw + size]), WINDOWS[old_raw : old_raw + size]
        if name == b".rdata":  # holds the one file offset inside a section: the debug directory's
            at = original.index(b"RSDS") - 4
            assert struct.unpack_from("<I", moved, at)[0] - distance == struct.unpack_from("<I", original, at)[0]
            moved[at : at + 4] = original[at : at + 4]
        assert moved == original
    optional = struct.unpack_from("<I", data, 0x3C)[0] + 24
    assert struct.unpack_from("<II", data, optional + 60)[0] % 512 == 0
    assert struct.unpack_from("<I", data, optional + 64)[0] == 0


def _section(data: bytes, name: bytes) -> tuple[int, int, int]:
    header = struct.unpack_from("<I", data, 0x3C)[0]
    table = header + 24 + struct.unpack_from("<H", data, header + 20)[0]
    for index in range(struct.unpack_from("<H", data, header + 6)[0]):
        at = table + 40 * index
        if data[at : at + 8].rstrip(b"\0") == name:
            _, address, size, raw = struct.unpack_from("<4I", data, at + 8)
            return raw, size, address
    raise AssertionError(name)


def test_pefile_finds_nothing_to_warn_about(parts: Path, tmp_path: Path) -> None:
    pefile = pytest.importorskip("pefile")
    build(parts, tmp_path / "host")
    with pefile.PE(str(tmp_path / "host")) as image, pefile.PE(data=WINDOWS) as before:
        # "Byte 0x00 makes up ..." is about tiny files, not about structure.
        assert [text for text in image.get_warnings() if not text.startswith("Byte 0x")] == []
        assert image.OPTIONAL_HEADER.AddressOfEntryPoint == before.OPTIONAL_HEADER.AddressOfEntryPoint
        assert image.get_data(0x1000, 6) == before.get_data(0x1000, 6)


def test_bytes_do_not_depend_on_folder_umask_time_zone_or_order(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(parts, tmp_path / "host")
    other = tmp_path / "ünï cödé"
    other.mkdir()
    shutil.copytree(parts, other / "parts")
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    old = os.umask(0o077)
    try:
        programs = {name: other / "parts" / name for name in ("linux-x86_64", "linux-aarch64")}
        second = universal.build_host(other / "another name", other / "parts" / "win.exe", programs, ENGINE)
    finally:
        os.umask(old)
    assert first == second
    assert (tmp_path / "host").read_bytes() == (other / "another name").read_bytes()
    assert (other / "another name").stat().st_mode & 0o777 == 0o755


PE_PROBLEMS = {
    "empty": (b"", "no MZ"),
    "text": (b"#!/bin/sh\n" * 20, "no MZ"),
    "DOS program": (b"MZ" + bytes(200), "no PE header"),
    "arm64": (binary_fixtures.pe(machine=0xAA64), "its machine is 0xaa64"),
    "DLL": (binary_fixtures.pe(dll=True), "a DLL"),
    "window program": (binary_fixtures.pe(subsystem=2), "not a console program"),
    "signed": (binary_fixtures.pe(certificate=True), "it is signed"),
    "symbols": (binary_fixtures.pe(symbols=True), "link it with -s"),
    "overlay": (binary_fixtures.pe(overlay=b"x" * 10), "10 bytes beyond its last section"),
    "truncated": (binary_fixtures.pe()[:-100], "truncated"),
    "cut in the headers": (binary_fixtures.pe()[:0xA0], "not a PE32"),
}


@pytest.mark.parametrize("name", list(PE_PROBLEMS))
def test_windows_programs_that_cannot_be_moved(name: str, parts: Path, tmp_path: Path) -> None:
    data, words = PE_PROBLEMS[name]
    (parts / "win.exe").write_bytes(data)
    with pytest.raises(ContainerError, match="cannot become part of a universal file") as caught:
        build(parts, tmp_path / "host")
    assert words in caught.value.message
    assert list(tmp_path.iterdir()) == [parts]


def test_universal_file_is_not_joined_again(parts: Path, tmp_path: Path) -> None:
    build(parts, tmp_path / "host")
    shutil.copy(tmp_path / "host", parts / "win.exe")
    with pytest.raises(ContainerError, match="it is a universal file already"):
        build(parts, tmp_path / "again")


def test_launcher_that_does_not_fit_says_by_how_much(parts: Path, tmp_path: Path) -> None:
    (parts / "win.exe").write_bytes(binary_fixtures.pe(sections=60))
    with pytest.raises(ContainerError, match=r"first stage is \d+ bytes long, and the PE leaves room for \d+"):
        build(parts, tmp_path / "host")


ELF_PROBLEMS = {
    "another machine": (binary_fixtures.elf("aarch64"), "ELF for aarch64"),
    "a library": (binary_fixtures.elf(library=True, exports=["x"]), "it is a library"),
    "Windows": (binary_fixtures.pe(), "PE for x86_64"),
    "text": (b"hello", "neither an ELF"),
    "truncated": (binary_fixtures.elf(padding=bytes(9000))[:5000], "beyond the end"),
    "a loader that would break out of the script": (binary_fixtures.elf(needed=["x"], interpreter="/lib/$(reboot)"), "odd name"),
}


@pytest.mark.parametrize("name", list(ELF_PROBLEMS))
def test_programs_that_do_not_fit_their_platform(name: str, parts: Path, tmp_path: Path) -> None:
    data, words = ELF_PROBLEMS[name]
    (parts / "linux-x86_64").write_bytes(data)
    with pytest.raises(ContainerError, match="cannot be the program for linux-x86_64") as caught:
        build(parts, tmp_path / "host")
    assert words in caught.value.message
    assert not (tmp_path / "host").exists()


def test_unknown_platform_and_missing_files(parts: Path, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="'plan9-mips'; known are linux-x86_64"):
        universal.build_host(tmp_path / "host", parts / "win.exe", {"plan9-mips": parts / "linux-x86_64"}, ENGINE)
    with pytest.raises(ContainerError, match="No such file"):
        universal.build_host(tmp_path / "host", parts / "absent.exe", {}, ENGINE)
    with pytest.raises(ContainerError, match="No such file"):
        universal.build_host(tmp_path / "host", parts / "win.exe", {"linux-x86_64": parts / "absent"}, ENGINE)


def test_old_side_file_never_describes_a_new_block(parts: Path, tmp_path: Path) -> None:
    build(parts, tmp_path / "host")
    (parts / "linux-x86_64").write_bytes(b"broken")
    with pytest.raises(ContainerError):
        build(parts, tmp_path / "host")
    (parts / "linux-x86_64").write_bytes(binary_fixtures.elf())
    block = build(parts, tmp_path / "host")
    assert universal.read_host(tmp_path / "host") == block


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": 2}', '{"schema": 1, "engine": "e", "size": "x", "sha256": "", "members": []}', "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")])
def test_damaged_side_file_is_one_sentence(text: str | bytes, parts: Path, tmp_path: Path) -> None:
    build(parts, tmp_path / "host")
    side = universal.side_file(tmp_path / "host")
    side.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ManifestError, ContainerError)):
        universal.read_host(tmp_path / "host")
    side.unlink()
    with pytest.raises(ContainerError, match="host.json beside it cannot be read: build the host again"):
        universal.read_host(tmp_path / "host")


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["schema", "engine", "size", "sha256", "members", "name", "offset"]), inner, max_size=6), max_leaves=12))
def test_any_json_is_a_host_or_our_error(value: object) -> None:
    for document in (value, {"schema": 1, "engine": "e", "size": 1, "sha256": "x", "members": [value]}):
        try:
            universal.HostBlock.from_dict(document)
        except OpencotiError:
            pass


def test_description_round_trips(parts: Path, tmp_path: Path) -> None:
    block = build(parts, tmp_path / "host")
    assert universal.HostBlock.from_dict(json.loads(json.dumps(block.to_dict()))) == block


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_001])
def test_checksum_is_what_cksum_prints(size: int) -> None:
    if shutil.which("cksum") is None:
        pytest.skip("cksum is not installed")
    data = os.urandom(size)
    printed = subprocess.run(["cksum"], input=data, capture_output=True, check=True).stdout.split()
    assert [str(universal.posix_cksum(data)).encode(), str(size).encode()] == printed


def test_minify_keeps_every_command() -> None:
    text = "# a comment\n\n  if true; then\n    echo '#not a comment'\n  fi # kept\n"
    assert universal.minify(text) == "if true; then\necho '#not a comment'\nfi # kept\n"
    for stage in universal.launcher_stages():
        done = subprocess.run(["sh", "-n"], input=stage.replace("@CASES@", "").encode(), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_windows_programs_are_moved_or_refused(data: st.DataObject) -> None:
    raw = bytearray(WINDOWS)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, 0x240))
        raw[at : at + 2] = struct.pack("<H", data.draw(st.sampled_from([0, 1, 0x27, 0x7FFF, 0xFFFF]) | st.integers(0, 0xFFFF)))
    try:
        parsed = universal._parse_pe(bytes(raw), "x.exe")
        moved = universal._move_pe(parsed, b"'\nexit\n")
    except ContainerError:
        return
    assert moved.startswith(universal.MAGIC)
