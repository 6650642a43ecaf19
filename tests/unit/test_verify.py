"""``verify artifact``: a good file passes, and every kind of lie about it is found by the check that stands for it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import binary_fixtures
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opencoti_build import checksums, container, loader, manifest, onepass, universal, verify, zipformat
from opencoti_build.console import Console, Mode
from opencoti_build.container import PayloadEntry
from opencoti_build.errors import (
    BinaryMismatch,
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
from opencoti_build.runner import Outcome
from opencoti_build.variants import ComponentLibrary, HostKind, Variant
from opencoti_build.verify import State
from opencoti_build.zipformat import Method

ENGINE = "opencoti-1.2.3-c4"
ABI = "ab" * 32
EXPORTS = ["ggml_backend_init", "opencoti_library_abi"]
LIBC = {"puts": ("libc.so.6", "GLIBC_2.17"), "fcntl64": ("libc.so.6", "GLIBC_2.28")}


def library(**changes: Any) -> bytes:
    """A backend library that is all right, or not."""
    return binary_fixtures.elf(**({"library": True, "needed": ["libc.so.6"], "imports": LIBC, "exports": EXPORTS, "padding": ABI.encode()} | changes))


@dataclass
class Workshop:
    """Builds artifacts and their papers."""

    root: Path
    engine: str = ENGINE
    programs: dict[str, bytes] = dataclasses.field(default_factory=dict)
    libraries: dict[str, bytes] = dataclasses.field(default_factory=dict)
    loaders: dict[str, bytes] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = "file.llamafile.exe"
    method: Method = Method.STORED

    def __post_init__(self) -> None:
        stamp = b"\0" + self.engine.encode() + b"\0"
        self.programs = {
            "windows-x86_64": binary_fixtures.pe(text=stamp),
            "linux-x86_64": binary_fixtures.elf(needed=["libc.so.6"], imports=LIBC, padding=stamp),
            "linux-aarch64": binary_fixtures.elf("aarch64", needed=["libc.so.6"], imports={"puts": LIBC["puts"]}, padding=stamp),
        }
        self.libraries = {"ggml-cpu-avx2-x86_64.so": library(), "ggml-cuda.so": library(padding=ABI.encode() * 2000)}
        self.facts = {"os": "linux", "arch": "x86_64", "abi": ABI, "build": "1"}

    def host(self) -> Path:
        parts = self.root / "parts"
        parts.mkdir(exist_ok=True)
        for name, data in self.programs.items():
            (parts / name).write_bytes(data)
        natives = {name: parts / name for name in self.programs if name != "windows-x86_64"}
        universal.build_host(parts / "host", parts / "windows-x86_64", natives, self.engine, self.loaders)
        return parts / "host"

    def build(self, host: Path | None = None) -> Path:
        host = host or self.host()
        entries = []
        for name, data in self.libraries.items():
            (host.parent / name).write_bytes(data)
            kind = "cuda" if "cuda" in name else "cpu"
            entries.append(PayloadEntry(name, host.parent / name, self.method, library={"kind": kind, **self.facts}, component="cuda" if kind == "cuda" else "engine/linux-x86_64", build="1"))
        self.assembled = container.append(host, self.root / self.name, entries, engine=self.engine, sync=False)
        return self.assembled.path

    def document(self) -> manifest.Manifest:
        made = self.assembled
        return manifest.Manifest(
            file=made.path.name,
            size=made.size,
            sha256=made.sha256,
            engine=self.engine,
            variant="universal",
            commit="",
            dirty=False,
            base=(),
            patches=(),
            tree="",
            toolchains={},
            complete=True,
            missing=(),
            host=manifest.Block(made.host_size, made.host_sha256),
            entries=tuple(
                manifest.Entry(row.name, manifest.METHODS[row.method], row.size, row.compressed_size, row.offset, f"{row.crc32:08x}", row.sha256, row.component, row.build)
                for row in made.entries
            ),
        )

    def papers(self, **changes: Any) -> Path:
        path = self.build()
        manifest.write(manifest.beside(path), dataclasses.replace(self.document(), **changes))
        return path


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def details(report: verify.Report) -> dict[str, str]:
    return {check.name: check.detail for check in report.checks}


def states(report: verify.Report) -> dict[str, State]:
    return {check.name: check.state for check in report.checks}


def expect(report: verify.Report, error: type[VerifyError], words: str) -> None:
    """Exactly this kind of failure, first of all, with these words."""
    assert report.failed, "nothing was found"
    assert any(words in problem for check in report.failed if check.error is error for problem in check.problems), [check for check in report.failed]
    assert report.leading is not None
    with pytest.raises(report.leading.error):
        report.raise_for_failure()


def poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


# Good files


@pytest.mark.parametrize("method", [Method.STORED, Method.DEFLATED])
def test_good_file_passes_every_check(method: Method, workshop: Workshop) -> None:
    workshop.method = method
    path = workshop.papers()
    documents = [path.parent / name for name in ("BUILD_INFO.md", "RELEASE_NOTES.md")]
    for document in documents:
        document.write_text(document.name)
    checksums.write(path.parent / "SHA256SUMS", [path, manifest.beside(path), *documents])
    report = verify.artifact(path)
    assert set(states(report).values()) == {State.PASSED}, report.checks
    assert (report.outcome, report.engine, report.size) == (verify.Outcome.VERIFIED, ENGINE, path.stat().st_size)
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    said = details(report)
    assert said["glibc floor"] == "at most GLIBC_2.28, promised 2.28"
    assert said["SHA256SUMS"] == "it has the file's sha256; the manifest has the sha256 that SHA256SUMS says"
    assert said["programs and libraries"].startswith("5 read")
    report.raise_for_failure()


def test_plain_program_with_payload(workshop: Workshop) -> None:
    (workshop.root / "program").write_bytes(workshop.programs["linux-x86_64"])
    workshop.name = "x86_64.llamafile"
    report = verify.artifact(workshop.build(workshop.root / "program"))
    assert report.outcome is verify.Outcome.VERIFIED, report.failed
    assert states(report)["hashes"] is State.SKIPPED
    assert "no x86_64.llamafile.MANIFEST.json beside it" in report.checks[0].detail


def test_ape_with_entries_of_its_own(workshop: Workshop) -> None:
    program = workshop.root / "program"
    program.write_bytes(workshop.programs["windows-x86_64"])
    with zipfile.ZipFile(program, "a", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr(".cosmo", b"x" * 500)
    report = verify.artifact(workshop.build(program))
    assert report.outcome is verify.Outcome.VERIFIED, report.failed


def test_report_for_machines_and_people(workshop: Workshop) -> None:
    path = workshop.papers()
    good = verify.artifact(path)
    text = io.StringIO()
    good.show(Console(text, mode=Mode.PLAIN))
    assert text.getvalue().rstrip().splitlines()[-1].startswith("ok  file.llamafile.exe is verified: 8 checks passed, 3 could not be made (see above); sha256 ")
    value = json.loads(json.dumps(good.to_dict()))
    assert (value["outcome"], value["exit_code"], value["sha256"]) == ("verified", 0, good.sha256)
    poke(path, 0x700, b"\xff\xfe\xfd")
    bad = json.loads(json.dumps(verify.artifact(path).to_dict()))
    assert (bad["outcome"], bad["exit_code"]) == ("failed", HostMismatch.exit_code)
    many = io.StringIO()
    verify.artifact(path).show(Console(many, mode=Mode.PLAIN))
    assert "host block: the host block has sha256" in many.getvalue() and "is verified" not in many.getvalue()
    assert {check["name"] for check in bad["checks"] if check["state"] == "failed"} >= {"hashes", "host block"}


# Hashes


def test_changed_byte_is_a_hash_mismatch(workshop: Workshop) -> None:
    path = workshop.papers()
    row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
    poke(path, row.data_offset + row.size - 10, b"\xff")
    report = verify.artifact(path)
    expect(report, HashMismatch, "its manifest says")
    expect(report, EntryMismatch, "entry ggml-cuda.so has crc32")
    expect(report, EntryMismatch, "entry ggml-cuda.so has sha256")


def test_damage_ends_with_the_code_of_its_place(workshop: Workshop) -> None:
    """The whole file's sha256 differs after any damage; the code tells where the damage lies."""
    path = workshop.papers()
    data = path.read_bytes()
    row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
    for change, error in (
        (data[: row.data_offset] + b"\xff" + data[row.data_offset + 1 :], EntryMismatch),
        (data[:0x700] + b"\xff\xfe\xfd" + data[0x703:], HostMismatch),
        (data + b"junk", StructureMismatch),
    ):
        path.write_bytes(change)
        report = verify.artifact(path)
        assert states(report)["hashes"] is State.FAILED
        assert report.to_dict()["exit_code"] == error.exit_code
        with pytest.raises(error):
            report.raise_for_failure()
    path.write_bytes(data)
    manifest.write(manifest.beside(path), dataclasses.replace(workshop.document(), sha256="0" * 64))
    with pytest.raises(HashMismatch):
        verify.artifact(path).raise_for_failure()


