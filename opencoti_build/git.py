"""The one gateway to git.

Every call names its repository (``GIT_DIR``), so git never searches upwards and never acts on a repository around ours. Nothing
of the user's set-up gets in: variables ``GIT_*`` are dropped, configuration of system and user is off, hooks, signing, templates,
background maintenance and line-end conversion are off, locale and time zone are fixed. What ``.git/config`` of a work tree may say
is overridden on the command line, which git ranks highest. The same input therefore gives the same objects on every machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import GitError

MINIMUM = (2, 30)
"""Oldest git that has what is used here (apply and its 3-way merge, fast-import, plumbing)."""

NAME = "opencoti"
EMAIL = "series@opencoti.invalid"
SECONDS = 946684800
"""The one identity and time (2000-01-01T00:00:00Z) of every commit, so that a commit id depends on content alone."""

_SETTINGS: tuple[str, ...] = (
    "core.hooksPath=" + os.devnull,
    "core.excludesFile=" + os.devnull,
    "core.attributesFile=" + os.devnull,
    "core.autocrlf=false",
    "core.eol=lf",
    "core.safecrlf=false",
    "core.fsmonitor=false",
    "core.untrackedCache=false",
    "core.splitIndex=false",
    "core.sparseCheckout=false",
    "core.ignoreCase=false",
    "core.quotePath=false",
    "core.compression=1",
    "core.looseCompression=1",
    "core.pager=cat",
    "core.bigFileThreshold=512m",
    "core.commitGraph=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "pack.compression=1",
    "fastimport.unpackLimit=0",
    "commit.gpgSign=false",
    "i18n.commitEncoding=UTF-8",
    "i18n.logOutputEncoding=UTF-8",
    "safe.directory=*",
    "advice.detachedHead=false",
    "apply.whitespace=nowarn",
    "apply.ignoreWhitespace=no",
    "merge.conflictStyle=merge",
    "merge.renames=false",
    "merge.renormalize=false",
    "rerere.enabled=false",
    "diff.renames=false",
    "diff.algorithm=myers",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "diff.interHunkContext=0",
    "diff.suppressBlankEmpty=false",
    "diff.indentHeuristic=true",
    "diff.ignoreSubmodules=none",
    "diff.submodule=short",
    "diff.external=",
    "diff.orderFile=" + os.devnull,
    "color.ui=false",
    "status.showUntrackedFiles=all",
)

_ATTRIBUTES = "* -text !eol !ident !filter !working-tree-encoding !diff !merge !whitespace !conflict-marker-size !export-subst\n"
"""``info/attributes`` ranks above every ``.gitattributes``: bytes stay as they are, hunk headers use git's default rule."""

DIFF_FLAGS: tuple[str, ...] = (
    "-p",
    "-U1",
    "--full-index",
    "--binary",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--inter-hunk-context=0",
    "--submodule=short",
    "--ignore-submodules=none",
)
"""How a patch is written: one line of context, whole object ids, nothing that a configuration could vary."""


@dataclass(frozen=True)
class Completed:
    """What a git command left."""

    argv: tuple[str, ...]
    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """Standard output without the last line end."""
        return self.stdout.decode("utf-8", "surrogateescape").rstrip("\n")


@functools.cache
def git_version(program: str = "git", path: str | None = None) -> tuple[int, ...]:
    """Version of ``program``; raises GitError when it is absent or older than ``MINIMUM``. ``path`` only separates cache entries."""
    wanted = ".".join(map(str, MINIMUM))
    try:
        output = subprocess.run([program, "version"], capture_output=True, stdin=subprocess.DEVNULL, check=True).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.CalledProcessError) as error:
        raise GitError(f"Cannot run {program}: install git {wanted} or newer and have it on PATH.") from error
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", output)
    if match is None:
        raise GitError(f"'{program} version' says '{output.strip()}', which is no version of git: have git {wanted} or newer on PATH.")
    version = tuple(int(part) for part in match.groups() if part is not None)
    if version < MINIMUM:
        raise GitError(f"git {'.'.join(map(str, version))} is too old: install git {wanted} or newer.")
    return version


