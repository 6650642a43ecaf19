"""``invoke doctor``: what a build needs, what is here, what is missing."""

from __future__ import annotations

import json as json_module
import sys

from invoke.context import Context
from invoke.exceptions import Exit

from .. import doctor as examination
from ..console import Console
from ..errors import ToolchainError
from ..vendors import Fetcher
from .common import command, context


@command(help={"json": "Print JSON instead of a table."})
def doctor(c: Context, json: bool = False) -> None:
    """Show what a build needs, what is here, and the command that brings the rest. Exit code 0 if the default build is possible."""
    made = context(c)
    machine = examination.Surroundings(made.project, made.cache, made.runner, Fetcher(made.cache, made.console, made.runner, offline=True), offline=made.offline)
    checks = examination.examine(machine)
    able = examination.possible(checks)
    if json:
        print(json_module.dumps({"schema": 1, "default_build_possible": able, "checks": [check.to_dict() for check in checks]}, indent=1))
    else:
        rows = [(check.name, check.status.value, check.detail, check.remedy, check.purpose) for check in checks]
        Console(sys.stdout).table("What a build needs", ("what", "state", "found", "what to do", "for"), rows)
    if not able:
        if json:
            raise Exit(code=ToolchainError.exit_code)
        missing = ", ".join(check.name for check in checks if check.status.blocks)
        raise ToolchainError(f"The default build is not possible: {missing}. The table says what to do.")
    made.console.success("The default build is possible: invoke build --variant universal")
