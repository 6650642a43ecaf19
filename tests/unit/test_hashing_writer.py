"""The sum is of the bytes that the file holds, whichever way they got there."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from opencoti_build.hashing_writer import HashingWriter


def written(folder: Path, parts: list[bytes]) -> tuple[bytes, str, int]:
    """Copies and writes ``parts`` in turn; what lies in the file, the sum, and the number of bytes that were announced."""
    told: list[int] = []
    with (folder / "out").open("w+b") as stream:
        writer = HashingWriter(stream, told.append)
        for number, part in enumerate(parts):
            if number % 2:
                writer.write(part)
                continue
            (folder / "source").write_bytes(part)
            with (folder / "source").open("rb") as source:
                assert writer.copy(source, len(part)) == len(part)
        sha256 = writer.digest()
        writer.close()
    return (folder / "out").read_bytes(), sha256, sum(told)


PARTS = [os.urandom(3 << 20), b"header", b"", b"x", os.urandom(9 << 20), b""]


@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.ENOSYS, "zero"])
def test_sum_is_that_of_the_file(refusal: int | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        if isinstance(refusal, int):
            raise OSError(refusal, os.strerror(refusal))
        return 0

    if refusal is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    data, sha256, told = written(tmp_path, PARTS)
    assert data == b"".join(PARTS) and told == len(data)
    assert sha256 == hashlib.sha256(data).hexdigest()


def test_sums_on_the_way(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as stream:
        writer = HashingWriter(stream, lambda count: None)
        assert writer.digest() == hashlib.sha256().hexdigest()
        writer.write(b"abc")
        assert writer.digest() == hashlib.sha256(b"abc").hexdigest()
        writer.write(b"def")
        assert writer.digest() == hashlib.sha256(b"abcdef").hexdigest()
        writer.close()


def test_shorter_source_is_told(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (tmp_path / "out").open("w+b") as stream, (tmp_path / "source").open("rb") as source:
        writer = HashingWriter(stream, lambda count: None)
        assert writer.copy(source, 9) == 5
        assert writer.digest() == hashlib.sha256(b"12345").hexdigest()
        writer.close()


def test_other_refusals_are_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    (tmp_path / "source").write_bytes(b"12345")
    with (tmp_path / "out").open("w+b") as stream, (tmp_path / "source").open("rb") as source:
        writer = HashingWriter(stream, lambda count: None)
        with pytest.raises(OSError, match="No space"):
            writer.copy(source, 5)
        writer.close()


def test_file_that_loses_bytes_meanwhile(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as stream:
        writer = HashingWriter(stream, lambda count: None)
        os.truncate(tmp_path / "out", 0)
        writer.position += 4  # announced, but not in the file
        with writer._turn:
            writer._turn.notify_all()
        with pytest.raises(OSError, match="cannot be read back"):
            writer.digest()
        writer.close()
