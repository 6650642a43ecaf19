"""What every toolchain is made of: targets (data), build tools, and the interface ``components`` works against."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import yaml

from ..cache import Cache
from ..console import Console
from ..errors import DataError, ToolchainError, UsageError
from ..runner import Runner
from ..vendors import Fetcher, Pin, find_pin

SCHEMA = 1
FIXED_EPOCH = 315532800
"""1980-01-01 00:00 UTC, the earliest time a ZIP entry can carry; what a build without ``SOURCE_DATE_EPOCH`` takes for now."""


@dataclass(frozen=True)
class Target:
    """A platform the engine is built for; the fields are explained in resources/targets.yaml."""

    name: str
    os: str
    arch: str
    triple: str
    cpu: str
    system_name: str
    system_processor: str
    program: str
    library: str
    glibc: str | None = None
    variants: tuple[str, ...] = ()
    cmake: Mapping[str, str] = field(default_factory=dict)
    compile: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    link_program: tuple[str, ...] = ()
    rewrite: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, str] = field(default_factory=dict)
    experimental: bool = False

    @property
    def zig_triple(self) -> str:
        """The target as zig spells it, the glibc version joined to it."""
        return f"{self.triple}.{self.glibc}" if self.glibc else self.triple

    def library_name(self, variant: str) -> str:
        """File name of the CPU library of ``variant``."""
        return self.library.format(variant=variant)

    def data(self) -> dict[str, Any]:
        """Everything of it that may change a built byte, for a key."""
        return {
            "name": self.name,
            "triple": self.zig_triple,
            "cpu": self.cpu,
            "system": [self.system_name, self.system_processor],
            "program": self.program,
            "library": self.library,
            "cmake": dict(self.cmake),
            "compile": list(self.compile),
            "link": list(self.link),
            "link_program": list(self.link_program),
            "rewrite": dict(self.rewrite),
            "presets": dict(self.presets),
        }


@dataclass(frozen=True)
class Recipe:
    """What is built, for any target: ninja targets and cache variables; ``zig_*`` are words of that driver."""

    ninja_targets: tuple[str, ...]
    cmake: Mapping[str, str]
    zig_flags: tuple[str, ...]


@functools.cache
def _resource() -> dict[str, Any]:
    text = resources.files("opencoti_build").joinpath("resources", "targets.yaml").read_text("utf-8")
    return _parse(text)


def _parse(text: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"resources/targets.yaml cannot be read: {error}.") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise DataError(f"resources/targets.yaml is not of schema {SCHEMA}, the one this toolkit knows.")
    return data


def _words(data: Mapping[str, Any], key: str) -> dict[str, str]:
    value = data.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise DataError(f"resources/targets.yaml: {key!r} has to map text to text (quote ON, OFF and numbers).")
    return value


def load_targets(text: str | None = None) -> dict[str, Target]:
    """All targets by name, in the order of the file. ``text`` replaces the file, for tests. Raises DataError."""
    data = _resource() if text is None else _parse(text)
    targets: dict[str, Target] = {}
    for name, entry in data.get("targets", {}).items():
        try:
            targets[name] = Target(
                name=name,
                os=entry["os"],
                arch=entry["arch"],
                triple=entry["triple"],
                glibc=entry.get("glibc"),
                cpu=entry["cpu"],
                system_name=entry["system"]["name"],
                system_processor=entry["system"]["processor"],
                program=entry["program"],
                library=entry["library"],
                variants=tuple(entry.get("variants") or ()),
                cmake=_words(entry, "cmake"),
                compile=tuple(entry.get("compile") or ()),
                link=tuple(entry.get("link") or ()),
                link_program=tuple(entry.get("link_program") or ()),
                rewrite=_words(entry, "rewrite"),
                presets=_words(entry, "presets"),
                experimental=bool(entry.get("experimental")),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"resources/targets.yaml: target {name!r} lacks or misshapes {error}.") from error
        if not isinstance(targets[name].glibc, (str, type(None))):
            raise DataError(f"resources/targets.yaml: quote the glibc version of {name!r}; YAML reads 2.30 as 2.3.")
    return targets


def target_named(name: str) -> Target:
    """The target called ``name``; raises UsageError with the known names."""
    targets = load_targets()
    if name not in targets:
        raise UsageError(f"There is no target {name!r}; known are {', '.join(targets)}.")
    return targets[name]


def load_recipe() -> Recipe:
    """How the engine is built. Raises DataError."""
    data = _resource()
    try:
        return Recipe(
            ninja_targets=tuple(data["engine"]["targets"]),
            cmake=_words(data["engine"], "cmake"),
            zig_flags=tuple(data["zig"]["flags"]),
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"resources/targets.yaml lacks or misshapes {error}.") from error


def machine_target() -> Target:
    """The target this machine itself is. Raises UsageError on a platform the engine is not built for."""
    system = {"linux": "linux", "win32": "windows", "darwin": "macos"}.get(sys.platform, sys.platform)
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    return target_named(f"{system}-{arch}")


@dataclass(frozen=True)
class BuildTools:
    """cmake and ninja, where they are."""

    cmake: Path
    ninja: Path


@dataclass(frozen=True)
class ToolSource:
    """A pinned program that may not be here yet. ``digest`` names its content; ``locate`` brings it and gives its path."""

    name: str
    version: str
    digest: str
    locate: Callable[[], Path]


def pinned_tool(fetcher: Fetcher, pins: Mapping[str, Pin], pin_name: str, tool: str) -> ToolSource:
    """The program ``tool`` of a pin, for this platform; nothing is fetched before ``locate`` is called. Raises UsageError."""
    pin = find_pin(pins, pin_name)
    package = pin.package(fetcher.platform)
    digest = package.tree or (package.archives[0].sha256 if package.archives else "")
    return ToolSource(pin.name, pin.version, digest, lambda: fetcher.tool(pin, tool))


@dataclass(frozen=True)
class Setup:
    """A toolchain ready for one target: what the builder hands to cmake and ninja.

    ``arguments`` are words for cmake's command line; ``environment`` is the whole environment of both programs;
    ``prefix_maps`` are directories whose names must not get into a binary, with what stands for them.
    """

    tools: BuildTools
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    prefix_maps: tuple[tuple[Path, str], ...] = ()
    fingerprint: str = ""


class Toolchain(Protocol):
    """A way to turn the engine's sources into programs."""

    @property
    def name(self) -> str:
        """What ``toolchains.named`` calls it."""
        ...

    def supports(self, target: Target) -> str | None:
        """None if it builds for ``target``, else the reason why not."""
        ...

    def identity(self, target: Target) -> Mapping[str, Any]:
        """Everything of the toolchain that may change a built byte, JSON-able; cheap, fetches nothing."""
        ...

    def cmake_overrides(self) -> Mapping[str, str]:
        """Cache variables of the recipe or the target that it needs to be different."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Program names and versions, for the manifest; cheap, fetches nothing."""
        ...

    def prepare(self, target: Target, cache: Cache, runner: Runner, *, scratch: Path) -> Setup:
        """Fetch, unpack, write wrappers; ``scratch`` is a folder the build may use. Raises ToolchainError."""
        ...

    def warm(self, targets: Sequence[Target], cache: Cache, runner: Runner, console: Console, *, scratch: Path) -> None:
        """Do at once, in parallel, what the first build for each of ``targets`` would do one after the other. Raises ToolchainError."""
        ...


