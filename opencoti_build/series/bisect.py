"""``patches bisect``: the first patch after which a command fails, in a work tree of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..console import Console
from ..errors import BuildError, PatchError
from ..patchfile import PatchFile
from ..runner import Runner
from .workspace import Workspace

SKIP = 125
"""Exit code that says: this state cannot be judged (as with ``git bisect run``)."""


@dataclass(frozen=True)
class Bisection:
    """``first`` is the patch that breaks the command; ``skipped`` are patches next to it that could not be judged."""

    first: PatchFile | None
    skipped: tuple[PatchFile, ...] = ()
    runs: int = 0


Probe = Callable[[int | None], int]
"""Brings the work tree to a patch (None: the base) and returns the command's exit code."""


def bisect(workspace: Workspace, command: str, runner: Runner, console: Console, *, environment: Mapping[str, str] = os.environ) -> Bisection:
    """Run the shell line ``command`` in the work tree at chosen patches; exit code 0 is good, 125 cannot tell, others are bad.

    The command finds the patch's number in OPENCOTI_PATCH ("0000": the base) and the tree in OPENCOTI_TREE_PATH. Raises PatchError
    when it fails on the base already, and BuildError when it was ended by a signal or cannot be found.
    """
    series = workspace.folder.load()
    shell = ["cmd", "/c", command] if os.name == "nt" else ["sh", "-c", command]

    def probe(number: int | None) -> int:
        workspace.apply(to=number or 0)
        env = dict(environment) | {"OPENCOTI_PATCH": f"{number or 0:04d}", "OPENCOTI_TREE_PATH": str(workspace.tree)}
        done = runner.run(shell, cwd=workspace.tree, env=env, check=False)
        if done.code < 0 or done.code >= 126:
            raise BuildError(
                f"The command ended with exit code {done.code} at {number or 0:04d}, which tells neither good nor bad.", details=done.output[-4000:]
            )
        console.info(f"    {number or 0:04d}: {'good' if done.code == 0 else 'cannot tell' if done.code == SKIP else 'bad'}")
        return done.code

    return search(series.patches, probe)


def search(patches: tuple[PatchFile, ...], probe: Probe) -> Bisection:
    """The search itself: base and whole series first, then halves."""
    runs = 1
    if (code := probe(None)) != 0:
        raise PatchError(
            "The command cannot tell about the base: no patch can be blamed."
            if code == SKIP
            else "The command fails on the base already: no patch is to blame."
        )
    if not patches:
        return Bisection(None, runs=runs)
    runs += 1
    if (code := probe(patches[-1].number)) == 0:
        return Bisection(None, runs=runs)
    if code == SKIP:
        raise PatchError("The command cannot tell about the whole series (exit code 125): there is nothing to search for.")
    good, bad = -1, len(patches) - 1
    skipped: set[int] = set()
    while True:
        open_ones = [index for index in range(good + 1, bad) if index not in skipped]
        if not open_ones:
            break
        middle = open_ones[len(open_ones) // 2]
        runs += 1
        code = probe(patches[middle].number)
        if code == 0:
            good = middle
        elif code == SKIP:
            skipped.add(middle)
        else:
            bad = middle
    doubt = tuple(patches[index] for index in range(good + 1, bad) if index in skipped)
    return Bisection(patches[bad], doubt, runs)
