"""Random blocks of the quantised formats: bytes that a kernel reads as weights of a wanted deviation.

Random bytes in the fields for the numbers, valid ones in the fields for the scales: no not-a-number, no infinity, a mean of zero and
the deviation asked for, so that activations stay near one through any number of layers. Every block of a tensor is another one and
uses all its bits, so that such a matrix costs what a real one costs, in bytes and in instructions; what it computes means nothing.

The layouts are those of ``ggml/src/ggml-common.h`` of the base (``block_q4_K`` and so on); gguf-py's ``quants.py`` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

Finish = Callable[[Bytes, Bytes, Bytes], None]
"""Makes random blocks (count x size) valid in place; it gets the tables of scales and of minima to choose from."""

STEPS = 128
"""How many different scales the blocks of a tensor have: evenly from 3/4 to 5/4 of the mean."""

_STEP_POWER = sum(((192 + step) / 256) ** 2 for step in range(STEPS)) / STEPS
"""Mean square of those scales."""


@dataclass(frozen=True)
class Format:
    """A quantised format: ``weights`` and ``size`` (bytes) of a block, and the deviation of its weights when its scale is 1.

    ``minimum`` is the scale of the minima divided by the scale, for formats that have one.
    """

    weights: int
    size: int
    unit: float
    finish: Finish
    minimum: float = 0.0

    @property
    def words(self) -> int:
        """64-bit words of randomness for a block."""
        return -(-self.size // 8)


def random_blocks(kind: Format, words: NDArray[np.uint64], deviation: float) -> Bytes:
    """Blocks of a format, shape (count, ``size``), from random words, shape (count, ``words``); bits left over are dropped."""
    blocks = np.ascontiguousarray(words.astype("<u8", copy=False).view(np.uint8).reshape(len(words), -1)[:, : kind.size])
    scale = deviation / kind.unit
    kind.finish(blocks, _scale_table(scale), _scale_table(scale * kind.minimum))
    return blocks


def _scale_table(mean: float) -> Bytes:
    """``STEPS`` half-precision numbers around ``mean`` as little-endian bytes, shape (STEPS, 2).

    Python computes each number and numpy only rounds it: no array arithmetic that another version might do in another order.
    """
    values = np.array([mean / math.sqrt(_STEP_POWER) * (192 + step) / 256 for step in range(STEPS)], dtype="<f2")
    return values.view(np.uint8).reshape(STEPS, 2)


def _put(blocks: Bytes, at: int, table: Bytes, *, signed: bool = False) -> None:
    """Replace two random bytes by the scale that seven of their bits choose; ``signed`` lets the eighth choose its sign."""
    chosen = table[blocks[:, at] & 0x7F]
    if signed:
        chosen[:, 1] |= blocks[:, at] & 0x80
    blocks[:, at : at + 2] = chosen


def _one(at: int, *, signed: bool = False) -> Finish:
    """A scale at ``at``. ``signed`` is for formats whose numbers have a mean of their own: the sign takes it away."""

    def finish(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
        _put(blocks, at, scales, signed=signed)

    return finish


def _two(at: int) -> Finish:
    """A scale at ``at``, the scale of the minima behind it; the same bits choose both, so that the mean is zero in every block."""

    def finish(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
        blocks[:, at + 2] = blocks[:, at]
        _put(blocks, at, scales)
        _put(blocks, at + 2, minima)

    return finish


def _six_bit(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
    """Q4_K and Q5_K: eight scales of 32 to 63 and eight minima equal to them, in the twelve bytes behind the two scales.

    Bytes 0-3 hold scales 0-3 and the two high bits of scales 4-7, bytes 4-7 the same of the minima, bytes 8-11 the four low bits of
    scale and minimum 4-7.
    """
    _two(0)(blocks, scales, minima)
    early = (blocks[:, 4:8] & 0x1F) | 0x20
    late = (blocks[:, 8:12] & 0x1F) | 0x20
    blocks[:, 4:8] = early | ((late & 0x30) << 2)
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (late & 0x0F) | ((late & 0x0F) << 4)


def _four_bit(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
    """Q2_K: sixteen bytes with a scale of 8 to 15 and an equal minimum."""
    _two(80)(blocks, scales, minima)
    chosen = (blocks[:, :16] & 0x07) | 0x08
    blocks[:, :16] = chosen | (chosen << 4)


def _eight_bit(blocks: Bytes, scales: Bytes, minima: Bytes) -> None:
    """Q6_K: sixteen signed bytes, 64 to 127 or -128 to -65."""
    _put(blocks, 208, scales)
    random = blocks[:, 192:208]
    blocks[:, 192:208] = (random & 0x3F) | (0x40 << ((random >> 6) & 0x01))


def _power(first: int, last: int) -> float:
    """Mean square of the whole numbers from ``first`` to ``last``."""
    return sum(number * number for number in range(first, last + 1)) / (last - first + 1)


def _spread(numbers: int) -> float:
    """Variance of 0 to ``numbers`` - 1."""
    return (numbers * numbers - 1) / 12


_HALVES = sum((step + 0.5) ** 2 for step in range(16)) / 16
"""Mean square of the 4-bit scales of the IQ2 and IQ3 formats, which are half-odd."""

# Mean squares of the tables in ggml-common.h (sum over all entries / number of entries).
_GRID_2XXS = 1094513 / 2048
_GRID_2XS = 2402206 / 4096
_GRID_2S = 4889327 / 8192
_GRID_3XXS = 974480 / 1024
_GRID_3S = 118112 / 2048
_TABLE_4NL = 72768 / 16

FORMATS: dict[str, Format] = {
    "Q4_0": Format(32, 18, math.sqrt(_power(-8, 7)), _one(0, signed=True)),
    "Q5_0": Format(32, 22, math.sqrt(_power(-16, 15)), _one(0, signed=True)),
    "Q5_1": Format(32, 24, math.sqrt(_spread(32)), _two(0), -15.5),
    "Q8_0": Format(32, 34, math.sqrt(_power(-128, 127)), _one(0, signed=True)),
    "Q2_K": Format(256, 84, math.sqrt(_power(8, 15) * _spread(4)), _four_bit, 1.5),
    "Q4_K": Format(256, 144, math.sqrt(_power(32, 63) * _spread(16)), _six_bit, 7.5),
    "Q5_K": Format(256, 176, math.sqrt(_power(32, 63) * _spread(32)), _six_bit, 15.5),
    "Q6_K": Format(256, 210, math.sqrt((_power(64, 127) + _power(65, 128)) / 2 * _power(-32, 31)), _eight_bit),
    "IQ2_XXS": Format(256, 66, 0.25 * math.sqrt(_HALVES * _GRID_2XXS), _one(0)),
    "IQ2_XS": Format(256, 74, 0.25 * math.sqrt(_HALVES * _GRID_2XS), _one(0)),
    "IQ2_S": Format(256, 82, 0.25 * math.sqrt(_HALVES * _GRID_2S), _one(0)),
    "IQ3_XXS": Format(256, 98, 0.5 * math.sqrt(_HALVES * _GRID_3XXS), _one(0)),
    "IQ3_S": Format(256, 110, 2 * math.sqrt(_HALVES * _GRID_3S), _one(0)),
    "IQ4_NL": Format(32, 18, math.sqrt(_TABLE_4NL), _one(0, signed=True)),
}
"""The formats by their names in gguf-py."""
