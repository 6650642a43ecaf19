"""One run of the gate: what is asked for, measured feature by feature, judged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...console import Meter, count_of, human_seconds
from ...errors import EngineError, GateError
from ...sources import Workshop
from .laboratory import THREADS, Laboratory, fresh_scratch
from .measures import KINDS, Work
from .plan import Feature, Measure, Plan, choose
from .verdict import Outcome, Result

SCHEMA = 1
"""Of the JSON report."""


@dataclass(frozen=True)
class Report:
    """All results of a run; ``engines`` maps the names of the sides to the sha256 of the engine that took part."""

    profile: str
    engines: dict[str, str]
    results: tuple[Result, ...]
    features: tuple[Feature, ...]

    @property
    def passed(self) -> bool:
        """Whether every feature was measured at least once and nothing failed."""
        return not self.failures and not self.unmeasured

    @property
    def failures(self) -> tuple[Result, ...]:
        """Results that are FAIL or ERROR."""
        return tuple(result for result in self.results if result.outcome in (Outcome.FAIL, Outcome.ERROR))

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Features of which every measure was skipped: nothing is known about them."""
        measured = {result.feature for result in self.results if result.outcome is not Outcome.SKIPPED}
        return tuple(feature.name for feature in self.features if feature.name not in measured)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "profile": self.profile,
            "engines": self.engines,
            "unmeasured": list(self.unmeasured),
            "results": [result.to_dict() for result in self.results],
        }

    def raise_for_failure(self) -> None:
        """Raise GateError that names what failed."""
        if self.failures:
            names = ", ".join(dict.fromkeys(f"{result.feature} on {result.model} ({result.measure.label})" for result in self.failures))
            raise GateError(f"The quality gate does not let through: {names}.", details="\n".join(result.details for result in self.failures if result.details))
        if self.unmeasured:
            raise GateError(f"Nothing is known about {', '.join(self.unmeasured)}: all its models are missing (see the table).")


def load(workshop: Workshop) -> Plan:
    """The gate's data. Raises DataError."""
    return Plan.load(workshop.project.root / "gate" / "quality")


def run(
    workshop: Workshop,
    *,
    features: Sequence[str] = (),
    models: Sequence[str] = (),
    quick: bool = False,
    engine: Path | None = None,
    threads: int = THREADS,
    plan: Plan | None = None,
) -> Report:
    """Measure ``features`` (default: all) on ``models`` (default: those of each feature).

    ``engine`` takes the place of the patched engine, ``threads`` is what every engine runs with. Raises UsageError for an unknown name, BusyError while another run measures.
    """
    plan = plan or load(workshop)
    chosen = tuple(choose(plan.features, features, "feature").values())
    wanted = set(choose(plan.models, models, "model"))
    profile = plan.profiles["quick" if quick else "full"]
    with workshop.cache.lock("gate-quality"):
        laboratory = Laboratory(workshop, plan, fresh_scratch(workshop), engine=engine, threads=threads)
        todo: list[tuple[Feature, Measure, str, Work | str]] = []
        for feature in chosen:
            for measure in feature.measures:
                for name in measure.models:
                    if name not in wanted:
                        continue
                    model = plan.models[name]
                    absent = laboratory.model(model)
                    work = absent if isinstance(absent, str) else KINDS[measure.kind](laboratory, feature, measure, model, profile)
                    todo.append((feature, measure, name, work))
        results = _measure(workshop, todo)
        taken = {side.engine for feature in chosen for side in (feature.reference, feature.candidate)}
        fresh_scratch(workshop)
        engines = {name: laboratory.engine(name).sha256 for name in sorted(taken)} if any(not isinstance(item[3], str) for item in todo) else {}
    return Report(profile.name, engines, tuple(results), chosen)


def _measure(workshop: Workshop, todo: Sequence[tuple[Feature, Measure, str, Work | str]]) -> list[Result]:
    console = workshop.console
    costs = [0 if isinstance(work, str) else work.cost() for _, _, _, work in todo]
    started, results = time.monotonic(), []
    with console.progress("measuring, in tokens", float(sum(costs))) as meter:
        done = 0.0
        for (feature, measure, model, work), cost in zip(todo, costs, strict=True):
            meter.set(done, note=f"{feature.name}: {measure.label}, {model}")
            if isinstance(work, str):
                results.append(Result(feature.name, model, measure, reason=work, skipped=True))
            else:
                results.append(_guarded(work, meter, feature, measure, model))
            done += cost
    if any(costs):
        console.info(f"Measured in {human_seconds(time.monotonic() - started)}.")
    else:
        console.info(f"All {count_of(len(todo), 'result')} kept from earlier runs.")
    return results


def _guarded(work: Work, meter: Meter, feature: Feature, measure: Measure, model: str) -> Result:
    """The result, or the one that says why there is none: an engine that fails on one feature must not hide the others."""
    try:
        return work.run(meter)
    except EngineError as error:
        return Result(feature.name, model, measure, reason=error.message, details=error.details)
