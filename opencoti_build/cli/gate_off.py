"""``invoke gate off``: without a flag of the series nothing changed."""

from __future__ import annotations

import json as json_module
import sys

from invoke.context import Context

from ..console import Console, count_of
from ..errors import GateError
from ..gates.off import TITLES, Off, Report, subjects, summary, wishes
from .common import CommandContext, command, context, job_count


@command(
    help={
        "model": "Names of the zoo or GGUF files, with commas between (default: the whole zoo).",
        "config": "Only configurations that have all of these, such as fa=on,kv=split,k=q8_0,seq=4,mtp=on (default: all).",
        "drafter": "With a file for --model: the file of a model that drafts for it.",
        "json": "Print the report as JSON instead of tables.",
        "jobs": "Compilers at once while the probes are built (default: as many as processor and memory allow).",
        "fresh": "Run everything anew, also what the cache knows.",
    }
)
def off(c: Context, model: str = "", config: str = "", drafter: str = "", json: bool = False, jobs: str = "", fresh: bool = False) -> None:
    """Compare graphs, inputs, logits, states, memory and defaults of the patched tree with those of the base, bit by bit."""
    made = context(c)
    names = [name.strip() for name in model.split(",") if name.strip()]
    chosen = wishes(config)
    report = Off(made, subjects(made, names, drafter=drafter), chosen, jobs=job_count(jobs), fresh=fresh).run()
    if json:
        print(json_module.dumps(report.data(), indent=1))
    else:
        _show(made, report)
    if not report.holds:
        raise GateError(
            f"The patched tree is not the base when its flags are off: {count_of(len(report.findings), 'difference')} named above. "
            "'invoke gate off --model NAME --config ...' runs one configuration again."
        )
    made.console.success(summary(report))


def _show(made: CommandContext, report: Report) -> None:
    rows = [
        (item.model, str(item.run), str(item.refused or "-"), str(len(item.differing)) if item.differing else "-", "differs" if item.differing else "equal")
        for item in report.models
    ]
    Console(sys.stdout).table("Off means off", ("model", "configurations", "refused by the base", "different", "result"), rows, right=(1, 2, 3))
    if report.added:
        flags = sorted({name for _, name in report.added})
        made.console.info(f"Options of the series: {', '.join(name.replace(' ', ' | ') for name in flags)}.")
    for finding in report.findings:
        where = f"{finding.model} {finding.configuration}" if finding.model else "the tree"
        print(f"{TITLES[finding.aspect]}: {where}\n  {finding.place}\n  base:    {finding.pristine}\n  patched: {finding.patched}")
