"""Questions about long texts: made by the generator that the gate models were trained with (``gate/trained/data.py``), and graded."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import DataError
from .plan import GateModel, Profile

GENERATOR = Path("gate", "trained", "data.py")
"""Where the generator lies in the repository."""

FIRST_SEED = 700_000
"""Examples have seeds from here on, the same for every model, feature and side: contenders are compared on the same examples."""

REPLY_MARGIN = 48
"""Tokens a reply may have beyond the expected one: enough to see that a model goes on talking."""

_SHORTEST = 512
"""Characters that are enough for every task of the generator."""


@dataclass(frozen=True)
class Question:
    """One example. ``length`` (tokens, nominal) and ``depth`` (0..1) say where it stands in a table."""

    task: str
    length: int
    depth: float
    seed: int
    prompt: str
    answer: str
    value: str

    def request(self, model: GateModel) -> dict[str, Any]:
        """The body for /v1/chat/completions: greedy, and independent of what was asked before."""
        tokens = int(len(self.answer.encode()) / model.characters_per_token) + REPLY_MARGIN
        return {"messages": [{"role": "user", "content": self.prompt}], "max_tokens": tokens, "temperature": 0, "seed": 1, "cache_prompt": False}

    def right(self, reply: str, model: GateModel) -> bool:
        """Whether ``reply`` is the answer, or for a model that may talk, holds the value."""
        return reply.strip() == self.answer.strip() if model.whole_reply else self.value in reply


@lru_cache(maxsize=4)
def generator(path: Path) -> ModuleType:
    """The generator's module. Raises DataError when it is not there or cannot be imported."""
    name = "opencoti_gate_data"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"{path}, the generator of the gate's examples, is not there: restore it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def make(root: Path, model: GateModel, task: str, length: int, depth: float, seed: int) -> Question:
    """The example of a task whose prompt and answer fill about ``length`` tokens of the model. Raises DataError for an unknown task."""
    characters = max(_SHORTEST, int(length * model.characters_per_token))
    try:
        example = generator(root / GENERATOR).make(task, characters, depth, seed)
    except ValueError as error:
        raise DataError(f"gate/quality: {model.name}: {error}.") from error
    return Question(task, length, depth, seed, example.prompt, example.answer, example.value or example.answer)


def questions(root: Path, model: GateModel, profile: Profile, tasks: tuple[str, ...]) -> Iterator[Question]:
    """All examples of a profile for a model, short ones first; lengths beyond its context are left out."""
    for length, count in sorted(profile.lengths.items()):
        if length > model.context:
            continue
        for task in tasks:
            for depth in profile.depths:
                for number in range(count):
                    yield make(root, model, task, length, depth, FIRST_SEED + number)


def plain_text(root: Path, tasks: tuple[str, ...], size: int, *, length: int = 1024) -> str:
    """Examples with their answers as running text of at least ``size`` bytes: what a model of these tasks reads with understanding."""
    module = generator(root / GENERATOR)
    pieces: list[str] = []
    total = number = 0
    while total < size:
        example = module.make(tasks[number % len(tasks)], length, (number * 7 % 11) / 10, FIRST_SEED + 100_000 + number)
        piece = f"{module.render_plain(example)}{example.answer}\n"
        pieces.append(piece)
        total += len(piece.encode())
        number += 1
    return "".join(pieces)


Cell = tuple[str, int, float]
"""Task, length in tokens, depth."""


def by_cell(asked: list[Question], right: list[bool]) -> Mapping[Cell, tuple[int, int]]:
    """How many are right, of how many, in each cell."""
    cells: dict[Cell, tuple[int, int]] = {}
    for question, hit in zip(asked, right, strict=True):
        cell = (question.task, question.length, question.depth)
        hits, count = cells.get(cell, (0, 0))
        cells[cell] = (hits + hit, count + 1)
    return cells
