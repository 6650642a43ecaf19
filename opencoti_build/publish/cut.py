"""Reads what is to be published: the folder of a cut, and the files of the checkout that are mirrored."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .. import checksums
from ..console import Console
from ..errors import ChecksumError, GitError, PublishError
from ..git import Git
from ..project import Identity
from ..release_layout import Layout, identity_of
from .tree import Content, read_content


@dataclass(frozen=True)
class LocalFile:
    """A file here and its published place; ``name`` is what plans call it, relative to the checkout where it lies in there."""

    place: str
    path: Path
    content: Content
    name: str


@dataclass(frozen=True)
class Release:
    """Everything that is to be published of one cut. ``mirrored`` names the published files and folders that a mirror owns whole."""

    identity: Identity
    files: tuple[LocalFile, ...]
    mirrored: tuple[str, ...]

    def of_the_cut(self) -> tuple[LocalFile, ...]:
        """The files of the cut itself, without what is mirrored."""
        return tuple(file for file in self.files if not _below(file.place, self.mirrored))


def read(cut: Path, root: Path, layout: Layout, console: Console) -> Release:
    """The cut in the folder ``cut`` (its name is the full tag), and the mirrored files of the checkout ``root``.

    Raises PublishError for a folder that is no whole cut, ChecksumError when SHA256SUMS is not about these bytes, ManifestError, DiskError.
    """
    if not cut.is_dir():
        raise PublishError(f"There is no cut at {cut}: make it with 'invoke release cut', or name its folder with --cut.")
    identity = identity_of(cut.resolve().name)
    if identity is None:
        raise PublishError(f"{cut} is not named as a cut is, llamafile-vVER+opencoti.TAG: name the folder of a cut with --cut.")
    names = list(walk(cut))
    if missing := [name for name in layout.required if name not in names]:
        raise PublishError(f"The cut {cut} is not whole: {missing[0]} is missing; make the cut again.")
    places = {layout.place(name, identity): cut / name for name in names}
    if not any("/" not in place for place in places):
        raise PublishError(f"The cut {cut} holds no single file: make the cut again.")
    git = _repository(root)
    mirrored = []
    for rule in layout.mirror:
        for source in rule.sources:
            if found := _versioned(root, source, git):
                mirrored.append(rule.to)
                places |= {rule.to + name.removeprefix(source): root / name for name in found}
                break
    contents = _read_all(list(places.values()), console)
    release = Release(identity, tuple(LocalFile(place, path, contents[path], _name(path, root)) for place, path in sorted(places.items())), tuple(mirrored))
    _check_sums(cut, layout, {name: contents[cut / name] for name in names})
    return release


def walk(folder: Path) -> Iterator[str]:
    """The names of all files below ``folder``, sorted. Raises PublishError for anything that is neither file nor folder: a link's
    target would be published, or not, as a client pleases."""
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders.sort()
        for name in sorted(folders + names):
            path = Path(parent) / name
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "neither file nor folder"
                raise PublishError(f"{path} is {kind}: put the file itself there.")
            if stat.S_ISREG(mode):
                yield path.relative_to(folder).as_posix()


def _refuse(error: OSError) -> None:
    raise PublishError(f"Cannot read {error.filename}: {error.strerror or error}.") from error


def _repository(root: Path) -> Git | None:
    try:
        return Git.discover(root).with_work_tree(root)
    except GitError:
        return None


def _versioned(root: Path, source: str, git: Git | None) -> Sequence[str]:
    """The files of ``source``, a file or a folder, that git tracks, so that nothing else that lies there is published; all of them outside git."""
    path = root / source
    if path.is_symlink():
        raise PublishError(f"{path} is a symbolic link: put the files themselves there.")
    here = [source] if path.is_file() else [f"{source}/{name}" for name in walk(path)] if path.is_dir() else []
    if git is None:
        return here
    tracked = set(git.names("ls-files", "-z", "--", source))
    if gone := sorted(tracked.difference(here)):
        raise PublishError(f"{root / gone[0]} is under version control and not there: bring it back, or commit that it is gone.")
    return [name for name in here if name in tracked]


def _read_all(paths: Sequence[Path], console: Console) -> dict[Path, Content]:
    total = sum(path.stat().st_size for path in paths)
    with console.progress("hashing", total, unit="bytes") as meter, ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return dict(zip(paths, pool.map(lambda path: read_content(path, meter.advance), paths), strict=True))


def _check_sums(cut: Path, layout: Layout, contents: dict[str, Content]) -> None:
    sums = {row.name: row.sha256 for row in checksums.read(cut / checksums.NAME)}
    for name, content in contents.items():
        if name in sums and sums[name] != content.sha256:
            raise ChecksumError(f"{cut / name} is not the file that {checksums.NAME} names: make the cut again.")
        if name not in sums and layout.needs_sum(name):
            raise ChecksumError(f"{cut / name} is not in {checksums.NAME}: make the cut again.")
    if gone := sorted(sums.keys() - contents.keys()):
        raise ChecksumError(f"{checksums.NAME} names {gone[0]}, which is not in {cut}: make the cut again.")


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _below(place: str, roots: Iterable[str]) -> bool:
    return any(place == root or place.startswith(f"{root}/") for root in roots)
