"""Which models the gate runs: those of the zoo, each drafter beside its target, and any file a person names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ToolchainError, UsageError
from ...sources import Workshop
from .gate import Subject

if TYPE_CHECKING:
    from ..zoo import ZooModel


def subjects(workshop: Workshop, names: Sequence[str] = (), *, drafter: str = "") -> tuple[Subject, ...]:
    """Models of the zoo by name (none: all of them), written if need be; a name that ends in ``.gguf`` is a file.

    A file's own NextN blocks are found by the probe; ``drafter`` is the file of a model that drafts for it instead. Raises UsageError,
    and ToolchainError where the zoo is needed and numpy is not there.
    """
    given = [Path(name) for name in names if name.endswith(".gguf")]
    helper = Path(drafter) if drafter else None
    for path in (*given, *([helper] if helper else [])):
        if not path.is_file():
            raise UsageError(f"{path} is no file: give a model's file, or a name of the zoo ('invoke gate models --list').")
    if helper and len(given) != 1:
        raise UsageError("--drafter belongs to one file of --model: give that too.")
    found = [Subject(path.stem, path.resolve(), helper.resolve() if helper else None, mtp=True) for path in given]
    wanted = [name for name in names if not name.endswith(".gguf")]
    return (*found, *(_from_zoo(workshop, wanted) if wanted or not given else ()))


def _from_zoo(workshop: Workshop, names: Sequence[str]) -> list[Subject]:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise ToolchainError("The zoo's models need numpy: 'pip install -e .[test]' brings it; a GGUF file as --model goes without.") from error
    from .. import zoo

    models = zoo.load(zoo.zoo_file(workshop.project.root))
    chosen = zoo.choose(models, names or None)
    targets = [model for model in chosen if not model.is_drafter]
    if names and (alone := [model for model in chosen if model.is_drafter and model.target not in {target.family for target in targets}]):
        raise UsageError(f"{alone[0].name} drafts for {alone[0].target} and does not run by itself: name {alone[0].target}, its drafter comes with it.")
    helpers = {target.name: helper for target in targets if (helper := drafter_of(target, models)) is not None}
    places = zoo.ensure(workshop, [model.name for model in (*targets, *helpers.values())])
    first = {model.family: model.name for model in reversed(targets)}
    return [
        Subject(
            target.name,
            places[target.name],
            places[helpers[target.name].name] if target.name in helpers else None,
            mtp=target.has_next or target.name in helpers,
            extra=first[target.family] == target.name,
        )
        for target in targets
    ]


def drafter_of(target: ZooModel, models: Sequence[ZooModel]) -> ZooModel | None:
    """The drafter for a model: in its own form where there is one, else in any."""
    found = [model for model in models if model.target == target.family]
    return next((model for model in found if model.mix.name == target.mix.name), found[0] if found else None)
