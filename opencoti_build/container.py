"""Appends a payload to an executable: host bytes, then an ordinary ZIP, and nothing behind it.

Not a byte of the host changes. What the host already lists as ZIP members (the programs of a universal host, the own files of an
Actually Portable Executable) is listed again in the new central directory, so the finished file is one archive. The first
payload entry is the index ``payload.json``, which the engine reads to choose and check its libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

from . import binaries, files, universal, zipformat
from .console import Console, Mode, count_of, human_bytes
from .errors import BinaryMismatch, ContainerError, DiskError, HeadroomError, ManifestError
from .hashing_writer import HashingWriter
from .zipformat import Entry, Method

INDEX_NAME = "payload.json"
INDEX_SCHEMA = 1
WINDOWS_LIMIT = 1 << 32
"""Windows refuses to start a program of 4 GiB or more."""

_BLOCK = 4 << 20
_OWN_KEYS = ("schema", "engine", "host", "libraries")


@dataclass(frozen=True)
class PayloadEntry:
    """A file to put in. ``library`` holds the facts for its row in payload.json (file, kind, variant, os, arch, abi, build...);
    None for an entry that is no library.

    ``sha256`` and ``crc32`` of the file, both or none: given, they are taken as they are and the file is read once; a caller
    gives them for files from a content-addressed store. ``invoke verify`` proves them again.
    """

    name: str
    path: Path
    method: Method = Method.STORED
    library: Mapping[str, Any] | None = None
    component: str = ""
    build: str = ""
    sha256: str | None = None
    crc32: int | None = None


@dataclass(frozen=True)
class AssembledEntry:
    """A member of the finished file. ``offset`` is the local header's; ``in_host`` tells members that came with the host."""

    name: str
    method: int
    size: int
    compressed_size: int
    offset: int
    data_offset: int
    crc32: int
    sha256: str
    component: str = ""
    build: str = ""
    in_host: bool = False


@dataclass(frozen=True)
class Assembled:
    """The finished file. ``headroom`` is what is left below the Windows limit, None where that was not asked about."""

    path: Path
    size: int
    sha256: str
    host_size: int
    host_sha256: str
    entries: tuple[AssembledEntry, ...]
    headroom: int | None = None


@dataclass(frozen=True)
class Host:
    """What is known of a host before it is copied: the first ``size`` bytes of ``path``."""

    path: Path
    size: int
    entries: tuple[Entry, ...] = ()
    sha256: str | None = None
    known: Mapping[str, str] = field(default_factory=dict)
    """sha256 of members that a side file lists."""
    index: Mapping[str, Any] = field(default_factory=dict)
    """Keys of an older payload.json that are not ours."""


