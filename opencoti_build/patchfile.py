"""One patch of a series: its name, its message, its differences.

A patch file is a mail as ``git format-patch`` writes it (mailbox line, From, Date, Subject, body, ``---``, git-style unified
differences), so ``git am`` takes it too. Two things are ours: the number is part of the file's name only, and author and date are
the series' fixed ones. ``render`` writes that form, ``parse`` reads it back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path

from . import files
from .errors import DataError
from .git import EMAIL, NAME

SECTIONS: tuple[str, ...] = ("Why", "Hooks", "Switch", "Off", "Tests", "Limits")
"""Sections every message has, in this order; each starts a line as ``Name:``."""

HEADER = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: {NAME} <{EMAIL}>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\n"
"""First lines of every exported patch."""

MAX_BYTES = 64 << 20
"""A larger patch file is refused unread."""

_NAME = re.compile(r"(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)\.patch")
_SECTION = re.compile(r"^([A-Z][A-Za-z]*):[ \t]*(.*)$")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SUBJECT_NUMBER = re.compile(r"^(\d{4})[:\s]+(\S.*)$", re.S)
_TRAILER_NUMBER = re.compile(r"^Number:[ \t]*(\d{4})[ \t]*$", re.M)


class Kind(Enum):
    """What a patch does to a file."""

    MODIFY = "modify"
    ADD = "add"
    DELETE = "delete"
    RENAME = "rename"
    COPY = "copy"


@dataclass(frozen=True)
class Hunk:
    """One hunk. ``line`` is the 1-based line of its header in the patch file; ``lines`` keep their first character."""

    line: int
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]
    short_lines: tuple[int, ...] = ()
    """Lines of the patch file where a context line has not even the leading space."""

    @property
    def added(self) -> int:
        """Number of lines it adds."""
        return sum(line.startswith(b"+") for line in self.lines)

    @property
    def removed(self) -> int:
        """Number of lines it removes."""
        return sum(line.startswith(b"-") for line in self.lines)


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file. ``path`` is the name after the change, before it for a deletion.

    ``old_blob`` and ``new_blob`` are object ids as the patch states them (40 hex digits with a full index), None where it states none.
    ``start`` and ``end`` delimit its text in ``PatchFile.diff`` in bytes; ``line`` is its 1-based first line in the patch file.
    """

    path: str
    old_path: str
    kind: Kind
    line: int
    start: int
    end: int
    old_mode: str | None = None
    new_mode: str | None = None
    old_blob: str | None = None
    new_blob: str | None = None
    binary: bool = False
    hunks: tuple[Hunk, ...] = ()

    @property
    def added(self) -> int:
        """Number of lines added."""
        return sum(hunk.added for hunk in self.hunks)

    @property
    def removed(self) -> int:
        """Number of lines removed."""
        return sum(hunk.removed for hunk in self.hunks)


@dataclass(frozen=True)
class Message:
    """Subject ``area: sentence`` and body of a patch, without its number."""

    subject: str
    body: str = ""

    @property
    def area(self) -> str:
        """What stands before the colon of the subject, or nothing."""
        head, colon, _ = self.subject.partition(":")
        return head if colon and re.fullmatch(r"[a-z0-9][a-z0-9 /_-]*", head) else ""

    @property
    def sections(self) -> dict[str, str]:
        """Section name -> text, in the order of the message."""
        found: dict[str, list[str]] = {}
        current: list[str] | None = None
        for line in self.body.split("\n"):
            match = _SECTION.match(line)
            if match and match[1] in SECTIONS:
                current = found.setdefault(match[1], [])
                current.append(match[2])
            elif current is not None:
                current.append(line)
        return {name: "\n".join(lines).strip() for name, lines in found.items()}

    def text(self, number: int | None = None) -> str:
        """The message of a commit; with ``number``, as commits of a work tree have it: ``NNNN area: sentence``."""
        subject = self.subject if number is None else f"{number:04d} {self.subject}"
        return f"{subject}\n\n{self.body}\n" if self.body else f"{subject}\n"

    @classmethod
    def from_text(cls, text: str) -> Message:
        """From a commit message: white space at line ends and blank lines at both ends go."""
        lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
        while lines and not lines[0]:
            lines.pop(0)
        paragraph: list[str] = []
        while lines and lines[0]:
            paragraph.append(lines.pop(0))
        return cls(" ".join(paragraph), "\n".join(lines).strip("\n"))


