"""Moves a pin to another version, or completes one that nobody could fetch before: everything is fetched and computed, nothing guessed.

The pin's file keeps its comments and its order: only the values that change are replaced in its text.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import files, schema
from .download import Address
from .errors import ChecksumError, DataError, DownloadError, GitError, OfflineError, OpencotiError, UsageError
from .pypi import IndexFile
from .vendor_pin import ANY, Archive, GitSource, LicenceFile, Package, Pin, PypiSource, Source, load_pin
from .vendors import Fetcher, result_key


@dataclass(frozen=True)
class Bump:
    """A pin before and after, with the texts of its file. ``unchecked`` names sources that could not be reached."""

    before: Pin
    after: Pin
    text_before: str
    text_after: str
    unchecked: tuple[str, ...]

    @property
    def diff(self) -> str:
        """The change of the file as a unified diff; empty when nothing changes."""
        name = f"vendors/{self.after.name}.yaml"
        return "".join(difflib.unified_diff(self.text_before.splitlines(True), self.text_after.splitlines(True), f"a/{name}", f"b/{name}"))


def bump(path: Path, version: str, fetcher: Fetcher, *, accept_licence: bool = False, write: bool = True) -> Bump:
    """Fetch ``version`` of the pin in ``path`` for every platform, compute what the pin must say and write it (unless ``write`` is off).

    Every source that can be reached must give the same tree; at least one must be reachable.
    Raises DataError when the licence's text changed and ``accept_licence`` is off, ChecksumError when sources disagree, else what
    fetching raises.
    """
    text = schema.read_text(path)
    before = load_pin(path)
    shift = _Shift(before.version, version)
    unchecked: list[str] = []
    # The commit of another version cannot be known before a git source is asked.
    bare = dataclasses.replace(before, version=version, commit=before.commit if shift.same else None)
    packages: dict[str, Package] = {}
    licence = before.licence_file
    commit = bare.commit
    archives: dict[str, Archive] = {}
    for platform, package in before.packages.items():
        moved = _moved(package, platform, shift, fetcher, archives)
        pin = dataclasses.replace(bare, packages={platform: moved})
        with fetcher.scratch(before.name) as folder:
            packages[platform], content, commit = _measure(pin, moved, fetcher, folder, unchecked, commit)
            licence = _licence(before, shift, content, fetcher, accept_licence)
    after = dataclasses.replace(bare, packages=packages, licence_file=licence, commit=commit)
    after = Pin.from_dict(after.to_dict(), path.name)
    changed = rewrite(text, before.to_dict(), after.to_dict())
    if Pin.from_dict(schema.parse_yaml(changed, path.name), path.name) != after:
        raise DataError(f"{path.name} is laid out in a way that cannot be edited; write it in block style as vendors/README.md shows.")
    if write and changed != text:
        files.write_text(path, changed)
    return Bump(before, after, text, changed, tuple(dict.fromkeys(unchecked)))


class _Shift:
    """Replaces the old version by the new one in names and addresses. A common prefix of letters is left out: b123 -> 123 in 123.0.0."""

    def __init__(self, old: str, new: str) -> None:
        self.same = old == new
        prefix = re.match(r"[A-Za-z]*", old)[0]  # type: ignore[index]
        if not re.fullmatch(rf"{prefix}[0-9][A-Za-z0-9.+_-]*", new):
            raise UsageError(f"{new!r} is not spelled like the pinned version {old!r}.")
        self.old, self.new = old[len(prefix) :], new[len(prefix) :]
        self.pattern = re.compile(rf"(?<![0-9]){re.escape(self.old)}(?![0-9])")

    def __call__(self, text: str) -> str:
        return text if self.same else self.pattern.sub(self.new, text)

    def must(self, text: str, where: str) -> str:
        """The moved text; refuses one that does not contain the version, because it would silently stay the old thing."""
        moved = self(text)
        if moved == text and not self.same:
            raise DataError(f"{where}: {text!r} does not contain the version {self.old}, so it cannot be moved; edit the pin by hand.")
        return moved


def _moved(package: Package, platform: str, shift: _Shift, fetcher: Fetcher, archives: dict[str, Archive]) -> Package:
    """The package with its sources at the new version. ``archives`` collects old sha256 -> new archive: platforms may share one."""
    sources = [_renamed(source, shift) for source in package.sources]
    for old, renamed in zip(package.sources, sources, strict=True):
        if isinstance(renamed, GitSource) or isinstance(old, GitSource) or old.archive.sha256 in archives:
            continue
        if shift.same:
            archives[old.archive.sha256] = _completed(old.archive, sources, fetcher)
        elif isinstance(renamed, PypiSource):
            archives[old.archive.sha256] = _released(renamed, platform, fetcher)
        else:
            found = fetcher.downloader.discover(renamed.archive.file, fetcher.candidates(sources, renamed.archive))
            archives[old.archive.sha256] = Archive(found.name, found.size, found.sha256)
    moved = tuple(new if isinstance(new, GitSource) else dataclasses.replace(new, archive=archives[new.archive.sha256]) for new in sources)
    return Package(sources=moved, tools={name: shift(path) for name, path in package.tools.items()})


def _renamed(source: Source, shift: _Shift) -> Source:
    """The source with the new version in its names; size and sha256 are still the old ones."""
    if isinstance(source, GitSource):
        return dataclasses.replace(source, tag=shift.must(source.tag, str(source)))
    archive = dataclasses.replace(source.archive, file=shift(source.archive.file))
    if isinstance(source, PypiSource):
        return dataclasses.replace(source, release=shift.must(source.release, str(source)), archive=archive, folder=shift(source.folder))
    return dataclasses.replace(source, url=shift.must(source.url, str(source)), archive=archive, folder=shift(source.folder))


def _completed(pinned: Archive, sources: Sequence[Source], fetcher: Fetcher) -> Archive:
    """The archive with its size, which may have to be fetched to learn it; the pinned sha256 must be met."""
    if pinned.size is not None:
        return pinned
    blob = fetcher.cache.blob(pinned.sha256)
    if blob.is_file():
        return dataclasses.replace(pinned, size=blob.stat().st_size)
    found = fetcher.downloader.discover(pinned.file, fetcher.candidates(sources, pinned))
    if found.sha256 != pinned.sha256:
        raise ChecksumError(f"{pinned.file}: got {found.size} bytes with sha256 {found.sha256}; expected sha256 {pinned.sha256}.")
    return dataclasses.replace(pinned, size=found.size)


def _released(source: PypiSource, platform: str, fetcher: Fetcher) -> Archive:
    """The file of a new release that takes the place of the pinned one."""
    if fetcher.offline:
        raise OfflineError(f"Which files {source.project} {source.release} has is only known to the index, and offline was asked for: run the same command with a network.")
    offered = _choose(fetcher.index.files(source.project), source, platform)
    if offered.size is not None and offered.sha256 is not None:
        return Archive(offered.file, offered.size, offered.sha256)
    found = fetcher.downloader.discover(offered.file, [Address(offered.url)])
    if offered.sha256 not in (None, found.sha256):
        raise ChecksumError(f"{offered.file}: got sha256 {found.sha256}; the index says {offered.sha256}.")
    return Archive(found.name, found.size, found.sha256)


def _choose(offers: list[IndexFile], source: PypiSource, platform: str) -> IndexFile:
    """The file of the pinned file's name, else the only one of its kind for the platform."""
    for offered in offers:
        if offered.file == source.archive.file:
            return offered
    marker = re.compile(rf"-{re.escape(source.release)}(?=-|\.tar|\.zip)")
    same = [offered for offered in offers if marker.search(offered.file)]
    if not same:
        raise DownloadError(f"{source.project} has no release {source.release} that can be found on the configured indexes.")
    if not source.archive.file.endswith(".whl"):
        same = [offered for offered in same if not offered.file.endswith(".whl")]
    else:
        same = [offered for offered in same if offered.file.endswith(".whl") and (platform == ANY or _fits(offered.file, platform))]
        if platform.startswith("linux") and len(same) > 1:
            same = [offered for offered in same if "manylinux" in offered.file]
    if len(same) != 1:
        found = ", ".join(offered.file for offered in same) or "none"
        raise DownloadError(f"{source.project} {source.release} has no single file for {platform} (found: {found})")
    return same[0]


