"""``patches lint``: the rules of patches/README.md, as data with a small function each.

A rule looks at one patch or at the folder and yields findings: file, line, what is wrong. What to do about it is part of the rule.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from . import patchfile
from .cache import Cache
from .errors import DataError
from .patchfile import Hunk, Kind, PatchFile
from .series.base import BaseTree, import_base
from .series.chain import OnAbsorbed, build, scratch_repository
from .series.engine import Outcome
from .series.folder import LIST, SeriesFolder
from .series.workspace import PLACEHOLDER

CONTEXT = 1
"""Lines of context a hunk has on either side at most."""

SUBJECT_LENGTH = 80
HOOK_LINES = 3
"""A hunk in an upstream file that adds more lines than this is no hook."""

OWN = "opencoti"
"""New code lives in folders called this, or in files with it in their name."""


class Severity(Enum):
    """Whether a finding ends the command with an error."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Rule:
    """A rule: its id, how grave it is, what it asks for, and what to do when it is broken."""

    id: str
    severity: Severity
    asks: str
    advice: str


@dataclass(frozen=True)
class Finding:
    """A broken rule. ``line`` is 1-based in the file, 0 where no line can be named."""

    rule: Rule
    file: str
    line: int
    what: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rule": self.rule.id,
            "severity": self.rule.severity.value,
            "file": self.file,
            "line": self.line,
            "what": self.what,
            "advice": self.rule.advice,
        }


def _rule(name: str, severity: Severity, asks: str, advice: str) -> Rule:
    rule = Rule(name, severity, asks, advice)
    RULES[name] = rule
    return rule


RULES: dict[str, Rule] = {}

_E, _W = Severity.ERROR, Severity.WARNING
UNREADABLE = _rule("unreadable", _E, "every patch can be read", "restore the file and change it with 'invoke patches edit' and 'refresh'")
UNLISTED = _rule("unlisted", _E, "every patch file is listed in series.yaml", "invoke patches lint --fix, or remove the file")
MISSING = _rule("missing", _E, "every listed patch is there", "restore the file, or invoke patches lint --fix")
NUMBER = _rule("duplicate-number", _E, "no two patches share a number", "rename one of the files and run invoke patches lint --fix")
NAME = _rule("file-name", _E, "the file is called NNNN-subject-in-small-letters.patch", "invoke patches lint --fix")
CR_HEADER = _rule("cr-header", _E, "no carriage return in the message and in the lines between hunks", "convert the whole file to LF line ends, e.g. sed -i 's/\\r$//' FILE")
CR_CODE = _rule("cr-code", _E, "no carriage return in added lines", "write the code with LF line ends, then invoke patches refresh")
SHORT_CONTEXT = _rule("empty-context", _E, "an empty context line has its leading space", "invoke patches apply, then invoke patches export --force")
BINARY = _rule("binary", _E, "no binary differences", "leave the file out, or generate it in the build")
EMPTY = _rule("empty", _E, "a patch changes something", "edit and invoke patches refresh, or invoke patches drop NUMBER")
ABSORBED = _rule("absorbed", _E, "the tree does not have the change already", "invoke patches drop NUMBER")
SPACE_ONLY = _rule("white-space-only", _E, "no hunk that changes white space alone", "take the hunk out: invoke patches edit NUMBER, then refresh")
TRAILING = _rule("trailing-space", _E, "no added line ends in white space", "strip it: invoke patches edit NUMBER, then refresh")
SECTION = _rule(
    "message-section", _E, "the message has every section, with text", "write it at the top of the patch file, then invoke patches refresh"
)
SUBJECT = _rule(
    "message-subject",
    _E,
    f"the subject reads 'area: what it does', at most {SUBJECT_LENGTH} characters",
    "word it at the top of the patch file, then invoke patches apply and export",
)
MESSAGE_SPACE = _rule("message-space", _E, "no line of the message ends in white space", "strip it at the top of the patch file")
CONTEXT_LINES = _rule("context", _E, f"at most {CONTEXT} line of context", "invoke patches apply, then invoke patches export --force")
OUTSIDE = _rule("path-outside", _E, "every path lies in the tree", "take the file out of the patch")
FORM = _rule(
    "form",
    _E,
    "header and index lines as exported: fixed author and date, full object ids, no renames",
    "invoke patches apply, then invoke patches export --force",
)
PLACE = _rule(
    "new-code-place", _W, f"new files lie in folders called {OWN} or have it in their name", f"move the code to an {OWN} folder near its users"
)
HOOK = _rule(
    "large-hook", _W, f"a hunk in an upstream file adds at most {HOOK_LINES} lines", "move the code to a file of ours and leave a one-line hook"
)

LOADING = (UNREADABLE, UNLISTED, MISSING, NUMBER, NAME)
"""Rules without which a series cannot be loaded."""

Check = Callable[[PatchFile], Iterator[Finding]]


def _of(rule: Rule, patch: PatchFile, line: int, what: str) -> Finding:
    return Finding(rule, patch.name, line, what)