@dataclass(frozen=True)
class PatchFile:
    """A patch; two are equal when number and bytes are."""

    number: int
    slug: str
    message: Message = field(compare=False)
    files: tuple[FileChange, ...] = field(compare=False)
    data: bytes = field(repr=False)
    diff_start: int = field(compare=False)
    """Byte offset of the differences in ``data``."""
    sha256: str = field(compare=False)

    @property
    def name(self) -> str:
        """File name: ``NNNN-slug.patch``."""
        return f"{self.number:04d}-{self.slug}.patch"

    @property
    def title(self) -> str:
        """The subject."""
        return self.message.subject

    @property
    def sections(self) -> Mapping[str, str]:
        """The message's sections."""
        return self.message.sections

    @property
    def diff(self) -> bytes:
        """The differences alone; what ``git apply`` gets."""
        return self.data[self.diff_start :]

    @property
    def added(self) -> int:
        """Number of lines added."""
        return sum(change.added for change in self.files)

    @property
    def removed(self) -> int:
        """Number of lines removed."""
        return sum(change.removed for change in self.files)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every path it names, before and after."""
        return tuple(dict.fromkeys(path for change in self.files for path in (change.old_path, change.path)))

    def part(self, change: FileChange) -> bytes:
        """The differences of one file."""
        return self.diff[change.start : change.end]

    def retargeted(self, mapping: Mapping[str, str]) -> bytes:
        """The differences with paths replaced: the same hunks for files that upstream has renamed."""
        pieces = []
        for change in self.files:
            text = self.part(change)
            target = mapping.get(change.old_path)
            if target is not None and change.kind in (Kind.MODIFY, Kind.DELETE):
                head, marker, hunks = text.partition(b"\n@@ ")
                lines = head.split(b"\n")
                lines[0] = b"diff --git " + _quote("a/" + target) + b" " + _quote("b/" + target)
                lines = [b"--- " + _quote("a/" + target) if line.startswith(b"--- ") else line for line in lines]
                if change.kind is Kind.MODIFY:
                    lines = [b"+++ " + _quote("b/" + target) if line.startswith(b"+++ ") else line for line in lines]
                text = b"\n".join(lines) + marker + hunks
            pieces.append(text)
        return b"".join(pieces)

    def renumbered(self, number: int) -> PatchFile:
        """The same patch under another number."""
        return replace(self, number=number)


def slug_of(subject: str) -> str:
    """The file-name form of a subject: lower case, words joined by ``-``, at most 60 characters, cut between words."""
    words = re.findall(r"[a-z0-9]+", subject.lower())
    slug = ""
    for word in words:
        longer = f"{slug}-{word}" if slug else word[:60]
        if len(longer) > 60:
            break
        slug = longer
    return slug or "untitled"


def split_name(name: str) -> tuple[int, str]:
    """Number and slug of a file name; raises DataError when it is no patch name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise DataError(f"{name} is no name of a patch: it has to look like 0010-area-what-it-does.patch (four digits, small letters).")
    return int(match[1]), match[2]


def take_number(text: str) -> tuple[int | None, Message]:
    """Number and message of a commit.

    The number is what a subject ``NNNN area: sentence`` starts with (four digits, then a space or colon), or a line ``Number: NNNN``
    of the message; either is taken out. Raises DataError when both are there and differ.
    """
    trailer = _TRAILER_NUMBER.search(text)
    if trailer is not None:
        text = text[: trailer.start()] + text[trailer.end() :].lstrip("\n")
    message = Message.from_text(text)
    number = int(trailer[1]) if trailer is not None else None
    if match := _SUBJECT_NUMBER.match(message.subject):
        if number is not None and number != int(match[1]):
            raise DataError(f"'{message.subject}' has the number {match[1]} in its subject and {number:04d} in its trailer: keep one.")
        number, message = int(match[1]), replace(message, subject=match[2])
    return number, message


def path_problem(path: str) -> str:
    """What is wrong with a path of a patch, or nothing."""
    parts = path.replace("\\", "/").split("/")
    if not path or path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "is absolute"
    if ".." in parts:
        return "climbs out of the tree"
    if "" in parts or "." in parts or "\\" in path or any(ord(char) < 32 for char in path):
        return "is no plain path"
    if any(part.lower() in (".git", "git~1") for part in parts):
        return "lies in git's own folder"
    return ""


def render(message: Message, diff: bytes) -> bytes:
    """The bytes of a patch file. Raises DataError for a message that a reader of mails would cut short."""
    for line in message.body.split("\n"):
        if line.startswith(("diff ", "--- ", "Index: ")) or line == "---":
            raise DataError(f"The message of '{message.subject}' has the line '{line}', which would end it: word it differently.")
    if not message.subject:
        raise DataError("A patch needs a subject, 'area: sentence'.")
    head = f"{HEADER}Subject: [PATCH] {message.subject}\n\n"
    body = f"{message.body}\n" if message.body else ""
    return (head + body + "---\n").encode("utf-8", "surrogateescape") + diff


