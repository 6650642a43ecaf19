"""Pins become folders: fetch -> verify while streaming -> unpack -> the tree digest must match.

``load_pins`` reads ``vendors/``; a ``Fetcher`` brings what a pin names into the cache and hands out paths there. Whichever source
delivers, the unpacked folder has the pinned git tree id, or the source is refused and the next one tried. Folders handed out are shared
and must not be written to.
"""

from __future__ import annotations

import json
import os
import platform as machine
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import requests

from . import archives, files, git_source
from .archives import Limits, TreeDigest, Unpacked
from .cache import Cache
from .console import Console, human_bytes
from .download import Address, Candidate, Downloader, Policy, Wanted
from .errors import ArchiveError, ChecksumError, DataError, DownloadError, GitError, OfflineError, OpencotiError, UsageError
from .pypi import Index
from .runner import Runner
from .vendor_pin import ANY, PLATFORMS, Archive, GitSource, Kind, LicenceFile, Package, Pin, PypiSource, Role, Source, UrlSource, find_pin, load_pin, load_pins

__all__ = [
    "ANY", "PLATFORMS", "Archive", "Fetcher", "Finding", "GitSource", "Kind", "LicenceFile", "Outcome", "Package", "Pin", "PypiSource", "Role",
    "Source", "State", "UrlSource", "ensure", "find_pin", "host_platform", "load_pin", "load_pins",
]  # fmt: skip

_RECEIVING = re.compile(r"Receiving objects:\s+\d+% \((\d+)/(\d+)\)")


def host_platform() -> str:
    """The platform this Python runs on, in the spelling of pins. Raises UsageError for one that no pin can name."""
    system = {"linux": "linux", "win32": "windows", "darwin": "macos"}.get(sys.platform, sys.platform)
    processor = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}.get(machine.machine().lower(), machine.machine().lower())
    name = f"{system}-{processor}"
    if name not in PLATFORMS:
        raise UsageError(f"No toolchain is pinned for {name}; known are {', '.join(PLATFORMS)}.")
    return name


class State(Enum):
    """How far a pin is on this machine."""

    UNPACKED = "unpacked"
    CACHED = "cached"
    ABSENT = "absent"
    INCOMPLETE = "no tree digest"
    ELSEWHERE = "other platforms"


class Outcome(Enum):
    """What ``verify`` found about one thing."""

    OK = "ok"
    ABSENT = "absent"
    WRONG = "WRONG"


@dataclass(frozen=True)
class Finding:
    """One thing that was verified: a file or an unpacked folder of a pin."""

    pin: str
    what: str
    outcome: Outcome
    detail: str = ""


class Context(Protocol):
    """What ``ensure`` needs of a command's context."""

    @property
    def cache(self) -> Cache: ...
    @property
    def console(self) -> Console: ...
    @property
    def runner(self) -> Runner: ...
    @property
    def offline(self) -> bool: ...


def ensure(pin: Pin, context: Context) -> Path:
    """The unpacked folder of ``pin`` for this platform, fetched if need be; see ``Fetcher.unpacked``."""
    return Fetcher(context.cache, context.console, context.runner, offline=context.offline).unpacked(pin)


@dataclass(frozen=True)
class _PypiCandidate:
    source: PypiSource
    index: Index

    @property
    def label(self) -> str:
        return str(self.source)

    def locate(self) -> str:
        return self.index.find(self.source.project, self.source.archive.file).url


