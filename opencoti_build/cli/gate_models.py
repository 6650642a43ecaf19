"""``invoke gate models``: the model zoo and the speed models, written on the spot."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from invoke.context import Context

from .. import files
from ..console import Console, human_bytes
from ..errors import ToolchainError, UsageError
from .common import CommandContext, command, context

if TYPE_CHECKING:
    from ..gates.zoo import ZooModel


@command(
    help={
        "speed": "Write this model of real shape instead of the zoo, e.g. qwen3-1.7b-q4_k_m; --list shows their names.",
        "out": "Folder to put the files into (default: they stay in the cache).",
        "list": "Show all models and write none.",
        "only": "Names of models or families, with commas between them (default: the whole zoo).",
    }
)
def models(c: Context, speed: str = "", out: str = "", list: bool = False, only: str = "") -> None:
    """Write the models of the gates, or one for measuring speed, unless they are there; prints their paths."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise ToolchainError("The models need numpy: 'pip install -e .[test]' brings it.") from error
    from ..gates import zoo

    made = context(c)
    known = zoo.load(zoo.zoo_file(made.project.root))
    if list:
        _show(known)
        return
    if speed and only:
        raise UsageError("--speed and --only exclude each other: give one of them.")
    chosen = _speed_model(known, speed) if speed else zoo.choose(known, _split(only))
    if made.dry_run:
        for model in chosen:
            made.console.info(f"would write {model.file}, {human_bytes(zoo.data_size(model))}, unless it is there")
        return
    for path in _written(made, chosen, Path(out).absolute() if out else None):
        print(path)


def _split(names: str) -> Sequence[str] | None:
    return [name for name in (word.strip() for word in names.split(",")) if name] or None


def _speed_model(known: Sequence[ZooModel], name: str) -> tuple[ZooModel, ...]:
    """The one speed model of this name; large as they are, nobody wants all forms of one by mistake."""
    from ..gates import zoo

    speed = [model for model in known if model.group is zoo.Group.SPEED]
    chosen = zoo.choose(speed, [name])
    if len(chosen) > 1:
        raise UsageError(f"{name!r} comes in several forms: give one of {', '.join(model.name for model in chosen)}.")
    return chosen


def _written(made: CommandContext, chosen: Sequence[ZooModel], out: Path | None) -> Sequence[Path]:
    """The models' files. A speed model that is to lie elsewhere is written there at once: some are as large as a disk."""
    from ..gates import zoo

    if out is not None and all(model.group is zoo.Group.SPEED for model in chosen):
        return zoo.write_all(made, chosen, out)
    found = zoo.ensure(made, [model.name for model in chosen])
    if out is None:
        return tuple(found.values())
    return tuple(_copied(path, out / path.name) for path in found.values())


def _copied(source: Path, target: Path) -> Path:
    with files.atomic_file(target) as stream, source.open("rb") as original:
        shutil.copyfileobj(original, stream, files.CHUNK)
    return target


def _show(known: Sequence[ZooModel]) -> None:
    from ..gates import zoo

    rows = []
    for model in known:
        parameters = zoo.plan(model).parameters
        size = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
        rows.append((model.name, model.group.value, model.architecture, str(model.shape.layers), size, human_bytes(zoo.data_size(model)), model.about))
    Console(sys.stdout).table("Models", ("name", "for", "architecture", "layers", "parameters", "size", "what"), rows, right=(3, 4, 5))
