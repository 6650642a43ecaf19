"""The real single file: what verification says about it, and that each side starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from opencoti_build import container, verify, zipformat


def test_verification_passes_and_the_file_starts(universal: Path) -> None:
    report = verify.artifact(universal, run=os.name == "posix")
    assert report.outcome is verify.Outcome.VERIFIED, report.problems
    start = next(check for check in report.checks if check.name == "start")
    assert report.engine in start.detail


def test_windows_side_starts_under_wine(universal: Path) -> None:
    if not any(shutil.which(name) for name in ("wine64", "wine", "/usr/lib/wine/wine64")):
        pytest.skip("wine is not installed")
    report = verify.artifact(universal, wine=True)
    assert report.outcome is verify.Outcome.VERIFIED, report.problems


def test_other_readers_agree_about_the_archive(universal: Path) -> None:
    with universal.open("rb") as stream:
        ours = zipformat.read_directory(stream)
    with zipfile.ZipFile(universal) as judge:
        assert judge.testzip() is None
        assert [(info.filename, info.file_size, info.CRC, info.header_offset) for info in judge.infolist()] == [
            (entry.name, entry.size, entry.crc32, entry.header_offset) for entry in ours.entries
        ]
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-tq", str(universal)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_payload_can_be_replaced_and_the_host_stays(universal: Path, tmp_path: Path) -> None:
    bare = container.append(universal, tmp_path / "bare.llamafile", [], engine=verify.artifact(universal).engine, replace=True)
    with universal.open("rb") as stream:
        assert stream.read(bare.host_size) == bare.path.read_bytes()[: bare.host_size]
    assert verify.artifact(bare.path).outcome is verify.Outcome.VERIFIED


def test_pefile_accepts_the_windows_side(universal: Path) -> None:
    pefile = pytest.importorskip("pefile")
    with pefile.PE(str(universal), fast_load=True) as image:
        assert image.FILE_HEADER.Machine == 0x8664
        assert image.get_warnings() == []
