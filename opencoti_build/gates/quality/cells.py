"""What was measured before: one result for each engine, model, flags and request, kept by the digest of all of them.

A run that was killed goes on after the last finished cell, and a second run of the same engine measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...cache import Cache, digest_of
from ..serving import Engine

SCHEMA = 1
"""Raise it when the way something is measured changes without any input changing."""

KIND = "quality"
"""Under which kind the cache keeps cells."""


@dataclass(frozen=True)
class LocalModel:
    """A model's file on this machine."""

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class Subject:
    """An engine with a model and flags; ``{model}`` in a flag stands for the model's path."""

    engine: Engine
    model: LocalModel
    flags: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The flags as the engine gets them."""
        return tuple(flag.replace("{model}", str(self.model.path)) for flag in self.flags)

    @property
    def identity(self) -> list[Any]:
        """What a result depends on, as JSON; no path is in it."""
        return [self.engine.sha256, self.model.sha256, list(self.flags)]


@dataclass(frozen=True)
class Cells:
    """The cells in the cache."""

    cache: Cache

    def key(self, what: str, subjects: Sequence[Subject], request: Any) -> str:
        """The digest of a measurement: its kind, who takes part, what is asked."""
        return digest_of([SCHEMA, what, [subject.identity for subject in subjects], request])

    def get(self, key: str) -> Any | None:
        """The result of a cell, or None when it was not measured yet or cannot be read."""
        try:
            return json.loads((self.cache.result(KIND, key) / "cell.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def put(self, key: str, value: Any) -> None:
        """Keep a result."""
        with self.cache.producing(KIND, key) as scratch:
            files.write_text(scratch / "cell.json", json.dumps(value))