def test_manifest_edited_by_hand(workshop: Workshop) -> None:
    """What the manifest says beyond the file's bytes is proven by SHA256SUMS; without one, that is said."""
    path = workshop.papers()
    checksums.write(path.parent / "SHA256SUMS", [path, manifest.beside(path)])
    assert "not proven" not in details(verify.artifact(path))["SHA256SUMS"]
    manifest.write(manifest.beside(path), dataclasses.replace(workshop.document(), commit="0" * 40))
    expect(verify.artifact(path), HashMismatch, "it was changed")
    (path.parent / "SHA256SUMS").unlink()
    report = verify.artifact(path)
    assert report.outcome is verify.Outcome.VERIFIED
    assert "the manifest itself stands in no SHA256SUMS" in details(report)["SHA256SUMS"]


def test_papers_that_are_not_there_are_rows_and_no_failure(workshop: Workshop) -> None:
    path = workshop.papers()
    report = verify.artifact(path)
    assert report.outcome is verify.Outcome.VERIFIED
    rows = {check["name"]: check for check in report.to_dict()["checks"]}
    text = io.StringIO()
    report.show(Console(text, mode=Mode.PLAIN))
    for name in ("SHA256SUMS", "BUILD_INFO.md", "RELEASE_NOTES.md"):
        assert rows[name]["state"] == "skipped" and rows[name]["detail"].startswith("not there: not checked")
        assert any(name in line and "skipped" in line and "not there: not checked" in line for line in text.getvalue().splitlines())