def make(number: int, message: Message, diff: bytes) -> PatchFile:
    """A patch from its parts, named by its subject."""
    return parse(f"{number:04d}-{slug_of(message.subject)}.patch", render(message, diff))


def read(path: Path) -> PatchFile:
    """The patch in a file. Raises DataError that says what is wrong, and in which line."""
    return parse(path.name, files.read_limited(path, MAX_BYTES, "patch", DataError))


def parse(name: str, data: bytes) -> PatchFile:
    """The patch in ``data``; see ``read``."""
    number, slug = split_name(name)
    start = _diff_start(data)
    message = _message(name, data[:start])
    first_line = data.count(b"\n", 0, start) + 1
    files = _Parser(name, data[start:], first_line).files()
    return PatchFile(number, slug, message, files, data, start, hashlib.sha256(data).hexdigest())


def _diff_start(data: bytes) -> int:
    if data.startswith(b"diff --git "):
        return 0
    position = data.find(b"\ndiff --git ")
    return len(data) if position < 0 else position + 1


def _message(name: str, head: bytes) -> Message:
    text = head.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    headers, blank, body = text.partition("\n\n")
    subject = None
    lines = headers.split("\n")
    for index, line in enumerate(lines):
        if line.lower().startswith("subject:"):
            parts = [line.partition(":")[2].strip()]
            for more in lines[index + 1 :]:
                if not more.startswith((" ", "\t")):
                    break
                parts.append(more.strip())
            subject = re.sub(r"^\[PATCH[^\]]*\]\s*", "", " ".join(parts))
            break
    if subject is None or not blank:
        raise DataError(
            f"{name}: there is no 'Subject:' header; a patch is written by 'invoke patches export', or starts as 'invoke patches new' writes it."
        )
    kept: list[str] = []
    for line in body.split("\n"):
        if line == "---":
            break
        kept.append(line)
    return Message.from_text(subject + "\n\n" + "\n".join(kept))


