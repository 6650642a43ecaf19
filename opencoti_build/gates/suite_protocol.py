"""What the runner of the server suite and the plugin inside its pytest agree on. Needs no pytest."""

from __future__ import annotations

import contextlib
import fnmatch
import json
from pathlib import Path
from typing import Any

VARIABLE = "GATE_SUITE"
"""The environment variable that names the plugin's plan."""


def matches(node: str, pattern: str) -> bool:
    """Whether a node id (``unit/test_x.py::test_y[z]``) is meant by a pattern: of the whole, of file and function, or of the function.

    ``*`` and ``?`` are wildcards; brackets stand for themselves, as they do in node ids.
    """
    plain = pattern.replace("[", "[[]")
    short = node.removeprefix("unit/")
    function = node.partition("::")[2]
    forms = {node, short, function, node.partition("[")[0], short.partition("[")[0], function.partition("[")[0], short.partition("::")[0]}
    return any(fnmatch.fnmatchcase(form, plain) for form in forms)


def read_results(path: Path, at: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a results file behind byte ``at``, and where the next one will begin; a line that is no JSON is passed over."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        stream.seek(at)
        for line in stream:
            if not line.endswith(b"\n"):
                break
            at += len(line)
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines, at
