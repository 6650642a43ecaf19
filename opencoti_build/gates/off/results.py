"""Reads what the probe writes (``gate/probe/report.h`` and ``defaults.h`` describe the lines)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ...errors import DataError

HEADER = "opencoti-gate-probe 1"

ASPECTS = ("reserved", "computed", "inputs", "logits", "drafts", "state", "memory")
"""What is compared of a configuration, causes before effects."""


class Outcome(Enum):
    """How a configuration went on one side."""

    RUN = "run"
    REFUSED = "refused"
    """The tree refuses it with a reason."""
    ABSENT = "absent"
    """Multi-token prediction with a model that has nothing to draft with."""
    CRASHED = "crashed"
    """The probe ended in the middle of it."""


@dataclass(frozen=True)
class Result:
    """One configuration on one side; ``hashes`` maps aspects to the sha256 of their lines."""

    configuration: str
    outcome: Outcome
    hashes: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    def same(self, other: Result) -> bool:
        """Whether both sides did the same."""
        return self.outcome is other.outcome and self.hashes == other.hashes and self.reason == other.reason

    def differing(self, other: Result) -> tuple[str, ...]:
        """The aspects whose hashes differ."""
        return tuple(name for name in ASPECTS if self.hashes.get(name) != other.hashes.get(name))


@dataclass(frozen=True)
class Results:
    """What a run of the probe left. ``complete`` is False when it ended early."""

    backend: str
    results: tuple[Result, ...]
    complete: bool


def read_results(text: str) -> Results:
    """Parse a result file. Raises DataError for anything that no probe of this toolkit writes."""
    lines = text.splitlines()
    if not lines or lines[0] != HEADER:
        raise DataError(f"A probe wrote {lines[0] if lines else 'nothing'!r} where {HEADER!r} was expected: remove build/gates and run again.")
    backend, complete = "", False
    found: dict[str, Result] = {}
    for line in lines[1:]:
        kind, *rest = line.split("\t")
        match kind, rest:
            case "backend", [backend]:
                pass
            case "config", [name]:
                found[name] = Result(name, Outcome.CRASHED)
            case "hash", [name, aspect, sha256, _] if name in found:
                found[name] = Result(name, Outcome.RUN, {**found[name].hashes, aspect: sha256})
            case "refused", [name, reason] if name in found:
                found[name] = Result(name, Outcome.REFUSED, reason=reason)
            case "absent", [name] if name in found:
                found[name] = Result(name, Outcome.ABSENT)
            case "end", []:
                complete = True
            case _:
                raise DataError(f"A probe wrote a line that is none of its own: {line[:200]!r}.")
    return Results(backend, tuple(found.values()), complete)


@dataclass(frozen=True)
class Record:
    """A line of a dump: its fields, and the bytes that its hash is of, where it has one."""

    fields: tuple[str, ...]
    data: bytes | None = None

    @property
    def kind(self) -> str:
        """What the line is about: ``node``, ``input``, ``logits``..."""
        return self.fields[0]


Dump = Mapping[tuple[str, str], tuple[Record, ...]]
"""Records by configuration and aspect."""


def read_dump(path: Path) -> Dump:
    """Parse a dump. Raises DataError."""
    found: dict[tuple[str, str], list[Record]] = {}
    for number, line in enumerate(_lines(path), 1):
        parts = line.split("\t")
        if len(parts) < 3 or parts[1] not in ASPECTS:
            raise DataError(f"{path.name} line {number} is none of a probe's dump.")
        records = found.setdefault((parts[0], parts[1]), [])
        if parts[2] == "bytes" and records:
            records[-1] = Record(records[-1].fields, bytes.fromhex(parts[3]))
        else:
            records.append(Record(tuple(parts[2:])))
    return {key: tuple(records) for key, records in found.items()}


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            for line in stream:
                yield line.rstrip("\n")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


@dataclass(frozen=True)
class Defaults:
    """The defaults of a tree: values of structures by dotted name, and of options by program, flags and property."""

    fields: Mapping[str, str]
    options: Mapping[tuple[str, str], Mapping[str, str]]


def read_defaults(text: str) -> Defaults:
    """Parse what ``opencoti-gate-probe defaults`` wrote. Raises DataError."""
    values: dict[str, str] = {}
    options: dict[tuple[str, str], dict[str, str]] = {}
    for line in text.split("\n"):
        match line.split("\t"):
            case [""]:
                pass
            case ["field", name, value]:
                values[name] = value
            case ["option", program, flags, name, value]:
                options.setdefault((program, flags), {})[name] = value
            case _:
                raise DataError(f"A probe wrote a line that is none of its own: {line[:200]!r}.")
    return Defaults(values, options)
