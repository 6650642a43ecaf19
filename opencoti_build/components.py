"""Components: the host engine of a platform together with its CPU libraries, built once per set of inputs.

The key of a component is the digest of all that may change one of its bytes: the patched tree, the toolchain's identity, the
target's data, the cache variables, the identity of the cut, and ``SCHEMA``. A component with that key in the cache is the
result; nothing is looked at but the key and the stored files. The build directory is kept beside it as an accelerator: after a
change of the series, or a kill, ninja goes on from there. What it holds is never trusted for more than that: the result is
stored only after the tree proved to be still the one the key names.

``component.json`` (schema 1) lies beside the files::

    {"schema": 1, "key": HEX, "target": NAME, "os", "arch", "engine": "opencoti-VER-TAG", "tree": HEX, "base": {"version", "commit"},
     "toolchain": {"name", "versions": {NAME: VERSION}}, "flags": {CMAKE VARIABLE: VALUE},
     "program": {"file", "size", "sha256", "crc32"},
     "libraries": [{"name", "file", "kind", "variant", "os", "arch", "size", "sha256", "crc32", "abi"}]}
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import files, ninja
from .cache import Cache, digest_of
from .console import Console, human_seconds
from .epoch import source_date
from .errors import BuildError, ChecksumError, ManifestError, ToolchainError
from .project import Identity
from .runner import Runner
from .toolchains.base import FIXED_EPOCH, Setup, Target, Toolchain, load_recipe

SCHEMA = 1
"""Raise it when the way components are built or stored changes without any input changing."""

KIND = "engine"
"""Under which kind the cache keeps results."""


@dataclass(frozen=True)
class BuiltFile:
    """A file of a component: its size in bytes, sha256 in hex, crc32 (as in a ZIP entry, unsigned)."""

    file: str
    size: int
    sha256: str
    crc32: int


@dataclass(frozen=True)
class Library:
    """A backend library, as payload.json lists it; ``build`` is the id of ``build_id``, ``path`` where it lies now."""

    name: str
    file: str
    kind: str
    variant: str
    os: str
    arch: str
    size: int
    sha256: str
    crc32: int
    abi: str
    build: str
    path: Path

    def entry(self) -> dict[str, Any]:
        """The object for payload.json."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "crc32")}


@dataclass(frozen=True)
class Component:
    """An engine built for one target. ``directory`` holds the files; it belongs to the cache and is never written to."""

    key: str
    target: str
    os: str
    arch: str
    engine: str
    tree_id: str
    base_version: str
    base_commit: str | None
    toolchain: str
    versions: Mapping[str, str]
    flags: Mapping[str, str]
    build: str
    directory: Path
    program: BuiltFile
    libraries: tuple[Library, ...]

    @property
    def program_path(self) -> Path:
        """The native program."""
        return self.directory / self.program.file

    def verify(self) -> None:
        """Compare every file with its recorded size and sha256; raises ChecksumError."""
        expected = [(self.program.file, self.program.size, self.program.sha256)]
        expected += [(item.file, item.size, item.sha256) for item in self.libraries]
        for name, size, sha256 in expected:
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != size or files.sha256_file(path) != sha256:
                raise ChecksumError(f"{path} is not the file that was built: remove {self.directory} and build again.")

    def export(self, folder: Path) -> list[Path]:
        """Copy its files and component.json into ``folder``; returns the copies. Raises DiskError."""
        names = [self.program.file, *(library.file for library in self.libraries)]
        for name in names:
            with (self.directory / name).open("rb") as stream, files.atomic_file(folder / name, mode=0o755) as copy:
                shutil.copyfileobj(stream, copy, files.CHUNK)
        files.write_bytes(folder / "component.json", (self.directory / "component.json").read_bytes())
        return [folder / name for name in (*names, "component.json")]


def build_id(key: str, epoch: int | None = None) -> str:
    """``YYMMDDHHMM`` + 3 digits, the same for the same inputs.

    The time is ``epoch`` (seconds), else ``SOURCE_DATE_EPOCH``, else 1980-01-01: never the clock, so that two builds of the
    same inputs agree; the digits come from the key, so that two builds of one minute differ. No input of the key: a release's date
    does not cause a rebuild.
    """
    if epoch is None:
        epoch = source_date() or FIXED_EPOCH
    return time.strftime("%y%m%d%H%M", time.gmtime(epoch)) + f"{int(key[:16], 16) % 1000:03d}"


