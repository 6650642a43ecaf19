"""``invoke gate quality``: what each feature does to the model's answers."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path

from invoke.context import Context

from ..console import Console
from ..gates import quality as gate
from ..gates.quality.laboratory import THREADS
from .common import CommandContext, command, context, job_count


@command(
    optional=("feature",),
    help={
        "feature": "Names of features, with commas between them (default: all); --list shows them.",
        "model": "Names of models, with commas between them (default: those of each feature).",
        "quick": "Fewer and shorter examples: minutes instead of an hour.",
        "engine": "Measure this engine or single file in place of the patched engine that would be built.",
        "threads": "Threads of every engine (default: 2); results are kept for each number by itself.",
        "write": "Write page, JSON and pictures into docs/evaluations/quality.",
        "out": "Write them into this folder instead.",
        "json": "Print the report as JSON on standard output.",
        "list": "Show features and models, and measure nothing.",
    },
)
def quality(c: Context, feature: str = "", model: str = "", quick: bool = False, engine: str = "", threads: str = "", write: bool = False, out: str = "", json: bool = False, list: bool = False) -> None:
    """Measure features against their references: divergence, retrieval, equality of text; fails when a bound does not hold."""
    made = context(c)
    if list:
        _list(made)
        return
    report = gate.run(made, features=_names(feature), models=_names(model), quick=quick, engine=Path(engine) if engine else None, threads=job_count(threads, "--threads") or THREADS)
    if write or out:
        folder = Path(out) if out else made.project.root / "docs" / "evaluations" / "quality"
        for path in gate.write(report, folder):
            made.console.info(f"wrote {path}")
    if json:
        print(json_module.dumps(report.to_dict(), indent=1))
    else:
        gate.show(report, made.console)
    report.raise_for_failure()
    made.console.success("The quality gate lets everything through.")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _list(made: CommandContext) -> None:
    plan, console = gate.load(made), Console(sys.stdout)
    console.table("Features", ("feature", "title", "measures", "models"), [(item.name, item.title, ", ".join(measure.label for measure in item.measures), ", ".join(item.models)) for item in plan.features.values()])
    console.table("Models", ("model", "title", "from"), [(item.name, item.title, item.file or f"PyPI: {item.package}") for item in plan.models.values()])
