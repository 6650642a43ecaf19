"""Looks at the machine: what a build needs, what is here, what is missing, and the command that brings it.

Every check is a function that returns ``Check`` objects and raises nothing; a broken tool is a finding, not an error. What a check needs of the
machine comes in through ``Surroundings``, so that tests describe a machine instead of having one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from . import ninja, universal
from .cache import Cache
from .console import human_bytes
from .errors import OpencotiError
from .project import Project
from .runner import Runner
from .toolchains import cosmocc, native
from .toolchains.base import ToolSource, first_version, which
from .vendors import Fetcher, Pin, Role, State, load_pins

PYTHON = (3, 11)
DISK_NEEDED = 3 << 30
"""Bytes a first universal build takes: toolchain 0.6 GiB, zig's runtimes 0.4 GiB, sources 0.2 GiB, build folders 0.5 GiB, artifacts; rounded up."""
DISK_SCARCE = 6 << 30


class Status(Enum):
    """What a finding means for the default build (``invoke build --variant universal``)."""

    OK = "ok"
    FETCHED_LATER = "fetched when needed"
    OPTIONAL = "not here (optional)"
    NOTICE = "notice"
    MISSING = "MISSING"

    @property
    def blocks(self) -> bool:
        """Whether the default build cannot work."""
        return self is Status.MISSING


@dataclass(frozen=True)
class Check:
    """One line of the table. ``remedy`` is a command or a sentence; empty when there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    purpose: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The plain data of ``--json``."""
        return {**asdict(self), "status": self.status.name.lower()}


@dataclass(frozen=True)
class Surroundings:
    """The machine, as far as checks look at it."""

    project: Project
    cache: Cache
    runner: Runner
    fetcher: Fetcher
    offline: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    binfmt: Path = Path("/proc/sys/fs/binfmt_misc")

    def which(self, name: str) -> Path | None:
        """A program on the caller's PATH."""
        return which(name, self.environment)

    def version(self, program: Path, *words: str) -> str:
        """The version a program prints, ``unknown`` when it does not run."""
        try:
            return first_version(self.runner.run((program, *(words or ("--version",))), check=False).output)
        except OpencotiError:
            return "unknown, it does not run"


def examine(machine: Surroundings) -> list[Check]:
    """All checks, in the order of the table."""
    checks: list[Check] = []
    for look in CHECKS:
        try:
            checks += look(machine)
        except OpencotiError as error:
            checks.append(Check(look.__name__.strip("_"), Status.MISSING, error.message))
    return checks


def possible(checks: Sequence[Check]) -> bool:
    """Whether nothing stands in the way of the default build."""
    return not any(check.status.blocks for check in checks)


def python(machine: Surroundings) -> list[Check]:
    """The interpreter, the virtual environment, the packages the project declares."""
    version = ".".join(map(str, sys.version_info[:3]))
    right = sys.version_info[:2] >= PYTHON
    wanted = ".".join(map(str, PYTHON))
    checks = [Check("python", Status.OK if right else Status.MISSING, f"{version}, {sys.executable}", "" if right else f"install Python {wanted} or newer", "runs this toolkit")]
    inside = sys.prefix != sys.base_prefix
    checks.append(Check("virtual environment", Status.OK if inside else Status.NOTICE, sys.prefix if inside else "none", "" if inside else "python3 -m venv .venv && .venv/bin/pip install -e '.[test]'"))
    absent = [name for name in required_packages() if not _installed(name)]
    here = f"{len(required_packages()) - len(absent)} of {len(required_packages())}"
    checks.append(Check("packages", Status.MISSING if absent else Status.OK, f"{here}{', lacking ' + ', '.join(absent) if absent else ''}", "pip install -e ." if absent else ""))
    return checks


def required_packages() -> list[str]:
    """Names of the distributions this package depends on (its own metadata; empty when it is not installed)."""
    try:
        declared = importlib.metadata.requires("opencoti-build") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [match.group(0) for text in declared if "extra ==" not in text and (match := re.match(r"[A-Za-z0-9._-]+", text))]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def git(machine: Surroundings) -> list[Check]:
    """The series is kept in a repository."""
    found = machine.which("git")
    if found is None:
        return [Check("git", Status.MISSING, "not on PATH", _install("git"), "the patch series")]
    return [Check("git", Status.OK, f"{machine.version(found)}, {found}", "", "the patch series")]


