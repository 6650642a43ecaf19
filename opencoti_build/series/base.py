"""The pristine tree that a series stands on, and how it becomes commit 0.

The files go in as a stream for ``git fast-import``: bytes, names and modes exactly as they lie in the folder. Neither ignore rules
nor attributes of the imported tree have a say, and thousands of files cost one pack instead of thousands of loose objects. The pack
is kept in the cache by tree id, so that a second work tree or a rehearsal starts in no time.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import archives
from ..cache import Cache, digest_of
from ..console import Console, Meter, Mode
from ..errors import ChecksumError, DataError
from ..git import EMAIL, NAME, SECONDS, Git

SCHEMA = 1
"""Raise it when the way of importing changes, so that cached packs of the old way are not used."""


@dataclass(frozen=True)
class BaseTree:
    """A pristine tree: ``label`` is its version (``b11434``), ``tree_id`` its git tree id where a pin states it.

    ``locate`` returns the folder with the files; it is called only when they are needed, so that a status costs no download.
    """

    label: str
    locate: Callable[[], Path]
    tree_id: str | None = None

    @classmethod
    def at(cls, path: Path, label: str, tree_id: str | None = None) -> BaseTree:
        """A tree that lies in a folder already."""
        return cls(label, lambda: path, tree_id)

    def identified(self) -> BaseTree:
        """The same tree with its tree id; computed from the files when no pin states it."""
        if self.tree_id is not None:
            return self
        path = self.locate()
        return BaseTree(self.label, lambda: path, tree_id_of(path))


def tree_id_of(folder: Path) -> str:
    """Git tree id of the files below ``folder``; empty folders do not count."""
    found = archives.tree_digest(folder)
    if found.files == 0:
        raise DataError(f"{folder} holds no files: it cannot be the tree a series stands on.")
    return found.tree


def _content(path: Path) -> tuple[bytes, bytes]:
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        return b"120000", os.fsencode(os.readlink(path))
    if not stat.S_ISREG(state.st_mode):
        raise DataError(f"{path} is neither file, folder nor symbolic link: it cannot be part of a tree.")
    return (b"100755" if state.st_mode & stat.S_IXUSR else b"100644"), path.read_bytes()


def import_message(name: str, label: str) -> str:
    """Message of commit 0."""
    return f"Import {name} {label}\n"


@dataclass(frozen=True)
class BasePack:
    """An imported tree in the cache: a folder with one pack, and the ids of its commit and tree."""

    folder: Path
    commit: str
    tree_id: str

    def link_into(self, git: Git) -> None:
        """Make the objects part of a repository: hard links where the file system allows, copies elsewhere."""
        target = git.git_dir / "objects" / "pack"
        target.mkdir(parents=True, exist_ok=True)
        # The index of the pack comes last: git looks for it first, so a pack without one is not seen.
        for source in sorted(self.folder.glob("pack-*"), key=lambda path: path.suffix == ".idx"):
            _link(source, target / source.name)


def _link(source: Path, target: Path) -> None:
    if target.exists() and target.stat().st_size == source.stat().st_size:
        return
    with tempfile.TemporaryDirectory(prefix="tmp_link_", dir=target.parent) as folder:
        temporary = Path(folder) / source.name
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)


def import_base(name: str, base: BaseTree, cache: Cache, console: Console | None = None) -> BasePack:
    """The base tree as commit 0, from the cache or imported now; ``console`` shows how far that is.

    Raises ChecksumError when the files are not the tree that ``base.tree_id`` promises.
    """
    base = base.identified()
    assert base.tree_id is not None
    key = digest_of({"schema": SCHEMA, "name": name, "label": base.label, "tree": base.tree_id})
    folder = cache.result("git-base", key)
    if not folder.is_dir():
        with cache.lock(f"git-base-{key[:16]}", wait_seconds=600):
            if not folder.is_dir():
                with cache.producing("git-base", key) as fresh:
                    _import(name, base, fresh, console or Console(mode=Mode.QUIET))
    try:
        commit, tree_id = (folder / "ids").read_text("ascii").split()
    except (OSError, ValueError) as error:
        raise DataError(f"The cached import {folder} is damaged: delete that folder and run the same command again.") from error
    return BasePack(folder, commit, tree_id)


def _import(name: str, base: BaseTree, folder: Path, console: Console) -> None:
    source = base.locate()
    if not source.is_dir():
        raise DataError(f"{source} is not a folder: the tree of {name} {base.label} is not there.")
    git_dir = folder / "git"
    git = Git.create(git_dir)
    found = list(_files(source))
    with console.progress(f"importing {name} {base.label}", sum(path.lstat().st_size for path, _ in found), unit="bytes") as meter:
        git.feed("fast-import", "--quiet", "--done", "--depth=0", pieces=_stream(import_message(name, base.label), found, meter))
    commit = git.text("rev-parse", "refs/heads/base")
    tree_id = git.tree_of(commit)
    if tree_id != base.tree_id:
        raise ChecksumError(
            f"The files in {source} are not {name} {base.label} as it is pinned: fetch them again ('invoke vendor fetch').",
            details=f"expected tree {base.tree_id}\nactual tree   {tree_id}",
        )
    for pack in (git_dir / "objects" / "pack").glob("pack-*"):
        if pack.suffix in (".pack", ".idx"):
            os.replace(pack, folder / pack.name)
    shutil.rmtree(git_dir)
    (folder / "ids").write_text(f"{commit} {tree_id}\n", "ascii")


def _stream(message: str, found: Iterable[tuple[Path, bytes]], meter: Meter) -> Iterator[bytes]:
    who = f"{NAME} <{EMAIL}> {SECONDS} +0000".encode()
    text = message.encode()
    yield b"commit refs/heads/base\nauthor %s\ncommitter %s\ndata %d\n%s\n" % (who, who, len(text), text)
    for path, name in found:
        mode, data = _content(path)
        yield b"M %s inline %s\ndata %d\n" % (mode, _quoted(name), len(data))
        yield data
        yield b"\n"
        meter.advance(len(data))
    yield b"done\n"


def _files(source: Path) -> Iterator[tuple[Path, bytes]]:
    root = os.fsencode(source)
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(name for name in folders if name not in links)
        for name in sorted(names + links):
            full = os.path.join(folder, name)
            yield Path(os.fsdecode(full)), os.path.relpath(full, root).replace(os.sep.encode(), b"/")


def _quoted(name: bytes) -> bytes:
    return b'"' + name.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
