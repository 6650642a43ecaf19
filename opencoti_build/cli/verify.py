"""``invoke verify artifact``: proves a finished file."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from invoke import Collection
from invoke.context import Context

from .. import variants, verify
from ..errors import OpencotiError
from .common import command, context


@command(
    help={
        "file": "the artifact",
        "manifest": "its MANIFEST.json (default: FILE.MANIFEST.json beside it)",
        "pins": "folder of pin files (default: the project's pin/, where there is one)",
        "run": "also start it and compare what --version prints",
        "wine": "also start its Windows side under wine",
        "json": "print the report as JSON on standard output",
    }
)
def artifact(c: Context, file: str, manifest: str = "", pins: str = "", run: bool = False, wine: bool = False, json: bool = False) -> None:
    """Prove a file without executing it: hashes, the papers beside it, structure, entries, host block, version, libraries, floors, limits."""
    here = context(c)
    try:
        report = verify.artifact(
            Path(file),
            manifest=Path(manifest) if manifest else None,
            pins=Path(pins) if pins else here.project.pins if here.project.pins.is_dir() else None,
            variants=variants.load(here.project.variants),
            console=here.console,
            run=run,
            wine=wine,
            runner=here.runner,
        )
    except OpencotiError as error:
        if json:
            print(json_module.dumps(verify.unread(Path(file), error), indent=1))
        raise
    if json:
        print(json_module.dumps(report.to_dict(), indent=1))
    else:
        report.show(here.console)
    report.raise_for_failure(details=False)


ns = Collection("verify")
ns.add_task(artifact)
