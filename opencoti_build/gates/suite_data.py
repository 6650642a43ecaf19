"""gate/upstream.yaml, read: which of upstream's tests run, within which limits, which are left out and why, what stands in for downloads."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..schema import Node, read_yaml
from .standins import Pieces, StandIn

SCHEMA = 1


@dataclass(frozen=True)
class Skip:
    """What is left out: a name or pattern, and why."""

    test: str
    reason: str


@dataclass(frozen=True)
class Limits:
    """``memory`` in MiB, ``time`` in seconds."""

    memory: int
    time: int


@dataclass(frozen=True)
class ExtraTest:
    """A test program that CTest does not run."""

    name: str
    target: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class NativeData:
    """The C++ tests; ``memory`` (MiB) is what all tests running at once may take."""

    memory: int
    limits: Mapping[str, Limits]
    extra: tuple[ExtraTest, ...]
    models: Mapping[str, str]
    model: str
    skipped: tuple[Skip, ...]

    def limit(self, name: str) -> Limits:
        """The limits of a test: those of the first pattern that fits, ``*`` last."""
        ordered = sorted(self.limits, key=lambda pattern: pattern == "*")
        return self.limits[next(pattern for pattern in ordered if fnmatch.fnmatchcase(name, pattern))]

    def reason(self, name: str) -> str | None:
        """Why a test is left out, if it is."""
        return next((skip.reason for skip in self.skipped if fnmatch.fnmatchcase(name, skip.test)), None)


@dataclass(frozen=True)
class ServerData:
    """The server's pytest suite; ``repositories`` maps repository to path in it to the name of a stand-in (``NAME`` or ``NAME/PART``)."""

    time: int
    soft: tuple[str, ...]
    repositories: Mapping[str, Mapping[str, str]]
    fetched: tuple[str, ...]
    skipped: tuple[Skip, ...]


@dataclass(frozen=True)
class SuiteData:
    """The whole file."""

    native: NativeData
    server: ServerData
    standins: Mapping[str, StandIn]
    pieces: Pieces


def load(path: Path) -> SuiteData:
    """Read the file. Raises DataError, naming the field."""
    root = Node(read_yaml(path), f"gate/{path.name}")
    if root.get("schema").number() != SCHEMA:
        raise root.fail(f"this toolkit reads schema {SCHEMA}")
    node = root.get("standins")
    standins = {name: StandIn.read(name, node.get(name)) for name in node.names()}
    data = SuiteData(_native(root.get("native"), standins), _server(root.get("server"), standins), standins, Pieces(tuple(root.get("pieces").prose().split())))
    root.done()
    return data


def _skips(node: Node, key: str) -> tuple[Skip, ...]:
    found = []
    for entry in node.items(empty=True):
        found.append(Skip(entry.get(key).text(), entry.get("reason").text()))
        entry.done()
    return tuple(found)


def _known(node: Node, standins: Mapping[str, StandIn]) -> str:
    text = node.text()
    Node(text.partition("/")[0], node.where, node.path).one_of(standins)
    return text


def _native(node: Node, standins: Mapping[str, StandIn]) -> NativeData:
    limits: dict[str, Limits] = {}
    table = node.get("limits")
    for pattern in table.names():
        entry = table.get(pattern)
        limits[pattern] = Limits(entry.get("memory").number(minimum=16), entry.get("time").number(minimum=1))
        entry.done()
    if "*" not in limits:
        raise table.fail("the limits of all other tests, '*', are missing")
    extra = []
    for entry in node.get("extra").items(empty=True):
        extra.append(ExtraTest(entry.get("name").text(), entry.get("target").text(), tuple(entry.optional("arguments", lambda value: [word.text() for word in value.items()], ()))))
        entry.done()
    models = node.get("models")
    made = NativeData(
        memory=node.get("memory").number(minimum=256),
        limits=limits,
        extra=tuple(extra),
        models={name: _known(models.get(name), standins) for name in models.names()},
        model=_known(node.get("model"), standins),
        skipped=_skips(node.get("skipped"), "name"),
    )
    node.done()
    return made


def _server(node: Node, standins: Mapping[str, StandIn]) -> ServerData:
    repositories = node.get("repositories")
    served: dict[str, dict[str, str]] = {}
    for name in repositories.names():
        files = repositories.get(name)
        served[name] = {path: _known(files.get(path), standins) for path in files.names()}
    made = ServerData(
        time=node.get("time").number(minimum=1),
        soft=tuple(item.text() for item in node.get("soft").items(empty=True)),
        repositories=served,
        fetched=tuple(item.one_of(served) for item in node.get("fetched").items(empty=True)),
        skipped=_skips(node.get("skipped"), "test"),
    )
    node.done()
    return made
