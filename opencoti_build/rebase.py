"""``patches rebase --to VERSION`` without ``--continue``: a rehearsal.

Both upstream trees and the series meet in a throw-away repository. Every patch is tried, none hides behind an earlier one: where a patch
conflicts, the later ones go on from a tree in which that conflict was decided for the patch. Besides, what the series depends on
without touching it is compared: values of upstream's enums (a new upstream type may take a number of ours) and command line flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .cache import Cache
from .console import Console
from .errors import GitError, PatchError
from .git import Git
from .patchfile import PatchFile
from .series.base import BaseTree, import_base
from .series.chain import build, failure, scratch_repository
from .series.engine import Attempt, Outcome, attempt
from .series.folder import SeriesFolder

ENUMS: tuple[tuple[str, str], ...] = (("ggml/include/ggml.h", "ggml_type"), ("ggml/include/ggml.h", "ggml_op"))
"""File and name of the enums whose values are written into files or shared with libraries."""

FLAGS_FILE = "common/arg.cpp"
"""Where upstream declares its command line flags."""


@dataclass(frozen=True)
class Trial:
    """One patch on the new base. ``after`` are earlier patches of the same files that did not go on by themselves."""

    patch: PatchFile
    attempt: Attempt
    after: tuple[int, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """How it went."""
        return self.attempt.outcome


@dataclass(frozen=True)
class EnumChange:
    """How an enum differs. ``clashes`` are values of the series that upstream now uses for something else."""

    name: str
    added: tuple[tuple[str, int], ...] = ()
    removed: tuple[tuple[str, int], ...] = ()
    renumbered: tuple[tuple[str, int, int], ...] = ()
    clashes: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class FlagChange:
    """Flags upstream added and removed; ``clashes`` are flags of the series that upstream has now too."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    clashes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """Everything a person wants to know before moving the base."""

    old_label: str
    new_label: str
    new_tree: str
    trials: tuple[Trial, ...]
    enums: tuple[EnumChange, ...]
    flags: FlagChange
    files_changed: int

    @property
    def failing(self) -> tuple[Trial, ...]:
        """Patches that need a person."""
        return tuple(trial for trial in self.trials if trial.attempt.tree is None)

    @property
    def verdict(self) -> str:
        """The last line."""
        counts = {outcome: sum(trial.outcome is outcome for trial in self.trials) for outcome in Outcome}
        told = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count) or "no patches"
        clashes = sum(len(enum.clashes) for enum in self.enums) + len(self.flags.clashes)
        warned = f"; {clashes} clashes of enum values or flags to settle first" if clashes else ""
        return f"{self.old_label} -> {self.new_label}: {told}{warned}. For real: invoke patches rebase --to {self.new_label} --continue"

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Title, columns and rows of what is worth a table."""
        rows: list[tuple[str, ...]] = [(f"{trial.patch.number:04d}", trial.patch.title, trial.outcome.value, _note(trial)) for trial in self.trials]
        tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
            (f"Series on {self.new_label} ({self.files_changed} files differ from {self.old_label})", ("number", "title", "outcome", "note"), rows)
        ]
        changes: list[tuple[str, ...]] = []
        for enum in self.enums:
            changes += [(enum.name, "clash", name, f"{value}, upstream has {other} there") for name, value, other in enum.clashes]
            changes += [(enum.name, "added", name, str(value)) for name, value in enum.added]
            changes += [(enum.name, "removed", name, str(value)) for name, value in enum.removed]
            changes += [(enum.name, "renumbered", name, f"{old} -> {new}") for name, old, new in enum.renumbered]
        if changes:
            tables.append(("Enums", ("enum", "change", "name", "value"), changes))
        flags = (
            [("clash", flag) for flag in self.flags.clashes]
            + [("added", flag) for flag in self.flags.added]
            + [("removed", flag) for flag in self.flags.removed]
        )
        if flags:
            tables.append(("Flags", ("change", "flag"), list(flags)))
        return tables

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "from": self.old_label,
            "to": self.new_label,
            "tree": self.new_tree,
            "patches": [
                {
                    "number": trial.patch.number,
                    "title": trial.patch.title,
                    "outcome": trial.outcome.value,
                    "after": list(trial.after),
                    "files": [{"path": item.path, "outcome": item.outcome.value, "note": item.note} for item in trial.attempt.files],
                }
                for trial in self.trials
            ],
            "enums": [
                {
                    "name": enum.name,
                    "added": dict(enum.added),
                    "removed": dict(enum.removed),
                    "renumbered": {name: [old, new] for name, old, new in enum.renumbered},
                    "clashes": [list(clash) for clash in enum.clashes],
                }
                for enum in self.enums
            ],
            "flags": {"added": list(self.flags.added), "removed": list(self.flags.removed), "clashes": list(self.flags.clashes)},
        }


