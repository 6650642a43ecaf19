"""Moving to another upstream: the rehearsal, and the real thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from series_lab import ARGS, HEADER, LINES, Lab, commits, copy_lab, hook, make_lab, plain_git, write_tree

from opencoti_build.archives import tree_digest
from opencoti_build.errors import PatchError, UsageError
from opencoti_build.rebase import enum_in, flags_in, rehearse
from opencoti_build.series import BaseTree, Outcome, export_repository
from opencoti_build.series.chain import record
from opencoti_build.series.check import check


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series with a patch for every outcome, as somebody's repository."""
    lab = make_lab(tmp_path_factory.mktemp("rebase"))
    place = lab.root / "somebody"
    place.mkdir()
    plain_git(place, "init", "-q")
    (place / ".git/info/attributes").write_text("* -text\n")
    for path in lab.upstream.rglob("*"):
        if path.is_file() and not path.is_symlink():
            target = place / path.relative_to(lab.upstream)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            target.chmod(path.stat().st_mode)
    (place / "link").symlink_to("src/core.c")
    plain_git(place, "add", "-f", "-A")
    plain_git(place, "commit", "-qm", "base")
    plain_git(place, "tag", "base")
    edits = [
        ("0010 clean: untouched file", hook("src/other.c", "row 5", "hook\n")),
        ("0020 offset: lines moved", hook("src/core.c", "line 25", "moved hook\n")),
        ("0030 conflict: same line", hook("src/core.c", "line 10", "contested\n")),
        ("0040 depends: on the contested one", hook("src/core.c", "contested", "on top\n")),
        ("0050 absorbed: upstream took it", hook("README", "upstream", "taken\n")),
        ("0060 renamed: target moved", hook("src/moved.c", "moving 5", "follow\n")),
        ("0070 deleted: target gone", hook("src/gone.c", "leaving 5", "lost\n")),
        ("0080 merged: half of it taken", lambda tree: (tree / "run.sh").write_text("#!/bin/sh\nset -e\necho run\nexit 0\n")),
        ("0090 types: a value of ours", hook("ggml/include/ggml.h", "    GGML_TYPE_Q2_0 = 42, // newest", "    GGML_TYPE_OURS = 43,\n")),
        ("0100 flags: one of ours", hook("common/arg.cpp", "// flags", 'add_opt(common_arg({"--ours", "--shared"}, "x"));\n')),
    ]
    for subject, edit in edits:
        edit(place)
        plain_git(place, "commit", "-qam", subject)
    export_repository(lab.folder, place, "base", lab.console)
    assert record(lab.folder, lab.base(), lab.cache) is None
    return lab.root


@pytest.fixture
def lab(tmp_path: Path, made: Path) -> Lab:
    return copy_lab(made, tmp_path)


@pytest.fixture
def newer(lab: Lab) -> BaseTree:
    core = "".join(f"extra {number}\n" for number in range(3)) + LINES.replace("line 11\n", "line eleven\n")
    core = core.replace("line 10\n", "line ten\n")
    header = HEADER.replace("    GGML_TYPE_COUNT = 43,", "    GGML_TYPE_THEIRS = 43,\n    GGML_TYPE_COUNT = 44,").replace(
        "    GGML_OP_NONE = 0,\n", "    GGML_OP_NONE = 0,\n    GGML_OP_FIRST,\n"
    )
    moved = LINES.replace("line", "moving").replace("moving 30\n", "moving thirty\n")
    return lab.new_upstream(
        {
            "src/core.c": core.encode(),
            "README": b"upstream\ntaken\n",
            "src/moved.c": None,
            "lib/better.c": moved.encode(),
            "src/gone.c": None,
            "run.sh": b"#!/bin/sh\nset -e\necho run\n",
            "ggml/include/ggml.h": header.encode(),
            "common/arg.cpp": ARGS.replace('"--old-flag"', '"--new-flag", "--shared"').encode(),
        }
    )


