"""Builds chosen targets of a source tree with the machine's own compiler, for the gates: test programs, sanitized engines.

A build directory is an accelerator below ``build/gates/NAME``: the next run with the same name compiles what changed. It may be
removed at any time. Nothing in it is a result; the callers keep results in the cache, by content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import components, files, ninja, toolchains
from ..cache import Cache
from ..errors import BuildError
from ..runner import Runner
from ..sources import Tree, Upstream, Workshop
from ..toolchains.base import Setup, Target, ccache_settings, which
from ..toolchains.native import NativeToolchain


class SharingToolchain(NativeToolchain):
    """The machine's compiler, set up so that a compiler cache (ccache, where the machine has it) hits across folders.

    The engine's own builds map their folders out of the binaries. Those words name absolute folders, and the cache takes words as they
    are; what a gate builds never leaves the machine, so it goes without them. Folders that lie side by side then compile once what is
    equal in both.
    """

    def prepare(self, target: Target, cache: Cache, runner: Runner, *, scratch: Path) -> Setup:
        """As the native toolchain does, with the cache in front of the compilers."""
        setup = super().prepare(target, cache, runner, scratch=scratch)
        arguments = [*setup.arguments, *(f"-DCMAKE_{language}_FLAGS={self._words()}" for language in ("C", "CXX"))]
        environment = dict(setup.environment)
        if not any("COMPILER_LAUNCHER" in word for word in arguments) and not os.environ.get("OPENCOTI_CCACHE") and (ccache := which("ccache")):
            words, more = ccache_settings(ccache, cache, None)
            arguments += words
            environment.update(more)
        # Paths below this folder are handed on relative to the build directory, and the directory itself does not count.
        environment.update(CCACHE_BASEDIR=str(scratch.parent.parent.resolve()), CCACHE_NOHASHDIR="1")
        return replace(setup, arguments=tuple(arguments), environment=environment)


@dataclass(frozen=True)
class TreeBuild:
    """One build directory: ``name`` below ``build/gates``, the tree, and cache variables beyond those of the engine.

    ``jobs`` are compilers at once (None: what the machine allows).
    """

    workshop: Workshop
    upstream: Upstream
    name: str
    tree: Tree
    flags: Mapping[str, str] = field(default_factory=dict)
    jobs: int | None = None

    @property
    def source(self) -> Path:
        """The folder that is built."""
        return self.tree.path

    @property
    def toolchain(self) -> NativeToolchain:
        """The machine's own compiler, for this machine's processor."""
        made = toolchains.named("native", self.upstream.fetcher, self.upstream.pins)
        assert isinstance(made, NativeToolchain)
        return made

    @property
    def target(self) -> Target:
        """This machine."""
        return toolchains.machine_target()

    @property
    def directory(self) -> Path:
        """Where records, logs and the build directory lie."""
        return self.workshop.project.build / "gates" / self.name

    @property
    def work(self) -> Path:
        """CMake's build directory; programs are in its ``bin``."""
        return self.directory / "build"

    def variables(self) -> dict[str, str]:
        """The cache variables of the build: the engine's, then this build's own."""
        pin = self.upstream.pin
        flags = components.cache_variables(
            self.target,
            self.toolchain,
            identity=self.workshop.project.identity(),
            tree_id=self.tree.tree_id,
            base_version=pin.version,
            base_commit=pin.commit,
            variants=(),
        )
        return {**flags, **self.flags}

    def inputs(self) -> dict[str, Any]:
        """Everything that may change a byte of what is built, JSON-able: a part of the caller's key."""
        return {"tree": self.tree.tree_id, "toolchain": dict(self.toolchain.identity(self.target)), "flags": self.variables()}

    def make(self, goals: Sequence[str], *, description: str) -> Path:
        """Configure where need be and build ``goals``; returns the folder of the programs. Raises BuildError, ToolchainError, BusyError."""
        workshop = self.workshop
        self.directory.mkdir(parents=True, exist_ok=True)
        with files.lock(self.directory.parent / f".{self.name}.lock", what=f"the build of {self.name}"):
            scratch = self.directory / "scratch"
            scratch.mkdir(exist_ok=True)
            setup = self.toolchain.prepare(self.target, workshop.cache, workshop.runner, scratch=scratch)
            with ninja.lease(self.directory / "lease", console=workshop.console) as lease:
                components.configure(setup, self.source, self.work, self.directory, self.variables(), console=workshop.console, runner=workshop.runner, name=self.name, lease=lease)
                components.touch_changed_sources(self.source, self.directory / "sources.json")
                if goals:
                    ninja.build(
                        setup.tools.ninja,
                        self.work,
                        goals,
                        environment=setup.environment,
                        console=workshop.console,
                        runner=workshop.runner,
                        description=description,
                        jobs=self.jobs or ninja.default_jobs(),
                        log=self.directory / "build.log",
                        lease=lease,
                    )
        return self.work / "bin"


