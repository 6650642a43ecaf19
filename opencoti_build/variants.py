"""Variants: which host an artifact has and which libraries go into it. The data lies in ``variants/NAME.yaml``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from .errors import DataError, UsageError
from .schema import Node, parse_yaml, read_text


class HostKind(Enum):
    """What the front of the artifact is."""

    UNIVERSAL = "universal"
    """PE, shell script and native programs in one block."""

    PROGRAM = "program"
    """One native program."""


@dataclass(frozen=True)
class EngineLibraries:
    """All libraries of one kind that the engine component of a target brings (the CPU variants)."""

    target: str
    kind: str


@dataclass(frozen=True)
class ComponentLibrary:
    """One library of a component that is built on its own (CUDA, Vulkan).

    ``entry`` is its name inside the artifact, ``file`` its published name.
    """

    component: str
    kind: str
    variant: str
    os: str
    arch: str
    entry: str
    file: str

    @property
    def part(self) -> str:
        """What plans and manifests call it."""
        return f"{self.entry} ({self.os})"


Library = EngineLibraries | ComponentLibrary


@dataclass(frozen=True)
class Variant:
    """One artifact as data. ``runs_on`` names the targets whose programs are promised to run."""

    name: str
    suffix: str
    title: str
    host: HostKind
    toolchain: str
    runs_on: tuple[str, ...]
    libraries: tuple[Library, ...]

    @property
    def windows_limit(self) -> bool:
        """True when Windows must be able to start the file, which it refuses at 4 GiB."""
        return any(target.startswith("windows") for target in self.runs_on)

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Variant:
        """Build from parsed YAML. Raises DataError naming ``where``, the field and what is allowed."""
        node = Node(data, where).mapping()
        libraries = tuple(_library(item) for item in node.get("libraries").items(empty=True))
        names = [library.entry for library in libraries if isinstance(library, ComponentLibrary)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise node.get("libraries").fail(f"the entry {twice[0]!r} is listed twice")
        variant = cls(
            name=node.get("name").text(),
            suffix=node.get("suffix").text(),
            title=node.get("title").text(),
            host=HostKind(node.get("host").one_of(kind.value for kind in HostKind)),
            toolchain=node.optional("toolchain", Node.text, "zig"),
            runs_on=tuple(target.text() for target in node.get("runs_on").items()),
            libraries=libraries,
        )
        node.done()
        return variant


def load(directory: Path) -> dict[str, Variant]:
    """All variants below ``directory`` by name. Raises DataError for an unreadable or contradictory file."""
    variants: dict[str, Variant] = {}
    for path in sorted(directory.glob("*.yaml")):
        where = f"variants/{path.name}"
        variant = Variant.from_dict(parse_yaml(read_text(path), where), where)
        if variant.name != path.stem:
            raise DataError(f"{where}: its name is {variant.name!r}; file and name must agree.")
        variants[variant.name] = variant
    if not variants:
        raise DataError(f"{directory} holds no variant.")
    return variants


def choose(variants: dict[str, Variant], name: str) -> Variant:
    """The variant called ``name``. Raises UsageError with the nearest name."""
    if name in variants:
        return variants[name]
    near = difflib.get_close_matches(name, variants, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"There is no variant {name!r}.{hint} There are: {', '.join(variants)}.")


def _library(node: Node) -> Library:
    library: Library
    if node.has("engine"):
        library = EngineLibraries(target=node.get("engine").text(), kind=node.get("kind").text())
    else:
        library = ComponentLibrary(**{field.name: node.get(field.name).text() for field in fields(ComponentLibrary)})
    node.done()
    return library
