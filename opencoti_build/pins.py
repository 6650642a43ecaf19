"""Pin files: which file of each component is meant, by path, size and sha256. ``pin/PIN_FORMAT.md`` is the specification.

``pin/COMPONENT.txt`` lists the files of one component, ``pin/index.txt`` the current files of all. A row is two lines: a
``#! file`` directive and a line that ``sha256sum -c`` checks, which takes the first for a comment. What a reader does not
know (comments, directives, rows of a later version) is kept: a file that is read and rendered again is the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from . import files
from .errors import ManifestError

VERSION = 1
FOLDER = "pin"
SUFFIX = ".txt"
INDEX = "index"
"""The name in the first line of ``pin/index.txt``; no component may have it."""

SIZE_LIMIT = 1 << 20
"""Bytes a pin file may have."""
LINE_LIMIT = 4096
"""Bytes a line may have, its end included."""
PATH_LIMIT = 1024
NAME_LIMIT = 64
_MAX_SIZE = (1 << 63) - 1

_DIRECTIVE = re.compile(r"#! ([a-z][a-z0-9-]*)(?: (.*))?")
_SUM = re.compile(r"([0-9a-f]{64})  ([\x20-\x7e]+)")
_ROW = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,30}(?:[ \t].*)?")
"""What a row of a later version may look like. A damaged sum never does: its first word is longer, or begins with a digit."""
_ATTRIBUTE = re.compile(r"([a-z][a-z0-9_-]*)=([\x21-\x7e]+)")
_ESCAPE = re.compile(r"%[0-9A-F]{2}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_BUILD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True)
class File:
    """A row. ``path`` is from the root of the release repository, ``size`` in bytes; ``component`` is the one whose file it is.

    ``entry`` is the name under which a single file carries the same bytes, "" for none; ``extra`` are attributes that this
    version gives no meaning to.
    """

    component: str
    platform: str
    path: str
    sha256: str
    size: int
    build: str
    entry: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The published name, without folders."""
        return PurePosixPath(self.path).name

    def lines(self, *, index: bool = False) -> tuple[str, str]:
        """The two lines, without their ends; in the index the component is named too."""
        own = [("component", self.component)] if index else []
        own += [("size", str(self.size)), ("build", self.build)] + ([("entry", self.entry)] if self.entry else [])
        return f"#! file {self.platform}{_attributes_text(own, self.extra)}", f"{self.sha256}  {self.path}"

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        row = {"component": self.component, "platform": self.platform, "path": self.path, "sha256": self.sha256, "size": self.size, "build": self.build}
        return row | ({"entry": self.entry} if self.entry else {}) | ({"attributes": dict(sorted(self.extra.items()))} if self.extra else {})


@dataclass(frozen=True)
class Sidecar:
    """A file that is loaded by its name from beside the engine. ``size`` is None where the row does not tell it."""

    component: str
    name: str
    sha256: str
    size: int | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """The line, without its end."""
        own = [("size", str(self.size))] if self.size is not None else []
        return f"#! sidecar {escape(self.name)} {self.sha256}{_attributes_text(own, self.extra)}"

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        row: dict[str, object] = {"component": self.component, "name": self.name, "sha256": self.sha256}
        return row | ({"size": self.size} if self.size is not None else {}) | ({"attributes": dict(sorted(self.extra.items()))} if self.extra else {})


Row = File | Sidecar


@dataclass(frozen=True)
class Part:
    """A piece of a pin file as it stands there, line ends included: a row (``item``), or something that is kept as it is.

    ``unknown`` marks a directive or a row that this version does not know; a comment is neither.
    """

    text: str
    item: Row | None = None
    unknown: bool = False


