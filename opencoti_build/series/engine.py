"""The one way a patch gets applied: onto a tree, inside the object database, without touching any work tree.

``attempt`` asks ``git apply`` in its strictest form (all context must match, no white-space leniency). Only where that fails it looks
for the reason: is the change there already, has its file been renamed or deleted, does a 3-way merge from the patch's own
pre-image succeed, or do both sides claim the same lines.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from ..errors import GitError, PatchError
from ..git import Completed, Git
from ..patchfile import FileChange, Kind, PatchFile, path_problem


class Outcome(Enum):
    """How a patch and a tree went together."""

    CLEAN = "clean"
    """Every hunk fits at the line it names."""
    OFFSET = "offset"
    """Every hunk fits with its whole context, some at another line."""
    MERGED = "merged"
    """A 3-way merge from the patch's own pre-image gave a result without conflict; a person should look at it."""
    ABSORBED = "absorbed"
    """The tree has the change already."""
    RENAMED = "renamed"
    """A file it changes has another name now."""
    DELETED = "deleted"
    """A file it changes is gone."""
    CONFLICT = "conflict"
    """Both sides changed the same lines."""

    @property
    def applies(self) -> bool:
        """Whether the patch counts as applied without anyone's help."""
        return self in (Outcome.CLEAN, Outcome.OFFSET)


@dataclass(frozen=True)
class FileOutcome:
    """How one file of a patch went; ``note`` says what a person needs to know."""

    path: str
    outcome: Outcome
    note: str = ""


