"""What a pin says: the data of one ``vendors/NAME.yaml`` (vendors/README.md describes the format).

Reading checks everything that can be checked without the network, and refuses with the field's name what is not as described.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from .errors import DataError, UsageError
from .schema import Node, read_yaml

SCHEMA = 1

ANY = "any"
"""The platform of a package that is the same everywhere."""

PLATFORMS = ("linux-x86_64", "linux-aarch64", "windows-x86_64", "windows-aarch64", "macos-x86_64", "macos-aarch64")

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.+_-]*[A-Za-z0-9])?")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*")
_LICENCE_WORD = re.compile(r"\(|\)|[A-Za-z0-9.+:-]+")


class Kind(Enum):
    """What a pin is; the unpacked folder lies in the cache under the kind's ``folder``."""

    SOURCE = "source"
    TOOLCHAIN = "toolchain"
    ARCHIVE = "archive"

    @property
    def folder(self) -> str:
        """The kind of result it becomes in the cache."""
        return {"source": "sources", "toolchain": "toolchains", "archive": "archives"}[self.value]


class Role(Enum):
    """When a pin is needed: by every build, as a reference to compare with, by tests, or only when asked for by name."""

    BUILD = "build"
    REFERENCE = "reference"
    TEST = "test"
    OPTIONAL = "optional"


@dataclass(frozen=True)
class Archive:
    """One downloadable file: its name, its size in bytes (None as long as nobody could fetch it) and its sha256 (64 hex digits)."""

    file: str
    size: int | None
    sha256: str


@dataclass(frozen=True)
class GitSource:
    """A git repository and the tag to take."""

    url: str
    tag: str

    def __str__(self) -> str:
        return f"git {self.url} {self.tag}"


@dataclass(frozen=True)
class PypiSource:
    """A file of a PyPI project: an sdist or a wheel. ``folder`` is the part of the archive that is meant ("" for all)."""

    project: str
    release: str
    archive: Archive
    folder: str = ""

    def __str__(self) -> str:
        return f"PyPI {self.project}=={self.release} ({self.archive.file})"


@dataclass(frozen=True)
class UrlSource:
    """A file at an address. ``folder`` is the part of the archive that is meant ("" for all)."""

    url: str
    archive: Archive
    folder: str = ""

    def __str__(self) -> str:
        return self.url


Source = GitSource | PypiSource | UrlSource


@dataclass(frozen=True)
class Package:
    """What one platform gets: the folder with the git tree id ``tree``, from any of ``sources`` (tried in order).

    ``files`` and ``unpacked`` (bytes) are exact and bound the unpacking; all three are None as long as nobody could fetch it.
    ``tools`` names programs inside: name -> path; they become executable.
    """

    sources: tuple[Source, ...]
    tree: str | None = None
    files: int | None = None
    unpacked: int | None = None
    tools: Mapping[str, str] = field(default_factory=dict)

    @property
    def archives(self) -> tuple[Archive, ...]:
        """The distinct files its sources offer, in order."""
        found = {source.archive.sha256: source.archive for source in self.sources if not isinstance(source, GitSource)}
        return tuple(found.values())


@dataclass(frozen=True)
class LicenceFile:
    """The licence's text inside the unpacked folder; ``sha256`` is None as long as nobody could fetch it."""

    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class Pin:
    """One upstream or toolchain at one version. ``packages`` has the one key ``any``, or one per platform."""

    name: str
    version: str
    kind: Kind
    role: Role
    licence: str
    packages: Mapping[str, Package]
    licence_file: LicenceFile | None = None
    commit: str | None = None
    links: bool = False
    note: str = ""

    def package(self, platform: str) -> Package:
        """What ``platform`` gets. Raises UsageError when the pin has nothing for it."""
        if found := self.packages.get(ANY) or self.packages.get(platform):
            return found
        raise UsageError(f"{self.name} {self.version} is not pinned for {platform}, only for {', '.join(self.packages)}.")

    def covers(self, platform: str) -> bool:
        """Whether the pin has something for ``platform``."""
        return ANY in self.packages or platform in self.packages

    @property
    def complete(self) -> bool:
        """Whether every package has its tree digest."""
        return all(package.tree is not None for package in self.packages.values())

    @classmethod
    def from_dict(cls, data: Any, where: str = "pin") -> Pin:
        """Read a pin from parsed YAML. Raises DataError naming the field."""
        return _pin(Node(data, where))

    def to_dict(self) -> dict[str, Any]:
        """The plain data; ``from_dict`` of it gives an equal pin."""
        data: dict[str, Any] = {"schema": SCHEMA, "name": self.name, "version": self.version, "kind": self.kind.value, "role": self.role.value}
        data["licence"] = self.licence
        if self.licence_file is not None:
            data["licence_file"] = {"path": self.licence_file.path, "sha256": self.licence_file.sha256}
        if self.note:
            data["note"] = self.note
        data["commit"] = self.commit
        if self.links:
            data["links"] = True
        if ANY in self.packages:
            data |= _package_dict(self.packages[ANY])
        else:
            data["platforms"] = {platform: _package_dict(package) for platform, package in self.packages.items()}
        return data