@pytest.mark.parametrize("name", ["BUILD_INFO.md", "RELEASE_NOTES.md"])
def test_papers_that_are_there_are_compared(name: str, workshop: Workshop) -> None:
    path = workshop.papers()
    paper, sums = path.parent / name, path.parent / "SHA256SUMS"
    paper.write_text("as it was made")
    assert details(verify.artifact(path))[name] == "it stands in no SHA256SUMS: not checked"
    checksums.write(sums, [path, paper])
    assert (report := verify.artifact(path)).outcome is verify.Outcome.VERIFIED and states(report)[name] is State.PASSED
    paper.write_text("as somebody wants it")
    expect(verify.artifact(path), HashMismatch, f"{name} has sha256 ")
    paper.unlink()
    assert (report := verify.artifact(path)).outcome is verify.Outcome.VERIFIED and details(report)[name] == "not there: not checked"
    os.mkfifo(paper)
    expect(verify.artifact(path), HashMismatch, "it is a device or a pipe, not a file")


def test_programs_come_from_the_tree_that_the_manifest_names(workshop: Workshop) -> None:
    tree = "12ab" * 10
    assert states(verify.artifact(workshop.papers()))["version string"] is State.PASSED
    expect(verify.artifact(workshop.papers(tree=tree)), VersionMismatch, f"was not built from the tree {tree}")
    stamp = f"\0{ENGINE}\0{tree}\0".encode()
    workshop.programs = {
        "windows-x86_64": binary_fixtures.pe(text=stamp),
        "linux-x86_64": binary_fixtures.elf(needed=["libc.so.6"], imports=LIBC, padding=stamp),
        "linux-aarch64": binary_fixtures.elf("aarch64", needed=["libc.so.6"], imports={"puts": LIBC["puts"]}, padding=stamp),
    }
    assert verify.artifact(workshop.papers(tree=tree)).outcome is verify.Outcome.VERIFIED


def test_part_that_nobody_calls_missing(workshop: Workshop) -> None:
    """The variant's libraries are in the file or in the manifest's list of missing parts."""
    known = {
        "universal": Variant("universal", "x", "x", HostKind.UNIVERSAL, "zig", (), (ComponentLibrary("cuda", "cuda", "13", "linux", "x86_64", "ggml-cuda.so", "f"), ComponentLibrary("vulkan", "vulkan", "", "linux", "x86_64", "ggml-vulkan.so", "f")))
    }
    expect(verify.artifact(workshop.papers(), variants=known), EntryMismatch, "ggml-vulkan.so (linux) is neither in the file nor listed as missing")
    named = workshop.papers(complete=False, missing=(manifest.Missing("ggml-vulkan.so (linux)", "no file"),))
    assert verify.artifact(named, variants=known).outcome is verify.Outcome.VERIFIED
    other = verify.artifact(workshop.papers(variant="nope"), variants=known)
    assert "knows no variant 'nope'" in next(check.detail for check in other.checks if check.name == "entries")


def test_comment_of_the_archive(workshop: Workshop) -> None:
    path = workshop.build()
    path.write_bytes(path.read_bytes()[: -len(ENGINE)] + ENGINE.replace("c4", "c5").encode())
    expect(verify.artifact(path), VersionMismatch, "the ZIP comment is")


def test_poor_list_of_checksums_is_named(workshop: Workshop) -> None:
    path = workshop.papers()
    (path.parent / "SHA256SUMS").write_text("")
    report = verify.artifact(path)
    assert states(report)["SHA256SUMS"] is State.SKIPPED and details(report)["SHA256SUMS"].startswith("it does not list the file: not checked")
    manifest.write(manifest.beside(path), dataclasses.replace(workshop.document(), file="other.exe"))
    assert "its manifest calls it other.exe" in verify.artifact(path).checks[0].detail


def test_size_is_compared_too(workshop: Workshop) -> None:
    expect(verify.artifact(workshop.papers(size=5)), HashMismatch, "bytes, its manifest says 5")


