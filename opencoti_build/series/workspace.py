"""The work tree of a series: a real git repository with commit 0 and one commit per patch, made to be edited in.

Every command works out the new state in the object database first, saves it together with what is still to be done (files to check
out, patch files to write, a conflict to lay out), and then does that. A run that was killed is finished by the next one in exactly
the same way. Edits that are not committed are never overwritten: a command that would, refuses and names the way out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from .. import files, patchfile
from ..cache import Cache
from ..console import Console
from ..errors import DataError, GitError, PatchError, UsageError
from ..git import Git
from ..patchfile import SECTIONS, Message, PatchFile
from .base import BasePack, BaseTree, import_base
from .chain import Chain, Link, OnAbsorbed, build, export_commit, failure, remember
from .engine import Attempt, Outcome, merge_into
from .folder import Series, SeriesFolder
from .state import Conflict, Entry, Mode, Move, State, Write

STEPS = {
    "Why": "the reason this patch exists",
    "Hooks": "the upstream places it touches",
    "Switch": "flag, environment variable and JSON field, and its default",
}
STEPS |= {"Off": "how off-means-off was proven", "Tests": "how it was tested", "Limits": "what it does not do"}
PLACEHOLDER = "(to be written: {})"
"""What a new message holds in every section until somebody writes it; lint refuses it."""

MARKER = b"<<<<<<< "

BRANCH = "series"
"""The toolkit's own branch of a work tree."""


@dataclass(frozen=True)
class Applied:
    """A work tree with patches on: what a build and a manifest need. ``changed`` is False when nothing had to be done."""

    path: Path
    base_label: str
    base_tree: str
    tree_id: str
    commit: str
    patches: tuple[PatchFile, ...]
    changed: bool
    edits: tuple[tuple[str, str], ...] = ()
    """Uncommitted edits, as ``(XY, path)``: with any, the files are not those of ``tree_id``."""


@dataclass(frozen=True)
class Row:
    """A patch in the status."""

    patch: PatchFile
    state: str
    current: bool = False


@dataclass(frozen=True)
class Status:
    """Where a work tree stands.

    ``edits`` are ``(XY, path)`` of git's short status; ``next`` is what to run next, if anything; ``note`` says what lies in the work tree's
    place where that is not a work tree as the series left it.
    """

    path: Path
    exists: bool
    base_label: str
    rows: tuple[Row, ...]
    edits: tuple[tuple[str, str], ...] = ()
    conflict: Conflict | None = None
    foreign_commits: int = 0
    tree_id: str | None = None
    next: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Back:
    """HEAD was put, by git itself, at an earlier state of the series: at its first ``count`` patches. ``branch`` is empty on none."""

    head: str
    count: int
    branch: str