def inspect_host(path: Path, *, replace: bool = False) -> Host:
    """Find out where the host block of ``path`` ends and what it lists. Reads headers only.

    Raises ContainerError for a file that is no executable, is signed, has bytes behind its end record, or holds a payload
    already (unless ``replace``).
    """
    with _open(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(binaries.HEAD_SIZE)
        if binaries.sniff(head) is None:
            raise ContainerError(f"{path} is not an executable (neither ELF nor PE nor Mach-O): nothing can be appended to it.")
        if binaries.certificate_table(head):
            raise ContainerError(f"{path} is signed: append to the unsigned file, and sign the finished one.")
        if universal.is_universal(head) and (host := _described(path, size)):
            return host
        scan = zipformat.scan(stream, size)
        if scan.directory is None and not scan.present:
            if universal.is_universal(head):
                universal.read_host(path)  # tells what is wrong with the side file
                raise ContainerError(f"{universal.side_file(path)} describes another file than {path.name}: build the host again.")
            _refuse_overlay(path, head)
            return Host(path, size)
        if scan.directory is None or scan.findings:
            raise ContainerError(f"{path} ends in a ZIP that nothing can be appended to: {scan.findings[0]}.", details="\n".join(scan.findings[1:]))
        index = scan.directory.get(INDEX_NAME)
        if index is None:
            return Host(path, size, scan.directory.entries)
        if not replace:
            raise ContainerError(f"{path} holds a payload already: ask for it to be replaced (--replace), or name the host that it was made of.")
        return _without_payload(path, stream, scan.directory, index)


def _refuse_overlay(path: Path, head: bytes) -> None:
    """A host without a ZIP must end where its own format says: what lies behind is junk, or a payload that was cut or damaged."""
    if head.startswith(b"MZqFpD") or head.startswith(b"jartsr"):
        return  # an Actually Portable Executable: several programs in one file, its headers tell the end of none
    try:
        extra = binaries.overlay(path)
    except BinaryMismatch as error:
        raise ContainerError(f"{path} is a damaged executable: {error.message}") from error
    if extra:
        raise ContainerError(f"{path} has {count_of(extra, 'byte')} beyond the end of its program that are no ZIP (junk, or a damaged payload): use the original file.")


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise ContainerError(f"Cannot read {path}: {error.strerror or error}.") from error


def _described(path: Path, size: int) -> Host | None:
    """A universal host whose side file describes just this file; None when it is rather a finished file or has no side file."""
    if not universal.side_file(path).is_file():
        return None
    block = universal.read_host(path)
    if block.size != size:
        return None
    if not all(0 < member.offset < member.data_offset <= member.data_offset + member.size <= size for member in block.members):
        raise ManifestError(f"{universal.side_file(path)} lists a member that does not lie in {path.name}: build the host again.")
    known = {member.name: member.sha256 for member in block.members}
    return Host(path, size, tuple(member.entry() for member in block.members), block.sha256, known)


def read_index(stream: BinaryIO, entry: Entry) -> dict[str, Any]:
    """payload.json of an archive. Raises ManifestError when it is not what its format says."""
    if entry.size > 16 << 20 or entry.compressed_size > 16 << 20:
        raise ManifestError(f"{INDEX_NAME} is {entry.size} bytes long, which no index is.")
    stream.seek(entry.data_offset)
    data = stream.read(entry.compressed_size)
    try:
        if entry.method == Method.DEFLATED:
            data = zlib.decompressobj(-15).decompress(data, entry.size + 1)
        value = json.loads(data.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates are no text: refused here, not where they are printed
        host = value["host"]
        if not isinstance(host["size"], int) or not isinstance(host["sha256"], str) or not isinstance(value["libraries"], list):
            raise TypeError("a value has the wrong type")
        for row in value["libraries"]:
            if not isinstance(row["name"], str) or not isinstance(row["size"], int) or not isinstance(row["sha256"], str):
                raise TypeError("a library row has a value of the wrong type")
        if value["schema"] != INDEX_SCHEMA or not isinstance(value["engine"], str):
            raise TypeError(f"its schema is {value['schema']!r}, this toolkit reads {INDEX_SCHEMA}")
    except (ValueError, KeyError, TypeError, zlib.error, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ManifestError(f"{INDEX_NAME} is not what its format says: {what}.") from error
    return value


def _without_payload(path: Path, stream: BinaryIO, directory: zipformat.Directory, index: Entry) -> Host:
    """The host inside a finished file."""
    value = read_index(stream, index)
    size = value["host"]["size"]
    inside = tuple(entry for entry in directory.entries if entry.end <= size)
    if not 0 < size <= index.header_offset or any(entry.header_offset < size < entry.end for entry in directory.entries):
        raise ContainerError(f"{path} says that its host block is {size} bytes long, which does not fit its entries: build it from its parts.")
    return Host(path, size, inside, value["host"]["sha256"], index={key: item for key, item in value.items() if key not in _OWN_KEYS})


# Measuring and compressing what goes in


@dataclass(frozen=True)
class _Source:
    """A payload entry with all its numbers; ``data`` is the file whose bytes are copied."""

    entry: PayloadEntry
    data: Path
    size: int
    compressed_size: int
    crc32: int
    sha256: str


def _measure(path: Path) -> tuple[int, int, str]:
    """Size, crc32 and sha256 of a file in one pass."""
    digest, crc, size = hashlib.sha256(), 0, 0
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with _open(path) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            crc = zipformat.crc32(view[:count], crc)
            size += count
    return size, crc, digest.hexdigest()


def _deflate(path: Path, folder: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=folder)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    with _open(path) as stream, os.fdopen(handle, "wb") as out:
        while block := stream.read(_BLOCK):
            out.write(packer.compress(block))
        out.write(packer.flush())
    return Path(name)


def _prepare(entry: PayloadEntry, scratch: Callable[[], Path]) -> _Source:
    try:
        size = entry.path.stat().st_size
    except OSError as error:
        raise ContainerError(f"Cannot read {entry.path}: {error.strerror or error}.") from error
    if entry.sha256 is not None and entry.crc32 is not None:
        crc, sha256 = entry.crc32, entry.sha256
    else:
        size, crc, sha256 = _measure(entry.path)
        if entry.sha256 not in (None, sha256) or entry.crc32 not in (None, crc):
            raise ContainerError(f"{entry.path} is not the file that was announced: sha256 {sha256}, expected {entry.sha256}.")
    if entry.method == Method.STORED:
        return _Source(entry, entry.path, size, size, crc, sha256)
    packed = _deflate(entry.path, scratch())
    return _Source(entry, packed, size, packed.stat().st_size, crc, sha256)


def _check_names(entries: Sequence[PayloadEntry], host: Host) -> None:
    seen = {entry.name.casefold(): f"in the host {host.path}" for entry in host.entries}
    seen.setdefault(INDEX_NAME.casefold(), "reserved for the index")
    for entry in entries:
        problem = zipformat.name_problem(entry.name) or ("names a folder" if entry.name.endswith("/") else None)
        if problem:
            raise ContainerError(f"{entry.path} cannot be put in as {entry.name!r}: the name {problem}.")
        if where := seen.get(entry.name.casefold()):
            raise ContainerError(f"{entry.path} cannot be put in as {entry.name!r}: that name is taken ({where}).")
        seen[entry.name.casefold()] = str(entry.path)
        if entry.method not in (Method.STORED, Method.DEFLATED):
            raise ContainerError(f"{entry.name} asks for compression method {entry.method}; 0 and 8 are allowed.")


# Writing


def _index_bytes(engine: str, host: Host, host_sha256: str, sources: Sequence[_Source]) -> bytes:
    libraries = []
    for source in sources:
        if source.entry.library is None:
            continue
        facts = {"name": source.entry.name, "file": source.entry.name} | dict(source.entry.library)
        if source.entry.build:
            facts.setdefault("build", source.entry.build)
        libraries.append(facts | {"name": source.entry.name, "size": source.size, "sha256": source.sha256})
    value = {"schema": INDEX_SCHEMA, "engine": engine, "host": {"size": host.size, "sha256": host_sha256}, "libraries": libraries} | dict(host.index)
    try:
        return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise ContainerError(f"The facts about a library cannot be written as JSON: {error}.") from error


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Callable[[], Path]]:
    """A temporary folder that appears when it is first asked for."""
    made: list[Path] = []
    guard = threading.Lock()

    def make() -> Path:
        with guard:
            if not made:
                made.append(Path(tempfile.mkdtemp(prefix=".append.", suffix=".tmp", dir=folder)))
        return made[0]

    try:
        yield make
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)


def append(
    host: Path,
    out: Path,
    entries: Sequence[PayloadEntry],
    *,
    engine: str,
    replace: bool = False,
    windows_limit: bool = False,
    console: Console | None = None,
    sync: bool = True,
) -> Assembled:
    """Write ``out`` = the host block of ``host`` + index + ``entries`` (in this order) + central directory; mode 755.

    The bytes depend on the inputs alone: not on folder, clock, time zone, umask or locale (deflated entries depend on the zlib
    in use). ``out`` may be ``host``. ``windows_limit`` refuses a file of 4 GiB or more. ``sync`` waits until the disk has it.
    Raises ContainerError for hosts, names or files that cannot be joined, HeadroomError at the limit, DiskError when the disk is
    full.
    """
    found = inspect_host(host, replace=replace)
    _check_names(entries, found)
    with files.disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(out.parent) as scratch, ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        try:
            sources = list(pool.map(lambda entry: _prepare(entry, scratch), entries))
        except OSError as error:
            raise DiskError(f"Cannot prepare the payload beside {out}: {error.strerror or error}.") from error
        total = _planned_size(engine, found, sources)
        headroom = _check_limit(out, total, sources) if windows_limit else None
        free = shutil.disk_usage(out.parent).free
        if total > free:
            raise DiskError(f"{out} needs {human_bytes(total)}, and {out.parent} has {human_bytes(free)} free.")
        talk = console or Console(mode=Mode.QUIET)
        with talk.progress(f"writing {out.name}", total, unit="bytes") as meter, files.atomic_file(out, mode=0o755, sync=sync) as stream:
            result = _write(stream, out, found, sources, engine, meter.advance, headroom, sync=sync)
    if result.size != total:
        raise ContainerError(f"{out} is {result.size} bytes long instead of the {total} that were planned: an input changed meanwhile.")
    if headroom is not None and console is not None:
        console.info(f"{out.name}: {human_bytes(headroom)} below the 4 GiB limit of Windows")
    return result


def _check_limit(out: Path, total: int, sources: Sequence[_Source]) -> int:
    if total >= WINDOWS_LIMIT:
        largest = max(sources, key=lambda source: source.compressed_size, default=None)
        hint = f"; its largest entry is {largest.entry.name} with {human_bytes(largest.compressed_size)}" if largest else ""
        raise HeadroomError(f"{out.name} would be {total} bytes long, {total - WINDOWS_LIMIT + 1} more than Windows starts{hint}: leave an entry out.")
    return WINDOWS_LIMIT - 1 - total


def _planned_size(engine: str, host: Host, sources: Sequence[_Source]) -> int:
    """The finished file's size; the index has the same length whatever the hash in it is."""
    laid_out, end = _layout(host, len(_index_bytes(engine, host, "0" * 64, sources)), 0, sources)
    return end + len(zipformat.directory_bytes([*host.entries, *laid_out], end, comment=engine.encode()))


def _layout(host: Host, index_size: int, index_crc: int, sources: Sequence[_Source]) -> tuple[list[Entry], int]:
    """Where everything goes: entries and the offset behind the last."""
    entries: list[Entry] = []
    position = host.size

    def place(name: str, size: int, packed: int, crc: int, method: Method, mode: int) -> None:
        nonlocal position
        data = position + zipformat.local_header_size(name, size, packed)
        entries.append(Entry(name, size, crc, position, data, method, packed, mode))
        position = data + packed

    place(INDEX_NAME, index_size, index_size, index_crc, Method.STORED, zipformat.MODE_DATA)
    for source in sources:
        mode = zipformat.MODE_PROGRAM if source.entry.library is not None else zipformat.MODE_DATA
        place(source.entry.name, source.size, source.compressed_size, source.crc32, Method(source.entry.method), mode)
    return entries, position


def _write(
    stream: IO[bytes],
    out: Path,
    host: Host,
    sources: Sequence[_Source],
    engine: str,
    advance: Callable[[int], None],
    headroom: int | None,
    *,
    sync: bool,
) -> Assembled:
    sink = HashingWriter(stream, advance)

    def copy(path: Path, size: int, name: Path) -> None:
        with _open(path) as source:
            if sink.copy(source, size) < size:
                raise ContainerError(f"{name} became shorter while it was copied: run the same command again.")
            if name != host.path and os.fstat(source.fileno()).st_size != size:
                raise ContainerError(f"{name} became longer while it was copied: run the same command again.")

    try:
        copy(host.path, host.size, host.path)
        host_sha256 = sink.digest()
        if host.sha256 not in (None, host_sha256):
            raise ContainerError(f"The host block of {host.path} has sha256 {host_sha256}, but it was built with {host.sha256}: build the host again.")
        with _open(host.path) as source:
            host_entries = [_host_entry(source, entry, host) for entry in host.entries]
        index = _index_bytes(engine, host, host_sha256, sources)
        laid_out, end = _layout(host, len(index), zipformat.crc32(index), sources)
        for number, entry in enumerate(laid_out):
            sink.write(zipformat.local_header(entry.name, entry.size, entry.crc32, method=entry.method, compressed_size=entry.compressed_size))
            if number == 0:
                sink.write(index)
                continue
            made = sources[number - 1]
            copy(made.data, entry.compressed_size, made.entry.path)
        # The engine's name as comment; with one, file(1) calls a Windows program that carries a ZIP a program, without it a ZIP.
        sink.write(zipformat.directory_bytes([*host.entries, *laid_out], end, comment=engine.encode()))
        if sync:
            os.fsync(stream.fileno())  # the disk takes it while the other thread is still hashing
        sha256 = sink.digest()
    finally:
        sink.close()
    stream.flush()
    zipformat.read_directory(stream, sink.position)  # type: ignore[arg-type]
    rows = list(host_entries)
    for number, entry in enumerate(laid_out):
        if number == 0:
            rows.append(_row(entry, hashlib.sha256(index).hexdigest(), "index", ""))
        else:
            source_ = sources[number - 1]
            rows.append(_row(entry, source_.sha256, source_.entry.component, source_.entry.build))
    return Assembled(out, sink.position, sha256, host.size, host_sha256, tuple(rows), headroom)


def _row(entry: Entry, sha256: str, component: str, build: str, *, in_host: bool = False) -> AssembledEntry:
    return AssembledEntry(
        entry.name, entry.method, entry.size, entry.compressed_size, entry.header_offset, entry.data_offset, entry.crc32, sha256, component, build, in_host
    )


def _host_entry(stream: BinaryIO, entry: Entry, host: Host) -> AssembledEntry:
    sha256 = host.known.get(entry.name)
    if sha256 is None:
        digest = hashlib.sha256()
        for block in content(stream, entry):
            digest.update(block)
        sha256 = digest.hexdigest()
    return _row(entry, sha256, "host", "", in_host=True)


def content(stream: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """The uncompressed bytes of an entry, in blocks. Raises ContainerError when deflate data is damaged or too short or long."""
    unpacker = zlib.decompressobj(-15) if entry.method == Method.DEFLATED else None
    stream.seek(entry.data_offset)
    left, given = entry.compressed_size, 0
    try:
        while left:
            block = stream.read(min(left, _BLOCK))
            if not block:
                raise ContainerError(f"Entry {entry.name!r} is cut off.")
            left -= len(block)
            if unpacker is None:
                given += len(block)
                yield block
                continue
            while block:
                piece = unpacker.decompress(block, _BLOCK)
                block = unpacker.unconsumed_tail
                given += len(piece)
                if given > entry.size:
                    raise ContainerError(f"Entry {entry.name!r} unpacks to more than the {entry.size} bytes it promises.")
                yield piece
                if unpacker.eof and (block or unpacker.unused_data or left):
                    raise ContainerError(f"Entry {entry.name!r} has bytes behind its deflate data.")
        if unpacker is not None and (not unpacker.eof or given != entry.size):
            raise ContainerError(f"Entry {entry.name!r} does not unpack to the {entry.size} bytes it promises.")
    except zlib.error as error:
        raise ContainerError(f"Entry {entry.name!r} has damaged deflate data: {error}.") from error
