"""The engine's sources: the pinned upstream tree, pristine or with the series on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from .cache import Cache
from .console import Console, count_of
from .errors import DataError, PatchError
from .project import Project
from .runner import Runner
from .series import BaseTree, PatchedTree, SeriesFolder, Workspace, patched_tree
from .vendors import Fetcher, Pin, load_pins

UPSTREAM = "llama.cpp"


class Workshop(Protocol):
    """What the steps of a build work with; ``cli.common.CommandContext`` is one."""

    @property
    def project(self) -> Project: ...
    @property
    def console(self) -> Console: ...
    @property
    def runner(self) -> Runner: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def offline(self) -> bool: ...


def upstream_pin(pins: Mapping[str, Pin], vendors: Path) -> Pin:
    """The pin of the engine's base among ``pins``, which were read from ``vendors``. Raises DataError when it is not there."""
    if UPSTREAM not in pins:
        raise DataError(f"{vendors / UPSTREAM}.yaml, the pin of the engine's base, is not there: restore it ('git checkout -- vendors').")
    return pins[UPSTREAM]


@dataclass(frozen=True)
class Tree:
    """Sources to build: where they lie and their git tree id."""

    path: Path
    tree_id: str


@dataclass(frozen=True)
class Upstream:
    """The pinned upstream of the engine and its series."""

    workshop: Workshop
    pins: dict[str, Pin]

    @classmethod
    def load(cls, workshop: Workshop) -> Upstream:
        """Read the pins. Raises DataError."""
        return cls(workshop, load_pins(workshop.project.vendors))

    @property
    def pin(self) -> Pin:
        """The upstream's pin. Raises DataError when the repository has none."""
        return upstream_pin(self.pins, self.workshop.project.vendors)

    @cached_property
    def fetcher(self) -> Fetcher:
        """Brings pins; shared, so that a file is looked for once."""
        return Fetcher(self.workshop.cache, self.workshop.console, self.workshop.runner, offline=self.workshop.offline)

    @cached_property
    def base(self) -> BaseTree:
        """The pristine tree; its files are fetched only when somebody asks for them."""
        pin, fetcher = self.pin, self.fetcher
        return BaseTree(pin.version, lambda: fetcher.unpacked(pin), pin.package(fetcher.platform).tree)

    @property
    def folder(self) -> SeriesFolder:
        """The series."""
        return SeriesFolder(self.workshop.project.patches / UPSTREAM)

    @cached_property
    def patched(self) -> PatchedTree:
        """What the series makes of the base: tree id and patches; no work tree is needed.

        Raises PatchError when a patch does not apply, or when the result is not the tree that series.yaml records.
        """
        made, listing = patched_tree(self.folder, self.base, self.workshop.cache), self.folder.listing()
        if not made.patches:
            raise PatchError(f"{self.folder.path} holds no patches, and the engine is the base plus the series: restore them ('git checkout -- patches').")
        if listing is None:
            raise PatchError(f"{self.folder.list_path} is not there, so nobody can tell whether a patch is missing: 'invoke patches lint --fix' and 'invoke patches export' write it anew.")
        if listing is not None and listing.tree and listing.tree != made.tree_id:
            raise PatchError(
                "The patches do not give the tree that series.yaml records: somebody changed one without the other; 'invoke patches check' says more.",
                details=f"recorded {listing.tree}\nactual   {made.tree_id}",
            )
        return made

    @property
    def workspace(self) -> Workspace:
        """The work tree in ``build/src``."""
        return Workspace(self.folder, self.workshop.project.build / "src" / UPSTREAM, self.base, self.workshop.cache, self.workshop.console)

    def tree(self) -> Tree:
        """The work tree with the whole series on it and nothing else. Raises PatchError when somebody is editing it."""
        applied = self.workspace.apply()
        if applied.edits:
            raise PatchError(
                f"{applied.path} holds {count_of(len(applied.edits), 'uncommitted edit')}: 'invoke patches refresh' folds that into the series, then build again."
            )
        return Tree(applied.path, applied.tree_id)

    def pristine(self) -> Tree:
        """The base without any patch."""
        base = self.base.identified()
        assert base.tree_id is not None
        return Tree(base.locate(), base.tree_id)
