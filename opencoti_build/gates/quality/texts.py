"""Texts to read: documentation and code of the pinned base, which change only with the pin, or examples of the tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import DataError
from .examples import plain_text
from .plan import Corpus

EXCERPT = 600
"""Characters of an excerpt that a model continues."""


def load(corpus: Corpus, root: Path, base: Callable[[], Path]) -> str:
    """The text of a corpus, at most ``size`` bytes. ``base`` locates the pristine tree and is asked only when its files are needed.

    Raises DataError when a file of the base is not there or all of them are too short: the base moved, and texts.yaml must follow.
    """
    if corpus.tasks:
        return _cut(plain_text(root, corpus.tasks, corpus.size), corpus.size)
    tree, text = base(), ""
    for name in corpus.files:
        try:
            text += (tree / name).read_text("utf-8", errors="replace") + "\n"
        except OSError as error:
            raise DataError(f"quality/texts.yaml: {corpus.name}: the base has no {name} ({error.strerror}): name another file.") from error
    if len(text.encode()) < corpus.size:
        raise DataError(f"quality/texts.yaml: {corpus.name}: its files have {len(text.encode())} bytes, {corpus.size} are asked for: name more files.")
    return _cut(text, corpus.size)


def _cut(text: str, size: int) -> str:
    return text.encode()[:size].decode("utf-8", errors="ignore")


def excerpts(text: str, count: int) -> list[str]:
    """``count`` pieces spread over the text, each from the start of a line. Raises DataError when the text is too short for them."""
    step = (len(text) - EXCERPT) // max(1, count)
    if step < 1:
        raise DataError(f"A text of {len(text)} characters is too short for {count} excerpts.")
    pieces = []
    for number in range(count):
        start = text.rfind("\n", 0, number * step + 1) + 1
        pieces.append(text[start : start + EXCERPT])
    return pieces
