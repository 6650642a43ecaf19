"""Reads a large file once and computes everything that is asked of it meanwhile, each kind of sum in a thread of its own.

Reading twice costs more than hashing; and hashlib and zlib work outside the interpreter's lock, so the threads really run side
by side. Blocks are handed round in a fixed set of buffers: memory does not grow with the file.
"""

from __future__ import annotations

import abc
import hashlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from . import zipformat

_BLOCK = 4 << 20
_BUFFERS = 6


class Consumer(Protocol):
    """Gets the file's blocks in order, in one thread."""

    def feed(self, position: int, block: memoryview) -> None:
        """Take the block that starts at ``position``; the memory is only valid during the call."""


@dataclass(frozen=True)
class Range:
    """``size`` bytes from ``start``."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.start + self.size


class PrefixHash:
    """sha256 of the first ``stops`` bytes, for several stops in ascending order, over a file some of whose bytes are replaced.

    ``patches`` maps offsets to bytes that are hashed instead of the file's (what a signer filled in, say).
    """

    def __init__(self, stops: Sequence[int], patches: Mapping[int, bytes] | None = None) -> None:
        self.digests: dict[int, str] = {}
        self._stops = sorted(set(stops))
        self._patches = dict(patches or {})
        self._hash = hashlib.sha256()
        self._record(0)

    def _record(self, position: int) -> None:
        while self._stops and self._stops[0] == position:
            self.digests[self._stops.pop(0)] = self._hash.copy().hexdigest()

    def feed(self, position: int, block: memoryview) -> None:
        """See Consumer."""
        patched = [(at, data) for at, data in self._patches.items() if at < position + len(block) and at + len(data) > position]
        if patched:
            copy = bytearray(block)
            for at, data in patched:
                for index, value in enumerate(data):
                    if position <= at + index < position + len(block):
                        copy[at + index - position] = value
            block = memoryview(copy)
        done = 0
        while done < len(block) and self._stops:
            step = min(len(block), self._stops[0] - position) - done
            self._hash.update(block[done : done + step])
            done += step
            self._record(position + done)


class _RangeWork(abc.ABC):
    """Calls ``update(index, block)`` for the parts of each range, in order. Ranges may not overlap."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._order = sorted(range(len(ranges)), key=lambda index: ranges[index].start)
        self._ranges = ranges
        self._at = 0

    @abc.abstractmethod
    def update(self, index: int, block: memoryview) -> None:
        """One more part of the range ``index``."""

    def feed(self, position: int, block: memoryview) -> None:
        """See Consumer."""
        end = position + len(block)
        number = self._at
        while number < len(self._order):
            item = self._ranges[self._order[number]]
            if item.start >= end:
                break
            if item.end > position:
                self.update(self._order[number], block[max(0, item.start - position) : item.end - position])
            if item.end <= end and number == self._at:
                self._at += 1
            number += 1


class RangeHashes(_RangeWork):
    """sha256 of each range; ``hexdigests`` in the order of the ranges."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(ranges)
        self._hashes = [hashlib.sha256() for _ in ranges]

    def update(self, index: int, block: memoryview) -> None:
        """Continue one range."""
        self._hashes[index].update(block)

    @property
    def hexdigests(self) -> list[str]:
        """The results, complete when the file was read to its end."""
        return [item.hexdigest() for item in self._hashes]


class RangeChecksums(_RangeWork):
    """CRC-32 of each range; ``values`` in the order of the ranges."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(ranges)
        self.values = [0] * len(ranges)

    def update(self, index: int, block: memoryview) -> None:
        """Continue one range."""
        self.values[index] = zipformat.crc32(block, self.values[index])


class _Lane(threading.Thread):
    """One consumer's thread. An exception in it is kept and raised by ``finish``."""

    def __init__(self, consumer: Consumer, release: Callable[[bytearray], None]) -> None:
        super().__init__(name=type(consumer).__name__, daemon=True)
        self._consumer = consumer
        self._release = release
        self._failure: BaseException | None = None
        self.blocks: queue.SimpleQueue[tuple[int, bytearray, int] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (item := self.blocks.get()) is not None:
            position, buffer, count = item
            try:
                if self._failure is None:
                    self._consumer.feed(position, memoryview(buffer)[:count])
            except BaseException as error:  # carried over to the caller's thread
                self._failure = error
            finally:
                self._release(buffer)

    def finish(self) -> None:
        self.blocks.put(None)
        self.join()
        if self._failure is not None:
            raise self._failure


def run(stream: BinaryIO, consumers: Sequence[Consumer], *, advance: Callable[[int], None] | None = None) -> int:
    """Read ``stream`` from its start to its end through all consumers; return the number of bytes. OSError passes through."""
    free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    holders: dict[int, int] = {}
    guard = threading.Lock()
    for _ in range(_BUFFERS):
        free.put(bytearray(_BLOCK))

    def release(buffer: bytearray) -> None:
        with guard:
            holders[id(buffer)] -= 1
            if holders[id(buffer)] == 0:
                free.put(buffer)

    lanes = [_Lane(consumer, release) for consumer in consumers]
    for lane in lanes:
        lane.start()
    position = 0
    try:
        stream.seek(0)
        while True:
            buffer = free.get()
            count = stream.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                break
            holders[id(buffer)] = len(lanes)
            for lane in lanes:
                lane.blocks.put((position, buffer, count))
            position += count
            if advance is not None:
                advance(count)
    finally:
        problems = []
        for lane in lanes:
            try:
                lane.finish()
            except Exception as error:
                problems.append(error)
    if problems:
        raise problems[0]
    return position