def load_pins(directory: Path) -> dict[str, Pin]:
    """Every pin of a vendors folder by name, sorted. Raises DataError for the first file that is wrong."""
    if not directory.is_dir():
        raise DataError(f"There is no folder {directory}: pins are expected there.")
    pins: dict[str, Pin] = {}
    for path in sorted(directory.glob("*.yaml")):
        pin = load_pin(path)
        pins[pin.name] = pin
    return pins


def load_pin(path: Path) -> Pin:
    """One pin from its file, whose name must be the pin's. Raises DataError."""
    pin = Pin.from_dict(read_yaml(path), path.name)
    if path.name != f"{pin.name}.yaml":
        raise DataError(f"{path.name}: name: {pin.name!r} belongs into {pin.name}.yaml.")
    return pin


def find_pin(pins: Mapping[str, Pin], name: str) -> Pin:
    """The pin of that name. Raises UsageError with the nearest name."""
    if name in pins:
        return pins[name]
    near = difflib.get_close_matches(name, pins, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(pins)}."
    raise UsageError(f"There is no pin {name!r}: {hint}")


def _pin(node: Node) -> Pin:
    if node.get("schema").number() != SCHEMA:
        raise node.get("schema").fail(f"this toolkit reads schema {SCHEMA}")
    pin = Pin(
        name=_match(node.get("name"), _NAME, "a name of a-z, 0-9, dot, dash, underscore"),
        version=_match(node.get("version"), _VERSION, "a version of letters, digits, dot, dash, plus"),
        kind=Kind(node.get("kind").one_of([kind.value for kind in Kind])),
        role=Role(node.optional("role", lambda n: n.one_of([role.value for role in Role]), Role.BUILD.value)),
        licence=_licence(node.get("licence")),
        licence_file=node.optional("licence_file", _licence_file),
        commit=node.optional("commit", lambda n: n.hexadecimal(40)),
        links=node.optional("links", Node.flag, False),
        note=node.optional("note", Node.prose, ""),
        packages=dict(_packages(node)),
    )
    node.done()
    if pin.complete and pin.licence_file is not None and pin.licence_file.sha256 is None:
        raise node.fail("licence_file.sha256 is missing although the tree is known")
    return pin


def _packages(node: Node) -> Iterator[tuple[str, Package]]:
    if not node.has("platforms"):
        yield ANY, _package(node)
        return
    if node.has("sources"):
        raise node.fail("has both 'platforms' and 'sources'; sources of a pin with platforms stand below each platform")
    platforms = node.get("platforms")
    if not platforms.names():
        raise platforms.fail("names no platform")
    for platform in platforms.names():
        entry = platforms.get(platform)
        if platform not in PLATFORMS:
            near = difflib.get_close_matches(platform, PLATFORMS, n=1)
            raise entry.fail(f"no such platform; {f'did you mean {near[0]!r}' if near else 'known are ' + ', '.join(PLATFORMS)}")
        package = _package(entry)
        entry.done()
        yield platform, package


def _package(node: Node) -> Package:
    package = Package(
        tree=node.optional("tree", lambda n: n.hexadecimal(40)),
        files=node.optional("files", lambda n: n.number(minimum=1)),
        unpacked=node.optional("unpacked", Node.number),
        tools=node.optional("tools", _tools, {}),
        sources=tuple(_source(item) for item in node.get("sources").items()),
    )
    known = [value is not None for value in (package.tree, package.files, package.unpacked)]
    if any(known) and not all(known):
        raise node.fail("'tree', 'files' and 'unpacked' go together: all known or all null")
    if any(known) and any(archive.size is None for archive in package.archives):
        raise node.fail("a 'size' is missing although the tree is known")
    return package