class _Parser:
    """Reads git-style differences; ``line`` numbers count in the patch file."""

    def __init__(self, name: str, diff: bytes, first_line: int) -> None:
        self.name = name
        self.lines = diff.split(b"\n")
        if self.lines and self.lines[-1] == b"":
            self.lines.pop()
            self.ended = True
        else:
            self.ended = not diff
        self.first_line = first_line
        self.at = 0
        self.offset = 0

    def files(self) -> tuple[FileChange, ...]:
        found = []
        while self.at < len(self.lines):
            if not self.lines[self.at].startswith(b"diff --git "):
                raise self._error("there is text between two files' differences")
            found.append(self._file())
        if not self.ended:
            raise self._error("the last line has no line end: the file is cut short")
        return tuple(found)

    def _error(self, what: str) -> DataError:
        return DataError(f"{self.name}, line {self.first_line + self.at}: {what}; export the patch again instead of editing its differences by hand.")

    def _next(self) -> bytes:
        line = self.lines[self.at]
        self.at += 1
        self.offset += len(line) + 1
        return line

    def _file(self) -> FileChange:
        line, start = self.first_line + self.at, self.offset
        old_path, path = self._paths(self._next()[len(b"diff --git ") :])
        kind, values, binary = Kind.MODIFY, {}, False
        hunks: list[Hunk] = []
        while self.at < len(self.lines) and not self.lines[self.at].startswith(b"diff --git "):
            text = self.lines[self.at].rstrip(b"\r")
            if text.startswith(b"@@ "):
                hunks.append(self._hunk())
                continue
            if text.startswith(b"GIT binary patch") or text.startswith(b"Binary files "):
                binary = True
                self._next()
                while self.at < len(self.lines) and not self.lines[self.at].startswith(b"diff --git "):
                    self._next()
                break
            if text.startswith(b"new file mode "):
                kind, values["new_mode"] = Kind.ADD, text.rsplit(b" ", 1)[1].decode("ascii", "replace")
            elif text.startswith(b"deleted file mode "):
                kind, values["old_mode"] = Kind.DELETE, text.rsplit(b" ", 1)[1].decode("ascii", "replace")
            elif text.startswith((b"old mode ", b"new mode ")):
                values[text[:3].decode() + "_mode"] = text.rsplit(b" ", 1)[1].decode("ascii", "replace")
            elif text.startswith(b"rename from "):
                kind, old_path = Kind.RENAME, _unquote(text[len(b"rename from ") :])
            elif text.startswith(b"copy from "):
                kind, old_path = Kind.COPY, _unquote(text[len(b"copy from ") :])
            elif text.startswith((b"rename to ", b"copy to ")):
                path = _unquote(text.split(b" to ", 1)[1])
            elif match := re.fullmatch(rb"index ([0-9a-f]{7,64})\.\.([0-9a-f]{7,64})(?: ([0-7]{6}))?", text):
                values["old_blob"], values["new_blob"] = match[1].decode(), match[2].decode()
                if match[3]:
                    values.setdefault("old_mode", match[3].decode())
                    values.setdefault("new_mode", match[3].decode())
            elif text.startswith(b"--- "):
                if text != b"--- /dev/null":
                    old_path = _strip(_unquote(text[4:].split(b"\t")[0]))
            elif text.startswith(b"+++ "):
                if text != b"+++ /dev/null":
                    path = _strip(_unquote(text[4:].split(b"\t")[0]))
            elif not text.startswith((b"similarity index ", b"dissimilarity index ")):
                raise self._error("this line is no part of a git-style difference")
            self._next()
        if kind is Kind.DELETE:
            path = old_path
        elif kind is Kind.ADD:
            old_path = path
        return FileChange(path, old_path, kind, line, start, self.offset, binary=binary, hunks=tuple(hunks), **values)

    def _paths(self, rest: bytes) -> tuple[str, str]:
        rest = rest.rstrip(b"\r")
        if rest.startswith(b'"'):
            end = 1
            while end < len(rest) and rest[end : end + 1] != b'"':
                end += 2 if rest[end : end + 1] == b"\\" else 1
            first, second = rest[: end + 1], rest[end + 2 :]
        else:
            middle = len(rest) // 2
            first, second = (
                (rest[:middle], rest[middle + 1 :])
                if rest[middle : middle + 1] == b" " and rest[:middle][2:] == rest[middle + 1 :][2:]
                else rest.split(b" b/", 1)[0:1] + [b"b/" + rest.split(b" b/", 1)[-1]]
            )
        if not first or not second:
            raise self._error("the names of the changed file cannot be told apart")
        return _strip(_unquote(first)), _strip(_unquote(second))

    def _hunk(self) -> Hunk:
        line = self.first_line + self.at
        match = _HUNK.match(self.lines[self.at])
        if match is None:
            raise self._error("this is no header of a hunk")
        self._next()
        old_start, new_start = int(match[1]), int(match[3])
        old_count = int(match[2]) if match[2] is not None else 1
        new_count = int(match[4]) if match[4] is not None else 1
        old_left, new_left = old_count, new_count
        kept: list[bytes] = []
        short: list[int] = []
        while old_left > 0 or new_left > 0:
            if self.at >= len(self.lines):
                raise self._error("the hunk is shorter than its header says")
            text = self.lines[self.at]
            if text in (b"", b"\r"):
                short.append(self.first_line + self.at)
                text = b" " + text
            sign = text[:1]
            if sign == b"\\":
                pass
            elif sign == b" ":
                old_left, new_left = old_left - 1, new_left - 1
            elif sign == b"-":
                old_left -= 1
            elif sign == b"+":
                new_left -= 1
            else:
                raise self._error("a line of a hunk starts with neither space, + nor -")
            if old_left < 0 or new_left < 0:
                raise self._error("the hunk is longer than its header says")
            kept.append(text)
            self._next()
        while self.at < len(self.lines) and self.lines[self.at].startswith(b"\\"):
            kept.append(self._next())
        return Hunk(line, old_start, old_count, new_start, new_count, tuple(kept), tuple(short))


def _strip(path: str) -> str:
    return path[2:] if path.startswith(("a/", "b/")) else path


_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v", b'"': b'"', b"\\": b"\\"}


def _unquote(name: bytes) -> str:
    """A path as git writes it; quoted like a C string when it holds special characters."""
    if len(name) >= 2 and name.startswith(b'"') and name.endswith(b'"'):
        name = re.sub(
            rb"\\([0-7]{3}|.)",
            lambda match: bytes([int(match[1], 8) & 255]) if len(match[1]) == 3 else _ESCAPES.get(match[1], match[1]),
            name[1:-1],
        )
    return name.decode("utf-8", "surrogateescape")


def _quote(name: str) -> bytes:
    data = name.encode("utf-8", "surrogateescape")
    if not any(byte < 32 or byte in b'"\\' or byte == 127 for byte in data):
        return data
    return b'"' + b"".join(bytes([byte]) if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte for byte in data) + b'"'