PASSED_ON = ("SYSTEMROOT", "SYSTEMDRIVE", "COMSPEC", "PATHEXT", "TEMP", "TMP", "TMPDIR", "NUMBER_OF_PROCESSORS")
"""What even a hermetic build needs from its surroundings, where the system defines it."""


def clean_environment(path: tuple[Path, ...], home: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which only the folders of ``path`` are searched and no user's flag (CFLAGS, CPATH, LD_PRELOAD...) is left.

    ``CCACHE_*`` stays: it says where a cache lies, it cannot change a result.
    """
    environment = {name: inherited[name] for name in PASSED_ON if name in inherited}
    environment.update({name: value for name, value in inherited.items() if name.startswith("CCACHE_")})
    environment.update(
        PATH=os.pathsep.join(str(folder) for folder in path),
        HOME=str(home),
        LC_ALL="C",
        TZ="UTC",
        SOURCE_DATE_EPOCH=str(FIXED_EPOCH),
    )
    return environment


def ccache_program(inherited: Mapping[str, str] = os.environ) -> Path | None:
    """ccache, if ``OPENCOTI_CCACHE`` asks for it: ``1`` takes the one on PATH, anything else is its path.

    Opt-in, because it is a program of the machine; it stores what the compiler wrote, so the bytes are the same either way.
    Raises ToolchainError when it is asked for and absent.
    """
    wish = inherited.get("OPENCOTI_CCACHE", "")
    if wish in ("", "0"):
        return None
    found = which("ccache" if wish == "1" else wish, inherited)
    if found is None:
        raise ToolchainError(f"OPENCOTI_CCACHE={wish} asks for ccache, but it is not there: install it, or unset the variable.")
    return found


def ccache_settings(ccache: Path, cache: Cache, compiler: str | None, inherited: Mapping[str, str] = os.environ) -> tuple[list[str], dict[str, str]]:
    """Words for cmake and environment variables that put ccache in front of the compilers.

    ``compiler`` identifies the compiler where the program cmake calls is a wrapper, whose size and time say nothing.
    """
    words = [f"-DCMAKE_{language}_COMPILER_LAUNCHER={ccache.as_posix()}" for language in ("C", "CXX")]
    environment = {} if "CCACHE_DIR" in inherited else {"CCACHE_DIR": str(cache.root / "ccache")}
    if compiler is not None:
        environment.update(CCACHE_COMPILERCHECK=f"string:{compiler}", CCACHE_COMPILERTYPE="clang")
    return words, environment


def which(name: str, inherited: Mapping[str, str] = os.environ) -> Path | None:
    """A program on the caller's PATH, its absolute path."""
    found = shutil.which(name, path=inherited.get("PATH"))
    return Path(found).absolute() if found else None


def first_version(text: str) -> str:
    """The first thing in ``text`` that looks like a version number, or ``unknown``."""
    match = re.search(r"\d+(?:\.\d+)+[\w.+~-]*", text)
    return match.group(0) if match else "unknown"


def cmake_quote(text: str | Path) -> str:
    """``text`` as a quoted CMake argument."""
    value = text.as_posix() if isinstance(text, Path) else text
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'
