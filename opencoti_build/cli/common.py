"""What every task shares: the context it works in and how an error becomes a sentence and an exit code."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from invoke import Task, task
from invoke.context import Context as InvokeContext
from invoke.exceptions import Exit

from ..cache import Cache, default_root
from ..console import Console
from ..errors import DiskError, OpencotiError, UsageError
from ..project import Project, find_project
from ..runner import Runner, SystemRunner


@dataclass(frozen=True)
class CommandContext:
    """What a task works with; tests build their own."""

    project: Project
    console: Console
    runner: Runner
    cache: Cache
    offline: bool
    dry_run: bool


def context(c: InvokeContext) -> CommandContext:
    """The context of a task called from the command line. ``invoke --dry`` sets ``dry_run``."""
    return CommandContext(
        project=find_project(),
        console=Console(),
        runner=SystemRunner(),
        cache=Cache(default_root()),
        offline=os.environ.get("OPENCOTI_OFFLINE", "") not in ("", "0"),
        dry_run=bool(c.config.run.dry),
    )


def command(*, help: Mapping[str, str] | None = None, optional: Sequence[str] = (), rest: str = "", **options: Any) -> Callable[[Callable[..., Any]], Task[Any]]:
    """A task whose errors end in one sentence and the exit code of their class.

    ``optional`` names parameters with a default that may also be given by position, e.g. ``invoke vendor fetch NAME``; ``rest`` names one that
    takes every further word, at least one, as a list, e.g. ``invoke pin check FILE...``.
    A traceback shows only with ``OPENCOTI_DEBUG=1``; anything that is not ours is a defect and says so (exit code 70).
    """

    def decorate(function: Callable[..., Any]) -> Task[Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            given = {name: value for name, value in kwargs.items() if not (value is None and name in optional)}
            try:
                return function(*args, **given)
            except OpencotiError as error:
                _debug()
                Console().error(error.message, error.details)
                raise Exit(code=error.exit_code) from error
            except KeyboardInterrupt as error:
                Console().error("Interrupted: run the same command again to go on from here.")
                raise Exit(code=130) from error
            except BrokenPipeError as error:
                # The reader (``| head``) has had enough: end as a program that a SIGPIPE ends, and let nothing be flushed any more.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise Exit(code=141) from error
            except (Exit, SystemExit):
                raise
            except OSError as error:
                _debug()
                Console().error(f"{error.filename or 'The file system'}: {error.strerror or error}.")
                raise Exit(code=DiskError.exit_code) from error
            except Exception as error:
                _debug()
                text = "" if os.environ.get("OPENCOTI_DEBUG") else "Set OPENCOTI_DEBUG=1 for the traceback."
                Console().error(f"This is a defect of the toolkit, please report it: {type(error).__name__}: {error}", text)
                raise Exit(code=70) from error

        if rest:
            options["iterable"] = [*options.get("iterable", ()), rest]
        made: Task[Any] = task(help=dict(help or {}), **options)(guarded)
        if unknown := set(optional) - set(inspect.signature(function).parameters):
            raise TypeError(f"{function.__name__}: optional names {sorted(unknown)}, which are not its parameters")
        made.optional_positionals = tuple(optional)  # type: ignore[attr-defined]
        made.rest_positional = rest  # type: ignore[attr-defined]
        return made

    return decorate


def _debug() -> None:
    if os.environ.get("OPENCOTI_DEBUG"):
        traceback.print_exc()


def job_count(text: str, option: str = "--jobs") -> int | None:
    """The value of ``--jobs``, or of another ``option`` of its kind: None when it was not given. Raises UsageError for anything but a positive number."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 100000):
        raise UsageError(f"{option} is {text!r}; give a positive number.")
    return int(text)
