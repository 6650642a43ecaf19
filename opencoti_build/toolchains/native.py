"""The machine's own compiler: for development, and as the reference that speed and off-means-off are measured against.

Its result runs on this machine or one like it; it is no part of a release.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..cache import Cache, digest_of
from ..console import Console
from ..errors import DownloadError, OfflineError, ToolchainError, UsageError
from ..runner import Runner
from .base import BuildTools, Setup, Target, ToolSource, ccache_program, ccache_settings, clean_environment, cmake_quote, first_version, machine_target, which

COMPILERS = (("gcc", "g++"), ("clang", "clang++"), ("cc", "c++"))
"""Pairs tried in this order when CC and CXX do not say which."""

LAST_GCC_WITH_BROKEN_AMX = 12
"""See ``NativeToolchain._words``."""


@dataclass(frozen=True)
class Compilers:
    """A C and a C++ compiler of this machine; ``version`` is the first line of ``--version``."""

    c: Path
    cxx: Path
    version: str

    @property
    def gcc_major(self) -> int | None:
        """The major version of GCC, None for another compiler (``gcc (Debian 12.2.0-14) 12.2.0``)."""
        match = re.search(r"\) (\d+)\.", self.version)
        return int(match.group(1)) if match and "clang" not in self.version.lower() else None


def find_compilers(runner: Runner, environment: Mapping[str, str] = os.environ) -> Compilers | None:
    """CC and CXX where set, else the first pair of ``COMPILERS`` that is there whole. Raises ToolchainError when CC is not there."""
    if (cc := environment.get("CC")) or environment.get("CXX"):
        pair = (cc or "cc", environment.get("CXX") or "c++")
        found = [which(name, environment) for name in pair]
        for name, path in zip(pair, found, strict=True):
            if path is None:
                raise ToolchainError(f"CC and CXX ask for {name!r}, but it is not there (words behind the name are not supported): unset them, or name a program.")
    else:
        for pair in COMPILERS:
            found = [which(name, environment) for name in pair]
            if all(found):
                break
        else:
            return None
    c, cxx = found
    assert c is not None and cxx is not None
    version = runner.run((c, "--version"), error=ToolchainError).output.splitlines()
    return Compilers(c, cxx, version[0] if version else "unknown")


@dataclass(frozen=True)
class NativeToolchain:
    """Builds for this machine alone.

    ``own_isa``: for this processor (-march=native), else for the target's baseline. ``openmp``: upstream's default threading.
    """

    runner: Runner
    cmake: ToolSource | None
    ninja: ToolSource | None
    own_isa: bool = True
    openmp: bool = False

    @property
    def name(self) -> str:
        """``native``, with what differs from it."""
        return "native" + ("" if self.own_isa else "-portable") + ("-openmp" if self.openmp else "")

    @functools.cached_property
    def compilers(self) -> Compilers:
        """The compilers; raises ToolchainError when there are none."""
        found = find_compilers(self.runner)
        if found is None:
            raise ToolchainError("This machine has no C and C++ compiler: install gcc and g++ (Debian: apt install build-essential), or build with the zig toolchain.")
        return found

    def supports(self, target: Target) -> str | None:
        """Only the machine's own platform."""
        try:
            own = machine_target().name
        except UsageError as error:
            return error.message
        return None if target.name == own else f"The machine's own compiler builds for {own}, not for {target.name}: use the zig toolchain."

    def _words(self) -> str:
        """What every compile gets beyond the project's flags.

        GCC up to 12 drops stores of the AMX tile configuration (its _tile_loadconfig claims to read 8 of 64 bytes), and the first
        tile instruction then ends the program: on a processor with AMX, -march=native must leave it out.
        """
        c = self.compilers
        broken = self.own_isa and machine_target().arch == "x86_64" and c.gcc_major is not None and c.gcc_major <= LAST_GCC_WITH_BROKEN_AMX
        return "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if broken else ""

    def cmake_overrides(self) -> dict[str, str]:
        """Cache variables it changes."""
        return {"GGML_NATIVE": "ON" if self.own_isa else "OFF", "GGML_OPENMP": "ON" if self.openmp else "OFF"}

    def identity(self, target: Target) -> Mapping[str, Any]:
        """The compilers, and with ``own_isa`` all that -march=native means here (the compiler's own macros)."""
        c = self.compilers
        macros = self.runner.run((c.c, *(("-march=native",) if self.own_isa else ()), "-dM", "-E", "-x", "c", os.devnull), error=ToolchainError).output
        return {"toolchain": self.name, "compilers": [str(c.c), str(c.cxx), c.version], "macros": digest_of(macros), "words": self._words()}

    def versions(self) -> Mapping[str, str]:
        """The compiler; cmake and ninja have no influence on a byte."""
        return {self.compilers.c.name: first_version(self.compilers.version)}

    def prepare(self, target: Target, cache: Cache, runner: Runner, *, scratch: Path) -> Setup:
        """Write a toolchain file. Raises ToolchainError when cmake or ninja can neither be fetched nor found."""
        tools = BuildTools(_tool(self.cmake, "cmake"), _tool(self.ninja, "ninja"))
        text = "\n".join(
            [
                f"set(CMAKE_C_COMPILER {cmake_quote(self.compilers.c)})",
                f"set(CMAKE_CXX_COMPILER {cmake_quote(self.compilers.cxx)})",
                f'set(CMAKE_MAKE_PROGRAM {cmake_quote(tools.ninja)} CACHE FILEPATH "" FORCE)',
                *(f'set(CMAKE_{language}_FLAGS_INIT "{self._words()} ${{OPENCOTI_PREFIX_MAPS}}")' for language in ("C", "CXX")),
                *(f'set(CMAKE_{kind}_LINKER_FLAGS_INIT "-s")' for kind in ("EXE", "SHARED", "MODULE") if target.os != "macos"),
                "",
            ]
        )
        key = digest_of(text)
        folder = cache.result("toolchain", key)
        if not folder.is_dir():
            with cache.producing("toolchain", key) as directory:
                files.write_text(directory / "toolchain.cmake", text)
        path = tuple(Path(part) for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part)
        environment = clean_environment(path, scratch)
        arguments = [f"-DCMAKE_TOOLCHAIN_FILE={(folder / 'toolchain.cmake').as_posix()}"]
        if ccache := ccache_program():
            words, more = ccache_settings(ccache, cache, None)
            arguments += words
            environment = {**more, **environment}
        # The compiler may have been replaced under the same name.
        fingerprint = digest_of([key, *self.identity(target).values()])
        return Setup(tools, tuple(arguments), environment, fingerprint=fingerprint)

    def warm(self, targets: Sequence[Target], cache: Cache, runner: Runner, console: Console, *, scratch: Path) -> None:
        """Its runtimes are built already."""


def _tool(source: ToolSource | None, name: str) -> Path:
    """The pinned program, else the machine's."""
    problem = ""
    if source is not None:
        try:
            return source.locate()
        except (OfflineError, DownloadError) as error:
            problem = f" ({error.message})"
    if (found := which(name)) is not None:
        return found
    raise ToolchainError(f"There is no {name}: fetch it with 'invoke vendor fetch {name}', or install it{problem}.")


def parse_name(name: str) -> dict[str, bool] | None:
    """``own_isa`` and ``openmp`` of a name that ``NativeToolchain.name`` gives; None for any other name."""
    words = name.split("-")
    if words[0] != "native" or set(words[1:]) - {"portable", "openmp"} or len(set(words)) != len(words):
        return None
    return {"own_isa": "portable" not in words, "openmp": "openmp" in words}


def describe(compilers: Compilers) -> str:
    """For people: paths and version."""
    return f"{shlex.join([str(compilers.c), str(compilers.cxx)])}: {compilers.version}"
