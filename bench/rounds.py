"""Alternating rounds on a machine that others may use: wait for idle, repeat what was disturbed, give medians."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IDLE_SHARE = 0.90
"""The machine must be this idle before a run, and others may take no more than the rest of one processor during it."""

ATTEMPTS = 5
"""How often a disturbed run is repeated before its value is taken, marked."""

_TICKS = os.sysconf("SC_CLK_TCK")


def _busy_and_total() -> tuple[float, float]:
    """Seconds of processor time spent working, and all of it, since the machine started (Linux: /proc/stat)."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return (sum(numbers) - idle) / _TICKS, sum(numbers) / _TICKS


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def idle_share(seconds: float = 1.0) -> float:
    """The share of processor time that is idle during the next ``seconds``."""
    busy, total = _busy_and_total()
    time.sleep(seconds)
    later_busy, later_total = _busy_and_total()
    return 1 - (later_busy - busy) / max(1e-9, later_total - total)


def wait_for_idle(limit_seconds: float = 300.0) -> bool:
    """Wait until the machine is idle; False when it never was within the limit."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        if idle_share() >= IDLE_SHARE:
            return True
    return False


@dataclass(frozen=True)
class Series:
    """All values of one contender for one measure, in the order of the rounds; ``disturbed`` counts those that were not quiet."""

    values: tuple[float, ...]
    disturbed: int

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def undisturbed(run: Callable[[], Mapping[str, float]]) -> tuple[Mapping[str, float], bool]:
    """The result of ``run`` in a quiet moment, and whether one was found."""
    for _ in range(ATTEMPTS):
        quiet = wait_for_idle()
        busy, _total = _busy_and_total()
        own, started = _own_seconds(), time.monotonic()
        result = run()
        foreign = (_busy_and_total()[0] - busy) - (_own_seconds() - own)
        if quiet and foreign <= (1 - IDLE_SHARE) * max(0.2, time.monotonic() - started):
            return result, True
    return result, False


def alternate(contenders: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int, *, say: Callable[[str], None] = print) -> dict[str, dict[str, Series]]:
    """Run every contender once a round, the order reversed every other round. Result: contender -> measure -> series."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    disturbed = dict.fromkeys(contenders, 0)
    for number in range(rounds):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in order:
            result, quiet = undisturbed(contenders[name])
            disturbed[name] += not quiet
            for measure, value in result.items():
                values[name].setdefault(measure, []).append(value)
        say(f"round {number + 1} of {rounds}: " + "; ".join(f"{name} " + ", ".join(f"{measure} {series[-1]:.4g}" for measure, series in measures.items()) for name, measures in values.items()))
    return {name: {measure: Series(tuple(series), disturbed[name]) for measure, series in measures.items()} for name, measures in values.items()}


def machine() -> str:
    """The processor, for the head of a table."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} processors, {platform.system()} {platform.release().split('-')[0]}"
    return platform.machine()


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
