"""Universal files around tiny hand-made programs that print what they were given, and starting them in shells."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import binary_fixtures
import pytest

from opencoti_build import assemble, container, universal
from opencoti_build.cli.common import CommandContext

skip_elsewhere = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in binary_fixtures.ECHO_CODE, reason="needs Linux on x86_64 or aarch64"
)

ENGINE = "opencoti-0.0.0-test"
MACHINE = platform.machine()
SHELLS = {"dash": ["dash"], "bash": ["bash"], "busybox": ["busybox", "ash"], "zsh": ["zsh"], "mksh": ["mksh"]}
PROGRAM_SIZE = 200_000


@dataclass(frozen=True)
class Started:
    """What the program printed, taken apart."""

    code: int
    arguments: list[str]
    environment: dict[str, str]
    errors: str

    @property
    def program(self) -> Path:
        return Path(self.arguments[0])


def parse(code: int, output: bytes, errors: bytes) -> Started:
    words, _, rest = output.partition(b"\1\0")
    arguments = [word.decode() for word in words.split(b"\0")[:-1]]
    environment = dict(word.decode("utf-8", "replace").partition("=")[::2] for word in rest.split(b"\0")[:-1])
    return Started(code, arguments, environment, errors.decode("utf-8", "replace"))


def start(argv: list[str | Path], env: dict[str, str], **options) -> Started:
    done = subprocess.run([str(word) for word in argv], env=env, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, **options)
    return parse(done.returncode, done.stdout, done.stderr)


def build_loaders(workshop: CommandContext) -> dict[str, bytes]:
    """The real loaders, by platform; a second when cold."""
    return assemble.Builder(workshop).loaders(["linux-x86_64", "linux-aarch64"])


@functools.cache
def interpreter(machine: str) -> Path:
    """A program that starts the program it is the interpreter of, in a folder whose name a program may carry."""
    folder = Path(tempfile.mkdtemp(prefix="opencoti-interpreter."))
    atexit.register(shutil.rmtree, folder, True)
    folder.chmod(0o755)
    path = folder / machine
    path.write_bytes(binary_fixtures.elf(machine, pie=True, code=binary_fixtures.INTERPRETER_CODE[machine]))
    path.chmod(0o755)
    return path


def echo(machine: str, *, mapped: bool) -> bytes:
    """The program: one that a loader can map, or one that has to be copied."""
    padding = b"padding!" * (PROGRAM_SIZE // 8)
    if not mapped:
        return binary_fixtures.elf(machine, padding=padding)
    return binary_fixtures.elf(machine, pie=True, interpreter=str(interpreter(machine)), padding=padding)


def make(folder: Path, name: str = "engine.llamafile.exe", *, programs: dict[str, bytes] | None = None, loaders: Mapping[str, bytes] | None = None) -> Path:
    """A finished universal file in ``folder``; with ``loaders`` its programs are mapped, else copied."""
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    (parts / "win.exe").write_bytes(binary_fixtures.pe())
    if programs is None:
        programs = {f"linux-{machine}": echo(machine, mapped=loaders is not None) for machine in ("x86_64", "aarch64")}
    paths = {}
    for system, data in programs.items():
        paths[system] = parts / system
        paths[system].write_bytes(data)
    universal.build_host(parts / "host", parts / "win.exe", paths, ENGINE, loaders)
    return container.append(parts / "host", folder / name, [], engine=ENGINE, sync=False).path


def cache_of(env: dict[str, str]) -> Path:
    return Path(env["HOME"]) / ".cache" / f"opencoti-llamafile-{os.getuid()}"


def left_overs(env: dict[str, str]) -> list[str]:
    """Everything in the cache that is neither a program nor its stamp."""
    return [str(path) for path in cache_of(env).rglob("*") if path.is_file() and path.name not in ("opencoti-llamafile", "opencoti-llamafile.ok")] + [
        str(path) for path in cache_of(env).glob("new.*")
    ]


def replace_tool(tmp_path: Path, env: dict[str, str], name: str, script: str) -> dict[str, str]:
    """The environment with a program called ``name`` put in front of the real one."""
    folder = tmp_path / "tools"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return env | {"PATH": f"{folder}:{env['PATH']}"}


def in_namespace(setup: str, argv: list[str | Path], env: dict[str, str]) -> Started:
    """Run ``argv`` after ``setup`` (mounts) in a mount namespace of its own; skip where the system allows none."""
    words = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-Ucm", "--keep-caps"]
    probe = subprocess.run([*words, "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False) if shutil.which("unshare") else None
    if probe is None or probe.returncode != 0:
        pytest.skip("unshare may not make a mount namespace here: needs root or user namespaces")
    return start([*words, "sh", "-c", f'{setup}\nexec "$@"', "sh", *argv], env)


def own_processes() -> list[str]:
    """Words that start what follows them as process 1 of a namespace of its own, as in a container; skip where the system allows none."""
    words = ["unshare", "-pf", "--mount-proc"] if os.getuid() == 0 else ["unshare", "-Ucpf", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unshare may not make a namespace of processes here: needs root or user namespaces")
    return words


def member(file: Path, name: str) -> universal.Member:
    """A member of a file that ``make`` made."""
    return next(row for row in universal.read_host(file.parent / "parts" / "host").members if row.name == name)


def content(file: Path, name: str) -> bytes:
    """Its bytes."""
    row = member(file, name)
    return file.read_bytes()[row.data_offset : row.data_offset + row.size]


PROGRAM = f"bin/linux-{MACHINE}"
LOADER = PROGRAM + universal.LOADER_SUFFIX