def test_rehearsal_tries_every_patch_and_tells_each_outcome(lab: Lab, newer: BaseTree) -> None:
    before = {name: (lab.folder.path / name).read_bytes() for name in lab.folder.names()}
    result = rehearse(lab.folder, lab.base(), newer, lab.cache, lab.console)
    outcomes = {trial.patch.number: trial.outcome for trial in result.trials}
    assert outcomes == {
        10: Outcome.CLEAN,
        20: Outcome.OFFSET,
        30: Outcome.CONFLICT,
        40: Outcome.OFFSET,
        50: Outcome.ABSORBED,
        60: Outcome.RENAMED,
        70: Outcome.DELETED,
        80: Outcome.MERGED,
        90: Outcome.CONFLICT,
        100: Outcome.CLEAN,
    }
    assert [trial.patch.number for trial in result.failing] == [30, 70, 90]
    by_number = {trial.patch.number: trial for trial in result.trials}
    assert by_number[40].after == (30,)
    assert "lib/better.c" in by_number[60].attempt.note and "src/gone.c" in by_number[70].attempt.note
    assert "lines moved by +3" in by_number[20].attempt.note
    assert {name: (lab.folder.path / name).read_bytes() for name in lab.folder.names()} == before and not lab.tree.exists()
    enums = {change.name: change for change in result.enums}
    assert enums["ggml_type"].clashes == (("GGML_TYPE_OURS", 43, "GGML_TYPE_THEIRS"),)
    assert enums["ggml_type"].added == (("GGML_TYPE_THEIRS", 43),)
    assert enums["ggml_op"].added == (("GGML_OP_FIRST", 1),) and ("GGML_OP_ADD", 1, 2) in enums["ggml_op"].renumbered
    assert result.flags.added == ("--new-flag", "--shared") and result.flags.removed == ("--old-flag",) and result.flags.clashes == ("--shared",)
    assert "2 clashes" in result.verdict and "invoke patches rebase --to b2 --continue" in result.verdict
    again = json.loads(json.dumps(result.to_dict()))
    assert [patch["outcome"] for patch in again["patches"]][:3] == ["clean", "offset", "conflict"]
    assert [title for title, _, _ in result.tables()] == [f"Series on b2 ({result.files_changed} files differ from b1)", "Enums", "Flags"]
    assert result.files_changed == 8


def test_rehearsal_on_the_same_files_is_all_clean(lab: Lab) -> None:
    result = rehearse(lab.folder, lab.base(), BaseTree.at(lab.upstream, "b1-again"), lab.cache, lab.console)
    assert {trial.outcome for trial in result.trials} == {Outcome.CLEAN} and result.enums == () and len(result.tables()) == 1


def test_a_hunk_that_fits_in_the_wrong_place_is_not_taken_for_clean(tmp_path: Path) -> None:
    block = "begin\n    work();\nend\n"
    lab = make_lab(tmp_path)
    write_tree(lab.upstream, {"src/core.c": (block + "// first\n" + block + "// second\n" + block + "// third\n").encode()})
    lab.add(
        10,
        "second: hook in the second block",
        lambda tree: write_tree(
            tree, {"src/core.c": (block + "// first\nbegin\n    work();\n    hook();\nend\n// second\n" + block + "// third\n").encode()}
        ),
    )
    # Where the second block was, the new upstream has another one with the same lines around.
    newer = lab.new_upstream({"src/core.c": (block + "// zeroth\n" + block + "// first\n" + block + "// second\n" + block + "// third\n").encode()})
    result = rehearse(lab.folder, lab.base(), newer, lab.cache, lab.console)
    assert result.trials[0].outcome is Outcome.MERGED
    lab.workspace().rebase(newer)
    text = (lab.tree / "src/core.c").read_text()
    assert text.index("// first") < text.index("hook();") < text.index("// second")


def test_a_series_that_does_not_apply_to_its_own_base_cannot_be_rehearsed(lab: Lab, newer: BaseTree) -> None:
    with pytest.raises(PatchError, match="has to apply to b2"):
        rehearse(lab.folder, newer, lab.base(), lab.cache, lab.console)