@dataclass(frozen=True)
class SharedTreeBuild(TreeBuild):
    """A build of a copy of the tree, ``source`` beside the build directory: compiles what no sibling compiled before, leaves the tree alone."""

    @property
    def source(self) -> Path:
        """The copy."""
        return self.directory / "source"

    @property
    def toolchain(self) -> NativeToolchain:
        """The compiler behind a cache."""
        made = super().toolchain
        return SharingToolchain(made.runner, made.cmake, made.ninja, made.own_isa, made.openmp)

    def make(self, goals: Sequence[str], *, description: str) -> Path:
        """Bring the copy up to date, then build."""
        # Not at the top: the package ``off`` itself builds with this module.
        from .off.mirror import mirror

        with files.lock(self.directory.parent / f".{self.name}.sources.lock", wait_seconds=3600, what=f"the sources of {self.name}"):
            mirror(self.tree.path, self.source)
        return super().make(goals, description=description)


_NAME = r"(?:\[(?P<equals>=*)\[(?P<bracketed>.*?)\](?P=equals)\]|\"(?P<quoted>(?:[^\"\\]|\\.)*)\")"
"""A test's name: as a bracket argument or, for projects with CMake's older policies (CMP0110), as a quoted one."""
_ADD_TEST = re.compile(r"^add_test\(" + _NAME + r"(?P<words>(?: \"(?:[^\"\\]|\\.)*\")+)\)$")
_PROPERTIES = re.compile(r"^set_tests_properties\(" + _NAME + r" PROPERTIES (?P<properties>.*)\)$")
_QUOTED = re.compile(r"\"((?:[^\"\\]|\\.)*)\"")
_PROPERTY = re.compile(r"(\w+) \"((?:[^\"\\]|\\.)*)\"")


@dataclass(frozen=True)
class RegisteredTest:
    """A test as the tree's CMake files register it: ``command`` is program and arguments, ``label`` its first label."""

    name: str
    command: tuple[str, ...]
    label: str = ""
    folder: Path | None = None
    environment: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The ninja target of its program (the file's name)."""
        return Path(self.command[0]).name


def registered_tests(work: Path) -> tuple[RegisteredTest, ...]:
    """The tests of a configured tree, in the order of its files, from ``tests/**/CTestTestfile.cmake``.

    The format is what CMake generates for ``add_test`` and ``set_tests_properties``: one command a line, every word quoted. Raises
    BuildError when there is no such file.
    """
    found: dict[str, RegisteredTest] = {}
    listings = sorted((work / "tests").rglob("CTestTestfile.cmake"))
    if not listings:
        raise BuildError(f"{work} registers no tests: was it configured with LLAMA_BUILD_TESTS?")
    for listing in listings:
        for line in listing.read_text("utf-8").splitlines():
            if match := _ADD_TEST.match(line):
                found[_name(match)] = RegisteredTest(_name(match), tuple(_unescaped(word) for word in _QUOTED.findall(match["words"])))
            elif (match := _PROPERTIES.match(line)) and (test := found.get(_name(match))) is not None:
                properties = {key: _unescaped(value) for key, value in _PROPERTY.findall(match["properties"])}
                folder = properties.get("WORKING_DIRECTORY", "")
                found[test.name] = RegisteredTest(
                    test.name,
                    test.command,
                    properties.get("LABELS", "").split(";")[0],
                    (listing.parent / folder).resolve() if folder else None,
                    tuple(part for part in properties.get("ENVIRONMENT", "").split(";") if part),
                    tuple(part for part in properties.get("FIXTURES_SETUP", "").split(";") if part),
                    tuple(part for part in properties.get("FIXTURES_REQUIRED", "").split(";") if part),
                )
    return tuple(found.values())


def _name(match: re.Match[str]) -> str:
    return match["bracketed"] if match["bracketed"] is not None else _unescaped(match["quoted"])


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
