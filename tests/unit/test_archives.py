"""Archives from outside, good and hostile, and the tree digest against git itself."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opencoti_build.archives import Limits, tree_digest, unpack
from opencoti_build.errors import ArchiveError

LIMITS = Limits(size=1 << 20, files=1000)
posix = pytest.mark.skipif(os.name == "nt", reason="modes, links and byte names need a POSIX file system")


def git_tree(directory: Path) -> str:
    """What git says: the folder added whole, by a repository outside it."""
    repository = directory.parent / f"{directory.name}.git"
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "HOME": str(directory.parent), "GIT_DIR": str(repository), "GIT_WORK_TREE": str(directory)}

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=directory, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet", "--object-format=sha1")
    git("config", "core.autocrlf", "false")
    (repository / "info").mkdir(exist_ok=True)
    (repository / "info" / "attributes").write_text("* -text -filter -ident\n")
    git("add", "--all", "--force", ".")
    tree = git("write-tree")
    shutil.rmtree(repository)
    return tree


def tar_bytes(members: list[tuple[tarfile.TarInfo, bytes]], pack: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return pack(stream.getvalue())


def member(name: str, mode: int = 0o644, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.type, info.linkname = mode, kind, target
    return info


def zip_bytes(members: list[tuple[str, bytes, int]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data, mode in members:
            info = zipfile.ZipInfo(name)
            info.filename = name  # the constructor cuts at NUL and turns backslashes round
            info.external_attr, info.create_system, info.compress_type = mode << 16, 3, method
            archive.writestr(info, data)
    return stream.getvalue()


def put(tmp_path: Path, data: bytes) -> tuple[Path, Path]:
    archive = tmp_path / "archive.bin"
    archive.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    return archive, out


def all_files(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


FILES = {"README": b"read me\n", "src/main.c": b"int main(void){}\n", "src/empty": b"", "bin/run": b"#!/bin/sh\n", "src.h": b"x" * 70000}
EXECUTABLE = {"bin/run"}


def good_tar(pack: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    members = [(member("./top", 0o700, tarfile.DIRTYPE), b"")]
    members += [(member(f"top/{name}", 0o777 if name in EXECUTABLE else 0o600), data) for name, data in FILES.items()]
    return tar_bytes(members, pack)


def good_zip() -> bytes:
    return zip_bytes([("top/", b"", stat.S_IFDIR | 0o755), *((f"top/{name}", data, stat.S_IFREG | (0o775 if name in EXECUTABLE else 0o664)) for name, data in FILES.items())])


GOOD = {
    "tar": good_tar(),
    "tar.gz": good_tar(gzip.compress),
    "tar.bz2": good_tar(bz2.compress),
    "tar.xz": good_tar(lzma.compress),
    "zip": good_zip(),
}


@pytest.mark.parametrize("kind", GOOD)
def test_every_format_gives_the_same_files(tmp_path: Path, kind: str) -> None:
    archive, out = put(tmp_path, GOOD[kind])
    steps: list[int] = []
    result = unpack(archive, out, limits=LIMITS, folder="top", progress=steps.append)
    assert all_files(out) == FILES
    assert result.files == len(FILES)
    assert result.size == sum(map(len, FILES.values())) == sum(steps)
    assert result.executables == EXECUTABLE
    assert tree_digest(out, executables=result.executables).tree == git_reference(tmp_path)


def git_reference(tmp_path: Path) -> str:
    """The tree of FILES as git computes it, independent of the unpacking."""
    reference = tmp_path / "reference"
    for name, data in FILES.items():
        path = reference / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name in EXECUTABLE else 0o644)
    return git_tree(reference)


@posix
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, mask: int) -> None:
    archive, out = put(tmp_path, GOOD["tar.gz"])
    before = os.umask(mask)
    try:
        unpack(archive, out, limits=LIMITS, folder="top")
    finally:
        os.umask(before)
    assert {name: stat.S_IMODE((out / name).stat().st_mode) for name in FILES} == {name: 0o755 if name in EXECUTABLE else 0o644 for name in FILES}


def test_only_the_wanted_folder_comes_out_and_named_programs_become_executable(tmp_path: Path) -> None:
    archive, out = put(tmp_path, GOOD["zip"])
    result = unpack(archive, out, limits=LIMITS, folder="top/src", executables=["main.c"])
    assert set(all_files(out)) == {"main.c", "empty"}
    assert result.executables == {"main.c"}


def test_a_named_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    archive, out = put(tmp_path, GOOD["zip"])
    with pytest.raises(ArchiveError, match="lacks bin/other"):
        unpack(archive, out, limits=LIMITS, folder="top", executables=["bin/other"])


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    archive, out = put(tmp_path, GOOD["tar"])
    with pytest.raises(ArchiveError, match="no file below elsewhere/"):
        unpack(archive, out, limits=LIMITS, folder="elsewhere")


BAD_NAMES = ["../out-of-it", "/abs", "a/../../b", "a//b", "a/./b", "..", "a\\b", "C:/x", "c:x", "tab\there", "a/" + "n" * 300, "/".join(["d"] * 2100)]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_leave_the_folder_or_are_odd_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    data = tar_bytes([(member(name), b"evil")]) if kind == "tar" else zip_bytes([(name, b"evil", stat.S_IFREG | 0o644)])
    archive, out = put(tmp_path, data)
    with pytest.raises(ArchiveError):
        unpack(archive, out, limits=LIMITS)
    assert all_files(tmp_path) == {"archive.bin": data}


@pytest.mark.parametrize(
    ("first", "second"),
    [("a/B", "a/b"), ("A/x", "a/y"), ("x", "x"), ("a", "a/b"), ("a/b", "a"), (unicodedata.normalize("NFC", "\u00e9"), unicodedata.normalize("NFD", "\u00e9")), ("stra\u00dfe", "STRASSE")],
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_are_one_on_some_systems_are_refused(tmp_path: Path, kind: str, first: str, second: str) -> None:
    data = tar_bytes([(member(first), b"1"), (member(second), b"2")]) if kind == "tar" else zip_bytes([(first, b"1", 0o100644), (second, b"2", 0o100644)])
    archive, out = put(tmp_path, data)
    with pytest.raises(ArchiveError, match="one on some systems|stands twice"):
        unpack(archive, out, limits=LIMITS)


@pytest.mark.parametrize(
    "info",
    [
        member("link", kind=tarfile.SYMTYPE, target="README"),
        member("hard", kind=tarfile.LNKTYPE, target="README"),
        member("tty", kind=tarfile.CHRTYPE),
        member("disk", kind=tarfile.BLKTYPE),
        member("pipe", kind=tarfile.FIFOTYPE),
    ],
    ids=lambda info: info.name,
)
def test_links_and_devices_are_refused(tmp_path: Path, info: tarfile.TarInfo) -> None:
    archive, out = put(tmp_path, tar_bytes([(member("README"), b"x"), (info, b"")]))
    with pytest.raises(ArchiveError, match="symbolic link|neither a file nor a folder"):
        unpack(archive, out, limits=LIMITS)


@pytest.mark.parametrize("mode", [stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o644, stat.S_IFCHR | 0o644])
def test_special_entries_of_a_zip_are_refused(tmp_path: Path, mode: int) -> None:
    archive, out = put(tmp_path, zip_bytes([("README", b"x", 0o100644), ("special", b"README", mode)]))
    with pytest.raises(ArchiveError):
        unpack(archive, out, limits=LIMITS)


@posix
def test_links_that_stay_inside_are_made_when_asked_for(tmp_path: Path) -> None:
    archive, out = put(tmp_path, zip_bytes([("bin/cc", b"../lib/gcc", stat.S_IFLNK | 0o777), ("lib/gcc", b"program", 0o100755)]))
    unpack(archive, out, limits=LIMITS, links=True)
    assert os.readlink(out / "bin/cc") == "../lib/gcc"
    assert (out / "bin/cc").read_bytes() == b"program"
    assert tree_digest(out).tree == git_tree(out)


@pytest.mark.parametrize("target", ["../../etc/passwd", "/etc/passwd", "..", "", "a\\b"])
def test_links_that_point_outside_are_refused_even_when_links_are_allowed(tmp_path: Path, target: str) -> None:
    archive, out = put(tmp_path, tar_bytes([(member("README"), b"x"), (member("d/link", kind=tarfile.SYMTYPE, target=target), b"")]))
    if target == "..":
        target = "../.."
        archive.write_bytes(tar_bytes([(member("README"), b"x"), (member("d/link", kind=tarfile.SYMTYPE, target=target), b"")]))
    with pytest.raises(ArchiveError):
        unpack(archive, out, limits=LIMITS, links=True)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for second in ("d/planted", "D/planted"):
        out = tmp_path / second.replace("/", "-")
        out.mkdir()
        archive = tmp_path / "archive.tar"
        archive.write_bytes(tar_bytes([(member("d", kind=tarfile.SYMTYPE, target="sub"), b""), (member("sub/x"), b"x"), (member(second), b"evil")]))
        with pytest.raises(ArchiveError):
            unpack(archive, out, limits=LIMITS, links=True)
    archive.write_bytes(tar_bytes([(member("a", kind=tarfile.SYMTYPE, target="sub"), b""), (member("sub/x"), b"x"), (member("b", kind=tarfile.SYMTYPE, target="a/../../outside"), b"")]))
    out = tmp_path / "chain"
    out.mkdir()
    with pytest.raises(ArchiveError):
        unpack(archive, out, limits=LIMITS, links=True)
    assert list(outside.iterdir()) == []


@posix
def test_a_link_that_gets_out_by_way_of_another_is_refused(tmp_path: Path) -> None:
    # x/y/up names z, one level below the root: two steps up from there end outside, although x/y/up/../../w reads as x/w.
    links = [(member("x/y/up", kind=tarfile.SYMTYPE, target="../../z"), b""), (member("z/f"), b"x"), (member("b", kind=tarfile.SYMTYPE, target="x/y/up/../../w"), b"")]
    archive, out = put(tmp_path, tar_bytes(links))
    with pytest.raises(ArchiveError, match="through another"):
        unpack(archive, out, limits=LIMITS, links=True)


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_more_bytes_than_expected_stop_the_unpacking(tmp_path: Path, kind: str) -> None:
    big = b"\0" * (4 << 20)
    data = tar_bytes([(member("bomb"), big)], gzip.compress) if kind == "tar.gz" else zip_bytes([("bomb", big, 0o100644)])
    assert len(data) < 20000
    archive, out = put(tmp_path, data)
    with pytest.raises(ArchiveError, match="more than the 1048576 bytes"):
        unpack(archive, out, limits=LIMITS)
    assert sum(map(len, all_files(out).values())) <= LIMITS.size


def test_bytes_outside_the_wanted_folder_are_bounded_too(tmp_path: Path) -> None:
    huge = (200 << 20) - 1
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=1) as packed:
        info = member("elsewhere/bomb")
        info.size = huge
        packed.write(info.tobuf())
        for _ in range(200):
            packed.write(b"\0" * (1 << 20))
        packed.write(tar_bytes([(member("top/x"), b"x")]))
    archive, out = put(tmp_path, stream.getvalue())
    with pytest.raises(ArchiveError, match="far more than is expected"):
        unpack(archive, out, limits=LIMITS, folder="top")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_more_files_than_expected_stop_the_unpacking(tmp_path: Path, kind: str) -> None:
    names = [f"f{number}" for number in range(12)]
    data = tar_bytes([(member(name), b"") for name in names]) if kind == "tar" else zip_bytes([(name, b"", 0o100644) for name in names])
    archive, out = put(tmp_path, data)
    with pytest.raises(ArchiveError, match="more than the 10 files"):
        unpack(archive, out, limits=Limits(1 << 20, 10))


def test_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path) -> None:
    data = bytearray(zip_bytes([("file", b"A" * 1000, 0o100644)]))
    central = data.rindex(b"PK\x01\x02")
    for offset in (22, central + 24):  # uncompressed size in the local and the central header
        data[offset : offset + 4] = struct.pack("<I", 10)
    archive, out = put(tmp_path, bytes(data))
    with pytest.raises(ArchiveError):
        unpack(archive, out, limits=LIMITS)


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    data = bytearray(zip_bytes([("file", b"secret", 0o100644)]))
    data[6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    archive, out = put(tmp_path, bytes(data))
    with pytest.raises(ArchiveError, match="encrypted"):
        unpack(archive, out, limits=LIMITS)


def test_other_compression_methods_are_refused(tmp_path: Path) -> None:
    archive, out = put(tmp_path, zip_bytes([("file", b"x" * 100, 0o100644)], zipfile.ZIP_LZMA))
    with pytest.raises(ArchiveError, match="method 14"):
        unpack(archive, out, limits=LIMITS)


@pytest.mark.parametrize("data", [b"", b"PK", b"<html>Not found</html>", b"\x1f\x8b", b"\x1f\x8b" + b"\xff" * 50, b"x" * 2000, b"\0" * 2000])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    archive, out = put(tmp_path, data)
    with pytest.raises(ArchiveError):
        unpack(archive, out, limits=LIMITS)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_archives_are_refused_or_give_files_below_the_folder(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = bytearray(GOOD[kind])
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content) - 1), "at") :]
    else:
        for _ in range(data.draw(st.integers(1, 4), "flips")):
            content[data.draw(st.integers(0, len(content) - 1), "position")] = data.draw(st.integers(0, 255), "value")
    place = tmp_path / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    archive, out = put(place, bytes(content))
    try:
        unpack(archive, out, limits=LIMITS)
    except ArchiveError as error:
        assert str(error)
    assert {path.name for path in place.iterdir()} == {"archive.bin", "out"}
    assert sum(map(len, all_files(out).values())) <= LIMITS.size


def test_a_tar_cut_at_a_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    whole = tar_bytes([(member("a"), b"1"), (member("b"), b"2")])
    archive, out = put(tmp_path, whole[: 1024 + 300])
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(archive, out, limits=LIMITS)


# ---- the tree digest --------------------------------------------------------------------------------------------------------------


def test_tree_of_an_empty_folder_is_git_s_empty_tree(tmp_path: Path) -> None:
    (tmp_path / "t" / "only" / "folders").mkdir(parents=True)
    assert tree_digest(tmp_path / "t").tree == git_tree(tmp_path / "t")


ODD_NAMES = ["a", "a.b", "a-b", "a0", "a/x", "a b", "\u00fcml", "\u3000wide", "'quote'", '"double"', "-dash", "#hash", "A", ".hidden", ".gitignore", ".gitattributes", "tab\tname", "new\nline", "x" * 200]


@posix
def test_tree_equals_git_s_for_odd_names_order_modes_links_and_empty_folders(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for number, name in enumerate(ODD_NAMES):
        folder = root / f"d{number}"
        for inner in (name, name + "/x" if "/" not in name else name):
            # a file and a folder of one name cannot share a place, so each gets its own
            path = folder / ("file" if inner == name else "tree") / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"*\r\ntext eol=crlf\n" + name.encode())
            path.chmod(0o755 if number % 2 else 0o644)
    order = root / "order"
    order.mkdir()
    for name in ("foo.c", "foo-bar", "foo0", "foo:"):
        (order / name).write_bytes(b"")
    (order / "foo").mkdir()
    (order / "foo" / "z").write_bytes(b"z")
    (root / "empty" / "deep").mkdir(parents=True)
    (root / "big").write_bytes(os.urandom(3 << 20))
    (root / "group-x").write_bytes(b"only the group may execute: not executable")
    (root / "group-x").chmod(0o654)
    (root / "link").symlink_to("big")
    (root / "broken").symlink_to("no/such/\u00e9")
    (root / "folder-link").symlink_to("order")
    Path(os.fsdecode(os.fsencode(root) + b"/latin-\xe9-1")).write_bytes(b"not UTF-8")
    found = tree_digest(root)
    assert found.tree == git_tree(root)
    assert found.files == sum(len(names) for _, _, names in os.walk(root)) + 1  # os.walk counts the link to a folder as a folder


@posix
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.dictionaries(
        st.lists(st.text(st.sampled_from("ab.-0_ AZ~\u00e9"), min_size=1, max_size=3).filter(lambda part: part.strip(".") != ""), min_size=1, max_size=3).map(tuple),
        st.tuples(st.binary(max_size=20), st.booleans()),
        max_size=12,
    )
)
def test_tree_equals_git_s_for_random_trees(tmp_path: Path, entries: dict[tuple[str, ...], tuple[bytes, bool]]) -> None:
    root = tmp_path / "t"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for parts, (data, executable) in entries.items():
        path = root.joinpath(*parts)
        if any(parent.is_file() for parent in path.parents) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if executable else 0o644)
    assert tree_digest(root).tree == git_tree(root)


@posix
def test_tree_changes_with_a_byte_a_name_and_a_mode(tmp_path: Path) -> None:
    root = tmp_path / "t"
    root.mkdir()
    (root / "f").write_bytes(b"one")
    trees = [tree_digest(root).tree]
    (root / "f").write_bytes(b"two")
    trees.append(tree_digest(root).tree)
    (root / "f").chmod(0o755)
    trees.append(tree_digest(root).tree)
    (root / "f").rename(root / "g")
    trees.append(tree_digest(root).tree)
    (root / "empty").mkdir()
    assert len(set(trees)) == 4
    assert tree_digest(root).tree == trees[-1]


def test_tree_with_given_executables_ignores_the_file_system(tmp_path: Path) -> None:
    root = tmp_path / "t"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "run").write_bytes(b"x")
    (root / "data").write_bytes(b"y")
    (root / "data").chmod(0o755)
    given_names = tree_digest(root, executables={"bin/run"}).tree
    (root / "bin" / "run").chmod(0o755)
    (root / "data").chmod(0o644)
    if sys.platform != "win32":
        assert given_names == git_tree(root)
    assert given_names == tree_digest(root, executables={"bin/run"}).tree


@posix
def test_what_git_cannot_hold_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "t"
    (root / "sub" / ".git").mkdir(parents=True)
    with pytest.raises(ArchiveError, match=r"\.git"):
        tree_digest(root)
    shutil.rmtree(root / "sub")
    os.mkfifo(root / "pipe")
    with pytest.raises(ArchiveError, match="neither a file nor a folder"):
        tree_digest(root)


def test_name_that_begins_with_nul_is_refused(tmp_path: Path) -> None:
    """zipfile cuts such a name to nothing."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as writer:
        writer.writestr("abc", b"x")
    (tmp_path / "a.zip").write_bytes((tmp_path / "a.zip").read_bytes().replace(b"abc", b"\0bc"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ArchiveError):
        unpack(tmp_path / "a.zip", tmp_path / "out", limits=LIMITS)
    assert not list((tmp_path / "out").rglob("*"))