class Fetcher:
    """Brings pins into ``cache``. ``platform`` is the one packages are chosen for (default: this machine's)."""

    def __init__(
        self,
        cache: Cache,
        console: Console,
        runner: Runner,
        *,
        offline: bool = False,
        platform: str | None = None,
        session: requests.Session | None = None,
        index: Index | None = None,
        policy: Policy = Policy(),  # noqa: B008 - frozen
    ) -> None:
        self.cache = cache
        self.console = console
        self.runner = runner
        self.offline = offline
        self.platform = platform or host_platform()
        self.session = session if session is not None else requests.Session()
        self.session.headers["User-Agent"] = "opencoti-build"
        self.index = index if index is not None else Index(runner, self.session)
        self.downloader = Downloader(cache, console, offline=offline, session=self.session, policy=policy)

    def archive(self, pin: Pin) -> Path:
        """The verified archive of ``pin`` in the cache: the first that its sources deliver.

        Raises DataError for a pin that has only git sources, else what ``Downloader.fetch`` raises.
        """
        package = pin.package(self.platform)
        if not package.archives:
            raise DataError(f"{pin.name} {pin.version} has no archive, only git sources.")
        problems: list[OpencotiError] = []
        for archive in self._cached_first(package):
            try:
                return self._download(pin, package, archive)
            except (DownloadError, ChecksumError, OfflineError) as error:
                problems.append(error)
        raise _summary(pin, problems)

    def fetch(self, pin: Pin) -> Path:
        """``unpacked``, and what it was unpacked from lies in the cache as well, right to the last byte: a later run may need it.

        Every archive of the pin that is in the cache is hashed again; one that is not the pinned file is kept aside and brought anew. When
        none is there, the first that its sources deliver is brought. A folder that came from git needs no archive.
        """
        folder = self.unpacked(pin)
        package = pin.package(self.platform)
        for archive in package.archives:
            if archive.size is not None:
                self._sound(pin, package, archive)
        if package.archives and not any(self._have(archive) for archive in package.archives) and not _came_from_git(folder.parent, package):
            self.archive(pin)
        return folder

    def unpacked(self, pin: Pin) -> Path:
        """The folder with the content of ``pin``, whose git tree id is the pinned one. It is shared: do not write to it.

        Raises DataError when the pin has no tree digest yet, ChecksumError, DownloadError, OfflineError, ArchiveError, DiskError.
        """
        package = pin.package(self.platform)
        if package.tree is None:
            raise DataError(
                f"vendors/{pin.name}.yaml has no tree digest, so nothing can be checked against it: "
                f"run 'invoke vendor bump {pin.name} {pin.version}' where its sources can be reached; it fetches, computes and writes what is missing."
            )
        key = result_key(pin, package)
        content = self.cache.result(pin.kind.folder, key) / "content"
        if _whole(content, package):
            return content
        with self.cache.lock(f"unpack-{key}", wait_seconds=3600.0):
            if _whole(content, package):
                return content
            if content.exists():
                self.console.warn(f"{content} was changed after it was unpacked: unpacking it again")
            self._produce(pin, package, key)
        return content

    def tool(self, pin: Pin, name: str) -> Path:
        """A program of the pin by the name under ``tools``. Raises DataError when the pin does not name it, else as ``unpacked``."""
        tools = pin.package(self.platform).tools
        if name not in tools:
            raise DataError(f"vendors/{pin.name}.yaml names no tool {name!r} for {self.platform}, only {', '.join(tools) or 'none'}.")
        return self.unpacked(pin) / tools[name]

    def state(self, pin: Pin) -> State:
        """How far ``pin`` is, by a look at names and sizes."""
        if not pin.covers(self.platform):
            return State.ELSEWHERE
        package = pin.package(self.platform)
        if package.tree is not None and _whole(self.cache.result(pin.kind.folder, result_key(pin, package)) / "content", package):
            return State.UNPACKED
        if package.tree is None:
            return State.INCOMPLETE
        return State.CACHED if any(self._have(archive) for archive in package.archives) else State.ABSENT

    def verify(self, pin: Pin) -> list[Finding]:
        """Hash again all that the cache holds of ``pin``, for every platform. What is wrong is moved aside, so the next fetch replaces it.

        What cannot be looked at or moved is a finding as well: the others are checked all the same.
        """
        findings: list[Finding] = []
        for name, package in pin.packages.items():
            here = name in (ANY, self.platform)
            suffix = "" if name == ANY else f" ({name})"
            again = f"'invoke vendor fetch {pin.name}{'' if here else f' --platform {name}'}' brings it again"
            present = False
            for archive in package.archives:
                if archive.size is not None and os.path.lexists(self.cache.blob(archive.sha256)):
                    present = True
                    findings.append(self._verify_archive(pin, archive, suffix, again))
            if package.tree is not None and os.path.lexists(self.cache.result(pin.kind.folder, result_key(pin, package))):
                present = True
                findings.append(self._verify_tree(pin, package, suffix, again))
            if not present and here:
                findings.append(Finding(pin.name, f"{pin.version}{suffix}", Outcome.ABSENT))
        return findings

    def _verify_archive(self, pin: Pin, archive: Archive, suffix: str, again: str) -> Finding:
        what = archive.file + suffix
        wanted = _wanted(archive)
        try:
            damage = self.downloader.check(wanted)
        except OpencotiError as error:
            return Finding(pin.name, what, Outcome.WRONG, error.message)
        if damage is None:
            return Finding(pin.name, what, Outcome.OK, f"{human_bytes(wanted.size)}, sha256 {wanted.sha256[:16]}...")
        detail = f"expected {wanted.size} bytes, sha256 {wanted.sha256}; {damage}; {again}"
        return Finding(pin.name, what, Outcome.WRONG, detail)

    def _verify_tree(self, pin: Pin, package: Package, suffix: str, again: str) -> Finding:
        assert package.tree is not None and package.unpacked is not None
        key = result_key(pin, package)
        result = self.cache.result(pin.kind.folder, key)
        what = f"{pin.version} unpacked{suffix}"
        problem = ""
        try:
            with self.cache.lock(f"unpack-{key}", wait_seconds=3600.0):
                try:
                    with self.console.progress(f"{pin.name} {what}", package.unpacked, unit="bytes") as meter:
                        found = archives.tree_digest(result / "content", executables=_executables(result), progress=meter.advance)
                    if found.tree == package.tree:
                        return Finding(pin.name, what, Outcome.OK, f"{package.files} files, tree {found.tree[:16]}...")
                    problem = f"expected tree {package.tree}, found {found.tree} ({found.files} files, {found.size} bytes); "
                    kept = self.cache.rejected(key, found.tree)
                except OpencotiError as error:
                    problem = f"{error.message.removesuffix('.')}; "
                    kept = self.cache.rejected(key, "unreadable")
                return Finding(pin.name, what, Outcome.WRONG, f"{problem}moved to {files.put_aside(result, kept)}; {again}")
        except OpencotiError as error:
            return Finding(pin.name, what, Outcome.WRONG, problem + error.message)

    def _produce(self, pin: Pin, package: Package, key: str) -> None:
        """Unpack from the first source that gives the pinned tree."""
        problems: list[OpencotiError] = []
        for source in self._sources(package):
            try:
                with self.cache.producing(pin.kind.folder, key) as directory:
                    found, unpacked = self.extract(pin, package, source, directory / "content")
                    if found.tree != package.tree:
                        actual = f"{found.tree} ({found.files} files, {found.size} bytes)"
                        raise ChecksumError(f"{source}: the unpacked folder is another one; expected tree {package.tree}, got {actual}.")
                    record = {"pin": pin.name, "version": pin.version, "source": str(source), "tree": found.tree, "executables": sorted(unpacked.executables)}
                    files.write_text(directory / "unpacked.json", json.dumps(record, indent=1) + "\n")
                return
            except (DownloadError, ChecksumError, OfflineError, GitError, ArchiveError) as error:
                problems.append(error)
                if not isinstance(error, OfflineError) and len(package.sources) > 1:
                    self.console.warn(f"{pin.name}: {error.message}")
        raise _summary(pin, problems)

    def extract(self, pin: Pin, package: Package, source: Source, directory: Path) -> tuple[TreeDigest, Unpacked]:
        """Fetch one source and unpack it into the new ``directory``; its tree is computed from the files written, not compared."""
        with files.disk_errors(directory):
            directory.mkdir()
        if isinstance(source, GitSource):
            with self._git_tar(pin, source) as (tar, _):
                return self._unpack(pin, package, tar, directory, "", tar.stat().st_size)
        self._sound(pin, package, source.archive)
        blob = self._download(pin, package, source.archive)
        assert source.archive.size is not None
        return self._unpack(pin, package, blob, directory, source.folder, source.archive.size)

    def commit_of(self, pin: Pin, source: GitSource) -> str:
        """The commit a git source names now. Raises GitError, OfflineError."""
        with self._git_tar(pin, source) as (_, commit):
            return commit

    def _unpack(self, pin: Pin, package: Package, archive: Path, directory: Path, folder: str, size: int) -> tuple[TreeDigest, Unpacked]:
        # Not yet known sizes are bounded by what real sources compress to; a bomb is a thousand times.
        limits = Limits(package.unpacked, package.files or archives.FILE_LIMIT) if package.unpacked is not None else Limits(max(64 << 20, 40 * size))
        with self.console.progress(f"unpack {pin.name} {pin.version}", package.unpacked, unit="bytes") as meter:
            tools = tuple(package.tools.values())
            unpacked = archives.unpack(archive, directory, limits=limits, folder=folder, executables=tools, links=pin.links, progress=meter.advance)
        return archives.tree_digest(directory, executables=unpacked.executables if os.name == "nt" else None), unpacked

    @contextmanager
    def _git_tar(self, pin: Pin, source: GitSource) -> Iterator[tuple[Path, str]]:
        if self.offline:
            raise OfflineError(f"{source} needs a network and offline was asked for: run 'invoke vendor fetch {pin.name}' once with one.")
        with self.scratch(pin.name) as folder, self.console.progress(f"git {pin.name} {source.tag}") as meter:

            def watch(line: str) -> None:
                if match := _RECEIVING.search(line):
                    meter.set(int(match[1]), int(match[2]))

            yield git_source.fetch_tar(self.runner, source.url, source.tag, pin.commit, folder, on_line=watch)

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A folder for work in progress, on the cache's file system; gone at the end, and after a day if the run was killed."""
        work = self.cache.root / "work"
        with files.disk_errors(work):
            work.mkdir(parents=True, exist_ok=True)
            files.remove_stale(work, "*.tmp")
            made = tempfile.TemporaryDirectory(prefix=f"{name}.", suffix=".tmp", dir=work, ignore_cleanup_errors=True)
        with made as folder:
            yield Path(folder)

    def candidates(self, sources: Iterable[Source], archive: Archive) -> list[Candidate]:
        """The places among ``sources`` that offer ``archive``, in order."""
        found: list[Candidate] = []
        for source in sources:
            if isinstance(source, PypiSource) and source.archive == archive:
                found.append(_PypiCandidate(source, self.index))
            elif isinstance(source, UrlSource) and source.archive == archive:
                found.append(Address(source.url))
        return found

    def _download(self, pin: Pin, package: Package, archive: Archive) -> Path:
        return self.downloader.fetch(_wanted(archive), self.candidates(package.sources, archive), hint=f"invoke vendor fetch {pin.name}")

    def _sound(self, pin: Pin, package: Package, archive: Archive) -> None:
        """Bring an archive anew that was damaged after its download; its bytes are kept aside. One that is not in the cache is left alone."""
        if damage := self.downloader.check(_wanted(archive)):
            self.console.warn(f"{archive.file} in the cache is not the pinned file: {damage}; fetching it again")
            self._download(pin, package, archive)

    def _have(self, archive: Archive) -> bool:
        return archive.size is not None and self.downloader.have(_wanted(archive))

    def _cached_first(self, package: Package) -> list[Archive]:
        return sorted(package.archives, key=lambda archive: not self._have(archive))

    def _sources(self, package: Package) -> list[Source]:
        """What to unpack from, in order: archives the cache holds first; sources of the same archive and folder count once."""
        distinct: dict[object, Source] = {}
        for source in package.sources:
            distinct.setdefault(source if isinstance(source, GitSource) else (source.archive.sha256, source.folder), source)
        return sorted(distinct.values(), key=lambda source: isinstance(source, GitSource) or not self._have(source.archive))


