"""What came out: each bound against its measured value, the outcome of a measure, of the gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .plan import Bound, Measure
from .statistics import Interval


class Outcome(Enum):
    """How a measure ended."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    """It could not be measured: the engine failed."""

    SKIPPED = "skipped"
    """It was not measured: its model is not here."""


@dataclass(frozen=True)
class Value:
    """A measured quantity; ``interval`` holds it with 95 % confidence where its error is known, ``count`` is the number of examples."""

    value: float
    count: int
    interval: Interval | None = None


@dataclass(frozen=True)
class Check:
    """A bound and the value it is held against. The value itself decides, since the examples are always the same ones."""

    bound: Bound
    measured: Value

    @property
    def passed(self) -> bool:
        """Whether the bound holds; never for a value that is no number."""
        return self.bound.holds(self.measured.value)

    @property
    def conclusive(self) -> bool | None:
        """Whether other examples would have to come out the same way: the whole interval is on one side of the bound. None: not known."""
        interval = self.measured.interval
        if interval is None:
            return None
        return self.bound.holds(interval.low) == self.bound.holds(interval.high)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is no finite number becomes null."""
        interval = self.measured.interval
        return {
            "quantity": self.bound.quantity,
            "value": _finite(self.measured.value),
            "interval": None if interval is None else [_finite(interval.low), _finite(interval.high)],
            "count": self.measured.count,
            "bound": {"limit": self.bound.limit, "kind": "at_least" if self.bound.least else "at_most"},
            "passed": self.passed,
            "conclusive": self.conclusive,
        }


@dataclass(frozen=True)
class Result:
    """The outcome of one measure of one feature on one model.

    ``values`` are all quantities of the measure, ``facts`` what else was seen (JSON-able; ``cells`` of a retrieval for the picture),
    ``notes`` sentences for people, ``reason`` why there is no value.
    """

    feature: str
    model: str
    measure: Measure
    values: Mapping[str, Value] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    reason: str = ""
    details: str = ""
    skipped: bool = False

    @property
    def checks(self) -> tuple[Check, ...]:
        """The bounds with their values."""
        return tuple(Check(bound, self.values[bound.quantity]) for bound in self.measure.bounds if bound.quantity in self.values)

    @property
    def outcome(self) -> Outcome:
        """PASS only when every bound has a value within it."""
        if self.skipped:
            return Outcome.SKIPPED
        if self.reason or len(self.checks) < len(self.measure.bounds):
            return Outcome.ERROR
        return Outcome.PASS if all(check.passed for check in self.checks) else Outcome.FAIL

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "feature": self.feature,
            "model": self.model,
            "kind": self.measure.kind.value,
            "measure": self.measure.label,
            "outcome": self.outcome.value,
            "checks": [check.to_dict() for check in self.checks],
            "values": {name: _finite(value.value) for name, value in self.values.items()},
            "facts": _plain(self.facts),
            "notes": list(self.notes),
            "reason": self.reason or None,
        }


def shown(quantity: str, value: float) -> str:
    """A value for people: shares in percent, counts whole, the rest with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if quantity in SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:.0f}" if quantity == "different" else f"{value:.4g}"


SHARES = frozenset({"top1", "reference", "accuracy", "loss", "equal", "acceptance"})
"""Quantities that are shares of something."""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """The value with null for every number that JSON cannot have."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