def test_checksum_file_beside_is_compared(workshop: Workshop) -> None:
    path = workshop.papers()
    (path.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {path.name}\n{'1' * 64}  other\n")
    expect(verify.artifact(path), HashMismatch, "SHA256SUMS says " + "0" * 64)
    (path.parent / "SHA256SUMS").write_text("nonsense\n")
    expect(verify.artifact(path), HashMismatch, "SHA256SUMS line 1")


def test_manifest_can_be_given(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.build()
    manifest.write(tmp_path / "elsewhere.json", workshop.document())
    assert states(verify.artifact(path, manifest=tmp_path / "elsewhere.json"))["hashes"] is State.PASSED
    with pytest.raises(ManifestError):
        verify.artifact(path, manifest=tmp_path / "absent.json")
    manifest.beside(path).write_text("{}")
    with pytest.raises(ManifestError):
        verify.artifact(path)
    manifest.beside(path).unlink()
    manifest.beside(path).mkdir()
    with pytest.raises(ManifestError, match="Cannot read .*MANIFEST.json"):
        verify.artifact(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "absent", "There is no file"), (tmp_path, "is a folder"), (tmp_path / "pipe", "device or a pipe"), (Path(os.devnull), "device or a pipe"), (tmp_path / "x\0y", "no file")):
        with pytest.raises(UsageError, match=words):
            verify.artifact(path)


def test_pins_folder_that_is_not_there(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        verify.artifact(workshop.papers(), pins=tmp_path / "pin")


def test_json_says_why_there_is_no_report(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "invoke", "verify", "artifact", "--json", str(tmp_path / "absent")]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    value = json.loads(done.stdout)
    assert (value["outcome"], value["exit_code"], done.returncode) == ("unread", UsageError.exit_code, UsageError.exit_code)
    assert "There is no file" in value["error"]


# Structure


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data + b"junk", "4 bytes beyond the ZIP end record"),
        (lambda data: data[:-30], "no ZIP end record"),
        (lambda data: data[: len(data) // 2], "no ZIP end record"),
        (lambda data: data[: data.rindex(b"ggml-cuda.so") - 46 + 42] + bytes(4) + data[data.rindex(b"ggml-cuda.so") :], "no local header"),
        (lambda data: data.replace(zipformat.LOCAL_SIGNATURE, b"PK\3\5"), "no local header"),
    ],
    ids=["trailing", "cut", "half", "offset", "headers"],
)
def test_damaged_structure(change: Callable[[bytes], bytes], words: str, workshop: Workshop) -> None:
    path = workshop.build()
    path.write_bytes(change(path.read_bytes()))
    report = verify.artifact(path)
    expect(report, StructureMismatch, words)
    assert states(report)["version string"] is not State.PASSED


def test_bytes_hidden_between_entries(workshop: Workshop) -> None:
    path = workshop.build()
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    data = path.read_bytes()
    hidden = data[: directory.offset] + b"hidden" + zipformat.directory_bytes(directory.entries, directory.offset + 6)
    path.write_bytes(hidden)
    expect(verify.artifact(path), StructureMismatch, f"bytes {directory.offset} to {directory.offset + 6} belong to no entry")


def test_bytes_hidden_in_the_padding_of_the_host(workshop: Workshop) -> None:
    path = workshop.build()
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    gap = directory.gaps[1]
    poke(path, gap[0] + 1, b"x")
    expect(verify.artifact(path), StructureMismatch, "belong to no entry and are not zeros")


# Entries


def forge_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replace payload.json by another of the same length, with right headers and checksums."""
    data = path.read_bytes()
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    old = directory.get("payload.json")
    assert old is not None
    value = json.loads(data[old.data_offset : old.end])
    change(value)
    text = json.dumps(value).encode()
    assert len(text) <= old.size
    text = text.ljust(old.size)
    new = dataclasses.replace(old, crc32=zipformat.crc32(text), central=b"")
    entries = [dataclasses.replace(entry, central=b"") if entry.name != "payload.json" else new for entry in directory.entries]
    head = data[: old.header_offset] + zipformat.local_header("payload.json", len(text), new.crc32) + text + data[old.end : directory.offset]
    path.write_bytes(head + zipformat.directory_bytes(entries, directory.offset))


def test_library_that_is_not_the_listed_one(workshop: Workshop) -> None:
    path = workshop.build()
    forge_index(path, lambda value: value["libraries"][1].update(sha256="0" * 64))
    expect(verify.artifact(path), EntryMismatch, "ggml-cuda.so is not the library that payload.json lists")


def test_listed_library_that_is_not_there(workshop: Workshop) -> None:
    path = workshop.build()
    forge_index(path, lambda value: value["libraries"][1].update(name="ggml-gone.so"))
    expect(verify.artifact(path), EntryMismatch, "payload.json lists ggml-gone.so, which is not in the file")


def test_library_listed_twice(workshop: Workshop) -> None:
    path = workshop.build()
    forge_index(path, lambda value: value.update(libraries=[value["libraries"][0]] * 2))
    expect(verify.artifact(path), EntryMismatch, "lists ggml-cpu-avx2-x86_64.so twice")


@pytest.mark.parametrize("change", [lambda value: value.pop("host"), lambda value: value.update(schema=9), lambda value: value.update(libraries={})])
def test_index_that_is_none(change: Callable[[dict[str, Any]], None], workshop: Workshop) -> None:
    path = workshop.build()
    forge_index(path, change)
    expect(verify.artifact(path), EntryMismatch, "payload.json is not what its format says")


def test_file_without_an_index(workshop: Workshop) -> None:
    path = workshop.root / "x"
    program = workshop.programs["linux-x86_64"]
    path.write_bytes(program + zipformat.local_header("a", 0, 0) + zipformat.directory_bytes([zipformat.Entry("a", 0, 0, len(program), len(program) + 31)], len(program) + 31))
    expect(verify.artifact(path), EntryMismatch, "there is no payload.json")


def test_manifest_that_lists_other_entries(workshop: Workshop) -> None:
    path = workshop.papers()
    document = workshop.document()
    for changed, words in (
        (document.entries[:-1], "entry ggml-cuda.so is not in the manifest"),
        ((*document.entries, dataclasses.replace(document.entries[0], name="gone")), "the manifest lists gone"),
        ((*document.entries[:-1], dataclasses.replace(document.entries[-1], sha256="0" * 64)), "the manifest says " + "0" * 64),
        ((*document.entries[:-1], dataclasses.replace(document.entries[-1], offset=1)), "the manifest says 1"),
        ((*document.entries[:-1], dataclasses.replace(document.entries[-1], method="deflate")), "has method stored, the manifest says deflate"),
    ):
        manifest.write(manifest.beside(path), dataclasses.replace(document, entries=changed))
        expect(verify.artifact(path), EntryMismatch, words)


def test_pins(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.papers()
    pins = tmp_path / "pin"
    pins.mkdir()
    assert verify.artifact(path, pins=pins).outcome is verify.Outcome.VERIFIED
    row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
    head = f"#! pin 1 cuda\n# comment {row.sha256}\n#! file linux-x86_64 size={row.size} build=1\n"
    (pins / "cuda.txt").write_text(f"{head}{row.sha256}  components/cuda/1/ggml-cuda-x86_64.so\n")
    report = verify.artifact(path, pins=pins)
    assert "1 as pinned" in next(check.detail for check in report.checks if check.name == "entries")
    (pins / "cuda.txt").write_text(f"{head}{'0' * 64}  components/cuda/1/ggml-cuda-x86_64.so\n")
    expect(verify.artifact(path, pins=pins), EntryMismatch, "which pin/cuda.txt does not list")
    (pins / "cuda.txt").write_text(f"linux-x86_64  ggml-cuda-x86_64.so  {row.size}  {row.sha256}\n")
    with pytest.raises(ManifestError, match="cuda.txt line 1"):
        verify.artifact(path, pins=pins)


def test_damaged_deflate_data(workshop: Workshop) -> None:
    workshop.method = Method.DEFLATED
    path = workshop.build()
    row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
    poke(path, row.data_offset, b"\xff" * 40)
    report = verify.artifact(path)
    assert any(check.error is EntryMismatch for check in report.failed)


# Host, version


def test_host_block_that_is_not_the_promised_one(workshop: Workshop) -> None:
    path = workshop.papers()
    manifest.write(manifest.beside(path), dataclasses.replace(workshop.document(), host=manifest.Block(workshop.assembled.host_size, "0" * 64)))
    expect(verify.artifact(path), HostMismatch, "the manifest says")
    workshop.papers()
    forge_index(path, lambda value: value["host"].update(sha256="0" * 64))
    expect(verify.artifact(path), HostMismatch, "payload.json says " + "0" * 64)


def test_host_block_that_ends_elsewhere(workshop: Workshop) -> None:
    path = workshop.build()
    forge_index(path, lambda value: value["host"].update(size=value["host"]["size"] - 100))
    expect(verify.artifact(path), HostMismatch, "but payload.json begins at")
    for size in (0, -5, 10**18):
        workshop.build()
        forge_index(path, lambda value, size=size: value.update(host={"size": size, "sha256": "x"}, engine="e"))
        expect(verify.artifact(path), HostMismatch, f"says that the host block has {size} bytes")


def test_launcher_that_extracts_something_else(workshop: Workshop) -> None:
    """All hashes of host and file agree, but the script points to other bytes than the listed program."""
    host = workshop.host()
    data = host.read_bytes()
    at = data.index(b" _h=") + 4
    host.write_bytes(data[:at] + b"0" * 64 + data[at + 64 :])
    block = universal.read_host(host)
    universal.side_file(host).write_text(json.dumps(block.to_dict() | {"sha256": hashlib.sha256(host.read_bytes()).hexdigest()}))
    report = verify.artifact(workshop.build(host))
    expect(report, HostMismatch, "that is not among the entries")
    expect(report, HostMismatch, "the launcher knows nothing of the program")


@pytest.fixture
def mapped(workshop: Workshop) -> Workshop:
    """Its program for x86_64 has a loader."""
    program = workshop.programs["linux-x86_64"]
    workshop.programs["linux-x86_64"] = binary_fixtures.elf(pie=True, needed=["libc.so.6"], imports=LIBC, padding=program[-5000:] + bytes(8192))
    workshop.programs["linux-x86_64"] += b"\0" + workshop.engine.encode() + b"\0"
    workshop.loaders = {"linux-x86_64": binary_fixtures.loader()}
    return workshop


def test_loader_that_starts_its_program(mapped: Workshop) -> None:
    assert verify.artifact(mapped.build()).outcome is verify.Outcome.VERIFIED
    assert [row.name for row in mapped.assembled.entries if row.in_host] == ["bin/launcher.sh", "bin/linux-x86_64.loader", "bin/linux-x86_64", "bin/linux-aarch64"]


LOADER_FORGERIES = {
    "another place": (16, "starts what lies at byte"),
    "another size": (24, "starts what lies at byte"),
    "another checksum": (32, "has the checksum of another program"),
    "another head": (36, "has the checksum of another program"),
    "own checksum": (40, "does not have its own checksum"),
    "another length": (44, "does not have its own checksum"),
    "another magic": (0, "is not a loader"),
}


@pytest.mark.parametrize("name", list(LOADER_FORGERIES))
def test_loader_that_starts_something_else(name: str, mapped: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hashes agree; what the loader was told is wrong."""
    at, words = LOADER_FORGERIES[name]
    fill = loader.fill

    def forge(template: bytes, program: bytes, offset: int) -> bytes:
        data = bytearray(fill(template, program, offset))
        data[data.index(loader.MAGIC) + at] ^= 1
        return bytes(data)

    monkeypatch.setattr(loader, "fill", forge)
    expect(verify.artifact(mapped.build()), HostMismatch, f"bin/linux-x86_64.loader {words}")


def test_launcher_and_entries_disagree_about_a_loader(mapped: Workshop) -> None:
    host = mapped.host()
    data = bytearray(host.read_bytes())
    at = data.index(b" _y=", data.index(b" _h=")) + 4
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    host.write_bytes(data)
    block = universal.read_host(host)
    universal.side_file(host).write_text(json.dumps(block.to_dict() | {"sha256": hashlib.sha256(data).hexdigest()}))
    expect(verify.artifact(mapped.build(host)), HostMismatch, "the launcher knows nothing of bin/linux-x86_64.loader")


def test_program_without_the_version_string(workshop: Workshop) -> None:
    workshop.programs["linux-aarch64"] = binary_fixtures.elf("aarch64", padding=b"opencoti-1.2.3-c45\0")
    expect(verify.artifact(workshop.build()), VersionMismatch, f"bin/linux-aarch64 does not contain the version string {ENGINE}")


def test_index_and_manifest_must_name_the_same_engine(workshop: Workshop) -> None:
    expect(verify.artifact(workshop.papers(engine="opencoti-9-c9")), VersionMismatch, "the manifest opencoti-9-c9")


# Programs and libraries

BAD_LIBRARIES = {
    "not a binary": (b"hello" * 20, "neither an ELF"),
    "truncated": (library(padding=ABI.encode() + bytes(9000))[:-5000], "reaches beyond the end of the file"),
    "another machine": (library(machine="aarch64"), "is for linux aarch64, not for linux x86_64"),
    "another system": (binary_fixtures.pe(dll=True, text=ABI.encode()), "is for windows x86_64, not for linux x86_64"),
    "a program": (binary_fixtures.elf(padding=ABI.encode()), "is a program, not a library"),
    "needs libstdc++": (library(needed=["libc.so.6", "libstdc++.so.6"]), "needs libstdc++.so.6, which is not part of every linux system"),
    "needs CUDA's driver": (library(needed=["libcuda.so.1"]), "needs libcuda.so.1"),
    "another ABI": (library(padding=b"cd" * 32), "does not contain the ABI hash"),
    "exports too little": (library(exports=["ggml_backend_init"]), "does not export opencoti_library_abi"),
    "exports too much": (library(exports=[*EXPORTS, "ggml_init", "malloc"]), "exports ggml_init, malloc, which could be mistaken"),
}


@pytest.mark.parametrize("name", list(BAD_LIBRARIES))
def test_bad_libraries(name: str, workshop: Workshop) -> None:
    data, words = BAD_LIBRARIES[name]
    workshop.libraries["ggml-cpu-avx2-x86_64.so"] = data
    report = verify.artifact(workshop.build())
    expect(report, BinaryMismatch, words)
    assert {check.error for check in report.failed} == {BinaryMismatch}


def test_cuda_libraries_may_need_the_driver(workshop: Workshop) -> None:
    workshop.libraries["ggml-cuda.so"] = library(needed=["libc.so.6", "libcuda.so.1"])
    assert verify.artifact(workshop.build()).outcome is verify.Outcome.VERIFIED


def test_programs_may_need_only_the_system(workshop: Workshop) -> None:
    stamp = ENGINE.encode() + b"\0"
    workshop.programs["linux-x86_64"] = binary_fixtures.elf(needed=["libgomp.so.1"], padding=stamp)
    workshop.programs["windows-x86_64"] = binary_fixtures.pe(text=stamp, imports={"KERNEL32.dll": ["x"], "libstdc++-6.dll": ["y"], "api-ms-win-crt-heap-l1-1-0.dll": ["malloc"]})
    report = verify.artifact(workshop.build())
    expect(report, BinaryMismatch, "bin/linux-x86_64 needs libgomp.so.1")
    expect(report, BinaryMismatch, "bin/windows-x86_64 needs libstdc++-6.dll")
    assert len(report.failed[0].problems) == 2


def test_glibc_floor_names_the_symbol(workshop: Workshop) -> None:
    workshop.libraries["ggml-cuda.so"] = library(imports={"arc4random": ("libc.so.6", "GLIBC_2.36"), "fstat": ("libc.so.6", "GLIBC_2.33")})
    report = verify.artifact(workshop.build())
    expect(report, FloorMismatch, "ggml-cuda.so needs GLIBC_2.36 (arc4random), GLIBC_2.33 (fstat); the floor is 2.28")


# Windows limit, signature


def test_windows_limit(workshop: Workshop) -> None:
    """A sparse file: only what counts is there."""
    path = workshop.build()
    for name, failed in (("big.exe", True), ("big.llamafile", False)):
        big = workshop.root / name
        shutil.copy(path, big)
        os.truncate(big, 1 << 32)
        if big.stat().st_blocks * 512 > 1 << 24:
            pytest.skip("this file system has no sparse files")
        head = big.open("rb")
        with head:
            made = verify._Verification(big, head, None, None, Console(mode=Mode.QUIET), FakeRunner(""), {})
            made._check_limit()
        assert (made.limit.check().state is State.FAILED) == failed
        assert made.limit.error is HeadroomError
        big.unlink()


def signed(path: Path, folder: Path) -> Path:
    """The file with an Authenticode signature by a key made for the test."""
    tool, openssl = shutil.which("osslsigncode"), shutil.which("openssl")
    if tool is None or openssl is None:
        pytest.skip("osslsigncode or openssl is not installed")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(folder / "key"), "-out", str(folder / "cert"), "-days", "2", "-subj", "/CN=test", "-addext", "extendedKeyUsage=codeSigning"],
        check=True,
        capture_output=True,
    )
    out = folder / "signed"
    out.mkdir()
    subprocess.run([tool, "sign", "-certs", str(folder / "cert"), "-key", str(folder / "key"), "-in", str(path), "-out", str(out / path.name)], check=True, capture_output=True)
    return out / path.name


