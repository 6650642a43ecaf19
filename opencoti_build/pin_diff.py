"""What changed between two sets of pins: rows added, gone and changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .console import Console, count_of
from .pins import SUFFIX, File, Row


class Kind(Enum):
    """What happened to a row."""

    ADDED = "added"
    GONE = "gone"
    CHANGED = "changed"


@dataclass(frozen=True)
class Change:
    """A row before and after; ``old`` is None for an added one, ``new`` for one that is gone."""

    old: Row | None
    new: Row | None

    @property
    def kind(self) -> Kind:
        """What happened."""
        return Kind.ADDED if self.old is None else Kind.GONE if self.new is None else Kind.CHANGED

    @property
    def row(self) -> Row:
        """The newer of the two."""
        made = self.new or self.old
        assert made is not None
        return made

    @property
    def fields(self) -> dict[str, tuple[Any, Any]]:
        """For a changed row, what differs: name of the field to its old and new value."""
        if self.old is None or self.new is None:
            return {}
        old, new = _flat(self.old), _flat(self.new)
        return {key: (old.get(key), new.get(key)) for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)}

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        sides = {"old": self.old.to_dict() if self.old else None, "new": self.new.to_dict() if self.new else None}
        return {"kind": self.kind.value, **sides, "fields": {key: list(values) for key, values in self.fields.items()}}


def _flat(row: Row) -> dict[str, Any]:
    value = row.to_dict()
    extra = value.pop("attributes", {})
    return value | (dict(extra) if isinstance(extra, Mapping) else {})


def _key(row: Row) -> tuple[str, str, str]:
    """What makes two rows the same file of different builds: the path names the build, so only its last part counts."""
    return row.component, row.platform if isinstance(row, File) else "", row.name


def compare(old: Iterable[Row], new: Iterable[Row]) -> tuple[Change, ...]:
    """The changes, by component, platform and name. Equal rows are no change, wherever they stand."""
    before, after = list(old), list(new)
    gone = [row for row in before if row not in after]
    added = [row for row in after if row not in before]
    changes = []
    for row in sorted(added, key=_key):
        twin = next((other for other in gone if _key(other) == _key(row)), None)
        if twin is not None:
            gone.remove(twin)
        changes.append(Change(twin, row))
    changes += [Change(row, None) for row in gone]
    return tuple(sorted(changes, key=lambda change: (*_key(change.row), change.kind.value)))


def show(changes: tuple[Change, ...], console: Console) -> None:
    """Print the table and a line of totals."""
    rows = []
    for change in changes:
        fields = "\n".join(f"{name}: {before if before is not None else '-'} -> {after if after is not None else '-'}" for name, (before, after) in change.fields.items())
        where = change.row.platform if isinstance(change.row, File) else "sidecar"
        rows.append((f"{change.row.component}{SUFFIX}", where, change.row.name, change.kind.value, fields))
    if rows:
        console.table("Pins", ("pin file", "platform", "file", "", "what"), rows)
    totals = ", ".join(f"{sum(change.kind is kind for change in changes)} {kind.value}" for kind in Kind)
    console.success(f"{count_of(len(changes), 'row differs', 'rows differ')}: {totals}" if changes else "no row differs")
