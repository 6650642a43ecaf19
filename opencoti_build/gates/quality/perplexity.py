"""The engine's ``perplexity`` command: writes the distributions of a text into a file, and measures how far another run is from them.

The file (written by ``--kl-divergence-base``; the base's tools/perplexity/perplexity.cpp is its only description) is, little-endian::

    "_logits_"  u32 context  i32 vocabulary  i32 chunks  i32 tokens[chunks * context]
    a row for each position: f32 scale  f32 lowest  u16 values[vocabulary, padded to even]

The second half of every chunk has rows, but for its last position. A log-probability is ``scale * value + lowest``, and lies at most 16
nats below the highest; a step is therefore at most 16/65535 = 2.4e-4 nats. Two runs with equal rows are equal to within that step, and
the divergence of a run from its own file is not quite 0.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import EngineError
from ..serving import Engine, run
from .plan import Batch

_HEAD = struct.Struct("<8sIii")
_STATISTICS = {
    "mean": r"Mean\s+KLD:\s*(\S+)\s*±\s*(\S+)",
    "max": r"Maximum KLD:\s*(\S+)",
    "q999": r"99\.9%\s+KLD:\s*(\S+)",
    "top1": r"Same top p:\s*(\S+)",
    "perplexity": r"Mean PPL\(Q\)\s*:\s*(\S+)",
    "reference_perplexity": r"Mean PPL\(base\)\s*:\s*(\S+)",
}


@dataclass(frozen=True)
class Reading:
    """How a text is read: pieces of ``context`` tokens, ``chunks`` of them, with ``batch`` and ``sequences`` as in ``plan.Measure``."""

    context: int
    chunks: int
    batch: Batch
    sequences: int
    threads: int

    @property
    def positions(self) -> int:
        """Positions whose distribution is measured."""
        return self.chunks * positions(self.context)

    def flags(self) -> list[str]:
        """The flags of the ``perplexity`` command."""
        batch = ["1", "--ubatch-size", "1"] if self.batch is Batch.DECODE else [str(self.context * self.sequences)]
        return ["--ctx-size", str(self.context), "--chunks", str(self.chunks), "--threads", str(self.threads), "--fit", "off", "--batch-size", *batch]


@dataclass(frozen=True)
class Divergence:
    """Statistics over ``positions``: KLD in nats (``mean`` with its standard error), ``top1`` a share, perplexities of both runs."""

    positions: int
    mean: float
    mean_error: float
    q999: float
    max: float
    top1: float
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True)
class Difference:
    """How many of ``positions`` have unequal rows, and the first as (chunk, token within the chunk), both from 0."""

    positions: int
    different: int
    first: tuple[int, int] | None


def positions(context: int) -> int:
    """Rows of one chunk: its second half less the last position."""
    return context - 1 - context // 2


def write_logits(engine: Engine, model: Path, text: Path, flags: Sequence[str], reading: Reading, out: Path, *, home: Path) -> None:
    """Read ``text`` and write the distributions to ``out``. Raises EngineError when the engine fails, which it may do with exit code 0."""
    output = _run(engine, model, [*reading.flags(), "--file", str(text), "--kl-divergence-base", str(out), *flags], home)
    expected = reading.chunks
    try:
        with out.open("rb") as stream:
            head = _read_head(stream)
        size = out.stat().st_size
    except (OSError, ValueError) as error:
        raise EngineError(f"{engine.name} perplexity wrote no distributions: {error}.", details=output[-4000:]) from error
    if head.chunks != expected or size != head.size:
        raise EngineError(f"{engine.name} perplexity wrote {size} bytes for {head.chunks} pieces of text, {expected} pieces were asked for.", details=output[-4000:])


def divergence(
    engine: Engine, model: Path, flags: Sequence[str], reading: Reading, reference: Path, *, home: Path, on_chunk: Callable[[], None] = lambda: None
) -> Divergence:
    """How far this engine is from the distributions in ``reference``. Raises EngineError when it does not tell."""

    def watch(line: str) -> None:
        if re.match(r"\s*\d+\s+\S+\s+±", line):
            on_chunk()

    output = _run(engine, model, [*reading.flags(), "--kl-divergence-base", str(reference), "--kl-divergence", *flags], home, watch)
    return parse(output, reading.positions, engine.name)


def parse(output: str, count: int, name: str) -> Divergence:
    """The statistics in what the command printed. Raises EngineError naming the first that is missing or no number."""
    found: dict[str, tuple[str, ...]] = {}
    for key, pattern in _STATISTICS.items():
        match = re.search(pattern, output)
        if match is None:
            raise EngineError(f"{name} perplexity did not print {pattern.split(':')[0]!r}: it failed, or the base words it differently now.", details=output[-4000:])
        found[key] = match.groups()
    try:
        numbers = {key: [float(text) for text in texts] for key, texts in found.items()}
    except ValueError as error:
        raise EngineError(f"{name} perplexity printed something that is no number: {error}.", details=output[-4000:]) from error
    single = {key: values[0] for key, values in numbers.items()}
    single["top1"] /= 100
    return Divergence(positions=count, mean_error=numbers["mean"][1], **single)


def _run(engine: Engine, model: Path, flags: Sequence[str], home: Path, on_line: Callable[[str], None] = lambda line: None) -> str:
    return run(engine, ("perplexity", "--model", str(model), *flags), home, on_line)


@dataclass(frozen=True)
class _Head:
    context: int
    vocabulary: int
    chunks: int

    @property
    def row(self) -> int:
        """Bytes of a row: padded values after two floats, in units of two bytes."""
        return 2 * (2 * ((self.vocabulary + 1) // 2) + 4)

    @property
    def data(self) -> int:
        """Where the rows begin."""
        return _HEAD.size + 4 * self.context * self.chunks

    @property
    def size(self) -> int:
        """What the file must have in bytes."""
        return self.data + self.chunks * positions(self.context) * self.row


def _read_head(stream: IO[bytes]) -> _Head:
    raw = stream.read(_HEAD.size)
    if len(raw) < _HEAD.size:
        raise ValueError("the file ends in its head")
    magic, context, vocabulary, chunks = _HEAD.unpack(raw)
    if magic != b"_logits_" or context < 2 or vocabulary < 1 or chunks < 1:
        raise ValueError("the file does not begin as one")
    return _Head(context, vocabulary, chunks)


def difference(reference: Path, candidate: Path) -> Difference:
    """Compare two files row by row. Raises EngineError when they are not whole, or not about the same text."""
    with reference.open("rb") as one, candidate.open("rb") as two:
        try:
            heads = [_read_head(one), _read_head(two)]
        except ValueError as error:
            raise EngineError(f"The distributions of the two runs cannot be compared: {error}.") from error
        head = heads[0]
        sizes = [path.stat().st_size for path in (reference, candidate)]
        tokens = head.data - _HEAD.size
        if heads[1] != head or sizes != [head.size, head.size] or one.read(tokens) != two.read(tokens):
            raise EngineError("The two runs read different texts: vocabulary, length or tokens differ.")
        rows, different, first = positions(head.context), 0, None
        for number in range(head.chunks * rows):
            if one.read(head.row) != two.read(head.row):
                different += 1
                if first is None:
                    first = (number // rows, head.context // 2 + number % rows)
        return Difference(head.chunks * rows, different, first)
