"""The configurations of the gate as data: ``gate/off.yaml``, checked while it is read.

A configuration is written as the probe takes it: ``fa=on,kv=split,k=q8_0,v=q8_0,seq=4,mtp=off,threads=1``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...schema import Node, read_yaml

SCHEMA = 1

FIELDS = ("fa", "kv", "k", "v", "seq", "mtp", "threads")
"""The parts of a configuration, in their order."""

_SIZES = ("context", "batch", "ubatch", "prompt", "max_window", "decode", "rounds")
_TYPE = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Configuration:
    """One cell of the matrix. ``k`` and ``v`` are types of the cache as ggml spells them."""

    fa: str
    kv: str
    k: str
    v: str
    seq: int
    mtp: bool
    threads: int

    @property
    def name(self) -> str:
        """As the probe takes it."""
        values = (self.fa, self.kv, self.k, self.v, self.seq, "on" if self.mtp else "off", self.threads)
        return ",".join(f"{field}={value}" for field, value in zip(FIELDS, values, strict=True))

    def fits(self, wishes: Sequence[str]) -> bool:
        """Whether it has every ``FIELD=VALUE`` of ``wishes``."""
        return set(wishes) <= set(self.name.split(","))


@dataclass(frozen=True)
class Matrix:
    """Sizes for the probe's command line, and the configurations in the order they are run; ``extra`` are those beside the matrix."""

    sizes: tuple[tuple[str, int], ...]
    regular: tuple[Configuration, ...]
    extra: tuple[Configuration, ...]

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """All of them."""
        return (*self.regular, *self.extra)

    def words(self) -> list[str]:
        """The sizes as words for the probe."""
        return [word for name, size in self.sizes for word in (f"--{name.replace('_', '-')}", str(size))]

    def chosen(self, wishes: Sequence[str], *, mtp: bool, extra: bool = True) -> tuple[Configuration, ...]:
        """The configurations that have all of ``wishes``; those with multi-token prediction only if ``mtp``, the extra ones only if ``extra``."""
        return tuple(item for item in (self.configurations if extra else self.regular) if (mtp or not item.mtp) and item.fits(wishes))


def load(path: Path) -> Matrix:
    """Read the file. Raises DataError naming the place and what is wrong there."""
    root = Node(read_yaml(path), path.name).mapping()
    root.get("schema").number(minimum=SCHEMA, maximum=SCHEMA)
    workload = root.get("workload")
    sizes = tuple((name, workload.get(name).number(minimum=1, maximum=1 << 20)) for name in _SIZES)
    workload.done()
    regular = dict.fromkeys(_product(root.get("matrix")))
    extra = dict.fromkeys(parse(item) for item in root.get("extra").items(empty=True))
    root.done()
    return Matrix(sizes, tuple(regular), tuple(item for item in extra if item not in regular))


def _product(node: Node) -> list[Configuration]:
    attention: list[tuple[str, str, str]] = []
    for item in node.get("attention").items():
        fa = item.get("fa").one_of(("on", "off", "auto"))
        for pair in item.get("cache").items():
            types = pair.text().split()
            if len(types) != 2 or not all(_TYPE.fullmatch(name) for name in types):
                raise pair.fail(f"expected the types of K and V, such as 'q8_0 q8_0', found {pair.value!r}")
            attention.append((fa, types[0], types[1]))
        item.done()
    kv = [item.one_of(("unified", "split")) for item in node.get("kv").items()]
    sequences = [item.number(minimum=1, maximum=64) for item in node.get("sequences").items()]
    mtp = [item.one_of(("on", "off")) == "on" for item in node.get("mtp").items()]
    threads = [item.number(minimum=1, maximum=64) for item in node.get("threads").items()]
    node.done()
    return [
        Configuration(fa, cache, k, v, seq, head, count)
        for head in mtp
        for count in threads
        for fa, k, v in attention
        for cache in kv
        for seq in sequences
    ]


def parse(node: Node) -> Configuration:
    """A configuration from its text. Raises DataError."""
    text = node.text()
    values = dict(part.partition("=")[::2] for part in text.split(","))
    if tuple(values) != FIELDS:
        raise node.fail(f"a configuration is {','.join(f'{name}=...' for name in FIELDS)}, found {text!r}")

    def one(name: str, known: Iterable[str]) -> str:
        return Node(values[name], node.where, f"{node.path}.{name}").one_of(known)

    def count(name: str) -> int:
        if not (values[name].isascii() and values[name].isdigit() and 0 < int(values[name][:3]) <= 64):
            raise node.fail(f"{name} is {values[name]!r}; expected a number from 1 to 64")
        return int(values[name])

    if not (_TYPE.fullmatch(values["k"]) and _TYPE.fullmatch(values["v"])):
        raise node.fail(f"{values['k']!r} and {values['v']!r} are not types of a cache")
    return Configuration(
        one("fa", ("on", "off", "auto")), one("kv", ("unified", "split")), values["k"], values["v"], count("seq"), one("mtp", ("on", "off")) == "on", count("threads")
    )


def wishes(text: str) -> tuple[str, ...]:
    """``FIELD=VALUE,...`` of the command line; empty means every configuration. Raises UsageError for a field there is none of."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in found:
        name, equals, _ = part.partition("=")
        if not equals or name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]}=..." if near else f"known are {', '.join(FIELDS)}"
            raise UsageError(f"--config {part!r}: {hint}; write it as fa=on,kv=split,k=q8_0,seq=4.")
    return found
