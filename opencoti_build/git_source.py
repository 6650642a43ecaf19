"""Brings one commit of a git repository as a tar file with the committed bytes, by a repository of its own in a scratch folder.

A fresh repository for every fetch means that nothing a failed fetch left behind can spoil the next one. Attributes are switched off, so
``git archive`` neither converts line ends nor leaves out or fills in anything: the files are the blobs. Submodules come out as
nothing; a pin names them separately.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import ChecksumError, GitError
from .git import network_environment
from .runner import Runner

_REF = "refs/pin/wanted"
_ATTRIBUTES = "* -text -ident -filter -working-tree-encoding -export-ignore -export-subst\n"


def fetch_tar(runner: Runner, url: str, tag: str, commit: str | None, scratch: Path, *, on_line: Callable[[str], None] | None = None) -> tuple[Path, str]:
    """Fetch ``tag`` (or ``commit``, which then must be the tag's) from ``url``; gives the tar file and the commit id.

    Raises GitError when git is absent or fails, or the server left objects out, ChecksumError when the tag names another commit.
    """
    repository = scratch / "repository.git"
    environment = network_environment()

    def git(*words: str, check: bool = True, watch: bool = False) -> tuple[int, str]:
        argv = ["git", f"--git-dir={repository}", *words]
        outcome = runner.run(argv, cwd=scratch, env=environment, check=check, error=GitError, on_line=on_line if watch else None)
        return outcome.code, outcome.output.strip()

    runner.run(["git", "init", "--quiet", "--bare", "--object-format=sha1", "--template=", str(repository)], cwd=scratch, env=environment, error=GitError)
    (repository / "info").mkdir(exist_ok=True)
    (repository / "info" / "attributes").write_text(_ATTRIBUTES, "ascii", newline="\n")
    fetch = ("fetch", "--depth=1", "--no-tags", "--no-filter", "--no-recurse-submodules", "--progress", "--", url)
    got = False
    if commit is not None:
        # Servers may refuse a bare commit id; then the tag has to name it.
        got = git(*fetch, f"+{commit}:{_REF}", check=False, watch=True)[0] == 0
    if not got:
        code, output = git(*fetch, f"+refs/tags/{tag}:{_REF}", check=False, watch=True)
        if code != 0:
            said = [line for line in output.splitlines() if line.startswith(("fatal:", "error:"))] or output.splitlines() or [f"exit code {code}"]
            raise GitError(f"git cannot fetch {tag} from {url}: {said[0]}", details=output)
    actual = git("rev-parse", "--verify", "--quiet", f"{_REF}^{{commit}}")[1]
    if commit is not None and actual != commit:
        raise ChecksumError(f"{url}: the tag {tag} names commit {actual}, the pin says {commit}.")
    listed = git("rev-list", "--objects", "--no-object-names", "--missing=print", actual)[1]
    if missing := [line for line in listed.splitlines() if line.startswith("?")]:
        raise GitError(f"{url}: the server left out {len(missing)} objects of {tag} (a partial clone): fetch from a full repository.")
    tar = scratch / "tree.tar"
    git("-c", "tar.umask=0022", "archive", "--format=tar", f"--output={tar}", actual)
    return tar, actual