@dataclass(frozen=True)
class PinFile:
    """A pin file. ``component`` is the name in its first line, ``index`` for the index."""

    component: str
    parts: tuple[Part, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """Its rows, in their order."""
        return tuple(part.item for part in self.parts if isinstance(part.item, File))

    @property
    def sidecars(self) -> tuple[Sidecar, ...]:
        """Its sidecar rows, in their order."""
        return tuple(part.item for part in self.parts if isinstance(part.item, Sidecar))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Files and sidecars, in their order."""
        return tuple(part.item for part in self.parts if part.item is not None)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Directives and rows of a later version, without line ends."""
        return tuple(part.text.rstrip("\r\n") for part in self.parts if part.unknown)

    def sha256s(self) -> frozenset[str]:
        """All sha256 that it vouches for."""
        return frozenset(row.sha256 for row in self.rows)

    def render(self) -> str:
        """The text: what was read, or what ``make`` and ``edited`` wrote."""
        return "".join(part.text for part in self.parts)

    def edited(self, rows: Iterable[Row]) -> PinFile:
        """With exactly these rows; comments and unknown lines stay.

        A row that is there already keeps its place and its bytes, one with a known path or name is rewritten in place, a new
        one goes before the first that sorts behind it. Raises ManifestError for rows that no pin file can hold.
        """
        end = "\r\n" if self.parts[0].text.endswith("\r\n") else "\n"
        rows = tuple(rows)
        wanted = {_key(row): row for row in rows}
        parts: list[Part] = []
        for part in self.parts:
            if part.item is None:
                parts.append(part)
            elif (row := wanted.pop(_key(part.item), None)) is not None:
                parts.append(part if row == part.item else self._part(row, end))
        for key, row in sorted(wanted.items()):
            place = next((at for at, part in enumerate(parts) if part.item is not None and _key(part.item) > key), None)
            last = max((at for at, part in enumerate(parts) if part.item is not None), default=len(parts) - 1)
            parts.insert(last + 1 if place is None else place, self._part(row, end))
        made = parse("".join(part.text for part in parts).encode("utf-8"), f"{self.component}{SUFFIX}")
        if sorted(made.rows, key=_key) != sorted(rows, key=_key):
            raise ManifestError(f"{self.component}{SUFFIX} cannot hold these rows: a path or name comes twice, or a value would be read as another.")
        return made

    def _part(self, row: Row, end: str) -> Part:
        lines = row.lines(index=self.component == INDEX) if isinstance(row, File) else (row.line(),)
        return Part("".join(line + end for line in lines), row)


def _key(row: Row) -> tuple[int, str]:
    """Files before sidecars, each by path or name in the order of their bytes."""
    return (0, row.path) if isinstance(row, File) else (1, row.name)


def make(component: str, rows: Iterable[Row], comments: Sequence[str] = ()) -> PinFile:
    """A new pin file in canonical form: first line, comments, files by path, sidecars by name. The same rows give the same bytes.

    Raises ManifestError for rows or comments that no pin file can hold.
    """
    bare = parse(f"#! pin {VERSION} {component}\n".encode("utf-8", "surrogatepass"), f"{component}{SUFFIX}")
    lines = [f"# {text}\n" if text else "#\n" for comment in comments for text in comment.split("\n")]
    return PinFile(component, bare.parts + tuple(Part(line) for line in lines)).edited(rows)


def escape(text: str) -> str:
    """``text`` as a value of a directive: every byte of UTF-8 that is no visible ASCII, and ``%``, becomes ``%XX``."""
    return quote(text, safe="!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")


def _attributes_text(own: Iterable[tuple[str, str]], extra: Mapping[str, str]) -> str:
    return "".join(f" {key}={escape(value)}" for key, value in (*own, *sorted(extra.items())))


# Reading


class _Bad(Exception):
    """What is wrong with the line at hand."""


def path_problem(path: str) -> str | None:
    """Why ``path`` cannot stand in a pin file, or None: it must name one file on every system, below the folder it is looked for in."""
    if not 0 < len(path) <= PATH_LIMIT:
        return f"is empty or longer than {PATH_LIMIT} bytes"
    if any(not " " <= letter <= "~" or letter in '\\:*?"<>|' for letter in path):
        return "holds a character other than visible ASCII and spaces, or one of \\ : * ? \" < > |"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is absolute, or has an empty, '.' or '..' part"
    if any(part.endswith((" ", ".")) or part.startswith(" ") for part in parts):
        return "has a part that begins with a space or ends with a space or a dot"
    return None


def _unescape(text: str) -> str:
    if text.count("%") != len(_ESCAPE.findall(text)):
        raise _Bad("a % is not followed by two hex digits (0-9, A-F)")
    raw = _ESCAPE.sub(lambda found: chr(int(found[0][1:], 16)), text).encode("latin-1")
    try:
        value = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Bad("an escaped value is not UTF-8") from error
    if _CONTROL.search(value) or "\t" in value:
        raise _Bad("an escaped value holds a control character")
    return value


def _name(text: str, what: str) -> str:
    if not _NAME.fullmatch(text) or len(text) > NAME_LIMIT:
        raise _Bad(f"{text[:80]!r} cannot be the name of a {what}: a-z, 0-9, - and _, at most {NAME_LIMIT}")
    return text


def _attributes(words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        match = _ATTRIBUTE.fullmatch(word)
        if match is None:
            raise _Bad(f"{word[:80]!r} is not of the form key=value")
        if match[1] in values:
            raise _Bad(f"the attribute {match[1]} comes twice")
        values[match[1]] = _unescape(match[2])
    return values


def _size(text: str) -> int:
    if not _SIZE.fullmatch(text) or int(text) > _MAX_SIZE:
        raise _Bad(f"size is {text[:40]!r}, not a number of bytes")
    return int(text)


def _head(line: str) -> str:
    words = line.split(" ")
    if words[:2] != ["#!", "pin"]:
        raise _Bad(f"a pin file begins with '#! pin {VERSION} COMPONENT'")
    if len(words) < 4 or not _SIZE.fullmatch(words[2]):
        raise _Bad("the first line lacks its version or the component's name")
    if int(words[2]) != VERSION:
        raise _Bad(f"it is of version {words[2]}; this toolkit reads {VERSION}, so use the toolkit of the release")
    _attributes(words[4:])
    return _name(words[3], "component")


def _file(words: Sequence[str], sum_line: str | None, component: str) -> File:
    match = _SUM.fullmatch(sum_line or "")
    if match is None:
        raise _Bad("a '#! file' line is not followed by '64 hex digits, two spaces, a path'")
    if problem := path_problem(match[2]):
        raise _Bad(f"the path {match[2][:80]!r} {problem}")
    if not words:
        raise _Bad("'#! file' lacks its platform")
    platform, values = _name(words[0], "platform"), _attributes(words[1:])
    for key in ("size", "build", *(("component",) if component == INDEX else ())):
        if key not in values:
            raise _Bad(f"'#! file' lacks {key}=")
    owner = _name(values.pop("component", component), "component")
    if owner != component and component != INDEX or owner == INDEX:
        raise _Bad(f"a row of {owner} cannot stand here")
    size, build, entry = _size(values.pop("size")), values.pop("build"), values.pop("entry", "")
    if not _BUILD.fullmatch(build) or len(build) > NAME_LIMIT:
        raise _Bad(f"build is {build[:80]!r}: letters, digits, . _ + -, at most {NAME_LIMIT}")
    if entry and (problem := path_problem(entry)):
        raise _Bad(f"the entry {entry[:80]!r} {problem}")
    return File(owner, platform, match[2], match[1], size, build, entry, values)


def _sidecar(words: Sequence[str], component: str) -> Sidecar:
    if component == INDEX:
        raise _Bad("a sidecar belongs into the pin file of its component, not into the index")
    if len(words) < 2 or not _SHA256.fullmatch(words[1]):
        raise _Bad("a sidecar row is '#! sidecar NAME SHA256', the sha256 in 64 hex digits (0-9, a-f)")
    name, values = _unescape(words[0]), _attributes(words[2:])
    if problem := path_problem(name) or ("is not a mere file name" if "/" in name else None):
        raise _Bad(f"the sidecar's name {name[:80]!r} {problem}")
    size = _size(values.pop("size")) if "size" in values else None
    return Sidecar(component, name, words[1], size, values)


def parse(data: bytes, where: str = "pin file") -> PinFile:
    """A pin file from its bytes. Raises ManifestError, naming ``where`` and the line, for anything else; never another exception."""
    if len(data) > SIZE_LIMIT:
        raise ManifestError(f"{where} is larger than {SIZE_LIMIT} bytes: that is no pin file.")
    number = data.count(b"\n") + 1
    try:
        lines = _lines(data)
        bodies = [line.removesuffix("\n").removesuffix("\r") for line in lines]
        for number, (line, body) in enumerate(zip(lines, bodies, strict=True), start=1):
            if len(line.encode("utf-8")) > LINE_LIMIT:
                raise _Bad(f"it is longer than {LINE_LIMIT} bytes")
            if _CONTROL.search(body):
                raise _Bad("it holds a control character")
        number = 1
        component = _head(bodies[0] if bodies else "")
        parts, seen = [Part(lines[0])], set[str]()
        while number < len(lines):
            body, following = bodies[number], bodies[number + 1] if number + 1 < len(lines) else None
            number += 1
            part = _part(body, following, component)
            taken = 2 if isinstance(part.item, File) else 1
            if part.item is not None:
                _, key = _key(part.item)
                if key.lower() in seen:
                    raise _Bad(f"{key!r} comes twice")
                seen.add(key.lower())
            parts.append(Part("".join(lines[number - 1 : number - 1 + taken]), part.item, part.unknown))
            number += taken - 1
    except _Bad as error:
        raise ManifestError(f"{where} line {number}: {error}.") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{where} is not UTF-8 text (byte {error.start}).") from error
    return PinFile(component, tuple(parts))


def _lines(data: bytes) -> list[str]:
    """The lines, ends included. Only LF ends a line (``str.splitlines`` knows more ends than this format)."""
    text = data.decode("utf-8")
    lines = [line + "\n" for line in text.split("\n")]
    if lines.pop() != "\n":
        raise _Bad("the last line has no end: the file was cut off")
    return lines


def _part(body: str, following: str | None, component: str) -> Part:
    """What begins with this line; ``text`` is filled in by the caller."""
    if body.startswith("#!"):
        match = _DIRECTIVE.fullmatch(body)
        if match is None:
            raise _Bad("a directive is '#!', one space, a name in small letters, and its words")
        words = match[2].split(" ") if match[2] is not None else []
        if match[1] == "file":
            return Part("", _file(words, following, component))
        if match[1] == "sidecar":
            return Part("", _sidecar(words, component))
        if match[1] == "pin":
            raise _Bad("'#! pin' comes twice")
        return Part("", unknown=True)
    if not body or body.startswith("#"):
        return Part("")
    if _SUM.fullmatch(body):
        raise _Bad("a sum without a '#! file' line directly before it")
    if not _ROW.fullmatch(body):
        raise _Bad("it is neither a row nor a comment")
    return Part("", unknown=True)


def parse_file(path: Path) -> PinFile:
    """The pin file at ``path``, whatever its name is (a copy, ``cuda.txt.old``). Raises ManifestError."""
    return parse(files.read_limited(path, SIZE_LIMIT, "pin file", ManifestError), path.name)


def read(path: Path) -> PinFile:
    """The pin file at ``path``, whose first line must name it. Raises ManifestError."""
    made = parse_file(path)
    if path.name != made.component + SUFFIX:
        raise ManifestError(f"{path} says that it is {made.component}{SUFFIX}: give it that name, or put the right file there.")
    return made


def write(path: Path, pin: PinFile) -> None:
    """Write atomically; an equal file is left alone. Raises DiskError."""
    files.write_text(path, pin.render())


# A folder


@dataclass(frozen=True)
class Pins:
    """A folder of pin files. ``index`` is None where there is none; ``components`` are by name."""

    folder: Path
    components: Mapping[str, PinFile]
    index: PinFile | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows of all components, by component."""
        return tuple(row for _, pin in sorted(self.components.items()) for row in pin.rows)

    @property
    def current(self) -> tuple[File, ...]:
        """The rows of the index; without one, all files of all components."""
        return self.index.files if self.index is not None else tuple(row for row in self.rows if isinstance(row, File))

    def problems(self) -> tuple[str, ...]:
        """Where the index contradicts the components: sentences without a full stop."""
        found = []
        for row in self.index.files if self.index is not None else ():
            pin = self.components.get(row.component)
            here = next((item for item in pin.files if item.path == row.path), None) if pin is not None else None
            if pin is None:
                found.append(f"{INDEX}{SUFFIX} names {row.path}, but there is no {row.component}{SUFFIX}")
            elif here is None:
                found.append(f"{INDEX}{SUFFIX} names {row.path}, which {row.component}{SUFFIX} does not list")
            elif (here.sha256, here.size, here.platform, here.build) != (row.sha256, row.size, row.platform, row.build):
                found.append(f"{INDEX}{SUFFIX} and {row.component}{SUFFIX} differ about {row.path}")
        return tuple(found)


def read_folder(folder: Path) -> Pins:
    """All pin files (``*.txt``) of a folder. Raises ManifestError when one cannot be read, and when there is none."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX) and not path.name.startswith("."))
    except OSError as error:
        raise ManifestError(f"Cannot read {folder}: {error.strerror or error}.") from error
    if not paths:
        raise ManifestError(f"There are no pin files (*{SUFFIX}) in {folder}: name the folder {FOLDER}/ of a release.")
    made = {path.name.removesuffix(SUFFIX): read(path) for path in paths}
    index = made.pop(INDEX, None)
    return Pins(folder, made, index)
