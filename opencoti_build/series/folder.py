"""The folder of a series: its patch files and ``series.yaml``, which lists them and records what they were made on and give.

    schema: 1
    base:
      version: b11434          # label of the base tree
      tree: <40 hex>           # its git tree id
    tree: <40 hex>             # tree id with the whole series applied
    patches:                   # every file, in order
      - 0001-identity-....patch

The numbers in the file names decide the order; the list makes a file that is missing, or one that nobody listed, an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .. import files
from ..cache import digest_of
from ..errors import DataError
from ..patchfile import PatchFile, read
from ..schema import parse_yaml, read_text

LIST = "series.yaml"
SCHEMA = 1
_TREE = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Listing:
    """The content of ``series.yaml``; what it does not know it keeps."""

    base_version: str = ""
    base_tree: str = ""
    tree: str = ""
    patches: tuple[str, ...] = ()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Listing:
        """Raises DataError that names the field."""
        if not isinstance(data, dict):
            raise DataError(f"{where} is no mapping: 'invoke patches lint --fix' writes it anew.")
        if data.get("schema") != SCHEMA:
            raise DataError(f"{where} has schema {data.get('schema')!r}, this toolkit reads {SCHEMA}.")
        base = data.get("base") or {}
        patches = data.get("patches") or []
        if not isinstance(base, dict) or not isinstance(patches, list) or not all(isinstance(name, str) for name in patches):
            raise DataError(f"{where}: 'base' has to be a mapping and 'patches' a list of file names.")
        trees = {"base.tree": base.get("tree") or "", "tree": data.get("tree") or ""}
        for name, value in trees.items():
            if not isinstance(value, str) or (value and not _TREE.fullmatch(value)):
                raise DataError(f"{where}: '{name}' has to be a git tree id, 40 hex digits.")
        known = {"schema", "base", "tree", "patches"}
        rest = {key: value for key, value in data.items() if key not in known}
        return cls(str(base.get("version") or ""), trees["base.tree"], trees["tree"], tuple(patches), rest)

    def to_text(self) -> str:
        """The file's text."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "base": {"version": self.base_version, "tree": self.base_tree},
            "tree": self.tree,
            "patches": list(self.patches),
        }
        data.update(self.unknown)
        head = "# Written by 'invoke patches'; the numbers in the names decide the order.\n"
        return head + yaml.safe_dump(data, sort_keys=False, width=200, allow_unicode=True)


@dataclass(frozen=True)
class Series:
    """The patches of a folder in order, and its listing where there is one."""

    patches: tuple[PatchFile, ...]
    listing: Listing | None = None

    def digest(self, base_tree: str, schema: int) -> str:
        """Key of everything the patched tree depends on."""
        return digest_of({"schema": schema, "base": base_tree, "patches": [[patch.number, patch.sha256] for patch in self.patches]})

    def find(self, number: int) -> PatchFile:
        """The patch with a number; raises DataError when there is none."""
        for patch in self.patches:
            if patch.number == number:
                return patch
        have = ", ".join(f"{patch.number:04d}" for patch in self.patches) or "none yet"
        raise DataError(f"There is no patch {number:04d}; the series has {have}.")


@dataclass(frozen=True)
class SeriesFolder:
    """``patches/NAME``: the series of the upstream called NAME."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the upstream."""
        return self.path.name

    @property
    def list_path(self) -> Path:
        """Where ``series.yaml`` lies."""
        return self.path / LIST

    def listing(self) -> Listing | None:
        """What ``series.yaml`` says; None when there is no such file."""
        if not os.path.lexists(self.list_path):
            return None
        return Listing.from_dict(parse_yaml(read_text(self.list_path), str(self.list_path)), str(self.list_path))

    def names(self) -> list[str]:
        """Names of the patch files that lie here, in order."""
        return sorted(path.name for path in self.path.glob("*.patch")) if self.path.is_dir() else []

    def load(self) -> Series:
        """The series. Raises DataError when files and list disagree, two patches share a number, or one cannot be read."""
        names, listing = self.names(), self.listing()
        if listing is not None:
            if absent := [name for name in listing.patches if name not in names]:
                raise DataError(
                    f"{self.list_path} lists {absent[0]}, which is not there: restore it, or run 'invoke patches lint --fix' if it was taken out on purpose.",
                    details="\n".join(absent),
                )
            if unlisted := [name for name in names if name not in listing.patches]:
                raise DataError(
                    f"{unlisted[0]} is not listed in {self.list_path}: run 'invoke patches lint --fix' to list it, or remove it.",
                    details="\n".join(unlisted),
                )
        patches = sorted((read(self.path / name) for name in names), key=lambda patch: patch.number)
        for one, other in zip(patches, patches[1:], strict=False):
            if one.number == other.number:
                raise DataError(f"{one.name} and {other.name} share the number {one.number:04d}: rename one ('invoke patches lint' shows all).")
        return Series(tuple(patches), listing)

    def write(self, patch: PatchFile) -> bool:
        """Write a patch under its name; files of the same number with another name go. Says whether anything changed."""
        target = self.path / patch.name
        changed = not (target.is_file() and target.read_bytes() == patch.data)
        files.write_bytes(target, patch.data)
        for name in self.names():
            if name != patch.name and name.startswith(f"{patch.number:04d}-"):
                self.remove(name)
                changed = True
        return changed

    def remove(self, name: str) -> None:
        """Take a patch file away."""
        (self.path / name).unlink(missing_ok=True)

    def write_list(self, *, base_version: str, base_tree: str, tree: str) -> None:
        """List the patches that lie here, and record what they were made on and give."""
        unknown: Mapping[str, Any] = {}
        try:
            if (old := self.listing()) is not None:
                unknown = old.unknown
        except DataError:
            pass
        files.write_text(self.list_path, Listing(base_version, base_tree, tree, tuple(self.names()), unknown).to_text())


def numbers(patches: Iterable[PatchFile]) -> str:
    """``0001, 0005`` for a sentence."""
    return ", ".join(f"{patch.number:04d}" for patch in patches)
