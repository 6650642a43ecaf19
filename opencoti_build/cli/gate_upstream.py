"""``invoke gate upstream``: upstream's own tests against the patched tree."""

from __future__ import annotations

import json as json_module
import sys

from invoke.context import Context

from ..console import Console, count_of
from ..errors import GateError, UsageError
from ..gates import upstream as gate
from .common import command, context, job_count

SUITES = ("native", "server")


@command(
    help={
        "only": "Name or pattern of tests: a C++ test, a file, function or node id of the server suite; * and ? are wildcards.",
        "suite": "native (C++ tests), server (pytest suite) or both (default).",
        "jobs": "Compilers and tests at once (default: as many as processor and memory allow).",
        "json": "Print JSON instead of tables.",
    }
)
def upstream(c: Context, only: str = "", suite: str = "both", jobs: str = "", json: bool = False) -> None:
    """Run upstream's own tests on the patched tree, with local models in place of downloads; results are kept by content."""
    made = context(c)
    if suite not in (*SUITES, "both"):
        raise UsageError(f"--suite is {suite!r}; give native, server or both.")
    report = gate.UpstreamGate.load(made, jobs=job_count(jobs)).run(only, SUITES if suite == "both" else (suite,))
    if not report.judged:
        raise UsageError(f"No test is called {only!r}: give a name, or a pattern such as 'test_slot*'.")
    path = gate.write_document(made, report)
    if json:
        print(json_module.dumps(report.to_dict(), indent=1))
    else:
        gate.show(report, Console(sys.stdout).table)
    if path is not None:
        made.console.info(f"    the list of what ran and what did not is in {path.relative_to(made.project.root)}")
    if report.refused:
        details = "\n".join(f"{item.name}: {item.verdict.value}\n  {item.note}" for item in report.refused)
        raise GateError(f"{count_of(len(report.refused), 'test')} of upstream's fail with the series and not on the base.", details=details)
    made.console.success("Upstream's tests find nothing that the base does not show as well.")
