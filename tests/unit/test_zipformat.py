"""The strict ZIP reader and writer; Python's zipfile and Info-ZIP's unzip are the judges of what is valid."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import zipformat
from opencoti_build.errors import ContainerError
from opencoti_build.zipformat import Entry


def archive(files: dict[str, bytes], *, prefix: bytes = b"", comment: bytes = b"", mode: int = zipformat.MODE_DATA) -> bytes:
    """An archive as our writer makes it."""
    out = bytearray(prefix)
    entries = []
    for name, data in files.items():
        header = zipformat.local_header(name, len(data), zipformat.crc32(data))
        entries.append(Entry(name, len(data), zipformat.crc32(data), len(out), len(out) + len(header), mode=mode))
        out += header + data
    return bytes(out + zipformat.directory_bytes(entries, len(out), comment=comment))


def findings(data: bytes) -> str:
    return "\n".join(zipformat.scan(io.BytesIO(data)).findings)


FILES = {"payload.json": b"{}", "bin/linux-x86_64": b"\x7fELF" * 50, "empty": b"", "grün.txt": "ä".encode()}


def test_what_we_write_is_what_zipfile_reads() -> None:
    data = archive(FILES, prefix=b"#!/bin/sh\n" * 9, comment=b"a comment", mode=zipformat.MODE_PROGRAM)
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        assert judge.testzip() is None
        assert {info.filename: judge.read(info) for info in judge.infolist()} == FILES
        assert judge.comment == b"a comment"
        for info in judge.infolist():
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert (info.create_system, info.external_attr >> 16) == (3, 0o100755)
            assert info.flag_bits == (0 if info.filename.isascii() else 0x800)


def test_what_we_write_passes_unzip(tmp_path: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    path = tmp_path / "x.zip"
    path.write_bytes(archive(FILES, prefix=b"MZ" + bytes(5000)))
    done = subprocess.run(["unzip", "-tq", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    out = subprocess.run(["unzip", "-p", str(path), "bin/linux-x86_64"], capture_output=True, check=True).stdout
    assert out == FILES["bin/linux-x86_64"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_reads_what_zipfile_writes(method: int) -> None:
    stream = io.BytesIO(b"MZ program")
    with zipfile.ZipFile(stream, "a", method) as writer:
        for name, content in FILES.items():
            writer.writestr(name, content * 3)
    directory = zipformat.read_directory(stream)
    assert [entry.name for entry in directory.entries] == list(FILES)
    assert directory.gaps == ((0, 10),)
    for entry in directory.entries:
        assert entry.crc32 == zipformat.crc32(FILES[entry.name] * 3)
        if entry.method == 0:
            assert stream.getvalue()[entry.data_offset : entry.end] == FILES[entry.name] * 3


def test_our_own_archive_round_trips() -> None:
    data = archive(FILES, prefix=b"x" * 7)
    directory = zipformat.read_directory(io.BytesIO(data))
    again = data[: directory.offset] + zipformat.directory_bytes(directory.entries, directory.offset)
    assert again == data


def _poke(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def _central(data: bytes, name: str) -> int:
    """Offset of the central header of ``name``."""
    return data.rindex(name.encode()) - 46


BASE = archive({"a": b"one", "b": b"twoo"})
LOCAL_B = BASE.index(b"PK\3\4", 10)
END = BASE.rindex(b"PK\5\6")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (BASE + b"junk", "4 bytes beyond the ZIP end record"),
        (BASE + b"\0", "1 byte beyond the ZIP end record"),
        (b"", "no ZIP end record"),
        (b"MZ" + bytes(100_000), "no ZIP end record"),
        (BASE[:-1], "no ZIP end record"),
        (b"x" + BASE, "must end at"),
        (_poke(BASE, END + 8, struct.pack("<HH", 1, 1)), "belong to no entry"),
        (_poke(BASE, END + 8, struct.pack("<HH", 3, 3)), "holds 2 entries, the end record promises 3"),
        (_poke(BASE, END + 8, struct.pack("<HH", 1, 2)), "several disks"),
        (_poke(BASE, END + 4, struct.pack("<H", 7)), "several disks"),
        (_poke(BASE, END + 16, struct.pack("<I", 0)), "must end at"),
        (_poke(BASE, 14, b"\1\2\3\4"), "contradicts the central directory: crc32"),
        (_poke(BASE, 18, struct.pack("<II", 2, 2)), "contradicts the central directory: size"),
        (_poke(BASE, 30, b"c"), "contradicts the central directory: name"),
        (_poke(BASE, 8, struct.pack("<H", 8)), "contradicts the central directory: method"),
        (_poke(BASE, 10, struct.pack("<H", 9)), "contradicts the central directory: time"),
        (_poke(BASE, 4, struct.pack("<H", 46)), "local header of entry 'a' asks for a reader of ZIP version 4.6"),
        (_poke(BASE, _central(BASE, "b") + 6, struct.pack("<H", 64)), "entry 'b' asks for a reader of ZIP version 6.4"),
        (_poke(BASE, _central(BASE, "b") + 38, struct.pack("<I", 0o120777 << 16)), "entry 'b' is marked as a symbolic link"),
        (_poke(BASE, _central(BASE, "b") + 38, struct.pack("<I", 0o040755 << 16)), "entry 'b' is marked as a folder"),
        (_poke(BASE, LOCAL_B, b"PK\3\5"), "bytes that are no local header"),
        (_poke(BASE, _central(BASE, "b") + 42, struct.pack("<I", 0)), "overlap"),
        (_poke(BASE, _central(BASE, "b") + 42, struct.pack("<I", 10**6)), "points behind the central directory's start"),
        (_poke(BASE, _central(BASE, "b") + 8, struct.pack("<H", 1)), "is encrypted"),
        (_poke(BASE, _central(BASE, "b") + 8, struct.pack("<H", 8)), "data descriptor"),
        (_poke(BASE, _central(BASE, "b") + 8, struct.pack("<H", 0x40)), "change its meaning"),
        (_poke(BASE, _central(BASE, "b") + 10, struct.pack("<H", 93)), "method 93"),
        (_poke(BASE, _central(BASE, "b") + 20, struct.pack("<I", 3)), "its two sizes differ"),
        (_poke(BASE, _central(BASE, "b") + 20, struct.pack("<II", 900, 900)), "reaches into the central directory"),
        (archive({"a": b"1", "A": b"2"}), "only in upper and lower case"),
        (archive({"../a": b"1"}), "climbs out"),
        (archive({"/a": b"1"}), "is absolute"),
        (archive({"a\\b": b"1"}), "backslash"),
        (archive({"a\nb": b"1"}), "control"),
        (archive({"a//b": b"1"}), "empty or '.' part"),
        (archive({"a/./b": b"1"}), "empty or '.' part"),
        (archive({"e\u0301": b"1"}), "normal form C"),
        (archive({"c:x": b"1"}), "Windows"),
        (archive({"a.": b"1"}), "dot"),
        (archive({"": b"1"}), "is empty"),
    ],
)  # fmt: skip
def test_every_defect_is_named(data: bytes, words: str) -> None:
    assert words in findings(data)
    with pytest.raises(ContainerError, match="ZIP structure is damaged"):
        zipformat.read_directory(io.BytesIO(data))


def test_duplicate_names_are_found() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as writer, pytest.warns(UserWarning, match="Duplicate"):
        writer.writestr("a", "1")
        writer.writestr("a", "2")
    assert "'a' comes twice" in findings(stream.getvalue())


def test_end_record_inside_a_comment_is_ambiguous() -> None:
    inner = BASE[END:]
    data = bytearray(BASE)
    data[END + 20 : END + 22] = struct.pack("<H", len(inner))
    assert "2 ZIP end records" in findings(bytes(data) + inner)


def test_signature_as_a_constant_in_program_code_is_no_archive() -> None:
    code = b"\x7fELF" + bytes(200) + b"\x81\x3f" + zipformat.END_SIGNATURE + bytes(40)
    result = zipformat.scan(io.BytesIO(code))
    assert (result.directory, result.present) == (None, False)
    assert zipformat.read_directory(io.BytesIO(code + archive({"a": code}, prefix=code)[len(code) :])).get("a") is not None


def test_comment_that_looks_like_an_end_record_is_not_written() -> None:
    with pytest.raises(ContainerError, match="comment"):
        zipformat.directory_bytes([], 0, comment=b"x" + zipformat.END_SIGNATURE)


# zip64


def sparse_archive(path: Path, size: int, *, prefix: int = 0) -> Entry:
    """One entry of ``size`` zeros (a hole) behind ``prefix`` zeros (another); its crc32 is left 0, nothing here computes it."""
    with path.open("wb") as stream:
        header = zipformat.local_header("big", size, 0)
        stream.seek(prefix)
        stream.write(header)
        entry = Entry("big", size, 0, prefix, prefix + len(header))
        stream.seek(entry.end)
        small = zipformat.local_header("small", 3, zipformat.crc32(b"abc"))
        second = Entry("small", 3, zipformat.crc32(b"abc"), entry.end, entry.end + len(small))
        stream.write(small + b"abc" + zipformat.directory_bytes([entry, second], second.end))
    return entry


@pytest.mark.parametrize(("size", "prefix"), [(zipformat.MAX32 - 1, 0), (zipformat.MAX32, 0), ((5 << 30) + 1, 0), (10, zipformat.MAX32), (10, 6 << 30)])
def test_zip64_at_its_limits(size: int, prefix: int, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    entry = sparse_archive(path, size, prefix=prefix)
    if path.stat().st_blocks * 512 > 64 << 20:
        pytest.skip("this file system has no sparse files")
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    assert directory.entries[0] == entry
    with zipfile.ZipFile(path) as judge:
        assert [(info.filename, info.file_size, info.header_offset) for info in judge.infolist()][0] == ("big", size, prefix)
        assert judge.read("small") == b"abc"
    # unzip 6.00 takes a 64-bit size of exactly 4 GiB - 1 for one more reference to the next field.
    if shutil.which("unzip") and size != zipformat.MAX32:
        assert subprocess.run(["unzip", "-p", str(path), "small"], capture_output=True, check=True).stdout == b"abc"
    # zip64 records appear exactly where a number does not fit.
    assert directory.zip64 == (directory.offset >= zipformat.MAX32)


def test_more_entries_than_16_bits_count() -> None:
    data = archive({f"{number:05d}": b"" for number in range(65_536)})
    assert len(zipformat.read_directory(io.BytesIO(data)).entries) == 65_536
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        assert len(judge.infolist()) == 65_536


def zip64_end(*, data: bytes = b"", size: int | None = None, total: int = 1, locator: int | None = None) -> bytes:
    """A small archive with hand-made zip64 end records; ``data`` is the extensible sector."""
    body = archive({"a": b"1"})
    end = body.rindex(b"PK\5\6")
    cd_size, cd_offset = struct.unpack_from("<II", body, end + 12)
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44 + len(data) if size is None else size, 45, 45, 0, 0, total, total, cd_size, cd_offset) + data
    pointer = struct.pack("<4sIQI", b"PK\6\7", 0, end if locator is None else locator, 1)
    return body[:end] + record + pointer + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, zipformat.MAX32, zipformat.MAX32, 0)


def test_zip64_end_record_with_extra_data_is_read() -> None:
    assert zipformat.read_directory(io.BytesIO(zip64_end(data=b"extra data"))).zip64


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (zip64_end(size=40), "does not end where its locator begins"),
        (zip64_end(size=1 << 60), "does not end where its locator begins"),
        (zip64_end(locator=1 << 62), "points to no zip64 end record"),
        (zip64_end(locator=0), "points to no zip64 end record"),
        (zip64_end(total=1 << 50), "the end record promises"),
    ],
)
def test_zip64_defects_are_named(data: bytes, words: str) -> None:
    assert words in findings(data)


def test_huge_central_directory_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    size = 3 << 30
    with path.open("wb") as stream:
        stream.write(b"PK\1\2")
        stream.seek(size)
        stream.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, size, 0, 0))
    with path.open("rb") as stream:
        assert "more than" in zipformat.scan(stream).findings[0]


# Fuzzing: whatever the bytes, there are findings or an archive that zipfile reads the same way, and never another exception.


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_mutated_archives_never_raise_and_never_differ_from_zipfile(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([BASE, archive(FILES, prefix=b"MZ"), zip64_end()])))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["byte", "field", "cut", "insert", "repeat"]))
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        if kind == "byte" and raw:
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "field":
            raw[at : at + 4] = struct.pack("<I", data.draw(st.sampled_from([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])))
        elif kind == "cut":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=30))
        else:
            raw += raw[at : at + 60]
    result = zipformat.scan(io.BytesIO(raw))
    assert result.findings or result.directory is not None
    if result.findings or result.directory is None:
        return
    with zipfile.ZipFile(io.BytesIO(raw)) as judge:
        assert [info.filename for info in judge.infolist()] == [entry.name for entry in result.directory.entries]
        for entry in result.directory.entries:
            if entry.method == 0 and zipformat.crc32(bytes(raw[entry.data_offset : entry.end])) == entry.crc32 and not entry.name.endswith("/"):
                assert judge.read(entry.name) == bytes(raw[entry.data_offset : entry.end])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_never_raise(raw: bytes) -> None:
    zipformat.scan(io.BytesIO(raw))
    zipformat.scan(io.BytesIO(raw + BASE[END:]))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("abcdefgäöü-_.0123456789", min_size=1, max_size=12).filter(lambda name: zipformat.name_problem(name) is None), st.binary(max_size=200), max_size=8))
def test_any_content_round_trips_through_zipfile(files: dict[str, bytes]) -> None:
    files = {name: content for name, content in files.items() if name.casefold() not in {other.casefold() for other in files if other != name}}
    data = archive(files, prefix=os.urandom(3))
    assert [entry.name for entry in zipformat.read_directory(io.BytesIO(data)).entries] == list(files)
    with zipfile.ZipFile(io.BytesIO(data)) as judge:
        assert {info.filename: judge.read(info) for info in judge.infolist()} == files