@dataclass(frozen=True)
class Attempt:
    """The result of trying one patch on one tree.

    ``tree`` is the tree afterwards: set where the patch is in (also by merge), and equal to the tree before where it was there already.
    ``provisional`` is the tree with every conflict decided in favour of the patch, where that can be made: later patches can be
    tried on it.
    """

    outcome: Outcome
    tree: str | None
    files: tuple[FileOutcome, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    provisional: str | None = None
    log: str = ""
    """What git complained about; its account of the files and hunks that went well is left out."""

    @property
    def note(self) -> str:
        """One line for a table."""
        return "; ".join(f"{item.path}: {item.note}" if item.note else item.path for item in self.files if item.outcome is not Outcome.CLEAN)


_OFFSET = re.compile(r"^Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)", re.M)
_CHECKING = re.compile(r"^Checking patch (.+?)(?: => (.+))?\.\.\.$")


def attempt(git: Git, tree: str, patch: PatchFile, *, merge: bool = True, made_on: str | None = None) -> Attempt:
    """Try ``patch`` on ``tree``. ``made_on`` is the tree it was made for, where known: it tells a rename from a deletion.

    With ``merge`` a 3-way merge is tried when the patch does not fit as it is. Raises PatchError for a path outside the tree.
    """
    for path in patch.paths:
        if problem := path_problem(path):
            raise PatchError(f"{patch.name} names '{path}', which {problem}: no such patch is applied.")
    if not patch.files:
        return Attempt(Outcome.CLEAN, tree)
    with git.scratch_index(tree) as scratch:
        done = _apply(scratch, patch.diff)
        if done.code == 0:
            offsets = _offsets(done.stderr)
            fits = Attempt(Outcome.OFFSET if offsets else Outcome.CLEAN, scratch.write_tree(), offsets)
            return fits if _is_exact(git, tree, patch) else _cross_checked(git, tree, patch, fits)
        if _apply(scratch, patch.diff, "--reverse", "--check").code == 0:
            return Attempt(
                Outcome.ABSORBED, tree, tuple(FileOutcome(change.path, Outcome.ABSORBED, "has the change already") for change in patch.files)
            )
    files, renames = _judge(git, tree, patch, made_on)
    lost = [item for item in files if item.outcome in (Outcome.RENAMED, Outcome.DELETED)]
    if any(item.outcome is Outcome.DELETED for item in lost):
        return Attempt(Outcome.DELETED, None, files, tuple(renames.items()), log=_complaints(done.stderr))
    moved = replace(patch, data=patch.data[: patch.diff_start] + patch.retargeted(renames)) if renames else patch
    if renames:
        with git.scratch_index(tree) as scratch:
            if _apply(scratch, moved.diff).code == 0:
                return Attempt(Outcome.RENAMED, scratch.write_tree(), files, tuple(renames.items()))
    merged: Attempt | None = _merge(git, tree, moved) if merge else None
    if merged is None:
        return Attempt(Outcome.RENAMED if renames else Outcome.CONFLICT, None, files, tuple(renames.items()), log=_complaints(done.stderr))
    if merged.outcome is Outcome.MERGED and merged.tree == tree:
        return Attempt(Outcome.ABSORBED, tree, files, tuple(renames.items()))
    if renames:
        return replace(merged, outcome=Outcome.RENAMED, files=files, renames=tuple(renames.items()))
    if merged.outcome is Outcome.MERGED:
        files = tuple(replace(item, outcome=Outcome.MERGED, note="merged 3-way") if item.outcome is Outcome.CONFLICT else item for item in files)
    return replace(merged, files=files, log=_complaints(done.stderr))


def _is_exact(git: Git, tree: str, patch: PatchFile) -> bool:
    """Whether every file is the very one that the patch was made on."""
    here = git.entries(tree, patch.paths)
    return all(change.kind is Kind.ADD or here.get(change.old_path, ("", ""))[1] == change.old_blob for change in patch.files)


def _cross_checked(git: Git, tree: str, patch: PatchFile, fits: Attempt) -> Attempt:
    """Hold a fit against the 3-way merge: with one line of context, a hunk may fit at a place that only looks like its own.

    The merge knows the whole pre-image, so where both give a result and they differ, the merge is right, and a person has to look.
    """
    merged = _merge(git, tree, patch)
    if merged is None or merged.tree == fits.tree:
        return fits
    if merged.tree is None:
        return replace(
            fits,
            files=fits.files
            or tuple(FileOutcome(change.path, fits.outcome, "fits, but a 3-way merge conflicts here: look at it") for change in patch.files),
        )
    if merged.tree == tree:
        return Attempt(Outcome.ABSORBED, tree, tuple(FileOutcome(change.path, Outcome.ABSORBED, "has the change already") for change in patch.files))
    return replace(
        merged, files=tuple(FileOutcome(change.path, Outcome.MERGED, "fits in more than one place, merged 3-way") for change in patch.files)
    )


def _apply(git: Git, diff: bytes, *flags: str) -> Completed:
    return git.run("apply", "--cached", "--verbose", "--whitespace=nowarn", *flags, "-", input=diff, check=False)


def _offsets(log: str) -> tuple[FileOutcome, ...]:
    found: dict[str, list[str]] = {}
    path = ""
    for line in log.splitlines():
        if match := _CHECKING.match(line):
            path = match[2] or match[1]
        elif match := _OFFSET.match(line):
            found.setdefault(path, []).append(f"{int(match[3]):+d}")
    return tuple(FileOutcome(name, Outcome.OFFSET, "lines moved by " + ", ".join(dict.fromkeys(amounts))) for name, amounts in found.items())


def _judge(git: Git, tree: str, patch: PatchFile, made_on: str | None) -> tuple[tuple[FileOutcome, ...], dict[str, str]]:
    """What stands in the way, file by file; and where renamed files went."""
    here = git.entries(tree, patch.paths)
    found: list[FileOutcome] = []
    renames: dict[str, str] = {}
    for change in patch.files:
        if change.kind is not Kind.ADD and change.old_path not in here:
            target = _renamed_to(git, tree, change, made_on)
            if target is None:
                found.append(FileOutcome(change.old_path, Outcome.DELETED, "is not in the tree any more"))
            else:
                renames[change.old_path] = target
                found.append(FileOutcome(change.old_path, Outcome.RENAMED, f"is called {target} now"))
            continue
        part = patch.part(change)
        with git.scratch_index(tree) as scratch:
            done = _apply(scratch, part)
            if done.code == 0:
                offsets = _offsets(done.stderr)
                found.append(offsets[0] if offsets else FileOutcome(change.path, Outcome.CLEAN))
            elif _apply(scratch, part, "--reverse", "--check").code == 0:
                found.append(FileOutcome(change.path, Outcome.ABSORBED, "has the change already"))
            elif change.kind is Kind.ADD and change.path in here:
                found.append(FileOutcome(change.path, Outcome.CONFLICT, "is to be added, but is there with other content"))
            else:
                found.append(FileOutcome(change.path, Outcome.CONFLICT, _reason(done.stderr)))
    return tuple(found), renames


def _complaints(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if line.startswith(("error: ", "fatal: ")))


def _reason(log: str) -> str:
    lines = [match[1] for match in re.finditer(r"^error: patch failed: .*:(\d+)$", log, re.M)]
    if lines:
        return "does not fit at line " + ", ".join(lines)
    errors = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    return errors[0] if errors else "does not fit"


def _renamed_to(git: Git, tree: str, change: FileChange, made_on: str | None) -> str | None:
    """The new name of a file that is gone, by content similarity of at least one half."""
    if made_on is None:
        if change.old_blob is None or not git.has(change.old_blob):
            return None
        with tempfile.TemporaryDirectory(prefix="index.", dir=git.git_dir) as folder:
            single = git.with_index(Path(folder) / "index")
            single.run("update-index", "--add", "--cacheinfo", f"{change.old_mode or '100644'},{change.old_blob},{change.old_path}")
            made_on = single.write_tree()
        exact = [line for line in git.names("ls-tree", "-r", "-z", "--full-tree", tree) if change.old_blob in line.partition("\t")[0]]
        if exact:
            return exact[0].partition("\t")[2]
    words = git.names("diff-tree", "-r", "-z", "-M50%", "-l0", "--diff-filter=R", "--name-status", made_on, tree)
    for kind, old, new in zip(words[0::3], words[1::3], words[2::3], strict=True):
        if kind.startswith("R") and old == change.old_path:
            return new
    return None


def _merge(git: Git, tree: str, patch: PatchFile) -> Attempt | None:
    """A 3-way merge in a throw-away folder that holds nothing but the files the patch touches; None where blobs are missing."""
    with tempfile.TemporaryDirectory(prefix="merge.", dir=git.git_dir) as folder, git.scratch_index(tree) as scratch:
        place = scratch.with_work_tree(Path(folder))
        unmerged = merge_into(place, tree, patch)
        if unmerged is None:
            return None
        if not unmerged:
            return Attempt(Outcome.MERGED, place.write_tree())
        return Attempt(Outcome.CONFLICT, None, provisional=_favour_patch(place, unmerged))


def merge_into(place: Git, tree: str, patch: PatchFile) -> list[str] | None:
    """Merge a patch into ``place``'s work tree and index (which holds ``tree``), leaving conflict markers where both sides differ.

    Returns the paths in conflict, or None when git cannot merge because the patch's pre-image is not in the object database.
    """
    touched = place.entries(tree, patch.paths)
    names = "".join(f"{path}\0" for path in touched).encode("utf-8", "surrogateescape")
    place.run("checkout-index", "-f", "-u", "-z", "--stdin", input=names)
    done = place.run("apply", "--3way", "--whitespace=nowarn", "-", input=patch.diff, check=False)
    unmerged = sorted({line.partition("\t")[2] for line in place.names("ls-files", "-u", "-z")})
    if done.code != 0 and not unmerged:
        return None
    return unmerged


def _favour_patch(place: Git, unmerged: list[str]) -> str | None:
    """Decide every conflict in the index for the patch; None where a side is missing."""
    assert place.work_tree is not None
    for path in unmerged:
        stages: dict[str, tuple[str, str]] = {}
        for line in place.names("ls-files", "-u", "-z", "--", path):
            mode, object_id, stage = line.partition("\t")[0].split()
            stages[stage] = (mode, object_id)
        if "3" not in stages or "2" not in stages:
            return None
        with tempfile.TemporaryDirectory(prefix="merge.", dir=place.git_dir) as folder:
            names = {stage: Path(folder) / stage for stage in "123"}
            for stage, file in names.items():
                file.write_bytes(place.blob(stages[stage][1]) if stage in stages else b"")
            try:
                merged = place.run("merge-file", "-p", "-q", "--theirs", names["2"], names["1"], names["3"]).stdout
            except GitError:
                return None
        blob = place.text("hash-object", "-w", "--stdin", "--no-filters", input=merged)
        place.run("update-index", "--cacheinfo", f"{stages['2'][0]},{blob},{path}")
    return place.write_tree()
