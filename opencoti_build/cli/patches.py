"""``invoke patches``: the series on the pinned upstream, its work tree, and its upkeep."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path

from invoke import Collection
from invoke.context import Context

from .. import lint as linting
from .. import rebase as rehearsing
from ..bump import bump
from ..console import Console, count_of
from ..errors import DownloadError, LintError, OfflineError, PatchError, UsageError
from ..gates import series_gate
from ..series import Applied, BaseTree, SeriesFolder, Workspace, export_repository
from ..series.bisect import bisect as search
from ..series.chain import failure, record, table
from ..series.check import check as prove
from ..sources import UPSTREAM, Upstream, upstream_pin
from ..vendors import Fetcher, Pin, load_pins
from .common import CommandContext, command, context

_TREE = "Folder of the work tree; without it build/src/llama.cpp."


@dataclass(frozen=True)
class _Place:
    made: CommandContext
    folder: SeriesFolder
    base: BaseTree
    tree: Path

    @property
    def workspace(self) -> Workspace:
        return self.at(self.tree)

    def at(self, tree: Path, base: BaseTree | None = None) -> Workspace:
        return Workspace(self.folder, tree, base or self.base, self.made.cache, self.made.console)


def _fetcher(made: CommandContext) -> Fetcher:
    return Fetcher(made.cache, made.console, made.runner, offline=made.offline)


def _base(made: CommandContext, pin: Pin) -> BaseTree:
    fetcher = _fetcher(made)
    return BaseTree(pin.version, lambda: fetcher.unpacked(pin), pin.package(fetcher.platform).tree)


def _place(c: Context, tree: str = "") -> _Place:
    made = context(c)
    pin = upstream_pin(load_pins(made.project.vendors), made.project.vendors)
    where = Path(tree) if tree else made.project.build / "src" / UPSTREAM
    return _Place(made, SeriesFolder(made.project.patches / UPSTREAM), _base(made, pin), where)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 4:
        raise UsageError(f"'{text}' is no number of a patch: write it as 10 or 0010.")
    return int(text)


def _report(place: _Place, done: Applied) -> None:
    count = len(done.patches)
    what = f"{count_of(count, 'patch', 'patches')} on {done.base_label}, tree {done.tree_id}, in {done.path}"
    place.made.console.success(what if done.changed else f"already applied: {what}")
    if done.edits:
        place.made.console.warn(
            f"{count_of(len(done.edits), 'uncommitted edit')} in {done.path}: 'invoke patches refresh' folds that into patch {done.patches[-1].number:04d}."
            if done.patches
            else f"{count_of(len(done.edits), 'uncommitted edit')} in {done.path}."
        )


@command(help={"tree": _TREE, "json": "Print JSON instead of a table."})
def status(c: Context, tree: str = "", json: bool = False) -> None:
    """Show every patch, which are applied, where the work tree stands, and what to run next."""
    place = _place(c, tree)
    now = place.workspace.status()
    if json:
        rows = [
            {
                "number": row.patch.number,
                "name": row.patch.name,
                "title": row.patch.title,
                "state": row.state,
                "current": row.current,
                "added": row.patch.added,
                "removed": row.patch.removed,
                "files": [change.path for change in row.patch.files],
                "sha256": row.patch.sha256,
            }
            for row in now.rows
        ]
        edits = [{"state": code, "path": path} for code, path in now.edits]
        print(
            json_module.dumps(
                {
                    "base": now.base_label,
                    "work_tree": str(now.path),
                    "exists": now.exists,
                    "tree": now.tree_id,
                    "patches": rows,
                    "edits": edits,
                    "note": now.note,
                    "next": now.next,
                },
                indent=1,
            )
        )
        return
    lines = [
        (("> " if row.current else "  ") + cells[0], *cells[1:2], row.state, *cells[2:])
        for row, cells in zip(now.rows, table([row.patch for row in now.rows]), strict=True)
    ]
    Console(sys.stdout).table(
        f"{UPSTREAM} {now.base_label}, work tree {now.path}", ("  number", "title", "state", "lines", "files"), lines, right=(3, 4)
    )
    for code, path in now.edits:
        print(f"{code} {path}")
    if now.rows and not place.folder.list_path.exists():
        place.made.console.warn(f"{place.folder.list_path} is not there: 'invoke patches lint --fix' and 'invoke patches export' write it anew; builds refuse until then.")
    if not now.rows and not place.folder.path.is_dir():
        place.made.console.warn(f"{place.folder.path} is not there: builds refuse without patches.")
    if now.note:
        place.made.console.warn(now.note)
    if now.next:
        place.made.console.info(f"next: {now.next}")


@command(
    help={
        "tree": _TREE,
        "to": "Stop after this patch; 0 takes all off.",
        "merge": "Take 3-way merges where a patch does not fit as it is, and write those patches back.",
        "continue": "Go on after a conflict was settled in the work tree.",
        "abort": "Leave a conflict; what was edited is kept as a difference file.",
    }
)
def apply(c: Context, tree: str = "", to: str = "", merge: bool = False, continue_: bool = False, abort: bool = False) -> None:
    """Bring the series onto the pristine tree, one commit per patch."""
    place = _place(c, tree)
    if sum((bool(to), merge, continue_, abort)) > 1:
        raise UsageError("--to, --merge, --continue and --abort exclude one another: give one.")
    if abort:
        kept = place.workspace.abort()
        place.made.console.success("the conflict is left" + (f"; the edits are kept in {kept}" if kept else ""))
    elif continue_:
        _report(place, place.workspace.resume())
    else:
        _report(place, place.workspace.apply(to=_number(to) if to else None, merge=merge))


@command(
    help={"number": "Four digits that nobody has yet; they decide the place in the series.", "title": "'area: what the patch does'.", "tree": _TREE}
)
def new(c: Context, number: str, title: str, tree: str = "") -> None:
    """Start a patch: its file gets a message to fill in, the work tree stands on it."""
    place = _place(c, tree)
    patch = place.workspace.new(_number(number), title)
    print(place.folder.path / patch.name)
    place.made.console.success(f"fill in the message in that file, edit in {place.tree}, then run 'invoke patches refresh'")


@command(help={"number": "The patch to stand on; later ones are taken off until the next refresh or apply.", "tree": _TREE})
def edit(c: Context, number: str, tree: str = "") -> None:
    """Put the work tree at a patch, for editing it."""
    place = _place(c, tree)
    wanted = place.folder.load().find(_number(number))
    _report(place, place.workspace.apply(to=wanted.number))
    place.made.console.success(f"edit in {place.tree}, then run 'invoke patches refresh'")


@command(
    help={"include": "A new file that the tree's own ignore rules would leave out; may be given several times.", "tree": _TREE}, iterable=["include"]
)
def refresh(c: Context, include: list[str], tree: str = "") -> None:
    """Fold the edits into the current patch, write its file, and put the later patches on again."""
    place = _place(c, tree)
    _report(place, place.workspace.refresh(include))


@command(
    help={
        "from-repo": "Take the commits of this git repository instead of the work tree's; each has a number, 'NNNN area: sentence' or a line 'Number: NNNN', or gets it by its subject or --numbers.",
        "base": "With --from-repo: the commit that its patches start from.",
        "numbers": "With --from-repo: numbers for the commits that have none, in order, such as 1,5,10.",
        "force": "Overwrite patch files that were edited since they were applied.",
        "remove": "Remove the files of patches whose commits were taken out in the work tree.",
        "tree": _TREE,
    }
)
def export(c: Context, from_repo: str = "", base: str = "", numbers: str = "", force: bool = False, remove: bool = False, tree: str = "") -> None:
    """Write the applied patches to patches/llama.cpp; equal input gives equal bytes."""
    place = _place(c, tree)
    if bool(from_repo) != bool(base):
        raise UsageError("--from-repo needs --base, the commit that its patches start from, and the other way round.")
    if from_repo and remove:
        raise UsageError("--remove is about commits taken out in the work tree, --from-repo removes none: give one.")
    if from_repo:
        given = [_number(number.strip()) for number in numbers.split(",") if number.strip()]
        names = [
            patch.name
            for patch in export_repository(place.folder, Path(from_repo), base, place.made.console, base_tree=place.base.tree_id, numbers=given)
        ]
        if failed := record(place.folder, place.base, place.made.cache):
            place.made.console.warn(f"{failure(*failed)} 'invoke patches apply --merge' takes what a 3-way merge can settle and writes it back.")
    else:
        names = place.workspace.export(force=force, remove=remove)
    for name in names:
        print(name)
    place.made.console.success(f"{count_of(len(names), 'patch file')} {'written or removed' if remove else 'written'}" if names else "every patch file is as the work tree has it")


@command(help={"number": "The patch.", "to": "Its new number, which nobody has yet.", "tree": _TREE})
def move(c: Context, number: str, to: str, tree: str = "") -> None:
    """Give a patch another number, and so another place; nothing changes when that conflicts."""
    place = _place(c, tree)
    chain = place.workspace.move(_number(number), _number(to))
    place.made.console.success(f"moved; the series gives tree {chain.tree}")


@command(help={"number": "The patch.", "tree": _TREE})
def drop(c: Context, number: str, tree: str = "") -> None:
    """Take a patch out of the series; nothing changes when a later one needs it."""
    place = _place(c, tree)
    chain = place.workspace.drop(_number(number))
    place.made.console.success(f"dropped; the series gives tree {chain.tree}")


@command(
    help={
        "strict": "Warnings count as errors.",
        "fix": "List the files anew and give them the names their subjects ask for.",
        "json": "Print JSON instead of a table.",
    }
)
def lint(c: Context, strict: bool = False, fix: bool = False, json: bool = False) -> None:
    """Hold the series against the rules of patches/README.md."""
    place = _place(c)
    if fix:
        for line in linting.fix(place.folder):
            place.made.console.info(line)
    findings = linting.lint(place.folder)
    if not any(finding.rule in linting.LOADING for finding in findings):
        try:
            findings += linting.absorbed(place.folder, place.base, place.made.cache)
        except (DownloadError, OfflineError) as error:
            place.made.console.warn(f"not looked for absorbed patches, because the pinned tree is not here: {error.message}")
    if json:
        print(json_module.dumps([finding.to_dict() for finding in findings], indent=1))
    elif findings:
        rows = [
            (
                finding.rule.id,
                finding.rule.severity.value,
                f"{finding.file}:{finding.line}" if finding.line else finding.file,
                finding.what,
                finding.rule.advice,
            )
            for finding in findings
        ]
        Console(sys.stdout).table("Findings", ("rule", "kind", "where", "what", "what to do"), rows)
    counted = [finding for finding in findings if strict or finding.rule.severity is linting.Severity.ERROR]
    if counted:
        raise LintError(
            f"{count_of(len(counted), 'finding')} in {place.folder.path}: 'invoke patches lint --fix' settles names and the list, the rest is said above."
        )
    place.made.console.success(f"{count_of(len(place.folder.names()), 'patch', 'patches')}, {count_of(len(findings), 'warning')}")


@command(help={})
def check(c: Context) -> None:
    """Prove that the files are what the commits export, byte for byte, and give the recorded tree."""
    place = _place(c)
    result = prove(place.folder, place.base, place.made.cache)
    if not result.ok:
        Console(sys.stdout).table("Problems", ("file", "what", "run"), [(problem.name, problem.what, problem.advice) for problem in result.problems])
        raise PatchError(f"{len(result.problems)} of the series' promises do not hold: see the table.")
    place.made.console.success(f"export is the same byte for byte: {count_of(result.patches, 'patch', 'patches')}, which give tree {result.tree_id}")


@command(
    help={
        "to": "The upstream version to try, such as b11500.",
        "source": "Folder with that version's files, instead of fetching it.",
        "continue": "Do it for real: the work tree moves to that version, the patch files are rewritten.",
        "tree": _TREE,
        "json": "Print JSON instead of tables.",
    }
)
def rebase(c: Context, to: str, source: str = "", continue_: bool = False, tree: str = "", json: bool = False) -> None:
    """Try the series on another upstream version: every patch, the enums, the flags; with --continue bring it there."""
    place = _place(c, tree)
    made = place.made
    if source:
        target = BaseTree.at(Path(source), to)
    else:
        fetcher = _fetcher(made)
        change = bump(made.project.vendors / f"{UPSTREAM}.yaml", to, fetcher, accept_licence=True, write=False)
        moved = change.after
        if moved.licence_file != change.before.licence_file:
            made.console.warn(f"the licence's text of {UPSTREAM} {to} is another one: read it before you pin that version.")
        target = BaseTree(moved.version, lambda: fetcher.unpacked(moved), moved.package(fetcher.platform).tree)
    if continue_:
        _report(place, place.workspace.rebase(target))
        made.console.success(f"now pin it: invoke vendor bump {UPSTREAM} {to}")
        return
    result = rehearsing.rehearse(place.folder, place.base, target, made.cache, made.console)
    if json:
        print(json_module.dumps(result.to_dict(), indent=1))
        return
    for title, columns, rows in result.tables():
        Console(sys.stdout).table(title, columns, rows)
    made.console.info(result.verdict)


@command(
    help={
        "run": "Shell line to run in the tree: exit code 0 is good, 125 cannot tell, others are bad. OPENCOTI_PATCH holds the number.",
        "gate": "Instead of a shell line: a gate of 'invoke gate series'.",
        "tree": "Folder of the work tree for --run; without it build/bisect/llama.cpp.",
    }
)
def bisect(c: Context, run: str = "", gate: str = "", tree: str = "") -> None:
    """Find the first patch after which a command or a gate fails."""
    if bool(run) == bool(gate):
        raise UsageError("Give either --run 'a shell line' or --gate NAME.")
    place = _place(c)
    if gate:
        upstream = Upstream.load(place.made)
        chain = series_gate.states(upstream.folder, upstream.base, place.made.cache, place.made.console)
        asked = series_gate.gate_named(series_gate.gates(place.made, upstream), gate)
        result, each = series_gate.first_failure(chain, asked, place.made.console), not asked.cumulative
    else:
        workspace = place.at(Path(tree) if tree else place.made.project.build / "bisect" / UPSTREAM)
        result, each = search(workspace, run, place.made.runner, place.made.console), False
    what = f"the gate {gate}" if gate else "the command"
    if result.first is None:
        scope = "every patch" if each else "the whole series"
        place.made.console.success(f"{what} holds with {scope} ({count_of(result.runs, 'run')})")
        return
    print(result.first.name)
    doubt = f", or one of {', '.join(patch.name for patch in result.skipped)}, which it could not judge" if result.skipped else ""
    raise PatchError(f"{result.first.name} is the first patch after which {what} fails{doubt} ({count_of(result.runs, 'run')}).")


ns = Collection("patches", status, apply, new, edit, refresh, export, move, drop, lint, check, rebase, bisect)
