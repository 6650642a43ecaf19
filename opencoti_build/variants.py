"""Variants: which host an artifact has and which libraries go into it. The data lies in ``variants/NAME.yaml``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from .errors import DataError, UsageError


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
        """Build from parsed YAML. Raises DataError naming ``where``, the key and what is allowed."""
        fields = _checked(data, where, required={"name", "suffix", "title", "host", "runs_on", "libraries"}, allowed={"toolchain"})
        try:
            host = HostKind(fields["host"])
        except ValueError as error:
            raise DataError(f"{where}: host is {fields['host']!r}; it must be one of {[kind.value for kind in HostKind]}.") from error
        libraries = tuple(_library(item, f"{where}: libraries[{index}]") for index, item in enumerate(_list(fields["libraries"], where, "libraries")))
        names = [library.entry for library in libraries if isinstance(library, ComponentLibrary)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{where}: entry {twice[0]!r} is listed twice.")
        return cls(
            name=str(fields["name"]),
            suffix=str(fields["suffix"]),
            title=str(fields["title"]),
            host=host,
            toolchain=str(fields.get("toolchain", "zig")),
            runs_on=tuple(str(target) for target in _list(fields["runs_on"], where, "runs_on")),
            libraries=libraries,
        )


def load(directory: Path) -> dict[str, Variant]:
    """All variants below ``directory`` by name. Raises DataError for an unreadable or contradictory file."""
    variants: dict[str, Variant] = {}
    for path in sorted(directory.glob("*.yaml")):
        where = f"variants/{path.name}"
        try:
            data = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DataError(f"{where} cannot be read as YAML: {str(error).splitlines()[0]}.", details=str(error)) from error
        variant = Variant.from_dict(data, where)
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


def _library(item: Any, where: str) -> Library:
    if isinstance(item, dict) and "engine" in item:
        fields = _checked(item, where, required={"engine", "kind"})
        return EngineLibraries(target=str(fields["engine"]), kind=str(fields["kind"]))
    keys = {"component", "kind", "variant", "os", "arch", "entry", "file"}
    fields = _checked(item, where, required=keys)
    return ComponentLibrary(**{key: str(fields[key]) for key in keys})


def _checked(data: Any, where: str, *, required: set[str], allowed: set[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise DataError(f"{where} must be a mapping with the keys {', '.join(sorted(required))}.")
    if missing := sorted(required - data.keys()):
        raise DataError(f"{where}: the key {missing[0]!r} is missing.")
    if unknown := sorted(map(str, data.keys() - required - allowed)):
        near = difflib.get_close_matches(unknown[0], required | allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{where}: unknown key {unknown[0]!r}.{hint}")
    return data


def _list(value: Any, where: str, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} must be a list.")
    return value
