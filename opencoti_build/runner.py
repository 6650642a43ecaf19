"""Runs other programs. Output is captured and shown only when the program fails; a caller may watch the lines for progress."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .errors import BuildError, OpencotiError


@dataclass(frozen=True)
class Outcome:
    """What a program left: its exit code and its output (standard output; standard error joined in unless split)."""

    argv: tuple[str, ...]
    code: int
    output: str
    errors: str = ""


class Runner(Protocol):
    """Anything that can run a program; library code takes one as an argument."""

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        check: bool = True,
        error: type[OpencotiError] = BuildError,
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Outcome:
        """Run ``argv`` without a shell. ``env`` is the whole environment when given.

        ``on_line`` gets every line as it comes. ``log`` gets the whole output. With ``check``, a non-zero exit raises ``error``
        whose details hold the last lines of the output. ``pass_fds`` are descriptors the child keeps (POSIX only): an advisory lock
        on one of them lasts as long as the child and all that it started, even if this process is killed.
        """
        ...


class SystemRunner:
    """The real one. The child gets its own process group, so that an interrupt or an exception ends all it started."""

    TAIL_LINES = 60

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        check: bool = True,
        error: type[OpencotiError] = BuildError,
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Outcome:
        words = tuple(str(word) for word in argv)
        try:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=dict(env) if env is not None else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=os.name != "nt",
                pass_fds=tuple(pass_fds),
            )
        except OSError as problem:
            raise error(f"Cannot start {words[0]}: {problem.strerror or problem}.") from problem
        lines: list[str] = []
        sink = log.open("w", encoding="utf-8") if log is not None else None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if sink is not None:
                    sink.write(line)
                if on_line is not None:
                    on_line(line.rstrip("\n"))
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            if sink is not None:
                sink.close()
        if check and code != 0:
            tail = "".join(deque(lines, maxlen=self.TAIL_LINES))
            where = f" The whole log is in {log}." if log is not None else ""
            raise error(f"{Path(words[0]).name} ended with exit code {code}.{where}", details=tail)
        return Outcome(words, code, "".join(lines))


def _end(process: subprocess.Popen[str]) -> None:
    """End the child and what it started: politely, then for good."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        try:
            if os.name == "nt":
                process.terminate()
            else:
                os.killpg(process.pid, number)
            process.wait(timeout=5)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return
