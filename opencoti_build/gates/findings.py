"""Reads what a sanitizer wrote, and tells whose finding it is.

Formats: the reports of AddressSanitizer, LeakSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer as the runtimes of GCC and clang
print them (compiler-rt, ``sanitizer_common``): a headline, stacks under headings, a frame a line::

    #1 0x55d0c3a1 in opencoti::payload::open(...) common/opencoti/payload.cpp:52   (AddressSanitizer)
    #1 opencoti::payload::open(...) common/opencoti/payload.cpp:52 (llama+0x1234)  (ThreadSanitizer)
    /tree/common/opencoti/zip-reader.cpp:40:13: runtime error: ...                 (UndefinedBehaviorSanitizer)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Owner(Enum):
    """Whose code a finding is in."""

    OURS = "the series"
    UPSTREAM = "upstream"
    ELSEWHERE = "outside the tree"


@dataclass(frozen=True)
class Frame:
    """One frame: ``file`` is relative to the tree, empty for code without a source line or from outside."""

    function: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.function} {self.file}:{self.line}" if self.file else self.function


@dataclass(frozen=True)
class Finding:
    """One report. ``kind`` is the sanitizer's own name for it, ``stacks`` are those that say who did it, innermost frame first."""

    kind: str
    stacks: tuple[tuple[Frame, ...], ...]
    text: str

    @property
    def places(self) -> tuple[Frame, ...]:
        """The innermost frame inside the tree, of each stack that has one."""
        return tuple(frame for stack in self.stacks for frame in [next((item for item in stack if item.file), None)] if frame is not None)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for reports of the same defect: kind and places, by file and function."""
        return (self.kind, *((frame.file, frame.function) for frame in self.places))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "stacks": [[[frame.function, frame.file, frame.line] for frame in stack] for stack in self.stacks], "text": self.text}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """From ``to_dict``."""
        return cls(data["kind"], tuple(tuple(Frame(*frame) for frame in stack) for stack in data["stacks"]), data["text"])


@dataclass(frozen=True)
class Ours:
    """What of the tree belongs to the series: every file below a folder ``opencoti``, and ``lines`` of upstream's files that it added.

    ``outer`` are functions of ours that everything runs inside of: the search for an owner stops there.
    """

    lines: Mapping[str, frozenset[int]]
    outer: tuple[str, ...] = ()

    DEPTH = 4
    """How many frames inside the tree may lie between our code and the place of a finding: a helper of upstream's that we call wrongly."""

    def has(self, frame: Frame) -> bool:
        """Whether a frame is in our code."""
        return "/opencoti/" in f"/{frame.file}" or frame.line in self.lines.get(frame.file, ())

    def owner(self, finding: Finding) -> Owner:
        """Ours if any of its stacks is in our code within ``DEPTH`` frames, upstream's if it is in the tree at all."""
        for stack in finding.stacks:
            inside = [frame for frame in stack if frame.file]
            for frame in inside[: self.DEPTH]:
                if any(name in frame.function for name in self.outer):
                    break
                if self.has(frame):
                    return Owner.OURS
        return Owner.UPSTREAM if finding.places else Owner.ELSEWHERE


_HEADLINE = re.compile(r"^(?:==\d+==\s*)?(?:ERROR|WARNING): (AddressSanitizer|ThreadSanitizer|LeakSanitizer)(?:: ?| )(.*)$")
_LEAK = re.compile(r"^(Direct|Indirect) leak of .* allocated from:")
_UNDEFINED = re.compile(r"^(\S.*?):(\d+)(?::\d+)?: runtime error: (.*)$")
_FRAME = re.compile(r"^\s+#\d+ (?:0x[0-9a-f]+ in )?(.*)$")
_SOURCE = re.compile(r"^(.*?) (\S+?):(\d+)(?::\d+)?(?: \(.*\))?$")
_ELSEWHERE = re.compile(r"created by|Location is|Thread T\d+ .*created|Mutex M\d+ .*created|is located")
"""Headings of stacks that tell where a thread or a block came from, not who did wrong."""
_END = re.compile(r"^=+$|^SUMMARY: ")


