"""gate/sanitizers.yaml, read: how the engine is instrumented, what runs on it, what is known of upstream, which defects are planted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..schema import Node, read_yaml

SCHEMA = 1


@dataclass(frozen=True)
class Reasoned:
    """Something and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Sanitizer:
    """One way to instrument. ``compile`` and ``optimise`` are words for every file, ``own`` for those of ``own_sources``, ``link`` for a program's link;
    ``prefix`` stands before every command.
    """

    name: str
    compile: tuple[str, ...]
    own: tuple[str, ...]
    optimise: tuple[str, ...]
    link: tuple[str, ...]
    environment: Mapping[str, str]
    prefix: tuple[str, ...]
    suppress: tuple[Reasoned, ...]


@dataclass(frozen=True)
class Plant:
    """A defect: in a copy of the tree ``text`` of ``file`` becomes ``replacement``; ``tests`` must then show a finding of ``kind``."""

    name: str
    sanitizer: str
    file: str
    text: str
    replacement: str
    kind: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class SanitizerData:
    """The whole file; ``known`` are patterns on ``KIND FILE FUNCTION``, ``model`` is a path in the repository."""

    plain: tuple[Reasoned, ...]
    own_sources: str
    programs: tuple[str, ...]
    tests: tuple[str, ...]
    model: str
    left_out: tuple[Reasoned, ...]
    outer: tuple[str, ...]
    sanitizers: Mapping[str, Sanitizer]
    known: tuple[Reasoned, ...]
    plants: Mapping[str, Plant]


def load(path: Path) -> SanitizerData:
    """Read the file. Raises DataError, naming the field."""
    root = Node(read_yaml(path), f"gate/{path.name}")
    if root.get("schema").number() != SCHEMA:
        raise root.fail(f"this toolkit reads schema {SCHEMA}")
    table = root.get("sanitizers")
    sanitizers = {name: _sanitizer(name, table.get(name)) for name in table.names()}
    plants = root.get("plants")
    data = SanitizerData(
        plain=_reasoned(root.get("plain"), "target"),
        own_sources=root.get("own_sources").text(),
        programs=_words(root.get("programs")),
        tests=_words(root.get("tests")),
        model=root.get("model").text(),
        left_out=_reasoned(root.get("left_out"), "test"),
        outer=_words(root.get("outer")),
        sanitizers=sanitizers,
        known=_reasoned(root.get("known"), "match"),
        plants={name: _plant(name, plants.get(name), sanitizers) for name in plants.names()},
    )
    for entry in data.known:
        try:
            re.compile(entry.what)
        except re.error as error:
            raise root.get("known").fail(f"{entry.what!r} is no regular expression ({error})") from error
    root.done()
    return data


def _words(node: Node) -> tuple[str, ...]:
    return tuple(item.text() for item in node.items(empty=True))


def _reasoned(node: Node, key: str) -> tuple[Reasoned, ...]:
    found = []
    for entry in node.items(empty=True):
        found.append(Reasoned(entry.get(key).text(), entry.get("reason").text()))
        entry.done()
    return tuple(found)


def _sanitizer(name: str, node: Node) -> Sanitizer:
    variables = node.get("environment")
    made = Sanitizer(
        name,
        _words(node.get("compile")),
        _words(node.get("own")),
        _words(node.get("optimise")),
        _words(node.get("link")),
        {key: variables.get(key).text() for key in variables.names()},
        _words(node.get("prefix")),
        _reasoned(node.get("suppress"), "line"),
    )
    node.done()
    return made


def _plant(name: str, node: Node, sanitizers: Mapping[str, Sanitizer]) -> Plant:
    made = Plant(
        name,
        node.get("sanitizer").one_of(sanitizers),
        node.get("file").text(),
        node.get("text").prose(),
        node.get("replacement").prose(),
        node.get("kind").text(),
        _words(node.get("tests")),
    )
    node.done()
    return made
