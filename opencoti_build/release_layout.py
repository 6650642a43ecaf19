"""The layout of a release: the names of a cut's files, their places in the published repository, and in the archive.

Source: the README of the published repository. The rules are data, ``resources/release_layout.yaml``; ``publish`` and everything that
makes or verifies a cut share them. All names are relative, with forward slashes.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

from .errors import PublishError
from .project import Identity
from .schema import Node, parse_yaml

RELEASES = "releases"
ARCHIVED = "releases/archived"
COMPONENTS = "components"
PREFIX = "opencoti-llamafile-"

_FULL_TAG = re.compile(r"llamafile-v([0-9][0-9A-Za-z.]*)\+opencoti\.([0-9A-Za-z][0-9A-Za-z._]*)")
_ARTIFACT = re.compile(PREFIX + r"([0-9][0-9A-Za-z.]*)-([0-9A-Za-z][0-9A-Za-z._]*)-(.+)")


@dataclass(frozen=True)
class Mirrored:
    """``to`` in the published repository holds what ``sources``, tried in order, hold in the checkout."""

    to: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The rules."""

    single_files: tuple[str, ...]
    required: tuple[str, ...]
    unsummed: tuple[str, ...]
    signatures: tuple[str, ...]
    mirror: tuple[Mirrored, ...]

    def cut_of_root_file(self, name: str) -> Identity | None:
        """The cut that a file in the root belongs to as a single file, or None: it is no single file of any cut."""
        match = _ARTIFACT.fullmatch(name)
        return Identity(match[1], match[2]) if match is not None and match[3] in self.single_files else None

    def place(self, name: str, identity: Identity) -> str:
        """Where the cut's file ``name`` is published.

        Raises PublishError for a file that belongs to another cut, or lies where a cut has no such file.
        """
        if "/" not in name and (match := _ARTIFACT.fullmatch(name)) is not None and ".llamafile" in match[3]:
            if Identity(match[1], match[2]) != identity:
                raise PublishError(f"{name} belongs to another cut than {identity.full_tag}: make the cut again.")
            if match[3] in self.single_files:
                return name
            if re.fullmatch(r"[^.]+\.llamafile(\.exe)?", match[3]):
                raise PublishError(f"{name} is no single file of a release: it belongs into {COMPONENTS}/engine/BUILD/.")
        if name.split("/")[0] == COMPONENTS:
            if len(name.split("/")) < 4:
                raise PublishError(f"{name} does not lie in {COMPONENTS}/NAME/BUILD/: make the cut again.")
            return name
        return f"{RELEASES}/{identity.full_tag}/{name}"

    def needs_sum(self, name: str) -> bool:
        """Whether SHA256SUMS has to name the cut's file."""
        return name not in self.unsummed and not name.endswith(self.signatures)


def identity_of(full_tag: str) -> Identity | None:
    """The cut that a full tag such as ``llamafile-v0.10.7+opencoti.c1`` names, or None."""
    match = _FULL_TAG.fullmatch(full_tag)
    return Identity(match[1], match[2]) if match is not None else None


def release_of(path: str) -> Identity | None:
    """The cut whose papers, as long as it is not archived, hold the published ``path``; None for any other path."""
    parts = path.split("/")
    return identity_of(parts[1]) if len(parts) > 2 and parts[0] == RELEASES else None


def archived(path: str, identity: Identity) -> str:
    """Where the published ``path`` of a cut goes when the cut is superseded."""
    name = path.removeprefix(f"{RELEASES}/{identity.full_tag}/")
    return f"{ARCHIVED}/{identity.full_tag}/{name}"


@functools.cache
def load() -> Layout:
    """The rules of ``resources/release_layout.yaml``. Raises DataError."""
    where = "release_layout.yaml"
    root = Node(parse_yaml(resources.files("opencoti_build").joinpath("resources", where).read_text("utf-8"), where), where)

    def texts(node: Node) -> tuple[str, ...]:
        return tuple(item.text() for item in node.items())

    layout = Layout(
        texts(root.get("single_files")),
        texts(root.get("required")),
        texts(root.get("unsummed")),
        texts(root.get("signatures")),
        tuple(Mirrored(row.get("to").text(), texts(row.get("from"))) for row in root.get("mirror").items()),
    )
    root.done()
    return layout
