"""``invoke gate sanitize``: the engine's own new code under address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence

from invoke.context import Context

from ..console import Console, count_of, human_seconds
from ..errors import GateError
from ..gates.findings import Owner
from ..gates.sanitizers import Judged, Run, SanitizerGate
from .common import command, context, job_count


@command(
    help={
        "name": "address (with undefined behaviour), thread, or all (default).",
        "plant": "Build with this planted defect and run its tests alone: shows that the gate finds it.",
        "jobs": "Compilers at once (default: as many as processor and memory allow).",
        "json": "Print JSON instead of tables.",
    },
    optional=("name",),
)
def sanitize(c: Context, name: str = "all", plant: str = "", jobs: str = "", json: bool = False) -> None:
    """Build the patched tree with sanitizers and run the series' tests on it; findings in our code fail, upstream's are listed."""
    made = context(c)
    gate = SanitizerGate.load(made, jobs=job_count(jobs))
    names = [gate.data.plants[plant].sanitizer] if plant in gate.data.plants else list(gate.data.sanitizers) if name == "all" else [name]
    seen: list[tuple[Run, Sequence[Judged]]] = []
    for each in names:
        run = gate.run(each, plant=plant)
        seen.append((run, gate.judge(run)))
    if json:
        print(json_module.dumps({"schema": 1, "runs": [_data(run, judged) for run, judged in seen]}, indent=1))
    else:
        for run, judged in seen:
            _show(run, judged)
    ours = [item for _, judged in seen for item in judged if item.owner is Owner.OURS]
    failed = [f"{run.sanitizer}: {test}" for run, _ in seen for test in run.failed]
    if ours:
        raise GateError(f"{count_of(len(ours), 'finding')} in the series' own code.", details="\n\n".join(item.finding.text for item in ours))
    if failed:
        raise GateError(f"{count_of(len(failed), 'test')} did not pass on the instrumented engine.", details="\n".join(failed))
    made.console.success("The sanitizers find nothing in the series' own code.")


def _data(run: Run, judged: Sequence[Judged]) -> dict[str, object]:
    return {**run.to_dict(), "findings": [{**item.finding.to_dict(), "owner": item.owner.name.lower(), "known": item.known} for item in judged]}


def _show(run: Run, judged: Sequence[Judged]) -> None:
    console = Console(sys.stdout)
    totals = ", ".join(f"{number} {word}" for word, number in run.totals.items()) or "none"
    console.table(f"{run.sanitizer} sanitizer", ("what", "result"), [("engine tests", totals), ("did not pass", "\n".join(run.failed) or "-"), ("took", human_seconds(run.seconds))])
    if judged:
        rows = [(item.finding.kind, item.owner.value, item.place, item.known or "-") for item in judged]
        console.table("Findings", ("what", "whose", "where", "known because"), rows)
