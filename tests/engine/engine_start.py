"""Starting the engine in awkward surroundings: without a home, as another user, on a full or noexec file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


def environment(home: Path | None = None, **extra: str) -> dict[str, str]:
    """This process's environment without anything that steers an engine; ``home=None`` leaves HOME unset."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENCOTI_", "LLAMA_", "GGML_", "XDG_"))}
    kept.pop("HOME", None)
    if home is not None:
        kept["HOME"] = str(home)
    return {**kept, **extra}


def start(
    file: Path,
    *arguments: str | os.PathLike[str],
    home: Path | None = None,
    prefix: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a file with arguments to its end. ``prefix`` is put before the command line."""
    return subprocess.run(
        [*prefix, str(file), *(str(argument) for argument in arguments)],
        env=environment(home, **(extra or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        cwd=tempfile.gettempdir(),
    )


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users can read, which pytest's is not."""
    folder = Path(tempfile.mkdtemp(prefix="engine-test-"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)


def without_write_access(folder: Path) -> list[str]:
    """Prefix under which ``folder`` cannot be written: another user for root, who is above permissions; nothing for others."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv (util-linux) to become another user")
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def with_tmpfs(folder: Path, options: str) -> list[str]:
    """Prefix under which an empty tmpfs with these mount options is at ``folder``; skips the test where that is not allowed."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    folder.mkdir(parents=True, exist_ok=True)
    prefix = [*unshare, "sh", "-c", f'mount -t tmpfs -o mode=755,{options} none "$0" && exec "$@"', str(folder)]
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True) if shutil.which("unshare") else None
    if probe is None or probe.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {probe.stderr.strip() if probe else 'no unshare (util-linux)'}")
    return prefix


def one_line(text: str) -> bool:
    """Is this exactly one line, and no trace of a crash?"""
    return text.endswith("\n") and text.count("\n") == 1 and "terminate called" not in text