def test_signature_behind_the_archive_is_named_and_taken_into_account(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.papers()
    made = signed(path, tmp_path)
    report = verify.artifact(made, manifest=manifest.beside(path))
    said = details(report)
    assert report.outcome is verify.Outcome.VERIFIED, report.failed
    assert report.signed
    assert "without its signature the file has the manifest's sha256" in said["hashes"]
    assert "an Authenticode signature of" in said["ZIP structure"]
    poke(made, 0x700, b"\xff\xfe\xfd")
    expect(verify.artifact(made, manifest=manifest.beside(path)), HashMismatch, "")
    with made.open("ab") as stream:
        stream.write(b"junk")
    expect(verify.artifact(made, manifest=manifest.beside(path)), StructureMismatch, "does not end at the end of the file")


# Running


@dataclass
class FakeRunner:
    """Stands in for starting a program that the test machine cannot start."""

    output: str
    code: int = 0

    def run(self, argv: Sequence[str | Path], **_: Any) -> Outcome:
        self.argv = [str(word) for word in argv]
        return Outcome(tuple(self.argv), self.code, self.output)


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        (f"{ENGINE}\nbase b11434\n", 0, None),
        (f"version: {ENGINE} (b11434)\n", 0, None),
        (f"{ENGINE}5\n", 0, f"it says '{ENGINE}5', not {ENGINE}"),
        ("", 0, "it says 'nothing'"),
        ("no usable folder\n", 126, "it ended with exit code 126: no usable folder"),
    ],
)
def test_what_the_started_program_says(output: str, code: int, words: str | None, workshop: Workshop) -> None:
    runner = FakeRunner(output, code)
    report = verify.artifact(workshop.build(), run=True, runner=runner)
    assert runner.argv[-1] == "--version"
    if words is None:
        assert report.outcome is verify.Outcome.VERIFIED, report.failed
    else:
        expect(report, RunMismatch, words)


