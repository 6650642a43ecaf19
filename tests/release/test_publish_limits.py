"""What hosts take: sizes, numbers, names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencoti_build.errors import PublishError
from opencoti_build.publish import limits
from opencoti_build.publish.tree import Content

HUB = limits.hosts()["huggingface"]
GITHUB = limits.hosts()["github"]
SMALL = Content(1, sha256="a" * 64)


def found(*paths: str, size: int = 1, **limit: int) -> str:
    tree = {path: Content(size, sha256="a" * 64) for path in paths}
    return "\n".join(limits.problems(replace(HUB, **limit), tree, tree, len(tree)))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a/b+c.txt", ""),
        ("releases/llamafile-v0.10.7+opencoti.c1/SHA256SUMS", ""),
        ("docs/ünïcode.md", ""),
        ("docs/u\u0308.md", "composed form"),
        ("a:b", "':', which Windows cannot hold"),
        ("a\\b", "which Windows cannot hold"),
        ("what?.md", "which Windows cannot hold"),
        ("a\nb", "which Windows cannot hold"),
        ("folder./x", "ends with '.'"),
        ("x ", "ends with ' '"),
        ("nul", "a device on Windows"),
        ("docs/Con.tar.gz", "a device on Windows"),
        ("docs/COM1", "a device on Windows"),
        ("console.md", ""),
        ("com10", ""),
        ("../x", "has the part '..'"),
        ("a//b", "has the part ''"),
        ("/etc/passwd", "no relative path"),
        ("a/.git/config", "the hub does not take"),
        ("docs/.gitignore", "the hub does not take"),
        ("x" * 256, "more than 255 bytes"),
        ("bad\udcff", "is not UTF-8"),
    ],
)
def test_names(name: str, problem: str) -> None:
    told = limits.name_problem(name)
    assert bool(told) is bool(problem) and problem in told


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_a_name_that_passes_is_one_that_a_strict_reader_would_write(name: str) -> None:
    if not limits.name_problem(name):
        assert all(part and part not in (".", "..") and part[-1] not in " ." for part in name.split("/"))
        assert not re.search(r'[<>:"|?*\\\x00-\x1f]', name)


def test_two_names_that_are_one_elsewhere() -> None:
    assert "docs/Readme.md and docs/readme.md are one name" in found("docs/readme.md", "docs/Readme.md")
    assert "Docs and docs are one name" in found("docs/a", "Docs/b")
    assert found("docs/a", "docs/b") == ""


def test_a_file_where_a_folder_is() -> None:
    assert "docs is a file and a folder" in found("docs", "docs/a")


def test_numbers() -> None:
    assert "the folder docs has 3 entries, and huggingface takes 2" in found("docs/a", "docs/b", "docs/c", folder_entries=2)
    assert found("docs/a", "docs/b", "docs/c", folder_entries=3) == ""
    assert "the repository would have 2 files" in found("a", "b", repository_files=1)
    assert "the commit would have 2 operations" in found("a", "b", commit_operations=1)
    assert "is a path of more than 3 bytes" in found("a/b/c", path_bytes=3)
    assert "a has 47.00 GiB" in found("a", size=int(47 * 2**30), file_bytes=HUB.file_bytes)
    assert found("a", size=HUB.file_bytes) == ""


def test_a_gitignore_on_the_hub_would_drop_files() -> None:
    assert limits.problems(HUB, {}, {".gitignore": SMALL}, 0) == (".gitignore makes the hub drop files silently: delete it there",)


def test_refuse_names_all() -> None:
    limits.refuse(())
    with pytest.raises(PublishError, match="one is wrong") as caught:
        limits.refuse(("one is wrong", "two is wrong"))
    assert caught.value.details == "one is wrong\ntwo is wrong"


def test_what_a_github_release_cannot_hold() -> None:
    tree = {"engine.exe": Content(2**31 - 1), "large.exe": Content(2**31), "a+b.txt": SMALL, "x/SAME": SMALL, "y/SAME": SMALL}
    assert limits.left_out(GITHUB, tree) == {
        "large.exe": "2.00 GiB is too large",
        "a+b.txt": "its name would be changed",
        "x/SAME": "another file has the same name",
        "y/SAME": "another file has the same name",
    }
