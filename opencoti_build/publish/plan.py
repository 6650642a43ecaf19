"""What publishing a cut would change. Pure: a release and the published tree go in, the changes and the resulting tree come out.

The changes are the difference between the two trees, so carrying them out in one commit gives exactly the resulting tree. A file whose
bytes the hub's large file storage holds already is copied there and costs nothing; a file that the hub keeps in git cannot be copied by
the hub, so a copy of it is sent with the commit (manifests, notes: a few kB), and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..console import Console, count_of, human_bytes
from ..errors import PublishError
from ..project import Identity
from ..release_layout import ARCHIVED, COMPONENTS, Layout, archived, release_of
from . import limits
from .cut import LocalFile, Release
from .policy import Policy
from .tree import Content, Tree


class Action(Enum):
    """What happens to a path."""

    ADD = "add"
    REPLACE = "replace"
    COPY = "copy"
    DELETE = "delete"


@dataclass(frozen=True)
class Change:
    """One path. ``sent`` is in bytes; ``source`` is the published path a copy comes from, ``file`` the file here that is sent."""

    path: str
    action: Action
    content: Content
    sent: int = 0
    source: str = ""
    file: LocalFile | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """All changes on top of the commit ``parent``, by path, and the tree they lead to. ``superseded`` are the cuts that are archived."""

    identity: Identity
    parent: str
    changes: tuple[Change, ...]
    result: Tree
    superseded: tuple[Identity, ...]
    off_github: tuple[tuple[str, str], ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that go over the line, before what an earlier run has sent already."""
        return sum(change.sent for change in self.changes)

    def of(self, action: Action) -> tuple[Change, ...]:
        """The changes of one kind."""
        return tuple(change for change in self.changes if change.action is action)

    @property
    def summary(self) -> str:
        """The totals in one line."""
        if not self.changes:
            return f"{self.identity.full_tag} is published as it is here: nothing to send"
        copies = self.of(Action.COPY)
        again = sum(change.sent for change in copies)
        parts = [
            f"{human_bytes(self.sent - again)} to send in {count_of(len(self.of(Action.ADD)) + len(self.of(Action.REPLACE)), 'file')}",
            *([f"{human_bytes(again)} of small files to send again for their copies"] if again else []),
            f"{human_bytes(sum(change.content.size for change in copies if not change.sent))} copied by the hub",
            f"{count_of(len(self.of(Action.DELETE)), 'path')} deleted",
            f"{count_of(len(self.result), 'file')} afterwards",
        ]
        return ", ".join(parts)

    def show(self, console: Console, repository: str) -> None:
        """Print the table and the totals."""
        if self.changes:
            rows = [(change.path, change.action.value, human_bytes(change.sent), _origin(change)) for change in self.changes]
            console.table(f"Plan: {self.identity.full_tag} to {repository} on top of {self.parent[:12]}", ("path", "action", "sent", "from"), rows, right=(2,))
        for identity in self.superseded:
            console.info(f"{identity.full_tag} is superseded and moves to {ARCHIVED}/{identity.full_tag}/")
        for path, reason in self.off_github:
            console.info(f"not for a GitHub release: {path} ({reason})")
        console.info(self.summary)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": 1,
            "release": self.identity.full_tag,
            "parent": self.parent,
            "superseded": [identity.full_tag for identity in self.superseded],
            "changes": [
                {"path": change.path, "action": change.action.value, "size": change.content.size, "sent": change.sent, "from": _origin(change)}
                for change in self.changes
            ],
            "bytes_sent": self.sent,
            "not_for_github": dict(self.off_github),
            "result": {path: _identity(content) for path, content in sorted(self.result.items())},
        }


def _origin(change: Change) -> str:
    return change.source or change.note or (change.file.name if change.file is not None else "")


def _identity(content: Content) -> dict[str, Any]:
    return {"size": content.size} | ({"sha256": content.sha256} if content.sha256 else {"blob": content.blob})


