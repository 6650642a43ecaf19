"""The series: import, apply, work tree, upkeep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from series_lab import LINES, Lab, body, commits, copy_lab, hook, insert, make_lab, names, plain_git, three_patches, tree_of, write_tree

from opencoti_build import files, patchfile
from opencoti_build.archives import tree_digest
from opencoti_build.errors import BusyError, ChecksumError, DataError, PatchError, UsageError
from opencoti_build.lint import lint
from opencoti_build.runner import SystemRunner
from opencoti_build.series import BaseTree, Outcome, Workspace, export_repository, patched_tree
from opencoti_build.series.bisect import bisect
from opencoti_build.series.chain import record
from opencoti_build.series.check import check


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return make_lab(tmp_path)


@pytest.fixture(scope="session")
def made_series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_patches(tmp_path_factory.mktemp("made")).root


@pytest.fixture
def series(tmp_path: Path, made_series: Path) -> Lab:
    """Three patches: two on one file, one with a new file; applied to a work tree."""
    return copy_lab(made_series, tmp_path)




# ---- import ---------------------------------------------------------------------------------------------------------------------


def test_import_takes_every_byte_whatever_attributes_and_ignore_rules_say(lab: Lab) -> None:
    done = lab.workspace().apply()
    assert done.tree_id == tree_digest(lab.upstream).tree == tree_of(lab.tree)
    assert (lab.tree / "src/crlf.c").read_bytes() == b"one\r\ntwo\r\nthree\r\n"
    assert (lab.tree / "src/core.c").read_bytes() == LINES.encode()
    assert (lab.tree / "notes.log").exists()
    assert os.access(lab.tree / "run.sh", os.X_OK) and os.readlink(lab.tree / "link") == "src/core.c"
    assert (
        plain_git(lab.tree, "log", "--format=%an %ae %at %cn %ce %ct %s")
        == "opencoti series@opencoti.invalid 946684800 opencoti series@opencoti.invalid 946684800 Import llama.cpp b1"
    )


def test_import_refuses_files_that_are_not_the_pinned_tree(lab: Lab) -> None:
    wrong = BaseTree.at(lab.upstream, "b1", "0" * 40)
    with pytest.raises(ChecksumError) as caught:
        lab.workspace(base=wrong).apply()
    assert "0" * 40 in caught.value.details and tree_digest(lab.upstream).tree in caught.value.details
    assert not lab.tree.exists()


def test_identical_commits_whatever_the_machine(series: Lab, tmp_path: Path) -> None:
    expected = series.workspace().apply()
    home = tmp_path / "home"
    (home / "hooks").mkdir(parents=True)
    (home / "hooks" / "post-checkout").write_text("#!/bin/sh\ntouch %s\n" % (tmp_path / "hook-ran"))
    (home / "hooks" / "post-checkout").chmod(0o755)
    (home / ".gitconfig").write_text(
        "[user]\nname = Someone\nemail = some@one.invalid\n[core]\nautocrlf = true\nhooksPath = %s\nexcludesFile = %s\n[commit]\ngpgSign = true\n"
        "[diff]\nnoprefix = true\nalgorithm = patience\ncontext = 7\nrenames = copies\n[i18n]\ncommitEncoding = ISO-8859-1\n[init]\ntemplateDir = %s\n"
        "[apply]\nwhitespace = fix\n[color]\nui = always\n[format]\nsignature = x\n" % (home / "hooks", home / "ignore", home)
    )
    (home / "ignore").write_text("*\n")
    script = (
        "import os,sys; os.umask(0o077)\n"
        "from pathlib import Path\n"
        "sys.path[:0] = [%r]\n"
        "from series_lab import Lab\nimport io\n"
        "lab = Lab(Path(sys.argv[1]), io.StringIO())\n"
        "from opencoti_build.cache import Cache\nfrom opencoti_build.series import Workspace\n"
        "done = Workspace(lab.folder, Path(sys.argv[2]), lab.base(), Cache(Path(sys.argv[3])), lab.console).apply()\n"
        "print(done.commit, done.tree_id)\n" % str(Path(__file__).parent)
    )
    elsewhere = tmp_path / "in another place"
    env = dict(os.environ) | {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "TZ": "America/New_York",
        "LC_ALL": "C.UTF-8",
        "LANG": "tr_TR.UTF-8",
        "GIT_AUTHOR_NAME": "Else",
        "GIT_COMMITTER_DATE": "2001-02-03T04:05:06",
        "GIT_DIR": str(tmp_path / "nowhere"),
        "GIT_INDEX_FILE": str(tmp_path / "index"),
        "GIT_WORK_TREE": str(tmp_path),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
    }
    run = subprocess.run(
        [sys.executable, "-c", script, series.root, elsewhere, tmp_path / "cache2"],
        env=env,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [expected.commit, expected.tree_id]
    assert not (tmp_path / "hook-ran").exists() and not (tmp_path / "index").exists()
    assert tree_digest(lab_copy(elsewhere)).tree == expected.tree_id


def lab_copy(tree: Path) -> Path:
    copy = tree.parent / "copy"
    subprocess.run(["cp", "-a", tree, copy], check=True)
    subprocess.run(["rm", "-rf", copy / ".git"], check=True)
    return copy


# ---- apply ----------------------------------------------------------------------------------------------------------------------


def test_apply_gives_what_git_am_gives(series: Lab, tmp_path: Path) -> None:
    done = series.workspace().apply()
    plain = tmp_path / "plain"
    subprocess.run(["cp", "-a", series.upstream, plain], check=True)
    (plain / ".gitattributes").unlink()  # they would convert line ends in a plain repository
    plain_git(plain, "init", "-q")
    plain_git(plain, "add", "-f", "-A")
    plain_git(plain, "commit", "-qm", "base")
    plain_git(plain, "am", "-q", *[str(series.folder.path / name) for name in names(series)])
    assert plain_git(plain, "log", "--reverse", "--format=%s").splitlines()[1:] == ["one: first hook", "two: second hook", "three: a file"]
    assert (plain / "src/core.c").read_bytes() == (series.tree / "src/core.c").read_bytes()
    assert (plain / "src/opencoti/own.c").read_bytes() == b"int own;\n"
    assert commits(series.tree) == ["Import llama.cpp b1", "0010 one: first hook", "0020 two: second hook", "0030 three: a file"]
    assert done.tree_id == plain_git(series.tree, "rev-parse", "HEAD^{tree}") == tree_of(series.tree)


def test_apply_twice_says_so_and_touches_nothing(series: Lab) -> None:
    first = series.workspace().apply()
    before = (series.tree / "src/core.c").stat().st_mtime_ns
    again = series.workspace().apply()
    assert not again.changed and again.commit == first.commit
    assert (series.tree / "src/core.c").stat().st_mtime_ns == before


def test_tree_identity_without_a_work_tree_comes_from_the_cache_the_second_time(series: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    applied = series.workspace().apply()
    base = series.base().identified()
    assert patched_tree(series.folder, base, series.cache).tree_id == applied.tree_id
    monkeypatch.setenv("PATH", "/nonexistent")  # no git at all: the answer has to come from the cache
    known = patched_tree(series.folder, base, series.cache)
    assert (known.tree_id, known.commit, len(known.patches)) == (applied.tree_id, applied.commit, 3)


def test_apply_refuses_to_overwrite_edits(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    (series.tree / "src/other.c").write_text("my edit\n")
    with pytest.raises(PatchError, match="uncommitted edits.*invoke patches refresh"):
        workspace.apply(to=10)
    with pytest.raises(PatchError, match="uncommitted edits"):
        workspace.drop(30)
    assert (series.tree / "src/other.c").read_text() == "my edit\n"
    assert workspace.apply().edits == ((" M", "src/other.c"),)


def test_apply_refuses_a_file_in_the_way_and_keeps_it(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply(to=20)
    write_tree(series.tree, {"src/opencoti/own.c": b"precious\n"})
    (series.tree / ".git/info").mkdir(exist_ok=True)
    (series.tree / ".git/info/exclude").write_text("src/opencoti\n")
    with pytest.raises(PatchError, match="in the way"):
        workspace.apply()
    assert (series.tree / "src/opencoti/own.c").read_bytes() == b"precious\n"
    (series.tree / "src/opencoti/own.c").unlink()
    assert len(workspace.apply().patches) == 3


def test_a_folder_that_is_no_work_tree_is_refused(series: Lab, tmp_path: Path) -> None:
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(PatchError, match="no work tree of the series"):
        series.workspace(other).apply()
    assert (other / "thesis.txt").read_text() == "years of work"


def test_offset_is_told_and_exact(series: Lab) -> None:
    base = series.new_upstream({"src/core.c": b"new first line\n" + LINES.encode()})
    series.folder.list_path.unlink()
    workspace = series.workspace(series.root / "other", base)
    workspace.apply()
    states = {row.patch.number: row.state for row in workspace.status().rows}
    assert states[10] == "applied (offset)" and states[30] == "applied (clean)"
    lines = (workspace.tree / "src/core.c").read_text().splitlines()
    assert lines[lines.index("hook one") - 1] == "line 5"


def test_no_fuzz_a_changed_context_line_stops(series: Lab) -> None:
    base = series.new_upstream({"src/core.c": LINES.replace("line 6\n", "line six\n").encode()})
    series.folder.list_path.unlink()
    with pytest.raises(PatchError) as caught:
        series.workspace(series.root / "other", base).apply()
    assert caught.value.exit_code == 21 and "0010-one-first-hook.patch" in caught.value.message


def test_a_patch_with_crlf_line_ends_is_refused_by_the_one_engine(series: Lab) -> None:
    file = series.folder.path / "0010-one-first-hook.patch"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(PatchError, match="0010-one-first-hook.patch does not apply"):
        series.workspace(series.root / "other").apply()
    assert any(finding.rule.id == "cr-header" for finding in lint(series.folder))


def test_pinned_base_differs_from_the_recorded_one(series: Lab) -> None:
    with pytest.raises(PatchError, match="invoke patches rebase --to b2"):
        series.workspace(base=series.new_upstream({"README": b"two\n"})).apply()


def test_unlisted_missing_and_duplicate_files_stop_apply(series: Lab) -> None:
    first = series.folder.path / "0010-one-first-hook.patch"
    copy = series.folder.path / "0010-one-again.patch"
    copy.write_bytes(first.read_bytes())
    with pytest.raises(DataError, match="0010-one-again.patch is not listed"):
        series.folder.load()
    series.folder.list_path.unlink()
    with pytest.raises(DataError, match="share the number 0010"):
        series.folder.load()
    copy.unlink()
    record(series.folder, series.base(), series.cache)
    first.unlink()
    with pytest.raises(DataError, match="lists 0010-one-first-hook.patch, which is not there"):
        series.workspace().apply()


def test_taking_all_off_and_on_again(series: Lab) -> None:
    workspace = series.workspace()
    full = workspace.apply()
    assert workspace.apply(to=0).tree_id == tree_digest(series.upstream).tree == tree_of(series.tree)
    assert not (series.tree / "src/opencoti").exists()
    assert workspace.apply().commit == full.commit


def test_a_second_run_at_the_same_time_is_told_so(series: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    series.workspace().apply()
    monkeypatch.setattr(Workspace, "PATIENCE", 0.0)
    with files.lock(series.tree.parent / f".{series.tree.name}.lock"), pytest.raises(BusyError, match="Another run"):
        series.workspace().apply(to=10)


def test_state_file_lost_or_damaged(series: Lab) -> None:
    full = series.workspace().apply()
    state = series.tree / ".git/opencoti/state.json"
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 99}'):
        state.write_text(text)
        with pytest.raises(PatchError):
            series.workspace().apply()
    state.unlink()
    (series.tree / "src/other.c").write_text("edit\n")
    with pytest.raises(PatchError, match="uncommitted edits"):
        series.workspace().apply()
    plain_git(series.tree, "checkout", "src/other.c")
    assert series.workspace().apply().commit == full.commit


# ---- conflicts ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def conflicting(series: Lab) -> Lab:
    """The series on an upstream that changed the very line 0020 hooks in at."""
    write_tree(series.upstream, {"src/core.c": LINES.replace("line 15\n", "line fifteen\n").replace("line 16\n", "line sixteen\n").encode()})
    series.folder.list_path.unlink()
    subprocess.run(["rm", "-rf", series.tree], check=True)
    return series


def test_conflict_is_laid_out_settled_and_continued(conflicting: Lab) -> None:
    workspace = conflicting.workspace()
    with pytest.raises(PatchError) as caught:
        workspace.apply()
    assert "0020-two-second-hook.patch" in caught.value.message and "invoke patches apply --continue" in caught.value.message
    assert commits(conflicting.tree)[-1] == "0010 one: first hook"
    for again in (workspace.apply, lambda: workspace.move(10, 11), lambda: workspace.new(15, "x: y"), workspace.export):
        with pytest.raises(PatchError, match="stands in the conflict"):
            again()
    assert "--continue" in workspace.status().next
    rejected = conflicting.tree / "src/core.c.rej"  # the pre-image is not in the object database: git wrote what did not fit
    assert rejected.exists()
    with pytest.raises(PatchError, match="not settled yet"):
        workspace.resume()
    insert(conflicting.tree / "src/core.c", "line fifteen", "hook two\n")
    rejected.unlink()
    done = workspace.resume()
    assert commits(conflicting.tree)[1:] == ["0010 one: first hook", "0020 two: second hook", "0030 three: a file"]
    assert b" line fifteen\n+hook two\n line sixteen\n" in (conflicting.folder.path / "0020-two-second-hook.patch").read_bytes()
    assert done.tree_id == tree_of(conflicting.tree)
    assert workspace.export() == ["0010-one-first-hook.patch"]  # it went on as it was, but its index line names another pre-image now
    assert check(conflicting.folder, conflicting.base(), conflicting.cache).ok


def test_conflict_markers_where_the_pre_image_is_known(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply(to=10)
    core = series.tree / "src/core.c"
    core.write_text(core.read_text().replace("line 15\n", "line 15 changed by one\n"))
    with pytest.raises(PatchError, match="0020"):
        workspace.refresh()
    assert "<<<<<<<" in core.read_text() and ">>>>>>>" in core.read_text()
    with pytest.raises(PatchError, match="not settled yet") as caught:
        workspace.resume()
    assert caught.value.details == "src/core.c (has conflict markers)"
    core.write_text(LINES.replace("line 5\n", "line 5\nhook one\n").replace("line 15\n", "line 15 changed by one\nhook two\n"))
    workspace.refresh()  # the same as --continue while a conflict is open
    assert check(series.folder, series.base(), series.cache).ok
    assert len(workspace.status().rows) == 3 and workspace.status().next == ""


def test_abort_keeps_the_edits_in_a_file(conflicting: Lab) -> None:
    workspace = conflicting.workspace()
    with pytest.raises(PatchError):
        workspace.apply()
    write_tree(conflicting.tree, {"src/other.c": b"half an idea\n"})
    kept = workspace.abort()
    assert "+half an idea" in Path(kept).read_text()
    assert plain_git(conflicting.tree, "status", "--porcelain") == ""
    assert commits(conflicting.tree)[-1] == "0010 one: first hook"
    with pytest.raises(UsageError, match="no conflict to leave"):
        workspace.abort()
    with pytest.raises(UsageError, match="no conflict to go on from"):
        workspace.resume()


def test_absorbed_patch_is_named_not_skipped(series: Lab) -> None:
    write_tree(series.upstream, {"src/opencoti/own.c": b"int own;\n"})
    series.folder.list_path.unlink()
    workspace = series.workspace(series.root / "other")
    with pytest.raises(PatchError, match="0030-three-a-file.patch is in the tree already.*invoke patches drop 30"):
        workspace.apply()
    assert len(commits(workspace.tree)) == 3
    workspace.drop(30)
    assert names(series) == ["0010-one-first-hook.patch", "0020-two-second-hook.patch"]
    assert not workspace.apply().changed


def test_deleted_and_renamed_targets_are_told(series: Lab) -> None:
    series.add(40, "four: gone", hook("src/gone.c", "leaving 5", "hook\n"))
    (series.upstream / "src/gone.c").unlink()
    series.folder.list_path.unlink()
    workspace = series.workspace(series.root / "other")
    with pytest.raises(PatchError, match="changes a file that is gone.*src/gone.c.rej"):
        workspace.apply()
    assert b"+hook" in (workspace.tree / "src/gone.c.rej").read_bytes()
    (workspace.tree / "src/gone.c.rej").unlink()
    write_tree(workspace.tree, {"src/opencoti/elsewhere.c": b"hook\n"})
    workspace.resume()
    assert check(series.folder, series.base(), series.cache).ok


def test_merge_takes_a_3_way_merge_and_writes_it_back(series: Lab) -> None:
    # 0020 as somebody else exported it: on top of a different neighbour than the one it has here.
    other = series.root / "their"
    subprocess.run(["cp", "-a", series.tree, other], check=True)
    workspace = series.workspace()
    workspace.apply(to=10)
    core = series.tree / "src/core.c"
    core.write_text(core.read_text().replace("line 14\n", "line 14\nfar hook\n"))
    old = (series.folder.path / "0020-two-second-hook.patch").read_bytes()
    workspace.refresh()
    new = (series.folder.path / "0020-two-second-hook.patch").read_bytes()
    assert new != old and check(series.folder, series.base(), series.cache).ok
    (series.folder.path / "0020-two-second-hook.patch").write_bytes(old)
    text = core.read_text()
    assert "far hook" in text and "hook two" in text
    problems = check(series.folder, series.base(), series.cache).problems
    assert problems and "0020" in problems[0].name


def test_patches_of_two_people_meet(series: Lab) -> None:
    """The second one starts from the base too, and has one hunk that the first one's patch brings already."""
    place = series.root / "second"
    subprocess.run(["cp", "-a", series.upstream, place], check=True)
    plain_git(place, "init", "-q")
    (place / ".git/info/attributes").write_text("* -text\n")
    plain_git(place, "add", "-f", "-A")
    plain_git(place, "commit", "-qm", "import")
    insert(place / "src/core.c", "line 5", "hook one\n")
    insert(place / "src/core.c", "line 25", "hook of the second\n")
    plain_git(place, "commit", "-qam", f"0040 second: from the base\n\n{body()}\n")
    export_repository(series.folder, place, "HEAD~1", series.console)
    workspace = series.workspace()
    with pytest.raises(PatchError, match="0040-second-from-the-base.patch fits only by a 3-way merge.*look it over, then run"):
        workspace.apply()
    workspace.abort()
    done = workspace.apply(merge=True)
    assert (series.tree / "src/core.c").read_text().count("hook one\n") == 1 and len(done.patches) == 4
    assert b"hook one" not in (series.folder.path / "0040-second-from-the-base.patch").read_bytes().replace(b" hook one", b"")
    result = check(series.folder, series.base(), series.cache)
    assert result.ok and result.tree_id == done.tree_id, result.problems


