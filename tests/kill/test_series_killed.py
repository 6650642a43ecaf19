"""The series under kill -9: at points spread over the work, and at random; the next run completes and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from series_lab import LINES, Lab, commits, copy_lab, names, plain_git, three_patches, tree_of

from opencoti_build import files
from opencoti_build.errors import BusyError, PatchError, UsageError
from opencoti_build.git import Git
from opencoti_build.series.check import check
from opencoti_build.series.state import Move, State


@pytest.fixture(scope="module")
def made_series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_patches(tmp_path_factory.mktemp("made")).root


@pytest.fixture
def series(tmp_path: Path, made_series: Path) -> Lab:
    """Three patches, applied to a work tree."""
    return copy_lab(made_series, tmp_path)


def in_child(action, kill_at: int | None, counter: Path) -> int:  # type: ignore[no-untyped-def]
    """Run ``action`` in a forked child that ends by SIGKILL before its ``kill_at``-th git command or rename; returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        counted = 0

        def counting(function):  # type: ignore[no-untyped-def]
            def call(*args, **kwargs):  # type: ignore[no-untyped-def]
                nonlocal counted
                counted += 1
                if counted == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        subprocess.run, os.replace = counting(subprocess.run), counting(os.replace)
        action()
        counter.write_text(str(counted))
    except BaseException:
        os._exit(1)
    os._exit(0)


