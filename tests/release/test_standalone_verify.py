"""The stand-alone verifier: it says what ``verify artifact`` says, with nothing but the standard library."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import binary_fixtures
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_verify import ENGINE, Workshop, forge_index, library, poke, signed

from opencoti_build import checksums, container, errors, manifest, pins, universal, verify, zipformat
from opencoti_build.errors import ManifestError, OpencotiError
from opencoti_build.pins import File, Sidecar
from opencoti_build.zipformat import Method

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "opencoti_build" / "resources" / "verify.py"
VECTORS: list[dict[str, Any]] = json.loads((ROOT / "pin/vectors/vectors.json").read_text("utf-8"))["vectors"]
COMMON = ("hashes", "ZIP structure", "entries", "host block", "version string", "Windows limit")
"""The rows that both programs have."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("standalone_verify", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


standalone = load()


def alone(*words: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the stand-alone program, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = standalone.main(["--json", *map(str, words)])
    value = json.loads(out.getvalue())
    assert value["exit_code"] == code
    assert len(err.getvalue().splitlines()) == 1, err.getvalue()
    return code, value


def bare(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The program as people run it, without any package at hand."""
    return subprocess.run([sys.executable, "-I", "-S", *map(str, words)], capture_output=True, text=True, check=False, cwd=cwd)


def agree(path: Path, folder: Path | None = None) -> int:
    """Both programs come to the same exit code, and where both have a report, to the same state of each common row; gives the code."""
    more = () if folder is None else ("--pins", folder)
    code, value = alone(path, *more)
    try:
        report = verify.artifact(path, pins=folder)
    except OpencotiError as error:
        assert (code, value["outcome"]) == (error.exit_code, "unread"), (value, error)
        return code
    here = {check["name"]: check["state"] for check in next(file for file in value["files"] if file["file"] == str(path))["checks"]}
    there = {check.name: check.state.value.lower() for check in report.checks}
    assert {name: here[name] for name in COMMON} == {name: there[name] for name in COMMON}, (value, report.checks)
    assert code == report.to_dict()["exit_code"], (value, report.checks)
    return code


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


# What it is made of


def test_it_is_python_3_8_and_the_standard_library() -> None:
    tree = ast.parse(SCRIPT.read_text("utf-8"), feature_version=(3, 8))
    imported = {name.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"removeprefix", "removesuffix", "is_relative_to", "with_stem", "readlink", "hardlink_to", "walk", "pairwise", "batched", "bit_count"}
    assert not any(isinstance(node, ast.Call) and any(word.arg == "strict" for word in node.keywords) and getattr(node.func, "id", "") == "zip" for node in ast.walk(tree))


def test_it_speaks_of_the_same_things_as_the_toolkit() -> None:
    codes = {
        "USAGE": errors.UsageError,
        "INCOMPLETE": errors.IncompleteError,
        "PAPER": errors.ManifestError,
        "NOTHING": errors.VerifyError,
        "HASH": errors.HashMismatch,
        "STRUCTURE": errors.StructureMismatch,
        "ENTRY": errors.EntryMismatch,
        "HOST": errors.HostMismatch,
        "VERSION": errors.VersionMismatch,
        "LIMIT": errors.HeadroomError,
    }
    assert {name: getattr(standalone, name) for name in codes} == {name: error.exit_code for name, error in codes.items()}
    assert (standalone.UNIVERSAL, set(standalone.PLATFORMS), standalone.WINDOWS_LIMIT) == (universal.MAGIC, set(universal.PLATFORMS), container.WINDOWS_LIMIT)
    assert (standalone.SUMS, standalone.MANIFEST, standalone.INDEX) == (checksums.NAME, manifest.SUFFIX, container.INDEX_NAME)
    for name in ("0 all as published", "51 size or sha256", "58"):
        assert name in standalone.__doc__


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["file"])
def test_vectors_of_pin_files(row: dict[str, Any]) -> None:
    data = (ROOT / "pin/vectors" / row["file"]).read_bytes()
    if row["outcome"] == "refuse":
        with pytest.raises(ValueError):
            standalone.parse_pin(data)
        return
    component, rows = standalone.parse_pin(data)
    listed = [(item["component"], item["platform"], item["path"], item["sha256"], item["size"], item["build"]) for item in row["files"]]
    listed += [(item["component"], "sidecar", item["name"], item["sha256"], item.get("size"), "") for item in row["sidecars"]]
    assert (component, sorted(map(tuple, rows))) == (row["component"], sorted(listed))


# Good files


@pytest.mark.parametrize("method", [Method.STORED, Method.DEFLATED])
def test_good_file(method: Method, workshop: Workshop) -> None:
    workshop.method = method
    path = workshop.papers()
    for name in ("BUILD_INFO.md", "RELEASE_NOTES.md"):
        (path.parent / name).write_text(name)
    checksums.write(path.parent / "SHA256SUMS", [path, manifest.beside(path), path.parent / "BUILD_INFO.md", path.parent / "RELEASE_NOTES.md"])
    assert agree(path) == 0
    done = bare(SCRIPT, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "ok: 4 files are as published."
    assert "programs and libraries" in done.stdout and "not read by this program" in done.stdout


def test_plain_program_and_its_own_archive(workshop: Workshop) -> None:
    program = workshop.root / "program"
    program.write_bytes(workshop.programs["linux-x86_64"])
    workshop.name = "x86_64.llamafile"
    assert agree(workshop.build(program)) == 0


def test_signed_file(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.papers()
    made = signed(path, tmp_path)
    shutil.copy(manifest.beside(path), manifest.beside(made))
    assert agree(made) == 0
    data = made.read_bytes()
    poke(made, 0x700, b"\xff\xfe\xfd")
    assert agree(made) == errors.HostMismatch.exit_code
    made.write_bytes(data + b"junk")
    assert agree(made) == errors.StructureMismatch.exit_code


# Damaged files


def _library_byte(workshop: Workshop, path: Path) -> None:
    row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
    poke(path, row.data_offset + row.size - 10, b"\xff")


def _hidden(workshop: Workshop, path: Path) -> None:
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    path.write_bytes(path.read_bytes()[: directory.offset] + b"hidden" + zipformat.directory_bytes(directory.entries, directory.offset + 6))


def _in_the_padding(workshop: Workshop, path: Path) -> None:
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    poke(path, directory.gaps[1][0] + 1, b"x")


def _twice(workshop: Workshop, path: Path) -> None:
    with path.open("rb") as stream:
        directory = zipformat.read_directory(stream)
    path.write_bytes(path.read_bytes()[: directory.offset] + zipformat.directory_bytes([*directory.entries, directory.entries[-1]], directory.offset))


def _local(at: int, data: bytes) -> Callable[[Workshop, Path], None]:
    """Bytes of the local header of ggml-cuda.so that its central header does not share."""

    def damage(workshop: Workshop, path: Path) -> None:
        poke(path, next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so").offset + at, data)

    return damage


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Workshop, Path], None]:
    return lambda workshop, path: path.write_bytes(change(path.read_bytes())) and None


def _index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Workshop, Path], None]:
    return lambda workshop, path: forge_index(path, change)


def _manifest(**changes: Any) -> Callable[[Workshop, Path], None]:
    return lambda workshop, path: manifest.write(manifest.beside(path), dataclasses.replace(workshop.document(), **changes))


def _entries(change: Callable[[tuple[manifest.Entry, ...]], tuple[manifest.Entry, ...]]) -> Callable[[Workshop, Path], None]:
    return lambda workshop, path: manifest.write(manifest.beside(path), dataclasses.replace(workshop.document(), entries=change(workshop.document().entries)))


def _beside(name: str, text: str) -> Callable[[Workshop, Path], None]:
    return lambda workshop, path: (path.parent / name).write_text(text) and None


DAMAGES: dict[str, tuple[type[OpencotiError], Callable[[Workshop, Path], None]]] = {
    "byte of a library": (errors.EntryMismatch, _library_byte),
    "byte of the host": (errors.HostMismatch, lambda workshop, path: poke(path, 0x700, b"\xff\xfe\xfd")),
    "trailing byte": (errors.StructureMismatch, _bytes(lambda data: data + b"j")),
    "another archive behind": (errors.StructureMismatch, _bytes(lambda data: data + b"PK\5\6" + bytes(18))),
    "cut off": (errors.StructureMismatch, _bytes(lambda data: data[:-30])),
    "half": (errors.StructureMismatch, _bytes(lambda data: data[: len(data) // 2])),
    "empty": (errors.StructureMismatch, _bytes(lambda data: b"")),
    "offset of an entry": (errors.StructureMismatch, _bytes(lambda data: data[: data.rindex(b"ggml-cuda.so") - 4] + bytes(4) + data[data.rindex(b"ggml-cuda.so") :])),
    "local headers": (errors.StructureMismatch, _bytes(lambda data: data.replace(zipformat.LOCAL_SIGNATURE, b"PK\3\5"))),
    "hidden bytes": (errors.StructureMismatch, _hidden),
    "bytes in the padding": (errors.StructureMismatch, _in_the_padding),
    "name twice": (errors.StructureMismatch, _twice),
    "local version": (errors.StructureMismatch, _local(4, struct.pack("<H", 63))),
    "local flags": (errors.StructureMismatch, _local(6, b"\x01")),
    "local method": (errors.StructureMismatch, _local(8, b"\x08")),
    "local time": (errors.StructureMismatch, _local(10, b"\x01")),
    "local crc32": (errors.StructureMismatch, _local(14, b"\x01\x02\x03\x04")),
    "local size": (errors.StructureMismatch, _local(22, b"\x01")),
    "local name": (errors.StructureMismatch, _local(30, b"G")),
    "local extra": (errors.StructureMismatch, _local(28, b"\x02")),
    "sum in the index": (errors.EntryMismatch, _index(lambda value: value["libraries"][1].update(sha256="0" * 64))),
    "name in the index": (errors.EntryMismatch, _index(lambda value: value["libraries"][1].update(name="ggml-gone.so"))),
    "twice in the index": (errors.EntryMismatch, _index(lambda value: value.update(libraries=[value["libraries"][0]] * 2))),
    "index without host": (errors.EntryMismatch, _index(lambda value: value.pop("host"))),
    "index of another schema": (errors.EntryMismatch, _index(lambda value: value.update(schema=9))),
    "index without a list": (errors.EntryMismatch, _index(lambda value: value.update(libraries={}))),
    "host that ends elsewhere": (errors.HostMismatch, _index(lambda value: value["host"].update(size=value["host"]["size"] - 100))),
    "host beyond the file": (errors.HostMismatch, _index(lambda value: value.update(host={"size": 10**18, "sha256": "x"}, engine="e"))),
    "host of no size": (errors.HostMismatch, _index(lambda value: value.update(host={"size": -5, "sha256": "x"}, engine="e"))),
    "sum of the host": (errors.HostMismatch, _index(lambda value: value["host"].update(sha256="0" * 64))),
    "size in the manifest": (errors.HashMismatch, _manifest(size=5)),
    "sum in the manifest": (errors.HashMismatch, _manifest(sha256="0" * 64)),
    "host in the manifest": (errors.HostMismatch, _manifest(host=manifest.Block(5, "0" * 64))),
    "engine in the manifest": (errors.VersionMismatch, _manifest(engine="opencoti-9-c9")),
    "tree in the manifest": (errors.VersionMismatch, _manifest(tree="12ab" * 10)),
    "comment": (errors.VersionMismatch, _bytes(lambda data: data[: -len(ENGINE)] + ENGINE.replace("c4", "c5").encode())),
    "entry too few": (errors.EntryMismatch, _entries(lambda rows: rows[:-1])),
    "entry too many": (errors.EntryMismatch, _entries(lambda rows: (*rows, dataclasses.replace(rows[0], name="gone")))),
    "entry's sum": (errors.EntryMismatch, _entries(lambda rows: (*rows[:-1], dataclasses.replace(rows[-1], sha256="0" * 64)))),
    "entry's offset": (errors.EntryMismatch, _entries(lambda rows: (*rows[:-1], dataclasses.replace(rows[-1], offset=1)))),
    "entry's method": (errors.EntryMismatch, _entries(lambda rows: (*rows[:-1], dataclasses.replace(rows[-1], method="deflate")))),
    "no manifest": (errors.ManifestError, _beside("file.llamafile.exe.MANIFEST.json", "{}")),
    "manifest that is no JSON": (errors.ManifestError, _beside("file.llamafile.exe.MANIFEST.json", "no")),
    "sum in SHA256SUMS": (errors.HashMismatch, _beside("SHA256SUMS", f"{'0' * 64}  file.llamafile.exe\n")),
    "no SHA256SUMS": (errors.HashMismatch, _beside("SHA256SUMS", "nonsense\n")),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_both_find_the_same_damage(name: str, workshop: Workshop) -> None:
    error, damage = DAMAGES[name]
    path = workshop.papers()
    damage(workshop, path)
    code = agree(path)
    # A forged index changes the bytes, and then the manifest's rows of it do not fit either: the first cause leads.
    assert code == error.exit_code or (name in INDEX_FORGERIES and code == errors.EntryMismatch.exit_code)
    manifest.beside(path).unlink()
    agree(path)


INDEX_FORGERIES = {"host that ends elsewhere", "host beyond the file", "host of no size", "sum of the host", "comment"}


def test_damaged_deflate_data(workshop: Workshop) -> None:
    workshop.method = Method.DEFLATED
    for at in (0, 100, -3):
        path = workshop.papers()
        row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
        poke(path, row.data_offset + at % row.compressed_size, b"\xff\x00\xff")
        assert agree(path) == errors.EntryMismatch.exit_code


def test_program_of_another_version(workshop: Workshop) -> None:
    workshop.programs["linux-aarch64"] = binary_fixtures.elf("aarch64", padding=b"opencoti-1.2.3-c45\0")
    assert agree(workshop.papers()) == errors.VersionMismatch.exit_code


@pytest.mark.parametrize("name", ["BUILD_INFO.md", "RELEASE_NOTES.md", "file.llamafile.exe.MANIFEST.json"])
def test_papers_that_were_changed(name: str, workshop: Workshop) -> None:
    path = workshop.papers()
    if not (path.parent / name).exists():
        (path.parent / name).write_text("as it was made")
    checksums.write(path.parent / "SHA256SUMS", [path, path.parent / name])
    assert agree(path) == 0
    (path.parent / name).write_text((path.parent / name).read_text() + " ")
    assert agree(path) == errors.HashMismatch.exit_code
    if name.endswith(".md"):
        (path.parent / name).unlink()
        os.mkfifo(path.parent / name)
        assert agree(path) == errors.HashMismatch.exit_code


def test_pins_of_embedded_libraries(workshop: Workshop, tmp_path: Path) -> None:
    path = workshop.papers()
    row = next(row for row in workshop.assembled.entries if row.name == "ggml-cuda.so")
    folder = tmp_path / "trusted"
    pins.write(folder / "cuda.txt", pins.make("cuda", [File("cuda", "linux-x86_64", "components/cuda/1/ggml-cuda-x86_64.so", row.sha256, row.size, "1")]))
    assert agree(path, folder) == 0
    pins.write(folder / "cuda.txt", pins.make("cuda", [File("cuda", "linux-x86_64", "components/cuda/1/ggml-cuda-x86_64.so", "0" * 64, row.size, "1")]))
    assert agree(path, folder) == errors.EntryMismatch.exit_code
    (folder / "cuda.txt").write_text("<html>\n")
    assert agree(path, folder) == errors.ManifestError.exit_code
    assert agree(path, tmp_path / "absent") == errors.UsageError.exit_code


@pytest.mark.parametrize("data", [b"", b"x", b"MZ", b"PK\5\6" + bytes(18), bytes(range(256)) * 30], ids=["empty", "one byte", "MZ", "empty zip", "some bytes"])
def test_files_that_are_something_else(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert agree(tmp_path / "x") != 0


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    made = Workshop(tmp_path_factory.mktemp("standalone"))
    made.libraries = {"ggml-cpu-avx2-x86_64.so": library()}
    path = made.papers()
    return path, path.read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_both_say_the_same_of_any_mutation(data: st.DataObject, sample: tuple[Path, bytes]) -> None:
    path, good = sample
    raw = bytearray(good)
    with io.BytesIO(good) as stream:
        directory = zipformat.read_directory(stream)
    first = directory.entries[0].header_offset
    spots = st.integers(0, 0x400) | st.integers(first, first + 60) | st.integers(directory.offset, len(raw) - 1) | st.integers(0, len(raw) - 1)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(spots)
        value = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"PK\5\6", struct.pack("<I", 0x7FFFFFFF)]))
        raw[at : at + len(value)] = value
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    other = path.with_name("mutated.llamafile")
    other.write_bytes(raw)
    if data.draw(st.booleans()):
        shutil.copy(manifest.beside(path), manifest.beside(other))
        assert (agree(other) == 0) == (bytes(raw) == good)
    else:
        manifest.beside(other).unlink(missing_ok=True)
        agree(other)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_both_read_the_same_manifests(data: st.DataObject, sample: tuple[Path, bytes]) -> None:
    value = json.loads(manifest.beside(sample[0]).read_text("utf-8"))
    spot: Any = value
    path = []
    for _ in range(data.draw(st.integers(1, 3))):
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot))) if isinstance(spot, list) else []
        if not keys:
            break
        path.append(data.draw(st.sampled_from(keys)))
        spot = spot[path[-1]]
    changed = copy.deepcopy(value)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[path[-1]]
    else:
        holder[path[-1]] = data.draw(st.sampled_from([None, True, 0, -1, 1.5, "", "x", "a" * 64, "stored", [], {}, ["x"], {"x": 1}]))
    raw = json.dumps(changed).encode()
    try:
        manifest.parse(raw)
        good = True
    except ManifestError:
        good = False
    place = sample[0].with_name("other.json")
    place.write_bytes(raw)
    if good:
        assert standalone.read_manifest(place) == changed
    else:
        with pytest.raises(standalone.Refusal):
            standalone.read_manifest(place)


LINES = st.sampled_from(["a" * 64 + "  name", "B" * 64 + " *./name", "\\" + "c" * 64 + "  a\\\\b\\nc", "\\" + "c" * 64 + "  a\\xb", "# c", "", "x", "d" * 63 + "  y", "a" * 64 + "  name\r", "e" * 64 + "  ../up"])


@settings(max_examples=80, deadline=None)
@given(st.lists(LINES | st.text(max_size=8), max_size=5).map("\n".join))
def test_both_read_the_same_lists_of_sums(text: str) -> None:
    try:
        listed = {row.name: row.sha256 for row in checksums.parse(text)}
    except ManifestError:
        with pytest.raises(ValueError):
            standalone.parse_sums(text)
    else:
        assert standalone.parse_sums(text) == listed


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_both_read_the_same_pin_files(data: st.DataObject) -> None:
    raw = bytearray((ROOT / "pin/vectors" / data.draw(st.sampled_from(VECTORS))["file"]).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2) | st.sampled_from([b"\n", b"%41", b" x=1", b"/", b".", b"\r\n", b" "]))
    try:
        made = pins.parse(bytes(raw))
    except ManifestError:
        with pytest.raises(ValueError):
            standalone.parse_pin(bytes(raw))
    else:
        component, rows = standalone.parse_pin(bytes(raw))
        assert (component, [row.sha256 for row in rows], [row.size for row in rows]) == (made.component, [row.sha256 for row in made.rows], [row.size for row in made.rows])


# Folders


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A published repository: the single file and pins in the root, papers in releases/, a component and its sidecar, this program."""
    root = tmp_path / "repo"
    root.mkdir()
    made = Workshop(root, name="opencoti-llamafile-1.2.3-c4-universal.llamafile.exe")
    path = made.papers()
    shutil.rmtree(root / "parts")
    papers = root / "releases" / "llamafile-v1.2.3+opencoti.c4"
    papers.mkdir(parents=True)
    manifest.beside(path).rename(papers / manifest.beside(path).name)
    (papers / "RELEASE_NOTES.md").write_text("notes")
    shutil.copy(SCRIPT, papers / "verify.py")
    cuda = root / "components/cuda/1/ggml-cuda-x86_64.so"
    cuda.parent.mkdir(parents=True)
    cuda.write_bytes(made.libraries["ggml-cuda.so"])
    cuda.with_name("codec.so").write_bytes(b"codec")
    rows: list[pins.Row] = [
        File("cuda", "linux-x86_64", "components/cuda/1/ggml-cuda-x86_64.so", hashlib.sha256(cuda.read_bytes()).hexdigest(), cuda.stat().st_size, "1", entry="ggml-cuda.so"),
        Sidecar("cuda", "codec.so", hashlib.sha256(b"codec").hexdigest()),
    ]
    pins.write(root / "pin/cuda.txt", pins.make("cuda", rows))
    pins.write(root / "pin/index.txt", pins.make("index", rows[:1]))
    listed = [*papers.iterdir(), path, cuda]
    sums = [checksums.Sum(item.relative_to(papers if item.parent == papers else root).as_posix(), hashlib.sha256(item.read_bytes()).hexdigest()) for item in listed]
    (papers / "SHA256SUMS").write_text(checksums.render(sums))
    return root


def papers_of(root: Path) -> Path:
    return next(root.glob("releases/*"))


def test_published_repository(release: Path) -> None:
    """From the root, from the papers' folder, and with this program started where it lies."""
    for place in (release, papers_of(release)):
        code, value = alone(place)
        assert (code, value["absent"]) == (0, [])
        assert {Path(file["file"]).name for file in value["files"]} == {
            "opencoti-llamafile-1.2.3-c4-universal.llamafile.exe",
            "opencoti-llamafile-1.2.3-c4-universal.llamafile.exe.MANIFEST.json",
            "RELEASE_NOTES.md",
            "verify.py",
            "ggml-cuda-x86_64.so",
            "codec.so",
        }
        assert len(value["files"]) == 6
        entries = next(check for file in value["files"] for check in file["checks"] if check["name"] == "entries")
        assert entries["detail"].endswith("all as in the manifest; 1 as pinned")
    done = bare(papers_of(release) / "verify.py", cwd=release.parent)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.rstrip().endswith("ok: 6 files are as published.")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("components/cuda/1/ggml-cuda-x86_64.so", errors.HashMismatch),
        ("components/cuda/1/codec.so", errors.HashMismatch),
        ("opencoti-llamafile-1.2.3-c4-universal.llamafile.exe", errors.StructureMismatch),
        ("releases/llamafile-v1.2.3+opencoti.c4/RELEASE_NOTES.md", errors.HashMismatch),
        ("releases/llamafile-v1.2.3+opencoti.c4/SHA256SUMS", errors.HashMismatch),
        ("releases/llamafile-v1.2.3+opencoti.c4/opencoti-llamafile-1.2.3-c4-universal.llamafile.exe.MANIFEST.json", errors.ManifestError),
        ("pin/cuda.txt", errors.ManifestError),
        ("pin/index.txt", errors.ManifestError),
    ],
)
def test_changed_file_of_a_repository(name: str, code: type[OpencotiError], release: Path) -> None:
    (release / name).write_bytes((release / name).read_bytes() + b"}")
    assert alone(release)[0] == code.exit_code
    done = bare(SCRIPT, release)
    assert done.returncode == code.exit_code
    assert "Traceback" not in done.stdout + done.stderr and (Path(name).name in done.stdout + done.stderr)


