"""The payload of a single file: read, listed, extracted, verified; first starts that go wrong and what is left of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_start import NOBODY, environment, one_line, open_folder, start, with_tmpfs, without_write_access
from payload_file import ENGINE, Library, cache_copy, copy_engine, write_payload

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions, signals and mounts")

ARCH = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}[os.uname().machine]
CONTENT = random.Random(1).randbytes(300_000)
SIDECAR = Library("sidecar.bin", CONTENT, kind="sidecar", arch=ARCH)
DEFLATED = Library(
    "tables/deflated.bin", b"a line that repeats\n" * 20_000 + CONTENT, kind="sidecar", arch=ARCH, method=zipfile.ZIP_DEFLATED, file="deflated.bin"
)
FOREIGN = Library("ggml-cpu-avx2-win-x86_64.dll", CONTENT[::-1], variant="avx2", os="windows", file="ggml-cpu-avx2-win-x86_64.dll")


@pytest.fixture
def single(engine: Path, tmp_path: Path) -> Path:
    """A single file with two libraries for this system and one for another."""
    (tmp_path / "app").mkdir()
    return write_payload(tmp_path / "app" / "engine", engine, [SIDECAR, DEFLATED, FOREIGN])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def parts(root: Path) -> list[Path]:
    """Temporary files that were left below ``root``."""
    return [path for path in root.rglob("*") if ".part-" in path.name]


# ---- list ---------------------------------------------------------------------------------------


def test_list_names_every_library(single: Path, home: Path) -> None:
    result = start(single, "payload", "list", home=home)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["NAME", "KIND", "VARIANT", "SYSTEM", "BYTES", "SHA-256"]
    assert rows[1:] == [
        [lib.name, lib.kind, lib.variant or "-", f"{lib.os}-{lib.arch}", str(len(lib.data)), lib.sha256[:16]] for lib in (SIDECAR, DEFLATED, FOREIGN)
    ]


def test_list_json_tells_where_the_bytes_are(single: Path, home: Path) -> None:
    result = start(single, "payload", "list", "--json", home=home)
    assert result.returncode == 0
    document = json.loads(result.stdout)
    with zipfile.ZipFile(single) as archive:
        index = json.loads(archive.read("payload.json"))
    row = document["libraries"][0]
    content = single.read_bytes()
    assert content[row["offset"] : row["offset"] + row["stored_size"]] == CONTENT
    for row in document["libraries"]:
        for key in ("present", "offset", "stored_size", "method"):
            del row[key]
    assert document == index


def test_unknown_keys_are_ignored(engine: Path, tmp_path: Path, home: Path) -> None:
    library = Library("a.bin", b"a", kind="sidecar", arch=ARCH, overrides={"future": {"deep": [1]}})
    file = write_payload(tmp_path / "engine", engine, [library], index={"more": True})
    assert start(file, "payload", "verify", home=home).returncode == 0


# ---- extract ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [SIDECAR, DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("attribute", ["name", "published"])
def test_extract_into_the_cache(single: Path, home: Path, library: Library, attribute: str) -> None:
    result = start(single, "payload", "extract", getattr(library, attribute), home=home)
    copy = cache_copy(single.parent, library)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{copy}\n", "")
    assert copy.read_bytes() == library.data
    assert parts(single.parent) == [] and list(home.iterdir()) == []


def test_extract_again_leaves_the_copy_alone(single: Path, home: Path) -> None:
    copy = cache_copy(single.parent, SIDECAR)
    stamps = []
    for _ in range(2):
        assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
        info = copy.stat()
        stamps.append((info.st_ino, info.st_mtime_ns, info.st_ctime_ns))
    assert stamps[0] == stamps[1]


def test_extract_all_into_a_folder_uses_published_names(single: Path, tmp_path: Path, home: Path) -> None:
    target = tmp_path / "new" / "folder"
    result = start(single, "payload", "extract", "--all", "--to", target, home=home)
    assert result.returncode == 0
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {lib.published: lib.data for lib in (SIDECAR, DEFLATED, FOREIGN)}
    assert not (single.parent / ".llamafile").exists()


def test_extract_all_into_the_cache_takes_this_system_only(single: Path, home: Path) -> None:
    assert start(single, "payload", "extract", "--all", home=home).returncode == 0
    assert cache_copy(single.parent, SIDECAR).exists() and cache_copy(single.parent, DEFLATED).exists()
    assert not cache_copy(single.parent, FOREIGN).exists()


def test_path_names_the_folder_and_the_copy(single: Path, home: Path) -> None:
    folder = single.parent / ".llamafile" / "v" / ENGINE / "p"
    assert start(single, "payload", "path", home=home).stdout == f"{folder}\n"
    before = start(single, "payload", "path", SIDECAR.name, home=home)
    assert before.returncode == 5 and one_line(before.stderr)
    start(single, "payload", "extract", SIDECAR.name, home=home)
    assert start(single, "payload", "path", SIDECAR.name, home=home).stdout == f"{cache_copy(single.parent, SIDECAR)}\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["lists"], 2),
        (["list", "--jso"], 2),
        (["extract"], 2),
        (["extract", "--to", "x"], 2),
        (["extract", SIDECAR.name, "--all"], 2),
        (["extract", SIDECAR.name, "--to"], 2),
        (["verify", "x"], 2),
        (["extract", "nothing.so"], 5),
        (["path", "nothing.so"], 5),
        (["extract", SIDECAR.name, "--to", "/dev/null/x"], 6),
    ],
)
def test_exit_codes(single: Path, home: Path, arguments: list[str], code: int) -> None:
    result = start(single, "payload", *arguments, home=home)
    assert result.returncode == code
    assert result.stdout == "" and one_line(result.stderr) and result.stderr.startswith("error: ")


def test_help_is_no_error(single: Path, home: Path) -> None:
    result = start(single, "payload", "--help", home=home)
    assert result.returncode == 0 and "Exit codes" in result.stdout


def test_engine_without_a_payload(engine: Path, tmp_path: Path, home: Path) -> None:
    result = start(copy_engine(engine, tmp_path / "plain"), "payload", "list", home=home)
    assert result.returncode == 3 and one_line(result.stderr)


def test_other_commands_extract_nothing(single: Path, home: Path) -> None:
    for arguments in (["--version"], ["--help"], ["completion", "--help"], ["payload", "list"]):
        assert start(single, *arguments, home=home).returncode == 0
    assert not (single.parent / ".llamafile").exists() and list(home.iterdir()) == []


# ---- verify -------------------------------------------------------------------------------------


def test_verify_accepts_what_is_right(single: Path, home: Path) -> None:
    result = start(single, "payload", "verify", home=home)
    assert result.returncode == 0
    assert result.stdout.splitlines() == [f"ok       {name}" for name in ("host", SIDECAR.name, DEFLATED.name, FOREIGN.name, "payload.json")]


@pytest.mark.parametrize("name", ["host", SIDECAR.name, DEFLATED.name])
def test_verify_names_the_damaged_part(single: Path, home: Path, name: str) -> None:
    content = bytearray(single.read_bytes())
    with zipfile.ZipFile(single) as archive:
        # a byte in the middle of an entry; for the host in the section header table at its end, which the system does not read
        info = archive.infolist()[0] if name == "host" else archive.getinfo(name)
        at = info.header_offset - 10 if name == "host" else info.header_offset + 30 + len(name) + info.compress_size // 2
    content[at] ^= 0x40
    single.write_bytes(content)
    result = start(single, "payload", "verify", home=home)
    assert result.returncode == 4 and one_line(result.stderr)
    assert [line.split()[1].rstrip(":") for line in result.stdout.splitlines() if line.startswith("damaged")] == [name]


def test_wrong_digest_leaves_nothing(engine: Path, tmp_path: Path, home: Path) -> None:
    library = Library("a.bin", b"right by its CRC", kind="sidecar", arch=ARCH, overrides={"sha256": "0" * 64})
    file = write_payload(tmp_path / "app", engine, [library])
    result = start(file, "payload", "extract", "a.bin", home=home)
    assert result.returncode == 4 and one_line(result.stderr) and "SHA-256" in result.stderr
    left = [path for path in tmp_path.rglob("a.bin*") if path.is_file()]
    assert left == []


# ---- what may be under the expected name --------------------------------------------------------


def record_of(copy: Path) -> Path:
    return copy.with_name(copy.name + ".verified")


WRONG: dict[str, bytes] = {
    "empty": b"",
    "truncated": CONTENT[:-1],
    "foreign": bytes(len(CONTENT)),
    "longer": CONTENT + b"x",
}


@pytest.mark.parametrize("record", ["none", "stale", "garbage"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_copy_is_replaced(single: Path, home: Path, kind: str, record: str) -> None:
    copy = cache_copy(single.parent, SIDECAR)
    assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
    if record == "none":
        record_of(copy).unlink()
    elif record == "garbage":
        record_of(copy).write_bytes(b"\0" * 5000)
    copy.write_bytes(WRONG[kind])

    assert start(single, "payload", "path", SIDECAR.name, home=home).returncode == 5
    result = start(single, "payload", "extract", SIDECAR.name, home=home)
    assert (result.returncode, result.stdout) == (0, f"{copy}\n")
    assert copy.read_bytes() == CONTENT


def test_wrong_copy_with_the_old_time_is_found_out(single: Path, home: Path) -> None:
    copy = cache_copy(single.parent, SIDECAR)
    assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
    info = copy.stat()
    with copy.open("r+b") as stream:
        stream.write(b"other")
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert copy.stat().st_mtime_ns == info.st_mtime_ns and copy.stat().st_ino == info.st_ino
    assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
    assert copy.read_bytes() == CONTENT


def test_right_copy_without_a_record_is_kept(single: Path, home: Path) -> None:
    copy = cache_copy(single.parent, SIDECAR)
    assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
    record_of(copy).unlink()
    inode = copy.stat().st_ino
    assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
    assert copy.stat().st_ino == inode and record_of(copy).exists()


def test_record_saves_reading_the_copy(single: Path, home: Path) -> None:
    """A record for the present state of a file is believed; only so a start need not read hundreds of megabytes."""
    copy = cache_copy(single.parent, SIDECAR)
    assert start(single, "payload", "extract", SIDECAR.name, home=home).returncode == 0
    words = record_of(copy).read_text().split()
    info = copy.stat()
    assert words[1] == SIDECAR.sha256
    assert [int(word) for word in words[2:6]] == [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]

    copy.write_bytes(WRONG["foreign"])
    info = copy.stat()
    forged = [*words[:2], info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, words[6]]
    record_of(copy).write_text(" ".join(map(str, forged)) + "\n")
    assert start(single, "payload", "path", SIDECAR.name, home=home).returncode == 0


@pytest.mark.parametrize("level", ["copy", ".llamafile", "symlink"])
def test_something_else_under_the_name(single: Path, home: Path, level: str) -> None:
    copy = cache_copy(single.parent, SIDECAR)
    if level == "copy":
        copy.mkdir(parents=True)  # a folder cannot be replaced by a file
        expected = cache_copy(home, SIDECAR)
    elif level == ".llamafile":
        (single.parent / ".llamafile").write_text("a file\n")
        expected = cache_copy(home, SIDECAR)
    else:
        copy.parent.mkdir(parents=True)
        copy.symlink_to("/dev/zero")
        expected = copy
    result = start(single, "payload", "extract", SIDECAR.name, home=home)
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")
    assert expected.read_bytes() == CONTENT and not expected.is_symlink()


def test_folder_that_others_can_write_is_not_used(single: Path, home: Path) -> None:
    copy = cache_copy(single.parent, SIDECAR)
    copy.parent.mkdir(parents=True)
    copy.parent.chmod(0o777)
    copy.write_bytes(CONTENT)
    result = start(single, "payload", "extract", SIDECAR.name, home=home)
    assert result.returncode == 4 and one_line(result.stderr) and "other users" in result.stderr


# ---- surroundings -------------------------------------------------------------------------------


def test_sixteen_first_starts_at_once(single: Path, home: Path) -> None:
    processes = [
        subprocess.Popen(
            [single, "payload", "extract", DEFLATED.name],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(16)
    ]
    results = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    copy = cache_copy(single.parent, DEFLATED)
    assert results == [(f"{copy}\n".encode(), b"", 0)] * 16
    assert copy.read_bytes() == DEFLATED.data
    assert sorted(path.name for path in copy.parent.iterdir()) == sorted([".lock", copy.name, record_of(copy).name])


@pytest.mark.parametrize("name", ["with space", "grün 日本語", "　wide　space", 'quote\'s "and" $x', "-dash"])
def test_odd_folder_names(single: Path, tmp_path: Path, home: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    file = Path(shutil.copy(single, folder / "eng ine ä"))
    result = start(file, "payload", "extract", SIDECAR.name, home=home)
    assert (result.returncode, result.stdout) == (0, f"{cache_copy(folder, SIDECAR)}\n")


def test_home_is_used_where_the_folder_is_not_writable(engine: Path) -> None:
    with open_folder() as folder:
        (folder / "app").mkdir()
        (folder / "home").mkdir()
        file = write_payload(folder / "app" / "engine", engine, [SIDECAR])
        prefix = without_write_access(folder / "app")
        if prefix:
            os.chown(folder / "home", NOBODY, NOBODY)
        for _ in range(2):
            result = start(file, "payload", "extract", SIDECAR.name, home=folder / "home", prefix=prefix)
            assert (result.returncode, result.stdout) == (0, f"{cache_copy(folder / 'home', SIDECAR)}\n")
        path = start(file, "payload", "path", home=folder / "home", prefix=prefix)
        assert path.stdout == f"{folder / 'home' / '.llamafile' / 'v' / ENGINE / 'p'}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whose home does not exist")
def test_nowhere_to_write(engine: Path) -> None:
    with open_folder() as folder:
        file = write_payload(folder / "engine", engine, [SIDECAR])
        prefix = without_write_access(folder)
        for home in (None, Path("/proc/nonexistent"), Path("/proc")):
            result = start(file, "payload", "extract", SIDECAR.name, home=home, prefix=prefix)
            assert result.returncode == 6 and one_line(result.stderr)


@pytest.mark.parametrize("value", [None, "", "relative/home"])
def test_no_home_is_needed(single: Path, value: str | None) -> None:
    extra = {} if value is None else {"HOME": value}
    result = start(single, "payload", "extract", SIDECAR.name, extra=extra)
    assert (result.returncode, result.stdout) == (0, f"{cache_copy(single.parent, SIDECAR)}\n")


def test_full_disk_falls_back_to_home(single: Path, home: Path) -> None:
    prefix = with_tmpfs(single.parent / ".llamafile", "size=128k")
    result = start(single, "payload", "extract", SIDECAR.name, home=home, prefix=prefix)
    assert (result.returncode, result.stdout) == (0, f"{cache_copy(home, SIDECAR)}\n")


def test_full_disk_everywhere_says_so_and_leaves_nothing(single: Path, home: Path) -> None:
    # the tmpfs goes with the process, so the process itself looks for what is left
    prefix = with_tmpfs(single.parent / ".llamafile", "size=128k")
    script = '"$@"; code=$?; find "$0" -type f ! -name .lock; exit $code'
    result = start(
        single,
        "payload",
        "extract",
        SIDECAR.name,
        home=Path("/proc/nowhere"),
        prefix=[*prefix, "sh", "-c", script, str(single.parent / ".llamafile")],
    )
    assert result.returncode == 6 and result.stdout == ""
    assert one_line(result.stderr) and "No space left on device" in result.stderr


def test_killed_half_way(engine: Path, tmp_path: Path, home: Path) -> None:
    big = Library("big.bin", bytes(400_000_000), kind="sidecar", arch=ARCH, method=zipfile.ZIP_DEFLATED)
    file = write_payload(tmp_path / "engine", engine, [big, SIDECAR])
    copy = cache_copy(tmp_path, big)
    command = [str(file), "payload", "extract", big.name]
    for _ in range(2):
        process = subprocess.Popen(command, env=environment(home), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(path.stat().st_size > 0 for path in parts(tmp_path)):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not copy.exists() and len(parts(tmp_path)) == 1

    result = start(file, "payload", "extract", big.name, home=home)
    assert (result.returncode, result.stdout) == (0, f"{copy}\n")
    with copy.open("rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == big.sha256
    assert parts(tmp_path) == []


# ---- damaged files ------------------------------------------------------------------------------


def end_record(content: bytes) -> int:
    return content.rindex(b"PK\5\6")


def central_header(content: bytes, name: str) -> int:
    """Offset of the directory's entry for ``name``."""
    return content.rindex(name.encode()) - 46


