"""A small upstream and a series on it, made with real git; what the tests of the series share."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opencoti_build.archives import tree_digest
from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.patchfile import SECTIONS
from opencoti_build.series import BaseTree, SeriesFolder, Workspace

LINES = "".join(f"line {number}\n" for number in range(1, 31))

HEADER = """enum ggml_type {
    GGML_TYPE_F32 = 0,
    GGML_TYPE_Q2_0 = 42, // newest
    GGML_TYPE_COUNT = 43,
};
enum ggml_op {
    GGML_OP_NONE = 0,

    GGML_OP_ADD,
    GGML_OP_COUNT,
};
"""

ARGS = """// flags
add_opt(common_arg(
    {"-t", "--threads"}, "N",
    "number of threads"));
add_opt(common_arg(
    {"--old-flag"},
    "goes away // not a comment"));
"""

UPSTREAM: dict[str, bytes] = {
    ".gitattributes": b"* text eol=crlf\n*.c diff=cpp ident\n*.bin binary\nsecret filter=lfs\n",
    ".gitignore": b"*.log\n/build*\n!keep.log\n",
    "README": b"upstream\n",
    "src/core.c": LINES.encode(),
    "src/other.c": LINES.replace("line", "row").encode(),
    "src/gone.c": LINES.replace("line", "leaving").encode(),
    "src/moved.c": LINES.replace("line", "moving").encode(),
    "src/crlf.c": b"one\r\ntwo\r\nthree\r\n",
    "src/$Id$.c": b"int id; // $Id$\n",
    "notes.log": b"ignored by the tree's own rules, but part of it\n",
    "build-info/x": b"also ignored\n",
    "empty": b"",
    "no end": b"no line end",
    'odd "name" \xc3\xa4': b"quoted\n",
    "ggml/include/ggml.h": HEADER.encode(),
    "common/arg.cpp": ARGS.encode(),
}


def write_tree(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Write files below ``folder``; None removes one."""
    for name, data in files.items():
        path = folder / os.fsdecode(name.encode("latin-1") if not name.isascii() else name.encode())
        if data is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def plain_git(folder: Path, *words: str, input: bytes | None = None, check: bool = True) -> str:
    """Git as any user has it, without the gateway: the tests' independent witness."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "w",
        "GIT_AUTHOR_EMAIL": "w@w.invalid",
        "GIT_COMMITTER_NAME": "w",
        "GIT_COMMITTER_EMAIL": "w@w.invalid",
    }
    done = subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, input=input)
    if check and done.returncode != 0:
        raise AssertionError(f"git {words}: {done.stderr.decode()}")
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def body(why: str = "a reason") -> str:
    """A message body with every section."""
    return "\n".join(f"{name}: {why if name == 'Why' else 'none'}" for name in SECTIONS)


@dataclass
class Lab:
    """A folder with an upstream, a series, a cache and work trees."""

    root: Path
    output: io.StringIO

    @property
    def upstream(self) -> Path:
        return self.root / "upstream"

    @property
    def folder(self) -> SeriesFolder:
        return SeriesFolder(self.root / "patches" / "llama.cpp")

    @property
    def cache(self) -> Cache:
        return Cache(self.root / "cache")

    @property
    def console(self) -> Console:
        return Console(self.output, mode=Mode.PLAIN)

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    def base(self, label: str = "b1", folder: Path | None = None) -> BaseTree:
        return BaseTree.at(folder or self.upstream, label)

    def workspace(self, tree: Path | None = None, base: BaseTree | None = None) -> Workspace:
        return Workspace(self.folder, tree or self.tree, base or self.base(), self.cache, self.console)

    def add(self, number: int, title: str, edit: Callable[[Path], None]) -> None:
        """A patch made the way a person makes one: new, message, edit, refresh."""
        workspace = self.workspace()
        workspace.apply()
        patch = workspace.new(number, title)
        file = self.folder.path / patch.name
        text = file.read_text()
        start = text.index("Why:")
        file.write_text(text[:start] + body() + "\n---\n")
        edit(self.tree)
        workspace.refresh()

    def new_upstream(self, change: Mapping[str, bytes | None], label: str = "b2") -> BaseTree:
        """Another version of the upstream."""
        folder = self.root / f"upstream-{label}"
        shutil.copytree(self.upstream, folder, symlinks=True)
        write_tree(folder, change)
        return BaseTree.at(folder, label)


def make_lab(root: Path) -> Lab:
    """A lab with an upstream and an empty series."""
    lab = Lab(root, io.StringIO())
    write_tree(lab.upstream, UPSTREAM)
    (lab.upstream / "run.sh").write_bytes(b"#!/bin/sh\necho run\n")
    (lab.upstream / "run.sh").chmod(0o755)
    (lab.upstream / "link").symlink_to("src/core.c")
    lab.folder.path.mkdir(parents=True)
    return lab


def copy_lab(made: Path, root: Path) -> Lab:
    """A lab of its own that begins where another one stands."""
    subprocess.run(["cp", "-a", f"{made}/.", root], check=True)
    return Lab(root, io.StringIO())


def insert(path: Path, after: str, text: str) -> None:
    """Put ``text`` behind the first line that equals ``after``."""
    lines = path.read_text().splitlines(True)
    at = lines.index(after + "\n") + 1
    path.write_text("".join(lines[:at]) + text + "".join(lines[at:]))


def hook(name: str, after: str, text: str) -> Callable[[Path], None]:
    """An edit for ``Lab.add``."""
    return lambda tree: insert(tree / name, after, text)


def commits(tree: Path) -> list[str]:
    """Subjects of the commits of a work tree, oldest first."""
    return plain_git(tree, "log", "--reverse", "--format=%s").splitlines()


def three_patches(folder: Path) -> Lab:
    """A lab whose series has three patches: two on one file, one with a new file."""
    lab = make_lab(folder)
    lab.add(10, "one: first hook", hook("src/core.c", "line 5", "hook one\n"))
    lab.add(20, "two: second hook", hook("src/core.c", "line 15", "hook two\n"))
    lab.add(30, "three: a file", lambda tree: write_tree(tree, {"src/opencoti/own.c": b"int own;\n"}))
    return lab


def names(lab: Lab) -> list[str]:
    """The series' files, in order."""
    return lab.folder.names()


def tree_of(folder: Path) -> str:
    """Tree id of the files as they lie there, .git left out; an independent witness of a work tree's content."""
    copy = folder.parent / "witness"
    if copy.exists():
        subprocess.run(["rm", "-rf", copy], check=True)
    subprocess.run(["cp", "-a", folder, copy], check=True)
    subprocess.run(["rm", "-rf", copy / ".git"], check=True)
    return tree_digest(copy).tree