def test_what_is_not_there_is_said_and_fails_when_asked(release: Path) -> None:
    (release / "components/cuda/1/ggml-cuda-x86_64.so").unlink()
    code, value = alone(release)
    assert (code, value["absent"]) == (0, [str(release / "components/cuda/1/ggml-cuda-x86_64.so")])
    assert alone(release, "--strict")[0] == errors.IncompleteError.exit_code


def test_index_that_contradicts_its_component(release: Path) -> None:
    (row,) = pins.read(release / "pin/index.txt").files
    pins.write(release / "pin/index.txt", pins.make("index", [dataclasses.replace(row, sha256="0" * 64)]))
    assert alone(release)[0] == errors.ManifestError.exit_code


def test_single_downloads(release: Path, tmp_path: Path) -> None:
    """A library beside the engine, its pin file, and nothing else; then a file that nothing speaks of."""
    flat = tmp_path / "flat"
    (flat / "pin").mkdir(parents=True)
    shutil.copy(release / "components/cuda/1/ggml-cuda-x86_64.so", flat)
    shutil.copy(release / "pin/cuda.txt", flat / "pin")
    assert alone(flat)[0] == alone(flat / "ggml-cuda-x86_64.so")[0] == 0
    assert alone(release / "components/cuda/1/ggml-cuda-x86_64.so")[0] == 0
    assert alone(release / "opencoti-llamafile-1.2.3-c4-universal.llamafile.exe")[0] == 0
    (flat / "ggml-cuda-x86_64.so").write_bytes(b"x")
    assert alone(flat)[0] == alone(flat / "ggml-cuda-x86_64.so")[0] == errors.HashMismatch.exit_code
    (flat / "ggml-cuda-x86_64.so").unlink()
    assert alone(flat)[0] == errors.VerifyError.exit_code
    assert alone(tmp_path)[0] == errors.VerifyError.exit_code


