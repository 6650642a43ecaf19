"""What a person sees: steps, tables, progress with an ETA. Everything goes to standard error, results go to standard output.

Three modes: rich (a terminal), plain (no terminal, ``NO_COLOR`` or ``OPENCOTI_PLAIN=1``: a line now and then instead of a
moving bar), quiet (``OPENCOTI_QUIET=1``: warnings and errors only). Library code takes a ``Console`` as an argument and never
prints by itself; tests hand in one that writes to a string.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import IO

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class Mode(Enum):
    """How much and how lively."""

    RICH = "rich"
    PLAIN = "plain"
    QUIET = "quiet"


def mode_from_environment(environment: dict[str, str], *, is_terminal: bool) -> Mode:
    """Pick the mode: quiet wins, then plain, then what the stream is."""
    if environment.get("OPENCOTI_QUIET", "") not in ("", "0"):
        return Mode.QUIET
    if environment.get("OPENCOTI_PLAIN", "") not in ("", "0") or not is_terminal:
        return Mode.PLAIN
    return Mode.RICH


def human_bytes(count: int) -> str:
    """Size for people: binary prefixes, one decimal from KiB on."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def count_of(count: int, one: str, many: str = "") -> str:
    """A number and its noun: ``1 byte``, ``2 bytes``; ``many`` where an s is not all."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def human_seconds(seconds: float) -> str:
    """Duration for people: ``0.4 s``, ``12 s``, ``3 min 05 s``, ``1 h 02 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


class Meter:
    """One running progress line. ``total`` may be unknown (None) at first."""

    def __init__(self, advance: Callable[[float], None], update: Callable[[float, float | None, str | None], None]) -> None:
        self._advance = advance
        self._update = update

    def advance(self, amount: float = 1) -> None:
        """Add ``amount`` (bytes or items) to what is done."""
        self._advance(amount)

    def set(self, done: float, total: float | None = None, note: str | None = None) -> None:
        """Set what is done, and the total and a note where given."""
        self._update(done, total, note)


class Console:
    """The one way to talk to a person."""

    PLAIN_INTERVAL = 10.0
    """Seconds between two lines of progress in plain mode."""

    def __init__(self, stream: IO[str] | None = None, *, mode: Mode | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream if stream is not None else sys.stderr
        if isinstance(self.stream, io.TextIOWrapper) and self.stream.errors == "strict":
            self.stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding has not
        self.mode = mode if mode is not None else mode_from_environment(dict(os.environ), is_terminal=self.stream.isatty())
        self._clock = clock
        self._rich = RichConsole(
            file=self.stream,
            force_terminal=self.mode is Mode.RICH or None,
            no_color=None if self.mode is Mode.RICH else True,
            highlight=False,
            soft_wrap=self.mode is not Mode.RICH,
        )

    def info(self, message: str) -> None:
        """A line of ordinary news."""
        if self.mode is not Mode.QUIET:
            self._rich.print(escape(message))

    def step(self, message: str) -> None:
        """The start of a piece of work."""
        if self.mode is not Mode.QUIET:
            self._rich.print(f"[bold cyan]==>[/] {escape(message)}")

    def success(self, message: str) -> None:
        """A piece of work that ended well."""
        if self.mode is not Mode.QUIET:
            self._rich.print(f"[bold green]ok[/]  {escape(message)}")

    def warn(self, message: str) -> None:
        """Something a person should know although the work goes on."""
        self._rich.print(f"[bold yellow]warning:[/] {escape(message)}")

    def error(self, message: str, details: str = "") -> None:
        """The sentence of an error, its details below."""
        self._rich.print(f"[bold red]error:[/] {escape(message)}")
        if details:
            self._rich.print(escape(details.rstrip()))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """A table; ``right`` names the columns (by index) to align right. Quiet mode prints it too: it was asked for."""
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        console = self._rich if self.mode is Mode.RICH else RichConsole(file=self.stream, no_color=True, width=160, highlight=False)
        console.print(table)

    @contextlib.contextmanager
    def progress(self, description: str, total: float | None = None, *, unit: str = "items") -> Iterator[Meter]:
        """A progress line with an ETA. ``unit`` is ``items`` or ``bytes``."""
        if self.mode is Mode.RICH:
            count = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
            with Progress(*columns, console=self._rich, transient=True) as live:
                task = live.add_task(escape(description), total=total, note="")

                def update(done: float, new_total: float | None, note: str | None) -> None:
                    live.update(task, completed=done, **({"total": new_total} if new_total is not None else {}), **({"note": escape(note)} if note is not None else {}))

                yield Meter(lambda amount: live.advance(task, amount), update)
            return
        state = {"done": 0.0, "total": total, "note": ""}
        started = last = self._clock()

        def show() -> None:
            nonlocal last
            now = self._clock()
            if self.mode is Mode.QUIET or now - last < self.PLAIN_INTERVAL:
                return
            last = now
            self.info(f"    {description}: {_fraction(state['done'], state['total'], unit)}, {human_seconds(now - started)}{_eta(state['done'], state['total'], now - started)} {state['note']}".rstrip())

        def advance(amount: float) -> None:
            state["done"] += amount
            show()

        def update_plain(done: float, new_total: float | None, note: str | None) -> None:
            state["done"] = done
            if new_total is not None:
                state["total"] = new_total
            if note is not None:
                state["note"] = note
            show()

        yield Meter(advance, update_plain)


def _fraction(done: float, total: float | None, unit: str) -> str:
    text = (lambda n: human_bytes(int(n))) if unit == "bytes" else (lambda n: f"{n:.0f}")
    return text(done) if total is None else f"{text(done)} of {text(total)}"


def _eta(done: float, total: float | None, elapsed: float) -> str:
    if not total or done <= 0:
        return ""
    return f", ETA {human_seconds(elapsed * max(0.0, total - done) / done)}"
