"""The plan of an artifact: every part it should hold, where each comes from, and what is missing; printed before anything is built."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from . import files
from .console import Console, human_seconds


class State(Enum):
    """What has to be done for a part."""

    READY = "ready"
    BUILD = "to build"
    MISSING = "missing"


@dataclass(frozen=True)
class Part:
    """One row of the plan. ``estimate`` is in seconds, None where nobody knows; ``detail`` says why a part is missing."""

    name: str
    source: str
    state: State
    detail: str = ""
    estimate: float | None = None


@dataclass(frozen=True)
class Plan:
    """All parts of one artifact."""

    artifact: str
    parts: tuple[Part, ...]

    @property
    def missing(self) -> tuple[Part, ...]:
        """The parts that will not be in the artifact."""
        return tuple(part for part in self.parts if part.state is State.MISSING)

    @property
    def estimate(self) -> float:
        """Seconds of all that is to be built and has been timed before."""
        return sum(part.estimate or 0.0 for part in self.parts if part.state is State.BUILD)

    def show(self, console: Console) -> None:
        """Print the table and one line that sums it up."""
        rows = [[part.name, part.source, part.state.value, _estimate(part), part.detail] for part in self.parts]
        console.table(f"Plan: {self.artifact}", ["part", "from", "state", "estimate", "note"], rows, right=(3,))
        build = [part for part in self.parts if part.state is State.BUILD]
        if build:
            unknown = any(part.estimate is None for part in build)
            time = f", about {human_seconds(self.estimate)}" if self.estimate else ""
            console.info(f"{len(build)} to build{time}{' (some were never timed here)' if unknown and self.estimate else ''}; {len(self.missing)} missing")


def _estimate(part: Part) -> str:
    if part.state is not State.BUILD or part.estimate == 0.0:
        return ""
    return human_seconds(part.estimate) if part.estimate is not None else "?"


@dataclass(frozen=True)
class Timings:
    """How long parts took on this machine, by name: only ever a guess for the next plan, so a damaged file is no error.

    What is remembered is the longest time: a build that goes on from an earlier one takes seconds and says nothing about the next.
    """

    path: Path

    def get(self, name: str) -> float | None:
        """Seconds it took at most."""
        value = self._read().get(name)
        return float(value) if isinstance(value, int | float) else None

    def put(self, name: str, seconds: float) -> None:
        """Remember a duration, if it is the longest so far."""
        values = self._read()
        values[name] = max(round(seconds, 1), self.get(name) or 0.0)
        files.write_text(self.path, json.dumps(values, indent=1, sort_keys=True) + "\n")

    def _read(self) -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self.path.read_text("utf-8"))
            if isinstance(data, dict):
                return data
        return {}


def summary(parts: Sequence[Part]) -> list[dict[str, str]]:
    """The missing parts as the manifest lists them."""
    return [{"name": part.name, "reason": part.detail} for part in parts if part.state is State.MISSING]