def settle(lab: Lab, conflict: str) -> None:
    """Decide whatever is open for both sides, as a person would."""
    core = lab.tree / "src/core.c"
    for file in lab.tree.rglob("*"):
        if file.is_file() and not file.is_symlink() and ".git" not in file.parts and b"<<<<<<< " in file.read_bytes():
            kept = [line for line in file.read_text().splitlines(True) if not line.startswith(("<<<<<<<", "=======", ">>>>>>>"))]
            file.write_text("".join(kept))
    for file in lab.tree.rglob("*.rej"):
        file.unlink()
    if conflict.startswith("0030"):
        core.write_text(core.read_text().replace("line 10\n", "").replace("line 11\n", ""))


def test_rebase_for_real(lab: Lab, newer: BaseTree) -> None:
    workspace = lab.workspace()
    workspace.apply()
    with pytest.raises(UsageError, match="stands on b1 already"):
        workspace.rebase(lab.base())
    (lab.tree / "src/other.c").write_text("edit\n")
    with pytest.raises(PatchError, match="uncommitted edits"):
        workspace.rebase(newer)
    plain_git(lab.tree, "checkout", "src/other.c")
    old = {name: (lab.folder.path / name).read_bytes() for name in lab.folder.names()}
    stops: list[str] = []
    action = lambda: workspace.rebase(newer)  # noqa: E731
    for _ in range(8):
        try:
            done = action()
            break
        except PatchError as stop:
            state = workspace.status()
            assert state.conflict is not None, stop
            stops.append(state.conflict.name[:4])
            assert {name: (lab.folder.path / name).read_bytes() for name in lab.folder.names()} == old
            settle(lab, state.conflict.name)
            action = workspace.resume
    assert stops == ["0030", "0040", "0070", "0090"], stops
    assert "0050-absorbed-upstream-took-it.patch" not in lab.folder.names() and len(lab.folder.names()) == 9
    assert b"lib/better.c" in (lab.folder.path / "0060-renamed-target-moved.patch").read_bytes()
    listing = lab.folder.listing()
    assert (
        listing is not None
        and listing.base_version == "b2"
        and listing.base_tree == tree_digest(newer.locate()).tree
        and listing.tree == done.tree_id
    )
    result = check(lab.folder, newer, lab.cache)
    assert result.ok, result.problems
    assert commits(lab.tree)[0] == "Import llama.cpp b2" and plain_git(lab.tree, "status", "--porcelain") == ""
    assert not lab.workspace(base=newer).apply().changed
    with pytest.raises(PatchError, match="was made on b2"):
        workspace.apply()


def test_leaving_a_rebase_goes_back_to_where_it_began(lab: Lab, newer: BaseTree) -> None:
    workspace = lab.workspace()
    before = workspace.apply()
    old = {name: (lab.folder.path / name).read_bytes() for name in lab.folder.names()}
    with pytest.raises(PatchError, match="0030"):
        workspace.rebase(newer)
    workspace.abort()
    again = workspace.apply()
    assert again.commit == before.commit and not again.changed and again.edits == ()
    assert {name: (lab.folder.path / name).read_bytes() for name in lab.folder.names()} == old


# ---- readers of upstream's sources ----------------------------------------------------------------------------------------------


def test_enums_are_read_as_a_compiler_would() -> None:
    source = """
        // enum ggml_type { WRONG = 1 };
        void f(enum ggml_type type);
        enum ggml_type { A = 0, B, /* gone = 7, */ C = 0x10, D,
            E = 5, // comment, with comma
            F, LAST = F };
        enum other { X };
    """
    assert enum_in(source, "ggml_type") == {"A": 0, "B": 1, "C": 16, "D": 17, "E": 5, "F": 6, "LAST": 6}
    assert enum_in(source, "other") == {"X": 0} and enum_in(source, "absent") == {}


def test_flags_are_read_from_declarations_only() -> None:
    source = """
        add_opt(common_arg({"-t", "--threads"}, "N", string_format("uses -x and {\\"--not-me\\"}")));
        add_opt(common_arg(
            {"--display-prompt"},
            {"--no-display-prompt"},
            "help"));
        // add_opt(common_arg({"--commented"}, ""));
        std::set<std::string> words = {"plain", "--mixed"};
        const char * url = "http://x"; add_opt(common_arg({"--url"}, ""));
    """
    assert flags_in(source) == {"-t", "--threads", "--display-prompt", "--no-display-prompt", "--url"}
