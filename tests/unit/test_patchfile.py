"""Patch files: reading, writing, naming."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series_lab import plain_git

from opencoti_build import patchfile
from opencoti_build.errors import DataError
from opencoti_build.patchfile import Kind, Message, make, parse, render, slug_of, split_name, take_number

DIFF = b"""diff --git a/src/a.c b/src/a.c
index de980441c3ab03a8c07dda1ad27b8a11f39deb1e..df753b464888c51433f05d0c375e82ce849313c7 100644
--- a/src/a.c
+++ b/src/a.c
@@ -2,2 +2,3 @@ int x;
 b
+B
 c
@@ -9 +10,2 @@
-old
+new
+newer
\\ No newline at end of file
diff --git a/new b/new
new file mode 100755
index 0000000000000000000000000000000000000000..df753b464888c51433f05d0c375e82ce849313c7
--- /dev/null
+++ b/new
@@ -0,0 +1 @@
+x
diff --git a/old name b/old name
deleted file mode 100644
index df753b464888c51433f05d0c375e82ce849313c7..0000000000000000000000000000000000000000
--- a/old name\t
+++ /dev/null
@@ -1 +0,0 @@
-x
"""

TEXT = Message("area: does it", "Why: a\n  b\n\nHooks: c")


def test_what_is_in_a_patch() -> None:
    patch = make(7, TEXT, DIFF)
    assert patch.name == "0007-area-does-it.patch" and patch.title == "area: does it" and patch.message.area == "area"
    assert patch.sections == {"Why": "a\n  b", "Hooks": "c"}
    assert [(change.path, change.kind, change.added, change.removed) for change in patch.files] == [
        ("src/a.c", Kind.MODIFY, 3, 1),
        ("new", Kind.ADD, 1, 0),
        ("old name", Kind.DELETE, 0, 1),
    ]
    assert patch.files[1].new_mode == "100755" and patch.files[0].old_blob == "de980441c3ab03a8c07dda1ad27b8a11f39deb1e"
    assert patch.diff == DIFF and b"".join(patch.part(change) for change in patch.files) == DIFF
    lines = patch.data.split(b"\n")
    assert [lines[hunk.line - 1][:2] for change in patch.files for hunk in change.hunks] == [b"@@"] * 4
    assert all(lines[change.line - 1].startswith(b"diff --git") for change in patch.files)
    assert patch.message == parse(patch.name, patch.data).message


def test_git_am_reads_what_is_written(tmp_path: Path) -> None:
    plain_git(tmp_path, "init", "-q")
    (tmp_path / "f").write_text("a\n")
    plain_git(tmp_path, "add", "f")
    plain_git(tmp_path, "commit", "-qm", "base")
    (tmp_path / "f").write_text("a\nb\n")
    diff = plain_git(tmp_path, "diff", "--full-index", "-U1").encode() + b"\n"
    plain_git(tmp_path, "checkout", "-q", "f")
    message = Message("area: umläute and a subject that is longer than the seventy columns mails are folded at", "Why: ünï\n\nHooks: none")
    (tmp_path / "p").write_bytes(render(message, diff))
    plain_git(tmp_path, "am", "-q", "p")
    assert plain_git(tmp_path, "log", "-1", "--format=%B").strip() == message.text().strip()
    assert plain_git(tmp_path, "log", "-1", "--format=%an <%ae> %at") == "opencoti <series@opencoti.invalid> 946684800"


def test_format_patch_output_is_read(tmp_path: Path) -> None:
    plain_git(tmp_path, "init", "-q")
    for content in ("a\n", "a\nb\n"):
        (tmp_path / "f").write_text(content)
        plain_git(tmp_path, "add", "f")
        plain_git(tmp_path, "commit", "-qm", "area: a subject so long that format-patch folds it over two lines of the header\n\nWhy: x")
    data = plain_git(tmp_path, "format-patch", "-1", "--stdout", "--no-signature").encode() + b"\n"
    patch = parse("0001-x.patch", data)
    assert patch.title == "area: a subject so long that format-patch folds it over two lines of the header"
    assert patch.message.body == "Why: x" and patch.files[0].added == 1


@pytest.mark.parametrize(
    ("text", "number", "subject"),
    [
        ("0001 identity: say it\n\nWhy: x\n", 1, "identity: say it"),
        ("0042: identity: say it", 42, "identity: say it"),
        ("identity: say it\n\nWhy: x\n\nNumber: 0007\n", 7, "identity: say it"),
        ("0007 identity: say it\n\nNumber: 0007\n", 7, "identity: say it"),
        ("identity: say it", None, "identity: say it"),
        ("12345 digits: too many", None, "12345 digits: too many"),
        ("001 digits: too few", None, "001 digits: too few"),
    ],
)
def test_numbers_of_commits(text: str, number: int | None, subject: str) -> None:
    found, message = take_number(text)
    assert (found, message.subject) == (number, subject)
    assert "Number:" not in message.body


def test_two_numbers_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match="keep one"):
        take_number("0001 a: b\n\nNumber: 0002\n")


@pytest.mark.parametrize(
    ("subject", "slug"),
    [
        ("kv: a Window (C cells)!", "kv-a-window-c-cells"),
        ("ünï", "n"),
        ("", "untitled"),
        ("a: " + "word " * 30, "a" + "-word" * 11),
        ("x" * 100, "x" * 60),
    ],
)
def test_slugs(subject: str, slug: str) -> None:
    assert slug_of(subject) == slug
    assert split_name(f"0010-{slug_of(subject)}.patch") == (10, slug)


@pytest.mark.parametrize("name", ["1-a.patch", "0001_a.patch", "0001-A.patch", "0001-a.diff", "0001-.patch", "0001-a--b.patch", "../0001-a.patch"])
def test_bad_names(name: str) -> None:
    with pytest.raises(DataError, match="no name of a patch"):
        split_name(name)


@pytest.mark.parametrize(
    ("change", "line", "what"),
    [
        (lambda d: d.replace(b" c\n@@ -9", b"@@ -9"), 18, "starts with neither"),
        (lambda d: d.replace(b"@@ -9 +10,2 @@", b"@@ nonsense"), 19, "no header of a hunk"),
        (lambda d: d[:-1], 38, "cut short"),
        (lambda d: d[: d.index(b"+newer")], 22, "shorter than its header says"),
        (lambda d: d.replace(b"new file mode", b"strange file mode"), 25, "no part of a git-style difference"),
    ],
)
def test_damage_is_told_with_its_line(change, line: int, what: str) -> None:  # type: ignore[no-untyped-def]
    data = change(make(7, TEXT, DIFF).data)
    with pytest.raises(DataError) as caught:
        parse("0007-area-does-it.patch", data)
    assert what in caught.value.message and f"line {line}:" in caught.value.message


def test_a_patch_without_subject_is_refused() -> None:
    with pytest.raises(DataError, match="no 'Subject:' header"):
        parse("0001-a.patch", DIFF)
    with pytest.raises(DataError, match="needs a subject"):
        render(Message(""), b"")


@pytest.mark.parametrize("line", ["diff --git a/x b/x", "---", "--- a/x", "Index: x"])
def test_messages_that_would_end_early_are_refused(line: str) -> None:
    with pytest.raises(DataError, match="would end it"):
        render(Message("a: b", f"Why: x\n{line}\nmore"), b"")


def test_quoted_names() -> None:
    quoted = {side: b'"' + side + rb'/\303\244 \"x\""' for side in (b"a", b"b")}
    diff = DIFF.replace(b"a/src/a.c", quoted[b"a"]).replace(b"b/src/a.c", quoted[b"b"])
    assert make(1, TEXT, diff).files[0].path == 'ä "x"'


def test_retargeting_keeps_the_hunks(tmp_path: Path) -> None:
    patch = make(7, TEXT, DIFF)
    moved = parse(patch.name, patch.data[: patch.diff_start] + patch.retargeted({"src/a.c": "lib/ä.c"}))
    assert moved.files[0].path == "lib/ä.c" and moved.files[0].hunks[0].lines == patch.files[0].hunks[0].lines
    assert [change.path for change in moved.files[1:]] == ["new", "old name"]


def test_a_missing_and_an_enormous_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Cannot read"):
        patchfile.read(tmp_path / "0001-a.patch")
    big = tmp_path / "0002-a.patch"
    with big.open("wb") as stream:
        stream.truncate(patchfile.MAX_BYTES + 1)
    with pytest.raises(DataError, match="larger than"):
        patchfile.read(big)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_gives_anything_but_a_data_error(data) -> None:  # type: ignore[no-untyped-def]
    good = make(7, TEXT, DIFF).data
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 40)))
    damaged = good[:start] + data.draw(st.binary(max_size=40)) + good[end:]
    try:
        patch = parse("0007-area-does-it.patch", damaged)
    except DataError:
        return
    assert patch.data == damaged and sum(len(patch.part(change)) for change in patch.files) == len(patch.diff)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40), max_size=8))
def test_messages_survive_a_round_trip(lines: list[str]) -> None:
    message = Message.from_text("area: subject\n\n" + "\n".join(lines))
    try:
        data = render(message, DIFF)
    except DataError:
        return
    assert parse("0001-x.patch", data).message == message