def test_lists_that_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    sum_ = hashlib.sha256(b"x").hexdigest()
    for name in ("../secret", str(tmp_path / "secret"), "a/../../secret", "..\\secret"):
        (folder / "SHA256SUMS").write_text(checksums.render([checksums.Sum(name, sum_)]))
        code, value = alone(folder)
        assert code == errors.HashMismatch.exit_code and "leads out of the folder" in value["error"]


@pytest.mark.parametrize("name", ["SHA256SUMS", "x.llamafile.MANIFEST.json", "pin/cuda.txt", "listed"])
def test_papers_that_are_no_files(name: str, tmp_path: Path) -> None:
    """A pipe is not waited for."""
    (tmp_path / "x.llamafile").write_bytes(b"x")
    (tmp_path / "pin").mkdir()
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  listed\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert alone(tmp_path)[0] in (errors.HashMismatch.exit_code, errors.ManifestError.exit_code)


@pytest.mark.parametrize("words", [["--nope"], ["no-such-file"], ["/dev/null"], ["a\nb"], ["--manifest", "m"], ["--pins", "/nowhere"], ["--manifest", "m", "/tmp"]])
def test_bad_calls_end_in_a_sentence(words: list[str]) -> None:
    done = bare(SCRIPT, *words)
    assert (done.returncode, done.stdout) == (errors.UsageError.exit_code, "")
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    name = "a\x1b[2J\x1b]0;x\x07b"
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'x').hexdigest()}  {name}\n")
    done = bare(SCRIPT, tmp_path)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\\x1b[2J" in done.stdout


# A real one


def test_real_artifact(tmp_path: Path) -> None:
    """The artifact of the last build, whole and damaged."""
    path = next(iter(sorted((ROOT / "dist").glob("opencoti-llamafile-*-universal.llamafile.exe"))), None)
    if path is None or not manifest.beside(path).is_file():
        pytest.skip("no artifact in dist/: invoke build makes one")
    here = tmp_path / path.name
    shutil.copy(path, here)
    shutil.copy(manifest.beside(path), manifest.beside(here))
    assert agree(here) == 0
    row = manifest.read(manifest.beside(here)).entries[-1]
    poke(here, row.offset + 1000, b"\0\1\2")
    assert agree(here) == errors.EntryMismatch.exit_code
    os.truncate(here, here.stat().st_size - 1)
    assert agree(here) == errors.StructureMismatch.exit_code