def build_engine(
    target: Target,
    source: Path,
    tree_id: str,
    toolchain: Toolchain,
    *,
    identity: Identity,
    base_version: str,
    base_commit: str | None,
    variants: Sequence[str] | None,
    cache: Cache,
    console: Console,
    runner: Runner,
    build_root: Path,
    jobs: int | None = None,
    current_tree: Callable[[], str] | None = None,
    epoch: int | None = None,
) -> Component:
    """The engine of ``tree_id`` for ``target``: from the cache, else built from ``source`` below ``build_root``.

    ``variants`` are the CPU libraries to build (None: the target's own list; empty: the program alone). ``current_tree``
    is asked after the build for the tree id that ``source`` has now. Raises ToolchainError, BuildError (the compiler failed, or
    the sources changed meanwhile), BusyError (another run builds there).
    """
    if reason := toolchain.supports(target):
        raise ToolchainError(reason)
    wanted = target.variants if variants is None else tuple(variants)
    flags = cache_variables(target, toolchain, identity=identity, tree_id=tree_id, base_version=base_version, base_commit=base_commit, variants=wanted)
    key = component_key(target, toolchain, tree_id=tree_id, flags=flags, variants=wanted)
    if (component := find_component(cache, key, epoch=epoch)) is not None:
        return component
    directory = build_root / "components" / f"{target.name}-{toolchain.name}"
    directory.mkdir(parents=True, exist_ok=True)
    with files.lock(directory.parent / f".{directory.name}.lock", what=f"the build for {target.name}"):
        started = time.monotonic()
        scratch = directory.parent / f"{directory.name}.tmp"
        scratch.mkdir(exist_ok=True)
        work = directory / "build"
        setup = toolchain.prepare(target, cache, runner, scratch=scratch)
        goals = (*load_recipe().ninja_targets, *(f"bin/{target.library_name(variant)}" for variant in wanted))
        log = directory / "build.log"
        with ninja.lease(directory / "lease", console=console) as lease:
            configure(setup, source, work, directory, flags, console=console, runner=runner, name=target.name, lease=lease)
            touch_changed_sources(source, directory / "sources.json")
            ninja.build(
                setup.tools.ninja,
                work,
                goals,
                environment=setup.environment,
                console=console,
                runner=runner,
                description=f"Building {target.name}",
                jobs=jobs or ninja.default_jobs(),
                log=log,
                lease=lease,
            )
        if current_tree is not None and (now := current_tree()) != tree_id:
            raise BuildError(f"The sources in {source} changed while {target.name} was built (tree {tree_id[:12]}, now {now[:12]}): run the same command again.")
        _store(cache, key, target, toolchain, work, log, flags, identity=identity, tree_id=tree_id, base_version=base_version, base_commit=base_commit, variants=wanted)
        console.success(f"{target.name}: built in {human_seconds(time.monotonic() - started)}.")
    component = find_component(cache, key, epoch=epoch)
    assert component is not None
    return component


def warm(toolchain: Toolchain, targets: Sequence[Target], *, cache: Cache, console: Console, runner: Runner, build_root: Path) -> None:
    """Before engines for several targets are built: what can be done for all of them side by side. Raises ToolchainError."""
    scratch = build_root / "components" / f"{toolchain.name}.tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    toolchain.warm(targets, cache, runner, console, scratch=scratch)


def cache_variables(
    target: Target,
    toolchain: Toolchain,
    *,
    identity: Identity,
    tree_id: str,
    base_version: str,
    base_commit: str | None,
    variants: Sequence[str],
) -> dict[str, str]:
    """The CMake cache variables of the build. Raises BuildError for a base version that is not ``bNUMBER``."""
    number = re.fullmatch(r"b(\d+)", base_version)
    if number is None:
        raise BuildError(f"The base version {base_version!r} is not a llama.cpp build such as b11434.")
    flags = {**load_recipe().cmake, **target.cmake, **target.presets}
    flags.update(
        OPENCOTI_VERSION=identity.version,
        OPENCOTI_TAG=identity.tag,
        OPENCOTI_TREE=tree_id,
        OPENCOTI_BASE=base_version,
        OPENCOTI_CPU_VARIANTS=";".join(variants),
        LLAMA_BUILD_NUMBER=number.group(1),
        LLAMA_BUILD_COMMIT=base_commit[:9] if base_commit else "unknown",
    )
    flags.update(toolchain.cmake_overrides())
    return flags


