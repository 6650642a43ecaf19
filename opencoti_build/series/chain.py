"""The series as commits: one after the other in the object database, no work tree involved."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .. import patchfile
from ..cache import Cache
from ..console import Console
from ..errors import DataError, PatchError
from ..git import Git
from ..patchfile import PatchFile
from .base import BasePack, BaseTree, import_base
from .engine import Attempt, Outcome, attempt
from .folder import Series, SeriesFolder

SCHEMA = 1
"""Raise it when the same series would give other commits."""


class OnAbsorbed(Enum):
    """What to do with a patch that the tree has already."""

    STOP = "stop"
    KEEP = "keep"
    """As an empty commit."""
    DROP = "drop"


@dataclass(frozen=True)
class Link:
    """A patch as a commit; ``attempt`` says how it got there."""

    patch: PatchFile
    commit: str
    tree: str
    attempt: Attempt

    @property
    def outcome(self) -> Outcome:
        """How the patch went on."""
        return self.attempt.outcome


@dataclass(frozen=True)
class Chain:
    """Commits of the patches that went on, and the first that did not, if any."""

    base: str
    base_tree: str
    links: tuple[Link, ...]
    failed: tuple[PatchFile, Attempt] | None = None
    absorbed: tuple[PatchFile, ...] = ()
    """Patches left out because the tree has them already (only where that was asked for)."""

    @property
    def commit(self) -> str:
        """The last commit."""
        return self.links[-1].commit if self.links else self.base

    @property
    def tree(self) -> str:
        """The tree of the last commit."""
        return self.links[-1].tree if self.links else self.base_tree


def build(
    git: Git, commit: str, patches: Iterable[PatchFile], *, merge: bool = False, absorbed: OnAbsorbed = OnAbsorbed.STOP, made_on: str | None = None
) -> Chain:
    """Commit ``patches`` one after the other onto ``commit``, up to the first that does not go on.

    Without ``merge`` only exact matches (an offset counts) are taken; with it 3-way merges and renamed targets are taken too, and
    ``absorbed`` says what becomes of a patch that the tree has already.
    """
    parent = git.text("rev-parse", "--verify", commit)
    tree = git.tree_of(parent)
    base, base_tree = parent, tree
    links: list[Link] = []
    left_out: list[PatchFile] = []
    for patch in patches:
        tried = attempt(git, tree, patch, merge=True, made_on=made_on)
        if tried.outcome is Outcome.ABSORBED:
            if absorbed is OnAbsorbed.DROP:
                left_out.append(patch)
                continue
            takes = absorbed is OnAbsorbed.KEEP
        else:
            takes = tried.tree is not None and (merge or tried.outcome.applies)
        if not takes:
            return Chain(base, base_tree, tuple(links), (patch, tried), tuple(left_out))
        assert tried.tree is not None
        tree = tried.tree
        parent = git.commit(tree, parent, patch.message.text(patch.number))
        links.append(Link(patch, parent, tree, tried))
    return Chain(base, base_tree, tuple(links), None, tuple(left_out))


def export_commit(git: Git, commit: str, *, number: int | None = None) -> PatchFile:
    """The patch file of a commit. The number is the commit's own (see ``patchfile.take_number``) unless given."""
    try:
        own, message = patchfile.take_number(git.message(commit))
    except DataError as error:
        raise DataError(f"Commit {commit[:12]}: {error.message}") from error
    number = number if number is not None else own
    if number is None:
        raise DataError(
            f"Commit {commit[:12]} '{message.subject}' has no number: start its subject with four digits ('0010 area: sentence'), add a line 'Number: 0010', or give --numbers."
        )
    return patchfile.make(number, message, git.diff(f"{commit}^", commit))


@contextlib.contextmanager
def scratch_repository(pack: BasePack, *more: BasePack) -> Iterator[Git]:
    """A throw-away repository with imported trees in it."""
    with tempfile.TemporaryDirectory(prefix="opencoti-series.") as folder:
        git = Git.create(Path(folder) / "git")
        for item in (pack, *more):
            item.link_into(git)
        git.set_ref("refs/heads/base", pack.commit)
        yield git


@dataclass(frozen=True)
class PatchedTree:
    """Identity of a patched source: what a manifest records."""

    base_label: str
    base_tree: str
    tree_id: str
    commit: str
    patches: tuple[PatchFile, ...]


def patched_tree(folder: SeriesFolder, base: BaseTree, cache: Cache) -> PatchedTree:
    """Tree and commit id of the base with the whole series on it, without any work tree; from the cache when nothing changed.

    Raises PatchError when a patch does not apply.
    """
    series, base = folder.load(), base.identified()
    assert base.tree_id is not None
    known = recall(series, base, folder.name, cache)
    if known is None:
        with scratch_repository(import_base(folder.name, base, cache)) as git:
            chain = build(git, "refs/heads/base", series.patches)
        if chain.failed is not None:
            raise PatchError(f"{failure(*chain.failed)} Run 'invoke patches apply' to see and settle it.", details=chain.failed[1].log)
        known = (chain.tree, chain.commit)
        remember(series, base, folder.name, cache, *known)
    return PatchedTree(base.label, base.tree_id, known[0], known[1], series.patches)