def machine_room(machine: Surroundings) -> list[Check]:
    """Processor, memory, disk, the cache."""
    memory = ninja.physical_memory()
    jobs = ninja.default_jobs()
    checks = [Check("processor", Status.OK, f"{platform.machine()}, {os.cpu_count() or 1} cores; {jobs} compilers at once", "OPENCOTI_JOBS=N changes it")]
    if memory is not None:
        enough = memory >= 2 << 30
        checks.append(Check("memory", Status.OK if enough else Status.NOTICE, human_bytes(memory), "" if enough else "the largest sources take 1 GiB to compile: add swap space"))
    root = machine.cache.root
    writable, reason = _writable(root)
    checks.append(Check("cache", Status.OK if writable else Status.MISSING, f"{root}{reason}", "" if writable else "set OPENCOTI_CACHE to a folder you may write to", "downloads and results"))
    for name, folder in (("disk, cache", root), ("disk, build", machine.project.build)):
        checks.append(_disk(name, folder))
    return checks


def _writable(folder: Path) -> tuple[bool, str]:
    here = _nearest(folder)
    if not here.is_dir():
        return False, f" ({here} is not a folder)"
    return (True, "" if folder.is_dir() else " (made when needed)") if os.access(here, os.W_OK | os.X_OK) else (False, f" ({here} may not be written to)")


def _nearest(folder: Path) -> Path:
    """The folder itself or the nearest of its parents that exists."""
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)


def _disk(name: str, folder: Path) -> Check:
    free = shutil.disk_usage(_nearest(folder)).free
    if free < DISK_NEEDED and not folder.is_dir():
        return Check(name, Status.MISSING, f"{human_bytes(free)} free", f"free {human_bytes(DISK_NEEDED - free)}, or set OPENCOTI_CACHE to another disk")
    status = Status.OK if free >= DISK_SCARCE else Status.NOTICE
    return Check(name, status, f"{human_bytes(free)} free", "" if status is Status.OK else f"a first universal build takes up to {human_bytes(DISK_NEEDED)}")


def pins(machine: Surroundings) -> list[Check]:
    """Every pin: here, or to be fetched."""
    checks = []
    for pin in load_pins(machine.project.vendors).values():
        state = machine.fetcher.state(pin)
        checks.append(_pin_check(pin, state, machine.offline))
    return checks


def _pin_check(pin: Pin, state: State, offline: bool) -> Check:
    needed = pin.role is Role.BUILD
    name = f"pin {pin.name}"
    detail = f"{pin.version}, {state.value}"
    if state in (State.UNPACKED, State.CACHED):
        return Check(name, Status.OK, detail, "", pin.kind.value)
    bring = f"invoke vendor fetch {pin.name}"
    if state is State.ABSENT:
        if needed and offline:
            return Check(name, Status.MISSING, f"{detail}, and OPENCOTI_OFFLINE is set", f"OPENCOTI_OFFLINE=0 {bring}", pin.kind.value)
        return Check(name, Status.FETCHED_LATER if needed else Status.OPTIONAL, detail, bring, pin.kind.value)
    remedy = f"invoke vendor bump {pin.name} {pin.version}" if state is State.INCOMPLETE else "build on a platform that it is pinned for"
    return Check(name, Status.MISSING if needed and pin.kind.value != "archive" else Status.OPTIONAL, detail, remedy, pin.kind.value)


def compilers(machine: Surroundings) -> list[Check]:
    """Toolchains beside the default one, and what speeds builds up."""
    checks = []
    try:
        found = native.find_compilers(machine.runner, machine.environment)
        detail, remedy = (native.describe(found), "") if found else ("none", _install("build-essential"))
    except OpencotiError as error:
        found, detail, remedy = None, error.message, ""
    checks.append(Check("native compiler", Status.OK if found else Status.OPTIONAL, detail, remedy, "--toolchain native"))
    checks.append(_program(machine, "nvcc", "the CUDA libraries", "install NVIDIA's CUDA toolkit"))
    checks.append(_program(machine, "glslc", "the Vulkan libraries", _install("glslc")))
    checks.append(_ccache(machine))
    checks.append(_cosmocc(machine))
    return checks


def _ccache(machine: Surroundings) -> Check:
    found = machine.which("ccache")
    wish = machine.environment.get("OPENCOTI_CCACHE", "")
    if wish not in ("", "0"):
        if (machine.which(wish) if wish != "1" else found) is None:
            return Check("ccache", Status.MISSING, f"OPENCOTI_CCACHE={wish}, but it is not there", f"unset OPENCOTI_CCACHE, or {_install('ccache')}")
        return Check("ccache", Status.OK, f"{found or wish}, in use", "", "repeated builds")
    if found is None:
        return Check("ccache", Status.OPTIONAL, "not on PATH", _install("ccache"), "repeated builds")
    return Check("ccache", Status.OK, f"{machine.version(found)}, {found}, not in use", "OPENCOTI_CCACHE=1 puts it in front of the compilers", "repeated builds")


