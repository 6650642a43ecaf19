"""``patches check``: the files say exactly what the commits say, and give the recorded tree."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache import Cache
from .base import BaseTree, import_base
from .chain import build, export_commit, failure, remember, scratch_repository
from .engine import Outcome
from .folder import SeriesFolder


@dataclass(frozen=True)
class Problem:
    """Something that does not hold: which patch (or file), what, and what to do."""

    name: str
    what: str
    advice: str


@dataclass(frozen=True)
class Check:
    """The result; ``tree_id`` and ``commit`` are those of the whole series where it applies."""

    problems: tuple[Problem, ...]
    tree_id: str | None = None
    commit: str | None = None
    patches: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return not self.problems


def check(folder: SeriesFolder, base: BaseTree, cache: Cache) -> Check:
    """Apply the series in a throw-away repository and compare every export with its file, byte for byte.

    Every patch has to fit at the very lines it names, one commit a patch, and the tree at the end has to be the one that
    ``series.yaml`` records.
    """
    series, base = folder.load(), base.identified()
    problems: list[Problem] = []
    with scratch_repository(import_base(folder.name, base, cache)) as git:
        chain = build(git, "refs/heads/base", series.patches)
        for link in chain.links:
            if link.outcome is not Outcome.CLEAN:
                problems.append(
                    Problem(
                        link.patch.name,
                        f"fits with an {link.outcome.value} only ({link.attempt.note})",
                        "invoke patches apply, then invoke patches export --force",
                    )
                )
            written = export_commit(git, link.commit)
            if written.name != link.patch.name:
                problems.append(Problem(link.patch.name, f"would be exported as {written.name}", "invoke patches lint --fix"))
            if written.data != link.patch.data:
                problems.append(
                    Problem(
                        link.patch.name,
                        "differs from its own export: " + _difference(link.patch.data, written.data),
                        "invoke patches apply, then invoke patches export --force",
                    )
                )
        if chain.failed is not None:
            problems.append(Problem(chain.failed[0].name, failure(*chain.failed), "invoke patches apply"))
            return Check(tuple(problems), patches=len(series.patches))
        made = len(git.commits("refs/heads/base", chain.commit)) if chain.links else 0
        if made != len(series.patches):
            problems.append(Problem(folder.name, f"{len(series.patches)} patches gave {made} commits", "invoke patches status"))
        listing = series.listing
        if listing is None:
            problems.append(Problem("series.yaml", "is not there", "invoke patches lint --fix, then invoke patches export"))
        else:
            if listing.base_tree != base.tree_id:
                problems.append(
                    Problem(
                        "series.yaml",
                        f"records the base {listing.base_version or '(none)'} {listing.base_tree or '(no tree)'}, the pin says {base.label} {base.tree_id}",
                        "invoke patches export",
                    )
                )
            if listing.tree != chain.tree:
                problems.append(
                    Problem(
                        "series.yaml",
                        f"records the tree {listing.tree or '(none)'}, the series gives {chain.tree}",
                        "invoke patches apply, then invoke patches export",
                    )
                )
        if not problems:
            remember(series, base, folder.name, cache, chain.tree, chain.commit)
        return Check(tuple(problems), chain.tree, chain.commit, len(series.patches))


def _difference(one: bytes, other: bytes) -> str:
    lines, others = one.split(b"\n"), other.split(b"\n")
    for number, (left, right) in enumerate(zip(lines, others, strict=False), 1):
        if left != right:
            return f"line {number} is {left.decode('utf-8', 'replace')!r}, exported it is {right.decode('utf-8', 'replace')!r}"
    return f"{len(lines)} lines, exported {len(others)}"
