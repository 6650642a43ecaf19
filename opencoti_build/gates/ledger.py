"""The ledger: what each patch of the series has proven, in a file of the repository.

``gate/ledger.yaml``::

    # Written by 'invoke gate series'.
    schema: 1
    base: {version: b11434, tree: <40 hex>}
    patches:
      - patch: 0001-identity-....patch
        sha256: <64 hex>             # of the patch file
        tree: <40 hex>               # git tree id with the series up to this patch
        gates:
          off: {state: passed, key: <64 hex>, detail: 10 models in 240 configurations are equal}

``key`` is the digest of everything that the result depends on (the tree, and the gate's own sources, models and thresholds), so a
result is taken as long as nothing of that changed and is measured again as soon as something did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from .. import files
from ..schema import Node, parse_yaml, read_text

SCHEMA = 1
HEAD = "# Written by 'invoke gate series': what every patch has proven, and on what.\n"


class State(Enum):
    """How a gate ended for a patch."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "n/a"
    """The patch has nothing that this gate could look at; ``detail`` says why."""
    OPEN = "open"
    """Not measured, or measured on something else than what is there now."""

    @property
    def green(self) -> bool:
        """Whether a release may build on it."""
        return self in (State.PASSED, State.NOT_APPLICABLE)


@dataclass(frozen=True)
class Result:
    """What a gate found for a patch; ``detail`` is one line for a person, ``log`` more lines that are shown and not kept."""

    state: State
    detail: str = ""
    key: str = ""
    log: str = ""


@dataclass(frozen=True)
class Row:
    """One patch: file name, sha256 of the file, tree id with the series up to it, results by gate."""

    patch: str
    sha256: str
    tree: str
    gates: Mapping[str, Result] = field(default_factory=dict)

    def result(self, gate: str, key: str) -> Result:
        """The recorded result if it was made with this key, else OPEN."""
        found = self.gates.get(gate)
        return found if found is not None and found.key == key else Result(State.OPEN)


@dataclass(frozen=True)
class Ledger:
    """The document."""

    base_version: str = ""
    base_tree: str = ""
    rows: tuple[Row, ...] = ()

    def row(self, patch: str) -> Row | None:
        """The row of a patch file."""
        return next((row for row in self.rows if row.patch == patch), None)

    def with_row(self, row: Row, order: Sequence[str]) -> Ledger:
        """The ledger with this row put in; rows of patches that are not in ``order`` go."""
        rows = {old.patch: old for old in self.rows} | {row.patch: row}
        return Ledger(self.base_version, self.base_tree, tuple(rows[name] for name in order if name in rows))

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "schema": SCHEMA,
            "base": {"version": self.base_version, "tree": self.base_tree},
            "patches": [
                {
                    "patch": row.patch,
                    "sha256": row.sha256,
                    "tree": row.tree,
                    "gates": {name: {"state": result.state.value, "key": result.key, "detail": result.detail} for name, result in row.gates.items()},
                }
                for row in self.rows
            ],
        }


def load(path: Path) -> Ledger:
    """The ledger in a file; an empty one when there is no file. Raises DataError."""
    if not path.exists():
        return Ledger()
    document = Node(parse_yaml(read_text(path), path.name), path.name).mapping()
    if document.get("schema").number() != SCHEMA:
        raise document.get("schema").fail(f"this toolkit reads schema {SCHEMA}")
    base = document.get("base").mapping()
    rows = tuple(_row(node) for node in document.get("patches").items(empty=True))
    document.done()
    made = Ledger(base.get("version").text(), base.get("tree").hexadecimal(40), rows)
    base.done()
    return made


def _row(node: Node) -> Row:
    node.mapping()
    gates = node.get("gates").mapping()
    row = Row(
        node.get("patch").text(),
        node.get("sha256").hexadecimal(64),
        node.get("tree").hexadecimal(40),
        {name: _result(gates.get(name)) for name in gates.names()},
    )
    node.done()
    return row


def _result(node: Node) -> Result:
    node.mapping()
    result = Result(
        State(node.get("state").one_of([state.value for state in State])),
        node.optional("detail", Node.prose, ""),
        node.get("key").hexadecimal(64),
    )
    node.done()
    return result


def save(path: Path, ledger: Ledger) -> None:
    """Write the file; an equal one is left alone. Raises DiskError."""
    files.write_text(path, HEAD + yaml.safe_dump(ledger.to_dict(), sort_keys=False, width=1000, allow_unicode=True))


@dataclass(frozen=True)
class NotGreen:
    """A patch that may not be released, with the gate that stands in the way."""

    patch: str
    gate: str
    state: State


def not_green(ledger: Ledger, wanted: Iterable[tuple[str, str, Mapping[str, str]]]) -> tuple[NotGreen, ...]:
    """What keeps a series from being released. ``wanted``: for each patch its file name, its tree, and the key of every gate now."""
    found = []
    for patch, tree, keys in wanted:
        row = ledger.row(patch)
        for gate, key in keys.items():
            result = row.result(gate, key) if row is not None and row.tree == tree else Result(State.OPEN)
            if not result.state.green:
                found.append(NotGreen(patch, gate, result.state))
    return tuple(found)