def _fits(wheel: str, platform: str) -> bool:
    """Whether a wheel's platform tag (last part of its name) is for the platform."""
    tag = wheel.removesuffix(".whl").rsplit("-", 1)[-1]
    system, _, processor = platform.partition("-")
    systems = {"linux": ("linux",), "windows": ("win_", "win32"), "macos": ("macosx",)}[system]
    processors = {"x86_64": ("x86_64", "amd64", "universal2"), "aarch64": ("aarch64", "arm64", "universal2")}[processor]
    return any(word in tag for word in systems) and any(word in tag for word in processors)


def _measure(pin: Pin, package: Package, fetcher: Fetcher, folder: Path, unchecked: list[str], commit: str | None) -> tuple[Package, Path, str | None]:
    """Unpack from every source that can be reached; all must agree. Gives the measured package, one of the folders, the commit."""
    found: dict[str, tuple[Package, Path]] = {}
    labels: dict[str, str] = {}
    problems: list[OpencotiError] = []
    for number, source in enumerate(package.sources):
        try:
            digest, _ = fetcher.extract(pin, package, source, folder / str(number))
            if isinstance(source, GitSource):
                commit = fetcher.commit_of(pin, source)
        except (DownloadError, GitError, OfflineError) as error:
            problems.append(error)
            unchecked.append(str(source))
            fetcher.console.warn(f"not checked: {source}: {error.message}")
            continue
        found.setdefault(digest.tree, (dataclasses.replace(package, tree=digest.tree, files=digest.files, unpacked=digest.size), folder / str(number)))
        labels.setdefault(digest.tree, str(source))
    if not found:
        details = "\n".join(f"  {problem.message}\n{problem.details}".rstrip() for problem in problems)
        raise DownloadError(f"{pin.name} {pin.version}: none of its sources can be reached, so nothing can be computed.", details=details)
    if len(found) > 1:
        details = "\n".join(f"  tree {tree}: {label}" for tree, label in labels.items())
        raise ChecksumError(f"{pin.name} {pin.version}: its sources give different content.", details=details)
    measured, content = next(iter(found.values()))
    return measured, content, commit