def _tools(node: Node) -> dict[str, str]:
    return {name: _inside(node.get(name)) for name in node.names()}


def _licence_file(node: Node) -> LicenceFile:
    found = LicenceFile(_inside(node.get("path")), node.optional("sha256", lambda n: n.hexadecimal(64)))
    node.done()
    return found


def _source(node: Node) -> Source:
    node.mapping()
    types = [name for name in ("git", "pypi", "url") if name in node.value]
    if len(types) != 1:
        raise node.fail("a source names exactly one of 'git', 'pypi' and 'url'")
    source: Source
    match types[0]:
        case "git":
            source = GitSource(_address(node.get("git"), ("https", "file")), _match(node.get("tag"), _REF, "a git tag"))
        case "pypi":
            project = _match(node.get("pypi"), re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"), "a PyPI project's name")
            source = PypiSource(project, _match(node.get("release"), _VERSION, "a release of the project"), _archive(node), _folder(node))
        case _:
            source = UrlSource(_address(node.get("url"), ("https", "http", "file")), _archive(node), _folder(node))
    node.done()
    return source


def _archive(node: Node) -> Archive:
    return Archive(
        file=_match(node.get("file"), _FILE, "a plain file name"),
        size=node.optional("size", lambda n: n.number(minimum=1)),
        sha256=node.get("sha256").hexadecimal(64),
    )


def _folder(node: Node) -> str:
    return str(node.optional("folder", _inside, ""))


def _inside(node: Node) -> str:
    """A path inside an archive: relative, with slashes, in its shortest spelling."""
    text = node.text()
    parts = text.split("/")
    if text.startswith("/") or "\\" in text or ":" in parts[0] or any(part in ("", ".", "..") for part in parts) or str(PurePosixPath(text)) != text:
        raise node.fail(f"{text!r} is not a plain relative path with slashes")
    return text


def _address(node: Node, schemes: tuple[str, ...]) -> str:
    text = node.text()
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in schemes or not (parts.netloc or parts.scheme == "file") or not parts.path or " " in text:
        raise node.fail(f"{text!r} is not an address beginning with {' or '.join(scheme + '://' for scheme in schemes)}")
    if parts.username or parts.password:
        raise node.fail("an address with a user name or password does not belong into a pin")
    return text


def _match(node: Node, pattern: re.Pattern[str], what: str) -> str:
    text = node.text()
    if not pattern.fullmatch(text) or ".." in text:
        raise node.fail(f"{text!r} is not {what}")
    return text


def _licence(node: Node) -> str:
    """An SPDX licence expression (SPDX specification, annex "SPDX license expressions"); the ids themselves are not looked up."""
    text = node.text()
    words = _LICENCE_WORD.findall(text)
    if "".join(words) != text.replace(" ", "") or not _is_expression(words):
        raise node.fail(f"{text!r} is not an SPDX licence expression such as 'MIT' or 'Apache-2.0 WITH LLVM-exception AND MIT'")
    return text


def _is_expression(words: list[str]) -> bool:
    depth, operand = 0, True
    exception = False
    for word in words:
        if word == "(":
            if not operand or exception:
                return False
            depth += 1
        elif word == ")":
            depth -= 1
            if operand or depth < 0:
                return False
        elif word in ("AND", "OR", "WITH"):
            if operand:
                return False
            operand, exception = True, word == "WITH"
        else:
            if not operand or word.upper() in ("AND", "OR", "WITH"):
                return False
            operand, exception = False, False
    return not operand and depth == 0


def _package_dict(package: Package) -> dict[str, Any]:
    data: dict[str, Any] = {"tree": package.tree, "files": package.files, "unpacked": package.unpacked}
    if package.tools:
        data["tools"] = dict(package.tools)
    data["sources"] = [_source_dict(source) for source in package.sources]
    return data


def _source_dict(source: Source) -> dict[str, Any]:
    if isinstance(source, GitSource):
        return {"git": source.url, "tag": source.tag}
    data: dict[str, Any] = {"pypi": source.project, "release": source.release} if isinstance(source, PypiSource) else {"url": source.url}
    data |= {"file": source.archive.file, "size": source.archive.size, "sha256": source.archive.sha256}
    if source.folder:
        data["folder"] = source.folder
    return data