def check_name(patch: PatchFile) -> Iterator[Finding]:
    """The slug is the subject's."""
    wanted = f"{patch.number:04d}-{patchfile.slug_of(patch.title)}.patch"
    if patch.number == 0:
        yield _of(NAME, patch, 0, "the number 0000 stands for the base")
    if patch.name != wanted:
        yield _of(NAME, patch, 0, f"should be called {wanted}")


def check_carriage_returns(patch: PatchFile) -> Iterator[Finding]:
    """CR in the message or in the lines that steer the reader of a diff."""
    hunk_lines = {number for change in patch.files for hunk in change.hunks for number in range(hunk.line + 1, hunk.line + 1 + len(hunk.lines))}
    for number, line in enumerate(patch.data.split(b"\n"), 1):
        if b"\r" in line and number not in hunk_lines:
            # The file as a whole was converted; that its added lines have one too says nothing about the code.
            yield _of(CR_HEADER, patch, number, "has a carriage return")
            return
    for change in patch.files:
        for hunk in change.hunks:
            for offset, line in enumerate(hunk.lines, 1):
                if line.startswith(b"+") and b"\r" in line:
                    yield _of(CR_CODE, patch, hunk.line + offset, f"{change.path}: an added line has a carriage return")
                    return


def check_short_context(patch: PatchFile) -> Iterator[Finding]:
    """Editors that strip trailing space break a patch without a trace on LF checkouts."""
    for change in patch.files:
        for hunk in change.hunks:
            for number in hunk.short_lines:
                yield _of(SHORT_CONTEXT, patch, number, f"{change.path}: a context line has length 0")


def check_content(patch: PatchFile) -> Iterator[Finding]:
    """Something in it, and nothing binary."""
    if not patch.files:
        yield _of(EMPTY, patch, 0, "holds no differences")
    for change in patch.files:
        if change.binary:
            yield _of(BINARY, patch, change.line, f"{change.path} is binary")


def check_white_space(patch: PatchFile) -> Iterator[Finding]:
    """Hunks that only move white space, and white space at line ends."""
    for change in patch.files:
        for hunk in change.hunks:
            if change.kind is Kind.MODIFY and _squeezed(hunk, b"-") == _squeezed(hunk, b"+"):
                yield _of(SPACE_ONLY, patch, hunk.line, f"{change.path}: the hunk changes white space only")
            for offset, line in enumerate(hunk.lines, 1):
                if line.startswith(b"+") and line[1:].rstrip(b"\r") != line[1:].rstrip(b"\r").rstrip(b" \t\f\v"):
                    yield _of(TRAILING, patch, hunk.line + offset, f"{change.path}: an added line ends in white space")


def _squeezed(hunk: Hunk, sign: bytes) -> bytes:
    return b"".join(b"".join(line[1:].split()) for line in hunk.lines if line.startswith(sign))


def check_message(patch: PatchFile) -> Iterator[Finding]:
    """Subject and sections."""
    if not patch.message.area:
        yield _of(SUBJECT, patch, 4, f"'{patch.title}' names no area before a colon")
    elif not patch.title.partition(":")[2].strip():
        yield _of(SUBJECT, patch, 4, "says nothing after its area")
    if len(patch.title) > SUBJECT_LENGTH:
        yield _of(SUBJECT, patch, 4, f"is {len(patch.title)} characters long")
    if re.match(r"\d{4}[:\s]", patch.title):
        yield _of(SUBJECT, patch, 4, "starts with a number; the number belongs to the file's name alone")
    sections = patch.sections
    for name in patchfile.SECTIONS:
        if name not in sections:
            yield _of(SECTION, patch, 0, f"has no section '{name}:'")
        elif not sections[name]:
            yield _of(SECTION, patch, 0, f"section '{name}:' is empty")
        elif sections[name].startswith(PLACEHOLDER.partition("{")[0]):
            yield _of(SECTION, patch, 0, f"section '{name}:' is not written yet")
    for number, line in enumerate(patch.data[: patch.diff_start].split(b"\n"), 1):
        if line.rstrip(b"\r") != line.rstrip():
            yield _of(MESSAGE_SPACE, patch, number, "ends in white space")


def check_context(patch: PatchFile) -> Iterator[Finding]:
    """No more unchanged lines around and between changes than -U1 leaves."""
    for change in patch.files:
        for hunk in change.hunks:
            if _context(hunk):
                yield _of(CONTEXT_LINES, patch, hunk.line, f"{change.path}: the hunk has more than {CONTEXT} line of context")


def _context(hunk: Hunk) -> bool:
    runs: list[int] = []
    current = 0
    for line in hunk.lines:
        if line.startswith(b" "):
            current += 1
        elif not line.startswith(b"\\"):
            runs.append(current)
            current = 0
    if not runs:
        return True
    first, *between = runs
    return first > CONTEXT or current > CONTEXT or any(run > 2 * CONTEXT for run in between)


def check_paths(patch: PatchFile) -> Iterator[Finding]:
    """Paths that climb out, start at the root, or reach into git's own folder."""
    for change in patch.files:
        for path in dict.fromkeys((change.old_path, change.path)):
            if problem := patchfile.path_problem(path):
                yield _of(OUTSIDE, patch, change.line, f"{path}: {problem}")