def _licence(before: Pin, shift: _Shift, content: Path, fetcher: Fetcher, accept: bool) -> LicenceFile | None:
    """The licence file at the new version. Raises DataError when its text changed and nobody accepted that."""
    if before.licence_file is None:
        return None
    path = shift(before.licence_file.path)
    try:
        data = (content / path).read_bytes()
    except OSError as error:
        raise DataError(f"{before.name}: the licence file {path} is not there any more: find the licence and edit the pin.") from error
    # Wheels for Windows may carry the same text with CRLF.
    sha256 = hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()
    if before.licence_file.sha256 in (sha256, hashlib.sha256(data).hexdigest()):
        return LicenceFile(path, before.licence_file.sha256)
    if before.licence_file.sha256 is not None and not accept:
        raise DataError(
            f"{before.name}: the text of {path} changed: read it, correct 'licence' if need be, and run the command with --accept-licence.",
            details=_licence_diff(before, data, fetcher),
        )
    return LicenceFile(path, sha256)


def _licence_diff(before: Pin, data: bytes, fetcher: Fetcher) -> str:
    assert before.licence_file is not None
    for package in before.packages.values():
        if package.tree is None:
            continue
        old = fetcher.cache.result(before.kind.folder, result_key(before, package)) / "content" / before.licence_file.path
        if old.is_file():
            then, now = (text.decode("utf-8", "replace").splitlines() for text in (old.read_bytes(), data))
            return "\n".join(difflib.unified_diff(then, now, "before", "now", lineterm="", n=1)) or "only line ends differ"
    return ""


def rewrite(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Replace in a YAML text the values that differ between ``before`` (what it says) and ``after``; all else stays as it is.

    Both have the same shape; a key that the text leaves out is added in front of its mapping's first. Raises DataError otherwise.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise DataError("The text to edit is not a mapping.")
    edits: list[tuple[int, int, str]] = []
    _edit(root, before, after, edits)
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _edit(node: yaml.Node, before: Any, after: Any, edits: list[tuple[int, int, str]]) -> None:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping) and isinstance(node, yaml.MappingNode):
        children = {key.value: value for key, value in node.value}
        for key in after:
            if before.get(key) == after[key]:
                continue
            if key in children:
                _edit(children[key], before.get(key), after[key], edits)
            else:
                first = node.value[0][0]
                separator = ", " if node.flow_style else "\n" + " " * first.start_mark.column
                edits.append((first.start_mark.index, first.start_mark.index, f"{key}: {_scalar(after[key])}{separator}"))
        return
    if isinstance(before, list) and isinstance(after, list) and isinstance(node, yaml.SequenceNode) and len(before) == len(after) == len(node.value):
        for child, old, new in zip(node.value, before, after, strict=True):
            _edit(child, old, new, edits)
        return
    if isinstance(node, yaml.ScalarNode) and not isinstance(after, (Mapping, list)):
        start, end = node.start_mark.index, node.end_mark.index
        edits.append((start, end, ("" if end > start else " ") + _scalar(after)))
        return
    raise DataError("The pin's shape would change; edit its file by hand.")


def _scalar(value: Any) -> str:
    """A scalar in YAML: plain where that reads back as the same value, in quotes elsewhere."""
    if value is None:
        return "null"
    text = str(value)
    try:
        plain = yaml.safe_load(text)
    except yaml.YAMLError:
        plain = None
    return text if plain == value and type(plain) is type(value) else "'" + text.replace("'", "''") + "'"