def make(release: Release, published: Tree, parent: str, layout: Layout, *, large: int = Policy.large) -> Plan:
    """The plan for ``release`` on top of the tree ``published`` at the commit ``parent``. Two new files of the same bytes are sent once from
    ``large`` bytes on.

    Raises PublishError when the published tree cannot be understood, when the cut is archived already, when it is published with other
    bytes, or when the host does not take the result.
    """
    files = {file.place: file for file in release.files}
    own = release.identity
    if any(path.startswith(f"{ARCHIVED}/{own.full_tag}/") for path in published):
        raise PublishError(f"{own.full_tag} is archived there already: a cut is published once; raise the tag in release.yaml and make a new one.")
    owners = _owners(published, own, layout)
    _unchanged(release, published, owners)
    result = dict(published)
    moved: dict[str, str] = {}
    for path, owner in owners.items():
        if owner == own:
            continue
        target = archived(path, owner)
        if target in published and not published[target].same(published[path]):
            raise PublishError(f"{target} is there already with other bytes than {path}: the archive is never overwritten; look at the repository.")
        result[target] = result.pop(path)
        moved[target] = path
    for path in [path for path in result if _below(path, release.mirrored)]:
        del result[path]
    for path, file in files.items():
        # Where the hub's record of the same bytes is at hand, it stays.
        result[path] = published[path] if file.content.same(published.get(path)) else file.content
    changes = tuple(_changes(published, result, moved, files, large))
    sent = {change.path: change.content for change in changes if change.file is not None}
    limits.refuse(limits.problems(limits.hosts()[limits.HUB], sent, result, len(changes)))
    papers = {file.place: file.content for file in release.of_the_cut()}
    off_github = limits.left_out(limits.hosts()[limits.GITHUB], papers)
    superseded = tuple(sorted({owner for owner in owners.values() if owner != own}, key=lambda identity: identity.full_tag))
    return Plan(own, parent, changes, result, superseded, tuple(sorted(off_github.items())))


def _owners(published: Tree, own: Identity, layout: Layout) -> dict[str, Identity]:
    """The published paths that belong to a cut, and that cut. Archived ones, mirrored ones and what nobody knows are not among them."""
    owners = {path: cut for path in published if (cut := layout.cut_of_root_file(path) or release_of(path)) is not None}
    parts = [path for path in published if path.startswith(f"{COMPONENTS}/")]
    if not parts:
        return owners
    # The split form belongs to the latest cut, and the root says which that is.
    latest = {cut for path, cut in owners.items() if "/" not in path} or set(owners.values())
    if len(latest) != 1:
        found = ", ".join(sorted(cut.full_tag for cut in latest)) or "none"
        raise PublishError(f"Which cut {parts[0]} belongs to cannot be told: the repository's latest cut should be one, and it shows {found}; repair it by hand.")
    return owners | dict.fromkeys(parts, latest.pop())


def _unchanged(release: Release, published: Tree, owners: dict[str, Identity]) -> None:
    """A cut that is published stays what it is."""
    there = {path: published[path] for path, owner in owners.items() if owner == release.identity}
    here = {file.place: file.content for file in release.of_the_cut()}
    advice = "a published cut does not change; raise the tag in release.yaml and make a new one"
    for path, content in there.items():
        if path not in here:
            raise PublishError(f"{path} is published as part of {release.identity.full_tag} and is not in the cut: {advice}.")
        if not content.same(here[path]):
            raise PublishError(f"{path} is published as part of {release.identity.full_tag} with other bytes: {advice}.")
    if there and (new := sorted(here.keys() - there.keys())):
        raise PublishError(f"{new[0]} is not published as part of {release.identity.full_tag}, and the cut is: {advice}.")


def _changes(published: Tree, result: Tree, moved: dict[str, str], files: dict[str, LocalFile], large: int) -> Iterable[Change]:
    there = {content.sha256: path for path, content in sorted(published.items(), reverse=True) if content.stored_large}
    sending: dict[str, str] = {}
    for path, content in sorted(result.items()):
        if content.same(published.get(path)):
            continue
        if path in moved:
            yield Change(path, Action.COPY, content, 0 if content.stored_large else content.size, source=moved[path])
        elif content.sha256 in there and content.size:
            yield Change(path, Action.COPY, content, source=there[content.sha256])
        else:
            action = Action.REPLACE if path in published else Action.ADD
            twin = sending.setdefault(content.sha256, path)
            if twin == path or content.size < large:
                yield Change(path, action, content, content.size, file=files[path])
            else:
                yield Change(path, action, content, file=files[path], note=f"the bytes of {twin}")
    for path in sorted(published.keys() - result.keys()):
        yield Change(path, Action.DELETE, published[path])


def _below(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
