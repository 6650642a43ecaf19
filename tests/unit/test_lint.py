"""Lint: each rule finds what it is for, in the right line, and a good patch breaks none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from series_lab import Lab, body, copy_lab, make_lab, write_tree

from opencoti_build import lint as linting
from opencoti_build.errors import PatchError
from opencoti_build.lint import CHECKS, RULES, Severity, absorbed, fix, lint, lint_patch
from opencoti_build.patchfile import Message, PatchFile, make, parse, path_problem
from opencoti_build.series.chain import record

ID = "df753b464888c51433f05d0c375e82ce849313c7"
HOOK = f"""diff --git a/src/core.c b/src/core.c
index de980441c3ab03a8c07dda1ad27b8a11f39deb1e..{ID} 100644
--- a/src/core.c
+++ b/src/core.c
@@ -5,2 +5,3 @@ line 4
 line 5
+hook();
 line 6
""".encode()
NEW = f"""diff --git a/src/opencoti/a.c b/src/opencoti/a.c
new file mode 100644
index {"0" * 40}..{ID}
--- /dev/null
+++ b/src/opencoti/a.c
@@ -0,0 +1,2 @@
+int a;
+int b;
""".encode()
GOOD = make(10, Message("area: does it", body()), HOOK + NEW)


def found(patch: PatchFile) -> list[tuple[str, int]]:
    return [(finding.rule.id, finding.line) for finding in lint_patch(patch)]


def broken(old: bytes, new: bytes, name: str = GOOD.name) -> PatchFile:
    assert old in GOOD.data
    return parse(name, GOOD.data.replace(old, new))


def test_a_good_patch_has_no_finding() -> None:
    assert found(GOOD) == []


def at(text: bytes, data: bytes) -> int:
    """1-based number of the first line that starts with ``text``."""
    return next(number for number, line in enumerate(data.split(b"\n"), 1) if line.startswith(text))


@pytest.mark.parametrize(
    ("old", "new", "rule", "where"),
    [
        (b"Why: a reason", b"Why: a reason\r", "cr-header", b"Why"),
        (b"+++ b/src/core.c", b"+++ b/src/core.c\r", "cr-header", b"+++ b/src/core.c"),
        (b"+hook();", b"+hook();\r", "cr-code", b"+hook"),
        (b"+int b;", b"+int b; ", "trailing-space", b"+int b;"),
        (b"+int b;", b"+\t", "trailing-space", b"+\t"),
        (b"Hooks: none", b"Hooks: none ", "message-space", b"Hooks"),
        (b"Subject: [PATCH] area: does it", b"Subject: [PATCH] no area", "message-subject", b"Subject"),
        (b"area: does it", b"area: " + b"longer" * 13, "message-subject", b"Subject"),
        (b"area: does it", b"0010 area: does it", "message-subject", b"Subject"),
        (ID.encode() + b" 100644", ID[:12].encode() + b" 100644", "form", b"diff --git a/src/core.c"),
        (b"From: opencoti", b"From: somebody", "form", b"From 0000"),
        (b"+hook();\n", b"+hook();\n+a\n+b\n+c\n", "large-hook", b"@@ -5,2"),
        (b"src/opencoti/a.c", b"src/extra/a.c", "new-code-place", b"diff --git a/src/extra"),
        (b"+hook();", b"-line\t5a\n+line 5 a", "white-space-only", b"@@ -5"),
    ],
)
def test_each_rule_names_its_line(old: bytes, new: bytes, rule: str, where: bytes) -> None:
    data = GOOD.data.replace(old, new)
    if rule == "large-hook":
        data = data.replace(b"@@ -5,2 +5,3 @@", b"@@ -5,2 +5,6 @@")
    if rule == "white-space-only":
        data = data.replace(b"@@ -5,2 +5,3 @@", b"@@ -5,3 +5,3 @@")
    patch = parse(GOOD.name, data)
    names = [(finding.rule.id, finding.line) for finding in lint_patch(patch) if finding.rule.id != "file-name"]
    assert names == [(rule, at(where, data))]


@pytest.mark.parametrize("section", ["Why", "Hooks", "Switch", "Off", "Tests", "Limits"])
def test_every_section_is_asked_for(section: str) -> None:
    lines = [line for line in body().split("\n") if not line.startswith(section)]
    assert found(make(10, Message("area: does it", "\n".join(lines)), HOOK)) == [("message-section", 0)]
    emptied = [line if not line.startswith(section) else f"{section}:" for line in body().split("\n")]
    assert found(make(10, Message("area: does it", "\n".join(emptied)), HOOK)) == [("message-section", 0)]


def test_an_unwritten_template_is_refused() -> None:
    text = body().replace("Off: none", f"Off: {linting.PLACEHOLDER.format('x')}")
    assert found(make(10, Message("area: does it", text), HOOK)) == [("message-section", 0)]


def test_context_lines_without_their_space() -> None:
    data = GOOD.data.replace(b" line 6\n", b"\n")
    assert found(parse(GOOD.name, data)) == [("empty-context", at(b"+hook", data) + 1)]


def test_more_context_than_agreed() -> None:
    for header, lines in (
        (b"@@ -4,3 +4,4 @@", b" line 4\n line 5\n+hook();\n line 6\n"),
        (b"@@ -5,3 +5,4 @@", b" line 5\n+hook();\n line 6\n line 7\n"),
    ):
        data = GOOD.data.replace(b"@@ -5,2 +5,3 @@", header).replace(b" line 5\n+hook();\n line 6\n", lines)
        assert found(parse(GOOD.name, data)) == [("context", at(b"@@", data))]
    two = b"@@ -5,3 +5,5 @@", b" line 5\n+hook();\n line 6\n+hook();\n line 7\n"
    assert found(parse(GOOD.name, GOOD.data.replace(b"@@ -5,2 +5,3 @@", two[0]).replace(b" line 5\n+hook();\n line 6\n", two[1]))) == []


def test_binary_and_empty_patches() -> None:
    binary = f"diff --git a/x.opencoti b/x.opencoti\nindex {ID}..{'1' * 40} 100644\nGIT binary patch\nliteral 3\nKcmZQzU|?Vb\n\nliteral 0\nHcmV?d00001\n\n".encode()
    assert [rule for rule, _ in found(make(10, Message("area: does it", body()), binary))] == ["binary"]
    assert found(make(10, Message("area: does it", body()), b"")) == [("empty", 0)]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("../x", "climbs"),
        ("a/../../x", "climbs"),
        ("/etc/passwd", "absolute"),
        ("C:/x", "absolute"),
        (".git/config", "git's own"),
        ("a/.GIT/x", "git's own"),
        ("a//b", "plain"),
        ("a\\..\\b", "climbs"),
        ("", "absolute"),
        ("a\nb", "plain"),
        ("src/a.c", ""),
        (".github/x", ""),
        ("..a/b", ""),
    ],
)
def test_paths(path: str, problem: str) -> None:
    assert problem in path_problem(path) and bool(problem) == bool(path_problem(path))


def test_a_patch_that_climbs_out_is_found_and_cannot_be_applied(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    patch = make(10, Message("area: does it", body()), NEW.replace(b"src/opencoti/a.c", b"../opencoti.c"))
    assert ("path-outside", at(b"diff --git", patch.data)) in found(patch)
    lab.folder.write(patch)
    with pytest.raises(PatchError, match="climbs out of the tree"):
        lab.workspace().apply()
    assert not (tmp_path / "opencoti.c").exists()


def test_renames_are_not_the_agreed_form() -> None:
    diff = b"diff --git a/src/opencoti/a b/src/opencoti/b\nsimilarity index 100%\nrename from src/opencoti/a\nrename to src/opencoti/b\n"
    assert [rule for rule, _ in found(make(10, Message("area: does it", body()), diff))] == ["form"]


def test_file_names() -> None:
    patch = parse("0010-something-else.patch", GOOD.data)
    assert found(patch) == [("file-name", 0)] and "0010-area-does-it.patch" in lint_patch(patch)[0].what


# ---- the folder -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lab = make_lab(tmp_path_factory.mktemp("lint"))
    lab.add(10, "one: a file", lambda tree: write_tree(tree, {"src/opencoti/a.c": b"int a;\n"}))
    lab.add(20, "two: a file", lambda tree: write_tree(tree, {"src/opencoti/b.c": b"int b;\n"}))
    return lab.root


@pytest.fixture
def lab(tmp_path: Path, made: Path) -> Lab:
    return copy_lab(made, tmp_path)


def folder_findings(lab: Lab) -> list[tuple[str, str]]:
    return [(finding.rule.id, finding.file) for finding in lint(lab.folder)]


def test_what_the_tools_write_is_clean(lab: Lab) -> None:
    assert lint(lab.folder) == [] and absorbed(lab.folder, lab.base(), lab.cache) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: (folder / "0020-two-a-file.patch").unlink(), [("missing", "0020-two-a-file.patch")]),
        (lambda folder: (folder / "0030-x.patch").write_bytes(b"nothing"), [("unlisted", "0030-x.patch"), ("unreadable", "0030-x.patch")]),
        (lambda folder: (folder / "notes.patch").write_bytes(b""), [("unlisted", "notes.patch"), ("file-name", "notes.patch")]),
        (
            lambda folder: (folder / "0020-two-a-file.patch").rename(folder / "0010-two-a-file.patch"),
            [("unlisted", "0010-two-a-file.patch"), ("missing", "0020-two-a-file.patch"), ("duplicate-number", "0010-two-a-file.patch")],
        ),
        (lambda folder: (folder / "series.yaml").write_text("patches: ["), [("unreadable", "series.yaml")]),
        (lambda folder: (folder / "series.yaml").unlink(), [("unlisted", "series.yaml")]),
        (
            lambda folder: (folder / "series.yaml").write_text((folder / "series.yaml").read_text() + "- 0010-one-a-file.patch\n"),
            [("duplicate-number", "series.yaml")],
        ),
    ],
)
def test_files_and_list(lab: Lab, change: Callable[[Path], object], expected: list[tuple[str, str]]) -> None:
    change(lab.folder.path)
    assert folder_findings(lab) == expected


def test_fix_settles_names_and_the_list(lab: Lab) -> None:
    (lab.folder.path / "0020-two-a-file.patch").rename(lab.folder.path / "0030-my-name.patch")
    assert {rule for rule, _ in folder_findings(lab)} == {"unlisted", "missing", "file-name"}
    assert len(fix(lab.folder)) == 2
    assert folder_findings(lab) == [] and lab.folder.names()[-1] == "0030-two-a-file.patch"
    assert fix(lab.folder) == []
    lab.folder.list_path.write_text("{")
    assert len(fix(lab.folder)) == 1 and folder_findings(lab) == []


def test_absorbed_patches_are_found(lab: Lab) -> None:
    write_tree(lab.upstream, {"src/opencoti/b.c": b"int b;\n"})
    record(lab.folder, lab.base(), lab.cache)
    assert [(finding.rule.id, finding.file) for finding in absorbed(lab.folder, lab.base(), lab.cache)] == [("absorbed", "0020-two-a-file.patch")]


def test_rules_are_data_with_advice() -> None:
    assert all(rule.advice and rule.asks and rule.id == name for name, rule in RULES.items())
    assert {rule.severity for rule in RULES.values()} == set(Severity)
    assert all(check.__doc__ for check in CHECKS)
    assert lint_patch(parse("0010-x.patch", GOOD.data))[0].to_dict()["advice"] == RULES["file-name"].advice