def local_header(content: bytes, name: str) -> int:
    (offset,) = struct.unpack_from("<I", content, central_header(content, name) + 42)
    return int(offset)


def patched(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def both_flags(content: bytes, bit: int) -> bytes:
    content = patched(content, central_header(content, SIDECAR.name) + 8, struct.pack("<H", bit))
    return patched(content, local_header(content, SIDECAR.name) + 6, struct.pack("<H", bit))


def both_methods(content: bytes, method: int) -> bytes:
    content = patched(content, central_header(content, SIDECAR.name) + 10, struct.pack("<H", method))
    return patched(content, local_header(content, SIDECAR.name) + 8, struct.pack("<H", method))


def overlapping(content: bytes) -> bytes:
    """The second library's data starts inside that of the first, with a local header of its own there."""
    first = local_header(content, SIDECAR.name)
    second = local_header(content, FOREIGN.name)
    header = content[second : second + 30 + len(FOREIGN.name)]
    inside = first + 5000
    content = patched(content, inside, header)
    return patched(content, central_header(content, FOREIGN.name) + 42, struct.pack("<I", inside))


def duplicate(content: bytes) -> bytes:
    other = SIDECAR.name.upper()
    for at in (central_header(content, "twin.bin_xx") + 46, local_header(content, "twin.bin_xx") + 30):
        content = patched(content, at, other.encode())
    return content


def moved(content: bytes) -> bytes:
    at = local_header(content, "payload.json")
    return content[:at] + b"inserted" + content[at:]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated end record": (lambda c: c[:-7], "truncated"),
    "no end record": (lambda c: c[: end_record(c)], "truncated"),
    "half a directory": (lambda c: c[: end_record(c) - 60], "truncated"),
    "only the start of the data": (lambda c: c[: local_header(c, FOREIGN.name) + 9000], "truncated"),
    "bytes behind the end": (lambda c: c + b"\0\0\0", "bytes behind its end"),
    "bytes put before": (moved, "directory does not end"),
    "directory out of bounds": (lambda c: patched(c, end_record(c) + 16, b"\xf0\xff\xff\x7f"), "directory does not end"),
    "wrong number of entries": (lambda c: patched(c, end_record(c) + 8, b"\2\0\2\0"), "more entries"),
    "split archive": (lambda c: patched(c, end_record(c) + 4, b"\1\0"), "split"),
    "encrypted": (lambda c: both_flags(c, 1), "encrypted"),
    "data descriptor": (lambda c: both_flags(c, 8), "behind its data"),
    "other method": (lambda c: both_methods(c, 12), "compression method 12"),
    "headers differ": (lambda c: patched(c, local_header(c, SIDECAR.name) + 14, b"\0\0\0\0"), "described differently"),
    "entry out of bounds": (lambda c: patched(c, central_header(c, SIDECAR.name) + 42, b"\xf0\xff\xff\x7f"), "out of bounds"),
    "overlap": (overlapping, "overlap"),
    "duplicate": (duplicate, "twice"),
    "index damaged": (lambda c: patched(c, local_header(c, "payload.json") + 30 + len("payload.json"), b"["), "CRC-32"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_archive(engine: Path, tmp_path: Path, home: Path, kind: str) -> None:
    damage, reason = DAMAGE[kind]
    twin = Library("twin.bin_xx", b"twin", kind="sidecar", arch=ARCH)
    assert len(twin.name) == len(SIDECAR.name)
    file = write_payload(tmp_path / "engine", engine, [SIDECAR, FOREIGN, twin])
    file.write_bytes(damage(file.read_bytes()))

    for arguments in (["list"], ["verify"], ["extract", SIDECAR.name]):
        result = start(file, "payload", *arguments, home=home)
        assert result.returncode == 4 and result.stdout == ""
        assert one_line(result.stderr) and reason in result.stderr
    assert not (tmp_path / ".llamafile").exists()

    # the programs go on with what is built in
    result = start(file, "completion", "--list-devices", home=home)
    assert result.returncode == 0 and "Available devices" in result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("payload: ")]
    assert len(lines) == 1 and reason in lines[0]


INDEX: dict[str, dict[str, object] | bytes] = {
    "empty": b"",
    "unfinished": b"{",
    "list": b"[]",
    "not UTF-8": b'{"schema": 1, "engine": "\xff\xfe"}',
    "deeply nested": b"[" * 100_000,
    "newer schema": {"schema": 2},
    "schema is a text": {"schema": "1"},
    "engine leads up": {"engine": "../up"},
    "engine has a slash": {"engine": "a/b"},
    "engine is a number": {"engine": 7},
    "host is a list": {"host": []},
    "host is larger than the file": {"host": {"size": 10**15, "sha256": "0" * 64}},
    "libraries is a mapping": {"libraries": {}},
    "library is a number": {"libraries": [7]},
    "library named twice": {"libraries": [SIDECAR.row(), SIDECAR.row()]},
    "negative size": {"libraries": [{**SIDECAR.row(), "size": -1}]},
    "other size": {"libraries": [{**SIDECAR.row(), "size": 5}]},
    "digest leads up": {"libraries": [{**SIDECAR.row(), "sha256": "../../x"}]},
    "file leads up": {"libraries": [{**SIDECAR.row(), "file": "../../x"}]},
    "no kind": {"libraries": [{key: value for key, value in SIDECAR.row().items() if key != "kind"}]},
}


@pytest.mark.parametrize("kind", INDEX)
def test_damaged_index(engine: Path, tmp_path: Path, home: Path, kind: str) -> None:
    file = write_payload(tmp_path / "engine", engine, [SIDECAR], index=INDEX[kind])
    result = start(file, "payload", "list", home=home)
    assert result.returncode == 4 and one_line(result.stderr)
    assert start(file, "completion", "--list-devices", home=home).returncode == 0


def test_zip64_records(engine: Path, tmp_path: Path, home: Path) -> None:
    """zipfile writes ZIP64 fields where it is told that an entry may grow."""
    file = copy_engine(engine, tmp_path)
    index = {"schema": 1, "engine": ENGINE, "libraries": [SIDECAR.row()]}
    with zipfile.ZipFile(file, "a", allowZip64=True) as archive:
        archive.writestr(zipfile.ZipInfo("payload.json"), json.dumps(index))
        with archive.open(zipfile.ZipInfo(SIDECAR.name), "w", force_zip64=True) as stream:
            stream.write(SIDECAR.data)
    assert start(file, "payload", "verify", home=home).returncode == 0


def test_random_damage_never_gives_wrong_content(engine: Path, tmp_path: Path, home: Path) -> None:
    """Whatever bytes of the payload change: right content or a clean refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = write_payload(tmp_path / "engine", engine, [SIDECAR]).read_bytes()
    start_of_payload = good.rindex(b"PK\3\4", 0, good.rindex(b"payload.json", 0, len(good) - 500))
    file = tmp_path / "damaged" / "engine"
    file.parent.mkdir()
    dice = random.Random(7)
    for _ in range(60):
        content = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            tail = dice.choice([22, 200, 400, len(good) - start_of_payload])
            content[len(content) - 1 - dice.randrange(tail)] = dice.randrange(256)
        file.write_bytes(content)
        file.chmod(0o755)
        result = start(file, "payload", "extract", SIDECAR.name, home=home)
        assert result.returncode in (0, 3, 4, 5), result.stderr
        assert result.returncode == 0 or one_line(result.stderr)
        for copy in file.parent.rglob(SIDECAR.name):
            assert copy.read_bytes() == CONTENT
        shutil.rmtree(file.parent / ".llamafile", ignore_errors=True)
