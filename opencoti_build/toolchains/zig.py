"""The default toolchain: clang, lld and every libc, cross, out of one wheel.

CMake wants programs called cc, c++, ar...; zig is one program with subcommands. So a directory of small wrappers and a
``toolchain.cmake`` is written once per target, into the cache, under the digest of its own text.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..cache import Cache, digest_of
from ..console import Console
from ..errors import ToolchainError
from ..runner import Runner
from .base import BuildTools, Recipe, Setup, Target, ToolSource, ccache_program, ccache_settings, clean_environment, cmake_quote, load_recipe


@dataclass(frozen=True)
class ZigToolchain:
    """Builds for every target of resources/targets.yaml, from any host the wheels exist for."""

    zig: ToolSource
    cmake: ToolSource
    ninja: ToolSource
    name: str = "zig"

    def supports(self, target: Target) -> str | None:
        """zig carries the C library of all of them."""
        return None

    def identity(self, target: Target) -> Mapping[str, Any]:
        """The tools by content, and the words the wrappers add."""
        recipe = load_recipe()
        return {
            "toolchain": self.name,
            "tools": {source.name: [source.version, source.digest] for source in (self.zig, self.cmake, self.ninja)},
            "flags": list(recipe.zig_flags),
        }

    def cmake_overrides(self) -> Mapping[str, str]:
        """None: the recipe is written for it."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """As pinned."""
        return {source.name: source.version for source in (self.zig, self.cmake, self.ninja)}

    def prepare(self, target: Target, cache: Cache, runner: Runner, *, scratch: Path) -> Setup:
        """Unpack the three wheels and write the wrappers, unless both are there already. Raises ToolchainError."""
        program = self.zig.locate()
        tools = BuildTools(self.cmake.locate(), self.ninja.locate())
        zig_cache = self._zig_cache(cache)
        zig_cache.mkdir(parents=True, exist_ok=True)
        folder = write_toolchain(target, load_recipe(), program, tools, zig_cache, cache)
        environment = self._environment(folder, cache, scratch)
        arguments = [f"-DCMAKE_TOOLCHAIN_FILE={(folder / 'toolchain.cmake').as_posix()}"]
        if ccache := ccache_program():
            words, more = ccache_settings(ccache, cache, digest_of(self.identity(target)))
            arguments += words
            environment.update(more)
        return Setup(tools, tuple(arguments), environment, ((program.parent, "zig"),), fingerprint=folder.name)

    def warm(self, targets: Sequence[Target], cache: Cache, runner: Runner, console: Console, *, scratch: Path) -> None:
        """Have zig build its C and C++ runtimes for all ``targets`` side by side.

        It does so when a program is first linked for a target, a minute of work on one core, while CMake waits in its checks.
        """
        folders = [Path(self.prepare(target, cache, runner, scratch=scratch).arguments[0].partition("=")[2]).parent for target in targets]
        cold = [(target, folder) for target, folder in zip(targets, folders, strict=True) if not self._warm_mark(cache, folder).exists()]
        if not cold:
            return
        with console.progress("Building the C++ runtime of " + ", ".join(target.name for target, _ in cold), total=len(cold)) as meter, ThreadPoolExecutor(len(cold)) as pool:
            for done in as_completed([pool.submit(self._link_a_program, target, folder, cache, runner, scratch) for target, folder in cold]):
                done.result()
                meter.advance()

    def _link_a_program(self, target: Target, folder: Path, cache: Cache, runner: Runner, scratch: Path) -> None:
        place = scratch / f"warm-{target.name}"
        place.mkdir(parents=True, exist_ok=True)
        files.write_text(place / "main.cpp", _RUNTIME_USER)
        environment = self._environment(folder, cache, scratch)
        compiler = folder / ("c++.cmd" if os.name == "nt" else "c++")
        # The words CMake adds; they belong to what zig tells one runtime from another by.
        runner.run((compiler, "-O3", "-DNDEBUG", *target.link, *target.link_program, "main.cpp", "-o", "main.exe"), cwd=place, env=environment, error=ToolchainError)
        files.write_text(self._warm_mark(cache, folder), "")

    def link_freestanding(self, target: Target, source: Path, out: Path, compile_words: Sequence[str], link_words: Sequence[str], cache: Cache, runner: Runner) -> None:
        """A C file made into a program that needs no C library, beside ``out``. Raises ToolchainError."""
        zig, folder = self.zig.locate(), out.parent
        self._zig_cache(cache).mkdir(parents=True, exist_ok=True)
        environment = self._environment(folder, cache, folder)
        thing = out.with_name(out.name + ".o")
        triple = f"{target.arch}-{target.os}-none"
        runner.run((zig, "cc", "-target", triple, f"-mcpu={target.cpu}", *compile_words, "-c", source.name, "-o", thing.name), cwd=folder, env=environment, error=ToolchainError)
        runner.run((zig, "ld.lld", *link_words, "-o", out.name, thing.name), cwd=folder, env=environment, error=ToolchainError)

    def _warm_mark(self, cache: Cache, folder: Path) -> Path:
        return self._zig_cache(cache) / f"warm-{folder.name}"

    def _zig_cache(self, cache: Cache) -> Path:
        """zig's own cache: the runtimes of every target, shared by all builds."""
        return cache.root / "zig" / f"{self.zig.version}-{self.zig.digest[:16]}"

    def _environment(self, folder: Path, cache: Cache, scratch: Path) -> dict[str, str]:
        zig_cache = str(self._zig_cache(cache))
        return {**clean_environment((folder,), scratch), "ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache}


_RUNTIME_USER = """#include <iostream>
#include <stdexcept>
#include <thread>
int main() {
    std::thread([] {
        try {
            throw std::runtime_error("thrown");
        } catch (const std::exception & e) {
            std::cout << e.what() << std::endl;
        }
    }).join();
}
"""


def write_toolchain(target: Target, recipe: Recipe, zig: Path, tools: BuildTools, zig_cache: Path, cache: Cache) -> Path:
    """The directory with the wrappers and ``toolchain.cmake`` for ``target``; the same content has the same name."""
    windows = os.name == "nt"
    suffix = ".cmd" if windows else ""
    script = _cmd_script if windows else _sh_script
    flags = ("-target", target.zig_triple, f"-mcpu={target.cpu}", *recipe.zig_flags)
    wrappers = {
        f"cc{suffix}": script(zig, zig_cache, ("cc", *flags), target.rewrite),
        f"c++{suffix}": script(zig, zig_cache, ("c++", *flags), target.rewrite),
        **{f"{tool}{suffix}": script(zig, zig_cache, (tool,), {}) for tool in ("ar", "ranlib", "rc", "dlltool", "lib")},
    }
    key = digest_of([wrappers, _toolchain_cmake(target, tools, suffix)])
    folder = cache.result("toolchain", key)
    if not (folder / "toolchain.cmake").is_file():
        with cache.producing("toolchain", key) as scratch:
            (scratch / "root").mkdir()
            for name, text in wrappers.items():
                files.write_text(scratch / name, text, mode=0o755)
            files.write_text(scratch / "toolchain.cmake", _toolchain_cmake(target, tools, suffix))
    return folder


def _sh_script(zig: Path, zig_cache: Path, words: tuple[str, ...], rewrite: Mapping[str, str]) -> str:
    """A wrapper for /bin/sh: no program but zig is started, so a compile costs one exec more and a millisecond or two."""
    lines = ["#!/bin/sh", f"ZIG_GLOBAL_CACHE_DIR={shlex.quote(str(zig_cache))}", "ZIG_LOCAL_CACHE_DIR=$ZIG_GLOBAL_CACHE_DIR", "export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR"]
    if rewrite:
        lines += ["for word do", "    shift", "    case $word in"]
        lines += [f"        {shlex.quote(old)}) word={shlex.quote(new)} ;;" for old, new in rewrite.items()]
        lines += ["    esac", '    set -- "$@" "$word"', "done"]
    lines.append("exec " + " ".join(shlex.quote(word) for word in (str(zig), *words)) + ' "$@"')
    return "\n".join(lines) + "\n"


def _cmd_script(zig: Path, zig_cache: Path, words: tuple[str, ...], rewrite: Mapping[str, str]) -> str:
    """The same for cmd.exe. Raises ToolchainError where a path holds what cmd.exe cannot quote."""
    for path in (zig, zig_cache):
        if set(str(path)) & set('%"!'):
            raise ToolchainError(f'{path} holds one of % " !, which a Windows command file cannot pass on: set OPENCOTI_CACHE to another folder.')
    if rewrite:
        # cmd.exe's own substitution cannot look for a text with an equals sign in it, and -march=... has one.
        raise ToolchainError("A target whose flags need rewriting cannot be built on a Windows host: build it on Linux, or in WSL.")
    lines = ["@echo off", "setlocal DisableDelayedExpansion", f'set "ZIG_GLOBAL_CACHE_DIR={zig_cache}"', f'set "ZIG_LOCAL_CACHE_DIR={zig_cache}"']
    lines.append(f'"{zig}" ' + " ".join(words) + " %*")
    return "\r\n".join(lines) + "\r\n"


def _toolchain_cmake(target: Target, tools: BuildTools, suffix: str) -> str:
    here = "${CMAKE_CURRENT_LIST_DIR}"
    compile_words = " ".join(target.compile)
    link = {"EXE": (*target.link, *target.link_program), "SHARED": target.link, "MODULE": target.link}
    lines = [
        f"set(CMAKE_SYSTEM_NAME {target.system_name})",
        f"set(CMAKE_SYSTEM_PROCESSOR {target.system_processor})",
        f'set(CMAKE_C_COMPILER "{here}/cc{suffix}")',
        f'set(CMAKE_CXX_COMPILER "{here}/c++{suffix}")',
        f'set(CMAKE_ASM_COMPILER "{here}/cc{suffix}")',
        f'set(CMAKE_RC_COMPILER "{here}/rc{suffix}")',
        *(f'set(CMAKE_{tool.upper()} "{here}/{tool}{suffix}" CACHE FILEPATH "" FORCE)' for tool in ("ar", "ranlib")),
        f"set(CMAKE_MAKE_PROGRAM {cmake_quote(tools.ninja)} CACHE FILEPATH \"\" FORCE)",
        "# Checks are made with the words of the build: zig would else build its runtime a second time, for them alone.",
        "set(CMAKE_TRY_COMPILE_CONFIGURATION Release)",
        *(f'set(CMAKE_{language}_FLAGS_INIT "{compile_words} ${{OPENCOTI_PREFIX_MAPS}}")' for language in ("C", "CXX")),
        *(f'set(CMAKE_{kind}_LINKER_FLAGS_INIT "{" ".join(words)}")' for kind, words in link.items()),
        "# Archives without times and owners; the index is written at once, so ranlib is not needed.",
        *(
            f'set(CMAKE_{language}_ARCHIVE_{step} "{command}")'
            for language in ("C", "CXX", "ASM")
            for step, command in (("CREATE", "<CMAKE_AR> qcsD <TARGET> <LINK_FLAGS> <OBJECTS>"), ("APPEND", "<CMAKE_AR> qsD <TARGET> <LINK_FLAGS> <OBJECTS>"), ("FINISH", ""))
        ),
        "# Nothing of this machine is looked at: no program, no library, no header.",
        f'set(CMAKE_FIND_ROOT_PATH "{here}/root")',
        *(f"set(CMAKE_FIND_ROOT_PATH_MODE_{what} ONLY)" for what in ("PROGRAM", "LIBRARY", "INCLUDE", "PACKAGE")),
        *(f"set(CMAKE_FIND_USE_{what} OFF)" for what in ("CMAKE_ENVIRONMENT_PATH", "SYSTEM_ENVIRONMENT_PATH", "CMAKE_SYSTEM_PATH", "PACKAGE_REGISTRY", "CMAKE_SYSTEM_PACKAGE_REGISTRY")),
        'set(ENV{PKG_CONFIG_LIBDIR} "/nonexistent")',
    ]
    return "\n".join(lines) + "\n"