class Workspace:
    """The work tree at ``tree`` for the series in ``folder`` on ``base``."""

    PATIENCE = 5.0
    """Seconds to wait for the lock: a git command that a killed run left behind ends within them."""

    def __init__(self, folder: SeriesFolder, tree: Path, base: BaseTree, cache: Cache, console: Console) -> None:
        self.folder = folder
        self.tree = tree.absolute()
        self.base = base
        self.cache = cache
        self.console = console

    # ---- commands -----------------------------------------------------------------------------------------------------------

    def apply(self, *, to: int | None = None, merge: bool = False) -> Applied:
        """Bring the series onto the work tree, creating it when absent; up to and including patch ``to`` if given (0: none).

        Only exact matches are taken; ``merge`` takes 3-way merges too and writes those patches back. Raises PatchError at the first
        patch that does not go on; the work tree then holds the conflict to settle. A work tree that git put back to an earlier state of
        the series is taken from there; the branch it is on stays as it is.
        """
        with self._opened(create=True) as (git, state):
            self._no_conflict(state)
            if (back := self._went_back(git, state)) is not None:
                state = self._take_from(git, state, back)
            self._no_foreign_commits(git, state)
            series, base = self.folder.load(), self.base.identified()
            self._same_base(series, base)
            last = 9999 if to is None else series.find(to).number if to else 0
            wanted = tuple(patch for patch in series.patches if patch.number <= last)
            rebased = (state.base_label, state.base_tree) != (base.label, base.tree_id)
            kept = 0 if rebased else _common(state.applied, wanted)
            if not rebased and kept == len(wanted) == len(state.applied):
                return self._applied(git, state, wanted, changed=False)
            self._no_edits(git, "applying")
            start, fresh = (state.applied[kept - 1].commit if kept else state.base_commit), state
            if rebased:
                pack = self._import(git, base)
                start, fresh = pack.commit, replace(state, base_label=base.label, base_tree=pack.tree_id, base_commit=pack.commit)
            chain = build(git, start, wanted[kept:], merge=merge)
            done = self._carry_out(git, state, fresh, state.applied[:kept], chain, write_back=merge)
            if chain.failed is None and to is None and done.write is None:
                remember(series, base, self.folder.name, self.cache, chain.tree, chain.commit)
            return self._applied(git, done, self.folder.load().patches[: len(done.applied)], changed=True)

    def resume(self) -> Applied:
        """Go on after a conflict was settled in the work tree: its result becomes the patch, the later ones follow."""
        with self._opened() as (git, state):
            if state.conflict is None:
                raise UsageError("There is no conflict to go on from: run 'invoke patches apply'.")
            return self._fold(git, state, ())

    def abort(self) -> str:
        """Leave a conflict: the work tree goes back to the last patch that is on, or out of a rebase to where it was before.

        What was edited meanwhile is kept as a difference file; its path is returned, or an empty string.
        """
        with self._opened() as (git, state):
            if state.conflict is None and state.mode is not Mode.REBASE:
                raise UsageError("There is no conflict to leave: run 'invoke patches status'.")
            before = State.load(self._before) if state.mode is Mode.REBASE else None
            edits = self._work_tree_as_tree(git, ())
            kept = ""
            difference = git.diff(git.tree_of(state.commit), edits)
            if difference:
                path = self._own / f"aborted-{hashlib.sha256(difference).hexdigest()[:12]}.diff"
                files.write_bytes(path, difference)
                kept = str(path)
            source = git.commit(edits, state.commit, "Work tree before abort\n")
            target = before or replace(state, conflict=None)
            self._save(replace(target, conflict=None, move=Move(source, target.commit)))
            self._settle(git)
            self._before.unlink(missing_ok=True)
            return kept

    def new(self, number: int, title: str) -> PatchFile:
        """Start a patch: its file gets a message to fill in, the work tree stands on it, empty. Later patches are taken off.

        Uncommitted edits may stay when no patch has to be taken off: they are what the new patch will hold.
        """
        if not 1 <= number <= 9999:
            raise UsageError(f"{number} is no number of a patch: take one from 1 to 9999.")
        message = Message(" ".join(title.split()), "\n".join(f"{name}: {PLACEHOLDER.format(STEPS[name])}" for name in SECTIONS))
        if not message.area:
            raise UsageError(f"'{title}' is no title of a patch: it has to look like 'area: what the patch does'.")
        with self._opened(create=True) as (git, state):
            self._no_conflict(state)
            self._no_foreign_commits(git, state)
            series = self.folder.load()
            if any(patch.number == number for patch in series.patches):
                raise UsageError(f"There is a patch {number:04d} already: choose another number, or 'invoke patches edit {number}'.")
            self._up_to_date(state, series)
            below = [patch for patch in series.patches if patch.number < number]
            if len(state.applied) != len(below):
                self._no_edits(git, f"moving to {number:04d}")
            entries, chain = self._onto(git, state, below)
            parent = chain.commit
            commit = git.commit(git.tree_of(parent), parent, message.text(number))
            patch = patchfile.make(number, message, b"")
            entries += (Entry(number, patch.name, patch.sha256, commit, Outcome.CLEAN.value),)
            later = any(other.number > number for other in series.patches)
            write = Write(((number, commit),), tree="" if later else git.tree_of(commit))
            self._save(replace(state, applied=entries, move=Move(state.commit, commit), write=write))
            self._settle(git, previous=state)
            return patch

    def refresh(self, include: Sequence[str] = ()) -> Applied:
        """Fold the edits of the work tree into the patch it stands on, write its file, and put the later patches on again.

        The message comes from the patch's file, so editing it there is enough. ``include`` names new files that ignore rules of
        the tree would leave out.
        """
        with self._opened() as (git, state):
            return self._fold(git, state, include)

    def export(self, *, force: bool = False, remove: bool = False) -> list[str]:
        """Write the patches that are on; commits that somebody made by hand in the work tree are taken in.

        Returns the names of the files that changed. A file that was edited since it was applied is overwritten with ``force`` only; the
        file of a patch whose commit somebody took out in the work tree goes with ``remove`` only, and never when just the last ones are off.
        """
        with self._opened() as (git, state):
            self._no_conflict(state)
            if (back := self._went_back(git, state)) is not None:
                raise PatchError(
                    f"{self.tree} stands at {self._place(state, back)}, so there is nothing to export: '{self._way_forward(git, state, back)}' brings the later "
                    "patches back ('invoke patches drop NUMBER' takes one out of the series)."
                )
            if edits := git.status():
                self.console.warn(
                    f"{len(edits)} uncommitted edits in {self.tree} are not part of any patch yet: 'invoke patches refresh' folds them in."
                )
            series = self.folder.load()
            on_disk = {patch.number: patch for patch in series.patches}
            head = git.text("rev-parse", "--verify", "HEAD")
            parent, writes, changed = state.base_commit, [], []
            entries: list[Entry] = []
            for commit in git.commits(state.base_commit, head):
                if git.text("rev-list", "--parents", "-n", "1", commit).split()[1:] != [git.text("rev-parse", f"{commit}^")]:
                    raise PatchError(f"Commit {commit[:12]} is a merge: a series is a line of commits.")
                patch = export_commit(git, commit)
                if entries and patch.number <= entries[-1].number:
                    raise PatchError(
                        f"'{patch.title}' has number {patch.number:04d}, but follows {entries[-1].number:04d}: numbers have to rise along the commits."
                    )
                own = git.commit(git.tree_of(commit), parent, patch.message.text(patch.number))
                known = next((entry for entry in state.applied if entry.number == patch.number), None)
                there = on_disk.get(patch.number)
                if there is not None and there.data != patch.data and not force:
                    if known is None or known.sha256 != there.sha256:
                        raise PatchError(
                            f"{there.name} was edited since it was applied: 'invoke patches apply' takes that in, 'invoke patches export --force' overwrites it."
                        )
                if there is None or there.data != patch.data or there.name != patch.name:
                    changed.append(patch.name)
                writes.append((patch.number, own))
                entries.append(Entry(patch.number, patch.name, patch.sha256, own, known.outcome if known else Outcome.CLEAN.value))
                parent = own
            gone = {entry.number for entry in state.applied} - {entry.number for entry in entries}
            going = [on_disk[number] for number in sorted(gone) if number in on_disk]
            if going and not remove:
                raise PatchError(self._lack(git, state, [patch.name for patch in going]))
            for patch in going:
                if not force and patch.sha256 not in (entry.sha256 for entry in state.applied):
                    raise PatchError(
                        f"{patch.name} was edited since it was applied: 'invoke patches export --remove --force' removes it nevertheless, "
                        f"'git -C {self.tree} reset --keep {state.commit}' brings back what was applied."
                    )
            if set(on_disk) - gone <= {entry.number for entry in entries}:
                tree = git.tree_of(parent)
            else:  # later patches are off: what the whole series gives stays true as long as no file changes
                tree = series.listing.tree if series.listing and not changed and not going and series.listing.base_tree == state.base_tree else ""
            write = Write(tuple(writes), tuple(patch.name for patch in going), tree)
            self._save(replace(state, applied=tuple(entries), move=Move(parent, parent, adopt=True), write=write))
            self._settle(git)
            return changed + [f"{patch.name} (removed)" for patch in going]

    def move(self, number: int, to: int) -> Chain:
        """Give a patch another number, and thereby another place. Raises PatchError, with nothing changed, when that conflicts."""
        if not 1 <= to <= 9999:
            raise UsageError(f"{to} is no number of a patch: take one from 1 to 9999.")
        with self._opened(create=True) as (git, state):
            series = self._ready_to_reorder(git, state)
            patch = series.find(number)
            if number != to and any(other.number == to for other in series.patches):
                raise UsageError(f"There is a patch {to:04d} already: choose another number.")
            others = [other for other in series.patches if other.number != number]
            order = sorted([*others, patch.renumbered(to)], key=lambda item: item.number)
            return self._reorder(git, state, order, (patch.name,), f"Moving {patch.number:04d} to {to:04d}")

    def drop(self, number: int) -> Chain:
        """Take a patch out of the series. Raises PatchError, with nothing changed, when a later one needs it."""
        with self._opened(create=True) as (git, state):
            series = self._ready_to_reorder(git, state)
            patch = series.find(number)
            order = [other for other in series.patches if other.number != number]
            return self._reorder(git, state, order, (patch.name,), f"Dropping {number:04d}")

    def rebase(self, new: BaseTree) -> Applied:
        """Bring the series onto another base for real; conflicts stop it like those of ``apply``, the patch files change at its end."""
        with self._opened(create=True) as (git, state):
            self._no_conflict(state)
            self._no_foreign_commits(git, state)
            self._no_edits(git, "rebasing")
            series, new = self.folder.load(), new.identified()
            if (new.label, new.tree_id) == (state.base_label, state.base_tree):
                raise UsageError(f"The work tree stands on {new.label} already.")
            whole = build(git, state.base_commit, series.patches)
            if whole.failed is not None:
                raise PatchError(
                    f"The series does not apply to {state.base_label} to begin with: run 'invoke patches apply' first.",
                    details=failure(*whole.failed),
                )
            state.save(self._before)
            pack = self._import(git, new)
            chain = build(git, pack.commit, series.patches, merge=True, absorbed=OnAbsorbed.DROP, made_on=state.base_tree)
            fresh = replace(
                state,
                base_label=new.label,
                base_tree=pack.tree_id,
                base_commit=pack.commit,
                mode=Mode.REBASE,
                left_out=tuple(patch.name for patch in chain.absorbed),
            )
            done = self._carry_out(git, state, fresh, (), chain, write_back=False)
            return self._applied(git, done, self.folder.load().patches, changed=True)

    def status(self) -> Status:
        """Where the work tree stands; changes nothing and needs no base."""
        series = self.folder.load()
        absent = tuple(Row(patch, "not applied") for patch in series.patches)
        if foreign := self._foreign():
            return Status(self.tree, False, self.base.label, absent, next=f"move {self.tree} away, or choose another place with --tree", note=f"{self.tree} is {foreign}.")
        if self._free():
            return Status(self.tree, False, self.base.label, absent, next="invoke patches apply" if absent else "invoke patches new NUMBER TITLE")
        if not self._state_path.exists():
            unknown_rows = tuple(Row(patch, "unknown") for patch in series.patches)
            note = f"{self._state_path} is gone: the next command finds out from the commits which patches are on."
            return Status(self.tree, True, self.base.label, unknown_rows, next="invoke patches apply", note=note)
        state, git = State.load(self._state_path), Git.open(self.tree)
        assert state is not None
        back = self._went_back(git, state) if state.conflict is None and state.move is None else None
        if back is not None:
            state = replace(whole := state, applied=state.applied[: back.count])
        applied = {entry.number: entry for entry in state.applied}
        rows_list = []
        for patch in series.patches:
            entry = applied.get(patch.number)
            if state.conflict is not None and state.conflict.number == patch.number:
                label = f"{state.conflict.outcome}: being settled"
            elif entry is None:
                label = "not applied"
            elif entry.sha256 != patch.sha256:
                label = "edited on disk"
            else:
                label = f"applied ({entry.outcome})"
            rows_list.append(Row(patch, label, state.position == patch.number))
        head = git.resolve("HEAD") if back is None else state.commit
        unknown = len(git.commits(state.commit, head)) if head and head != state.commit else 0
        edits = tuple(git.status())
        note = ""
        if state.conflict is not None:
            following = self._next_after(state.conflict)
        elif back is not None:
            note = f"the work tree stands at {self._place(whole, back)}"
            following = self._way_forward(git, whole, back, edits)
        elif head and head != state.commit and state.move is None and (lacking := self._lacking(git, state, head, series)):
            note = self._lack(git, state, lacking)
            following = "invoke patches export --remove, or bring them back as said above"
        elif unknown or (head != state.commit and state.move is None):
            following = "invoke patches export"
        elif edits:
            following = "invoke patches refresh"
        elif state.applied and self._just_begun(git, state):
            begun = self.folder.path / state.applied[-1].name
            following = f"fill in the message in {begun} and edit in {self.tree}, then: invoke patches refresh"
        elif any(row.state != f"applied ({applied[row.patch.number].outcome})" if row.patch.number in applied else True for row in rows_list):
            following = "invoke patches apply"
        else:
            following = ""
        return Status(self.tree, True, state.base_label, tuple(rows_list), edits, state.conflict, unknown, git.tree_of(state.commit), following, note)

    # ---- paths and opening --------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> Path:
        return self.tree / ".git" / "opencoti"

    @property
    def _state_path(self) -> Path:
        return self._own / "state.json"

    @property
    def _before(self) -> Path:
        return self._own / "before.json"

    @property
    def _conflict_patch(self) -> Path:
        return self._own / "conflict.patch"

    def _save(self, state: State) -> State:
        state.save(self._state_path)
        return state

    @contextlib.contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[tuple[Git, State]]:
        """The repository and its state, locked, with whatever a killed run left finished."""
        lock = self.tree.parent / f".{self.tree.name}.lock"
        with files.lock(lock, wait_seconds=self.PATIENCE, what=f"the work tree {self.tree}") as held:
            files.remove_stale(self.tree.parent, f".{self.tree.name}.*.tmp", age_seconds=0)
            if foreign := self._foreign():
                raise PatchError(f"{self.tree} is {foreign}: move it away, or choose another place with --tree.")
            if self._free():
                if not create:
                    raise PatchError(f"There is no work tree at {self.tree} yet: run 'invoke patches apply'.")
                self._create()
            git = replace(Git.open(self.tree), holding=(held.fileno(),))
            state = State.load(self._state_path)
            if state is None:
                state = self._recovered_state(git)
            elif (self.tree / ".git" / "index.lock").exists() and state.move is None and (state.conflict is None or state.conflict.placed):
                raise PatchError(
                    f"Another git program is at work in {self.tree}, or was killed there: end it, or delete {self.tree / '.git' / 'index.lock'}."
                )
            yield git, self._settle(git)

    def _free(self) -> bool:
        """Whether a work tree can be made here: nothing is there, or an empty folder."""
        return not os.path.lexists(self.tree) or (self.tree.is_dir() and not any(self.tree.iterdir()))

    def _foreign(self) -> str:
        """What lies here, in words, when it is none of the series; empty otherwise. Only looks: opening a repository writes into it."""
        if self._free():
            return ""
        what, git_dir = files.what_lies_at(self.tree), self.tree / ".git"
        if what == "a folder" and git_dir.is_dir() and not git_dir.is_symlink():
            if self._state_path.exists():
                return ""
            with contextlib.suppress(GitError):
                if Git.discover(self.tree).resolve("refs/opencoti/base") is not None:
                    return ""
            what = "a git repository"
        return f"{what} and no work tree of the series"

    def _just_begun(self, git: Git, state: State) -> bool:
        """Whether the work tree stands on a patch that ``new`` started and that holds nothing yet."""
        last = state.applied[-1]
        below = state.applied[-2].commit if len(state.applied) > 1 else state.base_commit
        return last.outcome != Outcome.ABSORBED.value and git.tree_of(last.commit) == git.tree_of(below)

    def _create(self) -> None:
        pack = import_base(self.folder.name, self.base, self.cache, self.console)
        with files.atomic_directory(self.tree) as fresh:
            git = Git.create(fresh / ".git", fresh)
            pack.link_into(git)
            git.set_ref("refs/opencoti/base", pack.commit)
            git.set_ref("refs/heads/series", pack.commit)
            git.run("read-tree", "-u", "--reset", pack.commit)
            State(self.base.label, pack.tree_id, pack.commit).save(fresh / ".git" / "opencoti" / "state.json")

    def _recovered_state(self, git: Git) -> State:
        """A state from the commits alone, when its file is gone: labels are unknown, so the next apply compares everything."""
        base, head = git.resolve("refs/opencoti/base"), git.resolve("HEAD")
        if base is None or head is None:
            raise PatchError(f"{self.tree} is no work tree of the series (no base commit): move it away, or choose another place with --tree.")
        entries = []
        for commit in git.commits(base, head):
            number, message = patchfile.take_number(git.message(commit))
            if number is not None:
                entries.append(Entry(number, f"{number:04d}-{patchfile.slug_of(message.subject)}.patch", "", commit, Outcome.CLEAN.value))
        label = git.message(base).strip().rpartition(" ")[2]
        return self._save(State(label, git.tree_of(base), base, tuple(entries)))

    def _import(self, git: Git, base: BaseTree) -> BasePack:
        pack = import_base(self.folder.name, base, self.cache, self.console)
        pack.link_into(git)
        git.set_ref("refs/opencoti/base", pack.commit)
        return pack

    # ---- refusals -----------------------------------------------------------------------------------------------------------

    def _next_after(self, conflict: Conflict) -> str:
        return (
            "invoke patches apply --continue"
            if not conflict.paths
            else f"edit {', '.join(conflict.paths)} in {self.tree}, then: invoke patches apply --continue"
        )

    def _no_conflict(self, state: State) -> None:
        if state.conflict is not None:
            raise PatchError(
                f"The series stands in the conflict of {state.conflict.name}: settle it and run 'invoke patches apply --continue', or leave it with 'invoke patches apply --abort'.",
                details="\n".join(state.conflict.paths),
            )

    def _no_foreign_commits(self, git: Git, state: State) -> None:
        head = git.resolve("HEAD")
        if head == state.commit:
            return
        if (back := self._went_back(git, state)) is not None:
            forward = self._way_forward(git, state, back) if state.conflict is None else self._way_back(git, state)
            raise PatchError(f"{self.tree} stands at {self._place(state, back)}: '{forward}' brings the later patches back.")
        if head and (lacking := self._lacking(git, state, head, self.folder.load())):
            raise PatchError(self._lack(git, state, lacking))
        raise PatchError(
            f"{self.tree} has commits that the series does not know: 'invoke patches export' takes them in, or reset it by 'git reset --keep {state.commit}'."
        )

    # ---- where git itself put the work tree ---------------------------------------------------------------------------------

    def _went_back(self, git: Git, state: State) -> _Back | None:
        """Whether HEAD stands at an earlier state of the series: its commits are those of the first patches that were on, and no others."""
        head = git.resolve("HEAD")
        if head is None or head == state.commit:
            return None
        line = [state.base_commit, *(entry.commit for entry in state.applied)]
        if head in line:
            count = line.index(head)
        else:  # the same commits under other ids: somebody's git wrote them anew
            there = git.commits(state.base_commit, head)
            count = len(there)
            if not 0 < count < len(state.applied) or any(
                (git.tree_of(one), git.message(one)) != (git.tree_of(other), git.message(other)) for one, other in zip(there, line[1:], strict=False)
            ):
                return None
        return _Back(head, count, git.run("symbolic-ref", "--quiet", "--short", "HEAD", check=False).text)

    def _place(self, state: State, back: _Back) -> str:
        where = f"{state.applied[back.count - 1].number:04d}" if back.count else "the base"
        branch = "" if back.branch == BRANCH else f", on the branch {back.branch}" if back.branch else ", on no branch"
        return f"{where}{branch}, without the later patches"

    def _way_forward(self, git: Git, state: State, back: _Back, edits: Sequence[tuple[str, str]] = ()) -> str:
        """The command that brings a work tree that went back to the whole series, and loses nothing."""
        if blocked := self._not_to_leave(git, state, back):
            return blocked
        if not edits:
            return "invoke patches apply"
        if back.count:
            return f"invoke patches edit {state.applied[back.count - 1].number}, then: invoke patches refresh"
        return f"git -C {self.tree} stash -u, then: invoke patches apply"

    def _not_to_leave(self, git: Git, state: State, back: _Back) -> str:
        """What has to be run first because going on from here would lose something; empty when nothing would be lost."""
        if (git.git_dir / "rebase-merge").exists() or (git.git_dir / "rebase-apply").exists():
            return f"git -C {self.tree} rebase --continue"
        if (git.git_dir / "BISECT_LOG").exists():
            return f"git -C {self.tree} bisect reset"
        tip = git.resolve(f"refs/heads/{BRANCH}")
        if back.branch != BRANCH and tip is not None and tip not in (state.base_commit, *(entry.commit for entry in state.applied)):
            return f"git -C {self.tree} switch {BRANCH}"
        return ""

    def _take_from(self, git: Git, state: State, back: _Back) -> State:
        """The state as it is where git put the work tree, on the toolkit's branch; uncommitted edits stay."""
        place = self._place(state, back)
        if blocked := self._not_to_leave(git, state, back):
            raise PatchError(f"{self.tree} stands at {place}, and commits would be lost or git's own work cut off by going on from there: run '{blocked}' first.")
        shorter = replace(state, applied=state.applied[: back.count])
        self._save(replace(shorter, move=Move(back.head, shorter.commit)))
        done = self._settle(git, previous=state)
        kept = f"; the branch {back.branch} stays as it is" if back.branch not in ("", BRANCH) else ""
        self.console.info(f"the work tree stood at {place}: going on from there{kept}")
        return done

    def _lacking(self, git: Git, state: State, head: str, series: Series) -> list[str]:
        """Patch files whose patches were on and have no commit any more."""
        there: set[int | None] = set()
        for commit in git.commits(state.base_commit, head):
            with contextlib.suppress(DataError):  # two numbers in one message: export says so
                there.add(patchfile.take_number(git.message(commit))[0])
        were = {entry.number for entry in state.applied}
        return [patch.name for patch in series.patches if patch.number in were - there]

    def _lack(self, git: Git, state: State, names: Sequence[str]) -> str:
        return (
            f"The commits in {self.tree} lack {', '.join(names)}: 'invoke patches export --remove' takes that out of the series, "
            f"'{self._way_back(git, state)}' brings back what was applied."
        )

    def _way_back(self, git: Git, state: State) -> str:
        """The git command that goes back to what was applied."""
        branch = git.run("symbolic-ref", "--quiet", "--short", "HEAD", check=False).text
        if branch != BRANCH and git.resolve(f"refs/heads/{BRANCH}") == state.commit:
            return f"git -C {self.tree} switch {BRANCH}"
        return f"git -C {self.tree} reset --keep {state.commit}"

    def _no_edits(self, git: Git, doing: str) -> None:
        if edits := git.status():
            listed = "\n".join(f"{code} {path}" for code, path in edits[:20]) + ("\n..." if len(edits) > 20 else "")
            raise PatchError(
                f"{self.tree} has {len(edits)} uncommitted edits, which {doing} would overwrite: 'invoke patches refresh' folds them into the current patch, 'git stash -u' in that folder puts them aside.",
                details=listed,
            )

    def _same_base(self, series: Series, base: BaseTree) -> None:
        made_on = series.listing.base_tree if series.listing else ""
        if made_on and made_on != base.tree_id:
            assert series.listing is not None
            raise PatchError(
                f"The series was made on {series.listing.base_version}, the base is {base.label} now: 'invoke patches rebase --to {base.label}' tries it there and brings it over.",
                details=f"series {made_on}\nbase   {base.tree_id}",
            )

    def _up_to_date(self, state: State, series: Series, *, skip: int | None = None) -> None:
        """Refuse when a file of a patch that is on was edited, added or removed since."""
        by_number = {patch.number: patch for patch in series.patches}
        for entry in state.applied:
            patch = by_number.get(entry.number)
            if entry.number != skip and (patch is None or patch.sha256 != entry.sha256):
                raise PatchError(f"{entry.name} was edited or removed since it was applied: run 'invoke patches apply' first.")
        numbers = {entry.number for entry in state.applied}
        for patch in series.patches:
            if patch.number not in numbers and patch.name not in state.left_out and state.position is not None and patch.number < state.position:
                raise PatchError(f"{patch.name} is new in the series and not applied: run 'invoke patches apply' first.")

    # ---- carrying out -------------------------------------------------------------------------------------------------------

    def _onto(self, git: Git, state: State, patches: Sequence[PatchFile]) -> tuple[tuple[Entry, ...], Chain]:
        """Entries and chain of ``patches``, reusing what is on; raises PatchError when one does not apply."""
        kept = _common(state.applied, patches)
        chain = build(git, state.applied[kept - 1].commit if kept else state.base_commit, patches[kept:])
        if chain.failed is not None:
            raise PatchError(f"{failure(*chain.failed)} Run 'invoke patches apply' to settle it.", details=chain.failed[1].log)
        return (*state.applied[:kept], *(_entry(link) for link in chain.links)), chain

    def _carry_out(
        self, git: Git, old: State, fresh: State, kept: tuple[Entry, ...], chain: Chain, *, write_back: bool, folded: int | None = None
    ) -> State:
        """Save what a chain asks for and do it; raises PatchError when the chain ends in a conflict.

        ``write_back`` writes patches whose text changed on the way. ``folded`` is the number of the last patch in ``kept`` when the files
        in the work tree have just become it.
        """
        entries: list[Entry] = list(kept)
        writes: list[tuple[int, str]] = [(folded, kept[-1].commit)] if folded is not None and write_back else []
        for link in chain.links:
            entry = _entry(link)
            if write_back:
                patch = export_commit(git, link.commit)
                if patch.data != link.patch.data or patch.name != link.patch.name:
                    writes.append((link.patch.number, link.commit))
                    entry = replace(entry, name=patch.name, sha256=patch.sha256)
            entries.append(entry)
        conflict = None
        if chain.failed is not None:
            patch, tried = chain.failed
            if tried.outcome is not Outcome.ABSORBED:
                files.write_bytes(self._conflict_patch, _placeable(patch, tried).data)
                conflict = Conflict(patch.number, patch.name, patch.sha256, tried.outcome.value, tried.note)
        target = entries[-1].commit if entries else fresh.base_commit
        write = Write(tuple(writes), (), git.tree_of(target) if chain.failed is None else "") if writes else None
        move = Move(old.commit, target) if folded is None else Move(kept[-1].commit, target, adopt=True)
        self._save(replace(fresh, applied=tuple(entries), move=move, write=write, conflict=conflict))
        done = self._settle(git, previous=old)
        if chain.failed is not None:
            self._report(done, *chain.failed)
        return done

    def _report(self, state: State, patch: PatchFile, tried: Attempt) -> None:
        if state.conflict is None:
            raise PatchError(f"{failure(patch, tried)} Take it out with 'invoke patches drop {patch.number}'.", details=tried.log)
        lines = [f"{item.path}: {item.outcome.value}{', ' + item.note if item.note else ''}" for item in tried.files]
        lines.append(f"The work tree {self.tree} stands before it, with its changes laid out as far as they go.")
        where = f"edit {', '.join(state.conflict.paths)} there, then run" if state.conflict.paths else "look it over, then run"
        raise PatchError(
            f"{failure(patch, tried)} To settle it {where} 'invoke patches apply --continue' (or 'invoke patches apply --abort').",
            details="\n".join(lines),
        )

    def _settle(self, git: Git, previous: State | None = None) -> State:
        """Do what the saved state says is still to be done. ``previous`` is restored when the very first step is refused."""
        state = State.load(self._state_path)
        assert state is not None
        if state.move is not None:
            state = self._follow(git, state, previous)
        if state.write is not None:
            state = self._write(git, state)
        if state.conflict is not None and not state.conflict.placed:
            state = self._lay_out(git, state)
        if state.mode is Mode.REBASE and state.conflict is None:
            state = self._end_rebase(git, state)
        return state

    def _follow(self, git: Git, state: State, previous: State | None) -> State:
        move = state.move
        assert move is not None
        if previous is None:
            self._force(git, move)
        else:
            if move.adopt:
                git.run("read-tree", move.source)
            if blocking := self._in_the_way(git, move):
                self._save(previous)
                raise PatchError(
                    f"{self.tree / blocking[0]} is in the way of a file of the series: move it aside and run the same command again.",
                    details="\n".join(blocking),
                )
            # Times and inode numbers differ after the folder was copied or restored; git would take every file for edited.
            git.run("update-index", "-q", "--refresh", check=False)
            done = git.run("read-tree", "-m", "-u", move.source, move.target, check=False)
            if done.code != 0:
                self._save(previous)
                raise PatchError(f"{self.tree} has something in the way: move it aside and run the same command again.", details=done.stderr)
        git.set_ref("refs/heads/series", move.target)
        git.run("symbolic-ref", "HEAD", "refs/heads/series")
        return self._save(replace(state, move=None))

    def _in_the_way(self, git: Git, move: Move) -> list[str]:
        """Untracked files that a move would replace; git itself protects only those that no ignore rule names."""
        added = git.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", "--diff-filter=A", move.source, move.target)
        suspects = {path for name in added for path in (name, *(str(folder) for folder in PurePosixPath(name).parents if str(folder) != "."))}
        found = sorted(path for path in suspects if os.path.lexists(self.tree / path) and (path in added or not (self.tree / path).is_dir()))
        tracked = git.entries(move.source, found)
        return [path for path in found if path not in tracked]

    def _force(self, git: Git, move: Move) -> None:
        """Bring files, index and branch to the target, whatever a killed run left; content that is neither side's is kept aside."""
        for name in ("index.lock", "HEAD.lock"):
            (git.git_dir / name).unlink(missing_ok=True)
        paths = git.changed(move.source, move.target)
        old, new = git.entries(move.source, paths), git.entries(move.target, paths)
        for path in paths:
            self._keep_aside(git, path, old.get(path), new.get(path))
        git.run("read-tree", move.target)
        for path in paths:
            if path not in new:
                self._delete(path)
        self._check_out(git, [path for path in paths if path in new])
        git.run("update-index", "-q", "--refresh", check=False)

    def _check_out(self, git: Git, paths: Sequence[str]) -> None:
        names = "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")
        git.run("checkout-index", "-f", "-u", "-z", "--stdin", input=names)

    def _delete(self, path: str) -> None:
        file = self.tree / path
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            file.unlink()
        for folder in file.parents:
            if folder == self.tree or not _is_inside(folder, self.tree):
                break
            with contextlib.suppress(OSError):
                folder.rmdir()
                continue
            break

    def _keep_aside(self, git: Git, path: str, *sides: tuple[str, str] | None) -> None:
        file = self.tree / path
        try:
            if not stat.S_ISREG(file.lstat().st_mode):
                return
            data = file.read_bytes()
        except OSError:
            return
        own = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        for side in sides:
            if side is not None and (side[1] == own or git.blob(side[1]).startswith(data)):
                return
        target = self._own / "saved" / own[:12] / path
        files.write_bytes(target, data)
        self.console.warn(f"{file} was edited while a move of the work tree was unfinished; that content is kept in {target}.")

    def _write(self, git: Git, state: State) -> State:
        write = state.write
        assert write is not None
        written = set()
        for number, commit in write.commits:
            patch = export_commit(git, commit, number=number)
            self.folder.write(patch)
            written.add(patch.name)
        for name in write.remove:
            if name not in written:
                self.folder.remove(name)
        self.folder.write_list(base_version=state.base_label, base_tree=state.base_tree, tree=write.tree)
        return self._save(replace(state, write=None))

    def _lay_out(self, git: Git, state: State) -> State:
        """Put the changes of the conflicting patch into the work tree: merged where that goes, with markers or ``.rej`` files elsewhere."""
        conflict = state.conflict
        assert conflict is not None
        patch = patchfile.parse(conflict.name, self._conflict_patch.read_bytes())
        tree = git.tree_of(state.commit)
        (git.git_dir / "index.lock").unlink(missing_ok=True)
        here = git.entries(tree, patch.paths)
        for path in patch.paths:
            self._keep_aside(git, path, here.get(path))
            if path not in here:
                self._delete(path)
        git.run("read-tree", tree)
        self._check_out(git, list(here))
        git.run("update-index", "-q", "--refresh", check=False)
        present = [change for change in patch.files if change.old_path in here or change.kind is patchfile.Kind.ADD]
        absent = [change for change in patch.files if change not in present]
        paths: list[str] = []
        for change in absent:
            reject = self.tree / f"{change.old_path}.rej"
            files.write_bytes(reject, patch.part(change))
            paths.append(f"{change.old_path}.rej")
        if present:
            part = replace(patch, data=patch.data[: patch.diff_start] + b"".join(patch.part(change) for change in present), files=tuple(present))
            unmerged = merge_into(git, tree, part)
            if unmerged is None:
                for change in present:
                    if git.run("apply", "--whitespace=nowarn", "-", input=patch.part(change), check=False).code != 0:
                        git.run("apply", "--reject", "--whitespace=nowarn", "-", input=patch.part(change), check=False)
                        if not (self.tree / f"{change.old_path}.rej").exists():
                            files.write_bytes(self.tree / f"{change.old_path}.rej", patch.part(change))
                        paths.append(f"{change.old_path}.rej")
            else:
                paths += unmerged
        return self._save(replace(state, conflict=replace(conflict, paths=tuple(paths), placed=True)))

    def _work_tree_as_tree(self, git: Git, include: Sequence[str]) -> str:
        """Tree id of what lies in the work tree, new files that are not ignored included."""
        with git.scratch_index() as scratch:
            assert scratch.index is not None
            scratch.run("read-tree", git.text("rev-parse", "HEAD"))
            # Stat data of the real index saves hashing every file; an index in a conflict has none to give for the files in it.
            if not git.names("ls-files", "-u", "-z"):
                with contextlib.suppress(OSError):
                    scratch.index.write_bytes((git.git_dir / "index").read_bytes())
            scratch.run("add", "-A", "--", ".")
            for path in include:
                if not (self.tree / path).is_file():
                    raise UsageError(f"{path} is no file in {self.tree}: --include takes paths relative to that folder.")
                scratch.run("add", "-f", "--", path)
            ignored = [
                path for path in scratch.names("ls-files", "-z", "--others", "--ignored", "--exclude-standard") if "opencoti" in path.split("/")[:-1]
            ]
            for path in ignored:
                if path not in include:
                    self.console.warn(
                        f"{path} is ignored by the tree's own rules and not part of the patch: add it with --include {path} if it belongs there."
                    )
            return scratch.write_tree()

    def _fold(self, git: Git, state: State, include: Sequence[str]) -> Applied:
        self._no_foreign_commits(git, state)
        series = self.folder.load()
        conflict = state.conflict
        if conflict is not None:
            self._settled(git, conflict)
            kept, number, parent = state.applied, conflict.number, state.commit
        elif state.applied:
            kept, number = state.applied[:-1], state.applied[-1].number
            parent = kept[-1].commit if kept else state.base_commit
        else:
            raise PatchError(
                "No patch is applied that edits could be folded into: run 'invoke patches new NUMBER TITLE' or 'invoke patches edit NUMBER'."
            )
        self._up_to_date(state, series, skip=number)
        patch = series.find(number)
        tree = self._work_tree_as_tree(git, include)
        if conflict is None:
            entry = state.applied[-1]
            if patch.sha256 != entry.sha256 and patch.diff != git.diff(git.tree_of(parent), git.tree_of(entry.commit)):
                raise PatchError(
                    f"The differences in {patch.name} were edited since it was applied: 'invoke patches apply' takes them in; only its message may be edited before a refresh."
                )
        later = [other for other in series.patches if other.number > number]
        same = conflict is None and tree == git.tree_of(state.commit) and patch.sha256 == state.applied[-1].sha256
        if same and not later:
            return self._applied(git, state, series.patches[: len(state.applied)], changed=False)
        commit = git.commit(tree, parent, patch.message.text(number))
        fresh = export_commit(git, commit)
        rebase = state.mode is Mode.REBASE
        outcome = conflict.outcome if conflict is not None else Outcome.CLEAN.value
        entry = Entry(number, patch.name if rebase else fresh.name, patch.sha256 if rebase else fresh.sha256, commit, outcome)
        before = State.load(self._before) if rebase else None
        chain = build(
            git, commit, later, merge=True, absorbed=OnAbsorbed.DROP if rebase else OnAbsorbed.KEEP, made_on=before.base_tree if before else None
        )
        for link in chain.links:
            if link.outcome is Outcome.ABSORBED:
                self.console.warn(f"{link.patch.name} changes nothing any more: 'invoke patches drop {link.patch.number}' takes it out.")
        fresh_state = replace(state, conflict=None, left_out=(*state.left_out, *(absorbed.name for absorbed in chain.absorbed)))
        done = self._carry_out(git, state, fresh_state, (*kept, entry), chain, write_back=not rebase, folded=number)
        return self._applied(git, done, self.folder.load().patches[: len(done.applied)], changed=True)

    def _settled(self, git: Git, conflict: Conflict) -> None:
        """Refuse to go on while markers or rejected parts lie about."""
        open_files = []
        for path in conflict.paths:
            file = self.tree / path
            if path.endswith(".rej"):
                if file.exists():
                    open_files.append(f"{path} (carry over what it holds, then delete it)")
            elif file.is_file() and any(line.startswith(MARKER) for line in file.read_bytes().split(b"\n")):
                open_files.append(f"{path} (has conflict markers)")
        if open_files:
            raise PatchError(
                f"The conflict of {conflict.name} is not settled yet: edit the files below in {self.tree}, then run 'invoke patches apply --continue'.",
                details="\n".join(open_files),
            )

    def _end_rebase(self, git: Git, state: State) -> State:
        """Write all patches as they are on the new base; the ones it has already go."""
        writes, entries = [], []
        for entry in state.applied:
            patch = export_commit(git, entry.commit)
            writes.append((entry.number, entry.commit))
            entries.append(replace(entry, name=patch.name, sha256=patch.sha256))
        for name in state.left_out:
            self.console.info(f"{name}: {state.base_label} has it already, taken out of the series")
        self._save(
            replace(
                state, mode=Mode.APPLY, applied=tuple(entries), left_out=(), write=Write(tuple(writes), state.left_out, git.tree_of(state.commit))
            )
        )
        done = self._settle(git)
        self._before.unlink(missing_ok=True)
        return done

    def _ready_to_reorder(self, git: Git, state: State) -> Series:
        self._no_conflict(state)
        self._no_foreign_commits(git, state)
        self._no_edits(git, "changing the order")
        series = self.folder.load()
        self._up_to_date(state, series)
        return series

    def _reorder(self, git: Git, state: State, order: Sequence[PatchFile], remove: tuple[str, ...], what: str) -> Chain:
        kept = _common(state.applied, order)
        chain = build(git, state.applied[kept - 1].commit if kept else state.base_commit, order[kept:], merge=True, absorbed=OnAbsorbed.KEEP)
        if chain.failed is not None:
            patch, tried = chain.failed
            raise PatchError(
                f"{what} conflicts: {failure(patch, tried)} Nothing was changed. To settle it by hand, rename or delete the file yourself, run 'invoke patches lint --fix' and 'invoke patches apply --merge'.",
                details="\n".join(f"{item.path}: {item.note}" for item in tried.files if item.note),
            )
        writes, entries = [], list(state.applied[:kept])
        for link in chain.links:
            patch = export_commit(git, link.commit)
            writes.append((patch.number, link.commit))
            entries.append(replace(_entry(link), name=patch.name, sha256=patch.sha256))
            if link.outcome is Outcome.ABSORBED:
                self.console.warn(f"{link.patch.name} changes nothing any more: 'invoke patches drop {link.patch.number}' takes it out.")
        target = entries[-1].commit if entries else state.base_commit
        self._save(replace(state, applied=tuple(entries), move=Move(state.commit, target), write=Write(tuple(writes), remove, git.tree_of(target))))
        self._settle(git, previous=state)
        return chain

    def _applied(self, git: Git, state: State, patches: Sequence[PatchFile], *, changed: bool) -> Applied:
        return Applied(
            self.tree, state.base_label, state.base_tree, git.tree_of(state.commit), state.commit, tuple(patches), changed, tuple(git.status())
        )


def _entry(link: Link) -> Entry:
    return Entry(link.patch.number, link.patch.name, link.patch.sha256, link.commit, link.outcome.value)


def _common(entries: Sequence[Entry], patches: Sequence[PatchFile]) -> int:
    """How many patches at the start are on as they are now on disk."""
    count = 0
    for entry, patch in zip(entries, patches, strict=False):
        if (entry.number, entry.sha256) != (patch.number, patch.sha256):
            break
        count += 1
    return count


def _placeable(patch: PatchFile, tried: Attempt) -> PatchFile:
    """The patch with renamed targets under their new names, to be laid out."""
    if not tried.renames:
        return patch
    head = patch.data[: patch.diff_start]
    return patchfile.parse(patch.name, head + patch.retargeted(dict(tried.renames)))


def _is_inside(path: Path, folder: Path) -> bool:
    return os.path.commonpath([path, folder]) == str(folder)