# ---- upkeep ---------------------------------------------------------------------------------------------------------------------


def test_new_refuses_bad_numbers_and_titles(series: Lab) -> None:
    workspace = series.workspace()
    for number, title in ((0, "a: b"), (10000, "a: b"), (10, "a: b"), (15, "no area")):
        with pytest.raises(UsageError):
            workspace.new(number, title)
    assert len(names(series)) == 3


def test_new_in_the_middle_takes_later_ones_off_until_refresh(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    patch = workspace.new(15, "between: something")
    assert not (series.tree / "src/opencoti/own.c").exists()
    message = (series.folder.path / patch.name).read_text()
    assert all(f"\n{section}: (to be written" in message for section in patchfile.SECTIONS)
    insert(series.tree / "src/other.c", "row 3", "between\n")
    workspace.refresh()
    assert (series.tree / "src/opencoti/own.c").exists()
    assert [subject[:4] for subject in commits(series.tree)[1:]] == ["0010", "0015", "0020", "0030"]
    assert check(series.folder, series.base(), series.cache).ok


def test_new_keeps_edits_made_before_it(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    insert(series.tree / "src/other.c", "row 3", "was there before\n")
    with pytest.raises(PatchError, match="uncommitted edits"):
        workspace.new(15, "early: x")
    workspace.new(40, "late: x")
    workspace.refresh()
    assert b"+was there before\n" in (series.folder.path / "0040-late-x.patch").read_bytes()


def test_edit_and_refresh_fold_edits_into_the_right_patch(series: Lab) -> None:
    workspace = series.workspace()
    before = workspace.apply()
    workspace.apply(to=10)
    assert "hook two" not in (series.tree / "src/core.c").read_text()
    core = series.tree / "src/core.c"
    core.write_text(core.read_text().replace("hook one\n", "hook one, better\n"))
    write_tree(series.tree, {"src/opencoti/fresh.c": b"int fresh;\n", "trash.log": b"ignored\n"})
    done = workspace.refresh()
    first = (series.folder.path / "0010-one-first-hook.patch").read_bytes()
    assert b"+hook one, better\n" in first and b"fresh.c" in first and b"trash.log" not in first
    assert done.tree_id != before.tree_id and done.tree_id == plain_git(series.tree, "rev-parse", "HEAD^{tree}")
    assert check(series.folder, series.base(), series.cache).ok
    assert not workspace.refresh().changed


def test_refresh_tells_of_ignored_files_of_ours_and_takes_them_when_asked(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    write_tree(series.tree, {"src/opencoti/table.log": b"data\n", "src/opencoti/b.c": b"int b;\n"})
    workspace.refresh()
    assert "src/opencoti/table.log is ignored" in series.output.getvalue()
    assert b"table.log" not in (series.folder.path / "0030-three-a-file.patch").read_bytes()
    workspace.refresh(["src/opencoti/table.log"])
    assert b"+data\n" in (series.folder.path / "0030-three-a-file.patch").read_bytes()


def test_message_edited_in_the_file_is_taken_by_refresh_and_by_apply(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    file = series.folder.path / "0030-three-a-file.patch"
    file.write_bytes(file.read_bytes().replace(b"Why: a reason", b"Why: a better reason"))
    workspace.refresh()
    assert "a better reason" in plain_git(series.tree, "log", "-1", "--format=%B")
    first = series.folder.path / "0010-one-first-hook.patch"
    first.write_bytes(first.read_bytes().replace(b"Why: a reason", b"Why: the first reason"))
    workspace.apply()
    assert "the first reason" in plain_git(series.tree, "log", "-1", "--format=%B", "HEAD~2")
    assert check(series.folder, series.base(), series.cache).ok


def test_subject_edited_in_the_file_renames_it(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    file = series.folder.path / "0030-three-a-file.patch"
    file.write_bytes(file.read_bytes().replace(b"three: a file", b"three: another title"))
    workspace.refresh()
    assert names(series)[-1] == "0030-three-another-title.patch"
    assert check(series.folder, series.base(), series.cache).ok


def test_differences_edited_by_hand_are_not_overwritten(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    file = series.folder.path / "0030-three-a-file.patch"
    edited = file.read_bytes().replace(b"+int own;", b"+int mine;")
    file.write_bytes(edited)
    with pytest.raises(PatchError, match="edited since it was applied"):
        workspace.refresh()
    with pytest.raises(PatchError, match="edited since it was applied"):
        workspace.export()
    assert file.read_bytes() == edited
    workspace.apply()
    assert (series.tree / "src/opencoti/own.c").read_bytes() == b"int mine;\n"
    workspace.export()
    assert check(series.folder, series.base(), series.cache).ok


def test_export_is_stable_and_takes_commits_made_by_hand(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    before = {name: (series.folder.path / name).read_bytes() for name in names(series)}
    assert workspace.export() == []
    assert {name: (series.folder.path / name).read_bytes() for name in names(series)} == before
    insert(series.tree / "src/other.c", "row 9", "by hand\n")
    plain_git(series.tree, "commit", "-qam", "four: by hand\n\nWhy: x\n\nNumber: 0040\n")
    with pytest.raises(PatchError, match="commits that the series does not know"):
        workspace.apply()
    assert workspace.status().next == "invoke patches export"
    assert workspace.export() == ["0040-four-by-hand.patch"]
    assert commits(series.tree)[-1] == "0040 four: by hand"
    assert not workspace.apply().changed
    plain_git(series.tree, "commit", "-q", "--allow-empty", "-m", "no number")
    with pytest.raises(DataError, match="has no number"):
        workspace.export()


def contents(lab: Lab) -> dict[str, bytes]:
    return {name: (lab.folder.path / name).read_bytes() for name in [*names(lab), "series.yaml"]}


WENT_BACK = {
    "a branch": (("checkout", "-q", "-b", "foo", "HEAD~2"), "0010, on the branch foo", "refs/heads/foo"),
    "no branch": (("checkout", "-q", "--detach", "HEAD~2"), "0010, on no branch", None),
    "its own branch": (("reset", "-q", "--hard", "HEAD~2"), "0010", None),
    "the base": (("checkout", "-q", "-b", "foo", "HEAD~3"), "the base, on the branch foo", "refs/heads/foo"),
    "written anew": ((), "0010, on the branch foo", "refs/heads/foo"),
}


@pytest.mark.parametrize("where", WENT_BACK)
def test_git_went_back_to_an_earlier_patch(series: Lab, where: str) -> None:
    words, place, ref = WENT_BACK[where]
    workspace = series.workspace()
    full = workspace.apply()
    before = contents(series)
    if where == "written anew":
        plain_git(series.tree, "branch", "foo", "HEAD~2")
        plain_git(series.tree, "checkout", "-q", "--detach", "HEAD")
        base = plain_git(series.tree, "rev-parse", "HEAD~3")
        words = ("rebase", "-q", "--force-rebase", base, "foo")
    plain_git(series.tree, *words)
    head, count = plain_git(series.tree, "rev-parse", "HEAD"), 0 if where == "the base" else 1
    assert (head == plain_git(series.tree, "rev-parse", f"{full.commit}~{3 - count}")) == (where != "written anew")

    now = workspace.status()
    assert now.note == f"the work tree stands at {place}, without the later patches" and now.next == "invoke patches apply"
    assert [row.state for row in now.rows] == ["applied (clean)"] * count + ["not applied"] * (3 - count)
    assert [row.patch.number for row in now.rows if row.current] == [10] * count and now.foreign_commits == 0
    assert now.tree_id == plain_git(series.tree, "rev-parse", "HEAD^{tree}")
    for remove in (False, True):
        with pytest.raises(PatchError, match=f"stands at {place}, .*'invoke patches apply' brings the later patches back") as caught:
            workspace.export(remove=remove)
        assert caught.value.exit_code == 21
    for refused in (workspace.refresh, lambda: workspace.drop(30), lambda: workspace.new(40, "four: x")):
        with pytest.raises(PatchError, match=f"stands at {place}, .*'invoke patches apply' brings the later patches back"):
            refused()
    assert contents(series) == before and plain_git(series.tree, "rev-parse", "HEAD") == head

    done = workspace.apply()
    assert done.changed and done.commit == full.commit and tree_of(series.tree) == full.tree_id
    assert plain_git(series.tree, "symbolic-ref", "HEAD") == "refs/heads/series"
    assert f"the work tree stood at {place}" in series.output.getvalue()
    if ref is not None:
        assert plain_git(series.tree, "rev-parse", ref) == head and "the branch foo stays as it is" in series.output.getvalue()
    assert contents(series) == before and workspace.status().next == workspace.status().note == ""
    assert workspace.export() == [] and contents(series) == before


def test_edits_at_an_earlier_patch_are_kept(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    plain_git(series.tree, "checkout", "-q", "-b", "foo", "HEAD~2")
    insert(series.tree / "src/other.c", "row 9", "an edit\n")
    edited = (series.tree / "src/other.c").read_bytes()
    assert workspace.status().next == "invoke patches edit 10, then: invoke patches refresh"
    with pytest.raises(PatchError, match="invoke patches refresh"):
        workspace.apply()
    assert (series.tree / "src/other.c").read_bytes() == edited
    workspace.refresh()
    assert b"+an edit\n" in (series.folder.path / "0010-one-first-hook.patch").read_bytes()
    assert commits(series.tree)[1:] == ["0010 one: first hook", "0020 two: second hook", "0030 three: a file"]
    assert check(series.folder, series.base(), series.cache).ok


def test_going_on_from_an_earlier_patch_leaves_no_commit_behind(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    insert(series.tree / "src/other.c", "row 9", "by hand\n")
    plain_git(series.tree, "commit", "-qam", "0040 four: by hand")
    by_hand = plain_git(series.tree, "rev-parse", "HEAD")
    plain_git(series.tree, "checkout", "-q", "-b", "foo", "HEAD~3")
    way = f"git -C {series.tree} switch series"
    assert workspace.status().next == way
    for refused in (workspace.apply, workspace.export):
        with pytest.raises(PatchError, match=way):
            refused()
    assert plain_git(series.tree, "rev-parse", "series") == by_hand
    plain_git(series.tree, *way.split()[3:])
    assert workspace.status().next == "invoke patches export" and workspace.export() == ["0040-four-by-hand.patch"]


UNDER_WAY = {
    "search": (("bisect", "start", "HEAD", "HEAD~3"), "bisect reset"),
    "rebase": (("-c", "sequence.editor=sed -i -e 1s/pick/edit/", "rebase", "-q", "-i", "HEAD~3"), "rebase --continue"),
}


@pytest.mark.parametrize("what", UNDER_WAY)
def test_git_in_the_middle_of_its_own_work_is_left_alone(series: Lab, what: str) -> None:
    words, end = UNDER_WAY[what]
    workspace = series.workspace()
    full = workspace.apply()
    plain_git(series.tree, *words)
    head = plain_git(series.tree, "rev-parse", "HEAD")
    way = f"git -C {series.tree} {end}"
    assert head != full.commit and workspace.status().next == way
    for refused in (workspace.apply, workspace.export):
        with pytest.raises(PatchError, match=way):
            refused()
    assert plain_git(series.tree, "rev-parse", "HEAD") == head
    plain_git(series.tree, *way.split()[3:])
    assert not workspace.apply().changed


def without_the_second(lab: Lab) -> str:
    """Takes the commit of 0020 out with git; the commit that was applied before."""
    whole = plain_git(lab.tree, "rev-parse", "HEAD")
    plain_git(lab.tree, "rebase", "-q", "--onto", "HEAD~2", "HEAD~1")
    assert commits(lab.tree)[1:] == ["0010 one: first hook", "0030 three: a file"]
    return whole


def test_a_commit_taken_out_takes_its_file_along_only_when_told_to(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply()
    before, whole = contents(series), without_the_second(series)
    said = f"lack 0020-two-second-hook.patch: 'invoke patches export --remove' takes that out .* 'git -C {series.tree} reset --keep {whole}' brings back"
    for refused in (workspace.export, lambda: workspace.export(force=True), workspace.apply, workspace.refresh):
        with pytest.raises(PatchError, match=said) as caught:
            refused()
        assert caught.value.exit_code == 21
    now = workspace.status()
    assert "lack 0020-two-second-hook.patch" in now.note and now.next.startswith("invoke patches export --remove")
    assert contents(series) == before
    file = series.folder.path / "0020-two-second-hook.patch"
    file.write_bytes(before[file.name].replace(b"Why: a reason", b"Why: a better reason"))
    with pytest.raises(PatchError, match="0020-two-second-hook.patch was edited since it was applied"):
        workspace.export(remove=True)
    file.write_bytes(before[file.name])
    assert workspace.export(remove=True) == ["0020-two-second-hook.patch (removed)"]
    assert names(series) == ["0010-one-first-hook.patch", "0030-three-a-file.patch"]
    assert check(series.folder, series.base(), series.cache).ok and not workspace.apply().changed


def test_a_commit_taken_out_comes_back(series: Lab) -> None:
    workspace = series.workspace()
    full = workspace.apply()
    plain_git(series.tree, "checkout", "-q", "-b", "foo")
    without_the_second(series)
    with pytest.raises(PatchError, match="lack 0020") as caught:
        workspace.export()
    way = caught.value.message.split("'")[3]
    assert way == f"git -C {series.tree} switch series"  # the branch keeps its commits
    plain_git(series.tree, *way.split()[3:])
    assert not workspace.apply().changed and plain_git(series.tree, "rev-parse", "HEAD") == full.commit


def test_export_with_later_patches_off_keeps_what_the_series_gives(series: Lab) -> None:
    workspace = series.workspace()
    workspace.apply(to=10)
    before = contents(series)
    assert workspace.export() == [] and contents(series) == before
    assert check(series.folder, series.base(), series.cache).ok


def test_move_and_drop(series: Lab) -> None:
    workspace = series.workspace()
    tree = workspace.apply().tree_id
    assert workspace.move(10, 25).tree == tree
    assert names(series) == ["0020-two-second-hook.patch", "0025-one-first-hook.patch", "0030-three-a-file.patch"]
    assert commits(series.tree)[1:3] == ["0020 two: second hook", "0025 one: first hook"]
    assert check(series.folder, series.base(), series.cache).ok
    workspace.drop(20)
    assert names(series) == ["0025-one-first-hook.patch", "0030-three-a-file.patch"]
    assert "hook two" not in (series.tree / "src/core.c").read_text()
    assert check(series.folder, series.base(), series.cache).ok
    with pytest.raises(UsageError, match="already"):
        workspace.move(25, 30)
    with pytest.raises(DataError, match="no patch 0099"):
        workspace.drop(99)


def test_a_move_or_drop_that_conflicts_changes_nothing(series: Lab) -> None:
    series.add(40, "four: on top of two", hook("src/core.c", "hook two", "on top\n"))
    workspace = series.workspace()
    before = {name: (series.folder.path / name).read_bytes() for name in names(series)}
    head = plain_git(series.tree, "rev-parse", "HEAD")
    with pytest.raises(PatchError, match="Nothing was changed"):
        workspace.drop(20)
    with pytest.raises(PatchError, match="Nothing was changed"):
        workspace.move(40, 5)
    assert {name: (series.folder.path / name).read_bytes() for name in names(series)} == before
    assert plain_git(series.tree, "rev-parse", "HEAD") == head and not workspace.apply().changed


def test_check_tells_what_differs(series: Lab) -> None:
    assert check(series.folder, series.base(), series.cache).ok
    file = series.folder.path / "0010-one-first-hook.patch"
    good = file.read_bytes()
    file.write_bytes(good.replace(b"opencoti <series", b"somebody <series"))
    problems = check(series.folder, series.base(), series.cache).problems
    assert [problem.name for problem in problems] == [file.name] and "line 2" in problems[0].what
    file.write_bytes(good)
    listing = series.folder.list_path.read_text()
    tree = series.workspace().apply().tree_id
    series.folder.list_path.write_text(listing.replace(f"tree: {tree}", "tree: " + "a" * 40))
    assert [problem.name for problem in check(series.folder, series.base(), series.cache).problems] == ["series.yaml"]


# ---- other repositories ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(lab: Lab) -> Path:
    """Somebody's repository with the upstream as its first commit."""
    place = lab.root / "somebody"
    subprocess.run(["cp", "-a", lab.upstream, place], check=True)
    plain_git(place, "init", "-q")
    plain_git(place, "config", "core.autocrlf", "false")
    (place / ".git/info/attributes").write_text("* -text\n")
    plain_git(place, "add", "-f", "-A")
    plain_git(place, "commit", "-qm", "import")
    plain_git(place, "tag", "base")
    return place


def test_export_from_a_repository(lab: Lab, repository: Path) -> None:
    insert(repository / "src/core.c", "line 5", "hook\n")
    plain_git(repository, "commit", "-qam", "0001 identity: say who we are\n\nWhy: x\n")
    insert(repository / "src/core.c", "line 6", "hook\n")
    plain_git(repository, "commit", "-qam", "single: one program\n\nWhy: y\n\nNumber: 0005\n")
    plain_git(repository, "config", "diff.noprefix", "true")
    plain_git(repository, "config", "diff.context", "9")
    written = export_repository(lab.folder, repository, "base", lab.console)
    assert [patch.name for patch in written] == ["0001-identity-say-who-we-are.patch", "0005-single-one-program.patch"] == names(lab)
    assert written[1].message.body == "Why: y"
    first = {name: (lab.folder.path / name).read_bytes() for name in names(lab)}
    export_repository(lab.folder, repository, "base", lab.console)
    assert {name: (lab.folder.path / name).read_bytes() for name in names(lab)} == first
    assert record(lab.folder, lab.base(), lab.cache) is None
    assert lab.workspace().apply().tree_id == plain_git(repository, "rev-parse", "HEAD^{tree}")
    assert check(lab.folder, lab.base(), lab.cache).ok


def test_export_from_a_repository_replaces_a_renamed_patch(lab: Lab, repository: Path) -> None:
    insert(repository / "src/core.c", "line 5", "hook\n")
    plain_git(repository, "commit", "-qam", "0001 identity: old title")
    export_repository(lab.folder, repository, "base", lab.console)
    plain_git(repository, "commit", "-q", "--amend", "-m", "0001 identity: new title")
    export_repository(lab.folder, repository, "base", lab.console)
    assert names(lab) == ["0001-identity-new-title.patch"]


def test_export_from_a_repository_with_numbers_given(lab: Lab, repository: Path) -> None:
    for line, subject in (("line 5", "one: x"), ("line 6", "0007 two: x"), ("line 7", "three: x")):
        insert(repository / "src/core.c", line, "hook\n")
        plain_git(repository, "commit", "-qam", subject)
    with pytest.raises(DataError, match="1 numbers are left over"):
        export_repository(lab.folder, repository, "base", lab.console, numbers=[5, 9, 11])
    with pytest.raises(DataError, match="'three: x' has no number"):
        export_repository(lab.folder, repository, "base", lab.console, numbers=[5])
    assert names(lab) == []
    export_repository(lab.folder, repository, "base", lab.console, numbers=[5, 9])
    assert names(lab) == ["0005-one-x.patch", "0007-two-x.patch", "0009-three-x.patch"]
    export_repository(lab.folder, repository, "base", lab.console)  # the same subjects are known by now
    assert names(lab) == ["0005-one-x.patch", "0007-two-x.patch", "0009-three-x.patch"]


def test_export_from_a_repository_refuses_before_it_writes(lab: Lab, repository: Path) -> None:
    with pytest.raises(DataError, match="no commit after base"):
        export_repository(lab.folder, repository, "base", lab.console)
    with pytest.raises(DataError, match="has no commit nowhere"):
        export_repository(lab.folder, repository, "nowhere", lab.console)
    insert(repository / "src/core.c", "line 5", "hook\n")
    plain_git(repository, "commit", "-qam", "0001 one: x")
    insert(repository / "src/core.c", "line 6", "hook\n")
    plain_git(repository, "commit", "-qam", "0001 one: again")
    with pytest.raises(DataError, match="Two commits have the number 0001"):
        export_repository(lab.folder, repository, "base", lab.console)
    plain_git(repository, "commit", "-q", "--amend", "-m", "forgot it")
    with pytest.raises(DataError, match="'forgot it' has no number"):
        export_repository(lab.folder, repository, "base", lab.console)
    assert names(lab) == []


# ---- bisect ---------------------------------------------------------------------------------------------------------------------


def test_bisect_finds_the_first_bad_patch(lab: Lab, repository: Path) -> None:
    for number in range(1, 7):
        write_tree(repository, {f"src/opencoti/{number}.c": b"bad\n" if number == 4 else b"fine\n"})
        plain_git(repository, "add", "-A")
        plain_git(repository, "commit", "-qm", f"00{number}0 area: patch {number}")
    export_repository(lab.folder, repository, "base", lab.console)
    workspace = lab.workspace(lab.root / "bisecting")
    found = bisect(workspace, "! grep -rq bad src/opencoti 2>/dev/null", SystemRunner(), lab.console)
    assert found.first is not None and found.first.number == 40 and found.skipped == ()
    skipping = bisect(workspace, 'test "$OPENCOTI_PATCH" != 0030 || exit 125; ! grep -rq bad src/opencoti 2>/dev/null', SystemRunner(), lab.console)
    assert skipping.first is not None and skipping.first.number == 40
    assert bisect(workspace, "true", SystemRunner(), lab.console).first is None
    with pytest.raises(PatchError, match="on the base already"):
        bisect(workspace, "false", SystemRunner(), lab.console)


def test_workspace_in_another_repository_leaves_it_alone(lab: Lab) -> None:
    outer = lab.root / "outer"
    outer.mkdir()
    plain_git(outer, "init", "-q")
    (outer / "own.txt").write_text("outer\n")
    plain_git(outer, "add", "own.txt")
    plain_git(outer, "commit", "-qm", "outer")
    before = plain_git(outer, "rev-parse", "HEAD"), (outer / ".git/index").read_bytes()
    workspace = Workspace(lab.folder, outer / "build" / "tree", lab.base(), lab.cache, lab.console)
    workspace.apply()
    workspace.new(10, "a: b")
    insert(outer / "build/tree/src/core.c", "line 2", "x\n")
    workspace.refresh()
    assert (plain_git(outer, "rev-parse", "HEAD"), (outer / ".git/index").read_bytes()) == before
    (outer / "build/tree/.git/HEAD").unlink()
    for action in (workspace.apply, workspace.refresh, workspace.status):
        with pytest.raises(Exception, match="damaged"):
            action()
    assert (plain_git(outer, "rev-parse", "HEAD"), (outer / ".git/index").read_bytes()) == before


def test_outcomes_have_one_name_each() -> None:
    assert {outcome.value for outcome in Outcome} == {"clean", "offset", "merged", "absorbed", "renamed", "deleted", "conflict"}
