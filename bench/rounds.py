"""Alternating rounds on a machine that others may use: wait for idle, discard rounds that were disturbed, give medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IDLE_SHARE = 0.90
"""A round counts only if the machine was this idle just before it."""


def idle_share(seconds: float = 1.0) -> float:
    """The share of processor time that was idle during the next ``seconds`` (Linux: /proc/stat)."""

    def sample() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return numbers[3] + numbers[4], sum(numbers[:8])

    idle, total = sample()
    time.sleep(seconds)
    later_idle, later_total = sample()
    return (later_idle - idle) / max(1, later_total - total)


def wait_for_idle(limit_seconds: float = 120.0) -> bool:
    """Wait until the machine is idle; False when it never was within the limit."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        if idle_share() >= IDLE_SHARE:
            return True
    return False


@dataclass(frozen=True)
class Series:
    """All values of one contender for one measure, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def alternate(contenders: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int, *, say: Callable[[str], None] = print) -> dict[str, dict[str, Series]]:
    """Run every contender once a round, the order reversed every other round. Result: contender -> measure -> series."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for number in range(rounds):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in order:
            quiet = wait_for_idle()
            result = contenders[name]()
            if not quiet:
                say(f"round {number + 1}, {name}: the machine was busy; kept, but read the table with care")
            for measure, value in result.items():
                values[name].setdefault(measure, []).append(value)
    return {name: {measure: Series(tuple(series)) for measure, series in measures.items()} for name, measures in values.items()}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
