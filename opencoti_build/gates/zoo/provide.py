"""Models by name, from the cache or written on the spot."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...cache import digest_of
from ...errors import UsageError
from . import library
from .shapes import Group, ZooModel, load
from .writer import WRITER_VERSION, data_size, write

if TYPE_CHECKING:
    from ...sources import Workshop

KIND = "zoo"
"""Where the cache keeps written models."""


def zoo_file(root: Path) -> Path:
    """The zoo's data in the checkout at ``root``."""
    return root / "gate" / "zoo.yaml"


def choose(models: Sequence[ZooModel], names: Iterable[str] | None, *, group: Group = Group.GATE) -> tuple[ZooModel, ...]:
    """The models with these names; a family's name stands for all its forms. None stands for the whole ``group``.

    Raises UsageError with the nearest name for one that does not exist.
    """
    if names is None:
        return tuple(model for model in models if model.group is group)
    chosen: dict[str, ZooModel] = {}
    for name in names:
        found = [model for model in models if name in (model.name, model.family)]
        if not found:
            known = sorted({word for model in models for word in (model.name, model.family)})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"There is no model {name!r}.{hint} 'invoke gate models --list' shows them all.")
        chosen |= {model.name: model for model in found}
    return tuple(chosen.values())


def ensure(workshop: Workshop, names: Iterable[str] | None = None, *, group: Group = Group.GATE) -> dict[str, Path]:
    """The files of the chosen models (see ``choose``) by name; what the cache lacks is written now, with progress.

    A model's place in the cache depends on its data, the writer's version and gguf-py of the base.
    """
    models = choose(load(zoo_file(workshop.project.root)), names, group=group)
    folder = gguf_folder(workshop)
    digest = library.digest(folder)
    places = {model.name: workshop.cache.result(KIND, cache_key(model, digest)) / model.file for model in models}
    missing = [model for model in models if not places[model.name].is_file()]
    if missing:
        gguf = library.load(folder)
        with workshop.console.progress("writing models", sum(map(data_size, missing)), unit="bytes") as meter:
            for model in missing:
                with workshop.cache.producing(KIND, cache_key(model, digest)) as scratch:
                    write(model, scratch, gguf=gguf, progress=meter.advance)
    return places


def write_all(workshop: Workshop, models: Sequence[ZooModel], folder: Path) -> tuple[Path, ...]:
    """Write models into ``folder``, past the cache, with progress. A file that is there is written anew: nobody can tell if it is right."""
    gguf = library.load(gguf_folder(workshop))
    with workshop.console.progress("writing models", sum(map(data_size, models)), unit="bytes") as meter:
        return tuple(write(model, folder, gguf=gguf, progress=meter.advance) for model in models)


def gguf_folder(workshop: Workshop) -> Path:
    """``gguf-py`` in the base's tree, which is fetched if need be."""
    from ...sources import Upstream

    return Upstream.load(workshop).base.locate() / "gguf-py"


def cache_key(model: ZooModel, gguf_digest: str) -> str:
    """The key of a written model in the cache."""
    return digest_of({"model": model.identity(), "writer": WRITER_VERSION, "gguf-py": gguf_digest})