def result_key(pin: Pin, package: Package) -> str:
    """Names the unpacked folder: its content alone decides, name and version are for people."""
    assert package.tree is not None
    return f"{pin.name}-{pin.version}-{package.tree[:16]}"


def _wanted(archive: Archive) -> Wanted:
    if archive.size is None:
        raise DataError(f"The pin of {archive.file} has no size yet: complete it with 'invoke vendor bump'.")
    return Wanted(archive.file, archive.size, archive.sha256)


def _whole(content: Path, package: Package) -> bool:
    """Whether the folder has the pinned number of files and bytes: cheap, and finds what a lost power supply or a stray hand did."""
    try:
        return _census(content) == (package.files, package.unpacked)
    except OSError:
        return False


def _census(directory: Path | str) -> tuple[int, int]:
    count = size = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner_count, inner_size = _census(entry.path)
                count, size = count + inner_count, size + inner_size
            else:
                information = entry.stat(follow_symlinks=False)
                count += 1
                size += information.st_size if stat.S_ISREG(information.st_mode) or stat.S_ISLNK(information.st_mode) else -1
    return count, size


def _executables(result: Path) -> Sequence[str] | None:
    """What was executable when it was unpacked; asked where the file system cannot tell."""
    if os.name != "nt":
        return None
    try:
        return [str(path) for path in json.loads((result / "unpacked.json").read_text("utf-8"))["executables"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _came_from_git(result: Path, package: Package) -> bool:
    """Whether the unpacked folder was made from a git source, and so from no archive."""
    try:
        source = json.loads((result / "unpacked.json").read_text("utf-8"))["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return source in [str(source) for source in package.sources if isinstance(source, GitSource)]


def _summary(pin: Pin, problems: list[OpencotiError]) -> OpencotiError:
    """One error for all sources. Wrong bytes outrank an unreachable source: they are the news."""
    if len(problems) == 1:
        return problems[0]
    offline = [problem for problem in problems if isinstance(problem, OfflineError)]
    if len(offline) == len(problems):
        return offline[0]
    details = "\n".join(f"  {problem.message}" + (f"\n{problem.details}" if problem.details else "") for problem in problems)
    for kind in (ChecksumError, ArchiveError):
        if any(isinstance(problem, kind) for problem in problems):
            return kind(f"{pin.name} {pin.version}: no source gives the pinned content.", details=details)
    return DownloadError(f"{pin.name} {pin.version}: no source can be reached; check the network and run the same command again (it resumes).", details=details)
