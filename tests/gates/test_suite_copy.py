"""The runnable copy of a test suite: what is linked, what is copied, which assertions only take note."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from opencoti_build.gates.suite_copy import copy_suite, soften

SOURCE = '''def test_a(words):
    assert words["n"] == 3
    assert match(
        "x",  # a comment
        words["t"],
    ), f"got {words}"
    if words: assert match("ü", words["t"]); done = True
    assert done
'''


def run(text: str, words: dict[str, Any], matched: bool) -> list[tuple[int, bool]]:
    noted: list[tuple[int, bool]] = []
    space: dict[str, Any] = {"match": lambda *_: matched, "soft_assertion": lambda line, holds: noted.append((line, bool(holds())))}
    exec(compile(text, "x", "exec"), space)
    space["test_a"](words)
    return noted


@pytest.mark.parametrize("matched", [True, False])
def test_softened_assertions_take_note_and_the_others_hold(matched: bool) -> None:
    text, count = soften("test_x.py", SOURCE, [re.compile(r"match\(")])
    assert count == 2
    assert run(text, {"n": 3, "t": "x"}, matched) == [(3, matched), (7, matched)]
    with pytest.raises(AssertionError):
        run(text, {"n": 4, "t": "x"}, matched)


def test_every_other_line_keeps_its_number_and_text() -> None:
    text, _ = soften("test_x.py", SOURCE, [re.compile(r"match\(")])
    before, after = SOURCE.splitlines(), text.splitlines()
    assert len(before) == len(after)
    assert (after[0], after[1], after[7]) == (before[0], before[1], before[7])
    ast.parse(text)


def test_a_pattern_may_name_the_file() -> None:
    pattern = [re.compile(r"^test_x\.py: .*== 3$")]
    assert soften("test_x.py", SOURCE, pattern)[1] == 1
    assert soften("test_y.py", SOURCE, pattern) == (SOURCE, 0)


def test_the_copy_reaches_the_tree_and_leaves_it_alone(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name, text in (("models/t.jinja", "T"), ("tools/mtmd/a.png", "P"), ("tools/server/server.cpp", "C"), ("tools/server/tests/unit/test_a.py", SOURCE), ("tools/server/tests/tmp/old", ""), (".git/HEAD", "")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    made = copy_suite(tree, tmp_path / "root", [r"match\("])
    assert made.count == 2
    assert (made.tests / ".." / ".." / ".." / "models" / "t.jinja").read_text() == "T"
    assert (made.tests / ".." / ".." / "mtmd" / "a.png").read_text() == "P"
    assert not (tmp_path / "root" / ".git").exists() and not (made.tests / "tmp" / "old").exists()
    (made.tests / "tmp" / "new").write_text("x")
    (made.tests / "unit" / "test_a.py").write_text("")
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