def _note(trial: Trial) -> str:
    after = f"touches what {', '.join(f'{number:04d}' for number in trial.after)} left open; " if trial.after else ""
    return after + trial.attempt.note


def rehearse(folder: SeriesFolder, old: BaseTree, new: BaseTree, cache: Cache, console: Console) -> Rehearsal:
    """Try the series of ``old`` on ``new``. Raises PatchError when it does not apply to ``old`` to begin with."""
    series = folder.load()
    old_pack, new_pack = import_base(folder.name, old, cache), import_base(folder.name, new, cache)
    with scratch_repository(old_pack, new_pack) as git:
        chain = build(git, old_pack.commit, series.patches)
        if chain.failed is not None:
            raise PatchError(
                f"{failure(*chain.failed)} The series has to apply to {old.label} before it can be tried on {new.label}.", details=chain.failed[1].log
            )
        trials: list[Trial] = []
        tree = new_pack.tree_id
        with console.progress("patches", len(series.patches)) as meter:
            for patch in series.patches:
                tried = attempt(git, tree, patch, made_on=old_pack.tree_id)
                open_before = tuple(
                    trial.patch.number for trial in trials if trial.attempt.tree is None and set(trial.patch.paths) & set(patch.paths)
                )
                trials.append(Trial(patch, tried, open_before))
                tree = tried.tree or tried.provisional or tree
                meter.advance()
        enums = tuple(
            change for path, name in ENUMS if (change := _enum_change(git, path, name, old_pack.tree_id, chain.tree, new_pack.tree_id)) is not None
        )
        old_flags, our_flags, new_flags = (flags_in(_text(git, item, FLAGS_FILE)) for item in (old_pack.tree_id, chain.tree, new_pack.tree_id))
        flags = FlagChange(
            tuple(sorted(new_flags - old_flags)), tuple(sorted(old_flags - new_flags)), tuple(sorted((our_flags - old_flags) & new_flags))
        )
        changed = len(git.changed(old_pack.tree_id, new_pack.tree_id))
        return Rehearsal(old.label, new.label, new_pack.tree_id, tuple(trials), enums, flags, changed)


def _text(git: Git, tree: str, path: str) -> str:
    try:
        return git.blob(f"{tree}:{path}").decode("utf-8", "replace")
    except GitError:
        return ""


def _enum_change(git: Git, path: str, name: str, old_tree: str, our_tree: str, new_tree: str) -> EnumChange | None:
    old, ours, new = (enum_in(_text(git, tree, path), name) for tree in (old_tree, our_tree, new_tree))
    own = {key: value for key, value in ours.items() if key not in old}
    by_value: dict[int, str] = {}
    for key, value in new.items():
        if not key.endswith("_COUNT"):
            by_value.setdefault(value, key)
    change = EnumChange(
        name,
        tuple((key, value) for key, value in new.items() if key not in old),
        tuple((key, value) for key, value in old.items() if key not in new),
        tuple((key, old[key], value) for key, value in new.items() if key in old and old[key] != value),
        tuple((key, value, by_value[value]) for key, value in own.items() if value in by_value and by_value[value] != key),
    )
    return change if change != EnumChange(name) else None


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def enum_in(source: str, name: str) -> dict[str, int]:
    """Names and values of ``enum NAME`` in C source; values count up where none is given. Empty when there is no such enum."""
    match = re.search(rf"\benum\s+{re.escape(name)}\s*(?::[^{{]*)?\{{(.*?)\}}", _COMMENT.sub("", source), re.S)
    if match is None:
        return {}
    values: dict[str, int] = {}
    following = 0
    for item in match[1].split(","):
        key, _, text = (part.strip() for part in item.partition("="))
        if not re.fullmatch(r"[A-Za-z_]\w*", key):
            continue
        if text:
            if text in values:
                following = values[text]
            else:
                try:
                    following = int(text, 0)
                except ValueError:
                    continue
        values[key] = following
        following += 1
    return values


def flags_in(source: str) -> set[str]:
    """Flags that C++ source declares: string literals like ``"-x"`` or ``"--long-flag"`` inside braces of an argument's name list."""
    found: set[str] = set()
    for match in re.finditer(r"\{\s*((?:\"(?:[^\"\\\n]|\\.)*\"\s*,?\s*)+)\}", _without_comments(source)):
        literals = [literal[1:-1] for literal in _LITERAL.findall(match[1])]
        if literals and all(re.fullmatch(r"--?[A-Za-z0-9][A-Za-z0-9._-]*", literal) for literal in literals):
            found.update(literals)
    return found


def _without_comments(source: str) -> str:
    """Comments out, string literals untouched (a literal may hold ``//``)."""
    return re.sub(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', lambda match: match[0] if match[0].startswith('"') else " ", source, flags=re.S)