def _cosmocc(machine: Surroundings) -> Check:
    unused = ToolSource("", "", "", Path)
    try:
        toolchain = cosmocc.CosmoccToolchain.from_pins(machine.fetcher, load_pins(machine.project.vendors), unused, unused, machine.environment)
    except OpencotiError as error:
        return Check("cosmocc", Status.OPTIONAL, error.message, "", "portable executables")
    here, detail = cosmocc.describe(toolchain)
    return Check("cosmocc", Status.OK if here else Status.OPTIONAL, detail, "" if here else f"set {cosmocc.VARIABLE} to an unpacked cosmocc", "portable executables")


def emulators(machine: Surroundings) -> list[Check]:
    """What tests use to run programs of other platforms."""
    if sys.platform != "linux":
        return []
    arch = {"x86_64": "aarch64", "aarch64": "x86_64"}.get(platform.machine(), "aarch64")
    qemu = machine.which(f"qemu-{arch}-static") or machine.which(f"qemu-{arch}")
    wine = machine.which("wine") or machine.which("wine64")
    return [
        Check("wine", Status.OK if wine else Status.OPTIONAL, f"{machine.version(wine)}, {wine}" if wine else "not on PATH", "" if wine else _install("wine"), "tests of the Windows program"),
        Check(
            f"qemu-{arch}",
            Status.OK if qemu else Status.OPTIONAL,
            f"{machine.version(qemu)}, {qemu}" if qemu else "not on PATH",
            "" if qemu else _install("qemu-user-static"),
            f"tests of the {arch} program",
        ),
    ]


def binfmt_misc(machine: Surroundings) -> list[Check]:
    """Entries of the kernel's binfmt_misc that take a file beginning with MZ away from the shell.

    A universal file begins with ``MZ``; an enabled entry for that magic (wine's DOSWin, mono's cli, WSL's interop) starts it as a
    Windows program (kernel documentation, "Kernel Support for miscellaneous Binary Formats").
    """
    if sys.platform != "linux":
        return []
    if not (machine.binfmt / "status").is_file():
        return [Check("binfmt_misc", Status.OK, "not in use")]
    hijackers = mz_entries(machine.binfmt)
    if not hijackers:
        return [Check("binfmt_misc", Status.OK, "no entry for MZ")]
    names = ", ".join(f"{name} ({interpreter})" for name, interpreter in hijackers)
    off = " && ".join(f"echo 0 | sudo tee {machine.binfmt / name}" for name, _ in hijackers)
    return [Check("binfmt_misc", Status.NOTICE, f"./FILE of a universal file is started by {names}", f"start it with 'sh FILE', or switch the entry off: {off}", "starting the result")]


def mz_entries(folder: Path) -> list[tuple[str, str]]:
    """(name, interpreter) of every enabled entry that would take a universal file: its magic, under its mask, is how the file begins."""
    if _first_word(folder / "status") == "disabled":
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.name in ("status", "register"):
            continue
        try:
            lines = path.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        values = {key.rstrip(":"): value for key, _, value in (line.partition(" ") for line in lines)}
        if lines and lines[0] == "enabled" and _matches(values):
            found.append((path.name, values.get("interpreter", "?")))
    return found


def _matches(values: Mapping[str, str]) -> bool:
    try:
        magic = bytes.fromhex(values.get("magic", ""))
        mask = bytes.fromhex(values.get("mask", "")) or b"\xff" * len(magic)
        offset = int(values.get("offset", "0"))
    except ValueError:
        return False
    start = universal.MAGIC[offset : offset + len(magic)]
    return bool(magic) and len(start) == len(magic) == len(mask) and all((a ^ b) & m == 0 for a, b, m in zip(start, magic, mask, strict=True))


def _first_word(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def variables(machine: Surroundings) -> list[Check]:
    """``OPENCOTI_*`` in effect."""
    return [Check(name, Status.NOTICE, value, "", "in effect") for name, value in sorted(machine.environment.items()) if name.startswith("OPENCOTI_")]


def _program(machine: Surroundings, name: str, purpose: str, remedy: str) -> Check:
    found = machine.which(name)
    if found is None:
        return Check(name, Status.OPTIONAL, "not on PATH", remedy, purpose)
    return Check(name, Status.OK, f"{machine.version(found)}, {found}", "", purpose)


def _install(package: str) -> str:
    """How a package comes onto this kind of system."""
    if sys.platform == "linux" and which("apt-get"):
        return f"sudo apt install {package}"
    return f"install {package}"


CHECKS: tuple[Callable[[Surroundings], list[Check]], ...] = (python, git, machine_room, pins, compilers, emulators, binfmt_misc, variables)