def component_key(target: Target, toolchain: Toolchain, *, tree_id: str, flags: Mapping[str, str], variants: Sequence[str]) -> str:
    """The digest of everything that may change a byte of the component."""
    recipe = load_recipe()
    return digest_of(
        {
            "schema": SCHEMA,
            "tree": tree_id,
            "toolchain": dict(toolchain.identity(target)),
            "target": target.data(),
            "flags": dict(flags),
            "goals": list(recipe.ninja_targets),
            "variants": list(variants),
        }
    )


def find_component(cache: Cache, key: str, *, epoch: int | None = None) -> Component | None:
    """The component with this key, its files verified; None when it is not there or cannot be used.

    Nothing is removed: building it again replaces the folder. Raises UsageError for a senseless ``SOURCE_DATE_EPOCH``.
    """
    directory = cache.result(KIND, key)
    if not directory.is_dir():
        return None
    try:
        component = read_component(directory, epoch=epoch)
        component.verify()
    except (ManifestError, ChecksumError):
        return None
    return component


def all_components(cache: Cache) -> list[Component]:
    """Every component in the cache, newest first; what cannot be read is left out."""
    folders = sorted(cache.result(KIND, "x").parent.glob("*/component.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = []
    for path in folders:
        with contextlib.suppress(ManifestError):
            found.append(read_component(path.parent))
    return found


def read_component(directory: Path, *, epoch: int | None = None) -> Component:
    """A component from its folder; raises ManifestError when component.json is not what the module's text says."""
    path = directory / "component.json"
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, this toolkit knows {SCHEMA}")
        build = build_id(data["key"], epoch)
        return Component(
            key=data["key"],
            target=data["target"],
            os=data["os"],
            arch=data["arch"],
            engine=data["engine"],
            tree_id=data["tree"],
            base_version=data["base"]["version"],
            base_commit=data["base"]["commit"],
            toolchain=data["toolchain"]["name"],
            versions=dict(data["toolchain"]["versions"]),
            flags=dict(data["flags"]),
            build=build,
            directory=directory,
            program=BuiltFile(**data["program"]),
            libraries=tuple(Library(**entry, build=build, path=directory / entry["file"]) for entry in data["libraries"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path} cannot be read: {error}.") from error


def configure(setup: Setup, source: Path, work: Path, state: Path, flags: Mapping[str, str], *, console: Console, runner: Runner, name: str, lease: int | None) -> None:
    """Run cmake unless this very configuration is in place; start afresh where CMake cannot change its mind (source, compiler).

    ``work`` is the build directory, ``state`` the folder of the record and the log. Raises BuildError.
    """
    source = source.resolve()
    for folder in (source, work.resolve()):
        if bad := set(str(folder)) & set('$`"\\;#' if os.name != "nt" else '$`";#'):
            raise BuildError(f"CMake cannot build below {folder}: its name holds {min(bad)}. Move the checkout to another folder.")
    maps = [*setup.prefix_maps, (work.resolve(), "build"), (source, ".")]
    words = " ".join(_shell_word(f"-ffile-prefix-map={folder.as_posix()}={short}") for folder, short in maps)
    variables = {
        **flags,
        # A list would end at the first space or semicolon; the wrappers' own words come from the toolchain file.
        "OPENCOTI_PREFIX_MAPS": words,
        # No git: upstream would ask the repository around the sources for its version.
        "GIT_EXECUTABLE": "",
        "GIT_EXE": "",
    }
    arguments = [*setup.arguments, *(f"-D{key}={value}" for key, value in variables.items())]
    anchor = {"source": str(source), "toolchain": setup.fingerprint}
    wish = json.dumps({"anchor": anchor, "arguments": arguments}, indent=1, sort_keys=True)
    record = state / "configured.json"
    try:
        before = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        before = None
    if before is not None and (work / "build.ninja").is_file() and json.dumps(before, indent=1, sort_keys=True) == wish:
        return
    if before is None or before.get("anchor") != anchor:
        shutil.rmtree(work, ignore_errors=True)
    record.unlink(missing_ok=True)
    # A variable that is no longer given would keep its last value there.
    (work / "CMakeCache.txt").unlink(missing_ok=True)
    console.step(f"Configuring {name}")
    log = state / "configure.log"
    outcome = runner.run(
        (setup.tools.cmake, "-G", "Ninja", "-S", source, "-B", work, "-Wno-unused-cli", *arguments),
        env=setup.environment,
        check=False,
        log=log,
        pass_fds=() if lease is None else (lease,),
    )
    if outcome.code != 0:
        raise BuildError(f"cmake could not configure {name} (exit code {outcome.code}); the whole log is in {log}.", details=ninja.first_errors(outcome.output))
    files.write_text(record, wish)


def _shell_word(text: str) -> str:
    """``text`` for CMAKE_<LANG>_FLAGS, which ninja hands to /bin/sh, or to CreateProcess on Windows: both know double quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return f'"{text}"'


def touch_changed_sources(source: Path, record: Path) -> None:
    """Make every change of content visible to ninja, which goes by modification times.

    A file may be replaced by one with an older time (a restored backup, an archive with fixed times). All (size, time) pairs
    are noted before a build; a pair that differs from the last note with a time before it is brought to the present.
    """
    try:
        before = json.loads(record.read_text("utf-8"))
        noted, moment = before["files"], before["at"]
    except (OSError, ValueError, KeyError, TypeError):
        noted, moment = {}, 0
    now: dict[str, list[int]] = {}
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name != ".git"]
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
                relative = os.path.relpath(path, source)
                pair = [status.st_size, status.st_mtime_ns]
                if relative in noted and noted[relative] != pair and status.st_mtime_ns <= moment:
                    os.utime(path)
                    status = os.stat(path)
                    pair = [status.st_size, status.st_mtime_ns]
                now[relative] = pair
            except OSError:
                continue
    files.write_text(record, json.dumps({"at": time.time_ns(), "files": now}))


def _store(
    cache: Cache,
    key: str,
    target: Target,
    toolchain: Toolchain,
    work: Path,
    log: Path,
    flags: Mapping[str, str],
    *,
    identity: Identity,
    tree_id: str,
    base_version: str,
    base_commit: str | None,
    variants: Sequence[str],
) -> None:
    """Copy the results out of the build directory into the cache, described, under their final name at once."""
    with cache.producing(KIND, key) as scratch:
        program = _take(work / "bin" / target.program, scratch)
        abi = configured_abi(work) if variants else ""
        libraries = []
        for variant in variants:
            built = _take(work / "bin" / target.library_name(variant), scratch)
            if abi.encode("ascii") not in (scratch / built.file).read_bytes():
                raise BuildError(f"{built.file} does not carry the ABI {abi[:16]}... of this tree: is it a left-over? Remove {work} and build again.")
            libraries.append(
                {
                    "name": built.file,
                    "file": built.file,
                    "kind": "cpu",
                    "variant": variant,
                    "os": target.os,
                    "arch": target.arch,
                    "size": built.size,
                    "sha256": built.sha256,
                    "crc32": built.crc32,
                    "abi": abi,
                }
            )
        shutil.copyfile(log, scratch / "build.log")
        document = {
            "schema": SCHEMA,
            "key": key,
            "target": target.name,
            "os": target.os,
            "arch": target.arch,
            "engine": identity.engine,
            "tree": tree_id,
            "base": {"version": base_version, "commit": base_commit},
            "toolchain": {"name": toolchain.name, "versions": dict(toolchain.versions())},
            "flags": dict(flags),
            "program": asdict(program),
            "libraries": libraries,
        }
        files.write_text(scratch / "component.json", json.dumps(document, indent=2, sort_keys=True) + "\n")


def _take(path: Path, directory: Path) -> BuiltFile:
    """Copy a built file and describe the copy. Raises BuildError when ninja was content without making it."""
    if not path.is_file():
        raise BuildError(f"The build ended well but made no {path.name}: does the series declare it?")
    checksum = 0
    with path.open("rb") as stream, files.atomic_file(directory / path.name, mode=0o755) as copy:
        while block := stream.read(files.CHUNK):
            checksum = zlib.crc32(block, checksum)
            copy.write(block)
    result = directory / path.name
    return BuiltFile(path.name, result.stat().st_size, files.sha256_file(result), checksum)


_ABI_HEADER = Path("ggml", "src", "opencoti", "include", "opencoti-abi.h")
"""Written by the series' CMake files into the build directory; the libraries return its text."""


def configured_abi(work: Path) -> str:
    """The ABI hash (hex) that the series computed for this tree. Raises BuildError when it did not."""
    path = work / _ABI_HEADER
    try:
        found = re.search(r'#define\s+OPENCOTI_ABI\s+"([0-9a-f]{16,64})"', path.read_text("utf-8"))
    except OSError:
        found = None
    if found is None:
        raise BuildError(f"{path} does not tell the ABI of the CPU libraries: does the series hold the patch that makes them?")
    return found.group(1)