def check_form(patch: PatchFile) -> Iterator[Finding]:
    """What an export writes, and nothing else."""
    if not patch.data.startswith(patchfile.HEADER.encode()):
        yield _of(FORM, patch, 1, "does not start with the header of an export")
    for change in patch.files:
        if change.kind in (Kind.RENAME, Kind.COPY):
            yield _of(FORM, patch, change.line, f"{change.path}: {change.kind.value}s a file; an export removes and adds")
        for blob in (change.old_blob, change.new_blob):
            if blob is not None and len(blob) != 40:
                yield _of(FORM, patch, change.line, f"{change.path}: the index line has a shortened object id")
                break


def check_place(patch: PatchFile) -> Iterator[Finding]:
    """New code in files of ours, small hooks in upstream's."""
    for change in patch.files:
        if change.kind is Kind.ADD and not is_own(change.path):
            yield _of(PLACE, patch, change.line, f"{change.path} is a new file outside the {OWN} folders")
        if change.kind is Kind.MODIFY and not is_own(change.path):
            for hunk in change.hunks:
                if hunk.added > HOOK_LINES:
                    yield _of(HOOK, patch, hunk.line, f"{change.path}: the hunk adds {hunk.added} lines to an upstream file")


def is_own(path: str) -> bool:
    """Whether a file is ours by its place or name."""
    pure = PurePosixPath(path)
    return OWN in pure.parent.parts or OWN in pure.name


CHECKS: tuple[Check, ...] = (
    check_name,
    check_carriage_returns,
    check_short_context,
    check_content,
    check_white_space,
    check_message,
    check_context,
    check_paths,
    check_form,
    check_place,
)


def lint_patch(patch: PatchFile) -> list[Finding]:
    """Every finding in one patch."""
    return [finding for check in CHECKS for finding in check(patch)]


def lint(folder: SeriesFolder) -> list[Finding]:
    """Every finding in the folder that needs no base tree."""
    findings: list[Finding] = []
    names = folder.names()
    try:
        listing = folder.listing()
    except DataError as error:
        findings.append(Finding(UNREADABLE, LIST, 0, error.message))
        listing = None
    else:
        if listing is None and names:
            findings.append(Finding(UNLISTED, LIST, 0, "is not there"))
    if listing is not None:
        findings += [Finding(UNLISTED, name, 0, f"is not in {LIST}") for name in names if name not in listing.patches]
        findings += [Finding(MISSING, name, 0, f"is in {LIST}, but not there") for name in dict.fromkeys(listing.patches) if name not in names]
        for name, count in Counter(listing.patches).items():
            if count > 1:
                findings.append(Finding(NUMBER, LIST, 0, f"lists {name} {count} times"))
    by_number: dict[int, str] = {}
    for name in names:
        try:
            patch = patchfile.read(folder.path / name)
        except DataError as error:
            kind = NAME if not _has_name(name) else UNREADABLE
            findings.append(Finding(kind, name, _line(error.message), error.message))
            continue
        if other := by_number.get(patch.number):
            findings.append(Finding(NUMBER, name, 0, f"has the number of {other}"))
        by_number.setdefault(patch.number, name)
        findings += lint_patch(patch)
    return findings


def _has_name(name: str) -> bool:
    try:
        patchfile.split_name(name)
    except DataError:
        return False
    return True


def _line(message: str) -> int:
    match = re.search(r", line (\d+):", message)
    return int(match[1]) if match else 0


def absorbed(folder: SeriesFolder, base: BaseTree, cache: Cache) -> list[Finding]:
    """Patches that the tree below them has already; needs the base tree and a series that can be loaded."""
    series = folder.load()
    with scratch_repository(import_base(folder.name, base, cache)) as git:
        chain = build(git, "refs/heads/base", series.patches, merge=True, absorbed=OnAbsorbed.KEEP)
    return [
        Finding(ABSORBED, link.patch.name, 0, "changes nothing: the tree has it already") for link in chain.links if link.outcome is Outcome.ABSORBED
    ]


def fix(folder: SeriesFolder) -> list[str]:
    """Give every readable patch the name its subject asks for and list the files anew; returns what was done."""
    done: list[str] = []
    taken: set[int] = set()
    for name in folder.names():
        try:
            patch = patchfile.read(folder.path / name)
        except DataError:
            continue
        wanted = f"{patch.number:04d}-{patchfile.slug_of(patch.title)}.patch"
        if name != wanted and patch.number not in taken and not (folder.path / wanted).exists():
            Path.replace(folder.path / name, folder.path / wanted)
            done.append(f"{name} is called {wanted} now")
        taken.add(patch.number)
    before = _names_listed(folder)
    if before != folder.names():
        try:
            listing = folder.listing()
        except DataError:
            listing = None
        folder.write_list(base_version=listing.base_version if listing else "", base_tree=listing.base_tree if listing else "", tree="")
        done.append(f"{LIST} lists {len(folder.names())} patches; 'invoke patches export' records their tree")
    return done


def _names_listed(folder: SeriesFolder) -> Sequence[str] | None:
    try:
        listing = folder.listing()
    except DataError:
        return None
    return list(listing.patches) if listing else None
