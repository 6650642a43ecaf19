"""The git gateway: it acts on the repository it was given, and on nothing and by nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from series_lab import plain_git

from opencoti_build import git as gateway
from opencoti_build.errors import GitError
from opencoti_build.git import Git, environment, git_version


@pytest.fixture
def repository(tmp_path: Path) -> Git:
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    git = Git.create(folder / ".git", folder)
    (folder / "a").write_text("one\n")
    return git


def commit_a(git: Git) -> str:
    with git.scratch_index() as scratch:
        blob = git.text("hash-object", "-w", "--stdin", input=b"one\n")
        scratch.run("update-index", "--add", "--cacheinfo", f"100644,{blob},a")
        return git.commit(scratch.write_tree(), None, "first\n")


def test_ambient_variables_do_not_reach_git() -> None:
    ambient = {"GIT_DIR": "/x", "git_index_file": "/x", "GIT_TRACE": "1", "LC_ALL": "tr_TR", "LC_MESSAGES": "de", "PATH": "/bin", "HOME": "/home/x"}
    made = environment(Path("/r/.git"), Path("/r"), ambient)
    assert made["GIT_DIR"] == "/r/.git" and made["GIT_WORK_TREE"] == "/r" and made["GIT_CEILING_DIRECTORIES"] == "/"
    assert made["PATH"] == "/bin" and made["LC_ALL"] == "C" and made["TZ"] == "UTC"
    assert "GIT_TRACE" not in made and "git_index_file" not in made and "LC_MESSAGES" not in made and made["HOME"] != "/home/x"


def test_commit_ids_depend_on_content_alone(repository: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = commit_a(repository)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[user]\nname = Some One\nemail = s@o.invalid\n[i18n]\ncommitEncoding = ISO-8859-1\n[commit]\ngpgSign = true\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "ambient")
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2020-01-01T00:00:00 +0900")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no"))
    other = Git.create(tmp_path / "second" / "git")
    assert commit_a(other) == first
    assert (
        plain_git(tmp_path / "outer" / "inner", "cat-file", "commit", first).splitlines()[1]
        == "author opencoti <series@opencoti.invalid> 946684800 +0000"
    )


def test_settings_of_the_repository_itself_do_not_count(repository: Git, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    (hooks / "reference-transaction").chmod(0o755)
    first = commit_a(repository)
    blob = repository.text("hash-object", "-w", "--stdin", input=b"zero\none\ntwo\n")
    with repository.scratch_index() as scratch:
        scratch.run("update-index", "--add", "--cacheinfo", f"100644,{blob},a")
        second = scratch.write_tree()
    expected = repository.diff(repository.tree_of(first), second)
    plain = tmp_path / "outer" / "inner"
    for key, value in (
        ("core.hooksPath", str(hooks)),
        ("diff.noprefix", "true"),
        ("diff.context", "9"),
        ("color.ui", "always"),
        ("core.autocrlf", "true"),
        ("diff.external", "false"),
        ("core.abbrev", "5"),
    ):
        plain_git(plain, "config", key, value)
    (plain / ".gitattributes").write_text("* diff=cpp text eol=crlf\n")
    assert repository.diff(repository.tree_of(first), second) == expected
    assert b"diff --git a/a b/a\n" in expected and b"@@ -1 +1,3 @@\n" in expected
    repository.set_ref("refs/heads/series", first)
    assert not (tmp_path / "ran").exists()
    repository.run("read-tree", "-u", "--reset", first)
    assert (plain / "a").read_bytes() == b"one\n"


def test_never_climbs_into_an_enclosing_repository(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    plain_git(outer, "init", "-q")
    inner = outer / "inner"
    inner.mkdir()
    with pytest.raises(GitError, match="no .git folder of its own"):
        Git.open(inner)
    Git.create(inner / ".git", inner)
    (inner / ".git" / "HEAD").unlink()
    with pytest.raises(GitError, match="damaged"):
        Git.open(inner)
    with pytest.raises(GitError):
        Git(inner / ".git", inner).run("status")
    with pytest.raises(GitError, match="not the root of a git repository"):
        Git.discover(inner)
    assert Git.discover(outer).git_dir == outer / ".git"


@pytest.mark.parametrize("shape", ["file", "link"])
def test_a_git_folder_that_lies_elsewhere_is_refused(tmp_path: Path, shape: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    plain_git(other, "init", "-q")
    here = tmp_path / "here"
    here.mkdir()
    if shape == "file":
        (here / ".git").write_text(f"gitdir: {other / '.git'}\n")
    else:
        (here / ".git").symlink_to(other / ".git")
    with pytest.raises(GitError, match="no .git folder of its own"):
        Git.open(here)


def test_linked_work_trees_and_bare_repositories_can_be_read(tmp_path: Path) -> None:
    main = tmp_path / "main"
    main.mkdir()
    plain_git(main, "init", "-q")
    plain_git(main, "commit", "-q", "--allow-empty", "-m", "x")
    plain_git(main, "worktree", "add", "-q", str(tmp_path / "linked"), "-b", "other")
    plain_git(main, "clone", "-q", "--bare", ".", str(tmp_path / "bare"))
    head = plain_git(main, "rev-parse", "HEAD")
    for place in (main, tmp_path / "linked", tmp_path / "bare"):
        assert Git.discover(place).resolve("HEAD") == head


def test_failures_carry_what_git_said(repository: Git) -> None:
    with pytest.raises(GitError) as caught:
        repository.run("cat-file", "blob", "0" * 40)
    assert caught.value.exit_code == 20 and "git cat-file failed" in caught.value.message and caught.value.details
    assert repository.resolve("nothing") is None and repository.resolve("--help") is None
    assert not repository.has("0" * 40)


@pytest.mark.parametrize(
    ("says", "complaint"),
    [("git version 2.29.9", "2.29.9 is too old: install git 2.30 or newer"), ("hello", "no version of git"), (None, "install git 2.30 or newer")],
)
def test_an_old_or_absent_git_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None, complaint: str) -> None:
    if says is not None:
        (tmp_path / "git").write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    git_version.cache_clear()
    with pytest.raises(GitError, match=complaint):
        Git.create(tmp_path / "r" / "git")
    git_version.cache_clear()


def test_this_git_is_new_enough() -> None:
    said = subprocess.run(["git", "version"], capture_output=True, text=True, check=True).stdout
    assert ".".join(map(str, git_version(path=os.environ["PATH"]))) in said
    assert gateway.MINIMUM == (2, 30)


def test_feeding_a_program_that_stops_reading_is_a_plain_error(repository: Git) -> None:
    with pytest.raises(GitError, match="fast-import failed"):
        repository.feed("fast-import", "--quiet", pieces=(b"nonsense\n" * 100_000 for _ in range(20)))