def environment(git_dir: Path | None, work_tree: Path | None, ambient: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a git command: ``ambient`` without anything that could steer git, plus the explicit repository."""
    result = {key: value for key, value in ambient.items() if not key.upper().startswith("GIT_") and not key.startswith("LC_")}
    nowhere = str((git_dir or Path(tempfile.gettempdir())) / "opencoti-no-home")
    result |= {
        "HOME": nowhere,  # git before 2.32 knows no GIT_CONFIG_GLOBAL
        "XDG_CONFIG_HOME": nowhere,
        "LC_ALL": "C",
        "LANGUAGE": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_EDITOR": "true",
        "GIT_PAGER": "cat",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_AUTHOR_NAME": NAME,
        "GIT_AUTHOR_EMAIL": EMAIL,
        "GIT_AUTHOR_DATE": f"{SECONDS} +0000",
        "GIT_COMMITTER_NAME": NAME,
        "GIT_COMMITTER_EMAIL": EMAIL,
        "GIT_COMMITTER_DATE": f"{SECONDS} +0000",
    }
    if git_dir is not None:
        result["GIT_DIR"] = str(git_dir)
        result["GIT_CEILING_DIRECTORIES"] = str((work_tree or git_dir).parent)
    if work_tree is not None:
        result["GIT_WORK_TREE"] = str(work_tree)
    return result


_REDIRECTING = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE",
    "GIT_COMMON_DIR", "GIT_ATTR_SOURCE", "GIT_DEFAULT_HASH", "GIT_TEMPLATE_DIR", "GIT_QUARANTINE_PATH",
)  # fmt: skip


def network_environment(ambient: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for fetching from a server: nothing that points git at another repository, no questions; unlike
    ``environment`` it leaves the user's configuration in place, for its proxies, certificates and keys.
    """
    kept = {name: value for name, value in ambient.items() if name not in _REDIRECTING}
    return kept | {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}


@dataclass(frozen=True)
class Git:
    """One repository: ``git_dir``, and the ``work_tree`` where there is one. ``index`` is a private index file, if any."""

    git_dir: Path
    work_tree: Path | None = None
    index: Path | None = None
    holding: tuple[int, ...] = ()
    """File descriptors that git inherits: of a lock, so that it stays locked until the last git of a killed run has ended."""

    # ---- making and opening -------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, git_dir: Path, work_tree: Path | None = None) -> Git:
        """A new, empty repository in ``git_dir``; nothing of the user's templates gets in."""
        git_version(path=os.environ.get("PATH"))
        git_dir.parent.mkdir(parents=True, exist_ok=True)
        argv = ["git", *_flags(()), "init", "--quiet", "--template="]
        argv += [str(work_tree)] if work_tree is not None else ["--bare", str(git_dir)]
        env = environment(None, None)
        env["GIT_CEILING_DIRECTORIES"] = str(git_dir.parent)
        done = subprocess.run(argv, env=env, capture_output=True, stdin=subprocess.DEVNULL, cwd=git_dir.parent)
        if done.returncode != 0:
            raise GitError(f"Cannot create a git repository in {git_dir}.", details=done.stderr.decode("utf-8", "replace"))
        (git_dir / "info").mkdir(exist_ok=True)
        (git_dir / "info" / "attributes").write_text(_ATTRIBUTES, "utf-8", newline="\n")
        git = cls(git_dir, work_tree)
        git.run("symbolic-ref", "HEAD", "refs/heads/series")
        return git

    @classmethod
    def open(cls, work_tree: Path) -> Git:
        """The repository whose ``.git`` folder lies directly in ``work_tree``; any other shape is refused, never searched for."""
        git_version(path=os.environ.get("PATH"))
        git_dir = work_tree / ".git"
        if git_dir.is_symlink() or not git_dir.is_dir():
            raise GitError(f"{work_tree} has no .git folder of its own: it is not a work tree of the series.")
        git = cls(git_dir, work_tree)
        done = git.run("rev-parse", "--git-dir", check=False)
        if done.code != 0 or not (git_dir / "objects").is_dir():
            raise GitError(
                f"{git_dir} is damaged: save what you edited in {work_tree}, delete that folder and run 'invoke patches apply'.", details=done.stderr
            )
        attributes = git_dir / "info" / "attributes"
        if not attributes.is_file() or attributes.read_text("utf-8", errors="replace") != _ATTRIBUTES:
            attributes.parent.mkdir(exist_ok=True)
            attributes.write_text(_ATTRIBUTES, "utf-8", newline="\n")
        return git

    @classmethod
    def discover(cls, root: Path) -> Git:
        """Anyone's repository whose root is ``root`` (work tree, linked work tree or bare), for reading."""
        git_version(path=os.environ.get("PATH"))
        root = root.resolve()
        if not root.is_dir():
            raise GitError(f"{root} is not a folder: name the root of a git repository.")
        env = environment(None, None)
        env["GIT_CEILING_DIRECTORIES"] = str(root.parent)
        argv = ["git", *_flags(()), "rev-parse", "--absolute-git-dir"]
        done = subprocess.run(argv, env=env, capture_output=True, stdin=subprocess.DEVNULL, cwd=root)
        if done.returncode != 0:
            raise GitError(f"{root} is not the root of a git repository.", details=done.stderr.decode("utf-8", "replace"))
        return cls(Path(done.stdout.decode("utf-8", "surrogateescape").rstrip("\n")))

    def with_index(self, index: Path) -> Git:
        """The same repository with a private index."""
        return replace(self, index=index)

    def with_work_tree(self, work_tree: Path) -> Git:
        """The same repository with another folder as work tree."""
        return replace(self, work_tree=work_tree)

    @contextlib.contextmanager
    def scratch_index(self, tree: str | None = None) -> Iterator[Git]:
        """The same repository with a throw-away index that holds ``tree``."""
        with tempfile.TemporaryDirectory(prefix="index.", dir=self.git_dir) as folder:
            git = self.with_index(Path(folder) / "index")
            if tree is not None:
                git.run("read-tree", tree)
            yield git

    # ---- running ------------------------------------------------------------------------------------------------------------

    def run(self, *words: str | Path, input: bytes | None = None, check: bool = True, config: Sequence[str] = ()) -> Completed:
        """Run ``git WORDS``. With ``check`` a non-zero exit raises GitError with git's own words as details."""
        argv = ("git", *_flags(config), *(str(word) for word in words))
        env = environment(self.git_dir, self.work_tree)
        if self.index is not None:
            env["GIT_INDEX_FILE"] = str(self.index)
        try:
            # An empty input and none are the same to git: neither leaves the terminal for it to read.
            done = subprocess.run(
                argv, env=env, cwd=self.work_tree or self.git_dir, capture_output=True, input=input or b"", pass_fds=self._inherited
            )
        except OSError as error:
            raise GitError(f"Cannot run git in {self.work_tree or self.git_dir}: {error.strerror or error}.") from error
        result = Completed(argv, done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))
        if check and result.code != 0:
            raise GitError(f"git {words[0]} failed in {self.work_tree or self.git_dir}.", details=result.stderr or result.text)
        return result

    @property
    def _inherited(self) -> tuple[int, ...]:
        return self.holding if os.name != "nt" else ()

    def feed(self, *words: str | Path, pieces: Iterable[bytes]) -> None:
        """Run ``git WORDS`` with ``pieces`` on its standard input, one after the other; for input too large to hold at once."""
        argv = ("git", *_flags(()), *(str(word) for word in words))
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                argv, env=environment(self.git_dir, self.work_tree), cwd=self.git_dir, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
            )
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as stream:
                    for piece in pieces:
                        stream.write(piece)
                code = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            if code != 0:
                errors.seek(0)
                raise GitError(f"git {words[0]} failed in {self.git_dir}.", details=errors.read().decode("utf-8", "replace")[-4000:])

    def text(self, *words: str | Path, input: bytes | None = None) -> str:
        """Standard output of a command that must succeed."""
        return self.run(*words, input=input).text

    def names(self, *words: str | Path) -> list[str]:
        """Standard output of a command with ``-z``: the names it lists."""
        return [name.decode("utf-8", "surrogateescape") for name in self.run(*words).stdout.split(b"\0") if name]

    # ---- objects and refs ---------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str | None:
        """The object id that ``revision`` names, or None."""
        done = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", revision, check=False)
        return done.text if done.code == 0 and done.text else None

    def has(self, object_id: str) -> bool:
        """Whether the object is here."""
        return self.run("cat-file", "-e", object_id, check=False).code == 0

    def blob(self, object_id: str) -> bytes:
        """The content of a blob (``ID`` or ``TREE:path``)."""
        return self.run("cat-file", "blob", object_id).stdout

    def tree_of(self, commit: str) -> str:
        """Tree id of a commit."""
        return self.text("rev-parse", "--verify", f"{commit}^{{tree}}")

    def write_tree(self) -> str:
        """Tree id of the index."""
        return self.text("write-tree")

    def commit(self, tree: str, parent: str | None, message: str) -> str:
        """A commit of ``tree`` with the fixed identity and time; the same arguments give the same id everywhere."""
        parents = ("-p", parent) if parent is not None else ()
        return self.text("commit-tree", tree, *parents, "-F", "-", input=message.encode("utf-8", "surrogateescape"))

    def message(self, commit: str) -> str:
        """The message of a commit."""
        return self.run("cat-file", "commit", commit).stdout.decode("utf-8", "replace").partition("\n\n")[2]

    def set_ref(self, name: str, commit: str) -> None:
        """Point a ref at a commit. A lock file that a killed run left is removed: callers hold the series' own lock."""
        (self.git_dir / f"{name}.lock").unlink(missing_ok=True)
        self.run("update-ref", name, commit)

    def entries(self, tree: str, paths: Iterable[str]) -> dict[str, tuple[str, str]]:
        """``path -> (mode, blob id)`` of those of ``paths`` that ``tree`` holds as files."""
        wanted = list(paths)
        if not wanted:
            return {}
        found: dict[str, tuple[str, str]] = {}
        for line in self.names("ls-tree", "-r", "-z", "--full-tree", tree, "--", *wanted):
            head, _, path = line.partition("\t")
            mode, kind, object_id = head.split()
            if kind == "blob" and path in wanted:
                found[path] = (mode, object_id)
        return found

    def diff(self, old: str, new: str) -> bytes:
        """The difference of two trees in the form a patch is written in."""
        return self.run("diff-tree", "-r", *DIFF_FLAGS, old, new).stdout

    def changed(self, old: str, new: str) -> list[str]:
        """Paths that differ between two trees or commits."""
        return self.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, new)

    def status(self) -> list[tuple[str, str]]:
        """``(XY, path)`` of every uncommitted change, new files that are not ignored included."""
        done = self.run("status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=none")
        parts = [part.decode("utf-8", "surrogateescape") for part in done.stdout.split(b"\0") if part]
        return [(part[:2], part[3:]) for part in parts]

    def commits(self, base: str, tip: str) -> list[str]:
        """Commits after ``base`` up to ``tip``, oldest first."""
        return self.text("rev-list", "--reverse", "--topo-order", f"{base}..{tip}").split()


def _flags(config: Sequence[str]) -> list[str]:
    flags: list[str] = ["--no-pager"]
    for setting in (*_SETTINGS, *config):
        flags += ["-c", setting]
    return flags
