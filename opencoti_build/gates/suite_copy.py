"""A runnable copy of upstream's server tests: the tests are copied, all they reach for by relative path is linked to the tree.

Assertions that ask for what only the original model knows (a word of a story, the number of tokens a sentence has) are softened in the
copy: ``assert X`` becomes ``soft_assertion(LINE, lambda: (X))``, which notes whether X holds and lets the test go on. Lines keep their
numbers. Which assertions those are is data: regular expressions on ``FILE: CONDITION``, the condition as ``ast.unparse`` writes it.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path("tools", "server", "tests")
"""Where the server's tests lie in the tree."""


@dataclass(frozen=True)
class Softened:
    """What the copy differs in: ``count`` assertions, in the files of the tests."""

    tests: Path
    count: int


def copy_suite(tree: Path, folder: Path, patterns: Sequence[str]) -> Softened:
    """Make ``folder`` a root in which the tests run: links to everything of ``tree``, real files below ``tools/server/tests``.

    ``folder`` must be empty or absent. Returns the folder of the tests.
    """
    here, there = folder, tree
    for part in TESTS.parts:
        here.mkdir(parents=True, exist_ok=True)
        for entry in there.iterdir():
            if entry.name not in (part, ".git"):
                (here / entry.name).symlink_to(entry)
        here, there = here / part, there / part
    shutil.copytree(there, here, ignore=shutil.ignore_patterns("__pycache__", "tmp", ".pytest_cache"))
    for path in (here, *here.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    # Upstream's tests put downloads and saved slots there.
    (here / "tmp").mkdir(exist_ok=True)
    compiled = [re.compile(pattern) for pattern in patterns]
    count = 0
    for path in sorted((here / "unit").glob("test_*.py")):
        text, softened = soften(path.name, path.read_text("utf-8"), compiled)
        if softened:
            path.write_text(text, "utf-8", newline="\n")
            count += softened
    return Softened(here, count)


def soften(name: str, source: str, patterns: Sequence[re.Pattern[str]]) -> tuple[str, int]:
    """Soften the assertions of a Python file that one of ``patterns`` finds in ``NAME: CONDITION``; returns the text and how many they are."""
    lines = source.splitlines(keepends=True)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert) and any(pattern.search(f"{name}: {ast.unparse(node.test)}") for pattern in patterns)]
    for node in sorted(found, key=lambda node: node.lineno, reverse=True):
        assert node.end_lineno is not None
        condition = ast.get_source_segment(source, node.test)
        start, end = node.lineno - 1, node.end_lineno
        first, last = lines[start].encode(), lines[end - 1].encode()
        tail = last[node.end_col_offset :].decode()
        replacement = f"soft_assertion({node.lineno}, lambda: ({condition}))"
        missing = (end - start - 1) - replacement.count("\n")
        lines[start:end] = [first[: node.col_offset].decode() + replacement + tail.rstrip("\n") + "\n" * (missing + 1)]
    return "".join(lines), len(found)
