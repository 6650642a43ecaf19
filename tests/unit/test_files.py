from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opencoti_build import files
from opencoti_build.errors import BusyError, DiskError


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.endswith(".tmp"))


def test_atomic_file_appears_whole_with_its_mode(tmp_path):
    with files.atomic_file(tmp_path / "sub" / "a", mode=0o755) as stream:
        stream.write(b"one")
        assert not (tmp_path / "sub" / "a").exists()
    assert (tmp_path / "sub" / "a").read_bytes() == b"one"
    assert (tmp_path / "sub" / "a").stat().st_mode & 0o777 == 0o755
    assert leftovers(tmp_path / "sub") == []


def test_an_exception_leaves_the_old_file_and_no_leftover(tmp_path):
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), files.atomic_file(target) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old" and leftovers(tmp_path) == []


def test_a_directory_in_the_way_is_one_sentence(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DiskError, match="Cannot write"):
        files.write_bytes(tmp_path / "a", b"x")
    assert leftovers(tmp_path) == []


def test_writing_equal_bytes_does_not_touch_the_file(tmp_path):
    files.write_text(tmp_path / "a", "same")
    os.utime(tmp_path / "a", (1000, 1000))
    files.write_text(tmp_path / "a", "same")
    assert (tmp_path / "a").stat().st_mtime == 1000
    files.write_text(tmp_path / "a", "other")
    assert (tmp_path / "a").stat().st_mtime > 1000


def test_atomic_directory_replaces_and_cleans(tmp_path):
    for content in ("one", "two"):
        with files.atomic_directory(tmp_path / "d") as directory:
            (directory / "f").write_text(content)
    assert (tmp_path / "d" / "f").read_text() == "two"
    with pytest.raises(RuntimeError), files.atomic_directory(tmp_path / "d") as directory:
        (directory / "f").write_text("three")
        raise RuntimeError
    assert (tmp_path / "d" / "f").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


@pytest.mark.parametrize("there_before", [False, True])
def test_atomic_directory_of_two_runs_at_once_keeps_the_first(tmp_path, there_before):
    if there_before:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "damaged").write_text("")
    with files.atomic_directory(tmp_path / "d") as slow:
        (slow / "f").write_text("slow")
        with files.atomic_directory(tmp_path / "d") as quick:
            (quick / "f").write_text("quick")
        reading = (tmp_path / "d" / "f").stat().st_ino
    assert (tmp_path / "d" / "f").read_text() == "quick" and (tmp_path / "d" / "f").stat().st_ino == reading
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_stale_leftovers_of_killed_runs_go_fresh_ones_stay(tmp_path):
    old, fresh = tmp_path / ".d.old.tmp", tmp_path / ".d.fresh.tmp"
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))
    with files.atomic_directory(tmp_path / "d"):
        pass
    assert not old.exists() and fresh.exists()


def test_sha256_counts_every_byte(tmp_path):
    data = os.urandom(files.CHUNK * 2 + 17)
    (tmp_path / "a").write_bytes(data)
    steps: list[int] = []
    assert files.sha256_file(tmp_path / "a", progress=steps.append) == hashlib.sha256(data).hexdigest()
    assert sum(steps) == len(data)


HOLDER = """
import sys, time
from pathlib import Path
from opencoti_build import files
with files.lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_excludes_and_dies_with_its_holder(tmp_path):
    path = tmp_path / "x.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match="busy with the thing"), files.lock(path, what="the thing"):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with files.lock(path, wait_seconds=5):
            pass
    finally:
        holder.kill()
        holder.wait()


WRITER = """
import os, sys
from pathlib import Path
from opencoti_build import files
path = Path(sys.argv[1])
print("go", flush=True)
number = 0
while True:
    number = (number + 1) % 256
    files.write_bytes(path, bytes([number]) * 300_000)
"""


def test_kill_9_while_writing_leaves_a_whole_file(tmp_path):
    for delay in (0.03, 0.05, 0.08):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "f")], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "go\n"
        deadline = time.monotonic() + 10
        while not (tmp_path / "f").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay)
        writer.kill()
        writer.wait()
        data = (tmp_path / "f").read_bytes()
        assert len(data) == 300_000 and len(set(data)) == 1
