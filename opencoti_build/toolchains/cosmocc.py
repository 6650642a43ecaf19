"""Cosmopolitan: one Actually Portable Executable for many systems.

Written against the contract that cosmocc's README and drivers document; the pinned archive could not be fetched where this was
written, so the driver has met the real toolchain nowhere yet. The sources of ggml's CPU backend differ per processor and do not fit
cosmocc's fat mode, so the engine is built once per architecture with the single-architecture drivers (``x86_64-unknown-cosmo-cc``,
``aarch64-unknown-cosmo-cc``), and ``apelink`` joins the two. Compiling and linking are separate steps, as the thread-local pass needs
it; CMake works that way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..cache import Cache, digest_of
from ..console import Console
from ..errors import OpencotiError, ToolchainError
from ..runner import Runner
from ..vendors import Fetcher, Pin, find_pin
from . import probe
from .base import BuildTools, Setup, Target, ToolSource, clean_environment, cmake_quote, which

VARIABLE = "OPENCOTI_COSMOCC"
"""Names the folder of an unpacked cosmocc (the one with ``bin/cosmocc``)."""

ARCHITECTURES = ("x86_64", "aarch64")

_SMALL = 1 << 18


@dataclass(frozen=True)
class CosmoccToolchain:
    """Builds the ``cosmo-ARCH`` targets. ``root`` is the user's folder, else ``pinned`` is fetched when it is needed."""

    root: Path | None
    pinned: ToolSource | None
    absent: str
    cmake: ToolSource
    ninja: ToolSource

    @classmethod
    def from_pins(cls, fetcher: Fetcher, pins: Mapping[str, Pin], cmake: ToolSource, ninja: ToolSource, environment: Mapping[str, str] = os.environ) -> CosmoccToolchain:
        """``OPENCOTI_COSMOCC`` wins over the pin."""
        if wish := environment.get(VARIABLE):
            return cls(Path(wish).expanduser().absolute(), None, "", cmake, ninja)
        pin = find_pin(pins, "cosmocc")
        package = pin.package(fetcher.platform)
        if package.tree is None:
            absent = (
                f"cosmocc is not here and its pin is not complete: set {VARIABLE} to the folder of an unpacked cosmocc {pin.version}, or run "
                f"'invoke vendor bump cosmocc {pin.version}' where its sources can be reached."
            )
            return cls(None, None, absent, cmake, ninja)
        source = ToolSource(pin.name, pin.version, package.tree, lambda: fetcher.unpacked(pin) / "bin" / "cosmocc")
        return cls(None, source, "", cmake, ninja)

    @property
    def name(self) -> str:
        """cosmocc."""
        return "cosmocc"

    def supports(self, target: Target) -> str | None:
        """The portable targets alone, and only when there is a cosmocc to be had."""
        if target.os != "cosmo":
            return f"cosmocc builds portable executables (cosmo-x86_64, cosmo-aarch64), not {target.name}."
        try:
            self._bin_if_local()
        except ToolchainError as error:
            return error.message
        return None

    def _bin_if_local(self) -> Path | None:
        """The folder of the programs, None when it still has to be fetched. Raises ToolchainError with the next step."""
        if self.root is not None:
            folder = self.root / "bin"
            missing = [name for name in required_programs() if not (folder / name).is_file()]
            if missing:
                raise ToolchainError(f"{VARIABLE}={self.root} is no unpacked cosmocc: it lacks bin/{missing[0]}.")
            return folder
        if self.pinned is None:
            raise ToolchainError(self.absent)
        return None

    def folder(self) -> Path:
        """``bin`` of the toolchain, fetched if need be. Raises ToolchainError."""
        if (local := self._bin_if_local()) is not None:
            return local
        assert self.pinned is not None
        folder = self.pinned.locate().parent
        if missing := [name for name in required_programs() if not (folder / name).is_file()]:
            raise ToolchainError(f"The pinned cosmocc lacks bin/{missing[0]}: is vendors/cosmocc.yaml a release of it?")
        return folder

    def identity(self, target: Target) -> Mapping[str, Any]:
        """The pin's tree, or a digest of the user's folder."""
        if (local := self._bin_if_local()) is not None:
            return {"toolchain": self.name, "folder": folder_digest(local.parent)}
        assert self.pinned is not None
        return {"toolchain": self.name, "tree": self.pinned.digest}

    def cmake_overrides(self) -> Mapping[str, str]:
        """None."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """As pinned; a folder of the user's has no version that can be told without running it."""
        return {"cosmocc": self.pinned.version if self.pinned is not None else f"from {VARIABLE}"}

    def prepare(self, target: Target, cache: Cache, runner: Runner, *, scratch: Path) -> Setup:
        """Find it, prove it right for ``target.arch``, write a toolchain file. Raises ToolchainError."""
        folder = self.folder()
        environment = clean_environment((folder, *_system_path()), scratch)
        identity = digest_of(self.identity(target))
        proof = cache.result("probe", digest_of([identity, target.arch, "1"]))
        if not proof.is_dir():
            driver = str(folder / f"{target.arch}-unknown-cosmo-c++")
            ran = probe.check(_probe(driver, target.arch), scratch / "probe", runner, environment=environment, what=f"{folder.parent} for {target.arch}")
            if ran:
                with cache.producing("probe", proof.name) as directory:
                    files.write_text(directory / "passed", f"{identity}\n")
        tools = BuildTools(self.cmake.locate(), self.ninja.locate())
        prefix = f"{folder.as_posix()}/{target.arch}-unknown-cosmo-"
        text = "\n".join(
            [
                f"set(CMAKE_SYSTEM_NAME {target.system_name})",
                f"set(CMAKE_SYSTEM_PROCESSOR {target.system_processor})",
                f"set(CMAKE_C_COMPILER {cmake_quote(prefix + 'cc')})",
                f"set(CMAKE_CXX_COMPILER {cmake_quote(prefix + 'c++')})",
                f"set(CMAKE_ASM_COMPILER {cmake_quote(prefix + 'cc')})",
                *(f'set(CMAKE_{tool.upper()} {cmake_quote(prefix + tool)} CACHE FILEPATH "" FORCE)' for tool in ("ar", "ranlib")),
                f'set(CMAKE_MAKE_PROGRAM {cmake_quote(tools.ninja)} CACHE FILEPATH "" FORCE)',
                f'set(CMAKE_FIND_ROOT_PATH {cmake_quote(folder.parent / f"{target.arch}-linux-cosmo")})',
                *(f"set(CMAKE_FIND_ROOT_PATH_MODE_{what} ONLY)" for what in ("LIBRARY", "INCLUDE", "PACKAGE")),
                *(f'set(CMAKE_{language}_FLAGS_INIT "{" ".join(target.compile)} ${{OPENCOTI_PREFIX_MAPS}}")' for language in ("C", "CXX")),
                "",
            ]
        )
        key = digest_of(text)
        place = cache.result("toolchain", key)
        if not place.is_dir():
            with cache.producing("toolchain", key) as directory:
                files.write_text(directory / "toolchain.cmake", text)
        return Setup(tools, (f"-DCMAKE_TOOLCHAIN_FILE={(place / 'toolchain.cmake').as_posix()}",), environment, ((folder.parent, "cosmocc"),), fingerprint=digest_of([key, identity]))

    def warm(self, targets: Sequence[Target], cache: Cache, runner: Runner, console: Console, *, scratch: Path) -> None:
        """Its runtimes are built already."""

    def join(self, programs: Mapping[str, Path], out: Path, runner: Runner) -> None:
        """Join the programs, one an architecture (their ``.com.dbg``/ELF form), into the executable ``out``. Raises ToolchainError."""
        runner.run(apelink_words(self.folder(), programs, out), error=ToolchainError)