def test_nothing_is_started_when_a_check_failed(workshop: Workshop) -> None:
    path = workshop.papers()
    poke(path, 0x700, b"\xff\xfe\xfd")
    runner = FakeRunner(ENGINE)
    report = verify.artifact(path, run=True, runner=runner)
    assert not hasattr(runner, "argv")
    assert states(report)["start"] is State.SKIPPED


# Anything at all


@pytest.mark.parametrize("data", [b"", b"x", b"MZ", b"PK\5\6" + bytes(18), os.urandom(5000)], ids=["empty", "one byte", "MZ", "empty zip", "random"])
def test_files_that_are_something_else(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    report = verify.artifact(tmp_path / "x")
    assert report.outcome is verify.Outcome.FAILED
    assert report.sha256 == hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    made = Workshop(tmp_path_factory.mktemp("sample"))
    made.libraries = {"ggml-cpu-avx2-x86_64.so": library()}
    path = made.papers()
    return path, path.read_bytes()


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_mutation_passes_and_none_ends_in_a_traceback(data: st.DataObject, sample: tuple[Path, bytes]) -> None:
    path, good = sample
    raw = bytearray(good)
    with io.BytesIO(good) as stream:
        directory = zipformat.read_directory(stream)
    spots = st.integers(0, 0x1200) | st.integers(directory.entries[0].header_offset, directory.entries[0].header_offset + 60) | st.integers(len(raw) - 2500, len(raw) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(spots)
        value = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", struct.pack("<I", 0x7FFFFFFF)]))
        raw[at : at + len(value)] = value
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    other = path.with_name("mutated")
    other.write_bytes(raw)
    with_manifest = verify.artifact(other, manifest=manifest.beside(path))
    assert (with_manifest.outcome is verify.Outcome.VERIFIED) == (bytes(raw) == good)
    try:
        verify.artifact(other)
    except OpencotiError as error:
        pytest.fail(f"raised instead of reported: {error!r}")


# The one pass


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_pass_computes_what_slicing_computes(data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=300))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    ranges = [onepass.Range(start, end - start) for start, end in zip(cuts, cuts[1:], strict=False)]
    stops = data.draw(st.lists(st.integers(0, len(raw)), max_size=3)) + [len(raw)]
    at = data.draw(st.integers(0, len(raw)))
    patch = data.draw(st.binary(max_size=9))[: len(raw) - at]
    whole, patched = onepass.PrefixHash(stops), onepass.PrefixHash(stops, {at: patch})
    hashes, sums = onepass.RangeHashes(ranges), onepass.RangeChecksums(ranges)
    block = data.draw(st.integers(1, 64))
    for position in range(0, len(raw), block):
        for consumer in (whole, patched, hashes, sums):
            consumer.feed(position, memoryview(raw)[position : position + block])
    other = raw[:at] + patch + raw[at + len(patch) :]
    assert whole.digests == {stop: hashlib.sha256(raw[:stop]).hexdigest() for stop in stops}
    assert patched.digests == {stop: hashlib.sha256(other[:stop]).hexdigest() for stop in stops}
    assert hashes.hexdigests == [hashlib.sha256(raw[item.start : item.end]).hexdigest() for item in ranges]
    assert sums.values == [zipformat.crc32(raw[item.start : item.end]) for item in ranges]


def test_one_pass_over_more_blocks_than_buffers(tmp_path: Path) -> None:
    raw = os.urandom(1 << 20) * 41 + b"tail"
    (tmp_path / "x").write_bytes(raw)
    whole, part = onepass.PrefixHash([len(raw), 1000]), onepass.RangeHashes([onepass.Range(5, 40 << 20), onepass.Range((40 << 20) + 5, 100)])
    seen = []
    with (tmp_path / "x").open("rb") as stream:
        assert onepass.run(stream, [whole, part], advance=seen.append) == len(raw) == sum(seen)
    assert whole.digests == {size: hashlib.sha256(raw[:size]).hexdigest() for size in (1000, len(raw))}
    assert part.hexdigests == [hashlib.sha256(raw[5 : (40 << 20) + 5]).hexdigest(), hashlib.sha256(raw[(40 << 20) + 5 :][:100]).hexdigest()]


def test_failure_in_a_lane_reaches_the_caller(tmp_path: Path) -> None:
    class Broken:
        def feed(self, position: int, block: memoryview) -> None:
            raise ValueError("in the lane")

    (tmp_path / "x").write_bytes(bytes(40 << 20))
    with (tmp_path / "x").open("rb") as stream, pytest.raises(ValueError, match="in the lane"):
        onepass.run(stream, [Broken(), onepass.PrefixHash([5])])
