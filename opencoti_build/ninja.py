"""Runs ninja: progress with an ETA from its status lines, and the first errors of a failed build."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .console import Console, Meter
from .errors import BuildError, BusyError
from .runner import Runner

STATUS = "[%f/%t] "
"""NINJA_STATUS: finished and total edges (ninja manual, "Environment variables")."""

_STATUS_LINE = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
_ERROR_LINE = re.compile(r"(?:^|[\s:])(?:fatal )?error\b.{0,3}:|undefined (?:symbol|reference)|^ninja: error|^CMake Error", re.IGNORECASE)
_MEMORY_PER_JOB = 1 << 30
"""Bytes the largest translation units of the engine take while they are compiled, rounded up."""


@dataclass
class Progress:
    """Follows ninja's output line by line; ``errors`` collects what a person wants to see first."""

    meter: Meter
    done: int = 0
    total: int = 0
    errors: list[str] = field(default_factory=list)

    ERRORS_KEPT = 20

    def line(self, text: str) -> None:
        """One line of ninja's output."""
        if match := _STATUS_LINE.match(text):
            self.done, self.total = int(match.group(1)), int(match.group(2))
            self.meter.set(self.done, self.total, what_is_built(match.group(3)))
        elif _ERROR_LINE.search(text) and len(self.errors) < self.ERRORS_KEPT:
            self.errors.append(text)


def what_is_built(description: str) -> str:
    """A short note from an edge's description: the file's name without CMake's folders (``CMakeFiles/x.dir/a/b.cpp.o`` -> ``b.cpp``)."""
    name = re.split(r"[/\\ ]", description.strip())[-1]
    return re.sub(r"\.(?:o|obj)$", "", name)


def first_errors(output: str) -> str:
    """The lines of a log that name the first errors; the end of the log when none look like one."""
    found = [line for line in output.splitlines() if _ERROR_LINE.search(line)]
    return "\n".join(found[: Progress.ERRORS_KEPT] or output.splitlines()[-40:])


def default_jobs() -> int:
    """Compilers at once: one a core this process may use, fewer when memory is short. ``OPENCOTI_JOBS`` overrides."""
    wish = os.environ.get("OPENCOTI_JOBS", "")
    if wish.isdigit() and int(wish) > 0:
        return int(wish)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = physical_memory()
    return max(1, min(cores, memory // _MEMORY_PER_JOB)) if memory else cores


def physical_memory() -> int | None:
    """Bytes of memory of this machine, where the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


@contextlib.contextmanager
def lease(path: Path, *, console: Console, wait_seconds: float = 600.0) -> Iterator[int | None]:
    """Hold the right to write into a build directory; yields the descriptor to hand to the programs that do the writing.

    A killed run leaves compilers behind that work on for a while and would write over the next run's objects. They inherited
    the descriptor, so the lock on it lasts as long as they do, and the next run waits for them. Raises BusyError when they do not
    end. Yields None on Windows, where locks are not inherited.
    """
    if os.name == "nt":
        yield None
        return
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise BusyError(f"Compilers of an earlier run still write into {path.parent}: end them and run the same command again.") from None
                if not told:
                    console.info("    waiting for the compilers of an interrupted run to end")
                    told = True
                time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def build(
    ninja: Path,
    directory: Path,
    targets: Sequence[str],
    *,
    environment: Mapping[str, str],
    console: Console,
    runner: Runner,
    description: str,
    jobs: int,
    log: Path,
    lease: int | None = None,
) -> None:
    """Build ``targets`` in ``directory``; ``lease`` is a descriptor of ``lease()`` that the compilers keep. Output goes to ``log``; raises BuildError with the first error lines."""
    with console.progress(description) as meter:
        progress = Progress(meter)
        outcome = runner.run(
            (ninja, "-C", directory, "-j", str(jobs), *targets),
            env={**environment, "NINJA_STATUS": STATUS},
            on_line=progress.line,
            check=False,
            log=log,
            pass_fds=() if lease is None else (lease,),
        )
    if outcome.code != 0:
        where = f"after {progress.done} of {progress.total} steps" if progress.total else "before its first step"
        raise BuildError(
            f"{description} failed {where} (ninja's exit code {outcome.code}); the whole log is in {log}.",
            details="\n".join(progress.errors) or first_errors(outcome.output),
        )
