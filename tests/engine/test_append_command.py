"""``invoke component append`` as typed: any executable, and not a byte of it changed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import binary_fixtures

from opencoti_build import verify
from opencoti_build.errors import ContainerError, UsageError

ROOT = Path(__file__).parents[2]


def append(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "invoke", "component", "append", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)


def test_payload_behind_a_foreign_program(tmp_path: Path) -> None:
    program = binary_fixtures.elf()
    (tmp_path / "program").write_bytes(program)
    (tmp_path / "lib").write_bytes(b"library")
    done = append(tmp_path / "program", tmp_path / "out", "--library", f"ggml-x.so={tmp_path / 'lib'}")
    assert done.returncode == 0, done.stderr
    out = Path(done.stdout.strip())
    assert out == tmp_path / "out" and out.read_bytes().startswith(program)
    with zipfile.ZipFile(out) as archive:
        assert archive.read("ggml-x.so") == b"library"
    again = append(out, tmp_path / "again", "--library", f"ggml-x.so={tmp_path / 'lib'}")
    assert (again.returncode, (tmp_path / "again").exists()) == (ContainerError.exit_code, False)
    assert "holds a payload already" in again.stderr
    bare = append(out, tmp_path / "bare", "--replace")
    assert bare.returncode == 0, bare.stderr
    assert (tmp_path / "bare").read_bytes().startswith(program)
    assert not [problem for problem in verify.artifact(tmp_path / "bare").problems if "structure" in problem]


def test_words_that_make_no_sense(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(binary_fixtures.elf())
    done = append(tmp_path / "program", tmp_path / "out", "--library", "no-file")
    assert (done.returncode, (tmp_path / "out").exists()) == (UsageError.exit_code, False)
    assert "NAME=FILE" in done.stderr
