"""``invoke pin``: what is pinned, whether files are what is pinned, and what changed."""

from __future__ import annotations

import json as json_module
import os
import sys
from pathlib import Path

from invoke import Collection
from invoke.context import Context

from .. import pin_check, pin_diff, pins
from ..console import Console, human_bytes
from ..errors import ManifestError, OpencotiError, UsageError
from ..pins import File, Pins
from .common import CommandContext, command, context


def _folder(made: CommandContext, given: str) -> Path:
    """The folder of pin files that ``given`` means: itself, or the ``pin/`` in it; the project's where nothing is given."""
    if not given:
        return made.project.pins
    path = Path(given)
    if not path.is_dir():
        raise UsageError(f"There is no folder {path}.")
    return path / pins.FOLDER if (path / pins.FOLDER).is_dir() else path


def _release(made: CommandContext, folder: Path) -> Pins:
    """Its pin files; the project's own folder may be without any, which deserves its own words."""
    if folder == made.project.pins and not any(folder.glob("*.txt")):
        raise ManifestError(f"This checkout pins nothing yet: {folder} gets its files with a cut. Name the folder of a release.")
    return pins.read_folder(folder)


@command(
    help={"component": "one component, or 'index' (default: what the index names, or everything)", "dir": "the pin files' folder (default: the project's pin/)", "json": "print JSON instead of a table"},
    optional=("component",),
)
def show(c: Context, component: str = "", dir: str = "", json: bool = False) -> None:
    """Show which files are pinned: platform, size, build, sha256, path."""
    made = context(c)
    found = _release(made, _folder(made, dir))
    known = {**found.components, **({pins.INDEX: found.index} if found.index is not None else {})}
    if component and component not in known:
        raise UsageError(f"There is no {component}{pins.SUFFIX} in {found.folder}: there are {', '.join(sorted(known))}.")
    rows = known[component].rows if component else found.current if found.index is not None else found.rows
    unknown = [line for name, pin in sorted(known.items()) if not component or name == component for line in pin.unknown]
    if json:
        print(json_module.dumps({"schema": 1, "folder": str(found.folder), "rows": [row.to_dict() for row in rows], "unknown": unknown, "problems": list(found.problems())}, indent=1))
        return
    table = [
        (row.component, row.platform if isinstance(row, File) else "sidecar", human_bytes(row.size) if row.size is not None else "-", row.build if isinstance(row, File) else "-", row.path if isinstance(row, File) else row.name, row.sha256)
        for row in rows
    ]
    Console(sys.stdout).table(f"Pinned in {found.folder}", ("component", "platform", "size", "build", "path", "sha256"), table, right=(2,))
    for problem in found.problems():
        made.console.warn(f"{problem}.")
    if unknown:
        made.console.info(f"{len(unknown)} lines are of a later version of the format and are not shown.")


@command(
    help={
        "target": "a folder (a release, or downloads in one folder) or files; several may be named",
        "pins": "the pin files' folder (default: the nearest pin/ in or above each target, then the project's)",
        "strict": "a pinned file that is not there is a failure",
        "json": "print the report as JSON on standard output",
    },
    rest="target",
)
def check(c: Context, target: list[str], pins: str = "", strict: bool = False, json: bool = False) -> None:
    """Check files on disk against pins: size and sha256. Folders and files can be mixed."""
    made = context(c)
    try:
        report = _check(made, [Path(text) for text in target], _folder(made, pins) if pins else None, strict)
    except OpencotiError as error:
        if json:
            print(json_module.dumps(pin_check.unread(error), indent=1))
        raise
    if json:
        print(json_module.dumps(report.to_dict(), indent=1))
    else:
        report.show(made.console)
    if report.error is not None:
        raise report.error


def _check(made: CommandContext, targets: list[Path], given: Path | None, strict: bool) -> pin_check.Report:
    """Each target against the pins that are nearest to it; the files are hashed together."""
    loaded: dict[Path, Pins] = {}
    reports = []
    named: dict[Path, list[Path]] = {}
    for path in targets:
        if not os.path.lexists(path):
            raise UsageError(f"There is no file or folder {path}.")
        folder = given or pin_check.find_pins(path if path.is_dir() else path.parent) or made.project.pins
        if folder not in loaded:
            loaded[folder] = _release(made, folder)
        if path.is_dir():
            reports.append(pin_check.folder(path, loaded[folder], strict=strict, console=made.console))
        else:
            named.setdefault(folder, []).append(path)
    reports += [pin_check.named(paths, loaded[folder], console=made.console) for folder, paths in named.items()]
    return pin_check.Report.merge(reports)


@command(help={"old": "a pin file, or a folder of pin files", "new": "the other one", "json": "print JSON instead of a table"})
def diff(c: Context, old: str, new: str, json: bool = False) -> None:
    """Show which rows two pin files, or two folders of them, do not share: added, gone, changed."""
    made = context(c)
    sides = []
    for text in (old, new):
        path = Path(text)
        sides.append(_release(made, _folder(made, text)).rows if path.is_dir() else pins.parse_file(path).rows)
    changes = pin_diff.compare(*sides)
    if json:
        print(json_module.dumps({"schema": 1, "old": old, "new": new, "changes": [change.to_dict() for change in changes]}, indent=1))
    else:
        pin_diff.show(changes, Console(sys.stdout))


ns = Collection("pin")
for _task in (show, check, diff):
    ns.add_task(_task)
