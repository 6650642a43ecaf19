"""``invoke patches``: the commands as typed, their output and their exit codes."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke import Collection
from invoke.program import Program
from series_lab import LINES, Lab, body, insert, make_lab, plain_git, write_tree

from opencoti_build.cli import patches
from opencoti_build.cli.common import CommandContext
from opencoti_build.cli.spaced import add_group, install
from opencoti_build.project import Project
from opencoti_build.runner import SystemRunner

ROOT = Path(__file__).parents[2]


class Shell:
    """Types commands at the program; ``tree`` is where its work tree lies."""

    def __init__(self, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
        self.lab, self.capsys = lab, capsys
        self.tree = lab.root / "build" / "src" / "llama.cpp"
        install()
        root = Collection()
        add_group(root, Collection("patches", *patches.ns.tasks.values()))
        self.program = Program(namespace=root, name="invoke", binary="invoke")

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output, and what a person was told."""
        self.lab.output.truncate(0)
        self.lab.output.seek(0)
        code = 0
        try:
            self.program.run(["invoke", "patches", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        printed = self.capsys.readouterr()
        return code, printed.out, self.lab.output.getvalue() + printed.err


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    lab = make_lab(tmp_path)
    (lab.root / "vendors").mkdir()
    (lab.root / "vendors" / "llama.cpp.yaml").write_bytes((ROOT / "vendors" / "llama.cpp.yaml").read_bytes())
    made = CommandContext(Project(lab.root), lab.console, SystemRunner(), lab.cache, offline=True, dry_run=False)
    monkeypatch.setattr(patches, "context", lambda c: made)
    monkeypatch.setattr(patches, "_base", lambda made, pin: lab.base(pin.version))
    return Shell(lab, capsys)


def test_from_nothing_to_a_patch_that_holds(shell: Shell) -> None:
    assert shell("status")[2].strip().endswith("next: invoke patches new NUMBER TITLE")
    code, out, told = shell("new", "10", "one: hook")
    file = Path(out.strip())
    assert code == 0 and file.name == "0010-one-hook.patch" and "invoke patches refresh" in told
    text = file.read_text()
    insert(shell.tree / "src/core.c", "line 5", "hook\n")
    assert shell("refresh")[0] == 0
    code, out, told = shell("lint")
    assert code == 22 and "message-section" in out
    file.write_text(text[: text.index("Why:")] + body() + file.read_text()[file.read_text().index("\n---\n") :])
    assert shell("apply")[0] == 0 and shell("export")[0] == 0
    assert shell("lint")[0] == 0 and shell("check")[0] == 0
    code, out, told = shell("apply")
    assert code == 0 and "already applied: 1 patch on" in told
    data = json.loads(shell("status", "--json")[1])
    assert data["patches"][0]["state"] == "applied (clean)" and data["patches"][0]["current"] and data["next"] == ""
    assert "one: hook" in shell("status")[1]


def a_repository(place: Path) -> None:
    place.mkdir()
    plain_git(place, "init", "-q")
    plain_git(place, "commit", "-q", "--allow-empty", "-m", "mine")


OCCUPANTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "folder": (lambda place: write_tree(place, {"thesis.txt": b"years of work"}), "a folder"),
    "file": (lambda place: place.write_bytes(b"x"), "a file"),
    "link": (lambda place: place.symlink_to("nowhere"), "a link to nowhere"),
    "pipe": (os.mkfifo, "a device or a pipe"),
    "repository": (a_repository, "a git repository"),
    "linked": (lambda place: write_tree(place, {".git": b"gitdir: elsewhere"}), "a folder"),
}


@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
@pytest.mark.parametrize("what", OCCUPANTS)
def test_status_says_what_lies_in_the_place_of_the_work_tree(shell: Shell, what: str) -> None:
    shell("new", "10", "one: hook")
    shutil.rmtree(shell.tree)
    make, name = OCCUPANTS[what]
    make(shell.tree)
    before = sorted((path.relative_to(shell.tree), path.lstat().st_mtime_ns) for path in shell.tree.rglob("*"))
    said = f"{shell.tree} is {name} and no work tree of the series"
    code, _, told = shell("status")
    assert code == 0 and said in told
    assert told.strip().endswith(f"next: move {shell.tree} away, or choose another place with --tree")
    data = json.loads(shell("status", "--json")[1])
    assert (data["exists"], data["note"], data["patches"][0]["state"]) == (False, f"{said}.", "not applied")
    for words in (["apply"], ["refresh"], ["new", "20", "two: x"]):
        code, _, told = shell(*words)
        assert code == 21 and said in told
    assert sorted((path.relative_to(shell.tree), path.lstat().st_mtime_ns) for path in shell.tree.rglob("*")) == before
    other = shell.lab.root / "other"
    assert json.loads(shell("status", "--json", "--tree", str(other))[1])["next"] == "invoke patches apply"
    assert shell("apply", "--tree", str(other))[0] == 0


def test_status_after_new_says_to_edit_and_refresh(shell: Shell) -> None:
    shell("new", "20", "two: x")
    insert(shell.tree / "src/core.c", "line 5", "two\n")
    shell("refresh")
    for number in (10, 30):  # below a patch that is taken off for it, and on top
        file = Path(shell("new", str(number), "one: x")[1].strip())
        expected = f"fill in the message in {file} and edit in {shell.tree}, then: invoke patches refresh"
        assert json.loads(shell("status", "--json")[1])["next"] == expected
        file.write_text(file.read_text().replace("(to be written", "(now written"))
        assert json.loads(shell("status", "--json")[1])["next"] == expected
        insert(shell.tree / "src/other.c", "row 5", f"{number}\n")
        assert json.loads(shell("status", "--json")[1])["next"] == "invoke patches refresh"
        assert shell("refresh")[0] == 0
        assert json.loads(shell("status", "--json")[1])["next"] == ""


def test_status_of_a_work_tree_whose_state_is_gone(shell: Shell) -> None:
    shell("new", "10", "one: hook")
    insert(shell.tree / "src/core.c", "line 5", "one\n")
    shell("refresh")
    state = shell.tree / ".git" / "opencoti" / "state.json"
    state.unlink()
    code, out, told = shell("status")
    assert code == 0 and "unknown" in out and f"{state} is gone" in told and told.strip().endswith("next: invoke patches apply")
    assert not state.exists()
    assert shell("apply")[0] == 0
    assert json.loads(shell("status", "--json")[1])["next"] == ""


def test_going_back_with_git_by_command(shell: Shell) -> None:
    for number in (10, 20, 30):
        shell("new", str(number), f"area: patch {number}")
        write_tree(shell.tree, {f"src/opencoti/{number}.c": b"x\n"})
        shell("refresh")
    everything = shell.lab.folder.names()
    plain_git(shell.tree, "checkout", "-q", "-b", "foo", "HEAD~2")
    code, out, told = shell("status")
    assert code == 0 and "stands at 0010, on the branch foo" in told and told.strip().endswith("next: invoke patches apply")
    assert out.count("not applied") == 2
    for words in (["export"], ["export", "--remove"]):
        code, _, told = shell(*words)
        assert code == 21 and "stands at 0010, on the branch foo" in told and "'invoke patches apply'" in told
    assert shell.lab.folder.names() == everything
    assert shell("apply")[0] == 0
    data = json.loads(shell("status", "--json")[1])
    assert (data["next"], data["note"]) == ("", "") and [patch["state"] for patch in data["patches"]] == ["applied (clean)"] * 3

    plain_git(shell.tree, "rebase", "-q", "--onto", "HEAD~2", "HEAD~1")
    code, _, told = shell("export")
    assert code == 21 and everything[1] in told and "--remove" in told and shell.lab.folder.names() == everything
    assert shell("export", "--remove", "--from-repo", str(shell.tree), "--base", "HEAD~1")[0] == 2
    code, out, told = shell("export", "--remove")
    assert code == 0 and out.strip() == f"{everything[1]} (removed)" and "1 patch file written or removed" in told
    assert shell.lab.folder.names() == [everything[0], everything[2]] and shell("check")[0] == 0


def test_conflict_by_command(shell: Shell) -> None:
    assert shell("apply", "--continue")[0] == 21  # no work tree yet
    assert shell("apply")[0] == 0
    assert shell("apply", "--continue")[0] == 2 and shell("apply", "--abort")[0] == 2
    shell("new", "10", "one: x")
    insert(shell.tree / "src/core.c", "line 5", "one\n")
    shell("refresh")
    shell("new", "20", "two: x")
    insert(shell.tree / "src/core.c", "one", "two\n")
    shell("refresh")
    assert shell("edit", "10")[0] == 0
    core = shell.tree / "src/core.c"
    core.write_text(LINES.replace("line 5\n", "line 5\nanother\n"))
    code, _, told = shell("refresh")
    assert code == 21 and "invoke patches apply --continue" in told
    assert shell("check")[0] == 21
    core.write_text(LINES.replace("line 5\n", "line 5\nanother\ntwo\n"))
    assert shell("apply", "--continue")[0] == 0
    assert shell("check")[0] == 0
    assert shell("move", "20", "30")[0] == 0 and shell("drop", "30")[0] == 0
    assert shell.lab.folder.names() == ["0010-one-x.patch"]


def test_words_that_are_off(shell: Shell) -> None:
    assert shell("new", "ten", "one: x")[0] == 2
    assert shell("new", "10", "no area")[0] == 2
    assert shell("apply", "--merge", "--to", "3")[0] == 2
    assert shell("export", "--from-repo", "x")[0] == 2
    assert shell("edit", "5")[0] == 3 and shell("edit", "0")[0] == 3 and shell("apply", "--to", "5")[0] == 3
    assert shell("apply")[0] == 0 and shell("refresh")[0] == 21  # nothing is applied that could take edits


def test_damaged_files_are_one_sentence(shell: Shell) -> None:
    write_tree(shell.lab.folder.path, {"series.yaml": b"\xff\xfe"})
    for words in (["status"], ["apply"], ["check"]):
        code, _, told = shell(*words)
        assert code == 3 and "series.yaml" in told and "Traceback" not in told
    assert shell("lint")[0] == 22


def test_rehearsal_and_bisection(shell: Shell) -> None:
    for number, name in (("10", "good"), ("20", "bad")):
        shell("new", number, f"{name}: x")
        write_tree(shell.tree, {f"src/opencoti/{name}.c": b"x\n"})
        shell("refresh")
    newer = shell.lab.new_upstream({"src/opencoti/good.c": b"x\n"})
    code, out, told = shell("rebase", "--to", "b2", "--source", str(newer.locate()))
    assert code == 0 and "absorbed" in out and "1 clean, 1 absorbed" in told
    data = json.loads(shell("rebase", "--to", "b2", "--source", str(newer.locate()), "--json")[1])
    assert [patch["outcome"] for patch in data["patches"]] == ["absorbed", "clean"]
    code, out, told = shell("bisect", "--run", "test ! -e src/opencoti/bad.c")
    assert code == 21 and out.strip() == "0020-bad-x.patch"
    assert shell("bisect", "--run", "true")[0] == 0


def test_every_command_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, patches.__name__)  # invoke uses the texts up when it makes arguments of them
    for task in importlib.import_module(patches.__name__).ns.tasks.values():
        assert task.__doc__
        for argument in task.get_arguments():
            assert argument.help, (task.name, argument.name)