def killed_along_the_way(action, restore, check_after, counter: Path) -> None:  # type: ignore[no-untyped-def]
    """Kill ``action`` at points spread over its work and at the last; ``check_after`` completes and judges, ``restore`` resets."""
    for _ in range(2):  # the second time, what is equal is not written again: that is how all further runs go
        assert in_child(action, None, counter) == 0
        restore()
    points = int(counter.read_text())
    assert points > 10
    for point in sorted({*range(1, points + 1, max(1, points // 3)), points}):
        status = in_child(action, point, counter)
        assert os.WIFSIGNALED(status), point
        check_after()
        restore()


def test_killed_apply_is_completed_by_the_next(series: Lab) -> None:
    full = series.workspace().apply()
    low = series.workspace().apply(to=10)

    def after() -> None:
        assert series.workspace().apply().commit == full.commit
        assert tree_of(series.tree) == full.tree_id
        assert plain_git(series.tree, "status", "--porcelain") == ""

    def restore() -> None:
        assert series.workspace().apply(to=10).tree_id == low.tree_id

    killed_along_the_way(lambda: series.workspace().apply(), restore, after, series.root / "count")


def test_killed_first_apply_leaves_no_half_tree(series: Lab) -> None:
    full = series.workspace().apply()

    def after() -> None:
        assert series.workspace().apply().commit == full.commit
        assert tree_of(series.tree) == full.tree_id

    def restore() -> None:
        subprocess.run(["rm", "-rf", series.tree, series.cache.root], check=True)
        assert [path.name for path in series.root.glob(".tree.*tmp")] == []

    restore()
    killed_along_the_way(lambda: series.workspace().apply(), restore, after, series.root / "count")


def test_killed_refresh_loses_no_edit(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    before = {name: (series.folder.path / name).read_bytes() for name in [*names(series), "series.yaml"]}

    def start() -> None:
        for name, data in before.items():
            (series.folder.path / name).write_bytes(data)
        workspace.apply()
        workspace.apply(to=10)
        core = series.tree / "src/core.c"
        core.write_text(core.read_text().replace("hook one\n", "hook one, better\n").replace("line 14\n", "line 14\nnear two\n"))

    def after() -> None:
        if workspace.status().edits:
            workspace.refresh()  # nothing had been folded yet, the edits are still there
        workspace.apply(merge=True)
        text = (series.tree / "src/core.c").read_text()
        assert "hook one, better\n" in text and "near two\n" in text and "hook two\n" in text
        assert (series.tree / "src/opencoti/own.c").exists()
        workspace.export()
        assert check(series.folder, series.base(), series.cache).ok

    start()
    killed_along_the_way(workspace.refresh, start, after, series.root / "count")


def test_killed_move_of_a_patch(series: Lab) -> None:
    workspace = series.workspace()
    full = workspace.apply()

    def after() -> None:
        workspace.apply()
        if "0010-one-first-hook.patch" in names(series):
            workspace.move(10, 25)
        assert names(series) == ["0020-two-second-hook.patch", "0025-one-first-hook.patch", "0030-three-a-file.patch"]
        result = check(series.folder, series.base(), series.cache)
        assert result.ok and result.tree_id == full.tree_id

    killed_along_the_way(lambda: workspace.move(10, 25), lambda: workspace.move(25, 10), after, series.root / "count")


def test_killed_while_a_conflict_is_laid_out(series: Lab) -> None:
    workspace = series.workspace()
    low = workspace.apply(to=10)
    core = series.tree / "src/core.c"
    edited = core.read_text().replace("line 15\n", "line 15 changed\n")
    before = {name: (series.folder.path / name).read_bytes() for name in [*names(series), "series.yaml"]}

    def restore() -> None:
        with contextlib.suppress(UsageError):
            workspace.abort()
        for name, data in before.items():
            (series.folder.path / name).write_bytes(data)
        assert workspace.apply(to=10).tree_id == low.tree_id
        core.write_text(edited)

    def action() -> None:
        with contextlib.suppress(PatchError):
            workspace.refresh()

    def after() -> None:
        if workspace.status().conflict is None:
            with pytest.raises(PatchError, match="0020"):
                workspace.refresh()
        with pytest.raises(PatchError, match="stands in the conflict of 0020"):
            workspace.apply()
        assert commits(series.tree)[-1] == "0010 one: first hook"
        assert core.read_text().count("<<<<<<<") == 1 and "line 15 changed\n" in core.read_text() and "hook two\n" in core.read_text()

    core.write_text(edited)
    killed_along_the_way(action, restore, after, series.root / "count")


def test_killed_rebase_ends_or_begins_again(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    newer = series.new_upstream({"src/core.c": b"new first line\n" + LINES.encode(), "src/opencoti/own.c": b"int own;\n"})
    before = {name: (series.folder.path / name).read_bytes() for name in [*names(series), "series.yaml"]}

    def after() -> None:
        with contextlib.suppress(UsageError, PatchError):
            workspace.rebase(newer)
        assert names(series) == ["0010-one-first-hook.patch", "0020-two-second-hook.patch"]
        assert check(series.folder, newer, series.cache).ok
        assert not series.workspace(base=newer).apply().changed

    def restore() -> None:
        for name in names(series):
            series.folder.remove(name)
        for name, data in before.items():
            (series.folder.path / name).write_bytes(data)
        workspace.apply()

    killed_along_the_way(lambda: workspace.rebase(newer), restore, after, series.root / "count")


def test_killed_in_the_middle_of_a_checkout(series: Lab) -> None:
    """What git leaves when it dies while writing files: a lock, a file cut short, files of both sides."""
    workspace = series.workspace()
    full = workspace.apply()
    low = workspace.apply(to=10)
    state = State.load(series.tree / ".git/opencoti/state.json")
    workspace.apply()
    high = State.load(series.tree / ".git/opencoti/state.json")
    assert state is not None and high is not None
    workspace.apply(to=10)
    replace(high, move=Move(low.commit, full.commit)).save(series.tree / ".git/opencoti/state.json")
    (series.tree / ".git/index.lock").write_bytes(b"half")
    core = series.tree / "src/core.c"
    core.write_bytes(LINES.replace("line 5\n", "line 5\nhook one\n").encode()[:57])
    (series.tree / "src/other.c").write_text("edited by a person after the kill\n")
    with_edit = workspace.apply()
    assert with_edit.commit == full.commit and with_edit.edits == ((" M", "src/other.c"),)
    assert "hook two" in core.read_text() and (series.tree / "src/opencoti/own.c").exists()
    assert not list((series.tree / ".git/opencoti").glob("saved/*"))
    replace(high, move=Move(low.commit, full.commit)).save(series.tree / ".git/opencoti/state.json")
    core.write_text("somebody typed this meanwhile\n")
    workspace.apply()
    assert "hook two" in core.read_text()
    assert [path.read_text() for path in (series.tree / ".git/opencoti/saved").rglob("core.c")] == ["somebody typed this meanwhile\n"]


def test_killed_at_random_moments(series: Lab) -> None:
    full = series.workspace().apply()
    chance = random.Random(2434)
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    series.workspace().apply(to=0)
                    series.workspace().apply()
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = series.workspace().apply()
        assert done.commit == full.commit and tree_of(series.tree) == full.tree_id


def test_a_git_that_outlives_a_killed_run_keeps_the_lock(series: Lab) -> None:
    series.workspace().apply()
    lock = series.tree.parent / f".{series.tree.name}.lock"
    gate = series.root / "gate"
    os.mkfifo(gate)
    child = os.fork()
    if child == 0:
        try:
            with files.lock(lock) as held:
                git = replace(Git.open(series.tree), holding=(held.fileno(),))
                git.run("-c", f"alias.wait=!touch {series.root / 'started'}; cat {gate}", "wait")
        finally:
            os._exit(0)
    while not (series.root / "started").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(BusyError), files.lock(lock):
        pass
    gate.write_bytes(b"end")
    assert not series.workspace().apply().changed  # waits for the orphan's end
