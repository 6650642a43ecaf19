"""Builds the probe of ``gate/probe`` against a tree: one source, two trees, everything else the same.

Sources, probe and build directory of a side lie side by side below ``build/gates/off-SIDE``, so that their relative paths are
equal on both sides and a compiler cache (ccache, where the machine has it) compiles once what is equal in both trees. The program is
a result in the cache, by tree, probe and toolchain; the build directory only makes the next one quicker.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...cache import digest_of
from ...errors import BuildError, ChecksumError
from ...series.base import tree_id_of
from ...sources import Tree, Upstream, Workshop
from ...toolchains.native import NativeToolchain
from ..tree_build import SharingToolchain, TreeBuild
from . import fields
from .mirror import mirror

SCHEMA = 1
"""Raise it when probes are built another way without any input changing."""

KIND = "gate-probe"
PROGRAM = "opencoti-gate-probe"

_FLAGS = {"LLAMA_BUILD_TOOLS": "OFF", "LLAMA_BUILD_SERVER": "OFF", "LLAMA_BUILD_APP": "OFF"}
"""The probe needs the libraries alone."""

_IDENTITY = ("OPENCOTI_VERSION", "OPENCOTI_TAG", "OPENCOTI_TREE", "OPENCOTI_BASE")
"""Names of the cut: no part of what is compared, and different on both sides."""


@dataclass(frozen=True)
class Probe:
    """A built probe: ``side`` is ``pristine`` or ``patched``, ``key`` names everything the program depends on."""

    side: str
    tree_id: str
    key: str
    program: Path


@dataclass(frozen=True)
class _ProbeBuild(TreeBuild):
    @property
    def toolchain(self) -> NativeToolchain:
        made = super().toolchain
        return SharingToolchain(made.runner, made.cmake, made.ninja, made.own_isa, made.openmp)

    def variables(self) -> dict[str, str]:
        return {name: value for name, value in super().variables().items() if name not in _IDENTITY}


def sources(workshop: Workshop) -> Path:
    """Where the probe's sources lie."""
    return workshop.project.root / "gate" / "probe"


def build(workshop: Workshop, upstream: Upstream, side: str, tree: Tree, *, jobs: int | None = None) -> Probe:
    """The probe of ``tree``, from the cache or built now. ``side`` names the build directory that is used, and kept.

    Raises BuildError (also where the probe does not compile against the tree: something of upstream that it reads is gone),
    ChecksumError (the tree is not the one its id names), ToolchainError, BusyError.
    """
    directory = workshop.project.build / "gates" / f"off-{side}"
    copy = directory / "source"
    flags = {**_FLAGS, "CMAKE_PROJECT_llama.cpp_INCLUDE": (directory / "probe" / "probe.cmake").as_posix()}
    making = _ProbeBuild(workshop, upstream, directory.name, Tree(copy, tree.tree_id), flags, jobs)
    key = digest_of({"schema": SCHEMA, "probe": _sources_digest(workshop), "base": upstream.base.identified().tree_id, "inputs": _inputs(making)})
    result = workshop.cache.result(KIND, key)
    if not (result / PROGRAM).is_file():
        with files.lock(directory.parent / f".{directory.name}.sources.lock", wait_seconds=3600, what=f"the {side} probe"):
            if not (result / PROGRAM).is_file():
                _make(making, upstream, tree, directory)
                with workshop.cache.producing(KIND, key) as fresh:
                    shutil.copyfile(making.work / "bin" / PROGRAM, fresh / PROGRAM)
                    (fresh / PROGRAM).chmod(0o755)
    return Probe(side, tree.tree_id, key, result / PROGRAM)


def _inputs(making: _ProbeBuild) -> Mapping[str, Any]:
    """The build's inputs without its folder: a probe is the same wherever the checkout lies."""
    inputs = making.inputs()
    return {**inputs, "flags": {name: value for name, value in inputs["flags"].items() if not name.endswith("_INCLUDE")}}


def _sources_digest(workshop: Workshop) -> str:
    """Digest of the probe's sources and of what writes the rest of them."""
    found = {path.name: files.sha256_file(path) for path in sorted(sources(workshop).iterdir()) if path.is_file()}
    return digest_of({**found, "fields.py": files.sha256_file(Path(fields.__file__))})


def _make(making: _ProbeBuild, upstream: Upstream, tree: Tree, directory: Path) -> None:
    pristine = upstream.pristine().path
    table = fields.render(*(_header(pristine / name) for name in ("include/llama.h", "common/common.h")))
    for path in sources(making.workshop).iterdir():
        if path.is_file():
            files.write_bytes(directory / "probe" / path.name, path.read_bytes())
    files.write_text(directory / "probe" / "fields.inc", table)
    mirror(tree.path, making.tree.path)
    if (found := tree_id_of(making.tree.path)) != tree.tree_id:
        raise ChecksumError(f"{tree.path} changed meanwhile, or is not the tree it is said to be: run the same command again.", details=f"expected {tree.tree_id}\nactual   {found}")
    try:
        making.make([f"bin/{PROGRAM}"], description=f"Building the {directory.name.removeprefix('off-')} probe")
    except BuildError as error:
        if "probe/" in error.details:
            raise BuildError(
                f"The probe does not compile against the {directory.name.removeprefix('off-')} tree: a patch changed what upstream declares and the probe uses. {error.message}",
                details=error.details,
            ) from error
        raise


def _header(path: Path) -> str:
    with files.disk_errors(path, reading=True):
        return path.read_text("utf-8")
