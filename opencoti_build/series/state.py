"""Where a work tree stands, in ``.git/opencoti/state.json``: written whole or not at all, before and after every move.

``journal`` names what is under way. A run that finds one finishes it first, so a killed run leaves nothing half done.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from .. import files
from ..errors import PatchError

SCHEMA = 1


class Mode(Enum):
    """What the work tree is being used for."""

    APPLY = "apply"
    REBASE = "rebase"


@dataclass(frozen=True)
class Entry:
    """A patch that is on: the file it came from, as it was then, and its commit."""

    number: int
    name: str
    sha256: str
    commit: str
    outcome: str


@dataclass(frozen=True)
class Conflict:
    """The patch that did not go on. ``paths`` are files for a person to settle; ``placed`` says that they all lie there."""

    number: int
    name: str
    sha256: str
    outcome: str
    note: str
    paths: tuple[str, ...] = ()
    placed: bool = False


@dataclass(frozen=True)
class Move:
    """The work tree is on its way from one commit to another.

    ``adopt``: its files are those of ``source``, which was made from them, but the index does not know that yet.
    """

    source: str
    target: str
    adopt: bool = False


@dataclass(frozen=True)
class Write:
    """Patch files being written: number and commit; ``remove`` are file names that go; ``tree`` is the series' tree where known."""

    commits: tuple[tuple[int, str], ...]
    remove: tuple[str, ...] = ()
    tree: str = ""


@dataclass(frozen=True)
class State:
    """The whole of it. ``applied`` is a line of commits on ``base_commit``."""

    base_label: str
    base_tree: str
    base_commit: str
    applied: tuple[Entry, ...] = ()
    mode: Mode = Mode.APPLY
    conflict: Conflict | None = None
    move: Move | None = None
    write: Write | None = None
    left_out: tuple[str, ...] = ()
    """Patch files that a rebase under way has found to be in the new base already."""

    @property
    def commit(self) -> str:
        """The commit the work tree stands on."""
        return self.applied[-1].commit if self.applied else self.base_commit

    @property
    def position(self) -> int | None:
        """Number of the last patch that is on."""
        return self.applied[-1].number if self.applied else None

    def save(self, path: Path) -> None:
        """Write it in one piece."""
        data = asdict(self)
        data["schema"], data["mode"] = SCHEMA, self.mode.value
        files.write_text(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> State | None:
        """What is there; None when there is nothing. Raises PatchError when it cannot be read."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise PatchError(f"{path} cannot be read ({error}): delete that file and run 'invoke patches apply'.") from error
        try:
            if data["schema"] != SCHEMA:
                raise PatchError(
                    f"{path} was written by another version of the toolkit: save your edits, delete the work tree, run 'invoke patches apply'."
                )
            conflict, move, write = data["conflict"], data["move"], data["write"]
            return cls(
                base_label=data["base_label"],
                base_tree=data["base_tree"],
                base_commit=data["base_commit"],
                applied=tuple(Entry(**entry) for entry in data["applied"]),
                mode=Mode(data["mode"]),
                conflict=Conflict(**{**conflict, "paths": tuple(conflict["paths"])}) if conflict else None,
                move=Move(**move) if move else None,
                write=Write(tuple((number, commit) for number, commit in write["commits"]), tuple(write["remove"]), write["tree"]) if write else None,
                left_out=tuple(data["left_out"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PatchError(f"{path} is damaged ({error}): delete that file and run 'invoke patches apply'.") from error