def parse(text: str, root: str = "") -> Iterator[Finding]:
    """The findings of one log, in order; ``root`` is the folder of the sources. An indirect leak follows from a direct one and is passed over."""
    current: _Report | None = None
    for line in text.splitlines():
        if (match := _HEADLINE.match(line)) is not None:
            if current is not None:
                yield from current.done()
            current = None if match[1] == "LeakSanitizer" else _Report(f"{match[1]}: {_kind(match[2])}", line)
        elif (match := _LEAK.match(line)) is not None:
            if current is not None:
                yield from current.done()
            current = _Report("LeakSanitizer: leak", line) if match[1] == "Direct" else None
        elif (match := _UNDEFINED.match(line)) is not None:
            if current is not None:
                yield from current.done()
            file = relative(match[1], root)
            current = _Report(f"UndefinedBehaviorSanitizer: {_undefined_kind(match[3])}", line, Frame("", file, int(match[2])))
        elif current is not None and _END.match(line):
            yield from current.done()
            current = None
        elif current is not None:
            current.take(line)
    if current is not None:
        yield from current.done()


class _Report:
    """A report while its lines come in."""

    LINES = 60

    def __init__(self, kind: str, headline: str, place: Frame | None = None) -> None:
        self.kind = kind
        self.lines = [headline]
        self.place = place
        self.stacks: list[list[Frame]] = [[]]
        self.counts = True

    def take(self, line: str) -> None:
        if len(self.lines) < self.LINES:
            self.lines.append(line)
        if (match := _FRAME.match(line)) is not None:
            if self.counts:
                self.stacks[-1].append(frame_of(match[1]))
        elif line.strip():
            self.counts = _ELSEWHERE.search(line) is None
            if self.stacks[-1]:
                self.stacks.append([])

    def done(self) -> Iterator[Finding]:
        stacks = [tuple(stack) for stack in self.stacks if stack]
        if not stacks and self.place is not None:
            stacks = [(self.place,)]
        yield Finding(self.kind, tuple(stacks), "\n".join(self.lines))


def frame_of(text: str) -> Frame:
    """A frame from what follows its number and address."""
    match = _SOURCE.match(text)
    if match is None:
        return Frame(re.sub(r" \(.*\+0x[0-9a-f]+\).*$", "", text))
    return Frame(match[1], relative(match[2]), int(match[3]))


def relative(path: str, root: str = "") -> str:
    """A source path relative to the tree; empty for one outside.

    The tree is built with its folder mapped away, so its files have relative names; what GCC notes for the undefined-behaviour runtime
    is not mapped, so ``root`` is taken off. System libraries were built elsewhere: their names are absolute or begin with ``../``.
    """
    if root and path.startswith(f"{root}/"):
        path = path[len(root) + 1 :]
    clean = re.sub(r"^(?:build/)?(?:\./)+", "", path)
    return "" if clean.startswith(("/", "../")) or clean == "<null>" else clean


def _kind(text: str) -> str:
    """``heap-use-after-free`` of ``heap-use-after-free on address 0x...``; ``data race`` of ``data race (pid=12)``."""
    return re.split(r" on (?:unknown )?address| \(pid=|:", text, maxsplit=1)[0].strip()


def _undefined_kind(text: str) -> str:
    """The complaint without its numbers, so that equal ones are equal."""
    return re.sub(r"0x[0-9a-f]+|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N", text).strip()


def collect(folder: Path, root: str = "") -> tuple[Finding, ...]:
    """The different findings of all logs in a folder, each once; ``root`` as for ``parse``."""
    found: dict[tuple[Any, ...], Finding] = {}
    for log in sorted(folder.iterdir()):
        for finding in parse(log.read_text("utf-8", "replace"), root):
            found.setdefault(finding.identity, finding)
    return tuple(found.values())


_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,\d+)? @@")


def added_lines(diff: str) -> dict[str, frozenset[int]]:
    """The lines a diff (git's format, prefixes a/ and b/) added, by file: their numbers in the new file."""
    found: dict[str, set[int]] = {}
    file, number = "", 0
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line[6:] if line.startswith("+++ b/") else ""
        elif match := _HUNK.match(line):
            number = int(match[1])
        elif line.startswith("+") and file:
            found.setdefault(file, set()).add(number)
            number += 1
        elif line.startswith(" "):
            number += 1
    return {name: frozenset(numbers) for name, numbers in found.items()}


def sorted_by_owner(findings: Iterable[Finding], owner: Callable[[Finding], Owner]) -> dict[Owner, Sequence[Finding]]:
    """Findings by whose they are."""
    sorted_: dict[Owner, list[Finding]] = {kind: [] for kind in Owner}
    for finding in findings:
        sorted_[owner(finding)].append(finding)
    return dict(sorted_)
