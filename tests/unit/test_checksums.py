"""SHA256SUMS; sha256sum itself is the judge where it is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build import checksums
from opencoti_build.checksums import Sum
from opencoti_build.errors import ChecksumError, ManifestError

HEX = "0123456789abcdef" * 4
NAMES = ["plain", "with space", "ünï", "new\nline", "back\\slash", "\\n", "carriage\rreturn", "*star", " lead", "trail "]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if os.name == "nt":
        pytest.skip("these names cannot exist on Windows")
    for name in NAMES:
        (tmp_path / name).write_bytes(name.encode() * 10)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"x")
    return tmp_path


def test_written_sums_satisfy_sha256sum(folder: Path) -> None:
    targets = [folder / name for name in NAMES] + [folder / "sub" / "x"]
    rows = checksums.write(folder / "SHA256SUMS", targets)
    assert {row.name: row.sha256 for row in rows} == {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in targets}
    assert set(checksums.read(folder / "SHA256SUMS")) == set(rows)
    if shutil.which("sha256sum"):
        done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["-b", "-t"])
def test_sums_of_sha256sum_are_read(mode: str, folder: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("sha256sum is not installed")
    text = subprocess.run(["sha256sum", mode, "--", *NAMES], cwd=folder, capture_output=True, check=True).stdout
    (folder / "SHA256SUMS").write_bytes(text)
    assert {row.name: row.sha256 for row in checksums.read(folder / "SHA256SUMS")} == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in NAMES}


def test_order_and_bytes_do_not_depend_on_the_call(folder: Path) -> None:
    checksums.write(folder / "SHA256SUMS", [folder / "plain", folder / "sub" / "x", folder / "ünï"])
    first = (folder / "SHA256SUMS").read_bytes()
    checksums.write(folder / "SHA256SUMS", [folder / "ünï", folder / "plain", folder / "sub" / "x", folder / "plain"])
    assert (folder / "SHA256SUMS").read_bytes() == first


def test_known_sums_are_not_computed_again(folder: Path) -> None:
    rows = checksums.write(folder / "SHA256SUMS", [folder / "plain"], known={folder / "plain": HEX})
    assert rows == (Sum("plain", HEX),)


def test_problems_with_targets(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ChecksumError, match="absent"):
        checksums.write(folder / "SHA256SUMS", [folder / "absent"])
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "y"
    elsewhere.write_bytes(b"")
    with pytest.raises(ChecksumError, match="does not lie in"):
        checksums.write(folder / "SHA256SUMS", [elsewhere])
    assert not (folder / "SHA256SUMS").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "line 1"),
        (f"{HEX}  a\n{HEX[:-1]}  b\n", "line 2"),
        (f"{HEX} a\n", "line 1"),
        (f"{HEX}  \n", "line 1"),
        (f"\\{HEX}  a\\tb\n", "escape"),
        (f"{HEX}  a\n{'0' * 64}  a\n", "twice"),
    ],
)
def test_damaged_lines_are_named(text: str, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        checksums.parse(text)


def test_lenient_where_it_is_harmless() -> None:
    text = f"# comment\r\n{HEX.upper()} *./a\r\n\r\n{HEX}  a\n"
    assert checksums.parse(text) == (Sum("a", HEX),)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="absent"):
        checksums.read(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="not UTF-8"):
        checksums.read(tmp_path / "binary")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(lambda name: not name.startswith("./")), st.binary(min_size=32, max_size=32)), max_size=5, unique_by=lambda row: row[0]))
def test_any_names_round_trip(rows: list[tuple[str, bytes]]) -> None:
    sums = {Sum(name, digest.hex()) for name, digest in rows}
    assert set(checksums.parse(checksums.render(sums))) == sums


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_our_error(text: str) -> None:
    try:
        checksums.parse(text)
    except ManifestError:
        pass