def recall(series: Series, base: BaseTree, name: str, cache: Cache) -> tuple[str, str] | None:
    """Tree and commit id of this very series on this very base, if they have been computed before."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        data = json.loads((cache.result("series", _key(series, base, name)) / "tree.json").read_text("ascii"))
        return str(data["tree"]), str(data["commit"])
    return None


def remember(series: Series, base: BaseTree, name: str, cache: Cache, tree: str, commit: str) -> None:
    """Keep tree and commit id for the next time."""
    with cache.producing("series", _key(series, base, name)) as fresh:
        (fresh / "tree.json").write_text(json.dumps({"tree": tree, "commit": commit}), "ascii")


def _key(series: Series, base: BaseTree, name: str) -> str:
    assert base.tree_id is not None
    return series.digest(f"{name} {base.label} {base.tree_id}", SCHEMA)


def failure(patch: PatchFile, tried: Attempt) -> str:
    """The sentence for a patch that does not go on."""
    reasons = {
        Outcome.MERGED: "fits only by a 3-way merge",
        Outcome.ABSORBED: "is in the tree already",
        Outcome.RENAMED: "changes a file that has another name now",
        Outcome.DELETED: "changes a file that is gone",
        Outcome.CONFLICT: "does not apply",
    }
    note = f" ({tried.note})" if tried.note else ""
    return f"{patch.name} {reasons[tried.outcome]}{note}."


def record(folder: SeriesFolder, base: BaseTree, cache: Cache) -> tuple[PatchFile, Attempt] | None:
    """Write ``series.yaml`` anew, with the tree that the series gives; returns the first patch that does not apply, if any."""
    base = base.identified()
    assert base.tree_id is not None
    folder.write_list(base_version=base.label, base_tree=base.tree_id, tree="")
    series = folder.load()
    with scratch_repository(import_base(folder.name, base, cache)) as git:
        chain = build(git, "refs/heads/base", series.patches)
    if chain.failed is None:
        folder.write_list(base_version=base.label, base_tree=base.tree_id, tree=chain.tree)
        remember(folder.load(), base, folder.name, cache, chain.tree, chain.commit)
    return chain.failed


def export_repository(
    folder: SeriesFolder, repository: Path, base_revision: str, console: Console, *, base_tree: str | None = None, numbers: Sequence[int] = ()
) -> list[PatchFile]:
    """Write the commits ``base_revision..HEAD`` of any git repository as patches of the series.

    A commit's number is the one in its message (``patchfile.take_number``), else that of the patch with the same subject in the
    folder, else the next of ``numbers``; several commits of one number are refused. The differences are written by a repository of our own, so that neither attributes nor settings of that one matter.
    Patches of other numbers stay as they are. Nothing is written before every commit has been read.
    """
    source = Git.discover(repository)
    start, tip = source.resolve(f"{base_revision}^{{commit}}"), source.resolve("HEAD^{commit}")
    if start is None or tip is None:
        raise DataError(f"{repository} has no commit {base_revision if start is None else 'HEAD'}: name the commit that the patches start from.")
    if base_tree is not None and source.tree_of(start) != base_tree:
        console.warn(f"{base_revision} in {repository} is tree {source.tree_of(start)}, the base of the series is {base_tree}.")
    commits = source.commits(start, tip)
    if not commits:
        raise DataError(f"{repository} has no commit after {base_revision}: commit the changes there first.")
    found: dict[int, PatchFile] = {}
    waiting = list(numbers)
    known = _numbers_by_subject(folder)
    with tempfile.TemporaryDirectory(prefix="opencoti-export.") as scratch:
        git = Git.create(Path(scratch) / "git")
        objects = source.text("rev-parse", "--git-path", "objects")
        (git.git_dir / "objects" / "info").mkdir(parents=True, exist_ok=True)
        (git.git_dir / "objects" / "info" / "alternates").write_text(str((source.git_dir / objects).resolve()) + "\n", "utf-8")
        for commit in commits:
            parents = git.text("rev-list", "--parents", "-n", "1", commit).split()[1:]
            if len(parents) != 1:
                raise DataError(f"Commit {commit[:12]} in {repository} is a merge: a series is a line of commits, rebase it first.")
            own, message = patchfile.take_number(git.message(commit))
            number = own or known.get(message.subject) or (waiting.pop(0) if waiting else None)
            patch = export_commit(git, commit, number=number)
            if patch.number in found:
                raise DataError(
                    f"Two commits have the number {patch.number:04d} ('{found[patch.number].title}' and '{patch.title}'): squash them or renumber one."
                )
            found[patch.number] = patch
        if waiting:
            raise DataError(
                f"{len(waiting)} numbers are left over ({', '.join(map(str, waiting))}): give one for each commit that has none of its own."
            )
        if list(found) != sorted(found):
            console.warn("The commits are not in the order of their numbers: 'invoke patches check' tells whether they apply in that order.")
    for patch in found.values():
        folder.write(patch)
    listing = folder.listing()
    folder.write_list(base_version=listing.base_version if listing else "", base_tree=listing.base_tree if listing else (base_tree or ""), tree="")
    return list(found.values())


def _numbers_by_subject(folder: SeriesFolder) -> dict[str, int]:
    """What commits are called again when they are exported again; unreadable files do not count."""
    found: dict[str, int] = {}
    for name in folder.names():
        with contextlib.suppress(DataError):
            patch = patchfile.read(folder.path / name)
            found[patch.title] = patch.number
    return found


def table(patches: Sequence[PatchFile]) -> list[list[str]]:
    """Rows number, title, lines, files."""
    return [[f"{patch.number:04d}", patch.title, f"+{patch.added} -{patch.removed}", str(len(patch.files))] for patch in patches]
