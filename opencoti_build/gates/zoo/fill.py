"""The numbers of a tensor: a pure function of the family's and the tensor's name, the same bytes on every machine.

Randomness is Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), one stream a tensor, keyed by a hash
of the names. Only raw 64-bit words are taken from numpy, whose distributions may change between versions; how a word becomes a number
is spelled out here, in whole numbers and single correctly rounded operations. No logarithm, no sine: those differ between libraries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .architectures import Given, Ramp, Random, Scale, Tensor
from .blocks import FORMATS, random_blocks

CHUNK = 1 << 20
"""Weights in memory at a time; a multiple of every format's block."""

_BELL_DEVIATION = math.sqrt(4 * (65536**2 - 1) / 12)
"""Deviation of the sum of four independent numbers below 65536."""

Array = NDArray[Any]


def pieces(family: str, name: str, tensor: Tensor, type_name: str, *, exact: bool, quantize: Any) -> Iterator[Array]:
    """The bytes of a tensor, in order, as arrays of at most ``CHUNK`` weights.

    ``exact`` makes Q8_0 from the same numbers as F32 and F16 (``quantize`` is gguf-py's for that type); otherwise the blocks of a
    quantised type are random themselves, which is far quicker.
    """
    words = np.random.Philox(key=_key(family, name))
    if not isinstance(tensor.fill, Random):
        yield _small(words, tensor).astype("<f4" if type_name == "F32" else "<f2")
        return
    deviation = tensor.fill.deviation
    for start in range(0, tensor.elements, CHUNK):
        count = min(CHUNK, tensor.elements - start)
        if type_name in FORMATS and not exact:
            kind = FORMATS[type_name]
            yield random_blocks(kind, words.random_raw(count // kind.weights * kind.words).reshape(-1, kind.words), deviation)
            continue
        numbers = bell(words.random_raw(count), deviation)
        if type_name == "F32":
            yield numbers.astype("<f4", copy=False)
            continue
        halves = numbers.astype("<f2")
        # Quantised from the half-precision numbers, as a converter's user would; in long rows, as gguf-py is slow with short ones.
        yield halves if type_name == "F16" else quantize(halves.astype(np.float32).reshape(-1, math.gcd(count, 1 << 14)))


def bell(words: NDArray[np.uint64], deviation: float) -> NDArray[np.float32]:
    """Numbers of mean zero from words: the sum of a word's four 16-bit parts, which is close to a normal distribution."""
    parts = words.astype("<u8", copy=False).view("<u2")
    sums = parts[0::4].astype(np.int32)
    for part in (1, 2, 3):
        sums += parts[part::4]
    sums -= 2 * 65535
    # Below 2^18, so exact in single precision; the product is the one rounding.
    return sums.astype(np.float32) * np.float32(deviation / _BELL_DEVIATION)


def _key(family: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"opencoti zoo\0{family}\0{name}".encode()).digest()[:16], "little")


def _small(words: np.random.Philox, tensor: Tensor) -> Array:
    """Vectors: norms, biases of a pattern, given numbers."""
    fill, count = tensor.fill, tensor.elements
    if isinstance(fill, Scale):
        table = np.array([fill.gain * (192 + step) / 256 for step in range(128)], dtype=np.float32)
        raw = words.random_raw(count)
        numbers = table[(raw & np.uint64(127)).astype(np.intp)]
        return np.where(raw & np.uint64(128), -numbers, numbers) if fill.signed else numbers
    if isinstance(fill, Ramp):
        span = fill.last - fill.first
        return np.array([fill.first + span * index / max(1, count - 1) for index in range(count)], dtype=np.float32)
    assert isinstance(fill, Given)
    return np.array(fill.values, dtype=np.float32)
