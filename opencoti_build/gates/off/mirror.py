"""Makes one folder the copy of another, writing only what differs: what a compiler has seen before keeps its time."""

from __future__ import annotations

import filecmp
import os
import shutil
from pathlib import Path

from ...files import disk_errors


def mirror(source: Path, target: Path) -> int:
    """Give ``target`` the files, links and executable bits of ``source``, but its ``.git``; returns how many entries changed.

    Contents are compared, not times. Raises DiskError.
    """
    with disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        return _mirror(source, target, top=True)


def _mirror(source: Path, target: Path, *, top: bool = False) -> int:
    wanted = {entry.name: entry for entry in os.scandir(source) if not (top and entry.name == ".git")}
    there = {entry.name: entry for entry in os.scandir(target)}
    changed = 0
    for name, entry in there.items():
        if name not in wanted or _kind(entry) != _kind(wanted[name]):
            _remove(target / name)
            changed += 1
    for name, entry in wanted.items():
        place, original = target / name, source / name
        if _kind(entry) == "folder":
            place.mkdir(exist_ok=True)
            changed += _mirror(original, place)
        elif _kind(entry) == "link":
            if not place.is_symlink() or os.readlink(place) != os.readlink(original):
                place.unlink(missing_ok=True)
                os.symlink(os.readlink(original), place)
                changed += 1
        elif not place.exists() or not filecmp.cmp(original, place, shallow=False):
            # Not copy2: a time in the past would hide the change from ninja.
            place.unlink(missing_ok=True)
            shutil.copyfile(original, place)
            shutil.copymode(original, place)
            changed += 1
        elif (original.stat().st_mode ^ place.stat().st_mode) & 0o111:
            shutil.copymode(original, place)
            changed += 1
    return changed


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "folder" if entry.is_dir() else "file"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