def apelink_words(folder: Path, programs: Mapping[str, Path], out: Path) -> list[str]:
    """apelink's command line: a loader per architecture, the source of the loader for Apple's processors, the programs."""
    words = [str(folder / "apelink"), "-o", str(out)]
    for arch in ARCHITECTURES:
        if arch in programs:
            words += ["-l", str(folder / f"ape-{arch}.elf")]
    if "aarch64" in programs:
        words += ["-M", str(folder / "ape-m1.c")]
    return words + [str(programs[arch]) for arch in ARCHITECTURES if arch in programs]


def required_programs() -> list[str]:
    """What has to lie in ``bin``."""
    return ["apelink", *(f"{arch}-unknown-cosmo-{tool}" for arch in ARCHITECTURES for tool in ("cc", "c++", "ar"))]


def folder_digest(root: Path) -> str:
    """A digest of an unpacked cosmocc: every file's name and size, the content of the small ones (its drivers are scripts)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root).as_posix()}\0{size}\0".encode())
        if size <= _SMALL:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _probe(driver: str, arch: str) -> probe.Probe:
    """A single-architecture build is started through the loader; elsewhere under qemu, where it is installed."""
    words: tuple[str, ...] | None
    if probe.runs_here("linux", arch) or probe.runs_here("macos", arch):
        words = ()
    else:
        qemu = which(f"qemu-{arch}-static") or which(f"qemu-{arch}")
        words = (str(qemu),) if qemu else None
    return probe.Probe((driver,), (driver,), words)


def _system_path() -> Sequence[Path]:
    """The drivers are shell scripts: they need the system's basic programs."""
    return [Path(folder) for folder in ("/usr/bin", "/bin") if Path(folder).is_dir()]


def describe(toolchain: CosmoccToolchain) -> tuple[bool, str]:
    """For people: whether it is here, and where, or what to do."""
    try:
        local = toolchain._bin_if_local()
    except OpencotiError as error:
        return False, error.message
    if local is not None:
        return True, str(local.parent)
    assert toolchain.pinned is not None
    return False, f"pinned {toolchain.pinned.version}, not fetched yet"
